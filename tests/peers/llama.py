"""Hugging Face's Llama: its norm, its feed-forward network and the whole LlamaForCausalLM.

It rotates the pairs (i, i + d/2), so W_Q and W_K are reordered within each head, which gives equal logits.
"""

from functools import lru_cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

ATTENTION = "sdpa"
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


def _config(d_model, d_ff, num_heads=1, layers=1, vocab=1, theta=10000.0, context_length=16):
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


def rmsnorm(x, gain, eps):
    norm = LlamaRMSNorm(len(gain), eps)
    norm.weight.data = gain
    return norm(x).detach()


def swiglu(x, w1, w2, w3):
    mlp = LlamaMLP(_config(w1.shape[1], w1.shape[0]))
    mlp.gate_proj.weight.data, mlp.down_proj.weight.data, mlp.up_proj.weight.data = w1, w2, w3
    return mlp(x).detach()


@lru_cache(maxsize=256)
def _model(attention, dtype, *sizes):
    config = _config(*sizes)
    config._attn_implementation = attention
    return LlamaForCausalLM(config).to(dtype).eval()


def _halves(weight, num_heads):
    """The rows of each head, those of the pairs' first members before those of their second."""
    return weight.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def transformer_lm(token_ids, weights, num_heads, theta, context_length):
    if token_ids.shape[-1] > context_length:
        raise ValueError("longer than context_length")
    vocab, d_model = weights["token_embeddings.weight"].shape
    layers = sum(key.endswith("ln1.weight") for key in weights)
    d_ff = weights["layers.0.ffn.w1.weight"].shape[0] if layers else 4
    dtype = weights["lm_head.weight"].dtype
    model = _model(ATTENTION, dtype, d_model, d_ff, num_heads, layers, vocab, theta, context_length)
    state = {
        "model.embed_tokens.weight": weights["token_embeddings.weight"],
        "model.norm.weight": weights["ln_final.weight"],
        "lm_head.weight": weights["lm_head.weight"],
    }
    for i in range(layers):
        for theirs, ours in _NAMES.items():
            weight = weights[f"layers.{i}.{ours}.weight"]
            is_rotated = ours in ("attn.q_proj", "attn.k_proj")
            state[f"model.layers.{i}.{theirs}.weight"] = _halves(weight, num_heads) if is_rotated else weight
    model.load_state_dict(state, strict=True)
    with torch.no_grad():
        return model(token_ids).logits
