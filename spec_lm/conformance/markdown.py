"""Reports as Markdown that fits a comment on a pull request and the summary of a CI's step."""

import re
from collections.abc import Iterable
from typing import Any

from markupsafe import Markup

from spec_lm.conformance.pages import ClausePage, ReportPage, clipped, counts_of, templates
from spec_lm.conformance.report import STATUSES, Report, printable

LONGEST = 60_000  # GitHub takes 65,536 characters
_LONGEST_FAILURE = 6_000
_HINT = 300  # what is kept free for saying what was left out


def markdown_text(reports: Iterable[Report], file: str = "") -> str:
    """Reports as Markdown, never longer than `LONGEST`: verdicts and counts first, then as many failures as fit.

    Args:
        reports: of a file.
        file: its name, for the commands that read on; empty where that is not known.
    """
    pages = [ReportPage(report, file) for report in reports]
    left = LONGEST - _HINT
    heads: list[str] = []
    for page in pages:
        head = _TEMPLATES.get_template("head.md.j2").render(page=page, counts_of=counts_of, statuses=STATUSES)
        left -= len(head)
        if left < 0:
            break
        heads.append(head)
    parts, left_out = [], 0
    for page, head in zip(pages, heads, strict=False):
        failures, missed = _failures(page, left)
        parts += [head, *failures]
        left -= sum(len(each) + 1 for each in failures)
        left_out += missed
    return "\n".join([*parts, *_hints(left_out, len(pages) - len(heads), file)])


def _failures(page: ReportPage, room: int) -> tuple[list[str], int]:
    """The failures that fit, and how many do not."""
    told: list[str] = []
    broken = [clause for clauses in page.broken.values() for clause in clauses]
    for clause in broken:
        text = _failure(clause)
        room -= len(text) + 1
        if room < 0:
            break
        told.append(text)
    return told, len(broken) - len(told)


def _failure(clause: ClausePage) -> str:
    """A failure; where it is long, without its values and code."""
    template = _TEMPLATES.get_template("failure.md.j2")
    text = template.render(clause=clause, whole=True)
    return text if len(text) <= _LONGEST_FAILURE else template.render(clause=clause, whole=False)


def _hints(failures: int, reports: int, file: str) -> Iterable[str]:
    """What was left out, and how to read it."""
    left_out = [f"{failures} more failure{'' if failures == 1 else 's'}"] if failures else []
    left_out += [f"{reports} more implementation{'' if reports == 1 else 's'}"] if reports else []
    if left_out:
        read = code(f"spec-lm report {clipped(file, 100)} --format html --output report.html")
        yield f"\n**Left out, to keep this short: {' and '.join(left_out)}.** All of them: {read}\n"


# ----------------------------------------------------------------------------------------------------------- escaping


def code(value: Any) -> Markup:
    """Text on one line as code, in which Markdown and HTML read nothing."""
    flat = " ".join(printable(str(value)).split())
    ticks = "`" * (_longest_run(flat) + 1)
    return Markup(f"{ticks} {flat} {ticks}" if "`" in flat else f"`{flat}`") if flat else Markup("")


def cell(value: Any) -> Markup:
    """`code` inside a table."""
    return Markup(str(code(value)).replace("|", "\\|"))


def fenced(text: str, language: str = "") -> Markup:
    """Text as a block of code, between fences longer than any in it."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return Markup(f"{fence}{language}\n{text}\n{fence}")


def plain(text: str) -> Markup:
    """Text as it is: what Markdown or HTML could read is escaped."""
    return Markup(re.sub(r"[\\`*_\[\]<>#|~&$]", r"\\\g<0>", " ".join(printable(text).split())))


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)


_TEMPLATES = templates({"code": code, "cell": cell, "fenced": fenced, "plain": plain})
