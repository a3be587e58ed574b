"""The same model as nn.Modules: what holds parameters, how they start, and under which keys they are saved.
Constructors take device and dtype, too. Loading is strict: one error lists missing, unexpected and misshapen keys."""

from functools import partial
from math import erf, sqrt
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from spec_lm.reference import functional
from spec_lm.reference.functional import Positions, Rotated, Stream, Tokens, Weights
from spec_lm.reference.shapes import shape_checked


def truncated_normal(*shape: int, std: float, device: Any = None, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A parameter from N(0, std^2), truncated at 3 std. Drawn in float32: sixteen bits are too coarse for the tails."""
    uniform = torch.empty(shape, device=device, dtype=torch.float32).uniform_(-1, 1)
    drawn = std * (sqrt(2) * (uniform * erf(3 / sqrt(2))).erfinv()).clamp(-3, 3)  # unlike trunc_normal_, also on fakes
    return nn.Parameter(drawn.to(dtype or torch.get_default_dtype()))


class Linear(nn.Module):
    """`functional.linear`; the weight starts with std sqrt(2 / (in_features + out_features))."""

    def __init__(self, in_features: int, out_features: int, **factory: Any) -> None:
        super().__init__()
        self.weight = truncated_normal(out_features, in_features, std=sqrt(2 / (in_features + out_features)), **factory)

    @shape_checked
    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        return functional.linear(x, self.weight)


class Embedding(nn.Module):
    """`functional.embedding`; the weight starts with std 1."""

    def __init__(self, num_embeddings: int, embedding_dim: int, **factory: Any) -> None:
        super().__init__()
        self.weight = truncated_normal(num_embeddings, embedding_dim, std=1.0, **factory)

    @shape_checked
    def forward(self, token_ids: Integer[Tensor, "*batch"]) -> Tokens:
        return functional.embedding(token_ids, self.weight)


class RMSNorm(nn.Module):
    """`functional.rmsnorm`; the gain, saved as weight, starts with ones."""

    def __init__(self, d_model: int, eps: float = functional.BLOCK_EPS, **factory: Any) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(d_model, **factory))

    @shape_checked
    def forward(self, x: Tokens) -> Tokens:
        return functional.rmsnorm(x, self.weight, self.eps)


class SwiGLU(nn.Module):
    """`functional.swiglu`, the feed-forward network of a block."""

    def __init__(self, d_model: int, d_ff: int, **factory: Any) -> None:
        super().__init__()
        self.w1, self.w3 = Linear(d_model, d_ff, **factory), Linear(d_model, d_ff, **factory)
        self.w2 = Linear(d_ff, d_model, **factory)

    @shape_checked
    def forward(self, x: Tokens) -> Tokens:
        return functional.swiglu(x, self.w1.weight, self.w2.weight, self.w3.weight)


class RotaryPositionalEmbedding(nn.Module):
    """`functional.rope` from a float64 table that is made once and not saved; omitted positions are 0, 1, 2, ..."""

    def __init__(self, theta: float, d_k: int, max_seq_len: int, device: Any = None) -> None:
        super().__init__()
        self.theta, self.d_k, self.max_seq_len = theta, d_k, max_seq_len
        self.register_buffer("table", self._table_on(device), persistent=False)

    def _table_on(self, device: Any) -> Tensor:
        return functional.rope_table(torch.arange(self.max_seq_len, device=device), self.d_k, self.theta)

    def _apply(self, fn: Any, recurse: bool = True) -> "RotaryPositionalEmbedding":
        super()._apply(fn, recurse)
        self.table = self._table_on(self.table.device)  # fn may have rounded it (half) or emptied it (to_empty)
        return self

    @shape_checked
    def forward(self, x: Rotated, token_positions: Positions | None = None) -> Rotated:
        if token_positions is None:
            functional.refuse_longer(x.shape[-2], self.max_seq_len, "max_seq_len")
            token_positions = torch.arange(x.shape[-2], device=x.device)
        functional.refuse_outside(token_positions, self.max_seq_len, "position", "max_seq_len")
        return functional.rotate_pairs(x, self.table[:, token_positions.long()])


class MultiHeadSelfAttention(nn.Module):
    """`functional.multihead_self_attention`; with theta and max_seq_len, `.._with_rope`, and only so with positions."""

    def __init__(
        self, d_model: int, num_heads: int, theta: float | None = None, max_seq_len: int | None = None, **factory: Any
    ) -> None:
        super().__init__()
        if num_heads < 1 or d_model % num_heads:
            raise ValueError(f"num_heads must divide d_model {d_model}, got {num_heads}; choose one of its divisors")
        if (theta is None) != (max_seq_len is None):
            raise ValueError(f"RoPE needs theta and max_seq_len, got {theta} and {max_seq_len}; give both or neither")
        self.num_heads, self.rope = num_heads, None
        if theta is not None and max_seq_len is not None:
            self.rope = RotaryPositionalEmbedding(theta, d_model // num_heads, max_seq_len, factory.get("device"))
        self.q_proj, self.k_proj, self.v_proj, self.output_proj = (Linear(d_model, d_model, **factory) for _ in "qkvo")

    @shape_checked
    def forward(self, x: Stream, token_positions: Positions | None = None) -> Stream:
        if self.rope is None and token_positions is not None:
            raise ValueError("positions mean nothing without RoPE; construct with theta and max_seq_len, or omit them")
        turned = None if token_positions is None else token_positions.unsqueeze(-2)
        rotation = {} if self.rope is None else {"rotate": partial(self.rope, token_positions=turned)}
        weights = (self.q_proj.weight, self.k_proj.weight, self.v_proj.weight, self.output_proj.weight)
        return functional.multihead_self_attention(x, *weights, self.num_heads, **rotation)


class TransformerBlock(nn.Module):
    """`functional.transformer_block`: attention and feed-forward network, each added to the stream that it norms."""

    def __init__(self, d_model: int, num_heads: int, d_ff: int, max_seq_len: int, theta: float, **factory: Any) -> None:
        super().__init__()
        self.ln1, self.ln2 = RMSNorm(d_model, **factory), RMSNorm(d_model, **factory)
        self.attn = MultiHeadSelfAttention(d_model, num_heads, theta, max_seq_len, **factory)
        self.ffn = SwiGLU(d_model, d_ff, **factory)

    @shape_checked
    def forward(self, x: Stream) -> Stream:
        y = x + self.attn(self.ln1(x))
        return y + self.ffn(self.ln2(y))


class TransformerLM(nn.Module):
    """`functional.transformer_lm`: unnormalized logits. It copies the weights given, or draws its own."""

    def __init__(
        self, vocab_size: int, context_length: int, d_model: int, num_layers: int, num_heads: int, d_ff: int,
        rope_theta: float, weights: Weights | None = None, **factory: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.context_length = context_length
        self.token_embeddings = Embedding(vocab_size, d_model, **factory)
        block = partial(TransformerBlock, d_model, num_heads, d_ff, context_length, rope_theta, **factory)
        self.layers = nn.ModuleList(block() for _ in range(num_layers))
        self.ln_final, self.lm_head = RMSNorm(d_model, **factory), Linear(d_model, vocab_size, **factory)
        if weights is not None:
            self.load_state_dict(weights)

    @shape_checked
    def forward(self, token_ids: Integer[Tensor, "*batch sequence"]) -> Float[Tensor, "*batch sequence vocab"]:
        functional.refuse_longer(token_ids.shape[-1], self.context_length, "context_length")
        x = self.token_embeddings(token_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.ln_final(x))
