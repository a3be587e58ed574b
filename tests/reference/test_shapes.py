"""A wrong shape or type is answered by a sentence that names the argument, the shapes and the axis that disagree."""

import inspect

import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn

from spec_lm.reference import functional, modules
from spec_lm.reference.shapes import ShapeError, shape_checked

UNCHECKED = {"upcast", "refuse_longer", "refuse_outside"}  # they take any tensor, or none


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def message_of(function, *args, **kwargs) -> str:
    with pytest.raises(ShapeError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def test_an_axis_that_disagrees_is_named_with_both_arguments_and_shapes():
    assert message_of(functional.linear, ones(2, 4), ones(5, 3)) == (
        "linear: axis d_in is 3 in weight (5, 3), but 4 in x (2, 4); expected x (*batch d_in), weight (d_out d_in)"
    )


def test_leading_axes_that_disagree_are_named_together():
    assert message_of(functional.scaled_dot_product_attention, ones(2, 3, 4), ones(3, 5, 4), ones(3, 5, 4), None) == (
        "scaled_dot_product_attention: axis batch is (3,) in key (3, 5, 4), but (2,) in query (2, 3, 4); expected"
        " query (*batch queries d_k), key (*batch keys d_k), value (*batch keys d_v)"
    )


def test_a_missing_axis_is_answered_with_the_axes_wanted():
    assert message_of(functional.linear, ones(2, 4), ones(4)) == (
        "linear: weight (4,) does not have the axes (d_out d_in); expected x (*batch d_in), weight (d_out d_in)"
    )


def test_a_surplus_axis_is_answered_with_the_axes_wanted():
    assert message_of(functional.rmsnorm, ones(2, 4), ones(1, 4), 1e-5) == (
        "rmsnorm: gain (1, 4) does not have the axes (d_model); expected x (*batch d_model), gain (d_model)"
    )


def test_a_wrong_dtype_is_answered_with_the_kind_wanted():
    attention = functional.scaled_dot_product_attention
    assert message_of(attention, ones(3, 4), ones(3, 4), ones(3, 4), ones(3, 3)) == (
        "scaled_dot_product_attention: mask must be a Bool Tensor, got torch.float32"
    )
    assert message_of(functional.silu, torch.arange(3)) == "silu: x must be a Float Tensor, got torch.int64"


def test_what_is_no_tensor_is_answered_with_its_type():
    assert message_of(functional.silu, [1.0]) == "silu: x must be a Float Tensor, got <class 'list'>"


def test_a_wrong_plain_argument_is_named():
    message = message_of(functional.rmsnorm, ones(2, 4), ones(4), "small")
    assert message.startswith("rmsnorm: ")
    assert "'eps'" in message
    assert "'small'" in message


def test_an_integer_is_a_float_argument():
    assert functional.rmsnorm(ones(2, 4), ones(4), 0).tolist() == ones(2, 4).tolist()


@pytest.mark.parametrize("leading", [(), (1,), (2,), (1, 2), (3, 1), (3, 2)])
def test_a_mask_broadcasts_over_leading_axes(leading):
    query = ones(3, 2, 4, 5)
    assert (
        functional.scaled_dot_product_attention(query, query, query, ones(*leading, 4, 4).bool()).shape == query.shape
    )


@pytest.mark.parametrize(("leading", "shown"), [((2,), "(2,)"), ((5, 3), "(5, 3)")])
def test_a_mask_does_not_enlarge_the_leading_axes(leading, shown):
    query = ones(3, 4, 5)
    message = message_of(functional.scaled_dot_product_attention, query, query, query, ones(*leading, 4, 4).bool())
    assert f"axis batch is {shown} in mask" in message
    assert "but (3,) in query (3, 4, 5)" in message


def test_an_axis_that_broadcasts_is_not_blamed_for_the_one_that_disagrees():
    query = ones(3, 4, 5)
    message = message_of(functional.scaled_dot_product_attention, query, query, query, ones(1, 4, 6).bool())
    assert "axis keys is 6 in mask (1, 4, 6), but 4 in key (3, 4, 5)" in message


def test_a_wrong_result_is_an_error_too():
    @shape_checked
    def transposed(x: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        return x.mT

    assert "dimension rows is 3 which does not equal the existing value of 2" in message_of(transposed, ones(2, 3))


def test_an_error_inside_is_reported_as_the_inner_function_s():
    weights = [ones(4, 4)] * 3 + [ones(4, 6)]
    message = message_of(functional.multihead_self_attention, ones(2, 3, 4), *weights, 2)
    assert "axis heads_d_v is 6 in w_o (4, 6), but 4 in w_v (4, 4)" in message
    message = message_of(functional.transformer_lm, ones(2, 3).long(), block_of_wrong_width(), 1, 1e4, 8)
    assert message.startswith("rmsnorm: axis d_model is 5 in gain (5,), but 4 in x (2, 3, 4)")


def block_of_wrong_width() -> dict[str, Tensor]:
    return {"token_embeddings.weight": ones(7, 4), "ln_final.weight": ones(5), "lm_head.weight": ones(7, 4)}


def test_a_module_s_forward_is_named_with_its_class():
    message = message_of(modules.RotaryPositionalEmbedding(1e4, 4, 8), ones(4))
    assert message.startswith("RotaryPositionalEmbedding.forward: x (4,) does not have the axes (*batch sequence d_k)")


def test_a_positional_argument_that_is_missing_stays_python_s_own_error():
    with pytest.raises(TypeError, match="weight"):
        functional.linear(ones(2, 4))  # pyright: ignore[reportCallIssue]


def test_every_function_and_every_forward_is_checked():
    functions = {
        name: function
        for name, function in inspect.getmembers(functional, inspect.isfunction)
        if function.__module__ == functional.__name__ and name not in UNCHECKED
    }
    forwards = {
        name: kind.forward
        for name, kind in inspect.getmembers(modules, inspect.isclass)
        if issubclass(kind, nn.Module) and kind.__module__ == modules.__name__
    }
    assert {"softmax", "rope", "transformer_lm", "merge_heads", "causal_mask"} <= set(functions)
    assert {"Linear", "TransformerLM"} <= set(forwards)
    for name, function in (functions | forwards).items():
        assert function.__code__.co_name == "checking", f"{name} is not shape_checked"
        hints = list(inspect.signature(function).parameters.values())
        assert all(hint.annotation is not inspect.Parameter.empty for hint in hints if hint.name != "self"), name


def test_checking_is_left_out_while_compiling(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError):  # what torch says; the checker would have raised ShapeError
        functional.linear(ones(2, 4), ones(5, 3))
