"""softmax(v)_i = exp(v_i) / sum_j exp(v_j): a probability distribution along one axis."""

import torch

from spec_lm.conformance.clause import clause, given
from spec_lm.conformance.strategies import (
    BLOCK_SIZES,
    GENERAL,
    LONG_SIZES,
    batched,
    dims,
    exact_shifts,
    one_of,
    takes_the_dtype,
    tensors,
)
from spec_lm.conformance.tolerance import at_most, bit_equal, close, finite

SOURCE = "course notes: Scaled dot-product attention, softmax"
MASKING = "course notes: Scaled dot-product attention, masking"
_ANY = (*GENERAL, "large")
_LONG = (*BLOCK_SIZES["softmax"], *LONG_SIZES["softmax"])


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
    given(x=tensors("*batch n", ("grid", "zeros", "small integers")), c=one_of(96.0, 88.0, 12.0, -12.0, -96.0, -110.0)),
    enough=20,
    catches="the maximum is subtracted beyond a threshold only, and exp overflows, or loses its digits, before it",
    source=SOURCE,
)
def shifts_to_the_edges_of_exp(softmax, x, c):
    """The same holds where exp is about to overflow or to vanish: near 88 and -104, and in float16 near 11 and -17."""
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


# ------------------------------------------------------------------------------------------- where the source is silent


@clause(
    "softmax",
    given(x=tensors("*batch n", ("plain", *_ANY))),
    sizes={"softmax": _LONG},
    cases={f"{size.n} entries": size.__eq__ for size in _LONG},
    level="should",
    enough=20,
    catches="the tail of a block is dropped or counted twice; a whole block of padding is counted; an index ends early",
    source="practice: kernels work in blocks, and lengths are not multiples of them",
)
def sums_to_one_at_any_length(softmax, x):
    """However long a slice, its entries sum to 1, and reversing them reverses their probabilities."""
    y = softmax(x, -1)
    close(y.sum(-1), 1.0, says="the entries do not sum to 1")
    close(
        softmax(x.flip(-1), -1), y.map(lambda t: t.flip(-1)), says="reversing the entries changes their probabilities"
    )


@clause(
    "softmax",
    given(x=tensors("*batch n", ("plain", "zeros", "small integers", "tiny", "constant"))),
    sizes=LONG_SIZES,
    level="should",
    dtype="bfloat16",
    enough=6,
    catches="the denominator is summed in bfloat16: from 256 on, adding 1 changes nothing",
    source="practice: rows of thousands of entries are summed in every layer",
)
def thousands_of_entries_sum_to_one_in_bfloat16(softmax, x):
    """In bfloat16 too, thousands of entries sum to 1."""
    takes_the_dtype(softmax, (x, -1))
    close(softmax(x, -1).sum(-1), 1.0)


@clause(
    "softmax",
    given(x=tensors("*batch n", ("plain", *_ANY)), seen=one_of(1, 2, 3)),
    sizes=BLOCK_SIZES,
    cases={f"{size.n} entries": size.__eq__ for size in BLOCK_SIZES["softmax"]},
    level="should",
    enough=20,
    catches="the running maximum of a block that is all -inf: -inf minus -inf",
    source="practice: padding on the left, or a window, hides whole blocks",
)
def whole_blocks_of_minus_infinity_get_zero(softmax, x, seen):
    """Entries of -inf get exactly 0 even where they fill the whole slice but its last entries, or but its first."""
    hidden = x.clone()
    hidden[..., :-seen] = -torch.inf
    alone = softmax(x[..., -seen:].contiguous(), -1)
    for flip, end in ((lambda t: t, "last"), (lambda t: t.flip(-1), "first")):
        y = softmax(flip(hidden).contiguous(), -1).map(flip)
        bit_equal(y[..., :-seen], 0.0, says=f"an entry of -inf does not get 0 where only the {end} are finite")
        close(y[..., -seen:], alone, says=f"the {end} entries differ from those of a slice of their own")


@clause(
    "softmax",
    given(x=tensors("*batch n", _ANY), alone=one_of(False, True)),
    level="should",
    enough=20,
    catches="a maximum that drops NaN, and takes the slice for a hidden one",
    source="practice: a NaN that is hidden is never found; the formula gives NaN",
)
def nan_is_not_hidden(softmax, x, alone):
    """A slice with a NaN becomes NaN throughout, even where all else in it is -inf; other slices stay as they are."""
    first = (0,) * (x.ndim - 1)
    whole = softmax(x, -1)
    if alone:
        x[first] = -torch.inf
    x[(*first, 0)] = torch.nan
    y = softmax(x, -1)
    bit_equal(y[first], torch.nan, says="a NaN is hidden")
    apart = y.map(lambda t: t.reshape(-1, t.shape[-1])[1:])
    close(apart, whole.map(lambda t: t.reshape(-1, t.shape[-1])[1:]), says="another slice is changed")
