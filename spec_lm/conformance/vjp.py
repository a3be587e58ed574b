"""Gradients of every operator by hand, and how far from them a correct implementation's may be, in NumPy float64.

A layer is a function that gives its output and its pullback, which turns the gradient with respect to the output into
those with respect to the inputs. Every intermediate of both passes through `noise`. `Exact` leaves it as it is: then
the result is the gradient. `Noise` makes the error of one rounding of it, a different one in each of 32 samples: then
the spread of the samples is the bound. Axis 0 of every array counts the samples.

Where correct implementations differ, the noise has the errors of each way: a softmax as one kernel or as exp / sum,
with the maximum inside the graph or not; its row sum from the weights or, as fused attention does, from the output;
sigmoid'(x) from 1 - sigmoid(x).
"""

from collections.abc import Callable, Mapping
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

from spec_lm.conformance import oracle
from spec_lm.conformance.bounds import (
    DEVIATIONS,
    PRECISIONS,
    SAMPLES,
    Arithmetic,
    Noise,
    angles,
    arithmetic,
    pairs,
    times,
)

Gradients = dict[str, np.ndarray]


def bounded_gradients(
    operator: str,
    args: tuple[Any, ...],
    cotangent: np.ndarray,
    dtype: str,
    conventions: Mapping[str, str] = {},
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Give the gradient of sum(cotangent * output) with respect to every floating-point argument, and the largest
    error E of a correct one in `dtype`, element by element.

    E = 8 sd + 2u|g| + floor, sd the root mean square deviation of the samples from the exact gradient, of those in
    which rows err alike or of those in which they err apart, whichever is larger.

    Args:
        operator: its name.
        args: those of the plain signature: float64, integer and boolean arrays that hold the already rounded inputs.
        cotangent: the gradient with respect to the output, already rounded.
        dtype: of the implementation's result.
        conventions: declared by the implementation.

    Returns:
        A pair (exact, E) for each argument by its name in the plain signature; an entry of a dict of weights goes by
        a name like "weights['ln1.weight']".
    """
    a = arithmetic(dtype, conventions)
    exact = exact_gradients(operator, args, cotangent, conventions)
    with np.errstate(all="ignore"):
        samples = _GRADIENTS[operator](_AlikeAndApart(a), cotangent[None], *args)
        return {name: (value, _error(a, dtype, value, samples[name])) for name, value in exact.items()}


def exact_gradients(
    operator: str, args: tuple[Any, ...], cotangent: np.ndarray, conventions: Mapping[str, str] = {}
) -> Gradients:
    """Give the gradients as `bounded_gradients` does, without their bounds."""
    with np.errstate(all="ignore"):
        found = _GRADIENTS[operator](Exact(arithmetic("float64", conventions)), cotangent[None], *args)
    return {name: gradient[0] for name, gradient in found.items()}


# What is lost below the smallest normal number may be multiplied by later steps: by no more than this.
_LARGEST_FACTOR = 1e6


def _error(a: Arithmetic, dtype: str, exact: np.ndarray, samples: np.ndarray) -> np.ndarray:
    deviations = np.abs(samples - exact)
    unit = np.maximum(deviations.max(0), a.eta)  # the squares of float64's smallest numbers would be 0
    halves = np.square(deviations / unit).reshape(2, _HALF, *exact.shape)
    deviation = unit * np.sqrt(halves.mean(1).max(0))
    floor = 2 * a.eta if _loses_small_numbers(a) else _LARGEST_FACTOR * a.eta
    error = DEVIATIONS * deviation + 2 * a.u * np.abs(exact) + floor
    # The exact gradient itself rounds to float64: there, two results are compared that both err.
    return 2 * error if dtype == "float64" else error


# ---- Noise ----


class Exact:
    """In the place of `Noise`: changes nothing. Axis 0 has one entry."""

    def __init__(self, a: Arithmetic) -> None:
        self.a = a

    def rounded(self, y: np.ndarray, u: float | None = None) -> np.ndarray:
        return y

    def spread(self, y: np.ndarray, size: np.ndarray | float) -> np.ndarray:
        return y

    def summed(self, y: np.ndarray, size: np.ndarray, terms: int) -> np.ndarray:
        return y


class _AlikeAndApart(Noise):
    """Noise whose second half of samples is the same in all rows: rows that are alike err alike, and do not average out
    in a sum over many of them.

    In float16 a rounding also loses what is below eta: its exponents end where probabilities and gradients lie.
    """

    def rounded(self, y: np.ndarray, u: float | None = None) -> np.ndarray:
        y = super().rounded(y, u)
        return self.spread(y, self.a.eta) if u is None and _loses_small_numbers(self.a) else y

    def _next(self, pool: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        apart = self.taken(pool, (_HALF, *shape))
        alike = self.taken(pool, (_HALF, *[1] * (len(shape) - 1), *shape[-1:]))
        return np.concatenate((apart, np.broadcast_to(alike, apart.shape)))


_HALF = SAMPLES // 2


def _loses_small_numbers(a: Arithmetic) -> bool:
    """Whether eta is so large that the floor of the other dtypes would hide gradients."""
    return _LARGEST_FACTOR * a.eta > a.u


AnyNoise = Exact | Noise
# From the gradient with respect to a layer's output to those with respect to its inputs, in order.
Pullback = Callable[[np.ndarray], tuple[np.ndarray, ...]]
NamedPullback = Callable[[np.ndarray], tuple[np.ndarray, Gradients]]


def _product(noise: AnyNoise, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """left @ right: sums of k products, v sqrt(k) sum|a||b| xi.

    In 16 bits also u sqrt(sum a^2 b^2) xi: a factor may be scaled, and so rounded, beforehand; and where an axis has
    one entry, an einsum is a product of broadcasts, each of whose terms is rounded before their sum.
    """
    multiply, terms = times if right.ndim == 2 else np.matmul, left.shape[-1]
    product = noise.summed(multiply(left, right), multiply(np.abs(left), np.abs(right)), terms)
    if noise.a.u == noise.a.v:
        return product
    squares = multiply(np.square(left), np.square(right))
    return noise.spread(product, noise.a.u * np.sqrt(squares) + noise.a.eta * sqrt(terms))


def _total(noise: AnyNoise, terms: np.ndarray) -> np.ndarray:
    """The sum along the last axis, which stays."""
    return noise.summed(terms.sum(-1, keepdims=True), np.abs(terms).sum(-1, keepdims=True), terms.shape[-1])


def _added(noise: AnyNoise, first: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """Gradients that arrive at one place from several, added one by one."""
    for each in others:
        first = noise.rounded(first + each)
    return first


def _transposed(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(-1, -2)


def _rows(x: np.ndarray) -> np.ndarray:
    """(samples, rows, last axis): every leading axis is a row."""
    return x.reshape(len(x), -1, x.shape[-1])


# ---- Layers ----


def _linear(noise: AnyNoise, x: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, Pullback]:
    """y = W x; dx = W^T dy, dW = sum over the rows of dy x^T."""

    def pullback(dy: np.ndarray) -> tuple[np.ndarray, ...]:
        return _product(noise, dy, weight), _product(noise, _transposed(_rows(dy)), _rows(x))

    return _product(noise, x, weight.T), pullback


def _embedding_pullback(noise: AnyNoise, token_ids: np.ndarray, vocab: int, dy: np.ndarray) -> np.ndarray:
    """dW_id = the sum of dy over the places where id stands.

    The terms may be added one by one in the result's own dtype, as PyTorch does on the CPU: u sqrt(k) sum|dy| xi.
    """
    places = (np.arange(vocab)[:, None] == token_ids.reshape(-1)).astype(np.float64)
    rows, counts = _rows(dy), places.sum(-1, keepdims=True)
    return noise.spread(noise.rounded(places @ rows), noise.a.u * np.sqrt(counts) * (places @ np.abs(rows)))


def _silu(noise: AnyNoise, x: np.ndarray) -> tuple[np.ndarray, Pullback]:
    """y = x s, s = sigmoid(x); dx = dy s + dy x s (1 - s).

    exp2(-x log2(e)) moves e^-|x| by v|x|. 1 - s, by subtraction, errs by u; by no more than itself where s rounds to 1.
    x / (1 + exp(-x)), step by step, divides x by its denominator twice; where that underflows, the second term is lost.
    """
    shrunk = np.exp(-np.abs(x))
    shrunk = noise.spread(shrunk, noise.a.v * np.abs(x) * shrunk)
    small, large = shrunk / (1 + shrunk), 1 / (1 + shrunk)
    sigmoid, rest = noise.rounded(np.where(x < 0, small, large)), np.where(x < 0, large, small)
    rest = noise.spread(rest, np.minimum(noise.a.u, 4 * rest))
    lost = (x < 0) & (np.abs(x) * small * small < min(noise.a.eta, PRECISIONS["float32"].eta))

    def pullback(dy: np.ndarray) -> tuple[np.ndarray, ...]:
        straight = noise.rounded(dy * sigmoid)
        curved = noise.rounded(noise.rounded(dy * x) * noise.rounded(sigmoid * rest))
        return (noise.rounded(straight + noise.spread(curved, curved * lost)),)

    return noise.rounded(x * sigmoid), pullback


def _swiglu(
    noise: AnyNoise, x: np.ndarray, w1: np.ndarray, w2: np.ndarray, w3: np.ndarray
) -> tuple[np.ndarray, Pullback]:
    """y = W2 (silu(W1 x) * W3 x)."""
    into_gate, gate_linear = _linear(noise, x, w1)
    gate, gate_silu = _silu(noise, into_gate)
    up, up_linear = _linear(noise, x, w3)
    y, down_linear = _linear(noise, noise.rounded(gate * up), w2)

    def pullback(dy: np.ndarray) -> tuple[np.ndarray, ...]:
        d_hidden, d_w2 = down_linear(dy)
        from_gate, d_w1 = gate_linear(*gate_silu(noise.rounded(d_hidden * up)))
        from_up, d_w3 = up_linear(noise.rounded(d_hidden * gate))
        return _added(noise, from_gate, from_up), d_w1, d_w2, d_w3

    return y, pullback


def _rmsnorm(noise: AnyNoise, x: np.ndarray, gain: np.ndarray, eps: float) -> tuple[np.ndarray, Pullback]:
    """y = n g, n = x r, r = (mean x^2 + eps)^-1/2; dx = r (dn - n mean(dn n)) where dn = dy g, dg = sum dy n.

    Everything inside has roundoff w; what enters and leaves is rounded to the dtype, and so may n and dn be.
    """
    w, d = noise.a.w, x.shape[-1]
    x = noise.rounded(x, w)
    mean_square = noise.rounded((x * x).sum(-1, keepdims=True) / d, w * sqrt(d))
    r = noise.rounded(1 / np.sqrt(mean_square + eps), w)
    n = noise.rounded(x * r, w)
    normed = noise.rounded(n)

    def pullback(dy: np.ndarray) -> tuple[np.ndarray, ...]:
        dn = noise.rounded(noise.rounded(dy * gain), w)
        along = dn * n
        mean = noise.spread(along.mean(-1, keepdims=True), w * sqrt(d) * np.abs(along).mean(-1, keepdims=True))
        return noise.rounded(noise.rounded(r * (dn - n * mean), w)), _gain_gradient(noise, _rows(dy * normed))

    return noise.rounded(normed * gain), pullback


def _gain_gradient(noise: AnyNoise, terms: np.ndarray) -> np.ndarray:
    """The sum over the rows, accumulated with roundoff w."""
    return noise.rounded(noise.spread(terms.sum(1), noise.a.w * sqrt(terms.shape[1]) * np.abs(terms).sum(1)))


class _Tables(NamedTuple):
    """cos and sin of every angle, one entry for each element of the last axis; `sin` carries the sign."""

    cos: np.ndarray
    sin: np.ndarray
    partner: np.ndarray


def _tables(noise: AnyNoise, x: np.ndarray, positions: np.ndarray, theta: float) -> _Tables:
    """Tables as an implementation makes them: once, from inexact angles, and rounded; backward uses the same."""
    d = x.shape[-1]
    phi, delta = angles(noise.a, d, positions.reshape(*[1] * (x.ndim - 1 - positions.ndim), *positions.shape), theta)
    phi = noise.spread(phi, delta)
    cos, sin = (noise.rounded(table, noise.a.w + noise.a.u) for table in (np.cos(phi), np.sin(phi)))
    pair, partner, sign = pairs(d, noise.a.pairing, noise.a.direction)
    return _Tables(cos[..., pair], sin[..., pair] * sign, partner)


def _rope(noise: AnyNoise, x: np.ndarray, tables: _Tables) -> tuple[np.ndarray, Pullback]:
    """y = x cos + x[partner] sin; the gradient turns back."""
    cos, sin, partner = tables

    def pullback(dy: np.ndarray) -> tuple[np.ndarray, ...]:
        return (noise.rounded(noise.rounded(dy * cos) + noise.rounded(dy * sin)[..., partner]),)

    return noise.rounded(noise.rounded(x * cos) + noise.rounded(x[..., partner] * sin)), pullback


# Scores that differ by this many roundings may change places as the maximum.
_TIED = 4


def _softmax(
    noise: AnyNoise, scores: np.ndarray
) -> tuple[np.ndarray, Callable[[np.ndarray, np.ndarray | float], np.ndarray]]:
    """p = softmax along the last axis; dscores = p (dp - sum p dp). The pullback also takes an error of that sum.

    exp2(x log2 e) rounds the scores themselves, exp(x - logsumexp(x)) a whole row alike, exp2 of that once more. Where
    exp / sum is differentiated step by step, the maximum that was subtracted may get minus the sum of the row's
    gradients: nothing but what rounding left of it. A running maximum gets that of every step, and entries that are
    alike leave the same: u sqrt(n) sum|p dp| more.
    """
    a, n = noise.a, scores.shape[-1]
    scores = noise.rounded(scores)
    highest, running = scores.max(-1, keepdims=True), np.maximum.accumulate(scores, -1)
    subtracted = (scores - running >= -_TIED * a.u * np.abs(running)).any(0)
    exponentials = noise.rounded(np.exp(noise.rounded(scores - highest)))
    total = _total(noise, exponentials)
    p = noise.rounded(exponentials / total)
    p = p * noise.spread(np.ones_like(total), 2 * a.v * np.abs(highest + np.log(total)))

    def pullback(dp: np.ndarray, sum_error: np.ndarray | float = 0.0) -> np.ndarray:
        weighted = p * dp
        mean = _total(noise, weighted) + sum_error
        d_scores = noise.rounded(weighted - p * mean)
        left = np.abs(_total(noise, d_scores)) + a.u * sqrt(n) * np.abs(weighted).sum(-1, keepdims=True)
        return noise.rounded(noise.spread(d_scores, subtracted * left))

    return p, pullback


def _attention(
    noise: AnyNoise, query: np.ndarray, key: np.ndarray, value: np.ndarray, mask: np.ndarray | None
) -> tuple[np.ndarray, Pullback]:
    """o = softmax(q k^T / sqrt(d_k)) v; dv = p^T do, dq = ds k / sqrt(d_k), dk = ds^T q / sqrt(d_k).

    The sum over a row of p dp is also that of do o: there what was lost when o was rounded comes back. A query that may
    see nothing gives no gradient to q and k.
    """
    scores = noise.rounded(_product(noise, query, _transposed(key)) / sqrt(query.shape[-1]))
    if mask is None:
        p, softmax_pullback = _softmax(noise, scores)
        seen = 1.0
    else:
        seen = mask.any(-1, keepdims=True)
        p, softmax_pullback = _softmax(noise, np.where(mask, scores, np.where(seen, -np.inf, 0.0)))
        p = p * np.where(seen, 1.0, {"zeros": 0.0, "nan": np.nan, "uniform": 1.0}[noise.a.all_masked])
    exact = p @ value
    output = noise.summed(exact, p @ np.abs(value), key.shape[-2])

    def pullback(do: np.ndarray) -> tuple[np.ndarray, ...]:
        dp = _product(noise, do, _transposed(value))
        sum_error = _total(noise, do * output) - (do * exact).sum(-1, keepdims=True)
        ds = softmax_pullback(dp, sum_error)
        ds = noise.rounded((ds if mask is None else np.where(mask, ds, 0.0)) / sqrt(query.shape[-1]))
        return _product(noise, ds, key), _product(noise, _transposed(ds), query), _product(noise, _transposed(p), do)

    return output, pullback


def _self_attention(
    noise: AnyNoise, x: np.ndarray, weights: tuple[np.ndarray, ...], num_heads: int, tables: _Tables | None
) -> tuple[np.ndarray, Pullback]:
    """y = W_O concat_i attention(rope(q_i), rope(k_i), v_i), q, k, v = W_Q x, W_K x, W_V x; causal."""
    *into_heads, w_o = weights
    projected, linears = zip(*(_linear(noise, x, weight) for weight in into_heads), strict=True)
    query, key, value = (oracle.split_heads(each, num_heads) for each in projected)
    turns: list[Pullback] = []
    if tables is not None:
        query, turn_query = _rope(noise, query, tables)
        key, turn_key = _rope(noise, key, tables)
        turns = [turn_query, turn_key]
    heads, attention = _attention(noise, query, key, value, np.tri(x.shape[-2], dtype=bool))
    y, output_linear = _linear(noise, oracle.merge_heads(heads), w_o)

    def pullback(dy: np.ndarray) -> tuple[np.ndarray, ...]:
        d_merged, d_w_o = output_linear(dy)
        *turned, d_value = attention(oracle.split_heads(d_merged, num_heads))
        if turns:
            turned = [turn(each)[0] for turn, each in zip(turns, turned, strict=True)]
        from_heads = [oracle.merge_heads(each) for each in (*turned, d_value)]
        d_x, d_weights = zip(*(linear(each) for linear, each in zip(linears, from_heads, strict=True)), strict=True)
        return _added(noise, *d_x), *d_weights, d_w_o

    return y, pullback


_ATTENTION_KEYS = tuple(f"attn.{name}_proj.weight" for name in ("q", "k", "v", "output"))
_FFN_KEYS = tuple(f"ffn.{name}.weight" for name in ("w1", "w2", "w3"))


def _block(
    noise: AnyNoise, x: np.ndarray, weights: oracle.Weights, num_heads: int, tables: _Tables
) -> tuple[np.ndarray, NamedPullback]:
    """y = x + attention(rmsnorm(x)), z = y + swiglu(rmsnorm(y)); gradients of the weights by their keys."""
    normed, first_norm = _rmsnorm(noise, x, weights["ln1.weight"], oracle.BLOCK_EPS)
    attended, attention = _self_attention(
        noise, normed, tuple(weights[key] for key in _ATTENTION_KEYS), num_heads, tables
    )
    y = noise.rounded(x + attended)
    normed, second_norm = _rmsnorm(noise, y, weights["ln2.weight"], oracle.BLOCK_EPS)
    fed_forward, swiglu = _swiglu(noise, normed, *(weights[key] for key in _FFN_KEYS))

    def pullback(dz: np.ndarray) -> tuple[np.ndarray, Gradients]:
        d_normed, *d_ffn = swiglu(dz)
        d_y, d_second = second_norm(d_normed)
        d_y = noise.rounded(dz + d_y)
        d_normed, *d_attention = attention(d_y)
        d_x, d_first = first_norm(d_normed)
        keys, found = (*_ATTENTION_KEYS, *_FFN_KEYS), (*d_attention, *d_ffn)
        norms = {"ln1.weight": d_first, "ln2.weight": d_second}
        return noise.rounded(d_y + d_x), norms | dict(zip(keys, found, strict=True))

    return noise.rounded(y + fed_forward), pullback


def _model_tables(noise: AnyNoise, x: np.ndarray, num_heads: int, theta: float) -> _Tables:
    """Those that all layers share, for positions 0, 1, 2, .."""
    return _tables(noise, oracle.split_heads(x, num_heads), np.arange(x.shape[-2]), theta)


# ---- Each operator: (noise, cotangent, arguments of the plain signature) -> the gradients by name, with samples ----


def _softmax_gradients(noise: AnyNoise, dy: np.ndarray, x: np.ndarray, dim: int) -> Gradients:
    dim = dim % x.ndim + 1  # after the axis of samples
    _, pullback = _softmax(noise, np.moveaxis(x[None], dim, -1))
    return {"x": np.moveaxis(pullback(np.moveaxis(dy, dim, -1), 0.0), -1, dim)}


def _silu_gradients(noise: AnyNoise, dy: np.ndarray, x: np.ndarray) -> Gradients:
    return _named(("x",), _silu(noise, x[None]), dy)


def _linear_gradients(noise: AnyNoise, dy: np.ndarray, x: np.ndarray, weight: np.ndarray) -> Gradients:
    return _named(("x", "weight"), _linear(noise, x[None], weight), dy)


def _embedding_gradients(noise: AnyNoise, dy: np.ndarray, token_ids: np.ndarray, weight: np.ndarray) -> Gradients:
    return {"weight": _embedding_pullback(noise, token_ids, len(weight), dy)}


def _rmsnorm_gradients(noise: AnyNoise, dy: np.ndarray, x: np.ndarray, gain: np.ndarray, eps: float) -> Gradients:
    return _named(("x", "gain"), _rmsnorm(noise, x[None], gain, eps), dy)


def _swiglu_gradients(noise: AnyNoise, dy: np.ndarray, x: np.ndarray, *weights: np.ndarray) -> Gradients:
    return _named(("x", "w1", "w2", "w3"), _swiglu(noise, x[None], *weights), dy)


def _rope_gradients(
    noise: AnyNoise, dy: np.ndarray, x: np.ndarray, positions: np.ndarray, theta: float, max_seq_len: int
) -> Gradients:
    return _named(("x",), _rope(noise, x[None], _tables(noise, x[None], positions, theta)), dy)


def _attention_gradients(
    noise: AnyNoise,
    dy: np.ndarray,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    mask: np.ndarray | None = None,
) -> Gradients:
    return _named(("query", "key", "value"), _attention(noise, query[None], key[None], value[None], mask), dy)


def _self_attention_gradients(
    noise: AnyNoise,
    dy: np.ndarray,
    x: np.ndarray,
    w_q: np.ndarray,
    w_k: np.ndarray,
    w_v: np.ndarray,
    w_o: np.ndarray,
    num_heads: int,
    theta: float | None = None,
    max_seq_len: int | None = None,
    positions: np.ndarray | None = None,
) -> Gradients:
    x, tables = x[None], None
    if theta is not None:
        at = oracle.head_positions(x.shape[-2], positions)
        tables = _tables(noise, oracle.split_heads(x, num_heads), at, theta)
    layer = _self_attention(noise, x, (w_q, w_k, w_v, w_o), num_heads, tables)
    return _named(("x", "w_q", "w_k", "w_v", "w_o"), layer, dy)


def _block_gradients(
    noise: AnyNoise,
    dy: np.ndarray,
    x: np.ndarray,
    weights: oracle.Weights,
    num_heads: int,
    theta: float,
    max_seq_len: int,
) -> Gradients:
    x = x[None]
    _, pullback = _block(noise, x, weights, num_heads, _model_tables(noise, x, num_heads, theta))
    d_x, d_weights = pullback(dy)
    return {"x": d_x} | _entries(d_weights)


def _lm_gradients(
    noise: AnyNoise,
    dy: np.ndarray,
    token_ids: np.ndarray,
    weights: oracle.Weights,
    num_heads: int,
    theta: float,
    context_length: int,
) -> Gradients:
    table = weights["token_embeddings.weight"]
    x = oracle.embedding(token_ids, table)[None]
    tables, pullbacks = _model_tables(noise, x, num_heads, theta), []
    for layer in range(oracle.number_of_layers(weights)):
        x, pullback = _block(noise, x, oracle.layer_weights(weights, layer), num_heads, tables)
        pullbacks.append(pullback)
    x, norm = _rmsnorm(noise, x, weights["ln_final.weight"], oracle.BLOCK_EPS)
    _, head = _linear(noise, x, weights["lm_head.weight"])
    d_x, d_head = head(dy)
    d_x, d_final = norm(d_x)
    found = {"lm_head.weight": d_head, "ln_final.weight": d_final}
    for layer, pullback in reversed(list(enumerate(pullbacks))):
        d_x, d_weights = pullback(d_x)
        found |= {f"layers.{layer}.{key}": gradient for key, gradient in d_weights.items()}
    found["token_embeddings.weight"] = _embedding_pullback(noise, token_ids, len(table), d_x)
    return _entries(found)


def _named(names: tuple[str, ...], layer: tuple[np.ndarray, Pullback], dy: np.ndarray) -> Gradients:
    return dict(zip(names, layer[1](dy), strict=True))


def _entries(gradients: Gradients) -> Gradients:
    return {f"weights[{key!r}]": gradient for key, gradient in gradients.items()}


_GRADIENTS: dict[str, Callable[..., Gradients]] = {
    "softmax": _softmax_gradients,
    "silu": _silu_gradients,
    "linear": _linear_gradients,
    "embedding": _embedding_gradients,
    "rmsnorm": _rmsnorm_gradients,
    "swiglu": _swiglu_gradients,
    "rope": _rope_gradients,
    "scaled_dot_product_attention": _attention_gradients,
    "multihead_self_attention": _self_attention_gradients,
    "multihead_self_attention_with_rope": _self_attention_gradients,
    "transformer_block": _block_gradients,
    "transformer_lm": _lm_gradients,
}
