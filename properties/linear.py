"""y = W x, with W (d_out, d_in) and no bias."""

import torch

from spec_lm.conformance.clause import clause, given
from spec_lm.conformance.strategies import BLOCK_SIZES, GENERAL, LONG_SIZES, WEIGHTS, size, takes_the_dtype, tensors
from spec_lm.conformance.tolerance import bit_equal, close

SOURCE = "adapter interface: Building blocks, linear"

_X = {"x": tensors("*batch d_in", GENERAL)}
_W = {"weight": tensors("d_out d_in", WEIGHTS)}
_GRID = ("quarters", "zeros")
_LONG = (*BLOCK_SIZES["linear"], *LONG_SIZES["linear"])


@clause("linear", given(**_W), catches="a square weight used transposed; a scale", source=SOURCE)
def basis_vectors_give_columns(linear, weight):
    """The i-th basis vector gives the i-th column of W, exactly; where W is square too, it is not the i-th row."""
    basis = torch.eye(weight.shape[1], dtype=weight.dtype)
    bit_equal(linear(basis, weight), weight.T)


@clause(
    "linear",
    given(x=tensors("*batch d_in", ("zeros", "plain", "huge", "small integers", "shifted", "huge", "tiny", "huge"))),
    catches="a scale, a bias, an activation, a clamp",
    source=SOURCE,
)
def identity_weight_returns_the_input(linear, x):
    """W = I returns the input, exactly."""
    bit_equal(linear(x, torch.eye(x.shape[-1], dtype=x.dtype)), x)


@clause("linear", given(**_X, **_W), catches="a bias", source=SOURCE)
def no_bias(linear, x, weight):
    """There is no bias: a zero vector gives exactly 0."""
    first = (0,) * (x.ndim - 1)
    x[first] = 0
    bit_equal(linear(x, weight)[first], 0.0)


@clause(
    "linear",
    given(x=tensors("*batch d_in", _GRID), other=tensors("*batch d_in", ("quarters",)), **_W),
    catches="a bias, an activation, a scale taken from the input",
    source=SOURCE,
)
def additive(linear, x, other, weight):
    """The outputs of two inputs add up to the output of their sum: W x + W x' = W (x + x')."""
    close(linear(x, weight) + linear(other, weight), linear(x + other, weight))


@clause(
    "linear",
    given(x=tensors("*batch d_in", _GRID), weight=tensors("d_out d_in", ("quarters",))),
    dtypes=("float32", "float64"),
    catches="products or sums in a shorter dtype",
    source=SOURCE,
)
def exact_where_nothing_rounds(linear, x, weight):
    """On multiples of 1/4 up to 2 no product and no sum rounds, so that the output is exact."""
    bit_equal(linear(x, weight), x.double() @ weight.double().T)


@clause(
    "linear",
    given(**_X, **_W, other=tensors("d_out d_in", WEIGHTS)),
    catches="a scale or a norm taken from the whole weight",
    source=SOURCE,
)
def each_row_of_the_weight_gives_one_output(linear, x, weight, other):
    """Changing the first row of W leaves the other outputs bit for bit as they were."""
    changed = torch.cat([other[:1], weight[1:]])
    bit_equal(linear(x, changed)[..., 1:], linear(x, weight)[..., 1:])


# ------------------------------------------------------------------------------------------- where the source is silent


@clause(
    "linear",
    given(x=tensors("*batch d_in", ("plain", *GENERAL)), weight=tensors("d_out d_in", ("halves", *WEIGHTS))),
    sizes={"linear": _LONG},
    cases={f"{size.batch} rows, {size.d_in} to {size.d_out}": size.__eq__ for size in _LONG},
    level="should",
    enough=20,
    catches="the tail of a block of rows, features or outputs is dropped or counted twice",
    source="practice: kernels work in blocks, and lengths are not multiples of them",
)
def reversing_rows_features_and_outputs(linear, x, weight):
    """Whatever their numbers, reversing rows, features and outputs alike reverses rows and outputs."""
    axes = tuple(range(x.ndim))
    close(linear(x.flip(axes), weight.flip(0, 1)), linear(x, weight).map(lambda t: t.flip(axes)))


@clause(
    "linear",
    given(n=size("d_in")),
    sizes=LONG_SIZES,
    level="should",
    dtype="bfloat16",
    enough=6,
    catches="a sum that is kept in bfloat16: from 256 on, adding 1 changes nothing",
    source="practice: rows of thousands of entries are summed in every layer",
)
def counts_to_thousands_in_bfloat16(linear, n):
    """In bfloat16 n products of 1 and 1 sum to n."""
    ones = torch.ones(1, n, dtype=torch.bfloat16)
    takes_the_dtype(linear, (ones, ones))
    close(linear(ones, ones), float(n))
