"""A report as JUnit XML, for a CI's own display of tests."""

import xml.etree.ElementTree as ET
from collections.abc import Iterable

from spec_lm.conformance.display import failure_text, name_of
from spec_lm.conformance.report import Cause, Outcome, Report, printable

_ELEMENTS = {"fails": "failure", "error": "error", "absent": "skipped", "not_judged": "skipped", "waived": "skipped"}


def junit_text(reports: Iterable[Report]) -> str:
    """Reports as JUnit XML: a test suite each, a test case a clause."""
    root = ET.Element("testsuites")
    root.extend(_suite(report) for report in reports)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(report: Report) -> ET.Element:
    counts = report.counts
    numbers = {"tests": len(report.outcomes), "failures": counts["fails"], "errors": counts["error"]} | {
        "skipped": sum(counts[status] for status in ("absent", "not_judged", "waived")),
        "time": round(sum(outcome.seconds for outcome in report), 4),
    }
    suite = ET.Element("testsuite", {"name": name_of(report.header), **{key: str(n) for key, n in numbers.items()}})
    first = {outcome.operator: outcome for outcome in reversed(report.of("fails"))}
    causes = {outcome.clause: report.causes(operator) for operator, outcome in first.items()}
    suite.extend(_case(outcome, causes.get(outcome.clause, [])) for outcome in report)
    return suite


def _case(outcome: Outcome, causes: list[Cause]) -> ET.Element:
    case = ET.Element("testcase", {"classname": outcome.operator, "name": outcome.clause, "time": str(outcome.seconds)})
    if tag := _ELEMENTS.get(outcome.outcome):
        said = ET.SubElement(case, tag, {"message": printable(outcome.message).replace("\n", " ")})
        if tag != "skipped":
            said.text = printable(failure_text(outcome, causes=causes))
    return case
