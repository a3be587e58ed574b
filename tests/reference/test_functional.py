"""The equations: exact to the derived bound in every dtype, at every rank, and where practice goes wrong."""

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spec_lm.conformance.bounds import bounded
from spec_lm.conformance.operators import OPERATORS, to_numpy
from spec_lm.reference import functional

FOLDER = Path(functional.__file__).parent
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
THETA, EPS = 1e4, 1e-5


def randn(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def randint(top: int, *shape: int) -> Tensor:
    return torch.randint(top, shape, generator=torch.Generator().manual_seed(top))


def block_weights(d_model: int, d_ff: int, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    shapes = {f"attn.{name}_proj.weight": (d_model, d_model) for name in ("q", "k", "v", "output")}
    shapes |= {"ffn.w1.weight": (d_ff, d_model), "ffn.w2.weight": (d_model, d_ff), "ffn.w3.weight": (d_ff, d_model)}
    norms = {f"ln{i}.weight": 1 + randn(d_model, seed=seed + i, scale=0.1).to(dtype) for i in (1, 2)}
    items = enumerate(shapes.items(), seed + 3)
    return norms | {name: randn(*s, seed=i, scale=s[1] ** -0.5, dtype=dtype) for i, (name, s) in items}


def model_weights(layers: int, d_model: int = 12, vocab: int = 11, dtype: torch.dtype = torch.float32):
    weights = {"token_embeddings.weight": randn(vocab, d_model, seed=1, dtype=dtype)}
    for layer in range(layers):
        weights |= {f"layers.{layer}.{k}": w for k, w in block_weights(d_model, 20, 100 * layer, dtype).items()}
    head = randn(vocab, d_model, seed=2, scale=d_model**-0.5, dtype=dtype)
    return weights | {"ln_final.weight": torch.ones(d_model, dtype=dtype), "lm_head.weight": head}


def square_weights(d_model: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    w_q, w_k, w_v, w_o = (randn(d_model, d_model, seed=i, scale=d_model**-0.5, dtype=dtype) for i in range(10, 14))
    return w_q, w_k, w_v, w_o


def calls(operator: str, dtype: torch.dtype) -> Iterator[tuple]:
    """Arguments of an operator: odd sizes, more than one magnitude, leading axes or none."""
    for seed, (n, m, d, scale) in enumerate([(1, 1, 2, 1.0), (5, 7, 12, 8.0), (17, 33, 64, 0.01), (6, 64, 32, 4.0)]):
        x = randn(2, n, d, seed=seed, scale=scale, dtype=dtype)
        key, value = randn(2, m, d, seed=5, dtype=dtype), randn(2, m, 3, seed=6, dtype=dtype)
        mask = randn(n, m, seed=7) < 0.3
        ids = torch.arange(2 * n).view(2, n) % 11
        yield from {
            "softmax": [(3 * x, 0), (3 * x, -1), (3 * x[0, 0], 0)],
            "silu": [(3 * x,), (x[0, 0, 0],)],
            "linear": [(x, randn(m, d, dtype=dtype)), (x[0, 0], randn(m, d, dtype=dtype))],
            "embedding": [(ids, randn(11, d, dtype=dtype)), (ids[0, 0], randn(11, d, dtype=dtype))],
            "rmsnorm": [(x, randn(d, dtype=dtype), EPS), (x[0, 0], randn(d, dtype=dtype), EPS)],
            "swiglu": [(x, *(block_weights(d, m, 0, dtype)[f"ffn.w{i}.weight"] for i in (1, 2, 3)))],
            "rope": [
                (x, randint(100_000, n), THETA, 100_000),
                (x, randint(100_000, 2, n), 500.0, 100_000),
                (x[0], randint(100_000, n), THETA, 100_000),
                (x[:, None], randint(100_000, 2, 1, n), THETA, 100_000),
            ],
            "scaled_dot_product_attention": [(x, key, value), (x, key, value, mask), (x[0], key[0], value[0], mask)],
            "multihead_self_attention": [(x, *square_weights(d, dtype), 2), (x[0], *square_weights(d, dtype), 1)],
            "multihead_self_attention_with_rope": [
                (x, *square_weights(d, dtype), 1, THETA, 100),
                (x, *square_weights(d, dtype), d // 2, THETA, 100, torch.arange(2 * n).view(2, n)),
                (x[0], *square_weights(d, dtype), 1, THETA, 100, torch.arange(n).flip(0)),
            ],
            "transformer_block": [(x, block_weights(d, m, 0, dtype), d // 2, THETA, 32)],
            "transformer_lm": [(ids, model_weights(2, d, dtype=dtype), d // 2, THETA, 32)],
        }[operator]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_is_within_the_derived_bound_and_keeps_dtype_and_shape(operator, dtype):
    for args in calls(operator, dtype):
        got = getattr(functional, operator)(*args)
        assert got.dtype == dtype
        exact, bound = bounded(operator, tuple(to_numpy(arg) for arg in args), str(dtype).removeprefix("torch."))
        assert got.shape == exact.shape
        assert np.all(np.abs(to_numpy(got) - exact) <= bound)


@pytest.mark.parametrize("operator", OPERATORS)
def test_no_argument_is_changed_and_gradients_reach_every_float_argument(operator):
    def tensors(args) -> dict[str, Tensor]:
        nested = [arg.items() if isinstance(arg, dict) else [(str(i), arg)] for i, arg in enumerate(args)]
        return {name: arg for items in nested for name, arg in items if isinstance(arg, Tensor)}

    *_, args = calls(operator, torch.float32)
    before = {name: tensor.clone() for name, tensor in tensors(args).items()}
    leaves = {k: t.requires_grad_() for k, t in tensors(args).items() if t.is_floating_point() and t.is_leaf}
    getattr(functional, operator)(*args).square().sum().backward()
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors(args).items())
    assert leaves or operator == "softmax"
    assert [name for name, leaf in leaves.items() if leaf.grad is None or not leaf.grad.isfinite().all()] == []


# ---- softmax and attention


def test_softmax_of_large_half_precision_input_is_finite():
    for dtype in (torch.float16, torch.bfloat16):
        top = torch.finfo(dtype).max
        assert functional.softmax(torch.tensor([top, -top, top], dtype=dtype), 0).tolist() == [0.5, 0.0, 0.5]


def test_softmax_gives_minus_infinity_probability_zero_and_an_all_infinite_slice_nan():
    slices = torch.tensor([[-torch.inf, 0.0], [-torch.inf, -torch.inf]])
    probabilities = functional.softmax(slices, -1)
    assert probabilities[0].tolist() == [0.0, 1.0]
    assert probabilities[1].isnan().all()


def test_softmax_takes_an_axis_without_entries():
    assert functional.softmax(torch.ones(2, 0), -1).shape == (2, 0)


def test_half_precision_scores_beyond_the_largest_half_do_not_overflow():
    query = torch.full((1, 64), 100.0, dtype=torch.float16)  # q . k = 640000
    keys = torch.stack((query[0], query[0] * 0.5))
    got = functional.scaled_dot_product_attention(query, keys, torch.eye(2, dtype=torch.float16))
    assert got.tolist() == [[1.0, 0.0]]


def test_a_query_that_sees_no_key_gets_zeros_and_finite_gradients_and_harms_no_neighbor():
    q, k, v = (randn(4, 3, seed=seed).requires_grad_() for seed in range(3))
    mask = torch.tensor([[True, False, True, True], [False] * 4, [True] * 4, [False] * 4])
    got = functional.scaled_dot_product_attention(q, k, v, mask)
    assert torch.equal(got[[1, 3]], torch.zeros(2, 3))
    seeing = functional.scaled_dot_product_attention(q[[0, 2]], k, v, mask[[0, 2]])
    torch.testing.assert_close(got[[0, 2]], seeing, rtol=1e-6, atol=1e-6)
    both = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (got, seeing)]
    for gradient, expected in zip(*both, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(both[0][0][[1, 3]], torch.zeros(2, 3))


def test_a_query_that_sees_no_key_makes_no_nan_on_the_way():
    q = randn(2, 3).requires_grad_()
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        functional.scaled_dot_product_attention(q, q, q, torch.tensor([[True, False], [False, False]])).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_masked_key_stays_unseen_where_visible_scores_are_far_below_zero(dtype):
    query, keys = torch.tensor([[1e5]], dtype=dtype), torch.tensor([[-1.0], [0.0]], dtype=dtype)
    got = functional.scaled_dot_product_attention(query, keys, torch.eye(2, dtype=dtype), torch.tensor([[True, False]]))
    assert got.tolist() == [[1.0, 0.0]]


def test_attention_without_keys_gives_zeros():
    got = functional.scaled_dot_product_attention(randn(2, 3), randn(0, 3), randn(0, 4))
    assert torch.equal(got, torch.zeros(2, 4))


def test_attention_agrees_with_torch_and_its_gradients_with_finite_differences():
    q, k, v = (randn(2, n, 4, seed=n).double().requires_grad_() for n in (3, 5, 5))
    mask = randn(3, 5, seed=9) < 0.5
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(functional.scaled_dot_product_attention(q, k, v, mask), expected)
    assert torch.autograd.gradcheck(functional.scaled_dot_product_attention, (q, k, v, mask))


# ---- building blocks


def test_rmsnorm_of_half_precision_thousands_does_not_overflow():
    got = functional.rmsnorm(torch.full((4,), 6e4, dtype=torch.float16), torch.ones(4, dtype=torch.float16), EPS)
    assert got.tolist() == [1.0] * 4


def test_silu_is_finite_for_every_finite_input():
    for dtype in DTYPES:
        top = torch.finfo(dtype).max
        assert functional.silu(torch.tensor([top, -top], dtype=dtype)).tolist() == [top, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_silu_and_rmsnorm_round_once_in_half_precision(dtype):
    x = torch.tensor([-16.0, -11.3, -2.7, 0.3, 1.9, 5.1], dtype=dtype)
    assert torch.equal(functional.silu(x), torch.nn.functional.silu(x.double()).to(dtype))
    gain = torch.linspace(0.3, 1.7, 6).to(dtype)
    expected = torch.nn.functional.rms_norm(x.double(), (6,), gain.double(), EPS).to(dtype)
    assert torch.equal(functional.rmsnorm(x, gain, EPS), expected)


@pytest.mark.parametrize("ids", [torch.tensor([0, 7]), torch.tensor([[-1]]), torch.tensor(7)])
def test_an_id_outside_the_vocabulary_is_refused_with_the_range(ids):
    with pytest.raises(IndexError, match=r"token id (7|-1) is outside 0\.\.6; correct it or enlarge vocab 7"):
        functional.embedding(ids, torch.ones(7, 2))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_ids_and_positions_may_have_any_integer_dtype(dtype):
    ids, x = torch.tensor([1, 0, 1], dtype=dtype), randn(3, 4)
    assert torch.equal(functional.embedding(ids, x), x[[1, 0, 1]])
    assert torch.equal(functional.rope(x, ids, THETA, 2), functional.rope(x, ids.long(), THETA, 2))


# ---- rope


def test_rope_rotates_neighboring_pairs_by_hand():
    got = functional.rope(torch.tensor([[1.0, 0.0, 0.0, 2.0]]), torch.tensor([3]), 100.0, 4)
    angles = torch.tensor([3.0, 0.3])
    first, second = [angles[0].cos(), angles[0].sin()], [-2 * angles[1].sin(), 2 * angles[1].cos()]
    torch.testing.assert_close(got, torch.tensor([[*first, *second]]))


def test_rope_refuses_an_odd_head_size_and_says_why():
    with pytest.raises(ValueError, match="d_k must be even, got 3; choose d_model / num_heads even"):
        functional.rope(torch.ones(2, 3), torch.arange(2), THETA, 2)


@pytest.mark.parametrize("position", [8, -1])
def test_rope_refuses_a_position_outside_and_names_it(position):
    with pytest.raises(
        IndexError, match=rf"position {position} is outside 0\.\.7; correct it or enlarge max_seq_len 8"
    ):
        functional.rope(torch.ones(2, 4), torch.tensor([0, position]), THETA, 8)


def test_rope_keeps_float64_accuracy_at_distant_positions():
    x, positions = randn(3, 8).double(), torch.tensor([99_999, 1, 54_321])
    got = functional.rope(x, positions, THETA, 100_000)
    angles = positions.numpy()[:, None] * THETA ** -(np.arange(0, 8, 2) / 8)
    turned = (x.numpy()[:, 0::2] + 1j * x.numpy()[:, 1::2]) * np.exp(1j * angles)
    np.testing.assert_allclose(got.numpy()[:, 0::2] + 1j * got.numpy()[:, 1::2], turned, rtol=0, atol=1e-10)


# ---- multi-head self-attention


def test_split_and_merge_are_inverse_and_head_i_is_the_i_th_contiguous_slice():
    x = randn(2, 5, 12)
    heads = functional.split_heads(x, 3)
    assert torch.equal(heads[:, 1], x[..., 4:8])
    assert torch.equal(functional.merge_heads(heads), x)
    assert torch.equal(functional.split_heads(functional.merge_heads(heads), 3), heads)


@pytest.mark.parametrize("num_heads", [5, 0, -1, 24])
def test_heads_that_do_not_divide_the_model_are_refused(num_heads):
    with pytest.raises(ValueError, match=f"num_heads must divide d_model 12, got {num_heads}; choose one of its div"):
        functional.multihead_self_attention(randn(2, 12), *square_weights(12), num_heads)


def test_one_product_with_the_stacked_weight_equals_three_products():
    x, (w_q, w_k, w_v, w_o) = randn(2, 5, 12).double(), [w.double() for w in square_weights(12)]
    stacked = functional.linear(x, torch.cat((w_q, w_k, w_v)))
    query, key, value = (functional.split_heads(part, 3) for part in stacked.chunk(3, -1))
    heads = functional.scaled_dot_product_attention(query, key, value, functional.causal_mask(5))
    fused = functional.linear(functional.merge_heads(heads), w_o)
    torch.testing.assert_close(functional.multihead_self_attention(x, w_q, w_k, w_v, w_o, 3), fused)


def test_the_causal_mask_shows_token_i_exactly_the_tokens_up_to_i():
    assert functional.causal_mask(3).tolist() == [[True, False, False], [True, True, False], [True, True, True]]


def test_positions_per_example_follow_the_example_even_where_batch_equals_heads():
    x, weights = randn(2, 4, 8), square_weights(8)
    positions = torch.tensor([[0, 1, 2, 3], [9, 4, 0, 7]])
    together = functional.multihead_self_attention_with_rope(x, *weights, 2, THETA, 10, positions)
    for i in range(2):
        alone = functional.multihead_self_attention_with_rope(x[i], *weights, 2, THETA, 10, positions[i])
        torch.testing.assert_close(together[i], alone, rtol=1e-5, atol=1e-6)


def test_omitted_positions_count_from_zero():
    x, weights = randn(2, 4, 8), square_weights(8)
    omitted = functional.multihead_self_attention_with_rope(x, *weights, 2, THETA, 4)
    given = functional.multihead_self_attention_with_rope(x, *weights, 2, THETA, 4, torch.arange(4))
    assert torch.equal(omitted, given)
    assert not torch.allclose(omitted, functional.multihead_self_attention(x, *weights, 2))


def test_a_sequence_longer_than_max_seq_len_is_refused():
    with pytest.raises(ValueError, match="a sequence of 5 tokens exceeds max_seq_len 4; shorten it or enlarge that"):
        functional.multihead_self_attention_with_rope(randn(5, 8), *square_weights(8), 2, THETA, 4)


# ---- block and language model


def test_a_sequence_longer_than_the_context_is_refused():
    with pytest.raises(ValueError, match="a sequence of 5 tokens exceeds context_length 4"):
        functional.transformer_lm(torch.zeros(1, 5).long(), model_weights(1), 3, THETA, 4)


def test_a_model_of_zero_layers_is_embedding_norm_and_head():
    ids, weights = torch.tensor([[3, 1]]), model_weights(0)
    x = weights["token_embeddings.weight"][ids]
    expected = torch.nn.functional.rms_norm(x, (12,), eps=EPS) @ weights["lm_head.weight"].T
    torch.testing.assert_close(functional.transformer_lm(ids, weights, 3, THETA, 4), expected)


def test_each_of_eleven_layers_gets_its_own_weights_in_numerical_order():
    ids, weights = torch.tensor([[3, 1, 4]]), model_weights(11)
    x = weights["token_embeddings.weight"][ids]
    for layer in range(11):
        of_layer = {name: weights[f"layers.{layer}.{name}"] for name in block_weights(12, 20, 0)}
        x = functional.transformer_block(x, of_layer, 3, THETA, 4)
    expected = functional.linear(functional.rmsnorm(x, weights["ln_final.weight"], EPS), weights["lm_head.weight"])
    shuffled = dict(sorted(weights.items(), reverse=True))  # a dict promises no order
    assert torch.equal(functional.transformer_lm(ids, shuffled, 3, THETA, 4), expected)


# ---- the folder


def test_the_reference_fits_one_sitting():
    sources = {path.name: path.read_text() for path in FOLDER.glob("*.py")}
    assert sum(len(source.splitlines()) for source in sources.values()) < 500
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                assert _lines_of_code(node) <= 25, f"{name}: {node.name}"


def _lines_of_code(function: ast.FunctionDef) -> int:
    docstring = ast.get_docstring(function, clean=False)
    return (function.end_lineno or 0) - function.lineno + 1 - (len(docstring.splitlines()) if docstring else 0)


def test_the_reference_imports_nothing_of_ours_outside_its_folder():
    modules = set()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                modules.add(node.module or "")
            elif isinstance(node, ast.Import):
                modules.update(alias.name for alias in node.names)
    assert "spec_lm.reference.shapes" in modules
    assert [m for m in modules if m.startswith("spec_lm") and not m.startswith("spec_lm.reference")] == []


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


def test_importing_the_reference_runs_no_tensor_operation():
    with _Recorder() as recorder:
        for name in ("shapes", "functional", "modules", "adapters"):
            exec(compile((FOLDER / f"{name}.py").read_text(), name, "exec"), {"__name__": f"fresh_{name}"})
    assert recorder.operations == []
    with _Recorder() as recorder:
        torch.ones(2)
    assert recorder.operations != []
