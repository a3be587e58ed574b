"""y = x + MultiHeadSelfAttention(RMSNorm_1(x)); z = y + SwiGLU(RMSNorm_2(y)): attention, then a feed-forward network,
each added to a stream that no norm touches.

With W_O = 0 attention adds nothing, with W_2 = 0 the feed-forward network adds nothing: so each half is seen alone.
"""

import hypothesis.strategies as st
import numpy as np

from spec_lm.conformance import oracle
from spec_lm.conformance.bounds import exact_value
from spec_lm.conformance.clause import clause, given
from spec_lm.conformance.operators import to_numpy
from spec_lm.conformance.strategies import (
    BLOCK_SIZES,
    GENERAL,
    MODERATE,
    NONZERO,
    THETAS,
    Size,
    one_of,
    size,
    takes_the_dtype,
    tensors,
    weights,
)
from spec_lm.conformance.tolerance import bit_equal, close, finite, refuses

BLOCK = "transformer_block"
SOURCE = "course notes: Transformer block"
W_Q, W_O, W_2 = "attn.q_proj.weight", "attn.output_proj.weight", "ffn.w2.weight"
GAIN_1, GAIN_2 = "ln1.weight", "ln2.weight"

# Root mean squares from 0 to 128: near 1 a normalized stream looks like the stream itself.
_FAR_FROM_1 = ("large integers", "one large", "shifted", "tiny", "plain")


def _sized(batch, sequence, heads, d_head, d_ff=3, max_seq_len=16):
    sizes = {"batch": (batch,), "sequence": sequence, "heads": heads, "d_head": d_head, "d_ff": d_ff}
    return Size(**sizes, d_model=heads * d_head, vocab=1, max_seq_len=max_seq_len)


# Axes that are equally long, so that only their order tells them apart, and lone tokens in a batch.
_COINCIDING = (_sized(3, 1, 2, 2), _sized(2, 2, 2, 2), _sized(3, 3, 1, 2), _sized(3, 3, 3, 2), _sized(4, 1, 4, 4))
_WIDTHS = (*((2, n) for n in (1, 31, 32, 33, 63, 65, 130, 513)), (34, 3), (66, 5), (130, 66))
_WIDE = (
    *(_sized(1, 1, 1, d_model, d_ff) for d_model, d_ff in _WIDTHS),
    *(_sized(1, sequence, 1, 2, max_seq_len=256) for sequence in (33, 65, 130)),
)
# Positions that neither int8 nor bfloat16 can tell apart.
_DISTANT = (_sized(1, 260, 1, 2, 1, max_seq_len=512),)


def _of_size(size):
    """What a required case is called."""
    return f"{size.batch} of {size.sequence} tokens, {size.heads} heads of {size.d_head}, d_ff {size.d_ff}"


def _block(x_regimes, weight_regimes=("halves",)):
    """The arguments of a block, x of these regimes."""
    model = {"heads": size("heads"), "theta": one_of(*THETAS), "limit": size("max_seq_len")}
    return {"x": tensors("*batch sequence d_model", x_regimes), "weights": weights(weight_regimes), **model}


def _zeroed(weights, *names):
    """The weights with those named replaced by zeros."""
    return {**weights, **{name: weights[name] * 0 for name in names}}


def _attention(block, x, weights, heads, theta):
    """MultiHeadSelfAttention(RMSNorm_1(x)) in float64, with RoPE at positions 0, 1, 2, ..."""
    x, weights = to_numpy(x), to_numpy(weights)
    projections = (weights[f"attn.{name}_proj.weight"] for name in ("q", "k", "v", "output"))
    call = (oracle.rmsnorm(x, weights[GAIN_1], oracle.BLOCK_EPS), *projections, heads, theta, x.shape[-2])
    return exact_value("multihead_self_attention_with_rope", call, block.conventions)


def _feed_forward(x, weights):
    """SwiGLU(RMSNorm_2(x)) in float64."""
    x, weights = to_numpy(x), to_numpy(weights)
    normed = oracle.rmsnorm(x, weights[GAIN_2], oracle.BLOCK_EPS)
    return oracle.swiglu(normed, weights["ffn.w1.weight"], weights["ffn.w2.weight"], weights["ffn.w3.weight"])


def _several_tokens(size):
    return size.sequence > 1


@clause(
    BLOCK,
    given(**_block(GENERAL)),
    cases={},
    catches="a residual that is missing, doubled, or taken from the normalized stream",
    source=SOURCE,
)
def zero_output_weights_give_the_input(block, x, weights, heads, theta, limit):
    """With W_O and W_2 zero both halves add nothing: the block gives exactly its input."""
    bit_equal(block(x, _zeroed(weights, W_O, W_2), heads, theta, limit), x)


@clause(
    BLOCK,
    given(**_block(_FAR_FROM_1)),
    catches="attention's residual carries the normalized stream, or is missing",
    source=SOURCE,
)
def attention_is_added_to_the_unnormalized_stream(block, x, weights, heads, theta, limit):
    """With W_2 zero the block is x + MultiHeadSelfAttention(RMSNorm_1(x)), however far the rms of x is from 1."""
    branch = _attention(block, x, weights, heads, theta)
    with block.naming(x, weights, heads, theta, limit):
        close(block(x, _zeroed(weights, W_2), heads, theta, limit), to_numpy(x) + branch)


@clause(
    BLOCK,
    given(**_block(_FAR_FROM_1)),
    cases={},
    catches="the feed-forward network's residual carries the normalized stream, or is missing",
    source=SOURCE,
)
def feed_forward_is_added_to_the_unnormalized_stream(block, x, weights, heads, theta, limit):
    """With W_O zero the block is x + SwiGLU(RMSNorm_2(x)), however far the rms of x is from 1."""
    branch = _feed_forward(x, weights)
    close(block(x, _zeroed(weights, W_O), heads, theta, limit), to_numpy(x) + branch)


@clause(
    BLOCK,
    given(**_block(GENERAL)),
    cases={},
    catches="post-norm, or a half that reads the stream as it is",
    source=SOURCE,
)
def pre_norm(block, x, weights, heads, theta, limit):
    """Attention and the feed-forward network read only what their norm gives, and nothing is normalized after them:
    with both gains zero the block gives exactly its input."""
    bit_equal(block(x, _zeroed(weights, GAIN_1, GAIN_2), heads, theta, limit), x)


@clause(
    BLOCK,
    given(**_block(MODERATE)),
    cases={},
    catches="attention and feed-forward in parallel, or one norm for both",
    source=SOURCE,
)
def second_half_sees_the_first_halfs_result(block, x, weights, heads, theta, limit):
    """The feed-forward network reads the stream after attention was added: running the two halves one after the other,
    each alone, gives the whole block."""
    whole = block(x, weights, heads, theta, limit)
    first = block(x, _zeroed(weights, W_2), heads, theta, limit)
    close(block(first.raw, _zeroed(weights, W_O), heads, theta, limit), whole)


@clause(
    BLOCK,
    given(**_block(NONZERO), silent=one_of(GAIN_1, GAIN_2)),
    cases={},
    catches="one gain for both norms, or the two exchanged",
    source=SOURCE,
)
def each_norm_has_its_own_gain(block, x, weights, heads, theta, limit, silent):
    """ln1 is attention's alone and ln2 the feed-forward network's alone: a gain of zero silences its own half only."""
    other = _feed_forward(x, weights) if silent == GAIN_1 else _attention(block, x, weights, heads, theta)
    with block.naming(x, weights, heads, theta, limit):
        close(block(x, _zeroed(weights, silent), heads, theta, limit), to_numpy(x) + other)


@clause(BLOCK, given(**_block(("tiny",))), cases={}, catches="1e-6, 1e-8, or eps outside the root", source=SOURCE)
def eps_is_1e_5(block, x, weights, heads, theta, limit):
    """The eps of both norms is 1e-5, which decides where the mean square of x is no larger than that."""
    call = (x, weights, heads, theta, limit)
    with block.naming(*call):
        close(block(*call), block.exact(*call))


@clause(
    BLOCK,
    given(**_block(NONZERO)),
    where=_several_tokens,
    catches="no RoPE, another theta, or the head's number as position",
    source=SOURCE,
)
def rope_is_on(block, x, weights, heads, theta, limit):
    """Queries and keys are rotated by RoPE of the given theta, at positions 0, 1, 2, ... of the input's own tokens."""
    branch = _attention(block, x, weights, heads, theta)
    with block.naming(x, weights, heads, theta, limit):
        close(block(x, _zeroed(weights, W_2), heads, theta, limit), to_numpy(x) + branch)


@clause(
    BLOCK,
    given(**_block(MODERATE)),
    cases={},
    catches="only one length is accepted, or positions are stretched",
    source=SOURCE,
)
def max_seq_len_is_only_a_limit(block, x, weights, heads, theta, limit):
    """Any sequence up to max_seq_len is accepted, and the limit takes no part in the result."""
    filled = block(x, weights, heads, theta, x.shape[-2])
    close(block(x, weights, heads, theta, limit), filled)


@clause(
    BLOCK,
    given(**_block(MODERATE), other=tensors("*batch sequence d_model", MODERATE), cut=st.integers(0, 15)),
    where=_several_tokens,
    catches="no causal mask, or statistics taken over the sequence",
    source=SOURCE,
)
def causal_independence_from_future_tokens(block, x, weights, heads, theta, limit, other, cut):
    """Changing later tokens leaves the outputs of earlier ones bit for bit as they were."""
    kept = 1 + cut % (x.shape[-2] - 1)
    changed = x.clone()
    changed[..., kept:, :] = other[..., kept:, :]
    after = block(changed, weights, heads, theta, limit)
    bit_equal(after[..., :kept, :], block(x, weights, heads, theta, limit)[..., :kept, :])


@clause(
    BLOCK,
    given(**_block(MODERATE), cut=st.integers(0, 15)),
    where=_several_tokens,
    catches="anything that depends on the sequence's length",
    source=SOURCE,
)
def prefix_gives_the_first_outputs(block, x, weights, heads, theta, limit, cut):
    """The outputs for a prefix are the first outputs for the whole sequence."""
    kept = 1 + cut % (x.shape[-2] - 1)
    prefix = block(x[..., :kept, :], weights, heads, theta, limit)
    close(prefix, block(x, weights, heads, theta, limit)[..., :kept, :])


@clause(
    BLOCK,
    given(**_block(("large", "vast"))),
    level="should",
    cases={},
    dtypes=("float32", "float64", "bfloat16"),
    catches="a norm that overflows in a short dtype",
    source="practice: the stream grows with depth, and some of its entries reach tens of thousands",
)
def large_streams_stay_finite(block, x, weights, heads, theta, limit):
    """A stream of large entries passes both norms, and the block, without inf or NaN."""
    finite(block(x, weights, heads, theta, limit))


@clause(
    BLOCK,
    given(**_block(("large", "vast"))),
    level="should",
    cases={},
    dtype="float16",
    catches="squares in float16, which end at 256",
    source="practice: models are served in float16, and some entries of the stream reach thousands",
)
def large_half_streams_stay_finite(block, x, weights, heads, theta, limit):
    """In float16 a stream of thousands passes both norms, and the block, without inf or NaN, and comes to what it
    should."""
    call = (x, weights, heads, theta, limit)
    takes_the_dtype(block, call)
    output = block(*call)
    finite(output)
    with block.naming(*call):
        close(output, block.exact(*call))


@clause(
    BLOCK,
    given(**_block(MODERATE)),
    level="should",
    cases={},
    enough=20,
    catches="a head size that is rounded down, or heads of unequal size",
    source="course notes: Causal multi-head self-attention, d_k = d_model / h",
)
def refuses_a_number_of_heads_that_does_not_divide(block, x, weights, heads, theta, limit):
    """A number of heads that does not divide d_model is refused."""
    d_model = x.shape[-1]
    number = next(number for number in range(2, d_model + 2) if d_model % number)
    refuses(lambda: block(x, weights, number, theta, limit), what=f"num_heads {number} for d_model {d_model}")


@clause(
    BLOCK,
    given(**_block(MODERATE)),
    level="should",
    cases={},
    enough=20,
    catches="a feature without a partner is dropped or passed through",
    source="adapter interface, d_k of RoPE",
)
def refuses_an_odd_head_size(block, x, weights, heads, theta, limit):
    """Heads of an odd size are refused: RoPE rotates pairs."""
    d_model = x.shape[-1]
    refuses(lambda: block(x, weights, d_model, theta, limit), what=f"a head size of 1, num_heads {d_model}")


@clause(
    BLOCK,
    given(**_block(MODERATE)),
    where=_several_tokens,
    level="should",
    cases={},
    enough=20,
    catches="positions beyond the limit are wrapped, clamped or computed on the fly",
    source="adapter interface, max_seq_len",
)
def refuses_a_sequence_over_max_seq_len(block, x, weights, heads, theta, limit):
    """A sequence of more than max_seq_len tokens is refused."""
    tokens = x.shape[-2]
    refuses(
        lambda: block(x, weights, heads, theta, tokens - 1),
        what=f"a sequence of {tokens} with max_seq_len {tokens - 1}",
    )


# ---------------------------------------------------------------------------------------------------- whatever the size


@clause(
    BLOCK,
    given(**_block(NONZERO)),
    sizes=BLOCK_SIZES,
    cases={_of_size(size): size.__eq__ for size in BLOCK_SIZES[BLOCK]},
    level="should",
    enough=20,
    catches="a window; a mask made for a fixed length, or for whole blocks; tokens beyond a block left out",
    source="practice: kernels work in blocks, and lengths are not multiples of them",
)
def running_means_at_any_length(block, x, weights, heads, theta, limit):
    """However many tokens there are, with W_Q and W_2 zero the block adds to each of them W_O W_V times the mean of
    RMSNorm_1 over the tokens up to it."""
    held = to_numpy(weights)
    means = (
        oracle.rmsnorm(to_numpy(x), held[GAIN_1], oracle.BLOCK_EPS).cumsum(-2) / np.arange(1, x.shape[-2] + 1)[:, None]
    )
    branch = means @ (held[W_O] @ held["attn.v_proj.weight"]).T
    close(block(x, _zeroed(weights, W_Q, W_2), heads, theta, limit), to_numpy(x) + branch)


@clause(
    BLOCK,
    given(**_block(NONZERO)),
    sizes={BLOCK: _WIDE},
    cases={_of_size(size): size.__eq__ for size in _WIDE},
    level="should",
    enough=20,
    catches="hidden units, or tokens, beyond a whole block left out; a width that must be a multiple of something",
    source="course notes: Building blocks, any d_ff; practice: kernels work in blocks",
)
def feed_forward_at_any_size(block, x, weights, heads, theta, limit):
    """Whatever d_ff, d_model and the number of tokens are, with W_O zero the block is x + SwiGLU(RMSNorm_2(x))."""
    branch = _feed_forward(x, weights)
    close(block(x, _zeroed(weights, W_O), heads, theta, limit), to_numpy(x) + branch)


@clause(
    BLOCK,
    given(**_block(NONZERO)),
    sizes={BLOCK: _DISTANT},
    level="should",
    enough=4,
    catches="positions by way of a narrow dtype, in which neighbors become one",
    source="practice: sequences are longer than 256 tokens",
)
def rope_reaches_distant_positions(block, x, weights, heads, theta, limit):
    """Hundreds of tokens from the first, queries and keys are still rotated by their own positions."""
    branch = _attention(block, x, weights, heads, theta)
    with block.naming(x, weights, heads, theta, limit):
        close(block(x, _zeroed(weights, W_2), heads, theta, limit), to_numpy(x) + branch)


@clause(
    BLOCK,
    given(**_block(NONZERO)),
    sizes={BLOCK: _COINCIDING},
    cases={_of_size(size): size.__eq__ for size in _COINCIDING},
    level="should",
    enough=20,
    catches="axes told apart by their lengths; a path of its own for one token",
    source="practice: as many examples as heads or tokens; a decoder asks one token at a time",
)
def every_example_alone_where_sizes_coincide(block, x, weights, heads, theta, limit):
    """Where examples, tokens and heads are equally many, or tokens come alone, every example has the result it has by
    itself."""
    whole = block(x, weights, heads, theta, limit)
    for i in range(len(x)):
        close(block(x[i : i + 1].clone(), weights, heads, theta, limit), whole[i : i + 1])
