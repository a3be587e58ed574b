"""A check in shards comes to what the whole check comes to, and nothing else is merged."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import spec_lm
from spec_lm import CLAUSES
from spec_lm.conformance.operators import OPERATORS
from spec_lm.conformance.report import Report, ReportError, UserError, read_reports, write_lines
from spec_lm.conformance.shards import Shard, merged

WRONG = {
    "softmax": lambda x, dim: x.exp() / x.exp().sum(dim, keepdim=True),
    "silu": torch.nn.functional.silu,
    "linear": lambda x, weight: x[:, 0] @ weight.T,  # a missing feature leaves the draws of the other clauses
}
ASKED = {
    "operators": ["softmax", "silu", "linear", "rope"],
    "examples": 3,
    "seed": 2,
    "require": ["rope"],
}


def timeless(report: Report) -> str:
    """Its file, without times; in text NaN is equal to itself."""
    file = io.StringIO()
    write_lines(file, replace(report, outcomes=tuple(replace(outcome, seconds=0.0) for outcome in report)).lines())
    return file.getvalue()


@pytest.fixture(scope="module")
def parts() -> dict[str, Report]:
    return {f"{n}.jsonl": spec_lm.check(WRONG, **ASKED, shard=f"{n}/3") for n in (1, 2, 3)}


@pytest.mark.parametrize("number", [1, 2, 5, 12])
def test_each_clause_is_in_one_shard_with_its_whole_operator(number):
    clauses = list(CLAUSES.values())
    shards = [Shard(n, number).part(clauses) for n in range(1, number + 1)]
    assert sorted(c.id for shard in shards for c in shard) == sorted(c.id for c in clauses)
    assert sum(len({clause.operator for clause in shard}) for shard in shards) == len(OPERATORS)


def test_the_merged_report_is_that_of_the_whole_check_times_aside(parts):
    whole = spec_lm.check(WRONG, **ASKED)
    assert timeless(merged(parts)) == timeless(whole)
    assert whole.diagnosis
    assert timeless(merged(dict(reversed(parts.items())))) == timeless(whole)


def test_a_shard_says_which_it_is_and_lacks_nothing_that_another_may_hold(parts):
    assert [report.header["shard"] for report in parts.values()] == ["1/3", "2/3", "3/3"]
    alone = spec_lm.check({"silu": torch.nn.functional.silu}, operators=["softmax", "silu"], examples=1, shard="1/2")
    assert alone.absent == ["softmax"]
    assert alone.exit_code == 0


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "1/0", "a/b", "-1/2"])
def test_what_is_no_shard_is_refused(text):
    with pytest.raises(UserError, match="write it as I/N"):
        Shard.read(text)


def test_there_are_at_most_as_many_shards_as_operators():
    with pytest.raises(UserError, match="1 operators are checked"):
        spec_lm.check(operators=["softmax"], shard="1/2")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 3}, "seed is 2 in 1.jsonl, 3 in 2.jsonl"),
        ({"implementation": "b.py"}, "implementation is .* in 1.jsonl, b.py in 2.jsonl"),
        ({"versions": {"torch": "1.0"}}, "torch is .* in 1.jsonl, 1.0 in 2.jsonl"),
        ({"examples": 4}, "examples is 3 in 1.jsonl, 4 in 2.jsonl"),
        ({"conventions": {"a": "b"}}, "conventions is {} in 1.jsonl"),
        ({"shard": "2/4"}, "shards is 3 in 1.jsonl, 4 in 2.jsonl"),
        ({"shard": "1/3"}, "1.jsonl and 2.jsonl overlap: both are shard 1/3"),
    ],
    ids=str,
)
def test_a_mixture_is_refused_with_both_values(parts, change, said):
    other = parts["2.jsonl"]
    mixed = replace(other, header={**other.header, **change})
    if "versions" in change:
        mixed.header["versions"] = {**other.header["versions"], **change["versions"]}
    with pytest.raises(ReportError, match=said):
        merged({**parts, "2.jsonl": mixed})


def test_gaps_are_refused(parts):
    first, second, third = parts.items()
    with pytest.raises(ReportError, match="2/3 missing; there are 1/3, 3/3"):
        merged(dict((first, third)))
    with pytest.raises(ReportError, match=r"3\.jsonl is incomplete"):
        merged(dict((first, second, (third[0], replace(third[1], complete=False)))))
    with pytest.raises(ReportError, match=r"the shards hold \d+ clauses of"):
        merged(dict((first, second, (third[0], replace(third[1], outcomes=third[1].outcomes[1:])))))
    with pytest.raises(ReportError, match=r"w\.jsonl is a whole report"):
        merged({"w.jsonl": replace(first[1], header={"seed": 2})})
    with pytest.raises(ReportError, match=r"w\.jsonl is a whole report"):
        merged({"w.jsonl": replace(first[1], header={"seed": 2, "shard": "1/3"})})


def test_the_commands_check_in_shards_and_merge_them(spec_lm_command, write):
    write("adapters.py", "import torch\nsilu = torch.nn.functional.silu\ndef softmax(x, dim):\n    return x\n")
    asked = ("check", "adapters.py", "--operator", "softmax", "--operator", "silu", "--examples", "1", "--in-process")
    whole = spec_lm_command(*asked, "--report", "whole.jsonl")
    codes = [spec_lm_command(*asked, "--shard", f"{n}/2", "--report", f"{n}.jsonl").code for n in (1, 2)]
    assert sorted(codes) == [0, 1]
    ran = spec_lm_command("merge", "1.jsonl", "2.jsonl", "--output", "merged.jsonl")
    assert (ran.code, ran.last_line) == (1, whole.last_line)
    (one,), (other,) = read_reports(Path("whole.jsonl")), read_reports(Path("merged.jsonl"))
    assert timeless(one) == timeless(other)
    assert spec_lm_command("merge", "1.jsonl", "--output", "x.jsonl").code == 2
    assert not Path("x.jsonl").exists()


def test_an_operator_of_another_version_comes_last(parts):
    first, *others = parts["1.jsonl"]
    newer = replace(first, operator="newer", clause="newer.any_dim")
    whole = merged({**parts, "1.jsonl": replace(parts["1.jsonl"], outcomes=(newer, *others))})
    assert whole.outcomes[-1] == newer
