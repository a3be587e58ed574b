"""Hugging Face's Llama with the weights of this project's language model.

It rotates the pairs (i, i + d/2), so W_Q and W_K are reordered within each head, which gives equal logits.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import LlamaConfig

from spec_lm.bench.cases import model_sizes

_NAMES = {
    "self_attn.q_proj": "attn.q_proj",
    "self_attn.k_proj": "attn.k_proj",
    "self_attn.v_proj": "attn.v_proj",
    "self_attn.o_proj": "attn.output_proj",
    "mlp.gate_proj": "ffn.w1",
    "mlp.down_proj": "ffn.w2",
    "mlp.up_proj": "ffn.w3",
    "input_layernorm": "ln1",
    "post_attention_layernorm": "ln2",
}


def configuration(
    d_model: int,
    d_ff: int,
    num_heads: int = 1,
    layers: int = 1,
    vocab: int = 1,
    theta: float = 1e4,
    context_length: int = 16,
) -> LlamaConfig:
    """A Llama of these sizes."""
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=d_model,
        intermediate_size=d_ff,
        num_hidden_layers=layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=context_length,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        use_cache=False,
    )


def sizes_of(weights: Mapping[str, Tensor], num_heads: int, theta: float, context_length: int) -> tuple[Any, ...]:
    """The arguments of `configuration` for these weights."""
    vocab, d_model, layers, d_ff = model_sizes(weights)
    return d_model, d_ff, num_heads, layers, vocab, theta, context_length


def state_of(weights: Mapping[str, Tensor], num_heads: int) -> dict[str, Tensor]:
    """The same weights under Llama's keys."""
    state = {
        "model.embed_tokens.weight": weights["token_embeddings.weight"],
        "model.norm.weight": weights["ln_final.weight"],
        "lm_head.weight": weights["lm_head.weight"],
    }
    for i in range(model_sizes(weights)[2]):
        for theirs, ours in _NAMES.items():
            weight = weights[f"layers.{i}.{ours}.weight"]
            is_rotated = ours in ("attn.q_proj", "attn.k_proj")
            state[f"model.layers.{i}.{theirs}.weight"] = _halves(weight, num_heads) if is_rotated else weight
    return state


def _halves(weight: Tensor, num_heads: int) -> Tensor:
    """The rows of each head, those of the pairs' first members before those of their second."""
    return weight.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
