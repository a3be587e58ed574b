"""Reports in a terminal, as Markdown and as HTML: whole, bounded, and with text of unknown origin as text."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import spec_lm
from spec_lm.conformance.html import html_text
from spec_lm.conformance.markdown import LONGEST, markdown_text
from spec_lm.conformance.report import Outcome, Report
from spec_lm.conformance.terminal import terminal_blocks

CLAUSES = ["softmax.large_inputs_stay_finite", "softmax.any_dim", "silu.agrees_with_the_oracle"]


def naive(x, dim):
    return x.exp() / x.exp().sum(dim, keepdim=True)


@pytest.fixture(scope="module")
def report() -> Report:
    """One clause fails, one holds, one operator is absent."""
    return spec_lm.check({"softmax": naive}, clauses=CLAUSES, examples=20)


def header(implementation: str) -> dict:
    run = {"dtype": "float32", "device": "cpu", "seed": 0, "examples": 5, "level": "must"}
    return {"implementation": implementation, "spec": 1, "versions": {"spec_lm": "1.0", "torch": "2.13.0"}, **run}


def outcome(clause: str, status, **kwargs) -> Outcome:
    return Outcome(clause, clause.partition(".")[0], "must", status, **kwargs)


def many(number: int, **kwargs) -> Report:
    """A report of this many failures."""
    failed = (outcome(f"softmax.clause_{i}", "fails", sentence="It holds.", **kwargs) for i in range(number))
    return Report(header("adapters.py"), tuple(failed))


class Tags(HTMLParser):
    """The elements of a page, and the texts in them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    @property
    def names(self) -> set[str]:
        return {tag for tag, _ in self.found}


def as_html(markdown: str) -> Tags:
    return Tags(MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown))


# -------------------------------------------------------------------------------------------------------- the command


def test_the_report_command_shows_what_the_check_printed(spec_lm_command, write):
    write("adapters.py", "def run_softmax(x, dim):\n    return x.exp() / x.exp().sum(dim, keepdim=True)\n")
    chosen = [part for clause in CLAUSES for part in ("--clause", clause)]
    checked = spec_lm_command("check", "adapters.py", *chosen, "--examples", "5")
    shown = spec_lm_command("report", ".spec-lm/last.jsonl")
    assert shown.code == 0
    assert sorted(shown.out.split("\n")) == sorted(checked.out.split("\n"))
    assert spec_lm_command("report", ".spec-lm/last.jsonl", "--output", "out.txt").out == ""
    assert Path("out.txt").read_text().rstrip("\n") == shown.out.rstrip("\n")


def test_every_format_goes_to_stdout_or_into_a_file(spec_lm_command, report):
    report.write("out.jsonl")
    for name, start in (("markdown", "### "), ("html", "<!DOCTYPE html>"), ("junit", "<?xml")):
        ran = spec_lm_command("report", "out.jsonl", "--format", name)
        assert ran.code == 0
        assert ran.out.startswith(start)
        spec_lm_command("report", "out.jsonl", "--format", name, "--output", "out")
        assert Path("out").read_text(encoding="utf-8") == ran.out
    assert "cannot write nowhere/out" in spec_lm_command("report", "out.jsonl", "--output", "nowhere/out").err
    Path("empty.jsonl").touch()
    assert "empty.jsonl holds no report" in spec_lm_command("report", "empty.jsonl").err


# ----------------------------------------------------------------------------------------------------------- Markdown


def test_markdown_names_what_is_waived_and_why(report):
    waived = tuple(replace(o, outcome="waived", message="see issue 12 *now*") for o in report.of("fails"))
    page = as_html(markdown_text([replace(report, outcomes=(*report.of("holds"), *waived))], "out.jsonl"))
    assert "Waived: 1" in page.text
    assert "softmax.large_inputs_stay_finite: see issue 12 *now*" in page.text


def test_markdown_has_verdict_counts_and_each_failure_with_its_code(report):
    code = "from adapters import softmax\nassert softmax"
    told = replace(report, outcomes=tuple(replace(o, reproduction=code) for o in report))
    text = markdown_text([told], "out.jsonl")
    assert "2 of 3 MUST clauses ran, 1 holds, 1 fails; not provided: silu (1)" in text
    assert "| `softmax` | 1 | 1 |  |  |  |  |" in text
    page = as_html(text)
    assert {"table", "details", "summary", "pre"} <= page.names
    assert "x = [128.]  (1,) float32" in page.text
    assert code in page.text
    assert "spec-lm replay out.jsonl softmax.large_inputs_stay_finite" in page.text


@pytest.mark.parametrize("length", [10, 3000, 100_000])
@pytest.mark.parametrize("number", [1, 400])
def test_markdown_never_exceeds_what_a_comment_takes_and_says_what_it_left_out(number, length):
    text = markdown_text([many(number, message="`" * length)], "out.jsonl")
    assert len(text) <= LONGEST < 65_000
    left_out = re.search(r"Left out, to keep this short: (\d+) more failures?", text)
    assert text.count("<details>") + int(left_out[1] if left_out else 0) == number
    assert bool(left_out) == (number * length > LONGEST and number > 1)


def test_markdown_of_too_many_implementations_says_how_many_are_left_out():
    text = markdown_text([Report(header("x" * 150), (outcome("softmax.a", "holds"),))] * 400)
    left_out = re.search(r"(\d+) more implementations", text)
    assert left_out
    assert text.count("### ") + int(left_out[1]) == 400
    assert len(text) <= LONGEST


def test_hostile_text_stays_text_in_markdown(hostile_report):
    page = as_html(markdown_text([hostile_report], "out.jsonl"))
    own = {"h3", "p", "code", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "pre"}
    assert page.names == own
    assert [attributes for tag, attributes in page.found if tag == "details"] == [{}, {}]
    assert page.text.count("<script>alert(2)</script>") >= 4
    assert "\x1b" not in page.text


# --------------------------------------------------------------------------------------------------------------- HTML


def test_html_holds_every_clause_and_needs_no_network(report):
    page = Tags(html_text([report, report], "out.jsonl"))
    details = [attributes for tag, attributes in page.found if tag == "details"]
    assert [each["data-outcome"] for each in details] == ["fails", "holds", "absent"] * 2
    assert not {"link", "img", "iframe", "object"} & page.names
    assert [a for tag, a in page.found if {"src", "style", "onclick"} & set(a)] == []
    assert all((a["href"] or "").startswith("#") for tag, a in page.found if tag == "a")
    ids = [attributes["id"] for _, attributes in page.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {(a["href"] or "")[1:] for tag, a in page.found if tag == "a"} <= set(ids)
    assert "x = [128.]  (1,) float32" in page.text


def test_html_tells_sentence_input_cause_code_replay_and_reached_partitions():
    told = many(1, reproduction="assert softmax", reached={"one row": 3}, examples=7, worst=2.5)
    told = replace(told, outcomes=(replace(told.outcomes[0], counterexample={"recipes": {}, "values": {"dim": -1}}),))
    text = Tags(html_text([told], "out.jsonl")).text
    for piece in ("It holds.", "dim = -1", "assert softmax", "spec-lm replay out.jsonl softmax.clause_0", "one row 3"):
        assert piece in text
    assert "7 examples judged; largest error 250% of its bound" in text


def test_hostile_text_stays_text_in_html(hostile_report):
    page = Tags(html_text([hostile_report], hostile_report.header["device"]))
    assert [tag for tag, _ in page.found].count("script") == 1
    assert "img" not in page.names
    assert page.text.count("<img src=x onerror=alert(1)>") > 5
    assert "{{ 7 * 7 }}" in page.text
    assert "\x1b" not in page.text


def test_html_of_200_clauses_is_under_a_megabyte():
    """Even where all of them fail, with long values and code."""
    code = "\n".join(f"statement_{line} = torch.tensor([{line}.0])" for line in range(40))
    values = {name: {"shape": [8, 8], "dtype": "float32", "data": [[0.5] * 8] * 8} for name in "xyz"}
    counterexample = {"recipes": {}, "values": values}
    report = many(200, reproduction=code, counterexample=counterexample, reached={"one row": 3, "square": 2})
    assert 200_000 < len(html_text([report], "out.jsonl").encode()) < 1_000_000


# ----------------------------------------------------------------------------------------------------------- the rest


def test_hostile_text_stays_text_in_a_terminal_and_in_junit(spec_lm_command, hostile_report):
    blocks = "\n".join(terminal_blocks([hostile_report], "out.jsonl"))
    assert {c for c in blocks if not c.isprintable()} == {"\n"}
    hostile_report.write("out.jsonl")
    ran = spec_lm_command("report", "out.jsonl", "--format", "junit")
    assert len(list(ET.fromstring(ran.out.encode()).iter("testcase"))) == 3
