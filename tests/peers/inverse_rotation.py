"""RoPE that turns by the negative angle, on purpose: each pair is a complex number, times exp(-i angle).

Queries and keys turn alike, so inner products still depend on the distance alone.
"""

import torch

from .composed import Composed, operators_of, refuse_what_rope_refuses, wide

spec_lm_conventions = {"rope_direction": "clockwise"}


class Inverse(Composed):
    def rope(self, x, positions, theta, max_seq_len):
        refuse_what_rope_refuses(x, positions, max_seq_len)
        d = x.shape[-1]
        angles = positions[..., None] * theta ** -(torch.arange(0, d, 2, dtype=torch.float64) / d)
        pairs = torch.complex(wide(x)[..., 0::2], wide(x)[..., 1::2])
        turned = pairs * torch.polar(torch.ones_like(angles), -angles).to(pairs.dtype)
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)


globals().update(operators_of(Inverse()))
