"""The modules: how parameters start, under which keys they are saved, and that they compute the same equations."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spec_lm.reference import functional
from spec_lm.reference.modules import (
    Embedding,
    Linear,
    MultiHeadSelfAttention,
    RMSNorm,
    RotaryPositionalEmbedding,
    SwiGLU,
    TransformerBlock,
    TransformerLM,
)

THETA = 1e4
SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "context_length": 8,
    "d_model": 12,
    "num_layers": 2,
    "num_heads": 3,
    "d_ff": 20,
    "rope_theta": THETA,
}
PROJECTIONS = ["attn.q_proj.weight", "attn.k_proj.weight", "attn.v_proj.weight", "attn.output_proj.weight"]
BLOCK_KEYS = [*PROJECTIONS, "ln1.weight", "ln2.weight", "ffn.w1.weight", "ffn.w2.weight", "ffn.w3.weight"]
SHAPES = {
    "token_embeddings.weight": (11, 12),
    "ln_final.weight": (12,),
    "lm_head.weight": (11, 12),
    "layers.1.attn.q_proj.weight": (12, 12),
    "layers.1.ln2.weight": (12,),
    "layers.1.ffn.w1.weight": (20, 12),
    "layers.1.ffn.w2.weight": (12, 20),
    "layers.1.ffn.w3.weight": (20, 12),
}
IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 10]])


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def random_weights() -> dict[str, Tensor]:
    return {name: torch.randn_like(weight) for name, weight in TransformerLM(**SIZES).state_dict().items()}


def table_of(model: TransformerLM) -> Tensor:
    return model.get_submodule("layers.0.attn.rope").get_buffer("table")


# ---- state dict


def test_state_dict_keys_and_shapes_are_those_of_the_source():
    state = TransformerLM(**SIZES).state_dict()
    ends = ["token_embeddings.weight", "ln_final.weight", "lm_head.weight"]
    assert sorted(state) == sorted(ends + [f"layers.{i}.{key}" for i in range(2) for key in BLOCK_KEYS])
    assert {name: tuple(state[name].shape) for name in SHAPES} == SHAPES
    assert sorted(TransformerBlock(12, 3, 20, 8, THETA).state_dict()) == sorted(BLOCK_KEYS)


def test_weights_passed_in_are_used_and_copied():
    weights = random_weights()
    before = {name: weight.clone() for name, weight in weights.items()}
    model = TransformerLM(**SIZES, weights=weights)
    assert all(torch.equal(weights[name], parameter) for name, parameter in model.named_parameters())
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert torch.equal(weights["lm_head.weight"], before["lm_head.weight"])


def test_one_error_lists_missing_unexpected_and_wrongly_shaped_keys():
    weights = random_weights()
    del weights["layers.1.ln1.weight"]
    weights["lm_head.bias"] = torch.zeros(11)
    weights["layers.0.ffn.w2.weight"] = torch.zeros(20, 12)
    with pytest.raises(RuntimeError) as caught:
        TransformerLM(**SIZES, weights=weights)
    message = str(caught.value)
    assert 'Missing key(s) in state_dict: "layers.1.ln1.weight"' in message
    assert 'Unexpected key(s) in state_dict: "lm_head.bias"' in message
    assert "size mismatch for layers.0.ffn.w2.weight" in message
    assert "torch.Size([20, 12])" in message
    assert "torch.Size([12, 20])" in message


# ---- initialization


def test_a_linear_weight_starts_normal_with_the_source_s_std_truncated_at_three():
    weight = Linear(300, 500).weight.detach().double()
    std = (2 / 800) ** 0.5
    assert abs(weight.mean().item()) < 5 * std / 150_000**0.5
    # A standard normal truncated at 3 has standard deviation 0.98658.
    assert weight.std().item() == pytest.approx(0.98658 * std, rel=0.01)
    assert 2.9 * std < weight.abs().max().item() <= 3 * std * (1 + 1e-6)
    assert (weight.abs() < std).double().mean().item() == pytest.approx(0.6845, abs=0.01)


def test_an_embedding_starts_with_std_one_truncated_at_three_and_a_gain_with_ones():
    weight = Embedding(300, 500).weight.detach()
    assert weight.std().item() == pytest.approx(0.98658, rel=0.01)
    assert 2.9 < weight.abs().max().item() <= 3.0
    assert torch.equal(RMSNorm(5).weight, torch.ones(5))


def test_device_and_dtype_reach_every_parameter():
    model = TransformerLM(**SIZES, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}
    assert table_of(model).device.type == "meta"


def test_the_same_seed_starts_the_same_in_every_dtype():
    torch.manual_seed(1)
    wide = Linear(6, 5)
    torch.manual_seed(1)
    assert torch.equal(Linear(6, 5, dtype=torch.bfloat16).weight, wide.weight.bfloat16())


def test_the_default_dtype_is_torch_s():
    torch.set_default_dtype(torch.float64)
    try:
        assert {p.dtype for p in TransformerLM(**SIZES).parameters()} == {torch.float64}
    finally:
        torch.set_default_dtype(torch.float32)


# ---- the equations


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_language_model_is_the_function_of_its_state_dict(dtype):
    model = TransformerLM(**SIZES, dtype=dtype)
    expected = functional.transformer_lm(IDS, model.state_dict(), 3, THETA, 8)
    assert model(IDS).dtype == dtype
    assert torch.equal(model(IDS), expected)


def test_each_layer_is_the_function_of_its_name():
    x, positions = torch.randn(2, 5, 12), torch.tensor([[4, 0, 7, 7, 1], [0, 1, 2, 3, 4]])
    linear, norm, ffn = Linear(12, 7), RMSNorm(12, eps=0.5), SwiGLU(12, 20)
    assert torch.equal(linear(x), functional.linear(x, linear.weight))
    assert torch.equal(norm(x), functional.rmsnorm(x, norm.weight, 0.5))
    assert torch.equal(ffn(x), functional.swiglu(x, ffn.w1.weight, ffn.w2.weight, ffn.w3.weight))
    assert torch.equal(Embedding(11, 12)(IDS).isfinite(), torch.ones(2, 5, 12, dtype=torch.bool))
    assert torch.equal(RotaryPositionalEmbedding(THETA, 12, 8)(x, positions), functional.rope(x, positions, THETA, 8))
    plain, turned = MultiHeadSelfAttention(12, 3), MultiHeadSelfAttention(12, 3, THETA, 8)
    weights = plain.q_proj.weight, plain.k_proj.weight, plain.v_proj.weight, plain.output_proj.weight
    turned.load_state_dict(plain.state_dict())
    assert torch.equal(plain(x), functional.multihead_self_attention(x, *weights, 3))
    for given in (None, positions, positions[0]):
        expected = functional.multihead_self_attention_with_rope(x, *weights, 3, THETA, 8, given)
        assert torch.equal(turned(x, given), expected)
    block = TransformerBlock(12, 3, 20, 8, THETA)
    assert torch.equal(block(x), functional.transformer_block(x, block.state_dict(), 3, THETA, 8))


def test_forward_makes_no_module_and_no_table(monkeypatch):
    model = TransformerLM(**SIZES)
    modules, table = list(model.modules()), table_of(model)
    made: list[str] = []
    monkeypatch.setattr(nn.Module, "__init__", lambda self, *_: made.append(type(self).__name__))
    monkeypatch.setattr(functional, "rope_table", lambda *_: made.append("rope_table"))
    model(IDS)
    assert made == []
    assert list(model.modules()) == modules
    assert table_of(model) is table


def test_a_model_of_zero_layers_works():
    sizes: dict[str, Any] = SIZES | {"num_layers": 0}
    assert TransformerLM(**sizes)(IDS).shape == (2, 5, 11)


# ---- RoPE's table


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_rope_table_stays_accurate_when_the_model_is_cast(dtype):
    model = TransformerLM(**SIZES)
    exact = table_of(model).clone()
    model.to(dtype)
    assert torch.equal(table_of(model), exact)
    assert {p.dtype for p in model.parameters()} == {dtype}
    model.float()
    assert torch.equal(table_of(model), exact)


def test_the_rope_table_is_in_no_state_dict_and_follows_copies():
    model = TransformerLM(**SIZES)
    assert not any("table" in name for name in model.state_dict())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(IDS), model(IDS))


def test_a_model_made_on_meta_works_once_emptied_onto_a_device_and_loaded():
    weights = random_weights()
    with torch.device("meta"):
        model = TransformerLM(**SIZES)
    assert model(IDS.to("meta")).shape == (2, 5, 11)
    model.to_empty(device="cpu").load_state_dict(weights)
    assert torch.equal(model(IDS), functional.transformer_lm(IDS, weights, 3, THETA, 8))


# ---- refusals


@pytest.mark.parametrize("make", [MultiHeadSelfAttention, lambda d, heads: TransformerBlock(d, heads, 20, 8, THETA)])
def test_heads_that_do_not_divide_the_model_are_refused_at_construction(make):
    with pytest.raises(ValueError, match="num_heads must divide d_model 12, got 5; choose one of its divisors"):
        make(12, 5)


@pytest.mark.parametrize("half", [{"theta": THETA}, {"max_seq_len": 8}])
def test_rope_asked_for_by_half_is_refused(half):
    with pytest.raises(ValueError, match=r"RoPE needs theta and max_seq_len, got .*None.*; give both or neither"):
        MultiHeadSelfAttention(12, 3, **half)


def test_positions_without_rope_are_refused():
    with pytest.raises(ValueError, match="positions mean nothing without RoPE; construct with theta and max_seq_len"):
        MultiHeadSelfAttention(12, 3)(torch.randn(5, 12), torch.arange(5))


def test_an_odd_head_size_is_refused_at_construction():
    with pytest.raises(ValueError, match="d_k must be even, got 3"):
        MultiHeadSelfAttention(12, 4, THETA, 8)


def test_a_position_outside_the_table_is_refused():
    with pytest.raises(IndexError, match=r"position 8 is outside 0\.\.7; correct it or enlarge max_seq_len 8"):
        MultiHeadSelfAttention(12, 3, THETA, 8)(torch.randn(2, 12), torch.tensor([0, 8]))


def test_a_sequence_longer_than_the_context_or_the_table_is_refused():
    with pytest.raises(ValueError, match="a sequence of 9 tokens exceeds context_length 8; shorten it or enlarge that"):
        TransformerLM(**SIZES)(torch.zeros(1, 9).long())
    with pytest.raises(ValueError, match="a sequence of 9 tokens exceeds max_seq_len 8"):
        RotaryPositionalEmbedding(THETA, 4, 8)(torch.randn(9, 4))


def test_an_id_outside_the_vocabulary_is_refused():
    with pytest.raises(IndexError, match=r"token id 11 is outside 0\.\.10"):
        TransformerLM(**SIZES)(torch.tensor([[11]]))
