"""`spec-lm diff` prints changes and nothing else; `spec-lm compare` shows implementations side by side."""

from pathlib import Path

import pytest

from spec_lm.conformance.report import Outcome, Report

VERSIONS = {"spec_lm": "0.1.0", "torch": "2.13.0"}


def report(implementation="a.py", complete=True, seed=0, versions=VERSIONS, **came_to) -> Report:
    """Clauses of softmax by name and what they came to."""
    header = {"implementation": implementation, "seed": seed, "versions": versions, "level": "must"}
    header |= {"spec": 1, "device": "cpu", "dtype": "float32", "examples": 5}
    outcomes = (Outcome(f"softmax.{n}", "softmax", "must", status, f"seen {n}") for n, status in came_to.items())
    return Report(header, tuple(outcomes), complete=complete)


@pytest.fixture
def diff(spec_lm_command):
    """`spec-lm diff` of two reports."""

    def run(old: Report, new: Report):
        old.write("old.jsonl")
        new.write("new.jsonl")
        return spec_lm_command("diff", "old.jsonl", "new.jsonl")

    return run


@pytest.mark.parametrize(
    ("old", "new", "code", "kind"),
    [
        ("holds", "fails", 1, "worse"),
        ("holds", "error", 1, "worse"),
        ("waived", "fails", 1, "worse"),
        ("fails", "holds", 0, "better"),
        ("error", "holds", 0, "better"),
        ("waived", "holds", 0, "better"),
        ("holds", "absent", 0, "changed"),
        ("fails", "waived", 0, "changed"),
        ("not_judged", "fails", 0, "changed"),
    ],
)
def test_a_change_is_told_with_its_kind_and_exits_with_1_where_it_is_worse(diff, old, new, code, kind):
    ran = diff(report(one="holds", two=old), report(one="holds", two=new))
    first, last = ran.out.splitlines()
    assert ran.code == code
    seen = "seen two" if new in ("fails", "error") else ""
    words = f"{old} -> {new}".replace("_", " ")
    assert first.split() == f"{kind} softmax.two {words} {seen}".split()
    assert last.endswith(", 1 as before")
    assert f"1 {kind}" in last


def test_without_changes_it_says_so_in_one_line(diff):
    ran = diff(report(one="holds", two="fails"), report(one="holds", two="fails"))
    assert (ran.code, ran.out) == (0, "0 worse, 0 better, 0 changed, 2 as before\n")


def test_other_seeds_versions_and_implementations_are_named(diff):
    ran = diff(report(one="holds"), report("b.py", seed=1, versions={**VERSIONS, "torch": "2.14"}, one="holds"))
    assert ran.out.splitlines()[:3] == [
        "implementation differs: a.py -> b.py",
        "torch differs: 2.13.0 -> 2.14",
        "seed differs: 0 -> 1",
    ]


def test_clauses_that_ran_once_are_told_and_an_incomplete_report_exits_with_2(diff):
    ran = diff(report(one="holds", two="holds"), report(complete=False, two="holds", three="fails"))
    assert ran.code == 2
    assert "the new report is incomplete" in ran.out
    assert "softmax.one     holds -> not run" in ran.out
    assert "softmax.three   not run -> fails   seen three" in ran.out


def test_what_cannot_be_compared_is_one_message(spec_lm_command, diff):
    assert "cannot read nowhere.jsonl" in spec_lm_command("diff", "nowhere.jsonl", "nowhere.jsonl").err
    diff(report(), report("b.py"))
    Path("both.jsonl").write_text(Path("old.jsonl").read_text() + Path("new.jsonl").read_text())
    ran = spec_lm_command("diff", "old.jsonl", "both.jsonl")
    assert ran.code == 2
    assert "only one of the two files has a report on b.py" in ran.err
    assert spec_lm_command("diff", "both.jsonl", "both.jsonl").out.count("as before") == 2


def test_implementations_are_columns_and_only_rows_that_differ_are_shown(spec_lm_command):
    report(one="holds", two="fails", three="absent").write("a.jsonl")
    report("b\x1b.py", seed=3, one="holds", two="holds").write("b.jsonl")
    ran = spec_lm_command("compare", "a.jsonl", "b.jsonl")
    assert ran.code == 0
    assert [line.split() for line in ran.out.splitlines()] == [
        ["1", "a.py:", "1", "holds,", "1", "fails,", "1", "absent;", "seed", "0"],
        [r"2", r"b\x1b.py:", r"2", r"holds;", r"seed", r"3"],
        [],
        ["clause", "1", "2"],
        ["softmax.two", "fails", "holds"],
        ["softmax.three", "absent", "not", "run"],
        [],
        ["2", "of", "3", "clauses", "differ"],
    ]
    assert "softmax.one     holds       holds" in spec_lm_command("compare", "a.jsonl", "b.jsonl", "--all").out
    ran = spec_lm_command("compare", "a.jsonl")
    assert ran.code == 2
    assert "at least two implementations" in ran.err
