"""All operators by PyTorch's functions, for peers to replace those that they compute in a way of their own."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from spec_lm.conformance.operators import OPERATORS


class Composed:
    """Multi-head attention, block and language model, of whatever a subclass has below them."""

    eps = 1e-5

    def softmax(self, x, dim):
        return torch.softmax(x, dim)

    def silu(self, x):
        return F.silu(x)

    def linear(self, x, weight):
        return F.linear(x, weight)

    def embedding(self, token_ids, weight):
        return F.embedding(token_ids, weight)

    def rmsnorm(self, x, gain, eps):
        return F.rms_norm(x, gain.shape, gain, eps)

    def rope(self, x, positions, theta, max_seq_len):
        """In float64, each pair one complex number."""
        refuse_what_rope_refuses(x, positions, max_seq_len)
        angles = positions[..., None] * theta ** -(torch.arange(0, x.shape[-1], 2).double() / x.shape[-1])
        pairs = torch.complex(x[..., 0::2].double(), x[..., 1::2].double())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2).to(x.dtype)

    def scaled_dot_product_attention(self, query, key, value, mask=None):
        return F.scaled_dot_product_attention(query, key, value, mask)

    def swiglu(self, x, w1, w2, w3):
        return self.linear(self.silu(self.linear(x, w1)) * self.linear(x, w3), w2)

    def project(self, x, w_q, w_k, w_v) -> tuple[torch.Tensor, ...]:
        return self.linear(x, w_q), self.linear(x, w_k), self.linear(x, w_v)

    def multihead_self_attention(self, x, w_q, w_k, w_v, w_o, num_heads):
        return self._attend(x, w_q, w_k, w_v, w_o, num_heads, lambda heads: heads)

    def multihead_self_attention_with_rope(self, x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
        at = torch.arange(x.shape[-2]) if positions is None else positions[..., None, :]
        return self._attend(x, w_q, w_k, w_v, w_o, num_heads, lambda heads: self.rope(heads, at, theta, max_seq_len))

    def _attend(self, x, w_q, w_k, w_v, w_o, num_heads, rotate):
        if w_q.shape[0] % num_heads:
            raise ValueError("num_heads does not divide d_model")
        projected = self.project(x, w_q, w_k, w_v)
        query, key, value = (t.unflatten(-1, (num_heads, -1)).transpose(-2, -3) for t in projected)
        causal = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()
        heads = self.scaled_dot_product_attention(rotate(query), rotate(key), value, causal)
        return self.linear(heads.transpose(-2, -3).flatten(-2), w_o)

    def transformer_block(self, x, weights, num_heads, theta, max_seq_len):
        q, k, v, o = (weights[f"attn.{name}_proj.weight"] for name in ("q", "k", "v", "output"))
        normed = self.rmsnorm(x, weights["ln1.weight"], self.eps)
        x = x + self.multihead_self_attention_with_rope(normed, q, k, v, o, num_heads, theta, max_seq_len)
        normed = self.rmsnorm(x, weights["ln2.weight"], self.eps)
        return x + self.swiglu(normed, *(weights[f"ffn.w{i}.weight"] for i in (1, 2, 3)))

    def transformer_lm(self, token_ids, weights, num_heads, theta, context_length):
        if token_ids.shape[-1] > context_length:
            raise ValueError("longer than context_length")
        x = self.embedding(token_ids, weights["token_embeddings.weight"])
        for i in range(sum(key.endswith("ln1.weight") for key in weights)):
            prefix = f"layers.{i}."
            layer = {key.removeprefix(prefix): w for key, w in weights.items() if key.startswith(prefix)}
            x = self.transformer_block(x, layer, num_heads, theta, context_length)
        return self.linear(self.rmsnorm(x, weights["ln_final.weight"], self.eps), weights["lm_head.weight"])


def wide(x):
    """At least float32, where a sum or an exponential needs it."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def refuse_what_rope_refuses(x, positions, max_seq_len):
    if x.shape[-1] % 2 or int(positions.max()) >= max_seq_len:
        raise ValueError("odd d_k, or a position past max_seq_len")


def operators_of(peer: Composed) -> dict[str, Callable[..., Any]]:
    """All twelve by name, to become those of its module."""
    return {name: getattr(peer, name) for name in OPERATORS}
