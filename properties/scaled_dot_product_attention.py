"""softmax(Q K^T / sqrt(d_k)) V: each query's average of the values it may see."""

import torch

from spec_lm.conformance.clause import clause, given
from spec_lm.conformance.strategies import MODERATE, NONZERO, masks, tensors
from spec_lm.conformance.tolerance import at_most, bit_equal, close, finite

ATTENTION = "scaled_dot_product_attention"
SOURCE = "course notes: Scaled dot-product attention"
MASKING = f"{SOURCE}, masking"

_QK = {"q": tensors("*batch queries d_k", MODERATE), "k": tensors("*batch keys d_k", MODERATE)}
_QKV = {**_QK, "v": tensors("*batch keys d_v", MODERATE)}
_ANY_MASK = ("all", "none", "causal", "random", "random")
_OPEN = ("all", "none")


def _identity(k):
    """V = identity reads the weights out: output feature j of a query is its weight of key j."""
    keys = k.shape[-2]
    return torch.eye(keys, dtype=k.dtype).expand(*k.shape[:-2], keys, keys).clone()


def _visible(mask, q, k):
    """The mask over the whole (..., queries, keys), all True where there is none."""
    shape = (*q.shape[:-1], k.shape[-2])
    return torch.ones(shape, dtype=torch.bool) if mask is None else mask.expand(shape)


def _at_one_key(tensor, index, rows):
    """A copy with the rows of one key replaced."""
    changed = tensor.clone()
    changed[..., index, :] = rows[..., index, :]
    return changed


@clause(
    ATTENTION,
    given(**_QKV, mask=masks(("none",))),
    cases={},
    feature="mask none",
    catches="mask=None is not handled",
    source="adapter interface, mask=None",
)
def works_without_a_mask(attention, q, k, v, mask):
    """The mask may be left out."""
    finite(attention(q, k, v, mask))


@clause(ATTENTION, given(**_QK, mask=masks(_ANY_MASK)), catches="masked after the softmax, not renormalized", source=MASKING)
def masked_rows_sum_to_one(attention, q, k, mask):
    """The probabilities of the keys a query sees sum to 1: with every value 1, every output is 1."""
    ones = torch.ones(*k.shape[:-1], 3, dtype=k.dtype)
    close(attention(q, k, ones, mask), 1.0)


@clause(ATTENTION, given(**_QK, mask=masks(_ANY_MASK)), catches="softmax over queries; weights above 1", source=SOURCE)
def weights_are_a_distribution(attention, q, k, mask):
    """A query's weights, read out with V = identity, lie in [0, 1] and sum to 1 over the keys."""
    weights = attention(q, k, _identity(k), mask)
    at_most(0.0, weights.value, says="a weight is negative")
    at_most(weights, 1.0, says="a weight is above 1")
    close(weights.sum(-1), 1.0, says="a query's weights do not sum to 1")


@clause(ATTENTION, given(**_QK, mask=masks(("causal", "random", "one key"))), catches="a fill that is not -inf", source=MASKING)
def masked_weights_are_zero(attention, q, k, mask):
    """The weight of a key at a False position is exactly 0."""
    weights = attention(q, k, _identity(k), mask)
    hidden = weights.map(lambda t: t.masked_fill(_visible(mask, q, k), 0.0))
    bit_equal(hidden, 0.0)


@clause(
    ATTENTION,
    given(**_QKV, mask=masks(("all", "none"))),
    where=lambda s: s.keys > 1,
    catches="an inverted or additive mask; a denominator that counts masked keys",
    source=MASKING,
)
def masking_a_key_equals_deleting_it(attention, q, k, v, mask):
    """Attention with a key masked for every query equals attention over the sequence without that key and its value."""
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    hidden[:, 0] = False
    rest = None if mask is None else hidden[:, 1:]
    close(attention(q, k, v, hidden), attention(q, k[..., 1:, :], v[..., 1:, :], rest))


@clause(
    ATTENTION,
    given(**_QKV, k2=tensors("*batch keys d_k", MODERATE), v2=tensors("*batch keys d_v", MODERATE), mask=masks(_OPEN[:1])),
    where=lambda s: s.keys > 1,
    catches="masked keys still take part",
    source=MASKING,
)
def masked_keys_and_values_do_not_matter(attention, q, k, v, k2, v2, mask):
    """Changing the key and the value at a masked position leaves the output bit for bit as it was."""
    mask = mask.clone()
    mask[..., -1] = False
    changed = attention(q, _at_one_key(k, -1, k2), _at_one_key(v, -1, v2 * 4), mask)
    bit_equal(changed, attention(q, k, v, mask))


@clause(ATTENTION, given(**_QKV, none=masks(("none",)), mask=masks(("all",))), catches="an inverted mask", source=MASKING)
def all_true_mask_equals_no_mask(attention, q, k, v, none, mask):
    """A mask that is True everywhere changes nothing."""
    close(attention(q, k, v, mask), attention(q, k, v, none))


@clause(ATTENTION, given(**_QKV, mask=masks(_ANY_MASK)), catches="weights that do not average", source=SOURCE)
def output_lies_within_visible_values(attention, q, k, v, mask):
    """Each output feature lies between the smallest and the largest of the visible values' features."""
    seen = _visible(mask, q, k)[..., None]
    values = v[..., None, :, :].double()
    lowest = values.masked_fill(~seen, torch.inf).amin(-2)
    highest = values.masked_fill(~seen, -torch.inf).amax(-2)
    output = attention(q, k, v, mask)
    at_most(lowest, output, says="an output is below every visible value")
    at_most(output, highest, says="an output is above every visible value")


@clause(ATTENTION, given(**_QKV, mask=masks(_ANY_MASK)), catches="keys paired with other keys' values", source=SOURCE)
def permuting_keys_changes_nothing(attention, q, k, v, mask):
    """Reordering keys, values and mask columns alike changes nothing."""
    reordered = None if mask is None else mask.flip(-1)
    close(attention(q, k.flip(-2), v.flip(-2), reordered), attention(q, k, v, mask))


@clause(ATTENTION, given(**_QKV, mask=masks(_ANY_MASK)), catches="a query sees another's scores", source=SOURCE)
def permuting_queries_permutes_outputs(attention, q, k, v, mask):
    """Reordering queries and mask rows reorders the outputs alike."""
    reordered = None if mask is None else mask.flip(-2)
    close(attention(q.flip(-2), k, v, reordered), attention(q, k, v, mask).map(lambda t: t.flip(-2)))


@clause(
    ATTENTION,
    given(
        q=tensors("*batch queries d_k", MODERATE),
        k=tensors("*batch keys d_k", ("quarters", "zeros")),
        c=tensors("*batch 1 d_k", ("quarters",)),
        v=tensors("*batch keys d_v", MODERATE),
        mask=masks(_ANY_MASK),
    ),
    catches="the softmax is not shift invariant; a key is normalized",
    source=SOURCE,
)
def one_vector_added_to_all_keys_changes_nothing(attention, q, k, c, v, mask):
    """Adding one vector to every key adds one constant to a query's scores, which the softmax does not see."""
    close(attention(q, k + c, v, mask), attention(q, k, v, mask))


@clause(
    ATTENTION,
    given(q=tensors("*batch queries d_k", NONZERO), k=tensors("*batch keys d_k", NONZERO), mask=masks(_OPEN)),
    where=lambda s: s.keys > 1,
    catches="no scale, 1/d_k, or the square root of another size",
    source=SOURCE,
)
def scale_is_one_over_the_square_root_of_d_k(attention, q, k, mask):
    """Scores are q . k / sqrt(d_k), for every d_k."""
    scores = q.double() @ k.double().transpose(-1, -2) / q.shape[-1] ** 0.5
    close(attention(q, k, _identity(k), mask), scores.softmax(-1))


@clause(
    ATTENTION,
    given(k=_QK["k"], q=tensors("*batch queries d_k", ("zeros",)), v=_QKV["v"], mask=masks(_ANY_MASK)),
    catches="a hidden bias; weights that depend on the keys' order",
    source=SOURCE,
)
def zero_queries_average_the_visible_values(attention, q, k, v, mask):
    """A query of zeros weighs all visible keys alike: its output is the mean of their values."""
    seen = _visible(mask, q, k).double()
    close(attention(q, k, v, mask), seen @ v.double() / seen.sum(-1, keepdim=True))


@clause(
    ATTENTION,
    given(k=_QK["k"], q=tensors("*batch queries d_k", ("zeros",)), v=_QKV["v"], mask=masks(_OPEN)),
    where=lambda s: s.queries > 1 and s.keys > 1,
    catches="a causal mask that nobody asked for",
    source=MASKING,
)
def sees_every_key_unless_masked(attention, q, k, v, mask):
    """Without a mask, or with one that is all True, every query sees every key, later ones too."""
    close(attention(q, k, v, mask), v.double().mean(-2, keepdim=True).expand(*q.shape[:-1], v.shape[-1]))


@clause(ATTENTION, given(**_QKV, mask=masks(("one key",))), catches="masked keys take a share of the weight", source=MASKING)
def one_visible_key_returns_its_value(attention, q, k, v, mask):
    """A query that sees exactly one key returns that key's value, bit for bit."""
    chosen = _visible(mask, q, k).double() @ v.double()
    bit_equal(attention(q, k, v, mask), chosen)


@clause(
    ATTENTION,
    given(**_QK, v=tensors("*batch keys d_v", ("quarters",)), w=tensors("*batch keys d_v", ("quarters",)), mask=masks(_ANY_MASK)),
    catches="values are normalized, scaled or passed through a nonlinearity",
    source=SOURCE,
)
def linear_in_the_values(attention, q, k, v, w, mask):
    """The output is linear in V: doubling V doubles it exactly, and the output for V + W is the sum of the two."""
    output = attention(q, k, v, mask)
    bit_equal(attention(q, k, v * 2, mask), output * 2, says="doubling V does not double the output")
    close(attention(q, k, v + w, mask), output + attention(q, k, w, mask), says="V + W does not give the sum")


@clause(
    ATTENTION,
    given(
        q=tensors("*batch queries d_k", ("large integers", "one large")),
        k=tensors("*batch keys d_k", ("large integers", "one large")),
        v=_QKV["v"],
        mask=masks(_ANY_MASK),
    ),
    catches="exp of a large score overflows",
    source=SOURCE,
)
def large_scores_stay_finite(attention, q, k, v, mask):
    """Scores up to 1e6 give neither inf nor NaN, and the outputs they should."""
    output = attention(q, k, v, mask)
    finite(output)
    close(output, attention.exact(q, k, v, mask))


@clause(
    ATTENTION,
    given(v=_QKV["v"], q=_QK["q"], k=_QK["k"], mask=masks(("causal", "random", "one key"))),
    dtypes=("float32", "float64", "bfloat16"),
    where=lambda s: s.keys > 1,
    catches="masked scores are filled with -1e4 or the smallest half-precision number, not -inf",
    source=MASKING,
)
def masked_keys_stay_hidden_behind_very_low_scores(attention, q, k, v, mask):
    """A masked key stays hidden when the scores of all visible ones are at -1e5."""
    d_k = q.shape[-1]
    low = torch.full_like(q, -(1e5**0.5) / d_k**0.25)
    close(attention(low, -low[..., :1, :].expand_as(k), v, mask), attention(low * 0, k * 0, v, mask))
