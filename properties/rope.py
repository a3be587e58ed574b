"""Rotary position embedding: pair i of the last axis turns by the angle position * theta^(-2i/d_k).

A pair is (x_2i, x_2i+1); an implementation that pairs x_i with x_i+d/2 declares it, and the clauses follow.
"""

import hypothesis.strategies as st
import torch

from spec_lm.conformance.clause import clause, given
from spec_lm.conformance.strategies import (
    BLOCK_SIZES,
    MODERATE,
    NONZERO,
    THETAS,
    NotJudged,
    one_of,
    positions,
    size,
    takes_the_dtype,
    tensors,
)
from spec_lm.conformance.tolerance import bit_equal, close, refuses

SOURCE = "course notes: Causal multi-head self-attention, rope"
INTERFACE = "adapter interface"
FARTHEST = 32768
LONGEST = 2**17

_TABLE = {"theta": one_of(*THETAS), "max_seq_len": size("max_seq_len")}
_X = {"x": tensors("*batch sequence d_k", MODERATE)}
_UNEVEN = ("permuted", "gapped", "shifted")
_NEIGHBORS = given(
    x=tensors("*batch sequence d_k", NONZERO), first=one_of(255, 2047, 4095, 16383, 30000), theta=one_of(*THETAS)
)
# 0 .. 29793, of numbers below 100.
_FAR = st.builds(lambda hundreds, rest: 303 * hundreds + rest, st.integers(0, 98), st.integers(0, 99))


def _pairs(t, rope):
    """The last axis as (pairs, 2), by the declared pairing."""
    if rope.conventions.get("rope_pairing", "neighbors") == "halves":
        return t.unflatten(-1, (2, -1)).mT
    return t.unflatten(-1, (-1, 2))


# ------------------------------------------------------------------------------------------------------------- rotation


@clause("rope", given(**_X, **_TABLE), catches="positions that start at 1; a scale; features reordered", source=SOURCE)
def position_0_is_the_identity(rope, x, theta, max_seq_len):
    """At position 0 nothing is rotated: the output is the input, bit for bit."""
    bit_equal(rope(x, torch.zeros(x.shape[-2], dtype=torch.long), theta, max_seq_len), x)


@clause(
    "rope",
    given(**_X, positions=positions(), **_TABLE),
    catches="cosine and sine of different angles within a pair; an attenuation",
    source=SOURCE,
)
def norms_of_pairs_are_kept(rope, x, positions, theta, max_seq_len):
    """Every pair keeps its Euclidean norm, at any position."""
    call = (x, positions, theta, max_seq_len)
    norms = rope(*call).map(lambda t: _pairs(t, rope).norm(dim=-1))
    with rope.naming(*call):
        close(norms, _pairs(x.double(), rope).norm(dim=-1))


@clause(
    "rope",
    given(**_X, positions=positions(), more=positions(), **_TABLE),
    catches="angles that are not proportional to the position",
    source=SOURCE,
)
def rotations_compose(rope, x, positions, more, theta, max_seq_len):
    """Rotating by position m and then by n is rotating by m + n: R_m R_n = R_(m + n)."""
    first = rope(x, more, theta, 2 * max_seq_len)
    second = rope(first.raw.detach().cpu(), positions, theta, 2 * max_seq_len)
    # The second rotation mixes the first one's errors within a pair.
    error = (first - first.value).map(lambda t: _pairs(t, rope).sum(-1, keepdim=True).expand_as(_pairs(t, rope)))
    both = second.map(lambda t: _pairs(t, rope)) + error
    whole = rope(x, positions + more, theta, 2 * max_seq_len)
    with rope.naming(x, positions, theta, max_seq_len):
        close(both, whole.map(lambda t: _pairs(t, rope)))


def _inner_products(y):
    """Of every token with every other."""
    return y.map(lambda t: t[..., :, None, :]).inner(y.map(lambda t: t[..., None, :, :]))


@clause(
    "rope",
    given(**_X, positions=positions(), shift=one_of(1, 7, 16), **_TABLE),
    where=lambda s: s.sequence > 1,
    catches="something that is no rotation",
    source=SOURCE,
)
def inner_products_depend_on_the_distance_alone(rope, x, positions, shift, theta, max_seq_len):
    """<R_m q, R_n k> depends on m - n alone: adding one number to all positions changes no inner product."""
    moved = rope(x, positions + shift, theta, 2 * max_seq_len)
    close(_inner_products(moved), _inner_products(rope(x, positions, theta, 2 * max_seq_len)))


@clause(
    "rope",
    given(position=_FAR, theta=one_of(*THETAS)),
    where=lambda s: s.d_k == 8,
    cases={},
    dtype="float32",
    catches="another pairing, direction or exponent; angles in half precision",
    source=SOURCE,
)
def pair_i_turns_by_position_times_theta_to_minus_2i_over_d(rope, position, theta):
    """Pair i, (x_2i, x_2i+1) unless declared otherwise, turns by phi = position * theta^(-2i/d_k) radians:
    (1, 0) becomes (cos phi, sin phi), (0, 1) becomes (-sin phi, cos phi)."""
    _basis_turns(rope, 8, position, theta)


def _basis_turns(rope, d_k, position, theta):
    call = (torch.eye(d_k), torch.full((d_k,), position), theta, FARTHEST)
    with rope.naming(*call):
        close(rope(*call), rope.exact(*call))


@clause(
    "rope",
    _NEIGHBORS,
    where=lambda s: s.sequence > 1,
    catches="positions or frequencies in half precision: neighbors far from 0 collapse",
    source=SOURCE,
)
def adjacent_positions_stay_distinct_far_from_0(rope, x, first, theta):
    """Far from position 0 adjacent positions still turn a vector differently, by as much as the equation says."""
    _neighbors_differ(rope, x, first, theta)


def _neighbors_differ(rope, x, first, theta):
    vector = x[..., :1, :].expand_as(x).contiguous()
    call = (vector, first + torch.arange(x.shape[-2]), theta, FARTHEST)
    y, exact = rope(*call), rope.exact(*call)
    with rope.naming(*call):
        close(y[..., 1:, :] - y[..., :-1, :], exact[..., 1:, :] - exact[..., :-1, :])


@clause(
    "rope",
    given(
        x=tensors("*batch sequence d_k", ("quarters", "zeros")),
        z=tensors("*batch sequence d_k", ("quarters", "zeros")),
        positions=positions(),
        **_TABLE,
    ),
    catches="vectors are normalized, or rounded to a shorter dtype, on the way",
    source=SOURCE,
)
def linear_in_x(rope, x, z, positions, theta, max_seq_len):
    """A rotation is linear: the output for x + z is the sum of the outputs for x and for z."""
    rest = (positions, theta, max_seq_len)
    close(rope(x + z, *rest), rope(x, *rest) + rope(z, *rest))


@clause(
    "rope",
    given(x=tensors("*batch sequence d_k", NONZERO), positions=positions(), **_TABLE),
    where=lambda s: s.sequence > 1,
    enough=20,
    catches="the case of one token, as in decoding, handled apart",
    source=SOURCE,
)
def a_token_alone_turns_as_among_others(rope, x, positions, theta, max_seq_len):
    """A token turns by its own position: a sequence of one token has the result of that token among others."""
    alone = rope(x[..., -1:, :].contiguous(), positions[-1:].contiguous(), theta, max_seq_len)
    close(alone, rope(x, positions, theta, max_seq_len)[..., -1:, :])


@clause(
    "rope",
    given(
        x=tensors("*batch sequence d_k", NONZERO), positions=positions(), s=one_of(2.0**20, 2.0**40, 2.0**-20), **_TABLE
    ),
    dtypes=("float32", "float64", "bfloat16"),
    enough=20,
    catches="a clamp; float16 inside",
    source=SOURCE,
)
def long_and_short_vectors_turn_alike(rope, x, positions, s, theta, max_seq_len):
    """A rotation knows no length: the output for s x is s times the output for x."""
    rest = (positions, theta, max_seq_len)
    close(rope(x * s, *rest), rope(x, *rest) * s)


# ------------------------------------------------------------------------------------------------------------ arguments


@clause(
    "rope",
    given(x=tensors("*batch sequence d_k", NONZERO), positions=positions(), theta=one_of(100.0, 500000.0, 7.0)),
    where=lambda s: s.d_k >= 4,
    catches="theta is fixed at 10000",
    source=SOURCE,
)
def theta_is_honored(rope, x, positions, theta):
    """Angles follow the theta that is given."""
    call = (x, positions, theta, 16)
    with rope.naming(*call):
        close(rope(*call), rope.exact(*call))


@clause(
    "rope",
    given(x=tensors("*batch sequence d_k", NONZERO), positions=positions(), theta=one_of(*THETAS), factor=one_of(2, 8)),
    enough=20,
    catches="frequencies that are stretched for long tables; a table kept from a call with fewer positions",
    source=f"{INTERFACE}, max_seq_len",
)
def max_seq_len_changes_no_angle(rope, x, positions, theta, factor):
    """max_seq_len bounds the positions and changes no angle: nearer ones turn as before where more are allowed, and
    R_m R_n = R_(m + n) across the shorter bound."""
    near = rope(x, positions, theta, 16)
    close(rope(x, positions, theta, 16 * factor), near, says="a larger max_seq_len changes the angles")
    call = (x, positions + 15, theta, 16 * factor)
    with rope.naming(*call):
        close(rope(*call), rope.exact(*call), says="wrong beyond the max_seq_len of an earlier call")


@clause(
    "rope",
    given(x=tensors("*batch sequence d_k", NONZERO), positions=positions(kinds=_UNEVEN), **_TABLE),
    catches="positions are counted anew, whatever was asked for",
    source=f"{INTERFACE}, token_positions",
)
def positions_are_honored(rope, x, positions, theta, max_seq_len):
    """Tokens are rotated by the positions given, which need not start at 0, be adjacent or be sorted."""
    call = (x, positions, theta, max_seq_len)
    with rope.naming(*call):
        close(rope(*call), rope.exact(*call))


@clause(
    "rope",
    given(
        x=tensors("*batch sequence d_k", NONZERO),
        positions=positions("*batch sequence", ("permuted", "gapped", "from 0")),
        **_TABLE,
    ),
    where=lambda s: len(s.batch) > 0,
    catches="positions of one example serve all",
    source=f"{INTERFACE}, token_positions (... sequence)",
)
def positions_may_differ_between_examples(rope, x, positions, theta, max_seq_len):
    """Positions with the leading axes of x rotate each example by its own."""
    call = (x, positions, theta, max_seq_len)
    with rope.naming(*call):
        close(rope(*call), rope.exact(*call))


@clause(
    "rope",
    given(**_X, positions=positions(), **_TABLE),
    cases={},
    catches="a feature without a partner is dropped or passed through",
    enough=20,
    source=f"{INTERFACE}, d_k",
)
def refuses_an_odd_size(rope, x, positions, theta, max_seq_len):
    """A vector of odd size is refused: its last entry has no partner."""
    odd = x[..., 1:].contiguous()
    refuses(lambda: rope(odd, positions, theta, max_seq_len), what=f"a last axis of {odd.shape[-1]}")


@clause(
    "rope",
    given(**_X, positions=positions(), **_TABLE),
    cases={},
    catches="a position beyond the table is wrapped, clamped or computed on the fly",
    enough=20,
    source=f"{INTERFACE}, max_seq_len",
)
def refuses_a_position_outside_max_seq_len(rope, x, positions, theta, max_seq_len):
    """A position of max_seq_len or more is refused."""
    if rope.device != "cpu":
        raise NotJudged("an index outside a table would end the device's context, and this run with it")
    positions[-1] = max_seq_len
    call = (x, positions, theta, max_seq_len)
    refuses(lambda: rope(*call), what=f"position {max_seq_len} with max_seq_len {max_seq_len}")


# ------------------------------------------------------------------------------------------- where the source is silent


@clause(
    "rope",
    given(d_k=size("d_k"), position=_FAR, theta=one_of(*THETAS)),
    where=lambda s: s.d_k >= 64,
    sizes=BLOCK_SIZES,
    cases={f"d_k {size.d_k}": size.__eq__ for size in BLOCK_SIZES["rope"] if size.d_k >= 64},
    level="should",
    dtype="float32",
    enough=20,
    catches="pairs beyond a block are not turned; the exponent of a padded size",
    source="practice: heads have 64, 96 or 128 features",
)
def every_pair_turns_at_any_size(rope, d_k, position, theta):
    """In vectors of 64 entries and more every pair turns by its own angle."""
    _basis_turns(rope, d_k, position, theta)


@clause(
    "rope",
    given(
        x=tensors("*batch sequence d_k", NONZERO), positions=positions(kinds=("gapped", "from 0", "permuted")), **_TABLE
    ),
    sizes=BLOCK_SIZES,
    cases={f"{size.batch} of {size.sequence} tokens": size.__eq__ for size in BLOCK_SIZES["rope"] if size.sequence > 3},
    level="should",
    enough=20,
    catches="tokens beyond a block are not rotated, or by positions of other tokens",
    source="practice: kernels work in blocks, and lengths are not multiples of them",
)
def reversing_tokens_and_their_positions(rope, x, positions, theta, max_seq_len):
    """Whatever their number, tokens turn by their own positions: reversing both reverses the output."""
    y = rope(x.flip(-2), positions.flip(-1), theta, max_seq_len)
    close(y, rope(x, positions, theta, max_seq_len).map(lambda t: t.flip(-2)))


@clause(
    "rope",
    _NEIGHBORS,
    where=lambda s: s.sequence > 1,
    cases={},
    level="should",
    dtype="bfloat16",
    enough=20,
    catches="positions in the dtype of the input: from 256 on, neighbors become one",
    source="practice: models are trained in bfloat16",
)
def adjacent_positions_stay_distinct_in_bfloat16(rope, x, first, theta):
    """In bfloat16 too, adjacent positions far from 0 turn a vector differently, by as much as the equation says."""
    takes_the_dtype(rope, (x, torch.arange(x.shape[-2]), theta, FARTHEST))
    _neighbors_differ(rope, x, first, theta)


@clause(
    "rope",
    _NEIGHBORS,
    where=lambda s: s.sequence > 1,
    cases={},
    level="should",
    dtype="float16",
    enough=20,
    catches="positions in the dtype of the input: from 2048 on, neighbors become one",
    source="practice: models are served in float16",
)
def adjacent_positions_stay_distinct_in_float16(rope, x, first, theta):
    """In float16 too, adjacent positions far from 0 turn a vector differently, by as much as the equation says."""
    takes_the_dtype(rope, (x, torch.arange(x.shape[-2]), theta, FARTHEST))
    _neighbors_differ(rope, x, first, theta)


@clause(
    "rope",
    given(
        x=tensors("*batch sequence d_k", NONZERO),
        positions=positions(),
        first=one_of(32760, 65500, 99900),
        theta=one_of(*THETAS),
    ),
    cases={},
    level="should",
    enough=10,
    catches="positions in 16 bits: int16 ends at 32767, float16 at 65504",
    source="practice: contexts of 100000 tokens",
)
def positions_of_a_long_context(rope, x, positions, first, theta):
    """Positions of tens of thousands turn by their angles like any other."""
    call = (x, first + positions, theta, LONGEST)
    with rope.naming(*call):
        close(rope(*call), rope.exact(*call))
