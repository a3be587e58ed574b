"""How far a correct implementation may be from the exact value: derived error bounds, evaluated in NumPy float64.

`bounded` gives the oracle's value of an operator on already rounded inputs and, for each element, a bound E: a result
passes where |got - exact| <= E. Single operators have a formula, composed of

    u    unit roundoff of the result's dtype: one rounding of y errs by u|y|
    v    unit roundoff of accumulation: a sum of k products errs by (k + 1) v sum|a||b|
    w    unit roundoff inside rmsnorm and RoPE's tables, which are computed in float32 at least
    eta  the smallest number below which relative accuracy ends

times the number of roundings that a sensible implementation makes. swiglu and multi-head attention are the formulas
composed, the error of one line fed to the next. Through norms and residuals this would explode, so the bounds of block
and language model are sampled: the whole is evaluated with noise of the size of one rounding at every step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from math import log, prod, sqrt
from typing import Any, NamedTuple

import numpy as np

from spec_lm.conformance import oracle


@dataclass(frozen=True)
class Precision:
    """What a dtype can tell apart: u and v are unit roundoffs of result and accumulation, eta is the smallest number
    held to full accuracy, `largest` the greatest finite one."""

    u: float
    v: float
    eta: float
    largest: float


# 16-bit products are accumulated in float32. Half precision's eta is its smallest subnormal: it has too few exponents
# for "smallest normal" to be negligible, and every library computes with its subnormals.
PRECISIONS: dict[str, Precision] = {
    "float64": Precision(u=2.0**-53, v=2.0**-53, eta=2.0**-1022, largest=(2 - 2.0**-52) * 2.0**1023),
    "float32": Precision(u=2.0**-24, v=2.0**-24, eta=2.0**-126, largest=(2 - 2.0**-23) * 2.0**127),
    "bfloat16": Precision(u=2.0**-8, v=2.0**-24, eta=2.0**-126, largest=(2 - 2.0**-7) * 2.0**127),
    "float16": Precision(u=2.0**-11, v=2.0**-24, eta=2.0**-24, largest=(2 - 2.0**-10) * 2.0**15),
}

# Conventions that change what is correct, or how accurate it can be; the first choice is the default.
CONVENTIONS: dict[str, tuple[str, ...]] = {
    "rope_pairing": ("neighbors", "halves"),
    "rope_direction": ("counterclockwise", "clockwise"),
    "all_masked": ("zeros", "nan", "uniform"),
    "accumulation": ("full", "tf32", "reduced"),
    "norm_and_rope_tables": ("float32", "float64"),
}

# TF32 keeps 11 bits of each factor: two roundings of 2^-11 a product.
TF32_PRODUCT = 2.0**-10
# A sum of products split into parts, each rounded to the result's dtype and again whenever it is added to another: a
# rounding errs by u times a partial sum, and so by no more than u sum|a||b|, or by eta; four parts need four.
REDUCED_ROUNDINGS = 4

SAMPLES = 32
# E in standard deviations of the sampled noise: the largest deviation measured in 5000 float32 models was 2.6, in 16
# bits 3.3; fewer samples need more (16 samples: 5.1, 8 samples: 10).
DEVIATIONS = 8.0


def bounded(
    operator: str, args: tuple[Any, ...], dtype: str, conventions: Mapping[str, str] = {}
) -> tuple[np.ndarray, np.ndarray]:
    """Give the exact value of an operator, and the largest error E of a correct result in `dtype`, element by element.

    `args` are those of the plain signature: float64, integer and boolean arrays that hold the already rounded inputs.
    """
    a = arithmetic(dtype, conventions)
    exact = exact_value(operator, args, conventions)
    with np.errstate(all="ignore"):
        error = _ERRORS[operator](a, exact, *args)
    # The oracle itself rounds to float64: there, two results are compared that both err.
    return exact, 2 * error if dtype == "float64" else error


def exact_value(operator: str, args: tuple[Any, ...], conventions: Mapping[str, str] = {}) -> np.ndarray:
    """Give the oracle's value of an operator under the declared conventions, without its bound."""
    a = arithmetic("float64", conventions)
    with np.errstate(all="ignore"):
        declared = {key: getattr(a, key) for key in FOLLOWED.get(operator, {}).values()}
        return getattr(oracle, operator)(*args, **declared)


@dataclass(frozen=True)
class Arithmetic:
    """The roundoffs of one dtype under the declared conventions.

    `product` is what a product of two matrices may err by beyond v, relative to sum|a||b|, and `product_eta` beyond
    eta.
    """

    u: float
    v: float
    w: float
    eta: float
    product: float
    product_eta: float
    pairing: str
    direction: str
    all_masked: str


def arithmetic(dtype: str, conventions: Mapping[str, str] = {}) -> Arithmetic:
    """The roundoffs of a dtype under the declared conventions.

    Raises:
        ValueError: one of them is no convention, or no choice of its.
    """
    return _arithmetic(dtype, tuple(conventions.items()))


@lru_cache
def _arithmetic(dtype: str, conventions: tuple[tuple[str, str], ...]) -> Arithmetic:
    declared = {name: choices[0] for name, choices in CONVENTIONS.items()}
    for name, choice in conventions:
        if choice not in CONVENTIONS.get(name, ()):
            raise ValueError(f"no convention {name}={choice!r}; there are {CONVENTIONS}")
        declared[name] = choice
    precision, accumulation = PRECISIONS[dtype], declared["accumulation"]
    # Only 16-bit results are shorter than the sums they come from.
    reduced = REDUCED_ROUNDINGS if accumulation == "reduced" and precision.u > precision.v else 0
    # Only float32 factors have bits that TF32 drops and that their own dtype keeps.
    rounded_factors = TF32_PRODUCT if accumulation == "tf32" and dtype == "float32" else 0.0
    follows_float64 = dtype == "float64" and declared["norm_and_rope_tables"] == "float64"
    return Arithmetic(
        u=precision.u,
        v=precision.v,
        w=PRECISIONS["float64" if follows_float64 else "float32"].u,
        eta=precision.eta,
        product=rounded_factors + reduced * precision.u,
        product_eta=reduced * precision.eta,
        pairing=declared["rope_pairing"],
        direction=declared["rope_direction"],
        all_masked=declared["all_masked"],
    )


_ROTATION = {"rope_pairing": "pairing", "rope_direction": "direction"}
# The conventions that change what an operator's result is, and what the oracle calls them.
FOLLOWED: dict[str, dict[str, str]] = {
    "rope": _ROTATION,
    "scaled_dot_product_attention": {"all_masked": "all_masked"},
    "multihead_self_attention_with_rope": _ROTATION,
    "transformer_block": _ROTATION,
    "transformer_lm": _ROTATION,
}


# ---- One operator at a time: a value, and how far from it a correct implementation may be ----


class _Near(NamedTuple):
    """A value, and the largest error of what a correct implementation has in its place."""

    value: np.ndarray
    error: np.ndarray


def _linear(a: Arithmetic, x: np.ndarray, weight: np.ndarray, x_error: np.ndarray | None = None) -> _Near:
    """|W| E(x) + (k + 1) v |W||x| + u|y| + eta, from the error analysis of a sum of k products.

    Where x errs the last rounding is of what is there, not of y: in 16 bits u E counts.
    """
    size = np.abs(weight).T
    inexact = ((weight.shape[-1] + 1) * a.v + a.product) * np.abs(x)
    y = times(x, weight.T)
    if x_error is None:
        return _Near(y, times(inexact, size) + a.u * np.abs(y) + a.eta + a.product_eta)
    error = times(inexact + x_error, size) + a.product_eta
    return _Near(y, error + a.u * (np.abs(y) + error) + a.eta)


def times(x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """x @ matrix as one product of two matrices: NumPy would make one small product for each leading index."""
    return (x.reshape(-1, x.shape[-1]) @ matrix).reshape(*x.shape[:-1], matrix.shape[-1])


def _softmax(a: Arithmetic, s: np.ndarray, s_error: np.ndarray | None = None) -> _Near:
    """Every score may move by D = E(s) + u (2|s| + (max - s) + ln Z + 2), p_i most when the others move against it.

    up_i = p_i e^D_i / (p_i e^D_i + sum_{j != i} p_j e^-D_j), and lo_i with the signs of D swapped;
    E = max(up - p, p - lo) + p ((n + 1) v + 2u)(1 + min(D, 10)) + 2 p v |max + ln Z| + eta; 0 where the score is
    -inf. exp(s - logsumexp(s)) rounds max + ln Z, exp2 also its product with log2(e): a whole slice moves alike.
    """
    n = s.shape[-1]
    if s.size == 0:
        return _Near(s, s)
    hidden = np.isneginf(s)
    largest = s.max(-1, keepdims=True)
    shifted = s - largest
    exponentials = np.exp(shifted)
    total = exponentials.sum(-1, keepdims=True)
    log_total = np.log(total)
    p, log_p = exponentials / total, shifted - log_total
    drift = a.u * (2 * np.abs(s) - shifted + (log_total + 2))
    if s_error is not None:
        drift += s_error
    if some_hidden := hidden.any():
        drift[hidden] = 0
    # [0]: this score up and the others down; [1]: this score down and the others up.
    signed = np.stack((drift, -drift))
    log_odds = log_p + signed - _log_sum_of_others(log_p - signed)
    log_up, log_lo = -np.logaddexp(0, -log_odds)
    # Differences of logarithms: up - p would lose its digits where D is small, and e^D overflow where it is large.
    up = np.exp(log_up) * -np.expm1(log_p - log_up)
    lo = p * -np.expm1(log_lo - log_p)
    error = np.maximum(up, lo) + ((n + 1) * a.v + 2 * a.u) * p * (1 + np.minimum(drift, _DRIFT_CAP)) + a.eta
    error += p * (2 * a.v) * np.abs(largest + log_total)
    if some_hidden:
        error[hidden] = 0
    return _Near(p, error)


# Past this drift up and lo are 1 and 0 for all purposes: the factor has nothing more to say.
_DRIFT_CAP = 10.0


def _log_sum_of_others(logs: np.ndarray) -> np.ndarray:
    """ln sum_{j != i} exp(l_j) for every i of the last axis: what lies before i, then what lies after.

    Taking exp(l_i) from the sum of all would cancel; so would a scale in which l_i itself is the largest.
    """
    others = np.full_like(logs, -np.inf)
    np.logaddexp.accumulate(logs[..., :-1], -1, out=others[..., 1:])
    after = np.logaddexp.accumulate(logs[..., :0:-1], -1)[..., ::-1]
    np.logaddexp(others[..., :-1], after, out=others[..., :-1])
    return others


def _attention(
    a: Arithmetic,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    mask: np.ndarray | None,
    errors: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
) -> _Near:
    """Scores, softmax, average of the values, the error of each line fed to the next.

    E(s) = d_k^-1/2 [E(q)|k| + |q|E(k) + ((d_k + 1) v + 2u)|q||k|] + 3u|s|;
    E = E(p)|V| + p E(V) + (keys + 1) v p|V| + u|o| + eta, and the products of two errors: a saturated softmax can pick
    another key than the exact one, and then E(p) = 1.
    """
    keys, d_k = key.shape[-2:]
    transposed = key.swapaxes(-1, -2)
    scores = query @ transposed / sqrt(d_k)
    inexact = ((d_k + 1) * a.v + 2 * a.u + a.product) * np.abs(query)
    if errors is None:
        s_error = inexact @ np.abs(transposed)
    else:
        q_error, k_error = errors[0], errors[1].swapaxes(-1, -2)
        s_error = (inexact + q_error) @ np.abs(transposed) + (np.abs(query) + q_error) @ k_error
    s_error = (s_error + a.product_eta) / sqrt(d_k) + 3 * a.u * np.abs(scores)
    if mask is not None:
        scores, s_error = _masked(a, scores, s_error, mask)
    p, p_error = _softmax(a, scores, s_error)
    if mask is not None and a.all_masked != "uniform":  # zeros, or a NaN that no error makes wrong
        p = np.where(mask.any(-1, keepdims=True), p, 0)
    output = p @ value
    p_error = p_error + ((keys + 1) * a.v + a.product) * p
    error = p_error @ np.abs(value) + a.product_eta
    if errors is not None:
        error += (p + p_error) @ errors[2]
    return _Near(output, error + a.u * (np.abs(output) + error) + a.eta)


def _masked(a: Arithmetic, scores: np.ndarray, error: np.ndarray, mask: np.ndarray) -> _Near:
    """Scores with -inf at False; a query that may see nothing sees everything alike where that is the convention."""
    if a.all_masked != "uniform":
        return _Near(np.where(mask, scores, -np.inf), error)
    nothing = ~mask.any(-1, keepdims=True)
    return _Near(np.where(mask, scores, np.where(nothing, 0, -np.inf)), np.where(nothing, 0, error))


def _rmsnorm(a: Arithmetic, x: np.ndarray, gain: np.ndarray, eps: float) -> _Near:
    """|x g| r ((d + 3) w/2 + 2.5 w) + |y|(2w + 2u) + eta (1 + |g|), where r = (mean x^2 + eps)^-1/2.

    A sum of d squares errs by (d + 3) w of itself at most, its inverse root by half of that; nothing cancels.
    """
    d = x.shape[-1]
    r = 1 / np.sqrt((x * x).sum(-1, keepdims=True) / d + eps)
    y = x * r * gain
    error = ((d + 3) * a.w / 2 + 2.5 * a.w + 2 * a.w + 2 * a.u) * np.abs(y) + a.eta * (1 + np.abs(gain))
    return _Near(y, error)


def _silu(a: Arithmetic, x: np.ndarray, x_error: np.ndarray | None = None) -> _Near:
    """|silu'(x)| E(x) + |y|(4u + 4v + 2v |x| (1 - sigmoid(x))) + eta (1 + |x|): relative to y everywhere.

    The first term, or how far silu moves within E(x) where that is more: bfloat16 rounds -64.2 to -64, and e^x by 28%.
    exp2(-x log2(e)) in place of exp(-x) rounds log2(e) and the product: the sigmoid moves by 2v |x| (1 - sigmoid(x)).
    """
    y = oracle.silu(x)
    shrunk = np.exp(-np.abs(x))
    sigmoid = np.where(x >= 0, 1.0, shrunk) / (1 + shrunk)
    error = np.abs(y) * (4 * (a.u + a.v) + 2 * a.v * np.abs(x) * (1 - sigmoid)) + a.eta * (1 + np.abs(x))
    if x_error is not None:
        slope = np.abs(sigmoid + y * (1 - sigmoid))
        moved = np.abs(oracle.silu(np.stack((x - x_error, x + x_error))) - y)
        error += np.maximum(slope * x_error, moved.max(0))
    return _Near(y, error)


def _swiglu(a: Arithmetic, x: np.ndarray, w1: np.ndarray, w2: np.ndarray, w3: np.ndarray) -> _Near:
    """linear, silu, a product and linear, the error of each fed to the next."""
    gate, gate_error = _silu(a, *_linear(a, x, w1))
    up, up_error = _linear(a, x, w3)
    hidden = gate * up
    error = gate_error * np.abs(up) + (np.abs(gate) + gate_error) * up_error + a.u * np.abs(hidden) + a.eta
    return _linear(a, hidden, w2, error)


class _Tables(NamedTuple):
    """cos and sin of every angle, one entry for each element of the last axis, and how wrong the angle may be.

    `sin` carries the sign, so that y = x cos + x[partner] sin in either pairing and direction.
    """

    cos: np.ndarray
    sin: np.ndarray
    delta: np.ndarray
    partner: np.ndarray


@lru_cache
def pairs(d: int, pairing: str, direction: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each element of the last axis: its pair, its partner, and the sign with which the partner's sine comes in."""
    element = np.arange(d)
    first = -1.0 if direction == "counterclockwise" else 1.0
    if pairing == "neighbors":
        return element // 2, element ^ 1, np.where(element % 2, -first, first)
    return element % (d // 2), (element + d // 2) % d, np.where(element < d // 2, first, -first)


@lru_cache
def _frequencies(d: int, theta: float, w: float) -> tuple[np.ndarray, np.ndarray]:
    """theta^-e for e = 2i/d, and the relative error w (3 + 2e |ln theta|) of an angle made from it; pair 0 is exact."""
    e = np.arange(0, d, 2) / d
    return theta**-e, np.where(e > 0, w * (3 + 2 * e * abs(log(theta))), 0)


# No two points of the unit circle are farther apart.
_DIAMETER = 2.0


def angles(a: Arithmetic, d: int, positions: np.ndarray, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """phi = position theta^-e of every pair, and delta = min(2, phi w (3 + 2e |ln theta|)), 0 for pair 0.

    Rounding e errs by that times ln theta in theta^-e, and the product keeps relative errors: they grow with phi.
    """
    frequencies, relative = _frequencies(d, float(theta), a.w)
    phi = positions[..., None] * frequencies
    return phi, np.minimum(_DIAMETER, np.abs(phi) * relative)


def _tables(a: Arithmetic, d: int, positions: np.ndarray, theta: float) -> _Tables:
    phi, delta = angles(a, d, positions, theta)
    pair, partner, sign = pairs(d, a.pairing, a.direction)
    return _Tables(np.cos(phi)[..., pair], np.sin(phi)[..., pair] * sign, delta[..., pair], partner)


def _rope(a: Arithmetic, x: np.ndarray, tables: _Tables, x_error: np.ndarray | None = None) -> _Near:
    """For y_1 = p cos - q sin of the pair (p, q), and y_2 with sin and cos swapped:

    E = (|p sin| + |q cos|) delta + (|p cos| + |q sin|)(2w + 2u) + delta^2 (|p| + |q|)/2 + u|y| + eta (2 + |p| + |q|).
    The angle errs by delta (first and second order), tables and products by a rounding each.
    """
    cos, sin, delta, partner = tables
    other = x[..., partner]
    y = x * cos + other * sin
    size, other_size, cos_size, sin_size = np.abs(x), np.abs(other), np.abs(cos), np.abs(sin)
    both = size + other_size
    error = (size * sin_size + other_size * cos_size) * delta
    error += (size * cos_size + other_size * sin_size) * (2 * a.w + 2 * a.u)
    error += both * (delta * delta / 2 + a.eta) + 2 * a.eta + a.u * np.abs(y)
    if x_error is not None:
        error += cos_size * x_error + sin_size * x_error[..., partner]
    return _Near(y, error)


def _self_attention(
    a: Arithmetic,
    x: np.ndarray,
    w_q: np.ndarray,
    w_k: np.ndarray,
    w_v: np.ndarray,
    w_o: np.ndarray,
    num_heads: int,
    theta: float | None = None,
    positions: np.ndarray | None = None,
) -> _Near:
    """Projections, RoPE where there is a theta, attention, output projection: the error of each fed to the next."""
    query, key, value = (_split(_linear(a, x, weight), num_heads) for weight in (w_q, w_k, w_v))
    sequence = x.shape[-2]
    if theta is not None:
        tables = _tables(a, query.value.shape[-1], oracle.head_positions(sequence, positions), theta)
        query, key = (_rope(a, rotated.value, tables, rotated.error) for rotated in (query, key))
    errors = (query.error, key.error, value.error)
    heads = _attention(a, query.value, key.value, value.value, np.tri(sequence, dtype=bool), errors)
    return _linear(a, oracle.merge_heads(heads.value), w_o, oracle.merge_heads(heads.error))


def _split(x: _Near, num_heads: int) -> _Near:
    return _Near(oracle.split_heads(x.value, num_heads), oracle.split_heads(x.error, num_heads))


# ---- Block and language model: the same evaluated again and again, with noise at every step ----


class Noise:
    """Rounding errors drawn from one fixed pool, always the same ones in the same order; axis 0 counts the samples."""

    def __init__(self, a: Arithmetic) -> None:
        self.a = a
        self.used = 0

    def rounded(self, y: np.ndarray, u: float | None = None) -> np.ndarray:
        """y (1 + u xi): one rounding to the result's dtype, or to the roundoff given."""
        return y * self._next(_rounding_pool(self.a.u if u is None else u), y.shape[1:])

    def spread(self, y: np.ndarray, size: np.ndarray | float) -> np.ndarray:
        """y + size xi: an error that is not relative to y."""
        return y + size * self._next(_pool(), y.shape[1:])

    def summed(self, y: np.ndarray, size: np.ndarray, terms: int) -> np.ndarray:
        """A sum of products of magnitude sum|a||b| = size: v sqrt(terms) size xi, then rounded.

        The root, because errors of single steps do not all go one way; the worst case is 8 deviations off anyway.
        """
        return self.spread(self.rounded(y), (self.a.v * sqrt(terms) + self.a.product) * size + self.a.product_eta)

    def _next(self, pool: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Numbers for an array of this shape, anew for each sample."""
        return self.taken(pool, (SAMPLES, *shape))

    def taken(self, pool: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """The next numbers of the pool, from its beginning again when it is used up."""
        size, start = prod(shape), self.used
        self.used = (start + size) % pool.size
        if start + size <= pool.size:
            return pool[start : start + size].reshape(shape)
        return np.resize(np.concatenate((pool[start:], pool[:start])), shape)


# A prime length: no axis of an array lines up with whole turns of the pool, so samples never share their noise.
_POOL_SIZE = 2**19 - 1
_POOL_SEED = 0


@cache
def _pool() -> np.ndarray:
    """xi, uniform in [-1, 1]: a generator of its own, so that nobody's random numbers change."""
    return np.random.Generator(np.random.PCG64(_POOL_SEED)).uniform(-1, 1, _POOL_SIZE)


@cache
def _rounding_pool(u: float) -> np.ndarray:
    return 1 + u * _pool()


def _noisy_linear(noise: Noise, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    size = times(np.abs(x), np.abs(weight).T)
    return noise.summed(times(x, weight.T), size, weight.shape[-1])


def _noisy_rmsnorm(noise: Noise, x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    """The inside is computed with roundoff w; its result and the product with the gain are rounded to the dtype."""
    w, d = noise.a.w, x.shape[-1]
    mean_square = (x * x).sum(-1, keepdims=True) / d
    mean_square = noise.rounded(mean_square, w * sqrt(d))
    r = noise.rounded(1 / np.sqrt(mean_square + oracle.BLOCK_EPS), w)
    return noise.rounded(noise.rounded(noise.rounded(x * r, w)) * gain)


def _noisy_tables(noise: Noise, x: np.ndarray, num_heads: int, theta: float) -> _Tables:
    """Tables as an implementation makes them: once, from inexact angles, and rounded; all layers share them."""
    d = x.shape[-1] // num_heads
    # (samples, batch, heads, sequence): the axes of a query, the same for every example and head.
    positions = np.arange(x.shape[-2]).reshape(*[1] * (x.ndim - 1), -1)
    phi, delta = angles(noise.a, d, positions, theta)
    phi = noise.spread(phi, delta)
    cos, sin = (noise.rounded(table, noise.a.w + noise.a.u) for table in (np.cos(phi), np.sin(phi)))
    pair, partner, sign = pairs(d, noise.a.pairing, noise.a.direction)
    return _Tables(cos[..., pair], sin[..., pair] * sign, delta, partner)


def _noisy_rope(noise: Noise, x: np.ndarray, tables: _Tables) -> np.ndarray:
    straight, crossed = noise.rounded(x * tables.cos), noise.rounded(x[..., tables.partner] * tables.sin)
    return noise.rounded(straight + crossed)


def _noisy_attention(noise: Noise, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    d_k, keys = key.shape[-1], key.shape[-2]
    transposed = key.swapaxes(-1, -2)
    scores = noise.summed(query @ transposed, np.abs(query) @ np.abs(transposed), d_k)
    scores = noise.rounded(scores / sqrt(d_k))
    scores = np.where(np.tri(keys, dtype=bool), scores, -np.inf)
    largest = scores.max(-1, keepdims=True)
    exponentials = noise.rounded(np.exp(noise.rounded(scores - largest)))
    total = exponentials.sum(-1, keepdims=True)
    # exp(s - logsumexp(s)) rounds max + ln Z, exp2 also its product with log2(e): a whole row moves alike.
    row = noise.spread(np.ones_like(total), 2 * noise.a.v * np.abs(largest + np.log(total)))
    p = noise.rounded(exponentials / noise.summed(total, total, keys)) * row
    return noise.summed(p @ value, p @ np.abs(value), keys)


def _noisy_self_attention(
    noise: Noise, x: np.ndarray, weights: oracle.Weights, num_heads: int, tables: _Tables
) -> np.ndarray:
    query, key, value = (
        oracle.split_heads(_noisy_linear(noise, x, weights[f"attn.{name}_proj.weight"]), num_heads) for name in "qkv"
    )
    query, key = _noisy_rope(noise, query, tables), _noisy_rope(noise, key, tables)
    heads = oracle.merge_heads(_noisy_attention(noise, query, key, value))
    return _noisy_linear(noise, heads, weights["attn.output_proj.weight"])


def _noisy_swiglu(noise: Noise, x: np.ndarray, weights: oracle.Weights) -> np.ndarray:
    gate = _noisy_linear(noise, x, weights["ffn.w1.weight"])
    up = _noisy_linear(noise, x, weights["ffn.w3.weight"])
    gate = noise.rounded(noise.rounded(oracle.silu(gate)))  # sigmoid and product
    return _noisy_linear(noise, noise.rounded(gate * up), weights["ffn.w2.weight"])


def _noisy_block(noise: Noise, x: np.ndarray, weights: oracle.Weights, num_heads: int, tables: _Tables) -> np.ndarray:
    normed = _noisy_rmsnorm(noise, x, weights["ln1.weight"])
    y = noise.rounded(x + _noisy_self_attention(noise, normed, weights, num_heads, tables))
    normed = _noisy_rmsnorm(noise, y, weights["ln2.weight"])
    return noise.rounded(y + _noisy_swiglu(noise, normed, weights))


def _sampled(a: Arithmetic, exact: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """E = 8 sd + u|y| + eta, sd the root mean square deviation of the samples from the exact value."""
    deviation = np.sqrt(np.square(samples - exact).mean(0))
    return DEVIATIONS * deviation + a.u * np.abs(exact) + a.eta


# ---- Each operator: (arithmetic, exact value, arguments of the plain signature) -> E ----


def _softmax_error(a: Arithmetic, exact: np.ndarray, x: np.ndarray, dim: int) -> np.ndarray:
    return np.moveaxis(_softmax(a, np.moveaxis(x, dim, -1)).error, -1, dim)


def _embedding_error(a: Arithmetic, exact: np.ndarray, token_ids: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """A lookup rounds nothing."""
    return np.zeros_like(exact)


def _rope_error(
    a: Arithmetic, exact: np.ndarray, x: np.ndarray, positions: np.ndarray, theta: float, max_seq_len: int
) -> np.ndarray:
    return _rope(a, x, _tables(a, x.shape[-1], positions, theta)).error


def _attention_error(
    a: Arithmetic,
    exact: np.ndarray,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    mask: np.ndarray | None = None,
) -> np.ndarray:
    return _attention(a, query, key, value, mask).error


def _self_attention_error(
    a: Arithmetic,
    exact: np.ndarray,
    x: np.ndarray,
    w_q: np.ndarray,
    w_k: np.ndarray,
    w_v: np.ndarray,
    w_o: np.ndarray,
    num_heads: int,
    theta: float | None = None,
    max_seq_len: int | None = None,
    positions: np.ndarray | None = None,
) -> np.ndarray:
    return _self_attention(a, x, w_q, w_k, w_v, w_o, num_heads, theta, positions).error


def _block_error(
    a: Arithmetic,
    exact: np.ndarray,
    x: np.ndarray,
    weights: oracle.Weights,
    num_heads: int,
    theta: float,
    max_seq_len: int,
) -> np.ndarray:
    noise, x = Noise(a), x[None]
    return _sampled(a, exact, _noisy_block(noise, x, weights, num_heads, _noisy_tables(noise, x, num_heads, theta)))


def _lm_error(
    a: Arithmetic,
    exact: np.ndarray,
    token_ids: np.ndarray,
    weights: oracle.Weights,
    num_heads: int,
    theta: float,
    context_length: int,
) -> np.ndarray:
    noise, x = Noise(a), oracle.embedding(token_ids, weights["token_embeddings.weight"])[None]
    tables = _noisy_tables(noise, x, num_heads, theta)
    for layer in range(oracle.number_of_layers(weights)):
        x = _noisy_block(noise, x, oracle.layer_weights(weights, layer), num_heads, tables)
    x = _noisy_rmsnorm(noise, x, weights["ln_final.weight"])
    return _sampled(a, exact, _noisy_linear(noise, x, weights["lm_head.weight"]))


_ERRORS: dict[str, Callable[..., np.ndarray]] = {
    "softmax": _softmax_error,
    "silu": lambda a, exact, x: _silu(a, x).error,
    "linear": lambda a, exact, x, weight: _linear(a, x, weight).error,
    "embedding": _embedding_error,
    "rmsnorm": lambda a, exact, x, gain, eps: _rmsnorm(a, x, gain, eps).error,
    "swiglu": lambda a, exact, *args: _swiglu(a, *args).error,
    "rope": _rope_error,
    "scaled_dot_product_attention": _attention_error,
    "multihead_self_attention": _self_attention_error,
    "multihead_self_attention_with_rope": _self_attention_error,
    "transformer_block": _block_error,
    "transformer_lm": _lm_error,
}
