"""What a check came to: outcomes, the report, and its file (JSON Lines: header, one outcome a line, footer)."""

import contextlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from spec_lm.conformance.lines import is_deep, wrong_in

Status = Literal["holds", "fails", "waived", "absent", "not_judged", "error"]
STATUSES: tuple[Status, ...] = ("holds", "fails", "waived", "absent", "not_judged", "error")
_VERDICTS = ("holds", "fails", "waived", "error")


class UserError(Exception):
    """What the user of a front end can mend; its text is the whole message."""


class ReportError(UserError):
    """A report file cannot be read; the text says which line, and why."""


def printable(text: str) -> str:
    """Text of unknown origin as one may print it: control characters, line ends apart, are written as escapes."""
    return "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in text)


def shortened(text: str, longest: int) -> str:
    """Text of unknown origin on one line, its end left out where it is longer."""
    text = printable(" ".join(text.split()))
    return text if len(text) <= longest else f"{text[:longest]} .."


def _escaped(character: str) -> str:
    return "    " if character == "\t" else character.encode("unicode_escape").decode("ascii")


@dataclass(frozen=True)
class Outcome:
    """What one clause came to.

    Args:
        outcome: holds, fails, waived, absent, not_judged or error.
        message: what was seen, or the reason.
        counterexample: the recipes of the smallest failing input, and its values up to 64 numbers each.
        evidence: got and expected around the worst entry, its index, error and bound.
        reproduction: the failure in plain PyTorch; empty where it cannot be written so.
        examples: how many were judged before the first failure.
        worst: the largest err/bound of all comparisons up to the first failure.
        reached: how many examples lay in each required partition.
    """

    clause: str
    operator: str
    level: str
    outcome: Status
    message: str = ""
    sentence: str = ""
    counterexample: dict[str, Any] | None = None
    evidence: dict[str, Any] | None = None
    reproduction: str = ""
    examples: int = 0
    seconds: float = 0.0
    worst: float = 0.0
    reached: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Cause:
    """What may be wrong with an operator, told by which of its clauses fail.

    Args:
        operator: whose clauses fail.
        text: in words, with how sure it is.
        fault: the catalogue's fault that it looks like.
        family: what there is to mend.
        below: the operator inside it that is to be mended first.
    """

    operator: str
    text: str
    fault: str = ""
    family: str = ""
    below: str = ""


@dataclass(frozen=True, repr=False)
class Report:
    """All outcomes of one check of one implementation.

    Args:
        header: implementation, versions, device, dtype, seed, examples, level, spec version.
        outcomes: one a clause, in the order they came.
        required: operators whose absence fails the check ("all" stands for every one).
        complete: False where the check was interrupted.
        diagnosis: what may be wrong, first causes first.
    """

    header: dict[str, Any]
    outcomes: tuple[Outcome, ...]
    required: tuple[str, ...] = ()
    complete: bool = True
    diagnosis: tuple[Cause, ...] = ()

    def __iter__(self) -> Iterator[Outcome]:
        return iter(self.outcomes)

    def __getitem__(self, clause_id: str) -> Outcome:
        for outcome in self.outcomes:
            if outcome.clause == clause_id:
                return outcome
        raise KeyError(f"{clause_id} was not run; the report holds {len(self.outcomes)} clauses")

    def __repr__(self) -> str:
        """The counts, and what fails: short enough for the message of an assertion."""
        counts = ", ".join(f"{number} {status}" for status, number in self.counts.items() if number)
        broken = "".join(f"\n  {o.outcome}  {o.clause}: {printable(o.message)}" for o in self.of("fails", "error"))
        return f"<Report on {printable(str(self.header.get('implementation', '')))}: {counts}>{broken}"

    def of(self, *statuses: Status) -> list[Outcome]:
        """The outcomes that are one of these."""
        return [outcome for outcome in self.outcomes if outcome.outcome in statuses]

    def causes(self, operator: str) -> list[Cause]:
        """What may be wrong with an operator, the most likely first."""
        return [cause for cause in self.diagnosis if cause.operator == operator]

    @property
    def counts(self) -> dict[str, int]:
        """How many clauses came to each outcome."""
        found = Counter(outcome.outcome for outcome in self.outcomes)
        return {status: found[status] for status in STATUSES}

    @property
    def absent(self) -> list[str]:
        """The operators that are not provided."""
        return list(dict.fromkeys(outcome.operator for outcome in self.of("absent")))

    @property
    def missing(self) -> list[str]:
        """The required operators that are not provided."""
        required = self.absent if "all" in self.required else self.required
        return [operator for operator in self.absent if operator in required]

    @property
    def provided(self) -> bool:
        """Whether at least one operator is there to check; what one shard of a check lacks may be in another."""
        return "shard" in self.header or any(outcome.outcome != "absent" for outcome in self.outcomes)

    @property
    def judged(self) -> bool:
        """Whether at least one clause came to a verdict; what one shard of a check lacks may be in another."""
        return "shard" in self.header or any(outcome.outcome in _VERDICTS for outcome in self.outcomes)

    @property
    def conforms(self) -> bool:
        """Whether nothing failed and nothing that is required is missing."""
        return self.exit_code == 0

    @property
    def exit_code(self) -> int:
        """2 where the check was interrupted; else 1 where a clause fails; else 2 where one could not be run, what is
        required is missing or nothing was judged; else 0."""
        if self.of("fails") and self.complete:
            return 1
        return 2 if self.of("error") or self.missing or not self.judged or not self.complete else 0

    def lines(self) -> Iterator[dict[str, Any]]:
        """The lines of its file: header, outcomes, footer."""
        yield {"kind": "header", **self.header}
        for outcome in self.outcomes:
            yield outcome_line(outcome)
        yield self.footer()

    def footer(self) -> dict[str, Any]:
        """The counts, and the verdict."""
        counts = {**self.counts, "clauses": len(self.outcomes)}
        return {"kind": "footer", **counts, "absent_operators": self.absent, "complete": self.complete} | {
            "required": list(self.required),
            "exit_code": self.exit_code,
            "diagnosis": [asdict(cause) for cause in self.diagnosis],
        }

    def write(self, path: str | Path) -> None:
        """Write the report as JSON Lines."""
        with open(path, "w", encoding="utf-8") as file:
            write_lines(file, self.lines())


def outcome_line(outcome: Outcome) -> dict[str, Any]:
    """An outcome as a line of the report's file."""
    return {"kind": "outcome", **asdict(outcome)}


def outcome_from(line: Mapping[str, Any]) -> Outcome:
    """The outcome of a line that `outcome_line` made; entries that this version has no fields for are passed over."""
    known = _known(line, Outcome)
    return Outcome(**{**known, "worst": float(known.get("worst", 0.0))})


def _line_text(line: Mapping[str, Any]) -> str:
    """A line of a report's file as JSON."""
    return json.dumps(_plain(line), allow_nan=False)


def outcome_text(outcome: Outcome) -> str:
    """An outcome as JSON, for another process."""
    return _line_text(outcome_line(outcome))


def outcome_of_text(text: str) -> Outcome:
    """The outcome that `outcome_text` wrote."""
    return outcome_from(json.loads(text))


def write_lines(file: TextIO, lines: Iterable[Mapping[str, Any]]) -> None:
    """Append lines to a report's file, each whole."""
    for line in lines:
        file.write(_line_text(line) + "\n")
        file.flush()


@dataclass
class Tail:
    """The lines of a file that another process writes.

    Args:
        path: of the file; it need not be there yet.
        read: how many bytes have been read.
    """

    path: Path
    read: int = 0

    def lines(self) -> Iterator[dict[str, Any]]:
        """The whole lines that came since it was last asked; what is no JSON object is passed over."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.read)
                written = file.read()
        except FileNotFoundError:
            return
        whole = written[: written.rfind(b"\n") + 1]
        self.read += len(whole)
        for text in whole.splitlines():
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict):
                    yield line


def _plain(value: Any) -> Any:
    """JSON values; inf and nan, which JSON has not, are strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def read_reports(path: str | Path) -> list[Report]:
    """The reports of a file, one an implementation; one without its footer is incomplete.

    Raises:
        ReportError: the file is missing, or a line is not one of a report.
    """
    mend = "write one with `spec-lm check --report`"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}; {mend}") from error
    except UnicodeDecodeError:
        raise ReportError(f"cannot read {path}: it is no text in UTF-8, as a report is; {mend}") from None
    reports: list[Report] = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            _read_line(reports, line, lambda why, n=number: ReportError(f"{path}, line {n}: {why}"))
    return reports


def _read_line(reports: list[Report], text: str, error: Callable[[str], ReportError]) -> None:
    line: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        line = json.loads(text)
    if wrong := "nested too deep" if is_deep(line) else wrong_in(line):
        raise error(wrong)
    kind = line.pop("kind")
    if kind == "header":
        reports.append(Report(line, (), complete=False))
        return
    if not reports:
        raise error(f"a line of kind {kind!r} before any header")
    last = reports[-1]
    if kind == "outcome":
        reports[-1] = Report(last.header, (*last.outcomes, outcome_from(line)), complete=False)
    else:
        causes = tuple(Cause(**_known(cause, Cause)) for cause in line.get("diagnosis", ()))
        required, complete = tuple(line.get("required", ())), line.get("complete", False)
        reports[-1] = Report(last.header, last.outcomes, required, complete, causes)


def _known(data: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The entries that this version has fields for."""
    return {name: data[name] for name in kind.__dataclass_fields__ if name in data}
