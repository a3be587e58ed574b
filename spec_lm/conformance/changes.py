"""What differs between reports: of one implementation over time, and of several side by side."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from spec_lm.conformance.report import Outcome, Report, ReportError, printable, shortened

_SETTINGS = ("spec", "device", "dtype", "seed", "examples", "level", "conventions", "supports", "shard")
_WORSE = {("holds", "fails"), ("holds", "error"), ("waived", "fails")}
_NOT_RUN = "not run"


@dataclass(frozen=True)
class Change:
    """A clause that came to something else.

    Args:
        clause: its id.
        old: what it came to before; None where it was not run.
        new: what it comes to now; None where it was not run.
    """

    clause: str
    old: Outcome | None
    new: Outcome | None

    @property
    def kind(self) -> Literal["worse", "better", "changed"]:
        """Worse where what held or was waived is broken, better where what was broken holds."""
        old, new = _word(self.old), _word(self.new)
        if (old, new) in _WORSE:
            return "worse"
        return "better" if new == "holds" and old in ("fails", "error", "waived") else "changed"

    def text(self, width: int) -> str:
        """The change on one line."""
        seen = f"   {shortened(self.new.message, 60)}" if self.new and self.new.outcome in ("fails", "error") else ""
        return f"{self.kind:<8} {self.clause:<{width}}   {_word(self.old)} -> {_word(self.new)}{seen}"


@dataclass(frozen=True)
class Difference:
    """What changed between two reports on one implementation.

    Args:
        settings: what they were run with, where that differs: name, before, now.
        changes: clauses that came to something else, in the new report's order.
        unchanged: how many came to the same.
        complete: whether the new report has its end.
    """

    settings: tuple[tuple[str, Any, Any], ...]
    changes: tuple[Change, ...]
    unchanged: int
    complete: bool = True

    def of(self, kind: str) -> list[Change]:
        """The changes of one kind."""
        return [change for change in self.changes if change.kind == kind]

    def lines(self) -> Iterator[str]:
        """The difference as text, what is worse first."""
        for name, old, new in self.settings:
            yield printable(f"{name} differs: {old} -> {new}")
        if not self.complete:
            yield "the new report is incomplete: its check did not end"
        width = max((len(change.clause) for change in self.changes), default=0)
        for kind in ("worse", "changed", "better"):
            yield from (printable(change.text(width)) for change in self.of(kind))
        counts = ", ".join(f"{len(self.of(kind))} {kind}" for kind in ("worse", "better", "changed"))
        yield f"{counts}, {self.unchanged} as before"


def difference(old: Report, new: Report) -> Difference:
    """What changed from one report to another."""
    before, now = ({outcome.clause: outcome for outcome in report} for report in (old, new))
    ids = dict.fromkeys([*now, *before])
    pairs = [Change(clause, before.get(clause), now.get(clause)) for clause in ids]
    changes = tuple(change for change in pairs if _word(change.old) != _word(change.new))
    return Difference(tuple(differing([old, new])), changes, len(pairs) - len(changes), new.complete)


def paired(old: list[Report], new: list[Report]) -> Iterator[tuple[Report, Report]]:
    """The reports of two files that are on one implementation; two single ones always are.

    Raises:
        ReportError: one of several is in one file only.
    """
    if len(old) == len(new) == 1:
        yield old[0], new[0]
        return
    before, now = ({_name(report): report for report in reports} for reports in (old, new))
    if lacking := sorted(before.keys() ^ now.keys()):
        raise ReportError(f"only one of the two files has a report on {', '.join(map(printable, lacking))}")
    yield from ((before[name], now[name]) for name in now)


def differing(reports: list[Report]) -> Iterator[tuple[str, Any, Any]]:
    """What reports were run with, where two of them differ: name, the first's value, the other's."""
    first, *others = [_run_of(report) for report in reports]
    for other in others:
        for name in dict.fromkeys([*first, *other]):
            if first.get(name) != other.get(name):
                yield name, first.get(name), other.get(name)


def _run_of(report: Report) -> dict[str, Any]:
    """Everything that a report was run with."""
    header = report.header
    return {"implementation": _name(report), **header.get("versions", {})} | {
        name: header.get(name) for name in _SETTINGS if name in header
    }


def side_by_side(reports: list[Report], every: bool = False) -> Iterator[str]:
    """Implementations in columns, a row a clause.

    Args:
        reports: of each implementation.
        every: also the clauses that came to the same everywhere.
    """
    settings = {name for name, *_ in differing(reports)} - {"implementation"}
    for number, report in enumerate(reports, 1):
        counts = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in report.counts.items() if count)
        apart = "".join(f"; {name} {_run_of(report).get(name)}" for name in sorted(settings))
        yield printable(f"{number}  {_name(report)}: {counts}{apart}{'' if report.complete else '; incomplete'}")
    found = [{outcome.clause: _word(outcome) for outcome in report} for report in reports]
    rows = {
        clause: [each.get(clause, _NOT_RUN) for each in found] for clause in dict.fromkeys(chain.from_iterable(found))
    }
    apart = {clause for clause, words in rows.items() if len(set(words)) > 1}
    shown = {clause: words for clause, words in rows.items() if every or clause in apart}
    if shown:
        width = max(map(len, shown))
        numbers = [str(number) for number in range(1, len(reports) + 1)]
        yield ""
        yield from (_row(clause, words, width) for clause, words in {"clause": numbers, **shown}.items())
    yield ""
    yield f"{len(apart)} of {len(rows)} clauses differ"


def _row(clause: str, words: list[str], width: int) -> str:
    return printable(f"{clause:<{width}}   {'  '.join(f'{word:<10}' for word in words)}".rstrip())


def _name(report: Report) -> str:
    return str(report.header.get("implementation", ""))


def _word(outcome: Outcome | None) -> str:
    return outcome.outcome.replace("_", " ") if outcome else _NOT_RUN
