"""The clauses as items of a test module of one's own.

    from spec_lm.testing import parametrize_with_clauses

    @parametrize_with_clauses("path/to/adapters.py")
    def test_conforms(check):
        check()

Importing this imports no torch; the decorator does, since it asks the register for the clauses.
"""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from spec_lm.conformance.clause import Clause
    from spec_lm.conformance.implementation import Implementation
    from spec_lm.conformance.report import Outcome
    from spec_lm.conformance.runner import OperatorRun, Settings

# Implementations that were loaded for checks; pytest's end closes them, which puts sys.path and the modules back.
OPEN = contextlib.ExitStack()
# What the clauses that were asked for came to, by implementation and id: pytest's end tells from it what may be wrong.
SEEN: "dict[str, dict[str, Outcome]]" = {}


class ClauseFailed(Exception):
    """A clause fails, or is waived; its text is what `spec-lm check` prints."""


class ClauseError(Exception):
    """A clause could not be run; its text is what `spec-lm check` prints. A waiver does not cover it."""


def parametrize_with_clauses(
    implementation: Any = None,
    *,
    operators: Iterable[str] | None = None,
    clauses: Iterable[str] | None = None,
    level: str | None = None,
    examples: int | None = None,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
    conventions: Mapping[str, str] | None = None,
    supports: Mapping[str, Any] | None = None,
    waive: Mapping[str, Any] | None = None,
    config: str | Path | None = None,
) -> pytest.MarkDecorator:
    """Decorate a test with one parameter, `check`: it runs once for each clause, named by the clause's id.

    `check()` runs the clause: it raises what `spec-lm check` would print, or skips where the operator is absent or the
    clause cannot be judged. A waived clause is a strict xfail: once it holds, the test fails.

    Args:
        implementation: as for `spec_lm.check`; by default what `config` declares.
        operators: only these.
        clauses: only these ids.
        level: "must" (the default), or "should" for both levels.
        examples: drawn for each clause, 50 by default.
        seed: of all draws.
        dtype: of the arguments.
        device: where they lie.
        conventions: declared choices, over those the implementation declares.
        supports: the declared part of the domain, over what the implementation declares.
        waive: failures that are accepted, by clause id: the reason, or a table of "reason" and "counterexample".
        config: a file with [tool.spec-lm], as pyproject.toml; arguments win over what it declares.

    Raises:
        UserError: an unknown operator, clause or setting, a waiver without a reason, or no implementation.
    """
    from spec_lm.conformance.config import Config, read_config
    from spec_lm.conformance.report import UserError
    from spec_lm.conformance.runner import Settings, select
    from spec_lm.conformance.waivers import waivers_of

    declared = read_config(Path(config)) if config else Config()
    what = _one(declared.implementation) if implementation is None else implementation
    asked = declared.asked(declared.implementation or [str(what)], level, examples, conventions, supports)
    if what is None:
        raise UserError("parametrize_with_clauses: name an implementation, or a config that declares one")
    waivers = {**asked["waive"], **waivers_of(waive or {})}
    run = (asked["examples"], seed, dtype, device, asked["conventions"], asked["supports"])
    chosen = select(operators, clauses, asked["level"])
    checks = _Lazy(what, Settings(*run, waivers=waivers), chosen)
    marks = {clause_id: _xfail(waiver.reason) for clause_id, waiver in waivers.items()}
    items = [pytest.param(Check(clause, checks), id=clause.id, marks=marks.get(clause.id, ())) for clause in chosen]
    return pytest.mark.parametrize("check", items)


def _one(specs: tuple[str, ...]) -> Any:
    """The implementation that a file declares: one, or pairs."""
    first, *others = specs or (None,)
    return specs if others else first


def _xfail(reason: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(reason=reason, raises=ClauseFailed, strict=True)


@dataclass(frozen=True)
class Check:
    """A clause on an implementation, to be called."""

    clause: "Clause"
    of: "_Lazy"

    def __call__(self) -> None:
        """Run the clause.

        Raises:
            ClauseFailed: it fails.
            ClauseError: it could not be run.
        """
        __tracebackhide__ = True
        self.of.loaded().run(self.clause)

    def __repr__(self) -> str:
        return f"<check of {self.clause.id}>"


@dataclass
class _Lazy:
    """An implementation that is loaded when its first clause runs; where it cannot be, every clause says why."""

    spec: Any
    settings: "Settings"
    clauses: "list[Clause]"
    _checks: "Checks | Exception | None" = None

    def loaded(self) -> "Checks":
        from spec_lm.conformance.implementation import ImplementationError, loaded
        from spec_lm.conformance.runner import preserved

        __tracebackhide__ = True
        if self._checks is None:
            try:
                with preserved(self.settings.seed):
                    subject = OPEN.enter_context(loaded(self.spec))
                self._checks = Checks(subject, self.settings.declared_by(subject), self.clauses)
            except ImplementationError as error:
                self._checks = error
        if isinstance(self._checks, Exception):
            raise self._checks
        return self._checks


@dataclass
class Checks:
    """An implementation under check, one clause at a time, in any order.

    Args:
        subject: the implementation.
        settings: how it is checked, with what it declares.
        clauses: all that may be asked for.
    """

    subject: "Implementation"
    settings: "Settings"
    clauses: "list[Clause]"
    _runs: "dict[str, OperatorRun]" = field(default_factory=dict)
    _first: "dict[str, Outcome]" = field(default_factory=dict)

    def run(self, clause: "Clause") -> None:
        """Run a clause: a failure is raised, what is absent or cannot be judged is skipped.

        Raises:
            ClauseFailed: it fails, or is waived.
            ClauseError: it could not be run.
        """
        from spec_lm.conformance.display import failure_text
        from spec_lm.conformance.waivers import is_needless

        __tracebackhide__ = True
        outcome = self.outcome(clause)
        if outcome.outcome in ("absent", "not_judged"):
            pytest.skip(f"{outcome.outcome.replace('_', ' ')}: {outcome.message}")
        if outcome.outcome in ("fails", "waived"):
            raise ClauseFailed(failure_text(outcome))
        # Under a waiver that is no longer needed the test passes, which its strict xfail turns into a failure.
        if outcome.outcome == "error" and not is_needless(outcome):
            raise ClauseError(failure_text(outcome))

    def outcome(self, clause: "Clause") -> "Outcome":
        """What a clause comes to, after the clauses of its operator that decide about it."""
        from spec_lm.conformance.runner import preserved

        with preserved(self.settings.seed):
            run = self._run_of(clause.operator)
            outcome = self._first[clause.id] if clause.id in self._first else run.outcome(clause)
        SEEN.setdefault(self.subject.name, {})[clause.id] = outcome
        return outcome

    def _run_of(self, operator: str) -> "OperatorRun":
        from spec_lm.conformance.runner import OperatorRun, decides, in_order

        if operator not in self._runs:
            function, origin = self.subject.functions.get(operator), self.subject.origins.get(operator)
            run = OperatorRun(operator, function, self.settings, origin)
            deciding = [clause for clause in self.clauses if clause.operator == operator and decides(clause)]
            self._first |= {clause.id: run.outcome(clause) for clause in in_order(deciding)}
            self._runs[operator] = run
        return self._runs[operator]
