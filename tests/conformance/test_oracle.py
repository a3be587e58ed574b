"""The oracle says what the definitions say: against torch in float64, against loops, and against numbers by hand."""

import ast
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from spec_lm.conformance import oracle


def close(got: np.ndarray, expected: object) -> None:
    """Both sides compute in float64 and sum a few dozen terms of size 1."""
    np.testing.assert_allclose(got, np.asarray(expected), rtol=1e-12, atol=1e-13)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def attention_weights(d_model: int) -> list[np.ndarray]:
    return [normal(d_model, d_model, seed=seed) for seed in range(10, 14)]


def block_weights(d_model: int, d_ff: int, seed: int) -> dict[str, np.ndarray]:
    shapes = {f"attn.{name}_proj.weight": (d_model, d_model) for name in ("q", "k", "v", "output")}
    shapes |= {"ln1.weight": (d_model,), "ln2.weight": (d_model,)}
    shapes |= {"ffn.w1.weight": (d_ff, d_model), "ffn.w2.weight": (d_model, d_ff), "ffn.w3.weight": (d_ff, d_model)}
    return {key: normal(*shape, seed=seed + i) for i, (key, shape) in enumerate(shapes.items())}


def torch_rope(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Complex multiplication: (a + ib) e^(i angle)."""
    d = x.shape[-1]
    angles = positions[:, None] * theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.exp(1j * angles)
    return torch.view_as_real(turned).flatten(-2)


def torch_attention(x: torch.Tensor, w: dict[str, torch.Tensor], num_heads: int, theta: float) -> torch.Tensor:
    query, key, value = (
        F.linear(x, w[f"attn.{name}_proj.weight"]).unflatten(-1, (num_heads, -1)).transpose(-2, -3) for name in "qkv"
    )
    query, key = (torch_rope(rotated, torch.arange(x.shape[-2]), theta) for rotated in (query, key))
    heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return F.linear(heads.transpose(-2, -3).flatten(-2), w["attn.output_proj.weight"])


def torch_block(x: torch.Tensor, w: dict[str, torch.Tensor], num_heads: int, theta: float) -> torch.Tensor:
    y = x + torch_attention(F.rms_norm(x, x.shape[-1:], w["ln1.weight"], 1e-5), w, num_heads, theta)
    normed = F.rms_norm(y, y.shape[-1:], w["ln2.weight"], 1e-5)
    gate = F.silu(F.linear(normed, w["ffn.w1.weight"])) * F.linear(normed, w["ffn.w3.weight"])
    return y + F.linear(gate, w["ffn.w2.weight"])


def tensors(weights: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor(weight) for key, weight in weights.items()}


# ---- softmax ----


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
def test_softmax_is_torchs_along_every_axis(dim: int) -> None:
    x = 5 * normal(3, 4, 5)
    close(oracle.softmax(x, dim), torch.softmax(torch.tensor(x), dim).numpy())


def test_softmax_of_the_largest_numbers_is_finite() -> None:
    np.testing.assert_array_equal(oracle.softmax(np.array([8e307, 8e307, -8e307]), 0), [0.5, 0.5, 0.0])


def test_softmax_gives_minus_infinity_exactly_zero_and_an_empty_choice_nan() -> None:
    hidden = -np.inf
    got = oracle.softmax(np.array([[hidden, 1.0, 1.0], [hidden, hidden, hidden]]), -1)
    np.testing.assert_array_equal(got, [[0.0, 0.5, 0.5], [np.nan, np.nan, np.nan]])


def test_softmax_of_nothing_is_nothing() -> None:
    assert oracle.softmax(np.empty((2, 0)), -1).shape == (2, 0)


# ---- building blocks ----


def test_silu_is_torchs() -> None:
    x = np.linspace(-30, 30, 601)
    np.testing.assert_allclose(oracle.silu(x), F.silu(torch.tensor(x)).numpy(), rtol=1e-14)


def test_silu_keeps_its_digits_on_the_negative_tail() -> None:
    for x in (-1.0, -37.0, -300.0, -700.0):
        assert oracle.silu(np.array(x)) == pytest.approx(x * math.exp(x) / (1 + math.exp(x)), rel=1e-14)


def test_silu_is_finite_for_every_finite_input() -> None:
    np.testing.assert_array_equal(oracle.silu(np.array([-1.7e308, 1.7e308, 0.0])), [0.0, 1.7e308, 0.0])


def test_linear_is_a_sum_of_products_over_the_second_axis_of_the_weight() -> None:
    x, weight = normal(2, 3, 4), normal(5, 4, seed=1)
    expected = [[[sum(x[a, b] * weight[o]) for o in range(5)] for b in range(3)] for a in (0, 1)]
    close(oracle.linear(x, weight), expected)


def test_embedding_looks_up_rows_of_ids_of_any_shape() -> None:
    weight = normal(7, 3)
    np.testing.assert_array_equal(oracle.embedding(np.array([[6, 0], [6, 2]]), weight)[1], weight[[6, 2]])
    np.testing.assert_array_equal(oracle.embedding(np.array(4), weight), weight[4])


def test_embedding_refuses_an_id_outside_the_vocabulary() -> None:
    with pytest.raises(IndexError):
        oracle.embedding(np.array([7]), normal(7, 3))


@pytest.mark.parametrize("eps", [1e-5, 1.0])
def test_rmsnorm_is_torchs(eps: float) -> None:
    x, gain = normal(2, 3, 6), normal(6, seed=1)
    expected = F.rms_norm(torch.tensor(x), (6,), torch.tensor(gain), eps).numpy()
    close(oracle.rmsnorm(x, gain, eps), expected)


def test_rmsnorm_adds_eps_inside_the_root_and_subtracts_no_mean() -> None:
    # mean(x^2) = 8, so the root of 8 + 1 is 3; a mean of 2 would be subtracted from x, not from the result.
    close(oracle.rmsnorm(np.array([0.0, 4.0]), np.array([1.0, 6.0]), 1.0), [0.0, 8.0])


def test_swiglu_gates_the_third_weight_by_the_silu_of_the_first() -> None:
    x, w1, w2, w3 = normal(3), normal(5, 3, seed=1), normal(3, 5, seed=2), normal(5, 3, seed=3)
    gates = [sum(w1[f] * x) for f in range(5)]
    hidden = [gate / (1 + math.exp(-gate)) * sum(w3[f] * x) for f, gate in enumerate(gates)]
    close(oracle.swiglu(x, w1, w2, w3), [sum(w2[o] * hidden) for o in range(3)])


# ---- rope ----


def test_rope_rotates_neighbors_by_position_times_theta_to_minus_2i_over_d() -> None:
    # theta 100, d 4: the angles of position 3 are 3 and 3 / 10.
    got = oracle.rope(np.array([[1.0, 0.0, 0.0, 1.0]]), np.array([3]), 100.0, 4)
    np.testing.assert_allclose(got, [[math.cos(3), math.sin(3), -math.sin(0.3), math.cos(0.3)]], rtol=1e-15)


def test_rope_rotates_halves_where_that_is_the_convention() -> None:
    got = oracle.rope(np.array([[1.0, 0.0, 0.0, 1.0]]), np.array([3]), 100.0, 4, pairing="halves")
    np.testing.assert_allclose(got, [[math.cos(3), -math.sin(0.3), math.sin(3), math.cos(0.3)]], rtol=1e-15)


@pytest.mark.parametrize("pairing", ["neighbors", "halves"])
def test_rope_rotates_back_where_that_is_the_convention(pairing: str) -> None:
    x, positions = normal(2, 3, 6), np.array([0, 3, 29])
    turned = oracle.rope(x, positions, 1e4, 30, pairing=pairing, direction="clockwise")
    np.testing.assert_allclose(oracle.rope(turned, positions, 1e4, 30, pairing=pairing), x, rtol=1e-13)
    got = oracle.rope(np.array([[1.0, 0.0]]), np.array([3]), 1e4, 30, pairing=pairing, direction="clockwise")
    np.testing.assert_allclose(got, [[math.cos(3), -math.sin(3)]], rtol=1e-15)


def test_rope_is_a_complex_product_at_far_unsorted_positions() -> None:
    x, positions = normal(2, 3, 4, 6), np.array([29999, 0, 5, 5])
    expected = torch_rope(torch.tensor(x), torch.tensor(positions), 1e4).numpy()
    np.testing.assert_allclose(oracle.rope(x, positions, 1e4, 30000), expected, rtol=1e-10, atol=1e-10)


def test_rope_takes_positions_of_each_example() -> None:
    x, positions = normal(2, 3, 4), np.array([[0, 1, 2], [7, 5, 5]])
    expected = [oracle.rope(x[i], positions[i], 1e4, 8) for i in (0, 1)]
    np.testing.assert_array_equal(oracle.rope(x, positions, 1e4, 8), expected)


@pytest.mark.parametrize(
    ("d", "position", "convention", "says"),
    [
        (3, 0, {}, "even"),
        (4, 8, {}, "outside"),
        (4, 0, {"pairing": "no such pairing"}, "pairing"),
        (4, 0, {"direction": "no such direction"}, "direction"),
    ],
)
def test_rope_refuses_odd_axes_positions_outside_and_unknown_conventions(
    d: int, position: int, convention: dict[str, str], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        oracle.rope(normal(1, d), np.array([position]), 1e4, 8, **convention)


# ---- attention ----


@pytest.mark.parametrize(
    ("lead", "mask"),
    [((), None), ((), (3, 5)), ((2,), (3, 5)), ((2, 4), (2, 1, 3, 5)), ((2, 4), (5,)), ((2, 4), (2, 4, 3, 5))],
)
def test_attention_is_torchs_with_and_without_leading_axes_and_broadcast_masks(lead: tuple, mask: tuple | None) -> None:
    query, key, value = normal(*lead, 3, 6), normal(*lead, 5, 6, seed=1), normal(*lead, 5, 2, seed=2)
    visible = None if mask is None else normal(*mask, seed=3) > -0.5
    if visible is not None:
        visible[..., 0] = True
    ours = oracle.scaled_dot_product_attention(query, key, value, visible)
    as_tensor = None if visible is None else torch.tensor(visible).broadcast_to(*lead, 3, 5)
    theirs = F.scaled_dot_product_attention(torch.tensor(query), torch.tensor(key), torch.tensor(value), as_tensor)
    close(ours, theirs.numpy())


def test_masked_attention_is_attention_over_the_visible_keys() -> None:
    query, key, value, visible = normal(1, 4), normal(6, 4, seed=1), normal(6, 3, seed=2), np.arange(6) % 2 == 1
    expected = oracle.scaled_dot_product_attention(query, key[visible], value[visible])
    got = oracle.scaled_dot_product_attention(query, key, value, visible[None])
    close(got, expected)


@pytest.mark.parametrize(("all_masked", "expected"), [("zeros", 0.0), ("nan", np.nan), ("uniform", 4.0)])
def test_a_query_that_may_see_nothing_gets_what_is_declared_and_the_others_their_own(
    all_masked: str, expected: float
) -> None:
    value, mask = np.array([[2.0], [6.0]]), np.array([[False, False], [True, False]])
    got = oracle.scaled_dot_product_attention(normal(2, 4), normal(2, 4), value, mask, all_masked=all_masked)
    np.testing.assert_array_equal(got, [[expected], [2.0]])


def test_attention_stays_finite_at_scores_that_overflow_exp() -> None:
    query = 1e100 * normal(2, 4)
    assert np.isfinite(oracle.scaled_dot_product_attention(query, query, normal(2, 3))).all()


# ---- multi-head self-attention ----


def attention_by_loops(x: np.ndarray, weights: list[np.ndarray], num_heads: int, positions: list[int]) -> np.ndarray:
    """One example, token by token, from the definition."""
    w_q, w_k, w_v, w_o = weights
    width = x.shape[-1] // num_heads
    outputs = []
    for i in range(len(x)):
        heads: list[float] = []
        for head in range(num_heads):
            rows = slice(head * width, (head + 1) * width)
            query = rotated(w_q[rows] @ x[i], positions[i], 100.0)
            keys = [rotated(w_k[rows] @ x[j], positions[j], 100.0) for j in range(i + 1)]
            scores = [query @ key / math.sqrt(width) for key in keys]
            total = sum(math.exp(score) for score in scores)
            parts = [math.exp(score) / total * (w_v[rows] @ x[j]) for j, score in enumerate(scores)]
            heads.extend(np.sum(parts, 0))
        outputs.append(w_o @ np.array(heads))
    return np.array(outputs)


def rotated(v: np.ndarray, position: int, theta: float) -> np.ndarray:
    out = v.copy()
    for i in range(len(v) // 2):
        angle = position * theta ** (-2 * i / len(v))
        a, b = v[2 * i], v[2 * i + 1]
        out[2 * i], out[2 * i + 1] = (
            a * math.cos(angle) - b * math.sin(angle),
            a * math.sin(angle) + b * math.cos(angle),
        )
    return out


@pytest.mark.parametrize("num_heads", [1, 2, 4])
def test_multihead_self_attention_is_causal_attention_in_contiguous_slices(num_heads: int) -> None:
    x, weights, no_turn = normal(2, 5, 8) / 2, attention_weights(8), [0] * 5
    expected = [attention_by_loops(example, weights, num_heads, no_turn) for example in x]
    w_q, w_k, w_v, w_o = weights
    close(oracle.multihead_self_attention(x, w_q, w_k, w_v, w_o, num_heads), expected)


@pytest.mark.parametrize("positions", [None, [3, 3, 9, 0, 1], [[0, 1, 2, 3, 4], [9, 7, 5, 3, 1]]])
def test_rope_turns_queries_and_keys_of_every_head_by_the_positions_of_their_example(positions: list | None) -> None:
    """Batch and heads are both 2: positions laid along the wrong axis would fit."""
    x, weights = normal(2, 5, 8) / 2, attention_weights(8)
    at = np.broadcast_to(np.arange(5) if positions is None else positions, (2, 5)).tolist()
    expected = [attention_by_loops(example, weights, 2, at[i]) for i, example in enumerate(x)]
    w_q, w_k, w_v, w_o = weights
    given = None if positions is None else np.array(positions)
    got = oracle.multihead_self_attention_with_rope(x, w_q, w_k, w_v, w_o, 2, 100.0, 10, given)
    close(got, expected)


@pytest.mark.parametrize("convention", [{"pairing": "halves"}, {"direction": "clockwise"}], ids=str)
def test_conventions_of_the_rotation_reach_attention_block_and_language_model(convention: dict[str, str]) -> None:
    x, w, ids = normal(2, 5, 8), block_weights(8, 5, 20), np.array([[0, 2, 1]])
    w_q, w_k, w_v, w_o = attention_weights(8)
    lm = {f"layers.0.{key}": weight for key, weight in w.items()}
    lm |= {"token_embeddings.weight": normal(3, 8), "ln_final.weight": normal(8), "lm_head.weight": normal(3, 8)}

    def outputs(**convention: Any) -> list[np.ndarray]:
        return [
            oracle.multihead_self_attention_with_rope(x, w_q, w_k, w_v, w_o, 2, 1e4, 5, **convention),
            oracle.transformer_block(x, w, 2, 1e4, 5, **convention),
            oracle.transformer_lm(ids, lm, 2, 1e4, 5, **convention),
        ]

    for usual, other in zip(outputs(), outputs(**convention), strict=True):
        assert np.abs(usual - other).max() > 1e-4


def test_heads_that_do_not_divide_the_model_are_refused() -> None:
    w_q, w_k, w_v, w_o = attention_weights(8)
    with pytest.raises(ValueError, match="3 heads"):
        oracle.multihead_self_attention(normal(2, 8), w_q, w_k, w_v, w_o, 3)


# ---- block and language model ----


def test_the_block_is_the_same_made_of_torchs_functions() -> None:
    x, w = 3 * normal(2, 5, 8), block_weights(8, 12, 20)
    expected = torch_block(torch.tensor(x), tensors(w), 2, 100.0).numpy()
    close(oracle.transformer_block(x, w, 2, 100.0, 5), expected)


@pytest.mark.parametrize("layers", [0, 1, 11])
def test_the_language_model_is_the_same_made_of_torchs_functions(layers: int) -> None:
    """Eleven layers, so that the keys of layer 1 are the beginning of those of layer 10."""
    blocks = [block_weights(4, 3, 30 + 9 * i) for i in range(layers)]
    w = {f"layers.{i}.{key}": weight for i, block in enumerate(blocks) for key, weight in block.items()}
    w |= {"token_embeddings.weight": normal(7, 4), "ln_final.weight": normal(4, seed=1)}
    w |= {"lm_head.weight": normal(7, 4, seed=2)}
    ids = np.array([[6, 0, 3], [1, 1, 5]])
    x = torch.tensor(w["token_embeddings.weight"])[torch.tensor(ids)]
    for block in blocks:
        x = torch_block(x, tensors(block), 2, 100.0)
    expected = F.linear(
        F.rms_norm(x, (4,), torch.tensor(w["ln_final.weight"]), 1e-5), torch.tensor(w["lm_head.weight"])
    )
    np.testing.assert_allclose(oracle.transformer_lm(ids, w, 2, 100.0, 3), expected.numpy(), rtol=1e-10, atol=1e-10)


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    w = {"token_embeddings.weight": normal(7, 4), "ln_final.weight": normal(4), "lm_head.weight": normal(7, 4)}
    with pytest.raises(ValueError, match="longer than the context of 2"):
        oracle.transformer_lm(np.array([[1, 2, 3]]), w, 2, 1e4, 2)


# ---- the yardstick itself ----


def test_float32_input_is_computed_in_float64() -> None:
    x, weight = normal(2, 8).astype(np.float32), normal(8, 8, seed=1).astype(np.float32)
    for got in (
        oracle.softmax(x, -1),
        oracle.linear(x, weight),
        oracle.rmsnorm(x, weight[0], 1e-5),
        oracle.rope(x, np.arange(2), 1e4, 2),
        oracle.scaled_dot_product_attention(x, x, x),
        oracle.multihead_self_attention(x, weight, weight, weight, weight, 2),
        oracle.embedding(np.array([1]), weight),
    ):
        assert got.dtype == np.float64


def test_infinite_and_nan_input_raises_no_warning() -> None:
    x = np.array([[np.inf, -np.inf], [np.nan, 1e300]])
    for got in (
        oracle.softmax(x, -1),
        oracle.silu(x),
        oracle.linear(x, x),
        oracle.rmsnorm(x, x[1], 1e-5),
        oracle.rope(x, np.arange(2), 1e4, 2),
        oracle.scaled_dot_product_attention(x, x, x),
    ):
        assert np.isnan(got).any()


def test_the_oracle_knows_neither_torch_nor_anything_of_ours() -> None:
    tree = ast.parse(Path(oracle.__file__).read_text(encoding="utf-8"))
    plain = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    origins = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert plain | origins == {"numpy", "collections.abc"}
