"""A tensor's text builds it again, bit for bit, in a form that is short to read."""

import math

import pytest
import torch

from spec_lm.conformance.literals import Drawn, TooLong, laid_out, literal, number
from spec_lm.conformance.strategies import (
    REGIMES,
    ArgumentsRecipe,
    IdsRecipe,
    ProjectionsRecipe,
    TensorRecipe,
    WeightsRecipe,
    build,
)


def evaluated(text: str) -> torch.Tensor:
    return eval(text, {"torch": torch})


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Of the same dtype and values, the sign of 0 included."""
    signs = torch.equal(got.signbit(), expected.signbit())
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    return signs


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.tensor([128.0]), "torch.tensor([128.])"),
        (torch.tensor([0.1, 1 / 3]), "torch.tensor([0.1, 0.33333334])"),
        (torch.tensor([0.1], dtype=torch.float64), "torch.tensor([0.1], dtype=torch.float64)"),
        (torch.tensor([0.1], dtype=torch.bfloat16), "torch.tensor([0.1], dtype=torch.bfloat16)"),
        (torch.tensor([math.nan, -math.inf]), "torch.tensor([torch.nan, -torch.inf])"),
        (torch.tensor([3, 1]), "torch.tensor([3, 1])"),
        (torch.tensor([3, 1], dtype=torch.int32), "torch.tensor([3, 1], dtype=torch.int32)"),
        (torch.tensor([True, False]), "torch.tensor([True, False])"),
        (torch.tensor(2.5), "torch.tensor(2.5)"),
        (torch.zeros(2, 3), "torch.zeros(2, 3)"),
        (torch.ones(4, dtype=torch.float64), "torch.ones(4, dtype=torch.float64)"),
        (torch.full((3, 4), 1.5), "torch.full((3, 4), 1.5)"),
        (torch.full((9,), 16), "torch.full((9,), 16)"),
        (torch.full((9,), -0.0), "torch.full((9,), -0.)"),
        (torch.zeros(0, 3), "torch.zeros(0, 3)"),
        (torch.arange(5, 9), "torch.arange(5, 9)"),
        (torch.arange(6).reshape(2, 3), "torch.arange(6).reshape(2, 3)"),
        (torch.eye(3), "torch.eye(3)"),
        (torch.ones(3, 3, dtype=torch.bool).tril(), "torch.ones(3, 3, dtype=torch.bool).tril()"),
        (torch.eye(3).expand(2, 3, 3), "torch.eye(3).repeat(2, 1, 1)"),
    ],
    ids=str,
)
def test_the_shortest_form_is_chosen(tensor, text):
    assert literal(tensor) == text
    assert same(evaluated(text).reshape(tensor.shape), tensor)


def test_zeros_of_both_signs_are_told_apart():
    for values in ([0.0, -0.0, 0.0, 0.0], [-0.0, 0.0, 0.0, -0.0]):
        tensor = torch.tensor(values)
        assert same(evaluated(literal(tensor)), tensor)
    assert same(evaluated(literal(-torch.eye(3))), -torch.eye(3))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("regime", REGIMES)
def test_drawn_values_come_back(dtype, regime):
    recipe = TensorRecipe((3, 5), regime, 7, dtype)
    assert same(evaluated(literal(recipe.build())), recipe.build())


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "offset", "expanded"])
def test_a_layout_comes_back(layout):
    tensor = TensorRecipe((3, 4), "plain", 1, "float32", layout).build()
    got = evaluated(laid_out(tensor))
    assert torch.equal(got, tensor)
    assert (got.stride(), got.storage_offset()) == (tensor.stride(), tensor.storage_offset())
    assert literal(tensor) == literal(tensor.contiguous())


def test_a_view_into_a_longer_tensor_comes_back_with_what_is_around_it():
    longer = torch.arange(20.0)
    got = evaluated(laid_out(longer[4:8]))
    assert torch.equal(got, longer[4:8])
    assert torch.equal(got.as_strided((20,), (1,), 0), longer)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "regime", ["plain", "halves", "shifted", "small integers", "one large", "large integers", "negative tail"]
)
def test_a_large_tensor_is_written_as_the_draw_it_is(dtype, regime):
    recipe = TensorRecipe((40, 300), regime, 5, dtype)
    text = literal(recipe.build(), Drawn({"arguments": ArgumentsRecipe((("x", recipe),))}))
    assert len(text) < 200
    assert same(evaluated(text), recipe.build())


def test_ids_and_weights_are_written_as_draws_too():
    ids = IdsRecipe((5, 200), 50257, "drawn", 3)
    assert same(evaluated(literal(ids.build(), Drawn({"ids": ids}))), ids.build())
    for recipe in (ProjectionsRecipe(32, "halves", 1, "float32"), WeightsRecipe(32, 48, "halves", 1, "float32")):
        for part in recipe.parts().values():
            assert same(evaluated(literal(part.build(), Drawn({"w": recipe}))), build(part))


def test_a_large_tensor_that_is_no_draw_is_too_long():
    other = TensorRecipe((601,), "plain", 5, "float32").build() + 1
    with pytest.raises(TooLong):
        literal(other, Drawn({"x": TensorRecipe((601,), "plain", 5, "float32")}))
    assert len(literal(other[:600])) > 600


def test_numbers_are_python():
    assert [number(value) for value in (1, True, 0.1, math.inf, -math.inf, math.nan)] == [
        *("1", "True", "0.1", "torch.inf", "-torch.inf", "torch.nan"),
    ]
