"""Cases: their arguments are what the operators take, and their counts are what the equations need."""

import json
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from spec_lm.bench.cases import SUITES, USED, Case, Sizes, arguments, operations, tensors_of, traffic
from spec_lm.bench.row import single_call
from spec_lm.bench.variants import variant
from spec_lm.conformance.operators import OPERATORS
from spec_lm.reference import functional

SMALL = Sizes(batch=2, sequence=6, d_model=8, heads=2, d_ff=12, vocab=10, layers=2)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arguments_are_taken_and_give_the_result_of_the_operator(operator, dtype):
    given = arguments(Case(operator, SMALL, dtype), seed=1)
    result = getattr(functional, operator)(*given)
    assert tuple(result.shape) == OPERATORS[operator].shape(*given)
    assert result.dtype == getattr(torch, dtype)
    assert result.isfinite().all()


def test_the_same_seed_gives_the_same_arguments_and_another_gives_others():
    case = Case("silu", SMALL)
    assert torch.equal(arguments(case, 1)[0], arguments(case, 1)[0])
    assert not torch.equal(arguments(case, 1)[0], arguments(case, 2)[0])


@pytest.mark.parametrize(
    ("operator", "beside_products"),
    [
        ("linear", 0),
        ("swiglu", 5 * 12 * 12),
        ("scaled_dot_product_attention", 5 * 2 * 12 * 6),
    ],
)
def test_products_are_counted_as_torch_counts_them(operator, beside_products):
    with FlopCounterMode(display=False) as counter:
        getattr(functional, operator)(*arguments(Case(operator, SMALL), 0))
    assert operations(Case(operator, SMALL)) == counter.get_total_flops() + beside_products


def test_the_model_counts_half_the_attention_that_torch_counts_since_the_mask_hides_it():
    long = replace(SMALL, sequence=64)
    with FlopCounterMode(display=False) as counter:
        functional.transformer_lm(*arguments(Case("transformer_lm", long), 0))
    hidden = long.layers * 4 * long.d_model * long.batch * long.sequence * (long.sequence - 1) // 2
    per_token = 2 * (5 * 2 + 3 * 2) * long.d_model + 5 * long.layers * long.d_ff + 4 * long.d_model
    scores = 5 * long.layers * long.heads * long.batch * long.sequence * (long.sequence + 1) // 2
    expected = counter.get_total_flops() - hidden + per_token * long.tokens + scores
    assert operations(Case("transformer_lm", long)) == expected


@pytest.mark.parametrize("operator", OPERATORS)
def test_training_is_three_times_forward_and_half_precision_half_the_bytes(operator):
    case = Case(operator, SMALL)
    assert operations(replace(case, direction="training")) == 3 * operations(case)
    assert 2 * traffic(replace(case, dtype="bfloat16")) == traffic(case) > 0


@pytest.mark.parametrize("operator", ["linear", "swiglu", "transformer_block", "transformer_lm"])
def test_the_products_of_a_training_step_are_three_times_those_of_forward_as_torch_counts_them(operator):
    """Every product has two in its backward, and none is counted twice; attention is left out, which is recomputed."""
    case = Case(operator, replace(SMALL, sequence=1), direction="training")
    with FlopCounterMode(display=False) as forward:
        single_call(replace(case, direction="forward"), variant("reference"))()
    with FlopCounterMode(display=False) as training:
        single_call(case, variant("reference"))()
    assert training.get_total_flops() == 3 * forward.get_total_flops() > 0


@pytest.mark.parametrize("operator", sorted(set(OPERATORS) - {"embedding", "transformer_lm"}))
def test_bytes_of_forward_are_those_of_its_arguments_and_result(operator):
    given = arguments(Case(operator, SMALL), 0)
    floating = [each for each in tensors_of(given) if each.is_floating_point()]
    result = getattr(functional, operator)(*given)
    assert traffic(Case(operator, SMALL)) == sum(each.nbytes for each in (*floating, result))


def test_of_a_table_the_bytes_of_the_rows_that_are_read_count():
    row = 4 * SMALL.d_model
    assert traffic(Case("embedding", SMALL)) == 2 * SMALL.tokens * row
    weights = arguments(Case("transformer_lm", SMALL), 0)[1]
    table = weights.pop("token_embeddings.weight").nbytes
    logits = 4 * SMALL.tokens * SMALL.vocab
    assert traffic(Case("transformer_lm", SMALL)) == sum(w.nbytes for w in weights.values()) + (
        SMALL.tokens * row + logits
    )
    assert table == SMALL.vocab * row


@pytest.mark.parametrize(
    ("operator", "arguments_of_forward", "result", "read_again"),
    [("softmax", 96, 96, 96), ("rope", 96, 96, 0), ("linear", 96 + 64, 96, 96 + 64), ("embedding", 96, 96, 0)],
)
def test_training_reads_what_backward_needs_and_writes_gradients(operator, arguments_of_forward, result, read_again):
    """2 sequences of 6 tokens of 8 numbers; a linear operator's backward needs the cotangent alone."""
    forward, gradients, cotangent = arguments_of_forward + result, arguments_of_forward, result
    expected = forward + read_again + cotangent + gradients
    assert traffic(Case(operator, SMALL, direction="training")) == 4 * expected


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cases_of_a_suite_differ_and_survive_a_file(suite, device):
    cases = list(SUITES[suite](device))
    assert len(set(map(str, cases))) == len(cases)
    assert [Case.of(json.loads(json.dumps(case.told()))) for case in cases] == cases
    assert {case.device for case in cases} == {device}
    assert all(case.sizes.d_model % case.sizes.heads == 0 for case in cases)


def test_the_standard_suite_measures_every_operator_in_both_directions():
    measured = {(case.operator, case.direction) for case in SUITES["standard"]("cpu")}
    assert measured == {(operator, way) for operator in USED for way in ("forward", "training")}
    assert set(USED) == set(OPERATORS)
