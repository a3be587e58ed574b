"""A counterexample made plainer: what it says, and that the clause is true there."""

import json
import re
from dataclasses import replace

import pytest
import torch

from spec_lm.conformance import plainer as module
from spec_lm.conformance.clause import CLAUSES
from spec_lm.conformance.display import values_text
from spec_lm.conformance.implementation import BUILT_IN, loaded
from spec_lm.conformance.operators import OPERATORS, Checked
from spec_lm.conformance.runner import Settings, preserved, replayed, run_clause
from spec_lm.conformance.strategies import (
    ArgumentsRecipe,
    Domain,
    EntriesRecipe,
    ProjectionsRecipe,
    TensorRecipe,
    WeightsRecipe,
    from_json,
    parts_of,
    to_json,
    with_part,
)
from spec_lm.conformance.tolerance import Violation, close
from spec_lm.faults import catalogue


def outcome_of(clause, function):
    clause = CLAUSES[clause] if isinstance(clause, str) else clause
    with preserved(0):
        checked = Checked(OPERATORS[clause.operator], function)
        return run_clause(clause, checked, Domain(clause.operator), Settings(examples=20))[0]


def values_of(outcome):
    return outcome.counterexample["values"]


def last_forgotten(x, dim):
    result = torch.softmax(x, dim)
    if x.shape[dim] > 64:
        result = result.clone()
        result.select(dim, -1).zero_()
    return result


def test_entries_that_do_not_matter_are_zero():
    outcome = outcome_of("softmax.sums_to_one_at_any_length", last_forgotten)
    assert list(values_text(values_of(outcome))) == ["x = all 0.  (65,) float32"]


def last_taken_from_its_neighbor(x):
    result = torch.nn.functional.silu(x)
    return torch.cat([result[..., :-1], result[..., -2:-1]], -1) if x.shape[-1] > 64 else result


def test_an_entry_that_matters_is_named():
    outcome = outcome_of("silu.reversing_entries_reverses_outputs", last_taken_from_its_neighbor)
    (line,) = values_text(values_of(outcome))
    assert re.fullmatch(r"x = 0\. but -?\d\. at \[(0|1|63|64)\]  \(65,\) float32", line)
    stored = values_of(outcome)["x"]
    assert stored["fill"] == 0
    assert len(stored["entries"]) == 1


def not_causal(x, w_q, w_k, w_v, w_o, num_heads):
    q, k, v = ((x @ w.mT).unflatten(-1, (num_heads, -1)).transpose(-2, -3) for w in (w_q, w_k, w_v))
    heads = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return heads.transpose(-2, -3).flatten(-2) @ w_o.mT


def test_weights_are_zero_or_the_identity_where_they_may_be():
    values = values_of(outcome_of("multihead_self_attention.causal_independence_from_future_tokens", not_causal))
    assert values["w_q"]["data"] == values["w_k"]["data"] == [[0, 0], [0, 0]]
    assert values["w_v"]["data"] == values["w_o"]["data"] == [[1, 0], [0, 1]]


PLANTED = [
    "multihead_self_attention.window_of_two_tokens",
    "multihead_self_attention_with_rope.theta_is_always_10000",
    "rmsnorm.mean_of_1024_entries",
    "rope.positions_along_the_batch",
    "scaled_dot_product_attention.masked_keys_in_the_maximum",
    "swiglu.fused_projection_interleaved",
    "transformer_block.scores_scaled_by_length",
    "transformer_lm.window_of_32_tokens",
]


@pytest.mark.parametrize("name", PLANTED)
def test_the_reference_holds_on_it_and_the_fault_fails(name):
    fault = catalogue()[name]
    clause_id = f"{fault.operator}.{fault.detected_by[0]}"
    outcome = outcome_of(clause_id, fault.function)
    assert outcome.counterexample is not None
    stored = json.loads(json.dumps(outcome.counterexample["recipes"], allow_nan=False))
    assert "EntriesRecipe" in json.dumps(stored)
    again = [
        replayed(CLAUSES[clause_id], stored, Checked(OPERATORS[fault.operator], each))
        for each in (fault.function, _reference(fault.operator))
    ]
    assert [each.outcome for each in again] == ["fails", "holds"]
    assert again[0].message == outcome.message


def _reference(operator):
    with loaded(BUILT_IN) as reference:
        return reference.functions[operator]


def test_where_the_reference_fails_too_nothing_is_made_plainer():
    """A clause may ask something of its input that only it knows of."""

    def of_inputs_whose_first_entry_is_not_0(operator, x):
        if not x.flatten()[:1].any():
            raise Violation("its first entry is 0", kind="close ")
        close(operator(x), torch.nn.functional.silu(x))

    clause = replace(
        CLAUSES["silu.reversing_entries_reverses_outputs"], body=of_inputs_whose_first_entry_is_not_0, sizes=()
    )
    outcome = outcome_of(clause, lambda x: x * 1.5)
    assert torch.tensor(values_of(outcome)["x"]["data"]).flatten()[0] != 0


def test_where_the_reference_cannot_be_imported_a_failure_is_one_all_the_same(monkeypatch):
    def broken(name):
        raise ModuleNotFoundError("No module named 'einops'")

    monkeypatch.setattr(module, "loaded", broken)
    assert outcome_of("silu.agrees_with_the_oracle", lambda x: x * 1.5).outcome == "fails"


def test_few_calls_are_made(monkeypatch):
    calls = []

    def counted(x, dim):
        calls.append(x)
        return last_forgotten(x, dim)

    monkeypatch.setattr(module, "MOST_CALLS", 0)
    outcome_of("softmax.sums_to_one_at_any_length", counted)
    without = len(calls)
    monkeypatch.setattr(module, "MOST_CALLS", 5)
    calls.clear()
    outcome_of("softmax.sums_to_one_at_any_length", counted)
    assert without < len(calls) <= without + 5


def test_recipes_of_single_tensors_are_found_and_replaced():
    weights = WeightsRecipe(4, 8, "halves", 1, "float32")
    projections = ProjectionsRecipe(4, "halves", 1, "float32")
    arguments = ArgumentsRecipe((("x", TensorRecipe((2,), "plain", 1, "float32")), ("w", projections), ("dim", 0)))
    for recipe, path in ((weights, ("ffn.w1.weight",)), (arguments, ("w", "w_k")), (arguments, ("x",))):
        part = parts_of(recipe)[path]
        entries = EntriesRecipe(tuple(part.build().shape), 0.0, ((1, 2.5),), "float32")
        changed = with_part(with_part(recipe, path, entries), path, entries)
        assert from_json(json.loads(json.dumps(to_json(changed)))) == changed
        assert parts_of(changed)[path] == entries
        assert set(parts_of(changed)) == set(parts_of(recipe))
        assert parts_of(changed)[path].build().flatten()[:3].tolist()[1] == 2.5
    built = with_part(arguments, ("w", "w_k"), EntriesRecipe((4, 4), 0.0, (), "float32")).build()
    assert not built.w_k.any()
    assert built.w_q.any()


def test_a_tensor_of_few_exceptions_lies_in_memory_as_the_one_it_stands_for():
    plain = EntriesRecipe((2, 3), 1.0, ((4, 3.0),), "bfloat16").build()
    for layout in ("transposed", "sliced", "offset"):
        tensor = EntriesRecipe((2, 3), 1.0, ((4, 3.0),), "bfloat16", layout).build()
        assert torch.equal(tensor, plain)
        assert tensor.dtype == torch.bfloat16
        assert (tensor.stride(), tensor.storage_offset()) != (plain.stride(), 0)


def test_a_tensor_that_must_stay_full_takes_no_more_steps_than_calls(monkeypatch):
    """There are thousands of ways to make half of its entries 0."""
    steps = []
    only = module._only
    monkeypatch.setattr(module, "_only", lambda *given: steps.append(given) or only(*given))

    def wrong_for_many_different_numbers(x, dim):
        return torch.softmax(x, dim) * (1.5 if x.unique().numel() > 2000 else 1)

    assert outcome_of("softmax.sums_to_one_at_any_length", wrong_for_many_different_numbers).outcome == "fails"
    assert 0 < len(steps) <= module.MOST_CALLS_IF_LARGE


def test_no_zero_becomes_negative():
    tried = []

    def nothing_stays(values):
        tried.append(values)
        return False

    module._rounded(torch.tensor([-0.3, -0.2, -0.04, 1.2]), nothing_stays)
    assert len(tried) == 2
    assert not any(bool((values.signbit() & (values == 0)).any()) for values in tried)


def test_a_part_is_replaced_once():
    first, second = (EntriesRecipe((4, 4), fill, (), "float32") for fill in (1.0, 2.0))
    weights = with_part(with_part(ProjectionsRecipe(4, "halves", 1, "float32"), ("w_k",), first), ("w_k",), second)
    assert weights.replaced == (("w_k", second),)
