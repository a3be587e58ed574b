"""Sums added one term after the other, in the order of the axis, in float32 at least: no tree, no fused product."""

import torch

from .composed import Composed, operators_of, refuse_what_rope_refuses, wide


def _sum(terms):
    total = torch.zeros_like(terms[..., 0])
    for term in terms.unbind(-1):
        total = total + term
    return total


def _product(rows, columns):
    """(.. i k) times (.. j k), each entry a sum of its own."""
    return _sum(wide(rows)[..., :, None, :] * wide(columns)[..., None, :, :])


class OneByOne(Composed):
    def softmax(self, x, dim):
        powers = torch.exp(wide(x) - wide(x).amax(dim, keepdim=True))
        return (powers / _sum(powers.movedim(dim, -1)).unsqueeze(dim)).to(x.dtype)

    def silu(self, x):
        return (wide(x) * torch.sigmoid(wide(x))).to(x.dtype)

    def linear(self, x, weight):
        return _sum(wide(x)[..., None, :] * wide(weight)).to(x.dtype)

    def rmsnorm(self, x, gain, eps):
        rows = wide(x)
        root = torch.sqrt(_sum(rows * rows)[..., None] / x.shape[-1] + eps)
        return (rows / root * gain).to(x.dtype)

    def rope(self, x, positions, theta, max_seq_len):
        refuse_what_rope_refuses(x, positions, max_seq_len)
        d = x.shape[-1]
        angles = positions[..., None].double() / theta ** (torch.arange(0, d, 2).double() / d)
        cos, sin = angles.cos().to(wide(x).dtype), angles.sin().to(wide(x).dtype)
        pairs = wide(x).unflatten(-1, (-1, 2))
        turned = cos[..., None] * pairs + sin[..., None] * torch.stack([-pairs[..., 1], pairs[..., 0]], -1)
        return turned.flatten(-2).to(x.dtype)

    def scaled_dot_product_attention(self, query, key, value, mask=None):
        scores = _product(query, key) * query.shape[-1] ** -0.5
        if mask is not None:
            scores = scores + torch.zeros_like(scores).masked_fill(~mask, -torch.inf)
        highest = scores.amax(-1, keepdim=True)
        powers = torch.exp(scores - highest.masked_fill(highest == -torch.inf, 0.0))
        total = _sum(powers)[..., None]
        averaged = _product(powers / total.masked_fill(total == 0.0, 1.0), value.transpose(-1, -2))
        return averaged.to(query.dtype)


globals().update(operators_of(OneByOne()))
