"""A clause: one normative sentence, and the property that checks it.

A clause is a function in `properties/`, in its operator's file. Its docstring is the sentence. From that one function
come a line in `spec-lm clauses`, an item in pytest, a row in every report, and a Hypothesis test of anybody's function:

    test_mine = CLAUSES["softmax.shift_invariance"].test(my_softmax)
"""

import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from math import inf
from typing import Any, Literal
from zlib import crc32

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis.strategies import SearchStrategy

from spec_lm.conformance.operators import OPERATORS, Call, Checked
from spec_lm.conformance.strategies import CASES, Domain, Draw, NotJudged, Size, Where, build
from spec_lm.conformance.tolerance import OutOfMemory, Violation

Level = Literal["must", "should"]
EVERY = tuple(OPERATORS)


class RegistrationError(Exception):
    """A clause or a fault was registered wrongly; the text names the file, the function and the mend."""


@dataclass(frozen=True)
class Given:
    """What a clause draws, by parameter; it can be applied again and again, each time over another domain."""

    draws: Mapping[str, Draw | SearchStrategy[Any]]

    def over(self, domain: Domain) -> Callable[[Callable[..., None]], Callable[[], None]]:
        """`hypothesis.given` of these parameters, drawn from the domain."""
        drawn = {n: d if isinstance(d, SearchStrategy) else d(domain, n) for n, d in self.draws.items()}
        return hypothesis.given(**drawn)


def given(**draws: Draw | SearchStrategy[Any]) -> Given:
    """What a clause draws: strategies of this package (`tensors("*batch n")`) or of Hypothesis, by parameter."""
    return Given(draws)


@dataclass(frozen=True)
class Clause:
    """One normative sentence about one operator and the property that checks it.

    Args:
        operator: which it is about.
        name: in the field's words; never changes its meaning.
        body: the property; its first parameter is the operator, the others are drawn.
        given: what is drawn.
        catches: the bug the clause exists for.
        level: MUST, or SHOULD where the source is silent.
        source: the section of the specification it comes from.
        where: the sizes it needs.
        sizes: those it draws from, where they are not its operator's.
        cases: required partitions of the sizes by name; each is searched first, by itself.
        feature: what an implementation lacks where this fails ("mask none", or each failing case's name); then the
            operator's other clauses leave it out of their draws.
        dtype: pinned, where the clause is about one dtype; else the run's.
        dtypes: those in which it can be judged; by default all.
        enough: this many examples serve, where what is drawn hardly matters; 0 stands for the run's number.
    """

    operator: str
    name: str
    body: Callable[..., None] = field(repr=False)
    given: Given = field(repr=False)
    catches: str
    level: Level = "must"
    source: str = ""
    where: Where | None = field(default=None, repr=False)
    sizes: tuple[Size, ...] = field(default=(), repr=False)
    cases: Mapping[str, Where] = field(default_factory=dict, repr=False)
    feature: str = ""
    dtype: str = ""
    dtypes: tuple[str, ...] = ()
    enough: int = 0

    @property
    def id(self) -> str:
        """operator.name"""
        return f"{self.operator}.{self.name}"

    @property
    def sentence(self) -> str:
        """The normative sentence: the docstring, on one line."""
        return " ".join((self.body.__doc__ or "").split())

    def domain(self, domain: Domain | None = None, case: str = "") -> Domain:
        """The run's domain narrowed to what this clause, and one of its cases, needs."""
        base = domain or Domain(self.operator)
        dtype = self.dtype or base.dtype
        if dtype not in base.supports.get("dtype", (dtype,)):
            raise NotJudged(f"its declared support has no {dtype}")
        if self.dtypes and dtype not in self.dtypes:
            raise NotJudged(f"it can be judged in {', '.join(self.dtypes)} only")
        where = self.cases[case] if case else None
        return replace(base, operator=self.operator, where=self.where, case=where, dtype=dtype, table=self.sizes)

    def test(
        self,
        implementation: Any,
        *,
        domain: Domain | None = None,
        case: str = "",
        examples: int = 50,
        search: "Search | None" = None,
        shrink: bool = True,
    ) -> Callable[[], None]:
        """The Hypothesis test of this clause on an implementation: the one builder of such a test.

        Args:
            implementation: the operator as a function of the plain signature, or a `Checked` one.
            domain: what may be drawn; by default everything, in float32.
            case: draw only this required partition.
            examples: how many to draw.
            search: what has been seen so far; shared by the cases of one clause.
            shrink: look for a smaller counterexample; False only tells whether there is one.

        Returns:
            A test without parameters, decorated by `hypothesis.given` and `settings`; `seed` can be applied to it.

        Raises:
            NotJudged: nothing this clause needs is left in the domain, or it is not about this dtype.
        """
        search = search or Search(self, as_checked(implementation, self.operator))
        narrowed = self.domain(domain, case)

        def attempt(_size: Size, **recipes: Any) -> None:
            search.judge(recipes, _size)

        attempt.__name__ = attempt.__qualname__ = self.name
        attempt.__doc__ = self.sentence
        test = Given({**self.given.draws, "_size": narrowed.sizes}).over(narrowed)(attempt)
        phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
        return hypothesis.settings(**_SETTINGS, max_examples=examples, phases=phases)(test)

    def run(self, checked: Checked, recipes: Mapping[str, Any]) -> None:
        """The property once, on fresh arguments built from the recipes.

        Raises:
            Violation: the implementation breaks the clause there.
        """
        self.body(checked, **{name: build(recipe) for name, recipe in recipes.items()})


# Every setting is passed explicitly, since CI=1 swaps profiles; Hypothesis's globals are never touched.
_SETTINGS: dict[str, Any] = {
    "database": None,
    "deadline": None,
    "derandomize": False,
    "print_blob": False,
    "report_multiple_bugs": False,
    "stateful_step_count": 50,
    "suppress_health_check": tuple(HealthCheck),
    "verbosity": Verbosity.quiet,
}
MOST_CALLS_TO_SHRINK = 250
MOST_CALLS_FOR_SIZES = 100
MOST_EARLIER = 24


def as_checked(implementation: Any, operator: str) -> Checked:
    """An implementation's operator as a clause calls it."""
    if isinstance(implementation, Checked):
        return implementation
    return Checked(OPERATORS[operator], implementation)


@dataclass
class Search:
    """One search for a counterexample, and what it saw.

    Hypothesis asks again for examples it has seen, and expects the same answer: answers are kept by recipe, which makes
    a nondeterministic implementation harmless to it. After the first violation only the same kind counts, so that
    shrinking stays with one bug; and after `MOST_CALLS_TO_SHRINK` more calls what was not seen passes, so that a slow
    implementation still shrinks in bounded work and to the same minimum on every machine. When its time is up, nothing
    is called any more.

    Args:
        clause: whose counterexample is looked for.
        checked: the implementation's operator.
        on_first: told the first violation, before a smaller one is looked for.
        ends: when its time is up, by `time.monotonic`.
        cut_short: whether something was left out since its time was up.
        out_of_memory: that memory ran out before any violation; then nothing is called any more.
    """

    clause: Clause
    checked: Checked
    examples: int = 0
    worst: float = 0.0
    kind: str | None = None
    size: Size | None = None
    calls_to_shrink: int = 0
    reached: Counter[str] = field(default_factory=Counter)
    passed_over: int = 0
    reason: NotJudged | None = None
    on_first: Callable[[Violation], None] = lambda violation: None
    ends: float = inf
    cut_short: bool = False
    out_of_memory: str = ""
    _seen: dict[Any, Violation | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.checked = replace(self.checked, observe=self._observe)

    def judge(self, recipes: dict[str, Any], size: Size) -> None:
        """Run the clause on these recipes, drawn at this size, or repeat what it came to.

        Raises:
            Violation: of the kind first found; it carries its recipes.
        """
        if self.out_of_memory:
            return
        key = tuple(recipes.items())
        if key not in self._seen:
            if time.monotonic() > self.ends:
                self.cut_short = True
                return
            if self.kind is not None:
                self.calls_to_shrink += 1
                if self.calls_to_shrink > MOST_CALLS_TO_SHRINK:
                    return
            else:
                self.examples += 1
                self.reached.update(name for name, holds in self.clause.cases.items() if holds(size))
            self._seen[key] = self._attempt(recipes)
        violation = self._seen[key]
        if violation is not None and violation.kind == self.kind:
            self.size = size
            raise violation

    def _attempt(self, recipes: dict[str, Any]) -> Violation | None:
        try:
            self.clause.run(self.checked, recipes)
        except Violation as violation:
            violation.recipes = recipes
            if self.kind is None:
                self.kind = violation.kind
                self.on_first(violation)
            return violation
        except NotJudged as reason:
            self.passed_over, self.reason = self.passed_over + 1, reason
        except OutOfMemory as reason:
            self.out_of_memory = "" if self.kind else str(reason)
        return None

    @property
    def judged(self) -> int:
        """How many examples were judged, up to the first violation."""
        return self.examples - self.passed_over

    def _observe(self, ratio: float) -> None:
        if self.kind is None and ratio > self.worst:
            self.worst = ratio

    def start_again(self) -> None:
        """Look for any kind of violation again: each case of a feature is judged by itself."""
        self.kind, self.calls_to_shrink = None, 0

    def allow_more_calls(self) -> None:
        """Look for the same kind of violation again, at other sizes, in a few calls more."""
        self.calls_to_shrink = MOST_CALLS_TO_SHRINK - MOST_CALLS_FOR_SIZES

    def recorded(self, recipes: Mapping[str, Any]) -> tuple[Violation | None, list[Call]]:
        """Run the clause once more: what it comes to, and the calls it makes."""
        calls: list[Call] = []
        return self._unobserved(replace(self.checked, calls=calls), recipes), calls

    def _unobserved(self, checked: Checked, recipes: Mapping[str, Any]) -> Violation | None:
        try:
            self.clause.run(replace(checked, observe=lambda ratio: None), recipes)
        except Violation as violation:
            violation.recipes = dict(recipes)
            return violation
        except (NotJudged, OutOfMemory):
            pass
        return None

    def again(self, recipes: Mapping[str, Any]) -> Violation | None:
        """What the clause comes to on other recipes, where that is a violation of the kind first found."""
        if time.monotonic() > self.ends:
            return None
        is_named = self.kind is not None and self.kind.startswith("convention")
        violation = self._unobserved(replace(self.checked, names_conventions=is_named), recipes)
        return violation if violation is not None and violation.kind == self.kind else None

    def earlier_calls(self) -> Iterator[Call]:
        """A call for each of the first examples, other than the last of them."""
        for key in list(self._seen)[:MOST_EARLIER]:
            yield from self.recorded(dict(key))[1][:1]

    def is_nondeterministic(self, recipes: dict[str, Any], kind: str) -> bool:
        """Whether three more runs of a counterexample come to anything else."""
        kinds = set()
        for _ in range(3):
            try:
                self.clause.run(self.checked, recipes)
                kinds.add(None)
            except Violation as violation:
                kinds.add(violation.kind)
            except OutOfMemory:
                kinds.add("out of memory")
        return kinds != {kind}


def seed_of(clause: Clause, seed: int, case: str = "") -> int:
    """The seed of a clause's search: its own, the same on every machine."""
    return crc32(f"{seed} {clause.id} {case}".encode())


# ------------------------------------------------------------------------------------------------------------ register

_REGISTER: dict[str, Clause] = {}


class _Clauses(Mapping[str, Clause]):
    """All clauses by id; the specification is loaded on first use."""

    def _loaded(self) -> dict[str, Clause]:
        load_specification()
        return _REGISTER

    def __getitem__(self, clause_id: str) -> Clause:
        return self._loaded()[clause_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded())

    def __len__(self) -> int:
        return len(self._loaded())


CLAUSES: Mapping[str, Clause] = _Clauses()


@cache
def load_specification() -> None:
    """Import every file of the specification; the register then holds all clauses, low operators first."""
    import_module("spec_lm.properties").load()


def nearest(word: str, known: list[str]) -> str:
    """ "; did you mean ..." where something known is near, for the end of an error."""
    matches = get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else ""


def clause(
    operators: str | tuple[str, ...],
    given: Given,
    *,
    catches: str,
    source: str = "",
    level: Level = "must",
    where: Where | None = None,
    sizes: Mapping[str, tuple[Size, ...]] | None = None,
    cases: Mapping[str, Where] | None = None,
    feature: str = "",
    dtype: str = "",
    dtypes: tuple[str, ...] = (),
    enough: int = 0,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a clause of one operator, or of several (one id each); the arguments are `Clause`'s.

    `sizes` are given by operator, as `BLOCK_SIZES` is.

    Raises:
        RegistrationError: duplicate id, no docstring, unknown operator or level, or draws that are not its parameters.
    """

    def register(body: Callable[..., None]) -> Callable[..., None]:
        _validate(body, given, level)
        for operator in (operators,) if isinstance(operators, str) else operators:
            _known_operator(operator, body)
            table = (sizes or {}).get(operator, ())
            partitions = CASES.get(operator, {}) if cases is None and not table else cases or {}
            new = Clause(
                operator,
                body.__name__,
                body,
                given,
                catches=catches,
                level=level,
                source=source,
                where=where,
                sizes=table,
                cases=_reachable(operator, where, table, partitions),
                feature=feature,
                dtype=dtype,
                dtypes=dtypes,
                enough=enough,
            )
            if new.id in _REGISTER and _REGISTER[new.id].body.__code__ != body.__code__:
                raise RegistrationError(f"{_place(body)}: the id {new.id} is taken; give the function another name")
            _REGISTER[new.id] = new
        return body

    return register


def _reachable(
    operator: str, where: Where | None, sizes: tuple[Size, ...], cases: Mapping[str, Where]
) -> dict[str, Where]:
    """The cases in which the clause can be judged at all."""
    return {n: case for n, case in cases.items() if Domain(operator, where=where, case=case, table=sizes).rows}


def _validate(body: Callable[..., None], given: Given, level: str) -> None:
    if not (body.__doc__ or "").strip():
        raise RegistrationError(f"{_place(body)}: no docstring; write the normative sentence there")
    if level not in ("must", "should"):
        raise RegistrationError(f"{_place(body)}: level {level!r} is neither 'must' nor 'should'")
    parameters = list(inspect.signature(body).parameters)
    if set(parameters[1:]) != set(given.draws):
        raise RegistrationError(
            f"{_place(body)}: its parameters after the operator are {parameters[1:]}, but given() draws "
            f"{list(given.draws)}; make them the same"
        )


def _known_operator(operator: str, body: Callable[..., None]) -> None:
    if operator not in OPERATORS:
        raise RegistrationError(f"{_place(body)}: unknown operator {operator!r}{nearest(operator, list(OPERATORS))}")


def _place(body: Callable[..., None]) -> str:
    return f"{inspect.getsourcefile(body)}, {body.__qualname__}"
