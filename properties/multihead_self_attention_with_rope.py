"""Causal multi-head self-attention whose queries and keys, not values, are rotated by the tokens' positions.

What it shares with the form without RoPE stands in `multihead_self_attention.py`: causality, heads, refusals, ranks.
"""

import torch

from spec_lm.conformance.clause import clause, given
from spec_lm.conformance.strategies import (
    MODERATE,
    NONZERO,
    THETAS,
    NotJudged,
    batched,
    one_of,
    positions,
    projections,
    size,
    takes_the_dtype,
    tensors,
)
from spec_lm.conformance.tolerance import at_most, close, refuses

ATTENTION = "multihead_self_attention_with_rope"
SOURCE = "course notes: Causal multi-head self-attention, with RoPE"
INTERFACE = "adapter interface"

_WEIGHTS = {"w": projections(), "num_heads": size("heads")}
_TABLE = {"theta": one_of(*THETAS), "max_seq_len": size("max_seq_len")}
_CALL = {"x": tensors("*batch sequence d_model", NONZERO), **_WEIGHTS, **_TABLE}
_UNEVEN = ("permuted", "gapped", "shifted")
# At each of these a narrow dtype or a usual table ends: int8, bfloat16, float16, int16; 2048, 4096.
_EDGES = {"edge": one_of(256, 128, 2048, 4096, 2**15, 2**16)}
FARTHEST = 2**17


def _several_tokens(size):
    return size.sequence > 1


def _many_angles(size):
    """With two features a head, the one angle is the position: theta has no say."""
    return size.sequence > 1 and size.d_head >= 4


def _across(edge, positions):
    """Positions moved alike, the first of them to just before the edge."""
    return positions - positions.min() + (edge - 1)


# ------------------------------------------------------------------------------------------------------------ positions


@clause(
    ATTENTION,
    given(**_CALL),
    where=_several_tokens,
    cases={},
    feature="positions omitted",
    catches="rotation is skipped when token_positions is None",
    source=f"{INTERFACE}, token_positions=None",
)
def omitted_positions_mean_0_1_2(attend, x, w, num_heads, theta, max_seq_len):
    """Positions left out mean 0, 1, 2, ...; they do not mean "no rotation"."""
    counted = torch.arange(x.shape[-2])
    omitted = attend(x, *w, num_heads, theta, max_seq_len, None)
    close(omitted, attend(x, *w, num_heads, theta, max_seq_len, counted))


@clause(
    ATTENTION,
    given(**_CALL, positions=positions(kinds=_UNEVEN)),
    where=_several_tokens,
    catches="positions are counted anew, whatever was asked for",
    source=f"{INTERFACE}, token_positions",
)
def positions_are_honored(attend, x, w, num_heads, theta, max_seq_len, positions):
    """Tokens are rotated by the positions given, which need not start at 0, be adjacent or be sorted."""
    call = (x, *w, num_heads, theta, max_seq_len, positions)
    with attend.naming(*call):
        close(attend(*call), attend.exact(*call))


@clause(
    ATTENTION,
    given(**_CALL, positions=positions("*batch sequence", ("permuted", "gapped"))),
    where=lambda s: batched(s) and s.sequence > 1,
    level="should",
    catches="positions of one example serve all, or are taken for those of the heads",
    source="practice: padded and packed batches give each example positions of its own",
)
def positions_may_differ_between_examples(attend, x, w, num_heads, theta, max_seq_len, positions):
    """Positions of shape (batch, sequence) rotate each example by its own, whether or not batch equals heads."""
    call = (x, *w, num_heads, theta, max_seq_len, positions)
    with attend.naming(*call):
        close(attend(*call), attend.exact(*call))


@clause(
    ATTENTION,
    given(**_CALL, positions=positions(), shift=one_of(1, 7, 16)),
    where=_several_tokens,
    cases={},
    catches="queries and keys are rotated differently, or positions are used beyond their differences",
    source=SOURCE,
)
def shifting_all_positions_changes_nothing(attend, x, w, num_heads, theta, max_seq_len, positions, shift):
    """Adding one number to all positions changes nothing: attention depends on their differences alone."""
    call = (x, *w, num_heads, theta, 2 * max_seq_len)
    close(attend(*call, positions + shift), attend(*call, positions))


@clause(
    ATTENTION,
    given(x=tensors("*batch sequence d_model", MODERATE), **_WEIGHTS, **_TABLE, positions=positions(kinds=_UNEVEN)),
    where=_several_tokens,
    cases={},
    catches="a causal mask that compares positions",
    source=SOURCE,
)
def causality_goes_by_index(attend, x, w, num_heads, theta, max_seq_len, positions):
    """Token i sees the tokens at indices j <= i whatever their positions: with W_Q = 0 it averages exactly these."""
    means = x.double().cumsum(-2) / torch.arange(1, x.shape[-2] + 1)[:, None]
    output = attend(x, w.q * 0, w.k, w.v, w.o, num_heads, theta, max_seq_len, positions)
    close(output, means @ (w.o.double() @ w.v.double()).T)


@clause(
    ATTENTION,
    given(**_CALL, positions=positions()),
    catches="a position beyond the table is wrapped, clamped or computed on the fly",
    enough=20,
    source=f"{INTERFACE}, max_seq_len",
    cases={},
)
def refuses_a_position_outside_max_seq_len(attend, x, w, num_heads, theta, max_seq_len, positions):
    """A position of max_seq_len or more is refused."""
    if attend.device != "cpu":
        raise NotJudged("an index outside a table would end the device's context, and this run with it")
    positions[-1] = max_seq_len
    call = (x, *w, num_heads, theta, max_seq_len, positions)
    refuses(lambda: attend(*call), what=f"position {max_seq_len} with max_seq_len {max_seq_len}")


@clause(
    ATTENTION,
    given(**_CALL),
    where=_several_tokens,
    cases={},
    level="should",
    catches="the limit is looked at where positions are given only",
    source=f"{INTERFACE}, max_seq_len: omitted positions are 0, 1, 2, ...",
    enough=20,
)
def refuses_a_sequence_over_max_seq_len(attend, x, w, num_heads, theta, max_seq_len):
    """Without positions too, a sequence of more than max_seq_len tokens is refused."""
    tokens = x.shape[-2]
    call = (x, *w, num_heads, theta, tokens - 1, None)
    refuses(lambda: attend(*call), what=f"a sequence of {tokens} with max_seq_len {tokens - 1}")


@clause(
    ATTENTION,
    given(**_CALL, positions=positions(), **_EDGES),
    where=_several_tokens,
    cases={},
    level="should",
    enough=30,
    catches="positions by way of a narrow dtype; a table shorter than max_seq_len",
    source="practice: contexts of 100000 tokens",
)
def distant_positions_are_like_near_ones(attend, x, w, num_heads, theta, max_seq_len, positions, edge):
    """Far from 0 too, attention depends on the differences of positions alone: neighbors do not collapse."""
    call = (x, *w, num_heads, theta, FARTHEST)
    close(attend(*call, _across(edge, positions)), attend(*call, positions))


@clause(
    ATTENTION,
    given(**_CALL, positions=positions(), **_EDGES),
    where=_several_tokens,
    cases={},
    level="should",
    dtype="bfloat16",
    enough=20,
    catches="positions in the dtype of the input: from 256 on, neighbors become one",
    source="practice: models are trained in bfloat16",
)
def distant_positions_are_like_near_ones_in_bfloat16(attend, x, w, num_heads, theta, max_seq_len, positions, edge):
    """In bfloat16 too, attention far from 0 depends on the differences of positions alone."""
    call = (x, *w, num_heads, theta, FARTHEST)
    takes_the_dtype(attend, (*call, None))
    close(attend(*call, _across(edge, positions)), attend(*call, positions))


# ------------------------------------------------------------------------------------------------------ what is rotated


@clause(
    ATTENTION,
    given(**_CALL, positions=positions(kinds=_UNEVEN)),
    cases={},
    catches="values are rotated too",
    source=SOURCE,
)
def values_are_not_rotated(attend, x, w, num_heads, theta, max_seq_len, positions):
    """RoPE is not applied to values: the first token, which sees itself alone, gives W_O W_V x at any position."""
    output = attend(x, *w, num_heads, theta, max_seq_len, positions)
    close(output[..., 0, :], x[..., 0, :].double() @ (w.o.double() @ w.v.double()).T)


@clause(
    ATTENTION,
    given(**_CALL, positions=positions()),
    where=lambda s: s.heads > 1 and s.sequence > 1,
    catches="frequencies run on from head to head, as where RoPE is given d_model for its size",
    source=SOURCE,
)
def every_head_gets_the_same_rotation(attend, x, w, num_heads, theta, max_seq_len, positions):
    """The head axis is a batch axis: heads with equal weights, read out with W_O = I, give equal outputs."""
    d_model = x.shape[-1]
    equal = [each[: d_model // num_heads].repeat(num_heads, 1) for each in w[:3]]
    identity = torch.eye(d_model, dtype=x.dtype)
    output = attend(x, *equal, identity, num_heads, theta, max_seq_len, positions)
    heads = output.map(lambda t: t.unflatten(-1, (num_heads, -1)))
    close(heads[..., 1:, :], heads[..., :1, :])


@clause(
    ATTENTION,
    given(**_CALL, positions=positions(kinds=_UNEVEN)),
    where=_many_angles,
    cases={},
    catches="theta is fixed, or a size of the model is taken for that of a head",
    source=SOURCE,
)
def theta_is_honored(attend, x, w, num_heads, theta, max_seq_len, positions):
    """Changing theta changes the output by as much as the equation says."""
    call = (x, *w, num_heads)
    rest = (max_seq_len, positions)
    other = 7.0
    change = attend(*call, theta, *rest) - attend(*call, other, *rest)
    with attend.naming(*call, other, *rest):
        close(change, attend.exact(*call, theta, *rest) - attend.exact(*call, other, *rest))


@clause(
    ATTENTION,
    given(**_CALL, positions=positions(kinds=_UNEVEN)),
    where=_many_angles,
    cases={},
    catches="no rotation at all",
    source=SOURCE,
)
def differs_from_attention_without_rope(attend, x, w, num_heads, theta, max_seq_len, positions):
    """Where the equations with and without RoPE differ by several rounding errors, the output is not that without."""
    call = (x, *w, num_heads, theta, max_seq_len)
    output = attend(*call, positions)
    without = attend.exact(*call, positions * 0)
    gap, distance = (attend.exact(*call, positions) - without).abs(), (output.value - without).abs()
    if bool((gap > 4 * output.error).any()):
        farthest = (distance / output.error).argmax()
        at_most(
            output.error.flatten()[farthest],
            distance.flatten()[farthest],
            says="the output is that of attention without RoPE",
        )


@clause(
    ATTENTION,
    given(**_CALL, positions=positions()),
    cases={},
    catches="a feature without a partner is dropped or passed through",
    enough=20,
    source=f"{INTERFACE}, d_k",
)
def refuses_an_odd_head_size(attend, x, w, num_heads, theta, max_seq_len, positions):
    """Heads of an odd size are refused: RoPE rotates pairs."""
    d_model = x.shape[-1] - num_heads
    smaller = [each[:d_model, :d_model].contiguous() for each in w]
    call = (x[..., :d_model].contiguous(), *smaller, num_heads, theta, max_seq_len, positions)
    refuses(lambda: attend(*call), what=f"a head size of {d_model // num_heads}")
