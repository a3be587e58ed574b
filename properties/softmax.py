"""softmax(v)_i = exp(v_i) / sum_j exp(v_j): a probability distribution along one axis."""

import torch

from spec_lm.conformance.clause import clause, given
from spec_lm.conformance.strategies import GENERAL, batched, dims, exact_shifts, tensors
from spec_lm.conformance.tolerance import at_most, bit_equal, close, finite

SOURCE = "course notes: Scaled dot-product attention, softmax"
MASKING = "course notes: Scaled dot-product attention, masking"
_ANY = (*GENERAL, "large")


@clause(
    "softmax", given(x=tensors("*batch n", _ANY), dim=dims()), catches="normalized over another axis", source=SOURCE
)
def sums_to_one(softmax, x, dim):
    """The entries of every slice along `dim` sum to 1."""
    close(softmax(x, dim).sum(dim), 1.0)


@clause("softmax", given(x=tensors("*batch n", _ANY)), catches="a logarithm, or no normalization", source=SOURCE)
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
    close(softmax(x, dim), softmax(x.movedim(dim, -1).contiguous(), -1).movedim(-1, dim))


@clause(
    "softmax",
    given(x=tensors("*batch n", _ANY), others=tensors("*batch n", _ANY), dim=dims()),
    where=batched,
    catches="a maximum or a sum shared by all slices",
    source=SOURCE,
)
def slices_do_not_see_each_other(softmax, x, others, dim):
    """Changing all other slices along `dim` leaves a slice's softmax bit for bit as it was."""
    first = tuple(slice(None) if axis == dim % x.ndim else 0 for axis in range(x.ndim))
    changed = others.clone()
    changed[first] = x[first]
    bit_equal(softmax(changed, dim)[first], softmax(x, dim)[first])


@clause(
    "softmax",
    given(x=tensors("*batch n", _ANY), hide=tensors("*batch n", ("ones and zeros", "small integers", "plain"))),
    catches="-inf is replaced by a finite number; every entry gets a small share",
    source=MASKING,
)
def minus_infinity_gets_zero(softmax, x, hide):
    """An entry of -inf beside finite ones gets probability exactly 0, and the others share the whole."""
    hidden = hide < hide.amax(-1, keepdim=True)
    y = softmax(x.masked_fill(hidden, -torch.inf), -1)
    bit_equal(y.map(lambda t: t.masked_fill(~hidden, 0.0)), 0.0, says="an entry of -inf does not get 0")
    close(y.sum(-1), 1.0, says="the finite entries do not sum to 1")


@clause(
    "softmax", given(x=tensors("*batch n", _ANY)), catches="a sign, an absolute value, a shuffled axis", source=SOURCE
)
def order_is_kept(softmax, x):
    """A larger entry never gets a smaller probability than another of its slice."""
    ascending = x.argsort(-1)
    y = softmax(x, -1).map(lambda t: t.take_along_dim(ascending, -1))
    at_most(y[..., :-1], y[..., 1:])


@clause(
    "softmax", given(x=tensors("*batch n"), dim=dims()), catches="a tail or a first entry handled apart", source=SOURCE
)
def permuting_entries_permutes_probabilities(softmax, x, dim):
    """Reordering the entries along `dim` reorders the probabilities alike."""
    close(softmax(x.flip(dim), dim), softmax(x, dim).map(lambda t: t.flip(dim)))


@clause(
    "softmax",
    given(x=tensors("*batch n", _ANY), dim=dims("*batch n 1")),
    catches="an epsilon in the sum",
    source=SOURCE,
)
def one_element_axis_gives_one(softmax, x, dim):
    """Along an axis with one element every entry is 1, whatever it is."""
    close(softmax(x.unsqueeze(dim), dim), 1.0)


@clause("softmax", given(x=tensors("*batch n", _ANY)), catches="a temperature, another base, a clamp", source=SOURCE)
def ratios_are_exponentials_of_differences(softmax, x):
    """The ratio of two entries is exp of the difference of their inputs; one of the two is a largest one here."""
    largest = x.argmax(-1, keepdim=True)
    below = x.double() - x.double().take_along_dim(largest, -1)
    y = softmax(x, -1)
    close(y, y.map(lambda t: t.take_along_dim(largest, -1)) * below.exp())
