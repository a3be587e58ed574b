"""The fused modules are the reference's: the same weights, keys, values, gradients and errors. Operators are a peer."""

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spec_lm import fused
from spec_lm.reference import functional, modules
from spec_lm.reference.shapes import ShapeError

SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "context_length": 8,
    "d_model": 12,
    "num_layers": 2,
    "num_heads": 3,
    "d_ff": 20,
    "rope_theta": 1e4,
}
IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 10]])


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def both(kind: str, *sizes: Any, **options: Any) -> tuple[nn.Module, nn.Module]:
    """The reference's module and the fused one, each from the same seed."""
    made = []
    for home in (modules, fused):
        torch.manual_seed(1)
        made.append(getattr(home, kind)(*sizes, **options))
    return made[0], made[1]


def agree(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def gradient(model: nn.Module, name: str) -> Tensor:
    found = model.get_parameter(f"layers.{name}").grad
    assert found is not None
    return found


def test_the_same_seed_gives_the_same_weights_under_the_same_keys():
    plain, fast = (model.state_dict() for model in both("TransformerLM", **SIZES))
    assert sorted(fast) == sorted(plain)
    assert all(torch.equal(fast[key], plain[key]) for key in plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_and_gradients_are_those_of_the_reference(dtype):
    plain, fast = both("TransformerLM", **SIZES, dtype=dtype)
    cotangent = torch.randn(2, 5, 11, dtype=dtype)
    agree(fast(IDS), plain(IDS))
    (plain(IDS) * cotangent).sum().backward()
    (fast(IDS) * cotangent).sum().backward()
    agree(gradient(fast, "1.attn.qkv_proj"), torch.cat([gradient(plain, f"1.attn.{n}_proj.weight") for n in "qkv"]))
    agree(gradient(fast, "0.ffn.w13"), torch.cat([gradient(plain, f"0.ffn.w{i}.weight") for i in (1, 3)]))


def test_half_precision_model_keeps_its_dtype():
    plain, fast = both("TransformerLM", **SIZES, dtype=torch.bfloat16)
    assert fast(IDS).dtype == torch.bfloat16
    torch.testing.assert_close(fast(IDS), plain(IDS), rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("kind", "sizes", "arguments"),
    [
        ("SwiGLU", (12, 20), ()),
        ("MultiHeadSelfAttention", (12, 3), ()),
        ("MultiHeadSelfAttention", (12, 3, 1e4, 8), ()),
        ("MultiHeadSelfAttention", (12, 3, 1e4, 8), (torch.tensor([[4, 0, 2, 7], [1, 2, 3, 4]]),)),
        ("TransformerBlock", (12, 3, 20, 8, 1e4), ()),
    ],
)
def test_each_module_computes_what_the_reference_does(kind, sizes, arguments):
    plain, fast = both(kind, *sizes)
    x = torch.randn(2, 4, 12)
    agree(fast(x, *arguments), plain(x, *arguments))


def test_weights_go_from_one_to_the_other_and_back():
    plain, fast = both("TransformerLM", **SIZES)
    changed = {name: torch.randn_like(weight) for name, weight in plain.state_dict().items()}
    fast.load_state_dict(changed)
    plain.load_state_dict(fast.state_dict())
    assert all(torch.equal(weight, changed[name]) for name, weight in plain.state_dict().items())
    agree(fused.TransformerLM(**SIZES, weights=changed)(IDS), plain(IDS))


def test_one_error_lists_missing_unexpected_and_misshapen_keys():
    _, fast = both("TransformerLM", **SIZES)
    state = fast.state_dict()
    del state["layers.0.attn.k_proj.weight"]
    state["layers.1.ffn.w3.weight"] = torch.ones(2, 2)
    state["extra"] = torch.ones(1)
    with pytest.raises(RuntimeError) as raised:
        fast.load_state_dict(state)
    told = str(raised.value)
    assert re.search(r'Missing key\(s\) in state_dict: "layers.0.attn.k_proj.weight"\.', told)
    assert re.search(r'Unexpected key\(s\) in state_dict: "extra"\.', told)
    assert "layers.1.ffn.w3.weight: (2, 2) given, (20, 12) expected" in told


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_computes_the_same_and_loads_by_itself(copied):
    _, fast = both("TransformerLM", **SIZES)
    again = copied(fast)
    before = fast(IDS)
    agree(again(IDS), before)
    again.load_state_dict({name: 2 * weight for name, weight in fast.state_dict().items()})
    assert not torch.allclose(again(IDS), before)
    assert torch.equal(fast(IDS), before)


@pytest.mark.parametrize("layers", [0, 2])
def test_the_model_compiles_into_one_graph(layers):
    _, fast = both("TransformerLM", **{**SIZES, "num_layers": layers})
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
    agree(compiled(IDS), fast(IDS))


@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (0, 2), (2, 1, 3)])
def test_rotated_attention_takes_any_number_of_leading_axes(batch):
    x, weights = torch.randn(*batch, 5, 12), torch.randn(4, 12, 12)
    positions = torch.randint(0, 8, (*batch[-1:], 5))
    got, expected = (
        home.multihead_self_attention_with_rope(x, *weights, 3, 1e4, 8, positions) for home in (fused, functional)
    )
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_heads_of_values_may_have_a_size_of_their_own():
    x, (w_q, w_k), w_v, w_o = torch.randn(2, 5, 12), torch.randn(2, 6, 12), torch.randn(9, 12), torch.randn(12, 9)
    got = fused.multihead_self_attention_with_rope(x, w_q, w_k, w_v, w_o, 3, 1e4, 8)
    torch.testing.assert_close(
        got, functional.multihead_self_attention_with_rope(x, w_q, w_k, w_v, w_o, 3, 1e4, 8), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("axes", [2, 3, 4, 5])
def test_masks_of_fewer_axes_and_blind_queries(axes):
    batch = (2, 3, 4)[: axes - 2]
    query, key, value = torch.randn(3, *batch, 5, 6)
    mask = torch.rand(*batch[1:], 5, 5) > 0.5
    mask[..., 0, :] = False
    got = fused.scaled_dot_product_attention(query, key, value, mask)
    assert torch.equal(got[..., 0, :], torch.zeros_like(got[..., 0, :]))
    agree(got, functional.scaled_dot_product_attention(query, key, value, mask))


def test_what_the_reference_refuses_is_refused_in_its_words():
    x, square = torch.randn(2, 4, 12), torch.randn(12, 12)
    plain, fast = both("TransformerLM", **SIZES)
    refused = [
        (lambda home: home.linear(x, torch.randn(3, 11)), ShapeError),
        (lambda home: home.embedding(torch.tensor([-1]), square), IndexError),
        (lambda home: home.rope(torch.randn(4, 5), torch.arange(4), 1e4, 8), ValueError),
        (lambda home: home.rope(x, torch.arange(4) + 5, 1e4, 8), IndexError),
        (lambda home: home.multihead_self_attention(x, square, square, square, square, 5), ValueError),
        (lambda home: home.multihead_self_attention_with_rope(x, *[square] * 4, 3, 1e4, 3), ValueError),
        (lambda home: (fast if home is fused else plain)(torch.zeros(1, 9, dtype=torch.long)), ValueError),
        (lambda home: (fast if home is fused else plain)(torch.tensor([[11]])), IndexError),
        (lambda home: (fast if home is fused else plain)(torch.zeros(1, 2)), ShapeError),
    ]
    for call, kind in refused:
        told = []
        for home in (functional, fused):
            with pytest.raises(kind) as raised:
                call(home)
            told.append(str(raised.value))
        assert told[0] == told[1]


def test_attention_without_rope_refuses_positions():
    _, fast = both("MultiHeadSelfAttention", 12, 3)
    with pytest.raises(ValueError, match="positions mean nothing without RoPE"):
        fast(torch.randn(1, 2, 12), torch.arange(2))
