"""W2 (silu(W1 x) * W3 x): one projection gates another, and a third leads back."""

import torch

from spec_lm.conformance.clause import clause, given
from spec_lm.conformance.strategies import BLOCK_SIZES, LONG_SIZES, one_of, takes_the_dtype, tensors
from spec_lm.conformance.tolerance import bit_equal, close, finite

SOURCE = "adapter interface: Building blocks, swiglu"

# Small enough for the product of two projections and its projection to fit float16.
_INPUTS = ("zeros", "small integers", "plain", "plain", "tiny", "ones and zeros")
_HALVES = ("halves", "quarters", "halves")
_QUARTERS = ("quarters",)


def _inner(regimes=_HALVES, layouts=("contiguous",)):
    return tensors("d_ff d_model", regimes, layouts)


def _outer(regimes=_HALVES, layouts=("contiguous",)):
    return tensors("d_model d_ff", regimes, layouts)


_X = {"x": tensors("*batch d_model", _INPUTS)}
_LONG = (*BLOCK_SIZES["swiglu"], *LONG_SIZES["swiglu"])
_ALL = {**_X, "w1": _inner(), "w2": _outer(), "w3": _inner()}


@clause(
    "swiglu",
    given(**_X, w1=_inner(), w2=_outer(), w3=_inner(_QUARTERS), other=_inner(_QUARTERS)),
    catches="gate and up exchanged, silu(gate * up), gate + up",
    source=SOURCE,
)
def linear_in_w3(swiglu, x, w1, w2, w3, other):
    """W3 is not activated: the outputs with two W3 add up to the output with their sum."""
    close(swiglu(x, w1, w2, w3) + swiglu(x, w1, w2, other), swiglu(x, w1, w2, w3 + other))


@clause(
    "swiglu",
    given(**_X, w1=_inner(), w2=_outer(_QUARTERS), other=_outer(_QUARTERS), w3=_inner()),
    catches="an activation or a bias after W2",
    source=SOURCE,
)
def linear_in_w2(swiglu, x, w1, w2, other, w3):
    """Nothing follows W2: the outputs with two W2 add up to the output with their sum."""
    close(swiglu(x, w1, w2, w3) + swiglu(x, w1, other, w3), swiglu(x, w1, w2 + other, w3))


@clause(
    "swiglu",
    given(**_ALL, s=one_of(2.0**20, 2.0**30, 2.0**-20)),
    dtypes=("float32", "float64", "bfloat16"),
    enough=20,
    catches="a clamp of hidden units; float16 inside",
    source=SOURCE,
)
def scaling_w3_scales_the_output(swiglu, x, w1, w2, w3, s):
    """However large the hidden units, s W3 in place of W3 gives s times the output."""
    close(swiglu(x, w1, w2, w3 * s), swiglu(x, w1, w2, w3) * s)


@clause("swiglu", given(**_ALL), catches="gate and up exchanged; a sigmoid for the silu", source=SOURCE)
def gate_is_w1(swiglu, x, w1, w2, w3):
    """W1 is what silu is applied to: since silu(g) - silu(-g) = g, negating W1 takes W2 (W1 x * W3 x) away."""
    gate, up = x.double() @ w1.double().T, x.double() @ w3.double().T
    close(swiglu(x, w1, w2, w3) - swiglu(x, -w1, w2, w3), (gate * up) @ w2.double().T)


@clause("swiglu", given(**_ALL), catches="GELU, ReLU, or a scaled sigmoid for the silu", source=SOURCE)
def mirrored_gates_stand_in_the_ratio_exp(swiglu, x, w1, w2, w3):
    """The activation is silu: since silu(g) = -exp(g) silu(-g), negating the row of W1 of a hidden unit by itself
    divides what it gives by -exp(g)."""
    gate = x.double() @ w1[:1].double().T
    mirrored = swiglu(x, -w1[:1], w2[:, :1], w3[:1])
    close(swiglu(x, w1[:1], w2[:, :1], w3[:1]), -mirrored * gate.exp())


@clause("swiglu", given(**_ALL), catches="a sigmoid for the silu, a bias, gate + up", source=SOURCE)
def zero_gate_gives_zero(swiglu, x, w1, w2, w3):
    """With W1 = 0 every gate is 0, and so is the output, exactly; likewise with W3 = 0."""
    bit_equal(swiglu(x, torch.zeros_like(w1), w2, w3), 0.0, says="W1 = 0 does not give 0")
    bit_equal(swiglu(x, w1, w2, torch.zeros_like(w3)), 0.0, says="W3 = 0 does not give 0")


@clause(
    "swiglu",
    given(x=tensors("*batch d_model", ("shifted",)), w1=_inner(("constant",)), w2=_outer(), w3=_inner()),
    catches="a clamp inside the sigmoid, or 1 - sigmoid(-gate)",
    source=SOURCE,
)
def deeply_negative_gates_are_closed(swiglu, x, w1, w2, w3):
    """A gate far below 0 lets through as little as silu does there."""
    w1 = w1 * -4
    close(swiglu(x, w1, w2, w3), swiglu.exact(x, w1, w2, w3))


@clause(
    "swiglu",
    given(**_ALL),
    where=lambda size: size.d_ff > 1,
    catches="d_ff rounded to a multiple, or recomputed from d_model",
    source=SOURCE,
)
def any_d_ff(swiglu, x, w1, w2, w3):
    """d_ff may be any number: the output is the sum of what the first hidden unit and all others give by themselves."""
    first = swiglu(x, w1[:1], w2[:, :1], w3[:1])
    close(first + swiglu(x, w1[1:], w2[:, 1:], w3[1:]), swiglu(x, w1, w2, w3))


@clause(
    "swiglu",
    given(**_ALL),
    where=lambda size: size.d_ff > 1,
    catches="a gate paired with another hidden unit; square weights transposed",
    source=SOURCE,
)
def permuting_hidden_units_changes_nothing(swiglu, x, w1, w2, w3):
    """Reordering the rows of W1 and W3 and the columns of W2 alike changes nothing."""
    close(swiglu(x, w1.flip(0), w2.flip(1), w3.flip(0)), swiglu(x, w1, w2, w3))


@clause(
    "swiglu",
    given(x=tensors("*batch d_model", ("large integers", "one large")), w1=_inner(), w2=_outer(), w3=_inner()),
    level="should",
    dtypes=("float32", "float64", "bfloat16"),
    catches="exp of a large gate: inf / inf, or 0 times inf",
    source="practice: gates of hundreds occur, and one NaN spoils the whole model",
)
def large_inputs_stay_finite(swiglu, x, w1, w2, w3):
    """Gates of hundreds, of either sign, give finite outputs."""
    finite(swiglu(x, w1, w2, w3))


@clause(
    "swiglu",
    given(x=tensors("*batch d_model", ("plain", *_INPUTS)), w1=_inner(), w2=_outer(), w3=_inner()),
    sizes={"swiglu": _LONG},
    cases={f"{size.batch} rows, {size.d_model} to {size.d_ff}": size.__eq__ for size in _LONG},
    level="should",
    enough=20,
    catches="the tail of a block of rows, features or hidden units is dropped or counted twice",
    source="practice: kernels work in blocks, and lengths are not multiples of them",
)
def reversing_rows_features_and_hidden_units(swiglu, x, w1, w2, w3):
    """Whatever their numbers, reversing rows, features and hidden units alike reverses rows and features."""
    axes = tuple(range(x.ndim))
    reversed_weights = (weight.flip(0, 1) for weight in (w1, w2, w3))
    close(swiglu(x.flip(axes), *reversed_weights), swiglu(x, w1, w2, w3).map(lambda t: t.flip(axes)))


@clause(
    "swiglu",
    given(
        x=tensors("*batch d_model", ("constant", "plain")),
        w1=tensors("1 d_model", ("constant", "halves")),
        w2=tensors("d_model d_ff", ("constant",)),
        w3=tensors("1 d_model", ("constant", "halves")),
    ),
    sizes=LONG_SIZES,
    level="should",
    dtype="bfloat16",
    enough=6,
    catches="a sum that is kept in bfloat16: from 256 equal terms on, one more changes nothing",
    source="practice: d_ff is in the thousands",
)
def thousands_of_equal_hidden_units_in_bfloat16(swiglu, x, w1, w2, w3):
    """In bfloat16 too, n equal hidden units give n times what one gives."""
    takes_the_dtype(swiglu, (x, w1, w2[:, :1], w3))
    n = w2.shape[1]
    close(swiglu(x, w1.repeat(n, 1), w2, w3.repeat(n, 1)), swiglu(x, w1, w2[:, :1].contiguous(), w3) * n)
