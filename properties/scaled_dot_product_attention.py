"""softmax(Q K^T / sqrt(d_k)) V: each query's average of the values it may see."""

from itertools import product

import hypothesis.strategies as st
import torch

from spec_lm.conformance.clause import clause, given
from spec_lm.conformance.strategies import (
    BLOCK_SIZES,
    LONG_SIZES,
    MODERATE,
    NONZERO,
    NotJudged,
    Size,
    index_of,
    masks,
    one_of,
    takes_the_dtype,
    tensors,
)
from spec_lm.conformance.tolerance import at_most, bit_equal, close, finite

ATTENTION = "scaled_dot_product_attention"
SOURCE = "course notes: Scaled dot-product attention"
MASKING = f"{SOURCE}, masking"

_QK = {"q": tensors("*batch queries d_k", MODERATE), "k": tensors("*batch keys d_k", MODERATE)}
_QKV = {**_QK, "v": tensors("*batch keys d_v", MODERATE)}
_ANY_MASK = ("all", "none", "causal", "random", "random")
# No weight gets so small that its product with a value is subnormal, where doubling is not exact.
_GENTLE = tuple(regime for regime in MODERATE if regime != "shifted")
_OPEN = ("all", "none")
_SOME_HIDDEN = ("causal", "random", "one key")

_LONG = (*BLOCK_SIZES[ATTENTION], *LONG_SIZES[ATTENTION])
_HEAD_SIZES = (3, 5, 6, 7, 24, 48, 64, 72, 80, 96, 128, 160)
# Axes that are equally long, so that only their order tells them apart, and lone queries in a batch.
_COINCIDING = (
    Size(batch=(3,), queries=1, keys=2, d_k=1, d_v=1),
    Size(batch=(2, 2), queries=1, keys=2, d_k=2, d_v=1),
    Size(batch=(2,), queries=2, keys=2, d_k=2, d_v=2),
    Size(batch=(3,), queries=3, keys=3, d_k=3, d_v=3),
    Size(batch=(2, 2), queries=2, keys=2, d_k=2, d_v=2),
    Size(batch=(2, 3), queries=3, keys=5, d_k=4, d_v=1),
    Size(batch=(2, 3), queries=4, keys=3, d_k=2, d_v=3),
)


def _of_size(size):
    """What a required case is called."""
    return f"{size.batch} of {size.queries} queries, {size.keys} keys, d_k {size.d_k}"


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


def _without(tensor, index, dim):
    """A copy without one key, which lies along `dim`."""
    return torch.cat([tensor.narrow(dim, 0, index), tensor.narrow(dim, index + 1, tensor.shape[dim] - index - 1)], dim)


def _scores(q, k):
    """q . k / sqrt(d_k) in float64."""
    return q.double() @ k.double().mT / q.shape[-1] ** 0.5


def _mean_of_the_visible(mask, q, k, v):
    seen = _visible(mask, q, k).double()
    return seen @ v.double() / seen.sum(-1, keepdim=True)


def _blinded(mask, query):
    """A copy of the mask in which one query sees no key."""
    mask = mask.clone()
    mask[..., query, :] = False
    return mask


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


@clause(
    ATTENTION, given(**_QK, mask=masks(_ANY_MASK)), catches="masked after the softmax, not renormalized", source=MASKING
)
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


@clause(ATTENTION, given(**_QK, mask=masks(_SOME_HIDDEN)), catches="a fill that is not -inf", source=MASKING)
def masked_weights_are_zero(attention, q, k, mask):
    """The weight of a key at a False position is exactly 0."""
    weights = attention(q, k, _identity(k), mask)
    hidden = weights.map(lambda t: t.masked_fill(_visible(mask, q, k), 0.0))
    bit_equal(hidden, 0.0)


@clause(
    ATTENTION,
    given(**_QKV, mask=masks(_OPEN), hidden=index_of("keys")),
    where=lambda s: s.keys > 1,
    catches="an inverted or additive mask; a denominator that counts masked keys",
    source=MASKING,
)
def masking_a_key_equals_deleting_it(attention, q, k, v, mask, hidden):
    """Attention with a key masked for every query equals attention over the sequence without that key and its value."""
    all_but_one = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    all_but_one[:, hidden] = False
    rest = None if mask is None else _without(all_but_one, hidden, -1)
    deleted = attention(q, _without(k, hidden, -2), _without(v, hidden, -2), rest)
    close(attention(q, k, v, all_but_one), deleted)


@clause(
    ATTENTION,
    given(
        **_QKV,
        k2=tensors("*batch keys d_k", (*MODERATE, "large integers")),
        v2=tensors("*batch keys d_v", (*MODERATE, "large integers")),
        hidden=index_of("keys"),
    ),
    where=lambda s: s.keys > 1,
    catches="masked keys still take part, if only in the maximum",
    source=MASKING,
)
def masked_keys_and_values_do_not_matter(attention, q, k, v, k2, v2, hidden):
    """Changing the key and the value at a masked position leaves the output bit for bit as it was."""
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    mask[:, hidden] = False
    changed = attention(q, _at_one_key(k, hidden, k2), _at_one_key(v, hidden, v2), mask)
    bit_equal(changed, attention(q, k, v, mask))


@clause(
    ATTENTION, given(**_QKV, none=masks(("none",)), mask=masks(("all",))), catches="an inverted mask", source=MASKING
)
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
    close(attention(q, k, _identity(k), mask), _scores(q, k).softmax(-1))


@clause(
    ATTENTION,
    given(k=_QK["k"], q=tensors("*batch queries d_k", ("zeros",)), v=_QKV["v"], mask=masks(_ANY_MASK)),
    catches="a hidden bias; weights that depend on the keys' order",
    source=SOURCE,
)
def zero_queries_average_the_visible_values(attention, q, k, v, mask):
    """A query of zeros weighs all visible keys alike: its output is the mean of their values."""
    close(attention(q, k, v, mask), _mean_of_the_visible(mask, q, k, v))


@clause(
    ATTENTION,
    given(k=_QK["k"], q=tensors("*batch queries d_k", ("zeros",)), v=_QKV["v"], mask=masks(_OPEN)),
    where=lambda s: s.queries > 1 and s.keys > 1,
    cases={"queries == keys > 4": lambda s: s.queries == s.keys > 4, "queries == keys": lambda s: s.queries == s.keys},
    catches="a causal mask that nobody asked for",
    source=MASKING,
)
def sees_every_key_unless_masked(attention, q, k, v, mask):
    """Without a mask, or with one that is all True, every query sees every key, later ones too."""
    close(attention(q, k, v, mask), v.double().mean(-2, keepdim=True).expand(*q.shape[:-1], v.shape[-1]))


@clause(
    ATTENTION, given(**_QKV, mask=masks(("one key",))), catches="masked keys take a share of the weight", source=MASKING
)
def one_visible_key_returns_its_value(attention, q, k, v, mask):
    """A query that sees exactly one key returns that key's value, bit for bit."""
    chosen = _visible(mask, q, k).double() @ v.double()
    bit_equal(attention(q, k, v, mask), chosen)


@clause(
    ATTENTION,
    given(
        q=tensors("*batch queries d_k", _GENTLE),
        k=tensors("*batch keys d_k", _GENTLE),
        v=tensors("*batch keys d_v", ("quarters",)),
        w=tensors("*batch keys d_v", ("quarters",)),
        mask=masks(_ANY_MASK),
    ),
    catches="values are normalized, scaled or passed through a nonlinearity",
    source=SOURCE,
)
def linear_in_the_values(attention, q, k, v, w, mask):
    """The output is linear in V: doubling V doubles it exactly, and the output for V + W is the sum of the two."""
    output = attention(q, k, v, mask)
    same = close if v.dtype == torch.float16 else bit_equal  # half precision rounds its many subnormal results
    same(attention(q, k, v * 2, mask), output * 2, says="doubling V does not double the output")
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
    given(k=tensors("*batch keys d_k", ("zeros",)), mask=masks(_SOME_HIDDEN)),
    dtypes=("float32", "float64", "bfloat16"),
    where=lambda s: s.keys > 1,
    catches="masked scores are filled with -1e4 or the smallest half-precision number, not -inf",
    source=MASKING,
)
def masked_keys_stay_hidden_behind_very_low_scores(attention, k, mask):
    """A masked key keeps the weight 0 when the scores of all visible keys are at -1e5."""
    queries, d_k = mask.shape[-2], k.shape[-1]
    size = 1e5**0.5 / d_k**0.25
    q = k.new_full((*k.shape[:-2], queries, d_k), -size)
    weights = attention(q, torch.full_like(k, size), _identity(k), mask)
    hidden = weights.map(lambda t: t.masked_fill(_visible(mask, q, k), 0.0))
    bit_equal(hidden, 0.0, says="a masked key came back")
    close(weights.sum(-1), 1.0, says="a query's weights do not sum to 1")


# ------------------------------------------------------------------------------------------- where the source is silent


@clause(
    ATTENTION,
    given(**_QKV, mask=masks(_ANY_MASK[2:]), blind=index_of("queries")),
    level="should",
    catches="0 / 0 for padding queries",
    source="practice: padded batches have such queries, and one NaN spoils the whole model",
)
def query_that_sees_nothing_follows_the_convention(attention, q, k, v, mask, blind):
    """A query whose mask row is all False gets zeros; NaN or the mean of all values where that is declared. It gets
    them under no_grad too."""
    mask = _blinded(mask, blind)
    exact = attention.exact(q, k, v, mask)[..., blind, :]
    with attention.naming(q, k, v, mask):
        close(attention(q, k, v, mask)[..., blind, :], exact)
        with torch.no_grad():
            close(attention(q, k, v, mask)[..., blind, :], exact, says="it gets something else under no_grad")


@clause(
    ATTENTION,
    given(**_QKV, mask=masks(_ANY_MASK[2:]), blind=index_of("queries")),
    where=lambda s: s.queries > 1,
    level="should",
    catches="NaN that spreads; a whole example skipped for one row",
    source="practice: a padded query must not harm the others",
)
def query_that_sees_nothing_harms_no_other(attention, q, k, v, mask, blind):
    """Hiding all keys from one query leaves the outputs of the others as they were."""
    others = [query for query in range(q.shape[-2]) if query != blind]
    close(attention(q, k, v, _blinded(mask, blind))[..., others, :], attention(q, k, v, mask)[..., others, :])


@clause(
    ATTENTION,
    given(
        **_QKV,
        mask=masks(_ANY_MASK[2:]),
        blind=index_of("queries"),
        cotangent=tensors("*batch queries d_v", NONZERO),
    ),
    level="should",
    catches="NaN replaced after the softmax: its gradient is NaN all the same",
    source="practice: one NaN in a gradient ends a training run",
)
def query_that_sees_nothing_has_finite_gradients(attention, q, k, v, mask, blind, cotangent):
    """The gradients with respect to Q, K and V are finite where a query sees no key."""
    if attention.conventions.get("all_masked") == "nan":
        raise NotJudged("it declares NaN for a query that sees no key")
    gradients = attention.gradients((q, k, v, _blinded(mask, blind)), cotangent)
    if not gradients:
        raise NotJudged("no gradient arrives at Q, K or V")
    for name, gradient in gradients.items():
        finite(gradient, says=f"the gradient with respect to the {name} is not finite")


@clause(
    ATTENTION,
    given(**_QKV, mask=masks(("random",)), shared=one_of("last", "first", "last", "every")),
    where=lambda s: len(s.batch) > 1,
    level="should",
    catches="a mask tiled over examples where it should be repeated over heads",
    source="practice: one mask for all heads of an example, or for all examples",
)
def broadcasts_a_mask_over_leading_axes(attention, q, k, v, mask, shared):
    """A mask with one element on some leading axes serves all examples along them, as if it were repeated."""
    full = _visible(mask, q, k)
    axes = range(full.ndim - 2)
    chosen = {"first": axes[:1], "last": axes[-1:], "every": axes}[shared]
    small = full[tuple(slice(0, 1) if axis in chosen else slice(None) for axis in axes)].clone()
    close(attention(q, k, v, small), attention(q, k, v, small.expand_as(full).clone()))


@clause(
    ATTENTION,
    given(**_QKV, mask=masks(("random",)), left=st.integers(0, 7)),
    where=lambda s: len(s.batch) > 0,
    level="should",
    catches="a mask is expected to have all axes, or exactly two",
    source="practice: one mask a head, or one for all, comes without the axes it does not depend on",
)
def broadcasts_a_mask_of_fewer_axes(attention, q, k, v, mask, left):
    """A mask of fewer axes than the scores, down to (queries, keys), serves all examples along the axes it lacks."""
    full = _visible(mask, q, k)
    small = full[(0,) * (1 + left % (full.ndim - 2))].clone()
    close(attention(q, k, v, small), attention(q, k, v, small.expand_as(full).clone()))


@clause(
    ATTENTION,
    given(**_QKV, mask=masks(("random",))),
    where=lambda s: s.queries > 1,
    level="should",
    catches="a padding mask is expected to be repeated for every query",
    source="practice: a padding mask depends on the keys alone",
)
def broadcasts_a_mask_over_queries(attention, q, k, v, mask):
    """A mask of one row, (1, keys), serves every query."""
    row = _visible(mask, q, k)[..., :1, :].clone()
    close(attention(q, k, v, row), attention(q, k, v, row.expand(*q.shape[:-1], k.shape[-2]).clone()))


@clause(
    ATTENTION,
    given(
        q=tensors("*batch queries d_k", ("large integers",)),
        k=tensors("*batch keys d_k", ("large integers",)),
        v=_QKV["v"],
        mask=masks(_ANY_MASK),
    ),
    level="should",
    dtype="float16",
    catches="a mask's fill beyond 65504; no maximum subtracted in half precision",
    source="practice: attention is served in half precision",
)
def large_half_scores_stay_finite(attention, q, k, v, mask):
    """float16 scores of thousands, masked or not, give finite outputs."""
    takes_the_dtype(attention, (q, k, v, mask))
    finite(attention(q, k, v, mask))


@clause(
    ATTENTION,
    given(
        q=tensors("*batch queries d_k", ("large integers", "plain", "shifted")),
        k=tensors("*batch keys d_k", ("large integers", "plain", "shifted")),
        v=_QKV["v"],
        mask=masks(_ANY_MASK[2:]),
        blind=index_of("queries"),
        low=st.booleans(),
    ),
    level="should",
    cases={},
    dtype="float16",
    catches="the smallest number of float16 added to the scores, where adding to it overflows",
    source="practice: padded batches are served in half precision",
)
def query_that_sees_nothing_stays_finite_in_float16(attention, q, k, v, mask, blind, low):
    """In float16 too, a query that sees no key harms neither itself nor others with inf or NaN, however low its scores
    are."""
    if attention.conventions.get("all_masked") == "nan":
        raise NotJudged("it declares NaN for a query that sees no key")
    takes_the_dtype(attention, (q, k, v, mask))
    q, k = (-8 - q.abs(), 8 + k.abs()) if low else (q, k)  # every score below -50
    finite(attention(q, k, v, _blinded(mask, blind)))


@clause(
    ATTENTION,
    given(
        q=tensors("queries d_k", MODERATE),
        k=tensors("keys d_k", MODERATE),
        v=tensors("keys d_v", MODERATE),
        mask=masks(_ANY_MASK),
    ),
    level="should",
    catches="a batch axis taken for granted",
    source="practice: the formula itself has no batch axis",
)
def takes_unbatched_input(attention, q, k, v, mask):
    """Without any leading axis, (queries, d_k) gives (queries, d_v), as a batch of one does."""
    mask = mask if mask is None else mask[(0,) * (mask.ndim - 2)]
    close(attention(q, k, v, mask), attention(q[None], k[None], v[None], mask)[0])


# ---------------------------------------------------------------------------------------------------- whatever the size


@clause(
    ATTENTION,
    given(
        k=_QK["k"],
        q=tensors("*batch queries d_k", ("zeros",)),
        v=tensors("*batch keys d_v", NONZERO),
        mask=masks(("all", "none", "random", "random")),
    ),
    sizes={ATTENTION: _LONG},
    cases={_of_size(size): size.__eq__ for size in _LONG},
    level="should",
    enough=20,
    catches="the tail of a block of keys or queries is dropped, or counted twice; padding takes part",
    source="practice: kernels work in blocks, and lengths are not multiples of them",
)
def zero_queries_average_at_any_length(attention, q, k, v, mask):
    """However many queries and keys there are, queries of zeros average the values they see."""
    close(attention(q, k, v, mask), _mean_of_the_visible(mask, q, k, v))


@clause(
    ATTENTION,
    given(
        q=tensors("*batch queries d_k", ("plain", *MODERATE)),
        k=tensors("*batch keys d_k", ("plain", *MODERATE)),
        v=tensors("*batch keys d_v", ("plain", *MODERATE)),
        mask=masks(_ANY_MASK),
    ),
    sizes={ATTENTION: _LONG},
    cases={_of_size(size): size.__eq__ for size in _LONG},
    level="should",
    enough=20,
    catches="a running sum that is not rescaled from block to block; queries beyond a block see others' scores",
    source="practice: kernels work in blocks, and lengths are not multiples of them",
)
def reversing_queries_and_keys_at_any_length(attention, q, k, v, mask):
    """However many queries and keys there are, reversing queries, keys and values, and the mask alike, reverses the
    outputs and changes nothing else."""
    reversed_mask = None if mask is None else mask.flip(-2, -1)
    output = attention(q.flip(-2), k.flip(-2), v.flip(-2), reversed_mask)
    close(output, attention(q, k, v, mask).map(lambda t: t.flip(-2)))


@clause(
    ATTENTION,
    given(**_QKV, mask=masks(("one key",))),
    where=lambda s: s.keys > 30,
    sizes=BLOCK_SIZES,
    cases={_of_size(size): size.__eq__ for size in BLOCK_SIZES[ATTENTION] if size.keys > 30},
    level="should",
    enough=20,
    catches="the running maximum of a block that is hidden as a whole: -inf minus -inf",
    source="practice: a window, or padding on the left, hides whole blocks",
)
def one_visible_key_of_hundreds_returns_its_value(attention, q, k, v, mask):
    """Among hundreds of keys too, the value of the one that a query sees is returned bit for bit: blocks that are
    hidden as a whole change nothing."""
    bit_equal(attention(q, k, v, mask), _visible(mask, q, k).double() @ v.double())


@clause(
    ATTENTION,
    given(q=tensors("*batch queries d_k", NONZERO), k=tensors("*batch keys d_k", NONZERO), mask=masks(_OPEN)),
    sizes={ATTENTION: tuple(Size(batch=(1,), queries=2, keys=3, d_k=d_k, d_v=1) for d_k in _HEAD_SIZES)},
    cases={f"d_k {d_k}": lambda s, d_k=d_k: s.d_k == d_k for d_k in _HEAD_SIZES},
    level="should",
    enough=20,
    catches="the square root of a size that was padded or rounded; features beyond a block left out",
    source="practice: heads have 64, 80 or 128 features, and kernels pad them",
)
def scale_holds_for_any_head_size(attention, q, k, mask):
    """Scores are q . k / sqrt(d_k) whether d_k is odd, large or not a multiple of anything."""
    close(attention(q, k, _identity(k), mask), _scores(q, k).softmax(-1))


@clause(
    ATTENTION,
    given(
        q=tensors("*batch queries d_k", NONZERO),
        k=tensors("*batch keys d_k", NONZERO),
        v=tensors("*batch keys d_v", NONZERO),
        mask=masks(("random", "one key", "none")),
    ),
    sizes={ATTENTION: _COINCIDING},
    cases={_of_size(size): size.__eq__ for size in _COINCIDING},
    level="should",
    enough=20,
    catches="axes told apart by their lengths; a path of its own for one query",
    source="practice: as many heads as tokens, as many keys as features; a decoder asks one query at a time",
)
def every_example_alone_where_sizes_coincide(attention, q, k, v, mask):
    """Where leading axes, queries, keys and features are equally many, or queries come alone, every example has the
    result it has by itself."""
    whole = attention(q, k, v, mask)
    for example in product(*map(range, q.shape[:-2])):
        at = tuple(slice(i, i + 1) for i in example)
        of_it = mask[at] if mask is not None and mask.ndim > 2 else mask
        close(attention(q[at], k[at], v[at], of_it), whole[at])


@clause(
    ATTENTION,
    given(**_QK, mask=masks(("none", "all"))),
    sizes=LONG_SIZES,
    level="should",
    dtype="bfloat16",
    enough=6,
    catches="exponentials, or weighted values, are summed in bfloat16: from 256 on, adding 1 changes nothing",
    source="practice: contexts of thousands of tokens",
)
def thousands_of_weights_sum_to_one_in_bfloat16(attention, q, k, mask):
    """In bfloat16 too, the probabilities of thousands of keys sum to 1: with every value 1, every output is 1."""
    ones = torch.ones(*k.shape[:-1], 1, dtype=k.dtype)
    takes_the_dtype(attention, (q, k, ones, mask))
    close(attention(q, k, ones, mask), 1.0)
