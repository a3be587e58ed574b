"""The matrix: which clause detects which fault, by how much, and where a fault shows in the operators built on it.

It is measured by running every clause of its operator on every fault, in child processes, and is kept in the package as
data (`spec_lm/faults/matrix.json`), which `spec-lm explain` and the docs read.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import blake2b
from inspect import getsourcefile, iscode, unwrap
from math import ceil
from pathlib import Path
from types import CodeType
from typing import Any, cast
from unittest.mock import patch
from zlib import crc32

import hypothesis
import numpy as np
from jaxtyping import config
from pebble import ProcessExpired, concurrent

import spec_lm
from spec_lm.conformance import operators, workers
from spec_lm.conformance.clause import CLAUSES, Clause, Search, seed_of
from spec_lm.conformance.diagnosis import sort_of
from spec_lm.conformance.job import keep_to_itself
from spec_lm.conformance.operators import OPERATORS, Checked, fresh
from spec_lm.conformance.report import Outcome, UserError
from spec_lm.conformance.runner import (
    DTYPES,
    SIGNATURE,
    OperatorRun,
    Settings,
    in_order,
    known_operators,
    preserved,
    run_clause,
)
from spec_lm.conformance.strategies import Domain, Size, build, map_tensors
from spec_lm.faults import Fault, catalogue, planted
from spec_lm.reference import functional

PACKAGED = Path(__file__).parent / "faults" / "matrix.json"
# A clause that compares with the oracle sees every wrong value, and tells nobody what is wrong with it.
ORACLE_CLAUSES = (
    "agrees_with_the_oracle",
    "any_length",
    "gradients_with_respect_to_",
    "long_rows",
    "query_that_sees_nothing_passes_no_gradient",
    "weights_gather_gradients_from_many_rows",
)
ABOVE = "agrees_with_the_oracle"
EXAMPLES_ABOVE = 10
# Draws are made once a process, so that a process takes many faults; not all, so that cores end together.
MOST_FAULTS_A_PROCESS = 64


@dataclass(frozen=True)
class Row:
    """One fault: what the catalogue says of it, and what the clauses of its operator came to; those not named held.

    Args:
        fingerprint: of the files it is written in.
        detected_by: the worst err/bound by the name of the clause; None where the violation is not of values.
        not_judged: the names of clauses that could not be judged.
        shows_in: the operators above that disagree with the oracle where the reference contains the fault.
        seen: what was seen, as "raised", by the name of the clause, where it was not a wrong value.
    """

    operator: str
    family: str
    kind: str
    does: str
    mistake: str
    report: str
    no_invariant: str
    fingerprint: str
    detected_by: dict[str, float | None] = field(default_factory=dict)
    not_judged: tuple[str, ...] = ()
    shows_in: tuple[str, ...] = ()
    seen: dict[str, str] = field(default_factory=dict)

    @property
    def by_the_oracle_alone(self) -> bool:
        """Whether it is detected, but by comparisons with the oracle only."""
        return bool(self.detected_by) and all(name.startswith(ORACLE_CLAUSES) for name in self.detected_by)


@dataclass(frozen=True)
class Matrix:
    """All rows by fault, and the clauses they were measured with.

    Args:
        examples: drawn for each clause.
        clauses: the fingerprint of its file by the clause's id.
        faults: the rows by the fault's id.
        errors: what could not be measured, by the fault's id; never written.
    """

    examples: int
    seed: int
    clauses: dict[str, str]
    faults: dict[str, Row]
    dtype: str = "float32"
    spec: str = str(spec_lm.SPEC_VERSION)
    errors: dict[str, str] = field(default_factory=dict, compare=False)

    def detected_by(self, clause_id: str) -> dict[str, Row]:
        """The faults that a clause detects."""
        operator, _, name = clause_id.partition(".")
        return {i: row for i, row in self.faults.items() if row.operator == operator and name in row.detected_by}

    def of(self, names: Iterable[str]) -> "Matrix":
        """The part that is about these operators."""
        kept = tuple(names)
        clauses = {each: fingerprint for each, fingerprint in self.clauses.items() if each.split(".")[0] in kept}
        return replace(self, clauses=clauses, faults={i: row for i, row in self.faults.items() if row.operator in kept})

    def refuse_part(self, examples: int, seed: int) -> None:
        """Take no part that is measured otherwise.

        Raises:
            UserError: it is.
        """
        if (examples, seed) != (self.examples, self.seed):
            alike = f"--examples {self.examples} --seed {self.seed}"
            raise UserError(f"the matrix in the package is measured with {alike}; measure its part so, or all of it")

    def with_part(self, part: "Matrix", names: Iterable[str]) -> "Matrix":
        """With another one's rows of these operators in the place of its own."""
        kept = self.of(set(OPERATORS).difference(names))
        return replace(self, clauses=kept.clauses | part.clauses, faults=kept.faults | part.faults)

    def text(self) -> str:
        """As JSON: sorted, a clause or a fault a line."""
        run = {"spec": self.spec, "examples": self.examples, "seed": self.seed, "dtype": self.dtype}
        rows = {name: asdict(row) for name, row in self.faults.items()}
        lines = [f'"{name}": {json.dumps(value)},' for name, value in run.items()]
        return "\n".join(["{", *lines, *_entries("clauses", self.clauses, ","), *_entries("faults", rows, ""), "}\n"])


def _entries(name: str, entries: Mapping[str, Any], end: str) -> Iterator[str]:
    written = [f"{json.dumps(key)}: {json.dumps(entries[key], allow_nan=False)}" for key in sorted(entries)]
    yield f'"{name}": {{'
    yield ",\n".join(written)
    yield "}" + end


def read(path: Path = PACKAGED) -> Matrix:
    """The matrix in the package.

    Raises:
        UserError: it is not there.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; run spec-lm faults --write") from error
    rows = {
        name: Row(**{**row, "not_judged": tuple(row["not_judged"]), "shows_in": tuple(row["shows_in"])})
        for name, row in data["faults"].items()
    }
    return Matrix(**{**data, "faults": rows})


# ------------------------------------------------------------------------------------------------------------- sources


def clause_fingerprint(clause: Clause) -> str:
    """Of the file the clause is written in."""
    return _of_files([getsourcefile(clause.body)])


def fault_fingerprint(fault: Fault) -> str:
    """Of the file the fault is written in, and of those whose faults it is made of."""
    others = [each.__file__ for each in fault.function.__globals__.values() if _holds_faults(each)]
    return _of_files([getsourcefile(fault.function), *others])


def _holds_faults(value: Any) -> bool:
    return getattr(value, "__spec__", None) is not None and value.__name__.startswith("spec_lm.faults.")


def _of_files(paths: Iterable[str | None]) -> str:
    text = "".join(Path(path).read_text(encoding="utf-8") for path in sorted({path for path in paths if path}))
    return f"{crc32(text.encode()):08x}"


def above(operator: str) -> list[str]:
    """The operators whose equation is built on this one, directly or through others."""
    direct = [name for name in OPERATORS if operator in _names(unwrap(getattr(functional, name)).__code__)]
    found = {*direct, *(higher for name in direct for higher in above(name))}
    return [name for name in OPERATORS if name in found]


def _names(code: CodeType) -> set[str]:
    """What a function refers to, inner functions included."""
    return {*code.co_names, *(name for inner in code.co_consts if iscode(inner) for name in _names(inner))}


# ----------------------------------------------------------------------------------------------------------- measuring


def chosen(names: Iterable[str] = ()) -> tuple[dict[str, Fault], dict[str, Clause]]:
    """The faults and the clauses of these operators, by default of all.

    Raises:
        UsageError: an unknown operator.
    """
    kept = known_operators(names) or tuple(OPERATORS)
    faults = {name: fault for name, fault in catalogue().items() if fault.operator in kept}
    return faults, {name: clause for name, clause in CLAUSES.items() if clause.operator in kept}


@dataclass(frozen=True)
class Found:
    """What was measured on one fault: see `Row`; or why it could not be."""

    detected_by: dict[str, float | None] = field(default_factory=dict)
    not_judged: tuple[str, ...] = ()
    shows_in: tuple[str, ...] = ()
    error: str = ""
    seen: dict[str, str] = field(default_factory=dict)


@dataclass
class _Draws(Search):
    """Judges nothing, and keeps what is drawn."""

    drawn: list[tuple[dict[str, Any], Size]] = field(default_factory=list)

    def judge(self, recipes: dict[str, Any], size: Size) -> None:
        self.drawn.append((recipes, size))


@dataclass(frozen=True)
class _DrawnOnce(Clause):
    """A clause whose examples are drawn and built once: up to its first violation, it draws the same for every
    implementation."""

    seed: int = 0
    drawn: dict[Any, list[tuple[dict[str, Any], Size]]] = field(default_factory=dict, compare=False, repr=False)
    built: dict[int, dict[str, Any]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, clause: Clause, seed: int) -> "_DrawnOnce":
        """The clause as one of these."""
        return cls(**{each.name: getattr(clause, each.name) for each in fields(Clause)}, seed=seed)

    def test(
        self,
        implementation: Any,
        *,
        domain: Domain | None = None,
        case: str = "",
        examples: int = 50,
        search: Search | None = None,
        shrink: bool = True,
    ) -> Callable[[], None]:
        """`Clause.test` without Hypothesis, which has drawn everything before; it does not shrink."""
        domain, search = domain or Domain(self.operator), search or Search(self, implementation)
        key = case, examples, domain.without
        if key not in self.drawn:
            draws = _Draws(self, search.checked)
            test = super().test(implementation, domain=domain, case=case, examples=examples, search=draws, shrink=False)
            hypothesis.seed(seed_of(self, self.seed, case))(test)()
            self.drawn[key] = draws.drawn

        def judged() -> None:
            for recipes, size in self.drawn[key]:
                search.judge(recipes, size)

        return judged

    def run(self, checked: Checked, recipes: Mapping[str, Any]) -> None:
        """`Clause.run` on copies of what was built before: the drawn recipes live as long as this clause."""
        if id(recipes) not in self.built:
            self.built[id(recipes)] = {name: build(recipe) for name, recipe in recipes.items()}
        self.body(checked, **{name: map_tensors(value, fresh) for name, value in self.built[id(recipes)].items()})


@dataclass(frozen=True)
class Job:
    """Some faults of one operator, and the clauses that are run on them, in a process of their own."""

    faults: tuple[Fault, ...]
    clauses: tuple[str, ...]
    settings: Settings

    def run(self) -> dict[str, Found]:
        """What was found, by the fault's id."""
        keep_to_itself()
        with _unchecked_shapes(), _remembering():
            own = [_DrawnOnce.of(CLAUSES[clause_id], self.settings.seed) for clause_id in self.clauses]
            of_those_above = [CLAUSES[f"{name}.{ABOVE}"] for name in above(self.faults[0].operator)]
            higher = [_DrawnOnce.of(clause, self.settings.seed) for clause in of_those_above]
            return {fault.id: _found(fault, own, higher, self.settings) for fault in self.faults}


@contextmanager
def _unchecked_shapes() -> Iterator[None]:
    """The reference's checks of shapes take most of the time of what is built of many parts, and decide nothing here:
    the result's shape is judged by the clauses. A fault that checks shapes itself is told not to."""
    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    try:
        with ExitStack() as stack:
            for name in OPERATORS:
                stack.enter_context(patch.object(functional, name, unwrap(getattr(functional, name))))
            yield
    finally:
        config.update("jaxtyping_disable", before)


@contextmanager
def _remembering() -> Iterator[None]:
    """The oracle's values and bounds do not depend on the fault: for the same arguments they are computed once."""
    with ExitStack() as stack:
        for name in ("exact_value", "bounded", "exact_gradients", "bounded_gradients"):
            stack.enter_context(patch.object(operators, name, _remembered(getattr(operators, name))))
        yield


def _remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Any, Any] = {}

    def remembering(*arguments: Any) -> Any:
        key = _key(arguments)
        if key not in known:
            known[key] = function(*arguments)
        return deepcopy(known[key])

    return remembering


def _key(value: Any) -> Any:
    """What tells arguments of the oracle from others: an array by its shape, its dtype and a digest of its bytes."""
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, blake2b(value.tobytes()).digest()
    if isinstance(value, Mapping):
        return tuple((name, _key(item)) for name, item in sorted(value.items()))
    return tuple(map(_key, value)) if isinstance(value, tuple) else value


def _found(fault: Fault, own: Sequence[Clause], higher: Sequence[Clause], settings: Settings) -> Found:
    with preserved(settings.seed):
        run = OperatorRun(fault.operator, fault.function, settings)
        outcomes = {clause.name: run.outcome(clause) for clause in in_order(own)}
    shows_in = tuple(clause.operator for clause in higher if _shows(fault, clause, settings))
    errors = [outcome.message for outcome in outcomes.values() if outcome.outcome in ("error", "absent")]
    return Found(
        {name: _ratio(outcome) for name, outcome in sorted(outcomes.items()) if outcome.outcome == "fails"},
        tuple(sorted(name for name, outcome in outcomes.items() if outcome.outcome == "not_judged")),
        shows_in,
        "\n".join(errors),
        {name: sort for name, outcome in sorted(outcomes.items()) if (sort := sort_of(outcome)) not in ("", "value")},
    )


def _shows(fault: Fault, clause: Clause, settings: Settings) -> bool:
    few = replace(settings, examples=min(settings.examples, EXAMPLES_ABOVE))
    checked = Checked(OPERATORS[clause.operator], getattr(functional, clause.operator))
    with preserved(settings.seed), planted(fault):
        outcome, _ = run_clause(clause, checked, Domain(clause.operator, few.dtype), few)
    return outcome.outcome == "fails"


def _ratio(outcome: Outcome) -> float | None:
    """How many bounds the worst error is, to three digits."""
    error, bound = ((outcome.evidence or {}).get(name) for name in ("error", "bound"))
    if not error or not bound:
        return None
    ratio = float(f"{error / bound:.3g}")
    return ratio if ratio < float("inf") else None


def measure(
    faults: Mapping[str, Fault],
    clauses: Mapping[str, Clause],
    *,
    examples: int,
    seed: int = 0,
    jobs: int = 1,
    on_found: Callable[[int], None] = lambda number: None,
) -> Matrix:
    """Run the clauses of its operator on each fault.

    Args:
        faults: by id.
        clauses: by id.
        examples: drawn for each clause.
        seed: of all draws; the same seed gives the same matrix, whatever the jobs.
        jobs: how many processes run at a time.
        on_found: told how many faults have been measured so far.
    """
    workers.start()
    settings = Settings(examples, seed, shrink=False, supports={"dtype": DTYPES})
    found: dict[str, Found] = {}
    for some in _run(list(_jobs(faults, clauses, settings, jobs)), jobs):
        found |= some
        on_found(len(found))
    rows = {name: _row(fault, found[name]) for name, fault in faults.items()}
    errors = {name: found[name].error for name in faults if found[name].error}
    fingerprints = {name: clause_fingerprint(clause) for name, clause in clauses.items()}
    return Matrix(examples, seed, fingerprints, rows, settings.dtype, errors=errors)


def _row(fault: Fault, found: Found) -> Row:
    said = {name: getattr(fault, name) for name in ("operator", "family", "kind", "does", "mistake", "report")}
    said |= {"no_invariant": fault.no_invariant, "fingerprint": fault_fingerprint(fault)}
    return Row(
        **said, detected_by=found.detected_by, not_judged=found.not_judged, shows_in=found.shows_in, seen=found.seen
    )


def _jobs(
    faults: Mapping[str, Fault], clauses: Mapping[str, Clause], settings: Settings, at_a_time: int
) -> Iterator[Job]:
    """High operators first: theirs take longest. Those of an operator are alike, and as many as run at a time."""
    for operator in reversed(OPERATORS):
        ids = tuple(name for name, clause in clauses.items() if clause.operator == operator)
        group = [fault for fault in faults.values() if fault.operator == operator]
        parts = at_a_time * ceil(len(group) / (at_a_time * MOST_FAULTS_A_PROCESS))
        yield from (Job(tuple(group[part::parts]), ids, settings) for part in range(min(parts, len(group))))


def _launch(job: Job) -> Future:
    in_child = cast(Any, concurrent.process)(context=workers.context(), daemon=True)
    return in_child(job.run)()


def _run(waiting: list[Job], jobs: int) -> Iterator[dict[str, Found]]:
    """What each job finds, as it comes; the faults of a process that dies are run again, each by itself."""
    running: dict[Future, Job] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                job = waiting.pop(0)
                running[_launch(job)] = job
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                try:
                    yield future.result()
                except ProcessExpired as death:
                    if len(job.faults) == 1:
                        why = f"its process ended with exit code {death.exitcode}"
                        yield {job.faults[0].id: Found(error=why)}
                    waiting += [replace(job, faults=(each,)) for each in job.faults if len(job.faults) > 1]
    finally:
        for future in running:
            future.cancel()


# -------------------------------------------------------------------------------------------------------- what it shows


@dataclass(frozen=True)
class Findings:
    """What a matrix shows of the catalogue and of the clauses: ids, or ids with what is the matter.

    Args:
        errors: faults that could not be measured.
        missed: faults that no clause detects.
        idle: clauses that detect nothing.
        nothing_else: faults that satisfy no clause, though their signature is right: they are no small change.
        stale: how the matrix in the package differs from the sources; None where it was not compared.
        unfulfilled: detections that the catalogue names and that these examples do not show.
        oracle_alone: faults that no invariant detects, and that do not say why.
        hidden: faults that show in no operator above theirs.
    """

    errors: dict[str, str]
    missed: list[str]
    idle: list[str]
    nothing_else: list[str]
    stale: list[str] | None
    unfulfilled: list[str]
    oracle_alone: list[str]
    hidden: list[str]

    @property
    def exit_code(self) -> int:
        """1 where something is to be mended; the last three are only to be known."""
        return int(any((self.errors, self.missed, self.idle, self.nothing_else, self.stale)))


def findings(matrix: Matrix, faults: Mapping[str, Fault], stale: list[str] | None = None) -> Findings:
    """What a measured matrix shows; `stale` is what `staleness` says of the one in the package, where it was asked."""
    measured = {name: row for name, row in matrix.faults.items() if name not in matrix.errors}
    return Findings(
        errors=matrix.errors,
        missed=[name for name, row in measured.items() if not row.detected_by],
        idle=[clause_id for clause_id in matrix.clauses if not matrix.detected_by(clause_id)],
        nothing_else=[name for name, row in measured.items() if _satisfies_nothing(row, matrix)],
        stale=stale,
        unfulfilled=[line for name, row in measured.items() for line in _unfulfilled(faults[name], row)],
        oracle_alone=[n for n, row in measured.items() if row.by_the_oracle_alone and not row.no_invariant],
        hidden=[name for name, row in measured.items() if above(row.operator) and not row.shows_in],
    )


def _unfulfilled(fault: Fault, row: Row) -> list[str]:
    return [f"{fault.id}: {name} does not detect it" for name in fault.detected_by if name not in row.detected_by]


def _satisfies_nothing(row: Row, matrix: Matrix) -> bool:
    judged = [each for each in matrix.of([row.operator]).clauses if each.partition(".")[2] not in row.not_judged]
    return SIGNATURE not in row.detected_by and len(row.detected_by) == len(judged) > 0


def staleness(packaged: Matrix, faults: Mapping[str, Fault], clauses: Mapping[str, Clause]) -> list[str]:
    """How a matrix that was read differs from the sources, a line each; nothing of its numbers is measured again."""
    packaged = packaged.of({clause.operator for clause in clauses.values()})
    sources = {name: clause_fingerprint(clause) for name, clause in clauses.items()}
    lines = list(_differences("clause", packaged.clauses, sources))
    written = {name: row.fingerprint for name, row in packaged.faults.items()}
    lines += _differences("fault", written, {name: fault_fingerprint(fault) for name, fault in faults.items()})
    known = [(faults[name], row) for name, row in packaged.faults.items() if name in faults]
    return lines + [line for fault, row in known for line in _unfulfilled(fault, row)]


def _differences(what: str, written: Mapping[str, str], sources: Mapping[str, str]) -> Iterator[str]:
    yield from (f"{what} {name} is not in it" for name in sources if name not in written)
    yield from (f"{what} {name} is no more" for name in written if name not in sources)
    yield from (f"{what} {name} has changed" for name in sources if written.get(name, sources[name]) != sources[name])


def findings_text(found: Findings, matrix: Matrix) -> Iterator[str]:
    """What was found, a line at a time: operators, what is to be mended, what is to be known, and the counts."""
    for operator in OPERATORS:
        part = matrix.of([operator])
        if part.faults or part.clauses:
            yield f"  {operator:<36}{counts_text(part)}"
    oracle = "detected by comparison with the oracle alone; is there an invariant, or a reason why there is none?"
    yield from _section("could not be measured", [f"{name}: {why}" for name, why in found.errors.items()])
    yield from _section("detected by no clause", [f"{name}: {matrix.faults[name].does}" for name in found.missed])
    yield from _section("clauses that detect nothing", found.idle)
    yield from _section("satisfy no clause at all; a fault is a small change", found.nothing_else)
    yield from _section("the matrix in the package is stale; run spec-lm faults --write", found.stale or [])
    yield from _section("named in detected_by, and not shown by these examples", found.unfulfilled)
    yield from _section(oracle, found.oracle_alone)
    yield from _section("show in no operator above", found.hidden, list(_by_operator(found.hidden)))
    state = "" if found.stale is None else "; the packaged matrix is " + ("stale" if found.stale else "up to date")
    yield f"\n{counts_text(matrix)}{state}"


def counts_text(matrix: Matrix) -> str:
    """How many faults are detected, and how many clauses detect one."""
    detected = sum(bool(row.detected_by) for row in matrix.faults.values())
    detecting = sum(bool(matrix.detected_by(clause_id)) for clause_id in matrix.clauses)
    faults, clauses = len(matrix.faults), len(matrix.clauses)
    return f"{detected} of {faults} faults are detected, {detecting} of {clauses} clauses detect one"


def _section(title: str, found: Sequence[str], lines: Sequence[str] | None = None) -> Iterator[str]:
    if found:
        yield f"\n{len(found)}  {title}"
        yield from (f"  {line}" for line in lines or found)


def _by_operator(ids: Iterable[str]) -> Iterator[str]:
    """The names of an operator's faults on one line."""
    names: dict[str, list[str]] = {}
    for operator, _, name in (each.partition(".") for each in ids):
        names.setdefault(operator, []).append(name)
    yield from (f"{operator}: {', '.join(group)}" for operator, group in names.items())
