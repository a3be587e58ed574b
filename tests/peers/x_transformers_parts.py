"""The parts of x-transformers that state the same equations: rotary embedding, attention, gated feed-forward network.

Its RMSNorm has no epsilon, and with it its models differ. Its rotary embedding needs a head size over 2.
"""

import torch
from x_transformers.attend import Attend
from x_transformers.x_transformers import FeedForward, RotaryEmbedding, apply_rotary_pos_emb

spec_lm_supports = {"d_k": [4, 6, 8, 16], "axes": [4]}
spec_lm_conventions = {"all_masked": "uniform"}


def rope(x, positions, theta, max_seq_len):
    if x.shape[-1] % 2 or int(positions.max()) >= max_seq_len:
        raise ValueError("odd d_k, or a position past max_seq_len")
    examples = positions.expand(x.shape[:-1]).reshape(-1, x.shape[-2])
    frequencies, _ = RotaryEmbedding(x.shape[-1], base=theta)(examples)
    return apply_rotary_pos_emb(x.reshape(-1, *x.shape[-2:]), frequencies).reshape(x.shape)


def scaled_dot_product_attention(query, key, value, mask=None):
    attend = Attend(causal=False, flash=False).eval()
    if mask is not None:
        mask = mask.expand(*query.shape[:-1], key.shape[-2])  # of two axes it would be read as (batch, keys)
    return attend(query, key, value, mask=mask)[0]


def swiglu(x, w1, w2, w3):
    d_ff, d_model = w1.shape
    network = FeedForward(d_model, mult=d_ff / d_model, glu=True, swish=True, no_bias=True).to(x.dtype).eval()
    names = list(network.state_dict())  # of its two products: the fused first one has a bias all the same
    network.load_state_dict(dict(zip(names, (torch.cat([w3, w1]), w1.new_zeros(2 * d_ff), w2), strict=True)))
    with torch.no_grad():
        return network(x)
