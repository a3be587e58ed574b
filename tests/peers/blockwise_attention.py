"""Attention over blocks of keys with a running maximum and a running denominator, as fast kernels compute it."""

import math

import torch

BLOCK = 2


def softmax(x, dim):
    """exp2(x log2(e)), as kernels without a base-e exponential compute it."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scaled = (wide - wide.amax(dim, keepdim=True)) * math.log2(math.e)
    powers = torch.exp2(scaled)
    return (powers * powers.sum(dim, keepdim=True).reciprocal()).to(x.dtype)


def silu(x):
    """x sigmoid(x), with the exponential of -|x| the same way: that of -x overflows, and then has no gradient."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    shrunk = torch.exp2(wide.abs() * -math.log2(math.e))
    return (wide * torch.where(wide < 0, shrunk, 1.0) / (1 + shrunk)).to(x.dtype)


def scaled_dot_product_attention(query, key, value, mask=None):
    wide = torch.promote_types(query.dtype, torch.float32)
    scaled, keys, values = query.to(wide) * query.shape[-1] ** -0.5, key.to(wide), value.to(wide)
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    highest = torch.full((*lead, query.shape[-2], 1), -math.inf, dtype=wide)
    total = torch.zeros_like(highest)
    output = torch.zeros(*lead, query.shape[-2], value.shape[-1], dtype=wide)
    for start in range(0, key.shape[-2], BLOCK):
        block = slice(start, start + BLOCK)
        scores = scaled @ keys[..., block, :].transpose(-1, -2)
        if mask is not None:
            scores = scores.masked_fill(~mask[..., block], -math.inf)
        new = torch.maximum(highest, scores.amax(-1, keepdim=True))
        safe = new.masked_fill(new == -math.inf, 0.0)
        shrink, weights = torch.exp(highest - safe), torch.exp(scores - safe)
        total = total * shrink + weights.sum(-1, keepdim=True)
        output = output * shrink + weights @ values[..., block, :]
        highest = new
    return (output / total.masked_fill(total == 0.0, 1.0)).to(query.dtype)
