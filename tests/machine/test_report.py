"""A report survives its file, and its exit code says what the outcomes say."""

import json
import math
import xml.etree.ElementTree as ET
from dataclasses import MISSING, Field, fields, replace
from typing import Any

import pytest

import spec_lm
from spec_lm.conformance.junit import junit_text
from spec_lm.conformance.lines import NEEDED, OTHERS
from spec_lm.conformance.report import Cause, Outcome, Report, ReportError, printable, read_reports

HEADER = {"implementation": "adapters.py", "spec": 1, "versions": {"spec_lm": "0.1.0", "torch": "2.13.0"}}
HEADER |= {"dtype": "float32", "device": "cpu", "seed": 0, "examples": 5, "level": "must"}
EVIDENCE = {"got": [1.0], "expected": [2.0], "index": [0], "error": 1.0, "bound": 0.1}


def outcome(status: Any = "holds", operator="softmax", **kwargs) -> Outcome:
    return Outcome(f"{operator}.{status}", operator, "must", status, **kwargs)


def report(*outcomes: Outcome, **kwargs) -> Report:
    return Report(HEADER, outcomes, **kwargs)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (report(outcome()), 0),
        (report(outcome(), outcome("fails")), 1),
        (report(outcome("error"), outcome("fails")), 1),
        (report(outcome(), outcome("error")), 2),
        (report(outcome(), outcome("not_judged")), 0),
        (report(outcome(), outcome("absent", "silu")), 0),
        (report(outcome(), outcome("absent", "silu"), required=("silu",)), 2),
        (report(outcome(), outcome("absent", "silu"), required=("all",)), 2),
        (report(outcome(), outcome("absent", "silu"), required=("softmax",)), 0),
        (report(outcome("absent")), 2),
        (report(outcome("not_judged")), 2),
        (report(), 2),
        (report(outcome(), complete=False), 2),
        (report(outcome("fails"), complete=False), 2),
    ],
)
def test_exit_codes(given, code):
    assert given.exit_code == code
    assert given.conforms == (code == 0)


def test_a_report_is_read_as_it_was_written(tmp_path):
    seen = outcome("fails", message="é\n\x1b", worst=math.inf, counterexample={"values": {"x": 1}}, reached={"a": 2})
    causes = (
        Cause("softmax", "a factor (likely)", "softmax.temperature", "scale"),
        Cause("silu", "more", below="linear"),
    )
    written = report(outcome(), seen, outcome("absent", "silu"), required=("silu",), diagnosis=causes)
    written.write(tmp_path / "out.jsonl")
    (read,) = read_reports(tmp_path / "out.jsonl")
    assert read == written
    assert (read.counts, read.absent, read.missing) == (written.counts, ["silu"], ["silu"])


def test_files_of_older_and_newer_versions_are_read(tmp_path):
    report(outcome("fails"), diagnosis=(Cause("softmax", "a factor"),)).write(tmp_path / "out.jsonl")
    header, found, footer = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    del found["reproduction"]
    older = {name: value for name, value in footer.items() if name != "diagnosis"}
    newer = {**footer, "diagnosis": [{**footer["diagnosis"][0], "since": "later"}], "since": "later"}
    for last, diagnosis in ((older, ()), (newer, (Cause("softmax", "a factor"),))):
        (tmp_path / "out.jsonl").write_text("\n".join(map(json.dumps, (header, {**found, "since": "later"}, last))))
        (read,) = read_reports(tmp_path / "out.jsonl")
        assert (read.outcomes[0].outcome, read.outcomes[0].reproduction, read.diagnosis) == ("fails", "", diagnosis)


def test_lines_are_strict_json_with_inf_and_nan_as_strings(tmp_path):
    evidence = {**EVIDENCE, "got": [math.nan, -math.inf]}
    report(outcome("fails", worst=math.inf, evidence=evidence)).write(tmp_path / "out.jsonl")
    line = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[1], parse_constant=pytest.fail)
    assert (line["worst"], line["evidence"]["got"]) == ("inf", ["nan", "-inf"])


def test_a_file_without_its_footer_is_incomplete(tmp_path):
    path = tmp_path / "out.jsonl"
    report(outcome()).write(path)
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))
    (read,) = read_reports(path)
    assert not read.complete
    assert read.exit_code == 2


def test_several_reports_in_one_file_are_read_apart(tmp_path):
    path = tmp_path / "out.jsonl"
    report(outcome()).write(path)
    path.write_text(path.read_text() * 2)
    assert [len(each.outcomes) for each in read_reports(path)] == [1, 1]


@pytest.mark.parametrize(
    "text",
    [
        *("hello", "[]", "{}", "[" * 200_000, '{"kind": ["x"]}', '{"kind": "footer"}', '{"kind": "header"}'),
        json.dumps({"kind": "header", **HEADER}) + '\n{"kind": "song"}',
        json.dumps({"kind": "header", **HEADER}) + '\n{"kind": "outcome", "clause": "softmax.any_dim"}',
    ],
)
def test_a_line_that_is_none_of_a_report_is_named(tmp_path, text):
    (tmp_path / "out.jsonl").write_text(text)
    with pytest.raises(ReportError, match=rf"out\.jsonl, line {len(text.splitlines())}: "):
        read_reports(tmp_path / "out.jsonl")


@pytest.mark.parametrize(
    ("kind", "field", "value", "said"),
    [
        ("header", "versions", "str", "versions is 'str', expected an object"),
        ("header", "supports", [1], "supports is [1], expected an object"),
        ("header", "seed", 10**30, "seed is 1000"),
        ("outcome", "clause", 5, "clause is 5, expected a clause's id"),
        ("outcome", "operator", None, "operator is None, expected an operator's name"),
        ("outcome", "outcome", "bogus", "outcome is 'bogus', expected one of holds, fails"),
        ("outcome", "message", 7, "message is 7, expected a text"),
        ("outcome", "worst", "abc", "worst is 'abc', expected a number"),
        ("outcome", "seconds", "nan", "seconds is 'nan', expected seconds, a number"),
        ("outcome", "counterexample", {"values": 3}, "counterexample.values is 3, expected an object"),
        ("outcome", "counterexample", {"values": {"x": {"shape": 1}}}, "counterexample.values['x'].shape is 1"),
        (
            "outcome",
            "evidence",
            {**EVIDENCE, "got": [[1], 2]},
            "evidence.got is [[1], 2], expected a number",
        ),
        ("outcome", "evidence", {**EVIDENCE, "bound": None}, "evidence has one of error and bound"),
        ("outcome", "evidence", {"got": 1}, "evidence.expected is missing"),
        ("outcome", "reached", {"a": {"b": [[[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]]]}}, "nested too deep"),
        ("footer", "required", 5, "required is 5, expected a list of texts"),
        ("footer", "complete", "yes", "complete is 'yes', expected true or false"),
        ("footer", "diagnosis", "abc", "diagnosis is 'abc', expected a list"),
        ("footer", "diagnosis", [3], "diagnosis[0] is 3, expected an object"),
    ],
)
def test_a_field_of_another_type_is_named_with_what_was_expected(tmp_path, kind, field, value, said):
    report(outcome("fails", evidence=EVIDENCE)).write(tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    number = next(number for number, line in enumerate(lines) if line["kind"] == kind)
    lines[number][field] = value
    (tmp_path / "out.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    with pytest.raises(ReportError) as refused:
        read_reports(tmp_path / "out.jsonl")
    assert f"out.jsonl, line {2 * number + 1}: {said}" in str(refused.value)


def test_every_field_of_an_outcome_and_a_cause_has_its_type_and_those_without_default_are_needed():
    for kind, table in (("outcome", Outcome), ("cause", Cause)):
        assert set(NEEDED[kind]) == {each.name for each in fields(table) if required(each)}
        assert set(NEEDED[kind] | OTHERS[kind]) == {each.name for each in fields(table)}


def required(field: Field) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def test_a_file_that_is_no_text_is_told(tmp_path):
    (tmp_path / "out.jsonl").write_bytes(b"\xff\xfe{")
    with pytest.raises(ReportError, match="it is no text in UTF-8"):
        read_reports(tmp_path / "out.jsonl")


def test_an_outcome_is_found_by_its_clause():
    assert report(outcome())["softmax.holds"].outcome == "holds"
    with pytest.raises(KeyError, match=r"softmax\.other was not run"):
        report(outcome())["softmax.other"]


def test_control_characters_are_written_as_escapes():
    assert printable("a\x1b[2Jé\u202e\ud800\n\tb") == "a\\x1b[2Jé\\u202e\\ud800\n    b"


def test_junit_is_xml_whatever_an_implementation_says():
    said = "raised TypeError: <&]]>\x00\x1b\ufffe\ud800"
    outcomes = (outcome("fails", message=said), outcome("error", message=said), outcome("absent", message=said))
    text = junit_text([Report({"implementation": "a\x00.py"}, outcomes), replace(report(), complete=False)])
    first, second = ET.fromstring(text.encode("utf-8"))
    assert [child.tag for case in first for child in case] == ["failure", "error", "skipped"]
    assert all(
        child.get("message") == "raised TypeError: <&]]>\\x00\\x1b\\ufffe\\ud800" for case in first for child in case
    )
    assert (first.get("failures"), first.get("errors"), first.get("skipped")) == ("1", "1", "1")
    assert second.get("tests") == "0"


def test_junit_tells_what_is_likely_in_the_first_failure_of_an_operator():
    failed = (outcome("fails"), replace(outcome("fails"), clause="softmax.second"))
    text = junit_text([report(*failed, diagnosis=(Cause("softmax", "a factor (likely)"),))])
    first, second = [case.findtext("failure") or "" for case in ET.fromstring(text.encode("utf-8")).iter("testcase")]
    assert "likely    a factor (likely)" in first
    assert "a factor" not in second


def test_a_report_in_an_assertion_says_what_fails():
    report = spec_lm.check({"softmax": lambda x, dim: x}, clauses=["softmax.sums_to_one"], examples=2)
    assert "1 fails" in repr(report)
    assert "softmax.sums_to_one" in repr(report)
