"""The equations of the Transformer language model, from softmax to logits, weights passed in.
Any float dtype: where a sum or an exponential needs it, half precision is computed in float32, and returned in the
input's dtype. No function changes its arguments. Sources are sections of the CS336 assignment 1 course notes."""

from collections.abc import Callable, Mapping
from functools import partial
from math import sqrt

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from spec_lm.reference.shapes import shape_checked

BLOCK_EPS = 1e-5
Weights = Mapping[str, Tensor]
Tokens = Float[Tensor, "*batch d_model"]
Stream = Float[Tensor, "*batch sequence d_model"]
Rotated = Float[Tensor, "*batch sequence d_k"]
Positions = Integer[Tensor, "*#batch sequence"]
QueryOrKeyWeight = Float[Tensor, "heads_d_k d_model"]
ValueWeight = Float[Tensor, "heads_d_v d_model"]
OutputWeight = Float[Tensor, "d_model heads_d_v"]


def upcast(x: Tensor) -> Tensor:
    """x in float32 at least: float16 and bfloat16 neither overflow nor lose digits there."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def refuse_longer(sequence: int, limit: int, limit_name: str) -> None:
    """Raise ValueError for a sequence of more than limit tokens."""
    if sequence > limit:
        raise ValueError(f"a sequence of {sequence} tokens exceeds {limit_name} {limit}; shorten it or enlarge that")


def refuse_outside(numbers: Tensor, limit: int, what: str, limit_name: str) -> None:
    """Raise IndexError unless 0 <= numbers < limit."""
    if torch.compiler.is_compiling():
        return
    try:
        outside = numbers[(numbers < 0) | (numbers >= limit)].tolist()
    except RuntimeError:  # vmap, fake and meta tensors do not let their values be read
        return
    if outside:
        raise IndexError(f"{what} {outside[0]} is outside 0..{limit - 1}; correct it or enlarge {limit_name} {limit}")


@shape_checked
def softmax(x: Float[Tensor, "*shape"], dim: int) -> Float[Tensor, "*shape"]:
    """Turn every slice along dim into a probability distribution: softmax(v)_i = exp(v_i) / sum_j exp(v_j).
    A slice that is all -inf gives NaN, as the formula does. Source: Scaled dot-product attention, softmax."""
    if x.numel() == 0:
        return x.clone()
    wide = upcast(x)
    # Subtracting the maximum changes no quotient and keeps exp finite.
    exponentials = (wide - wide.amax(dim, keepdim=True).detach()).exp()
    return (exponentials / exponentials.sum(dim, keepdim=True)).to(x.dtype)


@shape_checked
def scaled_dot_product_attention(
    query: Float[Tensor, "*batch queries d_k"],
    key: Float[Tensor, "*batch keys d_k"],
    value: Float[Tensor, "*batch keys d_v"],
    mask: Bool[Tensor, "*#batch #queries keys"] | None = None,
) -> Float[Tensor, "*batch queries d_v"]:
    """Average the values, each weighted by how well its key matches the query: softmax(Q K^T / sqrt(d_k)) V.
    The score of query i and key j is -inf where mask_ij is False; a query that sees no key gets zeros.
    Source: Scaled dot-product attention, attention and masking."""
    scores = einsum(upcast(query), upcast(key), "... queries d_k, ... keys d_k -> ... queries keys")
    scores = scores / sqrt(query.shape[-1])
    mask = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
    blind = ~mask.any(-1, keepdim=True)  # A row of -inf alone gives NaN: it is left open here, then zeroed.
    probabilities = softmax(scores.masked_fill(~(mask | blind), -torch.inf), -1).masked_fill(blind, 0.0)
    return einsum(probabilities, upcast(value), "... queries keys, ... keys d_v -> ... queries d_v").to(query.dtype)


@shape_checked
def linear(x: Float[Tensor, "*batch d_in"], weight: Float[Tensor, "d_out d_in"]) -> Float[Tensor, "*batch d_out"]:
    """Multiply by a weight, without bias: y = W x. Source: Building blocks, linear."""
    return einsum(x, weight, "... d_in, d_out d_in -> ... d_out")


@shape_checked
def embedding(token_ids: Integer[Tensor, "*batch"], weight: Float[Tensor, "vocab d_model"]) -> Tokens:
    """Look up a row for each id, y = W[id]. Raises IndexError for an id outside. Source: Building blocks, embedding."""
    refuse_outside(token_ids, len(weight), "token id", "vocab")
    return weight[token_ids.long()]


@shape_checked
def silu(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Weigh each entry by its own sigmoid: x sigmoid(x). Source: Building blocks, silu."""
    return (upcast(x) * upcast(x).sigmoid()).to(x.dtype)


@shape_checked
def swiglu(
    x: Tokens, w1: Float[Tensor, "d_ff d_model"], w2: Float[Tensor, "d_model d_ff"], w3: Float[Tensor, "d_ff d_model"]
) -> Tokens:
    """Gate one projection by another: W2 (silu(W1 x) * W3 x). Source: Building blocks, swiglu."""
    return linear(silu(linear(x, w1)) * linear(x, w3), w2)


@shape_checked
def rmsnorm(x: Tokens, gain: Float[Tensor, " d_model"], eps: float) -> Tokens:
    """Divide each token by its root mean square: x / sqrt(mean(x^2) + eps) * gain. Source: Building blocks, rmsnorm."""
    wide = upcast(x)
    return (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * gain).to(x.dtype)


@shape_checked
def rope_table(positions: Integer[Tensor, "*axes"], d_k: int, theta: float) -> Float[Tensor, "2 *axes pairs"]:
    """Cosine and sine of each pair's angle in `rope`, in float64 for distant positions; ValueError for an odd d_k."""
    if d_k % 2:
        raise ValueError(f"RoPE rotates pairs, so d_k must be even, got {d_k}; choose d_model / num_heads even")
    exponents = torch.arange(0, d_k, 2, device=positions.device, dtype=torch.float64) / d_k
    angles = positions[..., None] * theta**-exponents
    return torch.stack((angles.cos(), angles.sin()))


@shape_checked
def rotate_pairs(x: Rotated, table: Float[Tensor, "2 *#batch sequence pairs"]) -> Rotated:
    """Turn each pair (a, b) = (x_2i, x_2i+1) into (a cos - b sin, a sin + b cos). Source: as `rope`."""
    wide = upcast(x)
    cos, sin = table.to(wide.dtype)
    a, b = rearrange(wide, "... (pairs two) -> two ... pairs", two=2)
    rotated = torch.stack((a * cos - b * sin, a * sin + b * cos))
    return rearrange(rotated, "two ... pairs -> ... (pairs two)").to(x.dtype)


@shape_checked
def rope(x: Rotated, positions: Positions, theta: float, max_seq_len: int) -> Rotated:
    """Rotate pair i of the last axis, (x_2i, x_2i+1), by the angle position * theta^(-2i/d_k) radians. Raises
    ValueError for an odd d_k, IndexError for a position outside. Source: Causal multi-head self-attention, rope."""
    refuse_outside(positions, max_seq_len, "position", "max_seq_len")
    return rotate_pairs(x, rope_table(positions, x.shape[-1], theta))


@shape_checked
def causal_mask(sequence: int, device: torch.device | None = None) -> Bool[Tensor, "queries keys"]:
    """True where query i sees key j, j <= i. Source: Causal multi-head self-attention."""
    return torch.ones(sequence, sequence, dtype=torch.bool, device=device).tril()


@shape_checked
def split_heads(x: Stream, num_heads: int) -> Float[Tensor, "*batch heads sequence d_head"]:
    """Cut the last axis into heads: head i is its i-th contiguous slice. Source: Causal multi-head self-attention.
    Raises ValueError where num_heads does not divide that axis."""
    if num_heads < 1 or x.shape[-1] % num_heads:
        raise ValueError(f"num_heads must divide d_model {x.shape[-1]}, got {num_heads}; choose one of its divisors")
    return rearrange(x, "... sequence (heads d_head) -> ... heads sequence d_head", heads=num_heads)


@shape_checked
def merge_heads(x: Float[Tensor, "*batch heads sequence d_head"]) -> Stream:
    """Undo `split_heads`: Concat(head_1 .. head_h). Source: Causal multi-head self-attention."""
    return rearrange(x, "... heads sequence d_head -> ... sequence (heads d_head)")


@shape_checked
def multihead_self_attention(
    x: Stream, w_q: QueryOrKeyWeight, w_k: QueryOrKeyWeight, w_v: ValueWeight, w_o: OutputWeight,
    num_heads: int, *, rotate: Callable[[Tensor], Tensor] = lambda heads: heads,
) -> Stream:  # fmt: skip
    """Let every token attend, in each head apart, to itself and to earlier tokens: W_O Concat(head_1 .. head_h).
    head_i = Attention((W_Q x)_i, (W_K x)_i, (W_V x)_i), token i seeing tokens j <= i; rotate turns the heads of queries
    and keys. Raises ValueError where num_heads does not divide d_model. Source: Causal multi-head self-attention."""
    query, key, value = (split_heads(linear(x, weight), num_heads) for weight in (w_q, w_k, w_v))
    mask = causal_mask(x.shape[-2], x.device)
    return linear(merge_heads(scaled_dot_product_attention(rotate(query), rotate(key), value, mask)), w_o)


@shape_checked
def multihead_self_attention_with_rope(
    x: Stream, w_q: QueryOrKeyWeight, w_k: QueryOrKeyWeight, w_v: ValueWeight, w_o: OutputWeight,
    num_heads: int, theta: float, max_seq_len: int, positions: Positions | None = None,
) -> Stream:  # fmt: skip
    """Rotate queries and keys by `rope` before attending; omitted positions are 0, 1, 2, ...
    All heads turn alike; token i sees the indices j <= i whatever the positions. Raises as `multihead_self_attention`
    and `rope`, ValueError also for a sequence over max_seq_len. Source: Causal multi-head self-attention, with RoPE."""
    if positions is None:
        refuse_longer(x.shape[-2], max_seq_len, "max_seq_len")
        positions = torch.arange(x.shape[-2], device=x.device)
    rotate = partial(rope, positions=positions.unsqueeze(-2), theta=theta, max_seq_len=max_seq_len)
    return multihead_self_attention(x, w_q, w_k, w_v, w_o, num_heads, rotate=rotate)


@shape_checked
def transformer_block(x: Stream, weights: Weights, num_heads: int, theta: float, max_seq_len: int) -> Stream:
    """Add attention, then a feed-forward network, to an un-normalized stream, with RoPE at positions 0, 1, 2, ...
    y = x + MultiHeadSelfAttention(RMSNorm_1(x)); z = y + SwiGLU(RMSNorm_2(y)). Source: Transformer block."""
    w_q, w_k, w_v, w_o = (weights[f"attn.{name}_proj.weight"] for name in ("q", "k", "v", "output"))
    normed = rmsnorm(x, weights["ln1.weight"], BLOCK_EPS)
    y = x + multihead_self_attention_with_rope(normed, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len)
    w1, w2, w3 = (weights[f"ffn.{name}.weight"] for name in ("w1", "w2", "w3"))
    return y + swiglu(rmsnorm(y, weights["ln2.weight"], BLOCK_EPS), w1, w2, w3)


@shape_checked
def transformer_lm(
    token_ids: Integer[Tensor, "*batch sequence"], weights: Weights, num_heads: int, theta: float, context_length: int
) -> Float[Tensor, "*batch sequence vocab"]:
    """Score every token of the vocabulary as the next one, at every position: unnormalized logits, no softmax.
    W_head RMSNorm(Block_n(.. Block_1(Embedding(ids)))). Raises ValueError for a sequence over context_length,
    IndexError for an id outside the vocabulary. Source: Transformer language model."""
    refuse_longer(token_ids.shape[-1], context_length, "context_length")
    x = embedding(token_ids, weights["token_embeddings.weight"])
    for layer in range(len({name.split(".")[1] for name in weights if name.startswith("layers.")})):
        prefix = f"layers.{layer}."  # with its last dot, or layer 1 would take the weights of layer 10
        of_layer = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        x = transformer_block(x, of_layer, num_heads, theta, context_length)
    return linear(rmsnorm(x, weights["ln_final.weight"], BLOCK_EPS), weights["lm_head.weight"])
