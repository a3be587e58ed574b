"""Hugging Face's Llama: its norm, its feed-forward network and the whole LlamaForCausalLM.

It rotates the pairs (i, i + d/2), so W_Q and W_K are reordered within each head, which gives equal logits.
"""

from functools import lru_cache

import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from spec_lm.bench.llama import configuration, sizes_of, state_of

ATTENTION = "sdpa"


def rmsnorm(x, gain, eps):
    norm = LlamaRMSNorm(len(gain), eps)
    norm.weight.data = gain
    return norm(x).detach()


def swiglu(x, w1, w2, w3):
    mlp = LlamaMLP(configuration(w1.shape[1], w1.shape[0]))
    mlp.gate_proj.weight.data, mlp.down_proj.weight.data, mlp.up_proj.weight.data = w1, w2, w3
    return mlp(x).detach()


@lru_cache(maxsize=256)
def _model(attention, dtype, *sizes):
    config = configuration(*sizes)
    config._attn_implementation = attention
    return LlamaForCausalLM(config).to(dtype).eval()


def transformer_lm(token_ids, weights, num_heads, theta, context_length):
    if token_ids.shape[-1] > context_length:
        raise ValueError("longer than context_length")
    dtype = weights["lm_head.weight"].dtype
    model = _model(ATTENTION, dtype, *sizes_of(weights, num_heads, theta, context_length))
    model.load_state_dict(state_of(weights, num_heads), strict=True)
    with torch.no_grad():
        return model(token_ids).logits
