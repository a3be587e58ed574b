"""An implementation that takes only part of the domain is judged there, and only there."""

import pytest
import torch
import torch.nn.functional as F

import spec_lm
from spec_lm.conformance.runner import UsageError


def narrow_kernel(query, key, value, mask=None):
    """Takes what a fast kernel takes: four axes, head size 64, causal or no mask, lengths that are multiples of 16."""
    lengths = {query.shape[-2], key.shape[-2]}
    if query.ndim != 4 or {query.shape[-1], value.shape[-1]} != {64} or any(n % 16 for n in lengths):
        raise RuntimeError("shape not supported")
    causal = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if mask is not None and not torch.equal(mask, causal.expand_as(mask)):
        raise RuntimeError("mask not supported")
    return F.scaled_dot_product_attention(query, key, value, mask)


SUPPORTS = {
    "d_k": [64],
    "d_v": [64],
    "axes": [4],
    "mask": ["none", "causal"],
    "queries": {"multiple_of": 16},
    "keys": {"multiple_of": 16},
}


@pytest.mark.parametrize("level", ["must", "should"])
def test_a_narrow_kernel_passes_and_the_rest_is_not_judged_and_counted(level):
    report = spec_lm.check({"scaled_dot_product_attention": narrow_kernel}, supports=SUPPORTS, level=level, examples=10)
    judged = [outcome for outcome in report if outcome.outcome != "absent"]
    assert {outcome.outcome for outcome in judged} == {"holds", "not_judged"}, report.of("fails", "error")
    assert report.counts["holds"] >= 10
    assert all(outcome.message for outcome in report.of("not_judged"))
    assert report.conforms


def test_without_its_declaration_the_kernel_fails():
    report = spec_lm.check({"scaled_dot_product_attention": narrow_kernel}, examples=2)
    assert report.of("fails")


def test_a_wrong_narrow_kernel_is_seen():
    def wrong(query, key, value, mask=None):
        return narrow_kernel(query * 1.01, key, value, mask)

    report = spec_lm.check({"scaled_dot_product_attention": wrong}, supports=SUPPORTS, examples=10)
    assert "scaled_dot_product_attention.agrees_with_the_oracle" in {outcome.clause for outcome in report.of("fails")}


def test_a_support_of_an_unknown_name_is_told_at_once():
    with pytest.raises(UsageError, match="did you mean d_head"):
        spec_lm.check({"softmax": torch.softmax}, supports={"dhead": [64]})


def test_a_dtype_outside_the_support_is_not_judged():
    report = spec_lm.check({"silu": F.silu}, operators=["silu"], supports={"dtype": ["bfloat16"]}, examples=1)
    assert {outcome.outcome for outcome in report} == {"not_judged"}


def test_a_number_of_axes_counts_those_of_each_operators_first_argument():
    """Four axes are two leading ones in attention, and three in an operator of single rows."""

    def four_axes(x, dim):
        assert x.ndim == 4
        return torch.softmax(x, dim)

    report = spec_lm.check({"softmax": four_axes}, operators=["softmax"], supports={"axes": [4]}, examples=10)
    assert report["softmax.agrees_with_the_oracle"].outcome == "holds"
    assert report.of("fails", "error") == []


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("n", {"multiple_of": 0}, "sizes from 1 to"),
        ("n", {"multiples": 2}, "multiple_of"),
        ("n", ["a"], "sizes from 1 to"),
        ("n", [], "sizes from 1 to"),
        ("n", [True], "sizes from 1 to"),
        ("n", [100000000000], "sizes from 1 to 262144"),
        ("d_head", 5, "a list of sizes"),
        ("dtype", "float32", "a list of float32, float64"),
        ("dtype", ["float8"], "a list of float32, float64"),
        ("mask", ["diagonal"], "a list of none, all, causal, random"),
        ("axes", {"multiple_of": 2}, "a list of numbers from 0"),
    ],
)
def test_a_support_that_is_not_understood_is_told_with_what_is_expected(name, given, expected):
    with pytest.raises(UsageError, match=f"^support {name} is .*, expected .*{expected}"):
        spec_lm.check({"softmax": torch.softmax}, supports={name: given}, clauses=["softmax.any_dim"], examples=1)
