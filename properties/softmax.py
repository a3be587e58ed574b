"""softmax(v)_i = exp(v_i) / sum_j exp(v_j): a probability distribution along one axis."""

import torch

from spec_lm.conformance.clause import clause, given
from spec_lm.conformance.strategies import GENERAL, dims, exact_shifts, tensors
from spec_lm.conformance.tolerance import at_most, bit_equal, close, finite

SOURCE = "course notes: Scaled dot-product attention, softmax"
_ANY = (*GENERAL, "large")


@clause("softmax", given(x=tensors("*batch n", _ANY), dim=dims()), catches="normalized over another axis", source=SOURCE)
def sums_to_one(softmax, x, dim):
    """The entries of every slice along `dim` sum to 1."""
    close(softmax(x, dim).sum(dim), 1.0)


@clause("softmax", given(x=tensors("*batch n", _ANY)), catches="a sigmoid or logarithm instead", source=SOURCE)
def entries_are_probabilities(softmax, x):
    """Every entry lies in [0, 1]."""
    y = softmax(x, -1)
    at_most(0.0, y.value, says="an entry is negative")
    at_most(y, 1.0, says="an entry is above 1")


@clause(
    "softmax",
    given(x=tensors("*batch n", ("grid", "zeros", "small integers")), c=exact_shifts("*batch 1")),
    catches="exp of a large input overflows, or the maximum is taken over the whole tensor",
    source=SOURCE,
)
def shift_invariance(softmax, x, c):
    """Adding one constant to every entry of a slice leaves its softmax unchanged: softmax(v + c) = softmax(v)."""
    close(softmax(x + c, -1), softmax(x, -1))


@clause(
    "softmax",
    given(x=tensors("*batch n", ("large integers", "large", "one large", "huge"))),
    catches="no maximum is subtracted: inf / inf",
    source=SOURCE,
)
def large_inputs_stay_finite(softmax, x):
    """Large inputs give neither inf nor NaN, since the slice's maximum can be subtracted first."""
    finite(softmax(x, -1))


@clause("softmax", given(x=tensors("*batch n"), dim=dims()), catches="the axis is ignored or fixed", source=SOURCE)
def any_dim(softmax, x, dim):
    """Any axis serves, counted from either end: softmax along `dim` is softmax along the last axis of x moved there."""
    close(softmax(x, dim), softmax(x.movedim(dim, -1), -1).movedim(-1, dim))
