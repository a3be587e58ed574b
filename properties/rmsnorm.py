"""x / sqrt(mean(x^2) + eps) * gain: each row divided by its root mean square, then weighed feature by feature."""

from math import prod

import torch

from spec_lm.conformance.clause import clause, given
from spec_lm.conformance.strategies import (
    BLOCK_SIZES,
    GAINS,
    GENERAL,
    LONG_SIZES,
    MODERATE,
    NONZERO,
    one_of,
    takes_the_dtype,
    tensors,
)
from spec_lm.conformance.tolerance import at_most, bit_equal, close

SOURCE = "adapter interface: Building blocks, rmsnorm"

_EPS = one_of(1e-5, 1e-6, 1e-3)
_GAIN = tensors("d_model", GAINS)
_ANY = {"x": tensors("*batch d_model", GENERAL), "eps": _EPS}
_LONG = (*BLOCK_SIZES["rmsnorm"], *LONG_SIZES["rmsnorm"])
_VAST = {"x": tensors("*batch d_model", ("vast",)), "eps": _EPS}


def _several_rows(size):
    return prod(size.batch) > 1


def _rms(rows):
    """The root mean square of each row; like any norm, that of an error bounds what the error does to it."""
    return rows.square().mean(-1).sqrt()


def _normalized(x, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def _rms_is_one(rmsnorm, x, eps):
    ones = torch.ones(x.shape[-1], dtype=x.dtype)
    close(rmsnorm(x, ones, eps).map(_rms), _rms(_normalized(x, eps)))


@clause("rmsnorm", given(**_ANY), catches="a sum for the mean, another axis, a rough inverse root", source=SOURCE)
def unit_rms(rmsnorm, x, eps):
    """With a gain of 1 every row along the last axis has a root mean square of 1, short of it by eps alone."""
    _rms_is_one(rmsnorm, x, eps)


@clause(
    "rmsnorm",
    given(x=tensors("*batch d_model", MODERATE), gain=_GAIN, eps=_EPS, s=one_of(2.0, 4.0, 16.0)),
    catches="a fixed epsilon or a step of fixed size",
    source=SOURCE,
)
def scaling_input_and_eps_together_changes_nothing(rmsnorm, x, gain, eps, s):
    """rmsnorm(s x, s^2 eps) = rmsnorm(x, eps), bit for bit where s is a power of two."""
    bit_equal(rmsnorm(x * s, gain, eps * s**2), rmsnorm(x, gain, eps))


@clause(
    "rmsnorm",
    given(x=tensors("*batch d_model", ("tiny",)), gain=_GAIN, eps=_EPS),
    catches="eps added to the root, a floor in its place, or another eps",
    source=SOURCE,
)
def eps_is_inside_the_root(rmsnorm, x, gain, eps):
    """eps is added to the mean of the squares, under the root: it shows where their root is near sqrt(eps)."""
    close(rmsnorm(x, gain, eps), _normalized(x, eps) * gain.double())


@clause("rmsnorm", given(**_ANY, gain=_GAIN), catches="no eps: 0 / 0", source=SOURCE)
def zero_row_gives_zero(rmsnorm, x, gain, eps):
    """A row of zeros gives zeros, thanks to eps."""
    first = (0,) * (x.ndim - 1)
    x[first] = 0
    bit_equal(rmsnorm(x, gain, eps)[first], 0.0)


@clause(
    "rmsnorm",
    given(c=tensors("*batch 1", NONZERO), gain=_GAIN, eps=_EPS),
    catches="layer normalization, or a variance for the mean of the squares",
    source=SOURCE,
)
def no_mean_is_subtracted(rmsnorm, c, gain, eps):
    """No mean is subtracted: a row of equal entries c gives c / sqrt(c^2 + eps) * gain."""
    rows = c.repeat_interleave(gain.shape[0], -1)
    close(rmsnorm(rows, gain, eps), _normalized(c, eps) * gain.double())


@clause(
    "rmsnorm",
    given(**_ANY, gain=tensors("d_model", ("quarters",)), other=tensors("d_model", ("quarters",))),
    catches="1 + gain, or a gain applied before the root is taken",
    source=SOURCE,
)
def linear_in_the_gain(rmsnorm, x, gain, other, eps):
    """The outputs with two gains add up to the output with their sum."""
    close(rmsnorm(x, gain, eps) + rmsnorm(x, other, eps), rmsnorm(x, gain + other, eps))


@clause("rmsnorm", given(**_ANY), catches="1 + gain", source=SOURCE)
def zero_gain_gives_zero(rmsnorm, x, eps):
    """A gain of 0 gives exactly 0: the gain is the whole factor, not what is added to 1."""
    bit_equal(rmsnorm(x, torch.zeros(x.shape[-1], dtype=x.dtype), eps), 0.0)


@clause(
    "rmsnorm",
    given(**_ANY, others=tensors("*batch d_model", GENERAL), gain=_GAIN),
    where=_several_rows,
    catches="a mean over the sequence or the batch",
    source=SOURCE,
)
def rows_do_not_see_each_other(rmsnorm, x, others, gain, eps):
    """Changing all other rows leaves a row's output bit for bit as it was: the mean is over the last axis only."""
    first = (0,) * (x.ndim - 1)
    others[first] = x[first]
    bit_equal(rmsnorm(others, gain, eps)[first], rmsnorm(x, gain, eps)[first])


@clause("rmsnorm", given(**_ANY, gain=_GAIN), catches="an absolute value", source=SOURCE)
def signs_are_kept(rmsnorm, x, gain, eps):
    """An output has the sign of its input times its gain, and negating the input negates the output."""
    y = rmsnorm(x, gain, eps)
    at_most(0.0, y * (x.sign() * gain.sign()), says="a sign is changed")
    close(rmsnorm(-x, gain, eps), -y, says="negating the input does not negate the output")


@clause(
    "rmsnorm",
    given(**_VAST),
    dtypes=("float32", "bfloat16", "float64"),
    catches="computed in float16 inside; squares of squares",
    source=SOURCE,
)
def large_inputs_are_normalized(rmsnorm, x, eps):
    """Inputs up to 1e17 and beyond, whose squares float32 can hold, are normalized like any others."""
    _rms_is_one(rmsnorm, x, eps)
    gain = torch.ones_like(x[(0,) * (x.ndim - 1)])
    close(rmsnorm(x, gain, eps), rmsnorm.exact(x, gain, eps), says="the direction of a large input is changed")


@clause(
    "rmsnorm",
    given(**_VAST),
    dtype="float16",
    level="should",
    catches="squares in half precision: inf above 255, and an output of 0",
    source="practice: activations of 1000s are common, and their squares exceed float16",
)
def large_half_inputs_are_normalized(rmsnorm, x, eps):
    """float16 inputs of 1000s are normalized like any others, their squares being computed in float32 at least."""
    takes_the_dtype(rmsnorm, (x, torch.ones(x.shape[-1], dtype=x.dtype), eps))
    _rms_is_one(rmsnorm, x, eps)


@clause(
    "rmsnorm",
    given(x=tensors("*batch d_model", ("plain", *GENERAL)), gain=_GAIN, eps=_EPS),
    sizes={"rmsnorm": _LONG},
    cases={f"{size.batch} rows of {size.d_model}": size.__eq__ for size in _LONG},
    level="should",
    enough=20,
    catches="the tail of a block is left out of the mean, or counted twice; rows beyond a block are not written",
    source="practice: kernels work in blocks, and widths are not multiples of them",
)
def unit_rms_at_any_width(rmsnorm, x, gain, eps):
    """However wide a row, and however many there are, its root mean square is 1, and reversing rows and entries
    reverses the output."""
    axes = tuple(range(x.ndim))
    _rms_is_one(rmsnorm, x, eps)
    reversed_ = rmsnorm(x.flip(axes), gain.flip(0), eps)
    close(reversed_, rmsnorm(x, gain, eps).map(lambda t: t.flip(axes)), says="reversing changes the output")


@clause(
    "rmsnorm",
    given(x=tensors("*batch d_model", ("plain", "positive", "constant", "tiny")), eps=_EPS),
    sizes=LONG_SIZES,
    level="should",
    dtype="bfloat16",
    enough=6,
    catches="squares are summed in bfloat16: from 256 on, adding 1 changes nothing",
    source="practice: rows of thousands of entries are summed in every layer",
)
def unit_rms_of_long_rows_in_bfloat16(rmsnorm, x, eps):
    """In bfloat16 too, rows of thousands of entries have a root mean square of 1."""
    takes_the_dtype(rmsnorm, (x, torch.ones(x.shape[-1], dtype=x.dtype), eps))
    _rms_is_one(rmsnorm, x, eps)
