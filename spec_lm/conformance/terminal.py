"""Reports as a terminal shows them: what `spec-lm check` printed."""

from collections.abc import Iterable, Iterator

from spec_lm.conformance.display import (
    by_operator,
    failures_text,
    header_text,
    operator_text,
    summary_text,
    warnings_text,
)
from spec_lm.conformance.operators import OPERATORS
from spec_lm.conformance.report import Report, printable


def terminal_blocks(reports: Iterable[Report], file: str = "", whole: bool = False) -> Iterator[str]:
    """Reports as blocks of text, to be set apart by empty lines.

    Args:
        reports: of a file.
        file: its name, for the commands that replay its failures.
        whole: tell every failure in full.
    """
    width = max(map(len, OPERATORS))
    for report in reports:
        lines = (operator_text(operator, outcomes, width) for operator, outcomes in by_operator(report).items())
        yield "\n".join([header_text(report.header), *lines])
        yield from map(printable, failures_text(report, file, whole))
        if warned := "\n".join(warnings_text(report)):
            yield warned
        yield summary_text(report)
