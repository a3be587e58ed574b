"""y = x + MultiHeadSelfAttention(RMSNorm_1(x)); z = y + SwiGLU(RMSNorm_2(y)): attention, then a feed-forward network,
each added to a stream that no norm touches.

With W_O = 0 attention adds nothing, with W_2 = 0 the feed-forward network adds nothing: so each half is seen alone.
"""

import hypothesis.strategies as st

from spec_lm.conformance import oracle
from spec_lm.conformance.bounds import exact_value
from spec_lm.conformance.clause import clause, given
from spec_lm.conformance.operators import to_numpy
from spec_lm.conformance.strategies import GENERAL, MODERATE, NONZERO, THETAS, one_of, size, tensors, weights
from spec_lm.conformance.tolerance import bit_equal, close, finite

BLOCK = "transformer_block"
SOURCE = "course notes: Transformer block"
W_O, W_2, GAIN_1, GAIN_2 = "attn.output_proj.weight", "ffn.w2.weight", "ln1.weight", "ln2.weight"

# Root mean squares from 0 to 128: near 1 a normalized stream looks like the stream itself.
_FAR_FROM_1 = ("large integers", "one large", "shifted", "tiny", "plain")


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
