"""The same operators and modules as the reference, as fast as stock PyTorch computes them.

One product for queries, keys and values; in the modules one for gate and up (on a processor two, which are faster);
PyTorch's attention kernels, without a mask in the causal case; its RMSNorm; RoPE as one complex product. The
signatures, errors and state dicts are the reference's, which stays the text to read.
`torch.compile(.., fullgraph=True)` takes every operator and module.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn

from spec_lm.reference import modules
from spec_lm.reference.functional import (
    BLOCK_EPS,
    OutputWeight,
    Positions,
    QueryOrKeyWeight,
    Rotated,
    Stream,
    Tokens,
    ValueWeight,
    Weights,
    refuse_longer,
    refuse_outside,
    rope_table,
    upcast,
)
from spec_lm.reference.shapes import shape_checked

spec_lm_supports = {"dtype": ["float32", "float64", "bfloat16", "float16"]}


# ----------------------------------------------------------------------------------------------------------- operators


@shape_checked
def softmax(x: Float[Tensor, "*shape"], dim: int) -> Float[Tensor, "*shape"]:
    """Turn every slice along dim into a probability distribution."""
    return torch.softmax(x, dim)


@shape_checked
def silu(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Weigh each entry by its own sigmoid."""
    return F.silu(x)


@shape_checked
def linear(x: Float[Tensor, "*batch d_in"], weight: Float[Tensor, "d_out d_in"]) -> Float[Tensor, "*batch d_out"]:
    """Multiply by a weight, without bias."""
    return F.linear(x, weight)


@shape_checked
def embedding(token_ids: Integer[Tensor, "*batch"], weight: Float[Tensor, "vocab d_model"]) -> Tokens:
    """Look up a row for each id; IndexError for an id outside."""
    return _looked_up(token_ids, weight)


@shape_checked
def rmsnorm(x: Tokens, gain: Float[Tensor, " d_model"], eps: float) -> Tokens:
    """Divide each token by its root mean square, times gain."""
    return F.rms_norm(x, gain.shape, gain, eps)


@shape_checked
def swiglu(
    x: Tokens, w1: Float[Tensor, "d_ff d_model"], w2: Float[Tensor, "d_model d_ff"], w3: Float[Tensor, "d_ff d_model"]
) -> Tokens:
    """Gate one projection by another."""
    return _gated(F.linear(x, w1), F.linear(x, w3), w2)


@shape_checked
def rope(x: Rotated, positions: Positions, theta: float, max_seq_len: int) -> Rotated:
    """Rotate neighboring pairs by position * theta^(-2i/d_k); the errors are those of the reference."""
    refuse_outside(positions, max_seq_len, "position", "max_seq_len")
    return _turned(x, rope_table(positions, x.shape[-1], theta))


@shape_checked
def scaled_dot_product_attention(
    query: Float[Tensor, "*batch queries d_k"],
    key: Float[Tensor, "*batch keys d_k"],
    value: Float[Tensor, "*batch keys d_v"],
    mask: Bool[Tensor, "*#batch #queries keys"] | None = None,
) -> Float[Tensor, "*batch queries d_v"]:
    """Average the values by softmax(Q K^T / sqrt(d_k)); a query that sees no key gets zeros."""
    if mask is None:
        return _attended(query, key, value)
    blind = ~mask.any(-1, keepdim=True)  # Kernels differ in what such a row gives: it sees everything, then is zeroed.
    return _attended(query, key, value, mask | blind).masked_fill(blind, 0.0)


@shape_checked
def multihead_self_attention(
    x: Stream, w_q: QueryOrKeyWeight, w_k: QueryOrKeyWeight, w_v: ValueWeight, w_o: OutputWeight, num_heads: int
) -> Stream:
    """Let every token attend, in each head apart, to itself and to earlier tokens."""
    return _self_attended(x, torch.cat((w_q, w_k, w_v)), w_o, num_heads, len(w_v))


@shape_checked
def multihead_self_attention_with_rope(
    x: Stream, w_q: QueryOrKeyWeight, w_k: QueryOrKeyWeight, w_v: ValueWeight, w_o: OutputWeight,
    num_heads: int, theta: float, max_seq_len: int, positions: Positions | None = None,
) -> Stream:  # fmt: skip
    """Rotate queries and keys by `rope` before attending; omitted positions are 0, 1, 2, ..."""
    if positions is None:
        table = _table_of_first(x, len(w_q), num_heads, theta, max_seq_len)
    else:
        refuse_outside(positions, max_seq_len, "position", "max_seq_len")
        table = rope_table(positions, _head_size(len(w_q), num_heads), theta)
    return _self_attended(x, torch.cat((w_q, w_k, w_v)), w_o, num_heads, len(w_v), table)


@shape_checked
def transformer_block(x: Stream, weights: Weights, num_heads: int, theta: float, max_seq_len: int) -> Stream:
    """Add attention, then a feed-forward network, to an un-normalized stream, with RoPE at positions 0, 1, 2, ..."""
    rows = len(weights["attn.q_proj.weight"])
    return _block(x, weights, num_heads, _table_of_first(x, rows, num_heads, theta, max_seq_len))


@shape_checked
def transformer_lm(
    token_ids: Integer[Tensor, "*batch sequence"], weights: Weights, num_heads: int, theta: float, context_length: int
) -> Float[Tensor, "*batch sequence vocab"]:
    """Score every token of the vocabulary as the next one, at every position: unnormalized logits."""
    refuse_longer(token_ids.shape[-1], context_length, "context_length")
    x = _looked_up(token_ids, weights["token_embeddings.weight"])
    layers: dict[str, dict[str, Tensor]] = {}
    for name, weight in weights.items():
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            layers.setdefault(number, {})[rest] = weight
    if layers:
        table = _table_of_first(x, len(layers["0"]["attn.q_proj.weight"]), num_heads, theta, context_length)
        for number in range(len(layers)):
            x = _block(x, layers[str(number)], num_heads, table)
    return F.linear(_normed(x, weights["ln_final.weight"]), weights["lm_head.weight"])


# ------------------------------------------------------------------- what they share, its shapes checked by the callers


def _looked_up(token_ids: Tensor, weight: Tensor) -> Tensor:
    refuse_outside(token_ids, len(weight), "token id", "vocab")
    return F.embedding(token_ids.long(), weight)


def _normed(x: Tensor, gain: Tensor) -> Tensor:
    return F.rms_norm(x, gain.shape, gain, BLOCK_EPS)


def _gated(gate: Tensor, up: Tensor, w2: Tensor) -> Tensor:
    return F.linear(F.silu(gate) * up, w2)


def _head_size(rows: int, num_heads: int) -> int:
    if num_heads < 1 or rows % num_heads:
        raise ValueError(f"num_heads must divide d_model {rows}, got {num_heads}; choose one of its divisors")
    return rows // num_heads


def _table_of_first(x: Tensor, rows: int, num_heads: int, theta: float, max_seq_len: int) -> Tensor:
    """The rotary table of positions 0, 1, 2, .. of a stream."""
    refuse_longer(x.shape[-2], max_seq_len, "max_seq_len")
    return rope_table(torch.arange(x.shape[-2], device=x.device), _head_size(rows, num_heads), theta)


def _turned(x: Tensor, table: Tensor) -> Tensor:
    """Each pair of the last axis times cos + i sin, table = (cos, sin)."""
    wide = upcast(x)
    cos, sin = table.to(wide.dtype)
    if torch.compiler.is_compiling():  # complex numbers are not compiled; real ones become one kernel
        a, b = wide.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)
    turned = _as_complex(wide) * torch.complex(cos, sin)
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def _as_complex(x: Tensor) -> Tensor:
    """Neighboring pairs as complex numbers: a view where the layout allows one."""
    strides = (*x.stride()[:-1], x.storage_offset())
    if x.stride(-1) != 1 or any(stride % 2 for stride in strides):
        x = x.clone(memory_format=torch.contiguous_format)
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def _attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """PyTorch's attention; its fast kernels take exactly four axes."""
    if 0 in query.shape[:-2]:  # torch 2.11 divides by the number of heads, and ends the process
        return query @ key.transpose(-2, -1) @ value
    if mask is not None and query.ndim > 4:
        mask = _four_axes(mask.expand(*query.shape[:-2], *mask.shape[-2:]))
    q, k, v = map(_four_axes, (query, key, value))
    found = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
    return found.reshape(*query.shape[:-1], value.shape[-1])


def _four_axes(x: Tensor) -> Tensor:
    x = x[None] if x.ndim == 2 else x
    return x.reshape(prod(x.shape[:-3]), *x.shape[-3:])


def _self_attended(
    x: Tensor, w_qkv: Tensor, w_o: Tensor, num_heads: int, rows_v: int, table: Tensor | None = None
) -> Tensor:
    """Causal self-attention by one product for queries, keys and values; with a table, queries and keys are rotated."""
    rows_qk = len(w_qkv) - rows_v
    d_k, d_v = _head_size(rows_qk // 2, num_heads), _head_size(rows_v, num_heads)
    queries_and_keys, values = F.linear(x, w_qkv).split((rows_qk, rows_v), -1)
    queries_and_keys = queries_and_keys.unflatten(-1, (2, num_heads, d_k))
    if table is not None:
        queries_and_keys = _turned(queries_and_keys, table[..., None, None, :])
    query, key = (each.transpose(-2, -3) for each in queries_and_keys.unbind(-3))
    value = values.unflatten(-1, (num_heads, d_v)).transpose(-2, -3)
    return F.linear(_attended(query, key, value, causal=True).transpose(-2, -3).flatten(-2), w_o)


def _block(x: Tensor, weights: Weights, num_heads: int, table: Tensor) -> Tensor:
    w_q, w_k, w_v, w_o = (weights[f"attn.{name}_proj.weight"] for name in ("q", "k", "v", "output"))
    normed = _normed(x, weights["ln1.weight"])
    y = x + _self_attended(normed, torch.cat((w_q, w_k, w_v)), w_o, num_heads, len(w_v), table)
    normed = _normed(y, weights["ln2.weight"])
    gate, up = (F.linear(normed, weights[f"ffn.{name}.weight"]) for name in ("w1", "w3"))
    return y + _gated(gate, up, weights["ffn.w2.weight"])


# ------------------------------------------------------------------------------------------------------------- modules


class SwiGLU(modules.SwiGLU):
    """The reference's, w1 and w3 held as one parameter."""

    w13: nn.Parameter

    def __init__(self, d_model: int, d_ff: int, **factory: Any) -> None:
        super().__init__(d_model, d_ff, **factory)
        _pack(self, "w13", ("w1", "w3"))

    @shape_checked
    def forward(self, x: Tokens) -> Tokens:
        return self.mixed(x)

    def mixed(self, x: Tensor) -> Tensor:
        """`forward` without a check of shapes."""
        if x.device.type == "cpu":  # a row of one product holds both, and to read halves costs more than a product
            gate, up = (F.linear(x, weight) for weight in self.w13.chunk(2))
        else:
            gate, up = F.linear(x, self.w13).chunk(2, -1)
        return _gated(gate, up, self.w2.weight)


class MultiHeadSelfAttention(modules.MultiHeadSelfAttention):
    """The reference's, the projections of queries, keys and values held as one parameter."""

    qkv_proj: nn.Parameter

    def __init__(
        self, d_model: int, num_heads: int, theta: float | None = None, max_seq_len: int | None = None, **factory: Any
    ) -> None:
        super().__init__(d_model, num_heads, theta, max_seq_len, **factory)
        _pack(self, "qkv_proj", ("q_proj", "k_proj", "v_proj"))

    @shape_checked
    def forward(self, x: Stream, token_positions: Positions | None = None) -> Stream:
        if self.rope is None and token_positions is not None:
            raise ValueError("positions mean nothing without RoPE; construct with theta and max_seq_len, or omit them")
        return self.mixed(x, self.table_of(x, token_positions))

    def mixed(self, x: Tensor, table: Tensor | None) -> Tensor:
        """`forward` with rows of the rotary table, without a check of shapes."""
        rows_v = len(self.qkv_proj) // 3
        return _self_attended(x, self.qkv_proj, self.output_proj.weight, self.num_heads, rows_v, table)

    def table_of(self, x: Tensor, positions: Tensor | None = None) -> Tensor | None:
        """The rows of the rotary table for the tokens of a stream, in the dtype it is rotated in; None without RoPE."""
        if self.rope is None:
            return None
        if positions is None:
            refuse_longer(x.shape[-2], self.rope.max_seq_len, "max_seq_len")
            rows = self.rope.table[:, : x.shape[-2]]
        else:
            refuse_outside(positions, self.rope.max_seq_len, "position", "max_seq_len")
            rows = self.rope.table[:, positions.long()]
        return rows.to(torch.promote_types(x.dtype, torch.float32))


class TransformerBlock(nn.Module):
    """The reference's, of fused attention and feed-forward network."""

    def __init__(self, d_model: int, num_heads: int, d_ff: int, max_seq_len: int, theta: float, **factory: Any) -> None:
        super().__init__()
        self.ln1, self.ln2 = modules.RMSNorm(d_model, **factory), modules.RMSNorm(d_model, **factory)
        self.attn = MultiHeadSelfAttention(d_model, num_heads, theta, max_seq_len, **factory)
        self.ffn = SwiGLU(d_model, d_ff, **factory)

    @shape_checked
    def forward(self, x: Stream) -> Stream:
        return self.mixed(x, self.attn.table_of(x))

    def mixed(self, x: Tensor, table: Tensor | None) -> Tensor:
        """`forward` with rows of the rotary table, without a check of shapes."""
        y = x + self.attn.mixed(_normed(x, self.ln1.weight), table)
        return y + self.ffn.mixed(_normed(y, self.ln2.weight))


class TransformerLM(nn.Module):
    """The reference's, of fused blocks: it takes the same arguments, and the same weights from the same seed."""

    layers: Any  # an nn.ModuleList of TransformerBlocks

    def __init__(
        self, vocab_size: int, context_length: int, d_model: int, num_layers: int, num_heads: int, d_ff: int,
        rope_theta: float, weights: Weights | None = None, **factory: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.context_length = context_length
        self.token_embeddings = modules.Embedding(vocab_size, d_model, **factory)
        block = partial(TransformerBlock, d_model, num_heads, d_ff, context_length, rope_theta, **factory)
        self.layers = nn.ModuleList(block() for _ in range(num_layers))
        for layer in self.layers[1:]:
            layer.attn.rope = self.layers[0].attn.rope  # one table for all
        self.ln_final = modules.RMSNorm(d_model, **factory)
        self.lm_head = modules.Linear(d_model, vocab_size, **factory)
        if weights is not None:
            self.load_state_dict(weights)

    @shape_checked
    def forward(self, token_ids: Integer[Tensor, "*batch sequence"]) -> Float[Tensor, "*batch sequence vocab"]:
        refuse_longer(token_ids.shape[-1], self.context_length, "context_length")
        x = _looked_up(token_ids, self.token_embeddings.weight)
        table = self.layers[0].attn.table_of(x) if self.layers else None
        for layer in self.layers:
            x = layer.mixed(x, table)
        return F.linear(_normed(x, self.ln_final.weight), self.lm_head.weight)


# ------------------------------------------------------------------------ several weights in one parameter, saved apart


def _pack(owner: nn.Module, name: str, parts: Sequence[str]) -> None:
    """Hold the weights of some of its Linears as one parameter, saved and loaded under the keys of the Linears."""
    weights = [owner.get_submodule(part).get_parameter("weight").detach() for part in parts]
    shapes = {f"{part}.weight": weight.shape for part, weight in zip(parts, weights, strict=True)}
    for part in parts:
        delattr(owner, part)
    owner.register_parameter(name, nn.Parameter(torch.cat(weights)))
    owner.register_state_dict_post_hook(partial(_saved_apart, name=name, shapes=shapes))
    owner.register_load_state_dict_pre_hook(partial(_loaded_apart, name=name, shapes=shapes))


def _saved_apart(
    owner: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *, name: str, shapes: Mapping[str, torch.Size]
) -> None:
    parts = state.pop(prefix + name).split([shape[0] for shape in shapes.values()])
    state.update({prefix + key: part for key, part in zip(shapes, parts, strict=True)})


def _loaded_apart(
    owner: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, strict: bool,
    missing: list[str], unexpected: list[str], errors: list[str], *, name: str, shapes: Mapping[str, torch.Size],
) -> None:  # fmt: skip
    """Put the parts together; what is missing or of another shape is told under its own key, and nothing is loaded."""
    found = {key: state.pop(prefix + key) for key in shapes if prefix + key in state}
    missing += [prefix + key for key in shapes if key not in found]
    wrong = [key for key in found if found[key].shape != shapes[key]]
    errors += [f"{prefix}{key}: {tuple(found[key].shape)} given, {tuple(shapes[key])} expected" for key in wrong]
    whole = len(found) == len(shapes) and not wrong
    state[prefix + name] = torch.cat(list(found.values())) if whole else owner.get_parameter(name)
