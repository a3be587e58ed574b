"""Every operator again, from its definition, in NumPy float64: the yardstick by which implementations are measured.

Nothing here is shared with the reference, not even the library: a mistake would have to be made twice to go unseen.
Plainness comes first; an operation is reordered only to stay finite, and the line says so.
Infinite and NaN results are results, to be compared like any other: no function warns of them.

Axis words: batch (any number of leading axes), sequence, queries, keys, heads, d_head, d_model, d_ff, vocab.
"""

from collections.abc import Mapping

import numpy as np

# The specification fixes the epsilon of every norm inside the block and the language model.
BLOCK_EPS = 1e-5

Weights = Mapping[str, np.ndarray]


@np.errstate(all="ignore")
def softmax(x: np.ndarray, dim: int) -> np.ndarray:
    """Turn every slice along `dim` into a distribution: softmax(v)_i = exp(v_i) / sum_j exp(v_j).

    Source: Scaled dot-product attention, softmax. A slice that is all -inf gives NaN, as the formula does.
    """
    x = np.asarray(x, np.float64)
    if x.size == 0:
        return x.copy()
    exponentials = np.exp(x - x.max(dim, keepdims=True))  # exp(v_i - max v): the same quotient, without overflow
    return exponentials / exponentials.sum(dim, keepdims=True)


@np.errstate(all="ignore")
def silu(x: np.ndarray) -> np.ndarray:
    """Weigh x by its own sigmoid: x / (1 + exp(-x)). Source: Building blocks, silu."""
    x = np.asarray(x, np.float64)
    shrunk = np.exp(-np.abs(x))  # never overflows, and loses no digit where sigmoid(x) is tiny
    return x * np.where(x >= 0, 1.0, shrunk) / (1.0 + shrunk)


@np.errstate(all="ignore")
def linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Multiply by a (d_out, d_in) weight, without bias: y_o = sum_i W_oi x_i. Source: Building blocks, linear."""
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T


def embedding(token_ids: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Look up one row of a (vocab, d_model) weight for each id: y = W_id. Source: Building blocks, embedding."""
    return np.asarray(weight, np.float64)[np.asarray(token_ids)]


@np.errstate(all="ignore")
def rmsnorm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    """Divide each row by its root mean square: x / sqrt(mean(x^2) + eps) * gain. Source: Building blocks, rmsnorm."""
    x = np.asarray(x, np.float64)
    mean_square = (x * x).sum(-1, keepdims=True) / x.shape[-1]
    return x / np.sqrt(mean_square + eps) * gain


def swiglu(x: np.ndarray, w1: np.ndarray, w2: np.ndarray, w3: np.ndarray) -> np.ndarray:
    """Gate one projection by another: W2 (silu(W1 x) * W3 x). Source: Building blocks, swiglu."""
    return linear(silu(linear(x, w1)) * linear(x, w3), w2)


@np.errstate(all="ignore")
def rope(
    x: np.ndarray,
    positions: np.ndarray,
    theta: float,
    max_seq_len: int,
    *,
    pairing: str = "neighbors",
    direction: str = "counterclockwise",
) -> np.ndarray:
    """Rotate pair i of the last axis by the angle position * theta^(-2i/d).

    (a, b) becomes (a cos - b sin, a sin + b cos); with the angle negative where the direction is "clockwise". The pair
    is (x_2i, x_2i+1) for "neighbors", (x_i, x_i+d/2) for "halves". Positions broadcast against the axes of x before
    the last. Source: Causal multi-head self-attention, rope.
    """
    x, positions = np.asarray(x, np.float64), np.asarray(positions)
    d = x.shape[-1]
    if d % 2:
        raise ValueError(f"rope rotates pairs: the last axis must be even, not {d}")
    if positions.size and positions.max() >= max_seq_len:
        raise ValueError(f"position {positions.max()} is outside max_seq_len {max_seq_len}")
    angles = _sign(direction) * positions[..., None] * float(theta) ** (-np.arange(0, d, 2) / d)
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = _pair_indices(d, pairing)
    a, b = x[..., first], x[..., second]
    rotated = np.empty((*np.broadcast_shapes(a.shape, angles.shape)[:-1], d))
    rotated[..., first] = a * cos - b * sin
    rotated[..., second] = a * sin + b * cos
    return rotated


def _pair_indices(d: int, pairing: str) -> tuple[slice, slice]:
    """Where the first and the second members of the pairs lie."""
    if pairing == "neighbors":
        return slice(0, d, 2), slice(1, d, 2)
    if pairing == "halves":
        return slice(0, d // 2), slice(d // 2, d)
    raise ValueError(f'pairing is "neighbors" or "halves", not {pairing!r}')


def _sign(direction: str) -> float:
    """Of the angle by which a position turns a pair."""
    if direction not in ("counterclockwise", "clockwise"):
        raise ValueError(f'direction is "counterclockwise" or "clockwise", not {direction!r}')
    return 1.0 if direction == "counterclockwise" else -1.0


@np.errstate(all="ignore")
def scaled_dot_product_attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    mask: np.ndarray | None = None,
    *,
    all_masked: str = "zeros",
) -> np.ndarray:
    """Average the values, each by how well its key matches the query: softmax(Q K^T / sqrt(d_k)) V.

    A score is -inf where the boolean mask is False. A query that may see nothing gets "zeros", "nan" (what the formula
    gives) or "uniform" (the mean of all values). Source: Scaled dot-product attention, attention and masking.
    """
    query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    if mask is None:
        return softmax(scores, -1) @ value
    mask = np.asarray(mask, bool)
    probabilities = softmax(np.where(mask, scores, -np.inf), -1)
    if all_masked != "nan":
        instead = {"zeros": 0.0, "uniform": 1.0 / max(1, scores.shape[-1])}[all_masked]
        probabilities = np.where(mask.any(-1, keepdims=True), probabilities, instead)
    return probabilities @ value


def multihead_self_attention(
    x: np.ndarray, w_q: np.ndarray, w_k: np.ndarray, w_v: np.ndarray, w_o: np.ndarray, num_heads: int
) -> np.ndarray:
    """Let every token attend to itself and to earlier ones, in each head apart: W_O concat_i Attention(q_i, k_i, v_i).

    q = W_Q x, k = W_K x, v = W_V x; head i is the i-th contiguous slice of each. Source: Causal multi-head
    self-attention.
    """
    query, key, value = (split_heads(linear(x, weight), num_heads) for weight in (w_q, w_k, w_v))
    return linear(merge_heads(_causal_attention(query, key, value)), w_o)


def multihead_self_attention_with_rope(
    x: np.ndarray,
    w_q: np.ndarray,
    w_k: np.ndarray,
    w_v: np.ndarray,
    w_o: np.ndarray,
    num_heads: int,
    theta: float,
    max_seq_len: int,
    positions: np.ndarray | None = None,
    *,
    pairing: str = "neighbors",
    direction: str = "counterclockwise",
) -> np.ndarray:
    """Rotate queries and keys, not values, by position before attending; omitted positions are 0, 1, 2, ...

    W_O concat_i Attention(rope(q_i), rope(k_i), v_i). Source: Causal multi-head self-attention, with RoPE.
    """
    query, key, value = (split_heads(linear(x, weight), num_heads) for weight in (w_q, w_k, w_v))
    at = head_positions(query.shape[-2], positions)
    query = rope(query, at, theta, max_seq_len, pairing=pairing, direction=direction)
    key = rope(key, at, theta, max_seq_len, pairing=pairing, direction=direction)
    return linear(merge_heads(_causal_attention(query, key, value)), w_o)


def split_heads(x: np.ndarray, num_heads: int) -> np.ndarray:
    """(batch, sequence, heads d_head) as (batch, heads, sequence, d_head): head i is the i-th contiguous slice."""
    if x.shape[-1] % num_heads:
        raise ValueError(f"an axis of {x.shape[-1]} does not split into {num_heads} heads")
    return x.reshape(*x.shape[:-1], num_heads, x.shape[-1] // num_heads).swapaxes(-2, -3)


def merge_heads(x: np.ndarray) -> np.ndarray:
    """(batch, heads, sequence, d_head) back as (batch, sequence, heads d_head): the inverse of `split_heads`."""
    *batch, heads, sequence, d_head = x.shape
    return x.swapaxes(-2, -3).reshape(*batch, sequence, heads * d_head)


def head_positions(sequence: int, positions: np.ndarray | None) -> np.ndarray:
    """Positions that broadcast over the head axis: (sequence), or (batch, 1, sequence) where given per example."""
    if positions is None:
        return np.arange(sequence)
    positions = np.asarray(positions)
    return positions if positions.ndim == 1 else positions[..., None, :]


def _causal_attention(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Token i sees exactly the tokens j <= i; the order is that of the indices, whatever the positions."""
    sequence = query.shape[-2]
    return scaled_dot_product_attention(query, key, value, np.tri(sequence, dtype=bool))


def transformer_block(
    x: np.ndarray,
    weights: Weights,
    num_heads: int,
    theta: float,
    max_seq_len: int,
    *,
    pairing: str = "neighbors",
    direction: str = "counterclockwise",
) -> np.ndarray:
    """Add attention, then a feed-forward network, to an un-normalized stream.

    y = x + MultiHeadSelfAttention(RMSNorm_1(x)); z = y + SwiGLU(RMSNorm_2(y)). Source: Transformer block.
    """
    w_q, w_k, w_v, w_o = (weights[f"attn.{name}_proj.weight"] for name in ("q", "k", "v", "output"))
    w1, w2, w3 = (weights[f"ffn.{name}.weight"] for name in ("w1", "w2", "w3"))
    normed = rmsnorm(x, weights["ln1.weight"], BLOCK_EPS)
    y = x + multihead_self_attention_with_rope(
        normed, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, pairing=pairing, direction=direction
    )
    return y + swiglu(rmsnorm(y, weights["ln2.weight"], BLOCK_EPS), w1, w2, w3)


def transformer_lm(
    token_ids: np.ndarray,
    weights: Weights,
    num_heads: int,
    theta: float,
    context_length: int,
    *,
    pairing: str = "neighbors",
    direction: str = "counterclockwise",
) -> np.ndarray:
    """Score every next token: embedding, blocks, RMSNorm, linear head; unnormalized logits, no softmax.

    Source: Transformer language model.
    """
    token_ids = np.asarray(token_ids)
    if token_ids.shape[-1] > context_length:
        raise ValueError(f"a sequence of {token_ids.shape[-1]} is longer than the context of {context_length}")
    x = embedding(token_ids, weights["token_embeddings.weight"])
    for layer in range(number_of_layers(weights)):
        of_layer = layer_weights(weights, layer)
        x = transformer_block(x, of_layer, num_heads, theta, context_length, pairing=pairing, direction=direction)
    return linear(rmsnorm(x, weights["ln_final.weight"], BLOCK_EPS), weights["lm_head.weight"])


def number_of_layers(weights: Mapping[str, object]) -> int:
    """How many different i the keys `layers.{i}.` have."""
    return len({key.split(".")[1] for key in weights if key.startswith("layers.")})


def layer_weights(weights: Weights, layer: int) -> Weights:
    """The weights of one block; the closing dot keeps layer 1 apart from layer 10."""
    prefix = f"layers.{layer}."
    return {key.removeprefix(prefix): weight for key, weight in weights.items() if key.startswith(prefix)}
