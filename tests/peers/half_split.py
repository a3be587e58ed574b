"""Half-split rotary embedding, as Llama's: x cos + rotate_half(x) sin, with tables made once, in float32."""

from functools import lru_cache

import torch

from .composed import Composed, operators_of, refuse_what_rope_refuses, wide

spec_lm_conventions = {"rope_pairing": "halves"}


@lru_cache(maxsize=64)
def _tables(d, theta, max_seq_len):
    inverse_frequencies = 1.0 / theta ** (torch.arange(0, d, 2, dtype=torch.int64).float() / d)
    angles = torch.outer(torch.arange(max_seq_len).float(), inverse_frequencies)
    both = torch.cat([angles, angles], -1)
    return both.cos(), both.sin()


def _rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class HalfSplit(Composed):
    def rmsnorm(self, x, gain, eps):
        """Llama's: back in the dtype of x before the gain."""
        rows = wide(x)
        return gain * (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    def rope(self, x, positions, theta, max_seq_len):
        refuse_what_rope_refuses(x, positions, max_seq_len)
        cos, sin = (table[positions] for table in _tables(x.shape[-1], theta, max_seq_len))
        return (wide(x) * cos + _rotate_half(wide(x)) * sin).to(x.dtype)


globals().update(operators_of(HalfSplit()))
