"""`check`: loops over clauses, emits outcomes as they come, returns the report."""

import contextlib
import io
import os
import platform
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from operator import eq
from typing import Any

import hypothesis
import numpy as np
import torch
from hypothesis.configuration import set_hypothesis_home_dir, storage_directory

import spec_lm
from spec_lm.conformance.clause import CLAUSES, Clause, Level, Search, nearest, seed_of
from spec_lm.conformance.declarations import DTYPES, wrong_conventions, wrong_supports
from spec_lm.conformance.diagnosis import diagnose
from spec_lm.conformance.display import counterexample_of, evidence_of
from spec_lm.conformance.implementation import BUILT_IN, Implementation, loaded
from spec_lm.conformance.isolated import check_isolated
from spec_lm.conformance.operators import OPERATORS, Call, Checked
from spec_lm.conformance.plainer import plainer
from spec_lm.conformance.report import Outcome, Report, ReportError, Status, UserError
from spec_lm.conformance.reproduction import Recording, reproduction
from spec_lm.conformance.script import Origin
from spec_lm.conformance.shards import Shard
from spec_lm.conformance.strategies import Domain, NotJudged, from_json, plainest
from spec_lm.conformance.surroundings import SETTINGS, current_folder, folder_to, restored, undisturbed
from spec_lm.conformance.tolerance import OutOfMemory, Raised, Violation
from spec_lm.conformance.waivers import Waiver, waivers_of

SIGNATURE, NO_MEMORY = "keeps_its_signature", "has_no_memory"
_EXAMPLES_A_SIZE = 10
Emit = Callable[[Outcome], None]


class UsageError(UserError):
    """`check` was asked for something that is not there; the text says what, and what there is."""


@dataclass(frozen=True)
class Settings:
    """How a check runs: examples a clause, seed, dtype, device, declared conventions and supports, whether a
    counterexample is made smaller, the failures that are accepted, and the seconds that a clause may take."""

    examples: int = 50
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    conventions: Mapping[str, str] = field(default_factory=dict)
    supports: Mapping[str, Any] = field(default_factory=dict)
    shrink: bool = True
    waivers: Mapping[str, Waiver] = field(default_factory=dict)
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype {self.dtype!r} is none of {', '.join(DTYPES)}{nearest(self.dtype, list(DTYPES))}")
        if wrong := wrong_conventions(self.conventions) or wrong_supports(self.supports):
            raise UsageError(wrong)
        if self.examples < 1:
            raise UsageError(f"examples is {self.examples}; at least 1 must be drawn")
        if not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**64:
            raise UsageError(f"seed is {self.seed!r}; torch takes whole numbers from -2**63 to 2**64 - 1")
        if self.timeout is not None and not self.timeout > 0:
            raise UsageError(f"timeout is {self.timeout}; expected seconds, more than 0")
        if self.device != "cpu" and not torch.cuda.is_available():
            raise UsageError(f"device {self.device!r} was asked for, but this torch sees no such device; use cpu")

    def declared_by(self, subject: Implementation) -> "Settings":
        """With what an implementation declares, where these do not say otherwise."""
        conventions = {**subject.conventions, **self.conventions}
        return replace(self, conventions=conventions, supports={**subject.supports, **self.supports})


def check(
    implementation: Any = BUILT_IN,
    *,
    operators: Iterable[str] | None = None,
    clauses: Iterable[str] | None = None,
    level: Level = "must",
    examples: int = 50,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
    conventions: Mapping[str, str] | None = None,
    supports: Mapping[str, Any] | None = None,
    waive: Mapping[str, Any] | None = None,
    require: Iterable[str] = (),
    shard: str = "",
    isolate: bool = False,
    jobs: int | None = None,
    timeout: float | None = None,
    memory: float | None = None,
    on_start: Callable[[dict[str, Any]], None] = lambda header: None,
    on_outcome: Emit = lambda outcome: None,
) -> Report:
    """Check an implementation against the clauses, in this process or, isolated, as the command line does.

    Args:
        implementation: a path, a module name, `operator=module:function` pairs, a module, a mapping or an object; by
            default the built-in reference.
        operators: check only these.
        clauses: check only these ids.
        level: "must", or "should" for both levels.
        examples: drawn for each clause.
        seed: of all draws; the same seed gives the same report, times aside.
        dtype: of the arguments.
        device: where they lie.
        conventions: declared choices, over those the implementation declares.
        supports: the declared part of the domain, over what the implementation declares.
        waive: failures that are accepted, by clause id: the reason, or a table of "reason" and "counterexample".
        require: operators that must be provided ("all": every one).
        shard: check only this part, as in "2/3": whole operators, about as long in each part.
        isolate: check in other processes, one an operator, so that nothing the implementation does reaches this one or
            hangs it; it must be given as text.
        jobs: where isolated, how many operators are checked at a time; by default one a core, at most 4.
        timeout: seconds a clause may take; where isolated 60 by default, and a call that does not return is ended.
        memory: where isolated, GiB that a process may take beside torch; by default there is no limit.
        on_start: called with the report's header before the first clause runs.
        on_outcome: called with each outcome as it comes.

    Returns:
        The report; `report.conforms`, `report.exit_code` and its outcomes.

    Raises:
        ImplementationError: the implementation cannot be loaded.
        UsageError: an unknown operator, clause, level, dtype or device.
        UserError: a waiver of an unknown clause, or without a reason; or what is to be isolated is not given as text.
    """
    waivers = waivers_of(waive or {})
    declared = (conventions or {}, supports or {})
    settings = Settings(examples, seed, dtype, device, *declared, waivers=waivers, timeout=timeout)
    operators, clauses, require = list(operators or ()), list(clauses or ()), list(require)
    chosen = select(operators, clauses, level)
    required = required_of(require, chosen)
    chosen, about = sharded(chosen, shard)
    if isolate:
        options = {"operator": operators, "clause": clauses, "level": level, "examples": examples, "seed": seed}
        options |= {"dtype": dtype, "device": device, "convention": conventions or {}, "support": supports or {}}
        options |= {"require": require, "shard": shard or None, "jobs": jobs, "timeout": timeout, "memory": memory}
        return check_isolated(implementation, options, waivers, on_start, on_outcome)
    if jobs or memory:
        raise UsageError("jobs and memory are about processes of their own; say isolate=True")
    collected: list[Outcome] = []

    def emit(outcome: Outcome) -> None:
        collected.append(outcome)
        on_outcome(outcome)

    with preserved(seed), loaded(implementation) as subject:
        settings = settings.declared_by(subject)
        header = header_of(subject, settings, level) | about | {"required": list(required)}
        on_start(header)
        for operator, group in by_operator(chosen).items():
            run_operator(operator, group, subject, settings, emit)
    return Report(header, tuple(collected), required, diagnosis=diagnose(collected))


def select(operators: Iterable[str] | None, clauses: Iterable[str] | None, level: str) -> list[Clause]:
    """The clauses asked for; an explicit id is run whatever its level.

    Raises:
        UsageError: an unknown operator, clause or level; the nearest known one is suggested.
    """
    if level not in ("must", "should"):
        raise UsageError(f"level {level!r} is neither must nor should")
    wanted = known_operators(operators or ())
    ids = list(clauses or ())
    for clause_id in ids:
        known_clause(clause_id)
    if ids:
        both = [CLAUSES[clause_id] for clause_id in ids if not wanted or CLAUSES[clause_id].operator in wanted]
        if not both:
            raise UsageError(f"none of the clauses {', '.join(ids)} is about {', '.join(wanted)}")
        return both
    levels = ("must",) if level == "must" else ("must", "should")
    chosen = [c for c in CLAUSES.values() if c.level in levels and (not wanted or c.operator in wanted)]
    return [clause for group in by_operator(chosen).values() for clause in group]


def required_of(names: Iterable[str], chosen: list[Clause]) -> tuple[str, ...]:
    """The operators that must be provided ("all": every one that is checked).

    Raises:
        UsageError: an unknown operator, or one that is not checked.
    """
    required = known_operators(names, also=("all",))
    checked = dict.fromkeys(clause.operator for clause in chosen)
    for name in required:
        if name != "all" and name not in checked:
            raise UsageError(f"{name} is required, but only {', '.join(checked)} is checked; leave one of the two out")
    return required


def sharded(chosen: list[Clause], shard: str) -> tuple[list[Clause], dict[str, Any]]:
    """The clauses of a shard (all of them where it is empty), and what the header says of them.

    Raises:
        UserError: it is no shard, or there are more than operators.
    """
    if not shard:
        return chosen, {"clauses": len(chosen)}
    part = Shard.read(shard)
    mine = part.part(chosen)
    return mine, {"clauses": len(mine)} | part.header(len(chosen))


def known_clause(clause_id: str) -> Clause:
    """The clause of an id.

    Raises:
        UsageError: there is none; the nearest is suggested, of an operator where its clauses are listed.
    """
    if clause_id in OPERATORS:
        raise UsageError(f"{clause_id} is an operator; spec-lm clauses --operator {clause_id} lists its clauses")
    if clause_id not in CLAUSES:
        raise UsageError(f"no clause has the id {clause_id}{nearest(clause_id, list(CLAUSES))}")
    return CLAUSES[clause_id]


def known_operators(names: Iterable[str], also: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The names, each an operator's or one of `also`.

    Raises:
        UsageError: there is none of a name; the nearest is suggested.
    """
    names = tuple(names)
    for name in names:
        if name not in OPERATORS and name not in also:
            raise UsageError(f"no operator is named {name}{nearest(name, [*OPERATORS, *also])}")
    return names


def header_of(subject: Implementation, settings: Settings, level: str) -> dict[str, Any]:
    """What a report says of its run: everything needed to run it again."""
    versions = {"spec_lm": spec_lm.__version__, "python": platform.python_version(), "torch": torch.__version__} | {
        "numpy": np.__version__,
        "hypothesis": hypothesis.__version__,
    }
    run = {"dtype": settings.dtype, "device": settings.device, "seed": settings.seed, "examples": settings.examples}
    declared = {"conventions": dict(settings.conventions), "supports": dict(settings.supports)}
    about = {"implementation": subject.name, "spec": spec_lm.SPEC_VERSION, "versions": versions}
    return about | run | {"level": level} | declared


def by_operator(clauses: list[Clause]) -> dict[str, list[Clause]]:
    """Low operators first, so that a first cause stands above what follows from it."""
    groups: dict[str, list[Clause]] = {name: [] for name in OPERATORS}
    for clause in clauses:
        groups[clause.operator].append(clause)
    return {name: group for name, group in groups.items() if group}


# ------------------------------------------------------------------------------------------------------- one operator


def run_operator(operator: str, clauses: list[Clause], subject: Implementation, settings: Settings, emit: Emit) -> None:
    """Run the clauses of one operator, in the order in which one decides about the next."""
    run = OperatorRun(operator, subject.functions.get(operator), settings, subject.origins.get(operator))
    for clause in in_order(clauses):
        emit(run.outcome(clause))


def in_order(clauses: Iterable[Clause]) -> list[Clause]:
    """The signature, then what may be lacking (features), then the rest."""
    return sorted(clauses, key=lambda clause: (clause.name != SIGNATURE, not clause.feature))


@dataclass(frozen=True)
class Known:
    """What the clauses of an operator have shown so far: features it lacks, and why the rest cannot be judged."""

    without: tuple[str, ...] = ()
    lost: str = ""


class OperatorRun:
    """One operator under check, and what is known of it so far: whether it is there, its signature, what it lacks.

    Args:
        operator: its name.
        function: of the plain signature; None where it is not provided.
        settings: how the check runs.
        origin: of the function; where it is known, failures are written down in plain PyTorch.
        known: what clauses showed that ran before, in another process.
    """

    def __init__(
        self,
        operator: str,
        function: Callable[..., Any] | None,
        settings: Settings,
        origin: Origin | None = None,
        known: Known = Known(),
    ) -> None:
        self.settings, self.origin = settings, origin
        self.domain = Domain(operator, settings.dtype, without=frozenset(known.without), supports=settings.supports)
        unprovided = function or (lambda *arguments: None)
        self.checked = Checked(
            OPERATORS[operator], unprovided, settings.conventions, device=settings.device, supports=settings.supports
        )
        with settings_put_back():
            self.absent = "not provided" if function is None else why_absent(self.domain, self.checked)
        dtypes = settings.supports.get("dtype", (settings.dtype,))
        self.lost = known.lost if settings.dtype in dtypes else f"its declared support has no {settings.dtype}"

    @property
    def known(self) -> Known:
        """What the clauses have shown so far."""
        return Known(tuple(sorted(self.domain.without)), self.lost)

    def outcome(self, clause: Clause, on_found: Emit | None = None) -> Outcome:
        """Run a clause, on what the clauses before it left of the domain.

        `on_found` is told a failure as it was first seen, before a smaller counterexample is looked for.
        """
        if self.absent:
            return outcome_of(clause, "absent", self.absent)
        if self.lost:
            return outcome_of(clause, "not_judged", self.lost)
        waiver = self.settings.waivers.get(clause.id)
        pinned = self._pinned(clause, waiver.recipes) if waiver and waiver.recipes is not None else None
        if waiver and pinned and pinned.outcome in ("fails", "error") and not decides(clause):
            return waiver.applied(pinned, pinned)

        def under_waiver(outcome: Outcome) -> Outcome:
            return waiver.applied(outcome, pinned) if waiver else outcome

        told = None if on_found is None else lambda found: on_found(under_waiver(found))
        with settings_put_back():
            outcome, lacking = run_clause(clause, self.checked, self.domain, self.settings, self.origin, told)
        self.domain = replace(self.domain, without=self.domain.without | lacking)
        if clause.name == SIGNATURE and outcome.outcome == "fails":
            self.lost = f"{clause.id} fails: {outcome.message}"
        return under_waiver(outcome)

    def _pinned(self, clause: Clause, recipes: Mapping[str, Any]) -> Outcome:
        """What a waiver's counterexample comes to; an error where this version cannot read it."""
        try:
            with settings_put_back():
                return replayed(clause, recipes, self.checked)
        except ReportError as broken:
            return outcome_of(clause, "error", f"mend the waiver: {broken}")


def decides(clause: Clause) -> bool:
    """Whether what a clause comes to decides about the operator's other clauses."""
    return clause.name == SIGNATURE or bool(clause.feature)


def why_absent(domain: Domain, checked: Checked) -> str:
    """The reason why an operator is not there yet, by one call on the plainest input; empty where it is."""
    name = getattr(checked.function, "__name__", domain.operator)
    try:
        with quiet(), restored(SETTINGS):
            checked(*plainest(domain).build())
    except (NotJudged, OutOfMemory):
        return ""
    except Raised as raised:
        if isinstance(raised.exception, NotImplementedError):
            return f"{name} raises NotImplementedError"
    except Violation as violation:
        if "returned None" in str(violation):
            return f"{name} returns None: it is not written yet, or forgets to return its result"
    return ""


def run_clause(
    clause: Clause,
    checked: Checked,
    domain: Domain,
    settings: Settings,
    origin: Origin | None = None,
    on_found: Emit | None = None,
) -> tuple[Outcome, frozenset[str]]:
    """One clause's outcome, and the features it shows to be lacking; a failure of a function whose origin is known is
    written down in plain PyTorch, and `on_found` is told of it when it is first seen."""
    started = time.perf_counter()
    search = Search(clause, checked)
    if on_found is not None:
        search.on_first = lambda violation: on_found(_failed(clause, search, violation))
    if settings.timeout is not None:
        search.ends = time.monotonic() + settings.timeout
    torch.manual_seed(settings.seed)
    violations: dict[str, Violation] = {}
    try:
        # A setting that calls change for good would hide from the next clause that they do.
        with quiet(), restored(SETTINGS):
            violations = _violations(clause, search, domain, settings)
            violation = next(iter(violations.values()), None)
            if search.cut_short:
                found = _failed(clause, search, violation) if violation else None
                outcome = cut_short(clause, found, too_long(settings.timeout))
            elif search.out_of_memory and violation is None:
                outcome = outcome_of(clause, "error", search.out_of_memory)
            else:
                outcome = _judged(clause, search, violation, origin)
    except NotJudged as reason:
        outcome = outcome_of(clause, "not_judged", str(reason))
    except Exception:
        outcome = outcome_of(clause, "error", f"the clause itself failed:\n{traceback.format_exc()}")
    lacking = frozenset(case or clause.feature for case in violations) if clause.feature else frozenset()
    if len(lacking) == len(clause.cases):  # wrong in every case is no lack of one: the rest is judged all the same
        lacking = frozenset()
    return replace(outcome, seconds=round(time.perf_counter() - started, 4)), lacking


def _violations(clause: Clause, search: Search, domain: Domain, settings: Settings) -> dict[str, Violation]:
    """What the searches of the cases found: the first violation; of a feature, one for each case that is lacking.

    Raises:
        NotJudged: no case is left in the domain.
    """
    violations: dict[str, Violation] = {}
    reasons: list[NotJudged] = []
    for case, examples in (shares := list(_shares(clause, settings.examples))):
        try:
            found = _searched(clause, search, domain, case, examples, settings)
        except NotJudged as reason:
            reasons.append(reason)
            continue
        if found is not None and not clause.feature:
            found = _at_simpler_sizes(clause, search, domain, settings) or found
            if settings.shrink:
                with contextlib.suppress(Exception):  # an implementation may have left no way to import the reference
                    found = plainer(search, found)
            violations[case] = found
            break
        if found is not None:
            violations[case] = found
            search.start_again()
    if len(reasons) == len(shares):
        raise reasons[-1]
    return violations


def _shares(clause: Clause, examples: int) -> Iterator[tuple[str, int]]:
    """Each required case with a tenth of the examples, then all sizes with the rest.

    A feature is judged by its cases alone: there each is a feature of its own, and the first example is all zeros.
    """
    examples = min(examples, clause.enough or examples)
    share = max(3 if clause.feature else 1, examples // 10)
    for case in clause.cases:
        yield case, share
    if not (clause.feature and clause.cases):
        yield "", max(examples // 2, examples - share * len(clause.cases), 1)


def _at_simpler_sizes(clause: Clause, search: Search, domain: Domain, settings: Settings) -> Violation | None:
    """The same kind of violation at the simplest size where a short search finds it.

    A case begins at its own sizes, and shrinking takes no step to a size where another draw is needed to fail.
    """
    if search.size is None or not settings.shrink:
        return None
    search.allow_more_calls()
    for size in takewhile(lambda size: size != search.size, clause.domain(domain).rows):
        there = replace(clause, cases={"there": partial(eq, size)})
        if (found := _searched(there, search, domain, "there", _EXAMPLES_A_SIZE, settings)) is not None:
            return found
    return None


def _searched(
    clause: Clause, search: Search, domain: Domain, case: str, examples: int, settings: Settings
) -> Violation | None:
    """The smallest violation a search of one case finds."""
    test = clause.test(
        search.checked, domain=domain, case=case, examples=examples, search=search, shrink=settings.shrink
    )
    try:
        hypothesis.seed(seed_of(clause, settings.seed, case))(test)()
    except Violation as violation:
        return violation
    return None


def _judged(clause: Clause, search: Search, violation: Violation | None, origin: Origin | None) -> Outcome:
    if search.reason is not None and search.judged <= 0 and violation is None:
        raise search.reason
    if violation is None:
        return replace(outcome_of(clause, "holds", ""), **_seen_by(search))
    recipes = violation.recipes or {}
    message = str(violation)
    if changing := search.is_nondeterministic(recipes, violation.kind):
        message = f"nondeterministic: the same call came to different results; once it {message}"
    arguments: list[dict[str, Any]] = []
    code = ""
    if origin or violation.kind == "accepted":
        recording = _recorded(search, recipes, violation, changing)
        # What was refused to be refused is told by the call that was accepted, not only by what was drawn.
        accepted = recording.calls[-1:] if violation.kind == "accepted" else []
        arguments = [dict(zip(search.checked.operator.parameters, call.arguments, strict=False)) for call in accepted]
        with contextlib.suppress(Exception):  # a failure is one, whether or not it can be written down
            code = reproduction(recording, search.checked, origin) if origin else ""
    failed = _failed(clause, search, violation, *arguments)
    return replace(failed, message=message, reproduction=code)


def _failed(clause: Clause, search: Search, violation: Violation, *arguments: Mapping[str, Any]) -> Outcome:
    """A failure as a violation tells it, without another call."""
    return replace(
        outcome_of(clause, "fails", str(violation)),
        counterexample=counterexample_of(violation.recipes or {}, *arguments),
        evidence=evidence_of(violation.evidence),
        **_seen_by(search),
    )


def _seen_by(search: Search) -> dict[str, Any]:
    return {"examples": search.judged, "worst": search.worst, "reached": dict(search.reached)}


def cut_short(clause: Clause, found: Outcome | None, why: str) -> Outcome:
    """What a clause came to that did not run to its end: a failure that was found before counts, though there may be a
    smaller counterexample."""
    if found is None:
        return outcome_of(clause, "error", why)
    return replace(found, message=f"{found.message} (not fully shrunk: {why})")


def _recorded(search: Search, recipes: Mapping[str, Any], violation: Violation, changing: bool) -> Recording:
    """A violation again, and the calls that led to it; it need not come again, where it depends on earlier calls."""
    calls: list[Call] = []
    for _ in range(4):
        again, calls = search.recorded(recipes)
        if again is not None and again.kind == violation.kind:
            violation = again
            break
    return Recording(violation, calls, search.earlier_calls(), changing, search.clause.name == NO_MEMORY)


def too_long(timeout: float | None) -> str:
    """Why a clause was cut short whose time was up."""
    return f"it took longer than the time-out of {timeout:g} s"


def outcome_of(clause: Clause, status: Status, message: str) -> Outcome:
    """A clause's outcome that says no more than its status and why."""
    return Outcome(clause.id, clause.operator, clause.level, status, message, clause.sentence)


# ------------------------------------------------------------------------------------------------------------- again


def replay(report: Report, clauses: Iterable[str] = (), on_outcome: Emit = lambda outcome: None) -> list[Outcome]:
    """Run a report's counterexamples again, on the implementation that its header names and as it says.

    Args:
        report: read from its file, or as `check` returned it.
        clauses: only those of these ids; by default all.
        on_outcome: called with each outcome as it comes.

    Returns:
        An outcome for each counterexample: it holds there now, or fails as it did, or its operator is absent.

    Raises:
        ReportError: this version cannot read the header or a recipe.
        ImplementationError: the implementation cannot be loaded.
    """
    wanted = set(clauses)
    stored = [o for o in report.of("fails") if o.counterexample is not None and (not wanted or o.clause in wanted)]
    outcomes = []
    try:
        kept = ("examples", "seed", "dtype", "device", "conventions", "supports")
        settings = Settings(**{name: report.header[name] for name in kept if name in report.header})
        name = report.header["implementation"]
    except (KeyError, TypeError) as broken:
        raise ReportError(f"the report's header lacks something: {broken}; check again") from None
    with preserved(settings.seed), loaded(name) as subject:
        for outcome in stored:
            outcomes.append(_again(outcome, subject, settings))
            on_outcome(outcomes[-1])
    return outcomes


def _again(outcome: Outcome, subject: Implementation, settings: Settings) -> Outcome:
    """What a stored counterexample comes to now; four runs, since what it showed may have been nondeterministic."""
    clause, stored = known_clause(outcome.clause), outcome.counterexample or {}
    function = subject.functions.get(clause.operator)
    if function is None:
        return outcome_of(clause, "absent", "not provided")
    checked = Checked(OPERATORS[clause.operator], function, settings.conventions, device=settings.device)
    now = replayed(clause, stored.get("recipes"), checked)
    return replace(now, counterexample=stored, reproduction=outcome.reproduction) if now.outcome == "fails" else now


def replayed(clause: Clause, stored: Any, checked: Checked) -> Outcome:
    """What the stored recipes of a counterexample come to now.

    Raises:
        ReportError: this version cannot read them.
    """
    try:
        recipes = {name: from_json(data) for name, data in stored.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as broken:
        raise ReportError(f"{clause.id}: its counterexample cannot be read: {broken}; check again") from None
    if set(recipes) != set(clause.given.draws):
        raise ReportError(f"{clause.id}: this version draws other arguments than its counterexample's; check again")
    for _ in range(4):
        try:
            with quiet():
                clause.run(checked, recipes)
        except Violation as violation:
            seen = {"counterexample": counterexample_of(recipes), "evidence": evidence_of(violation.evidence)}
            return replace(outcome_of(clause, "fails", str(violation)), **seen)
        except NotJudged as reason:
            return outcome_of(clause, "not_judged", str(reason))
        except OutOfMemory as reason:
            return outcome_of(clause, "error", str(reason))
        except Exception as broken:  # of the recipes: what the implementation raises is a violation
            raise ReportError(f"{clause.id}: its counterexample cannot be built: {broken}; check again") from None
    return outcome_of(clause, "holds", "")


# ----------------------------------------------------------------------------------------- leaving the caller's process


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What an implementation prints or warns about goes nowhere."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def settings_put_back() -> Iterator[None]:
    """What calls inside change of the settings that all code of the process shares is put back, so that the clause that
    is about them sees a call change them, whichever clause calls first."""
    with contextlib.suppress(Violation), undisturbed(SETTINGS):
        yield


@contextlib.contextmanager
def storage_elsewhere() -> Iterator[None]:
    """Hypothesis notes what it read of loaded modules in a folder, even without a database: not in the caller's."""
    home = storage_directory(intent_to_write=False)
    before: Any = getattr(home, "path", home)  # releases before 6.170 return the path itself
    with tempfile.TemporaryDirectory(prefix="spec_lm-") as folder:
        set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            set_hypothesis_home_dir(before)


@contextlib.contextmanager
def preserved(seed: int) -> Iterator[None]:
    """Afterwards the caller's RNGs, default dtype, grad mode, threads, warnings filters, folder and environment are as
    they were before; inside, torch runs on one thread, its RNG is seeded, and an import leaves no compiled file."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    dtype, grad, threads = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
    deterministic, folder = torch.are_deterministic_algorithms_enabled(), current_folder()
    environment, limit = dict(os.environ), sys.getrecursionlimit()
    writes_no_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=devices), np.errstate(), storage_elsewhere():
            torch.manual_seed(seed)
            torch.set_num_threads(1)  # inputs are tiny: a second thread costs more than it gives
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.are_deterministic_algorithms_enabled() != deterministic:  # setting it imports a compiler: seconds
            torch.use_deterministic_algorithms(deterministic)
        folder_to(folder)
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)
        sys.setrecursionlimit(limit)
        sys.dont_write_bytecode = writes_no_bytecode
