"""Three products and a mask of -1e9, as the first Transformers had it; one product for Q, K, V and one for gate and up.

Masked scores are equal and finite, so a query that sees no key averages all values. -1e9 is no number of float16.
"""

import torch

from .composed import Composed, operators_of, refuse_what_rope_refuses, wide

spec_lm_conventions = {"all_masked": "uniform"}
spec_lm_supports = {"dtype": ["float32", "float64", "bfloat16"]}


class FiniteFill(Composed):
    def softmax(self, x, dim):
        powers = torch.exp(wide(x) - wide(x).amax(dim, keepdim=True))
        return (powers / powers.sum(dim, keepdim=True)).to(x.dtype)

    def silu(self, x):
        return (wide(x) / (1 + torch.exp(-wide(x)))).to(x.dtype)

    def rmsnorm(self, x, gain, eps):
        rows = wide(x)
        return (rows / torch.sqrt(rows.square().mean(-1, keepdim=True) + eps) * gain).to(x.dtype)

    def rope(self, x, positions, theta, max_seq_len):
        """The rotation matrix of every position, multiplied out."""
        refuse_what_rope_refuses(x, positions, max_seq_len)
        d = x.shape[-1]
        angles = positions[..., None].double() / theta ** (torch.arange(0, d, 2).double() / d)
        even = torch.arange(0, d, 2)
        matrix = x.new_zeros(*angles.shape[:-1], d, d, dtype=torch.float64)
        matrix[..., even, even] = matrix[..., even + 1, even + 1] = angles.cos()
        matrix[..., even + 1, even], matrix[..., even, even + 1] = angles.sin(), -angles.sin()
        return (matrix.to(wide(x).dtype) @ wide(x)[..., None])[..., 0].to(x.dtype)

    def scaled_dot_product_attention(self, query, key, value, mask=None):
        scores = (query / query.shape[-1] ** 0.25) @ (key / query.shape[-1] ** 0.25).transpose(-2, -1)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        return self.softmax(scores, -1) @ value

    def project(self, x, w_q, w_k, w_v):
        return self.linear(x, torch.cat([w_q, w_k, w_v])).chunk(3, -1)

    def swiglu(self, x, w1, w2, w3):
        gate, up = self.linear(x, torch.cat([w1, w3])).chunk(2, -1)
        return self.linear(self.silu(gate) * up, w2)


globals().update(operators_of(FiniteFill()))
