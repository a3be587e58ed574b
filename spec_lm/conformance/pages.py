"""What the Markdown and the HTML of a report share: the facts that their templates show.

Everything that comes from an implementation (its name, messages, values, code) is text of unknown origin: templates
escape it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from spec_lm.conformance.display import evidence_text, is_plain, name_of, summary_text, values_text
from spec_lm.conformance.report import STATUSES, Cause, Outcome, Report, printable

LONGEST_MESSAGE = 4000
# A sign for each outcome, so that none is told by its color alone.
SIGNS = {"holds": "✓", "fails": "✗", "waived": "~", "absent": "·", "not_judged": "○", "error": "!"}


@dataclass(frozen=True)
class ClausePage:
    """What is shown of one outcome.

    Args:
        outcome: of the clause.
        causes: what may be wrong, told with the first failure of an operator.
        file: where the report lies, for the command that replays it; empty where that is not known.
    """

    outcome: Outcome
    causes: tuple[Cause, ...] = ()
    file: str = ""

    @property
    def id(self) -> str:
        """The clause's id."""
        return clipped(" ".join(self.outcome.clause.split()), 200)

    @property
    def name(self) -> str:
        """The clause's name without its operator."""
        return self.id.partition(".")[2]

    def anchor(self, section: int) -> str:
        """Where it stands on a page of several sections."""
        return f"{section}-{self.id}"

    @property
    def sign(self) -> str:
        """A sign for what it came to."""
        return SIGNS[self.outcome.outcome]

    @property
    def word(self) -> str:
        """What it came to, in words."""
        return self.outcome.outcome.replace("_", " ")

    @property
    def message(self) -> str:
        """What was seen, unless the evidence says the same; not at any length."""
        if self.outcome.evidence and is_plain(self.outcome.message):
            return ""
        return clipped(self.outcome.message)

    @property
    def worst(self) -> str:
        """The largest error, as a part of its bound; empty where nothing was compared or no number says more."""
        ratio = self.outcome.worst
        return f"{ratio:.0%}" if 0.005 <= ratio < 100 else "under 1%" if 0 < ratio < 0.005 else ""

    @property
    def values(self) -> str:
        """The arguments of the counterexample, a line each."""
        stored = self.outcome.counterexample
        return clipped("\n".join(values_text(stored["values"]))) if stored else ""

    @property
    def evidence(self) -> str:
        """Got and expected, where they differ worst, and by how much."""
        return clipped("\n".join(evidence_text(self.outcome.evidence))) if self.outcome.evidence else ""

    @property
    def code(self) -> str:
        """The failure in plain PyTorch."""
        return printable(self.outcome.reproduction)

    @property
    def replay(self) -> str:
        """The command that runs the counterexample again."""
        stored = self.outcome.outcome == "fails" and self.outcome.counterexample and self.file
        return f"spec-lm replay {printable(self.file)} {self.outcome.clause}" if stored else ""


@dataclass(frozen=True)
class ReportPage:
    """What is shown of one report.

    Args:
        report: of one implementation.
        file: where it lies; empty where that is not known.
    """

    report: Report
    file: str = ""

    @property
    def name(self) -> str:
        """The implementation as its user wrote it."""
        return clipped(name_of(self.report.header), 200)

    @property
    def verdict(self) -> str:
        """The last line of a check."""
        return clipped(summary_text(self.report), 1000)

    @property
    def tone(self) -> str:
        """The outcome whose color the verdict takes."""
        return {0: "holds", 1: "fails"}.get(self.report.exit_code, "error")

    @cached_property
    def clauses(self) -> list[ClausePage]:
        """All outcomes in their order."""
        first = {outcome.operator: outcome.clause for outcome in reversed(self.report.of("fails"))}
        causes = {clause: tuple(self.report.causes(operator)) for operator, clause in first.items()}
        return [ClausePage(outcome, causes.get(outcome.clause, ()), self.file) for outcome in self.report]

    @property
    def broken(self) -> dict[str, list[ClausePage]]:
        """What fails or could not be run, by operator."""
        return _by_operator(page for page in self.clauses if page.outcome.outcome in ("fails", "error"))

    @property
    def waived(self) -> list[ClausePage]:
        """What fails and is accepted, with the reason in its message."""
        return [page for page in self.clauses if page.outcome.outcome == "waived"]

    @property
    def others(self) -> dict[str, list[ClausePage]]:
        """All other outcomes, by operator."""
        return _by_operator(page for page in self.clauses if page.outcome.outcome not in ("fails", "error"))

    @cached_property
    def operators(self) -> dict[str, list[ClausePage]]:
        """All outcomes, by operator."""
        return _by_operator(self.clauses)

    @property
    def run(self) -> dict[str, str]:
        """With what and how it was checked, by name."""
        header = self.report.header
        versions = header.get("versions", {})
        named = {
            name: header[name] for name in ("device", "dtype", "seed", "examples", "level", "shard") if name in header
        }
        declared = {
            **header.get("conventions", {}),
            **{f"supports {n}": v for n, v in header.get("supports", {}).items()},
        }
        facts = {"spec": header.get("spec", ""), **versions, **named, **declared}
        return {clipped(str(name), 100): clipped(str(value), 200) for name, value in facts.items()}


def counts_of(pages: Iterable[ClausePage]) -> dict[str, int]:
    """How many clauses came to each outcome that any came to."""
    found = [page.outcome.outcome for page in pages]
    return {status: found.count(status) for status in STATUSES if status in found}


def _by_operator(pages: Iterable[ClausePage]) -> dict[str, list[ClausePage]]:
    groups: dict[str, list[ClausePage]] = {}
    for page in pages:
        groups.setdefault(page.outcome.operator, []).append(page)
    return groups


def clipped(text: str, longest: int = LONGEST_MESSAGE) -> str:
    """Text of unknown origin and length as one may show it."""
    text = printable(text[: longest + 1])
    return text if len(text) <= longest else f"{text[:longest]} .."


def templates(filters: Mapping[str, Any]) -> Environment:
    """The templates of reports; what they are given is escaped, and what they are not given is an error."""
    return templates_of("spec_lm.conformance", filters, autoescape=True, finalize=_shown)


def templates_of(package: str, filters: Mapping[str, Any], **options: Any) -> Environment:
    """The templates of a package, with options of Jinja; what they are not given is an error."""
    loader = PackageLoader(package, "templates")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, **options)
    environment.filters.update(filters)
    return environment


def _shown(value: Any) -> Any:
    """What stands in a page: no control characters."""
    return value if isinstance(value, Markup) else printable(str(value))
