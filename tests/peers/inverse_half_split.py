"""RoPE of halves that turns by the negative angle, on purpose: (a, b) becomes (a cos + b sin, b cos - a sin)."""

import torch

from .composed import operators_of, refuse_what_rope_refuses
from .half_split import HalfSplit

spec_lm_conventions = {"rope_pairing": "halves", "rope_direction": "clockwise"}


class InverseHalfSplit(HalfSplit):
    def rope(self, x, positions, theta, max_seq_len):
        refuse_what_rope_refuses(x, positions, max_seq_len)
        d = x.shape[-1]
        angles = positions[..., None].float() * theta ** -(torch.arange(0, d, 2).float() / d)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos + second * sin, second * cos - first * sin], -1)


globals().update(operators_of(InverseHalfSplit()))
