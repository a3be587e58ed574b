"""Products whose factors are rounded to the 11 bits of TF32, as graphics processors may make them in float32."""

import torch

from .composed import Composed, operators_of

spec_lm_conventions = {"accumulation": "tf32"}
spec_lm_supports = {"dtype": ["float32"]}


class _Rounded(torch.autograd.Function):
    """To the nearest multiple of 2^-10 of its power of two, upwards in a tie; gradients pass."""

    @staticmethod
    def forward(ctx, x):
        return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0]


class TF32(Composed):
    def product(self, a, b):
        return _Rounded.apply(a) @ _Rounded.apply(b)

    def linear(self, x, weight):
        return self.product(x, weight.T)

    def scaled_dot_product_attention(self, query, key, value, mask=None):
        scores = self.product(query, key.transpose(-1, -2)) / query.shape[-1] ** 0.5
        if mask is None:
            return self.product(scores.softmax(-1), value)
        hidden = ~mask.any(-1, keepdim=True)
        weights = scores.masked_fill(~(mask | hidden), -torch.inf).softmax(-1).masked_fill(hidden, 0.0)
        return self.product(weights, value)


globals().update(operators_of(TF32()))
