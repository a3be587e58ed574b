"""W_O Concat(head_1 .. head_h): in each slice of W_Q x, W_K x, W_V x a token attends to itself and to earlier ones.

What does not depend on RoPE is said here once, of the form without RoPE and of the form with it.
"""

import hypothesis.strategies as st
import torch

from spec_lm.conformance.clause import clause, given
from spec_lm.conformance.strategies import (
    BLOCK_SIZES,
    MODERATE,
    NONZERO,
    WEIGHTS,
    NotJudged,
    Projections,
    Size,
    arguments,
    index_of,
    one_of,
    projections,
    size,
    takes_the_dtype,
    tensors,
)
from spec_lm.conformance.tolerance import bit_equal, close, finite, refuses

ATTENTION = "multihead_self_attention"
BOTH = (ATTENTION, "multihead_self_attention_with_rope")
SOURCE = "course notes: Causal multi-head self-attention"

_TOKENS = "*batch sequence d_model"
_CALL = {"x": tensors(_TOKENS, MODERATE), "w": projections(), "num_heads": size("heads")}
_KEPT = index_of("sequence", 1)  # how many tokens come before the later ones: 1 .. sequence - 1


def _sized(batch, sequence, heads, d_head):
    sizes = {"batch": (batch,), "sequence": sequence, "heads": heads, "d_head": d_head}
    return Size(**sizes, d_model=heads * d_head, max_seq_len=16)


# Axes that are equally long, so that only their order tells them apart, and lone tokens in a batch.
_COINCIDING = (
    _sized(3, 1, 2, 2),
    _sized(2, 2, 2, 2),
    _sized(3, 3, 1, 2),
    _sized(3, 3, 3, 2),
    _sized(4, 4, 2, 4),
    _sized(2, 4, 2, 2),
    _sized(4, 1, 4, 4),
)
# From 256 on, adding 1 in bfloat16 changes nothing.
_WIDE = (_sized(2, 3, 2, 2), _sized(1, 2, 2, 160))
_ODD, _EVEN = (1, 3, 5, 7), (6, 10, 24, 64, 72, 80, 128)
_HEAD_SIZES = {ATTENTION: _ODD + _EVEN, BOTH[1]: _EVEN}


def _of_size(size):
    """What a required case is called."""
    return f"{size.batch} of {size.sequence} tokens, {size.heads} heads of {size.d_head}"


_BLOCK_CASES = {_of_size(size): size.__eq__ for size in BLOCK_SIZES[ATTENTION]}


def _several_tokens(size):
    return size.sequence > 1


def _several_heads(size):
    return size.heads > 1


def _later_tokens_replaced(x, others, kept):
    changed = x.clone()
    changed[..., kept:, :] = others[..., kept:, :]
    return changed


def _running_means(x):
    """Row t is the mean of rows 0 .. t."""
    return x.double().cumsum(-2) / torch.arange(1, x.shape[-2] + 1)[:, None]


def _projected_value(x, w):
    """W_O W_V x."""
    return x.double() @ (w.o.double() @ w.v.double()).T


def _causal_by_hand(x, w, num_heads):
    """Concat(head_1 .. head_h) in float64, scores divided by sqrt(d_model / num_heads)."""
    q, k, v = ((x.double() @ each.double().T).unflatten(-1, (num_heads, -1)).transpose(-2, -3) for each in w[:3])
    future = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu(1)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(future, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(-2, -3).flatten(-2)


# ------------------------------------------------------------------------------------------------------------ causality


@clause(
    BOTH,
    given(arguments=arguments(), later=tensors(_TOKENS, MODERATE), kept=_KEPT),
    where=_several_tokens,
    cases={},
    catches="no causal mask, or one shifted by a token",
    source=SOURCE,
)
def causal_independence_from_future_tokens(attend, arguments, later, kept):
    """Replacing later tokens leaves the outputs of earlier ones bit for bit as they were."""
    changed = arguments._replace(x=_later_tokens_replaced(arguments.x, later, kept))
    bit_equal(attend(*changed)[..., :kept, :], attend(*arguments)[..., :kept, :])


@clause(
    BOTH,
    given(arguments=arguments(), kept=_KEPT),
    where=_several_tokens,
    cases={},
    catches="anything that depends on the whole sequence: its length, its mean, its last token",
    source=SOURCE,
)
def a_prefix_gives_the_first_outputs(attend, arguments, kept):
    """The outputs for the first tokens alone equal the first outputs for the whole sequence."""
    prefix = arguments._replace(x=arguments.x[..., :kept, :].contiguous())
    if "positions" in arguments._fields:
        prefix = prefix._replace(positions=arguments.positions[:kept])
    close(attend(*prefix), attend(*arguments)[..., :kept, :])


@clause(
    ATTENTION,
    given(**_CALL, other=tensors("*batch d_model", MODERATE), changed=index_of("sequence")),
    where=_several_tokens,
    cases={},
    catches="a mask that hides the past: a window, a strict triangle, the token itself alone",
    source=SOURCE,
)
def the_past_influences_later_outputs(attend, x, w, num_heads, other, changed):
    """With W_Q = 0 token t weighs the tokens up to itself alike: changing token j <= t by delta moves its output by
    W_O W_V delta / (t + 1), and no output before j."""
    y = x.clone()
    y[..., changed, :] = other
    w = w._replace(q=w.q * 0)
    moved = _projected_value(_running_means(y) - _running_means(x), w)
    close(attend(y, *w, num_heads) - attend(x, *w, num_heads), moved)


@clause(
    ATTENTION,
    given(**_CALL, cotangent=tensors(_TOKENS, NONZERO), kept=_KEPT),
    where=_several_tokens,
    cases={},
    catches="later tokens hidden from the outputs alone, as by a mask outside the graph",
    source=SOURCE,
)
def gradient_to_later_tokens_is_zero(attend, x, w, num_heads, cotangent, kept):
    """The gradient of an earlier output with respect to a later token is exactly 0, where outputs carry a gradient."""
    cotangent[..., kept:, :] = 0
    gradients = attend.gradients((x, *w, num_heads), cotangent)
    if "x" not in gradients:
        raise NotJudged("no gradient arrives at x")
    bit_equal(gradients["x"][..., kept:, :], 0.0)


@clause(
    ATTENTION, given(**_CALL), cases={}, catches="W_O or W_V left out, exchanged or transposed; a bias", source=SOURCE
)
def the_first_token_gives_its_projected_value(attend, x, w, num_heads):
    """The first token sees itself alone, so that its output is W_O W_V x, whatever W_Q and W_K are."""
    close(attend(x, *w, num_heads)[..., 0, :], _projected_value(x[..., 0, :], w))


# ---------------------------------------------------------------------------------------------------------------- heads


@clause(
    ATTENTION,
    given(x=tensors(_TOKENS, MODERATE), w_k=tensors("d_model d_model", WEIGHTS), num_heads=size("heads")),
    cases={"one head": lambda s: s.heads == 1, "several heads": _several_heads},
    catches="heads split or merged without exchanging the axes of head and token",
    source=SOURCE,
)
def head_split_round_trip(attend, x, w_k, num_heads):
    """Splitting into heads and merging them are inverse: with W_V = W_O = I a lone token comes back bit for bit, for
    every number of heads, and with W_Q = 0 too token t becomes the mean of the tokens up to it."""
    identity = torch.eye(x.shape[-1], dtype=x.dtype)
    output = attend(x, w_k * 0, w_k, identity, identity, num_heads)
    bit_equal(output[..., 0, :], x[..., 0, :], says="the first token, which sees itself alone, does not come back")
    close(output, _running_means(x), says="a token does not become the mean of the tokens up to it")


def _reversed_heads(weight, num_heads):
    """A weight whose rows, cut into heads, come in the reverse order of heads."""
    return weight.unflatten(0, (num_heads, -1)).flip(0).flatten(0, 1)


@clause(
    BOTH,
    given(arguments=arguments()),
    where=_several_heads,
    catches="heads that are no contiguous slices, or that are treated unlike",
    source=SOURCE,
)
def permuting_heads_changes_nothing(attend, arguments):
    """Reordering the heads alike in the rows of W_Q, W_K and W_V and the columns of W_O changes nothing."""
    heads = arguments.num_heads
    rows = {name: _reversed_heads(getattr(arguments, name), heads) for name in ("w_q", "w_k", "w_v")}
    columns = _reversed_heads(arguments.w_o.T, heads).T.contiguous()
    close(attend(*arguments._replace(**rows, w_o=columns)), attend(*arguments))


def _slice_of(arguments, head):
    """Where a head lies on the embedding axis."""
    d_head = arguments.x.shape[-1] // arguments.num_heads
    return slice(head * d_head, (head + 1) * d_head)


@clause(
    BOTH,
    given(arguments=arguments(), head=index_of("heads")),
    where=_several_heads,
    catches="heads merged in another order than they were split in",
    source=SOURCE,
)
def zeroing_a_heads_values_equals_zeroing_its_output_columns(attend, arguments, head):
    """Zeroing a head's rows of W_V equals zeroing its columns of W_O: the head goes, and nothing else."""
    w_v, w_o, of_head = arguments.w_v.clone(), arguments.w_o.clone(), _slice_of(arguments, head)
    w_v[of_head] = 0
    w_o[:, of_head] = 0
    close(attend(*arguments._replace(w_v=w_v)), attend(*arguments._replace(w_o=w_o)))


@clause(
    BOTH,
    given(arguments=arguments(), head=index_of("heads")),
    where=_several_heads,
    catches="heads that share a projection, or see each other's scores",
    source=SOURCE,
)
def each_head_alone_is_attention_on_its_slice(attend, arguments, head):
    """With W_O zero outside a head's columns the output is attention with that head's slice of the four weights."""
    of_head = _slice_of(arguments, head)
    w_o = torch.zeros_like(arguments.w_o)
    w_o[:, of_head] = arguments.w_o[:, of_head]
    rows = {name: getattr(arguments, name)[of_head] for name in ("w_q", "w_k", "w_v")}
    alone = arguments._replace(**rows, w_o=arguments.w_o[:, of_head], num_heads=1)
    with attend.naming(*arguments):
        close(attend(*arguments._replace(w_o=w_o)), attend.exact(*alone))


@clause(
    ATTENTION,
    given(x=tensors(_TOKENS, NONZERO), w=projections(), num_heads=size("heads")),
    where=lambda s: s.heads > 1 and s.sequence > 1,
    catches="no scale, or the square root of d_model",
    source=SOURCE,
)
def scale_is_one_over_the_square_root_of_the_head_size(attend, x, w, num_heads):
    """In every head scores are q . k / sqrt(d_k), d_k = d_model / num_heads; W_V = W_O = I reads the weights out."""
    identity = torch.eye(x.shape[-1], dtype=x.dtype)
    w = w._replace(v=identity, o=identity)
    close(attend(x, *w, num_heads), _causal_by_hand(x, w, num_heads))


@clause(
    ATTENTION,
    given(x=tensors(_TOKENS, NONZERO), w=projections(), num_heads=one_of(1)),
    where=lambda s: s.heads == 1 and s.sequence > 1,
    cases={},
    catches="a path of its own for one head",
    source=SOURCE,
)
def one_head_equals_plain_causal_attention(attend, x, w, num_heads):
    """With one head it is causal attention of W_Q x, W_K x and W_V x, multiplied by W_O."""
    close(attend(x, *w, num_heads), _causal_by_hand(x, w, num_heads) @ w.o.double().T)


@clause(
    BOTH,
    given(arguments=arguments()),
    cases={},
    catches="a head size that is rounded down, or heads of unequal size",
    enough=20,
    source=f"{SOURCE}, d_k = d_model / h",
)
def refuses_a_number_of_heads_that_does_not_divide(attend, arguments):
    """A number of heads that does not divide d_model is refused."""
    d_model = arguments.x.shape[-1]
    heads = next(number for number in range(2, d_model + 2) if d_model % number)
    refuses(lambda: attend(*arguments._replace(num_heads=heads)), what=f"num_heads {heads} for d_model {d_model}")


# ---------------------------------------------------------------------------------------------------------------- ranks


def _other_ranks(domain, name):
    """Numbers of leading axes other than one, of those that the implementation supports."""
    axes = [n for n in (0, 2, 3) if n + 2 in domain.supports.get("axes", (2, 4, 5))]
    if not axes:
        raise NotJudged("its declared support has no other number of leading axes")
    return st.sampled_from(axes)


@clause(
    BOTH,
    given(arguments=arguments(), leading=_other_ranks),
    level="should",
    catches="a hard-coded number of axes",
    source="practice: a single sequence, or examples in several axes, are attended to without reshaping",
)
def takes_none_or_more_leading_axes(attend, arguments, leading):
    """Leading axes are independent examples, none or several of them as well as one."""
    whole = attend(*arguments)

    def moved(t):
        return t.unflatten(0, (1,) * (leading - 1) + (-1,)) if leading else t[0]

    close(attend(*arguments._replace(x=moved(arguments.x).clone())), whole.map(moved))


@clause(
    BOTH,
    given(arguments=arguments(), large=tensors(_TOKENS, ("large integers", "one large"))),
    level="should",
    dtypes=("float32", "float64", "bfloat16"),
    catches="exp of a large score overflows",
    source="practice: one NaN spoils the whole model",
)
def large_inputs_stay_finite(attend, arguments, large):
    """Inputs of hundreds, and the scores of ten thousands that come of them, give finite outputs."""
    finite(attend(*arguments._replace(x=large)))


# ---------------------------------------------------------------------------------------------------- whatever the size


def _weights_of(arguments):
    return Projections(arguments.w_q, arguments.w_k, arguments.w_v, arguments.w_o)


def _with_identities(arguments, **changed):
    """W_V = W_O = I: each head gives the average of its slice of x."""
    identity = torch.eye(arguments.x.shape[-1], dtype=arguments.x.dtype)
    return arguments._replace(**changed, w_v=identity, w_o=identity)


@clause(
    BOTH,
    given(arguments=arguments(), x=tensors(_TOKENS, NONZERO)),
    sizes=BLOCK_SIZES,
    cases=_BLOCK_CASES,
    level="should",
    enough=20,
    catches="a window; a mask made for a fixed length, or for whole blocks; tokens beyond a block left out",
    source="practice: kernels work in blocks, and lengths are not multiples of them",
)
def running_means_at_any_length(attend, arguments, x):
    """However many tokens there are, with W_Q = 0 and W_V = W_O = I token t becomes the mean of the tokens up to it."""
    close(attend(*_with_identities(arguments, x=x, w_q=arguments.w_q * 0)), _running_means(x))


@clause(
    BOTH,
    given(arguments=arguments(), x=tensors(_TOKENS, NONZERO)),
    sizes=BLOCK_SIZES,
    cases=_BLOCK_CASES,
    level="should",
    enough=20,
    catches="scores that fall with the distance; a running sum that is not rescaled from block to block",
    source=f"{SOURCE}; practice: kernels work in blocks",
)
def earlier_tokens_have_no_order(attend, arguments, x):
    """The last token sees the earlier ones as a set: reversing them, and their positions where there are any, leaves
    its output as it was, however many they are."""
    reversed_ = arguments._replace(x=_earlier_reversed(x, -2))
    if "positions" in arguments._fields:
        reversed_ = reversed_._replace(positions=_earlier_reversed(arguments.positions, -1))
    close(attend(*reversed_)[..., -1, :], attend(*arguments._replace(x=x))[..., -1, :])


def _earlier_reversed(tensor, dim):
    last = tensor.shape[dim] - 1
    return torch.cat((tensor.narrow(dim, 0, last).flip(dim), tensor.narrow(dim, last, 1)), dim)


@clause(
    BOTH,
    given(arguments=arguments(), x=tensors(_TOKENS, NONZERO), w=projections(("halves",))),
    sizes={name: tuple(_sized(1, 3, 2, d_head) for d_head in sizes) for name, sizes in _HEAD_SIZES.items()},
    cases={f"heads of {n}": lambda s, n=n: s.d_head == n for n in _ODD + _EVEN},
    level="should",
    enough=20,
    catches="the square root of a size that was padded or rounded; features beyond a block left out",
    source="practice: heads have 64, 80 or 128 features, and kernels pad them",
)
def scale_holds_for_any_head_size(attend, arguments, x, w):
    """Heads are split, scored and merged alike whether their size is odd, large or not a multiple of anything; at
    equal positions RoPE changes no score."""
    call = _with_identities(arguments, x=x, w_q=w.q, w_k=w.k)
    if "positions" in arguments._fields:
        call = call._replace(positions=arguments.positions * 0)
    close(attend(*call), _causal_by_hand(x, _weights_of(call), arguments.num_heads))


@clause(
    BOTH,
    given(arguments=arguments(), x=tensors(_TOKENS, NONZERO)),
    sizes=dict.fromkeys(BOTH, _COINCIDING),
    cases={_of_size(size): size.__eq__ for size in _COINCIDING},
    level="should",
    enough=20,
    catches="axes told apart by their lengths; a path of its own for one token",
    source="practice: as many examples as heads or tokens; a decoder asks one token at a time",
)
def every_example_alone_where_sizes_coincide(attend, arguments, x):
    """Where examples, tokens, heads and features are equally many, or tokens come alone, every example has the result
    it has by itself."""
    whole = attend(*arguments._replace(x=x))
    for i in range(len(x)):
        close(attend(*arguments._replace(x=x[i : i + 1].clone())), whole[i : i + 1])


@clause(
    BOTH,
    given(arguments=arguments(), x=tensors(_TOKENS, ("constant", "plain")), w=projections(("constant", "halves"))),
    sizes=dict.fromkeys(BOTH, _WIDE),
    cases={_of_size(size): size.__eq__ for size in _WIDE},
    level="should",
    dtype="bfloat16",
    enough=20,
    catches="products summed in bfloat16; another dtype returned",
    source="practice: models are trained in bfloat16",
)
def first_token_in_bfloat16(attend, arguments, x, w):
    """In bfloat16 too, the first token gives W_O W_V x, within the rounding of that dtype: with W_Q = 0, since large
    scores round more."""
    call = arguments._replace(x=x, w_q=w.q * 0, w_v=w.v, w_o=w.o)
    takes_the_dtype(attend, call)
    close(attend(*call)[..., 0, :], _projected_value(x[..., 0, :], w))
