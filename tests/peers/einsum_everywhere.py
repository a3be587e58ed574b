"""Every product an einsum; exp(s - logsumexp(s)); RMSNorm cast before its gain; rotary tables made once, in float32.

A query that sees no key gets what the formula gives: NaN.
"""

from functools import lru_cache

import torch

from .composed import Composed, operators_of, refuse_what_rope_refuses, wide

spec_lm_conventions = {"all_masked": "nan"}


@lru_cache(maxsize=64)
def _tables(d, theta, max_seq_len):
    frequencies = theta ** -(torch.arange(0, d, 2, dtype=torch.float32) / d)
    angles = torch.einsum("s,f->sf", torch.arange(max_seq_len, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


class Einsum(Composed):
    def softmax(self, x, dim):
        scores = wide(x)
        return torch.exp(scores - torch.logsumexp(scores, dim, keepdim=True)).to(x.dtype)

    def silu(self, x):
        return torch.einsum("...,...->...", x, torch.sigmoid(x))

    def linear(self, x, weight):
        return torch.einsum("...i,oi->...o", x, weight)

    def rmsnorm(self, x, gain, eps):
        rows = wide(x)
        mean_square = torch.einsum("...i,...i->...", rows, rows) / x.shape[-1]
        normed = torch.einsum("...i,...->...i", rows, torch.rsqrt(mean_square + eps))
        return normed.to(x.dtype) * gain

    def rope(self, x, positions, theta, max_seq_len):
        refuse_what_rope_refuses(x, positions, max_seq_len)
        cos, sin = (table[positions] for table in _tables(x.shape[-1], theta, max_seq_len))
        even, odd = wide(x)[..., 0::2], wide(x)[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)

    def scaled_dot_product_attention(self, query, key, value, mask=None):
        scores = torch.einsum("...qd,...kd->...qk", query, key) / query.shape[-1] ** 0.5
        if mask is not None:
            scores = torch.where(mask, scores, -torch.inf)
        return torch.einsum("...qk,...kv->...qv", self.softmax(scores, -1), value)


globals().update(operators_of(Einsum()))
