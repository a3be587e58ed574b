"""Faults of multi-head self-attention with RoPE: what is rotated, by which positions, and by which angles."""

from functools import partial
from math import gcd

import torch

from spec_lm.faults import fault
from spec_lm.reference import functional
from spec_lm.reference.functional import causal_mask, linear, merge_heads, scaled_dot_product_attention, split_heads

MHA = "multihead_self_attention_with_rope"


def _same(heads):
    return heads


def _attend(x, w_q, w_k, w_v, w_o, num_heads, *, query=_same, key=_same, value=_same, mask=None, merge=merge_heads):
    """Attention whose heads of queries, keys and values are each turned by a function of its own."""
    q, k, v = (split_heads(linear(x, weight), num_heads) for weight in (w_q, w_k, w_v))
    mask = causal_mask(x.shape[-2]) if mask is None else mask
    return linear(merge(scaled_dot_product_attention(query(q), key(k), value(v), mask)), w_o)


def _counted(x, positions):
    return torch.arange(x.shape[-2]) if positions is None else positions


def _rotation(x, positions, theta, max_seq_len):
    """What turns the heads rightly."""
    at = _counted(x, positions).unsqueeze(-2)
    return partial(functional.rope, positions=at, theta=theta, max_seq_len=max_seq_len)


def _unchecked(heads, positions, theta):
    """The rotation at any position, none refused."""
    return functional.rotate_pairs(heads, functional.rope_table(positions, heads.shape[-1], theta))


# ------------------------------------------------------------------------------------------------------ what is rotated


@fault(
    MHA,
    family="positions",
    does="rotates neither queries nor keys",
    detected_by=("differs_from_attention_without_rope", "positions_are_honored", "theta_is_honored"),
    mistake="The adapter of the form without RoPE is wired to both.",
)
def no_rotation(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    return _attend(x, w_q, w_k, w_v, w_o, num_heads)


@fault(
    MHA,
    family="positions",
    does="rotates values too",
    detected_by="values_are_not_rotated",
    mistake="Queries, keys and values come out of one projection and are rotated as one.",
    report="labmlai/annotated_deep_learning_paper_implementations#251",
)
def rotates_values(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    turn = _rotation(x, positions, theta, max_seq_len)
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn, value=turn)


@fault(
    MHA,
    family="positions",
    does="rotates queries and leaves keys as they are",
    detected_by=("shifting_all_positions_changes_nothing", "positions_are_honored"),
    mistake="The result of the second rotation is not assigned.",
)
def rotates_queries_alone(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    turn = _rotation(x, positions, theta, max_seq_len)
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn)


@fault(
    MHA,
    family="positions",
    does="takes the index of the head for the position",
    detected_by=("positions_are_honored", "differs_from_attention_without_rope"),
    mistake="Written for (batch, sequence, heads, d_head): within a head all tokens turn alike, as if none did.",
    report="facebookresearch/xformers#841",
)
def head_index_as_position(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    turn = partial(_unchecked, positions=torch.arange(num_heads)[:, None].expand(-1, x.shape[-2]), theta=theta)
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn)


@fault(
    MHA,
    family="positions",
    does="rotates before it splits the heads, with frequencies that run on from head to head",
    detected_by=(
        "every_head_gets_the_same_rotation",
        "permuting_heads_changes_nothing",
        "each_head_alone_is_attention_on_its_slice",
    ),
    mistake="d_model is given to RoPE as its size.",
)
def rotates_before_the_split(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    def turn(heads):
        return split_heads(functional.rope(merge_heads(heads), _counted(x, positions), theta, max_seq_len), num_heads)

    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn)


@fault(
    MHA,
    family="positions",
    does="leaves a single head unrotated",
    detected_by=("positions_are_honored", "agrees_with_the_oracle"),
    mistake="The rotation is written to a copy where one head makes the view contiguous.",
    report="linkedin/Liger-Kernel#342",
)
def one_head_unrotated(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    turn = _same if num_heads == 1 else _rotation(x, positions, theta, max_seq_len)
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn)


# ------------------------------------------------------------------------------------------------- angles and positions


@fault(
    MHA,
    family="positions",
    does="pairs the entries i and i + d_k/2 of a head, a convention that nobody declared",
    detected_by=("positions_are_honored", "theta_is_honored", "agrees_with_the_oracle"),
    mistake="Weights trained with one pairing are loaded into the other, which has the same shapes.",
    report="EleutherAI/gpt-neox#834",
)
def half_split_pairing(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    def turn(heads):
        neighbors = heads.unflatten(-1, (2, -1)).mT.flatten(-2)
        turned = _rotation(x, positions, theta, max_seq_len)(neighbors)
        return turned.unflatten(-1, (-1, 2)).mT.flatten(-2)

    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn)


@fault(
    MHA,
    family="positions",
    does="uses 10000 for every theta",
    detected_by="theta_is_honored",
    mistake="The default is typed in twice.",
)
def theta_is_always_10000(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    return functional.multihead_self_attention_with_rope(
        x, w_q, w_k, w_v, w_o, num_heads, 10000.0, max_seq_len, positions
    )


@fault(
    MHA,
    family="positions",
    does="skips the rotation when positions are omitted",
    detected_by="omitted_positions_mean_0_1_2",
    mistake="`if positions is not None` guards the rotation itself.",
)
def omitted_positions_are_not_rotated(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    turn = _same if positions is None else _rotation(x, positions, theta, max_seq_len)
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn)


@fault(
    MHA,
    family="positions",
    does="uses 0, 1, 2, ... for every vector of positions",
    detected_by=("positions_are_honored", "positions_may_differ_between_examples", "agrees_with_the_oracle"),
    mistake="Positions other than these come up with a cache or with packing only.",
)
def positions_counted_anew(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    turn = _rotation(x, None, theta, max_seq_len)
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn)


@fault(
    MHA,
    family="positions",
    does="uses the first example's positions for all",
    detected_by="positions_may_differ_between_examples",
    mistake="Without padding all examples have the same positions.",
)
def positions_of_the_first_example(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    first = _counted(x, positions).reshape(-1, x.shape[-2])[0]
    turn = _rotation(x, first, theta, max_seq_len)
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn)


@fault(
    MHA,
    family="positions",
    does="takes positions per example for positions per head where batch equals heads",
    detected_by="positions_may_differ_between_examples",
    mistake="(batch, sequence) broadcasts against (batch, heads, sequence) from the right.",
)
def positions_of_examples_for_heads(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    at = _counted(x, positions)
    at = at if at.ndim > 1 and len(at) == num_heads else at.unsqueeze(-2)
    turn = partial(functional.rope, positions=at, theta=theta, max_seq_len=max_seq_len)
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn)


@fault(
    MHA,
    family="positions",
    does="rescales theta by the length of the sequence",
    detected_by=("a_prefix_gives_the_first_outputs", "positions_are_honored"),
    mistake="A rule for sequences beyond those trained on is applied to all.",
)
def theta_follows_the_length(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    turn = _rotation(x, positions, theta * x.shape[-2], max_seq_len)
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn)


@fault(
    MHA,
    family="mask",
    does="lets a token see those at positions up to its own",
    detected_by="causality_goes_by_index",
    mistake="For positions in order the two masks are the same.",
)
def causal_by_position(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    at, turn = _counted(x, positions), _rotation(x, positions, theta, max_seq_len)
    mask = (at[..., :, None] >= at[..., None, :]).unsqueeze(-3).expand(*x.shape[:-2], num_heads, -1, -1)
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn, mask=mask)


# ------------------------------------------------------------------------------------------------------------- refusals


@fault(
    MHA,
    family="refusal",
    does="wraps positions beyond its table around to the start",
    detected_by="refuses_a_position_outside_max_seq_len",
    mistake="A ring buffer of positions wraps; positions do not.",
)
def positions_wrapped(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    turn = _rotation(x, _counted(x, positions) % max_seq_len, theta, max_seq_len)
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn)


@fault(
    MHA,
    family="refusal",
    kind="odd_size_accepted",
    does="passes the last entry of an odd head through",
    detected_by="refuses_an_odd_head_size",
    mistake="x[..., ::2] is one entry longer than x[..., 1::2], and the code copes.",
)
def odd_head_size_accepted(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    def turn(heads):
        even = heads.shape[-1] // 2 * 2
        turned = _unchecked(heads[..., :even], _counted(x, positions).unsqueeze(-2), theta) if even else heads[..., :0]
        return torch.cat((turned, heads[..., even:]), -1)

    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn)


@fault(
    MHA,
    family="refusal",
    does="computes with the greatest number of heads of even size that divides d_model",
    detected_by="refuses_a_number_of_heads_that_does_not_divide",
    mistake="Something close runs, where an error was due.",
)
def heads_that_divide(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    turn = _rotation(x, positions, theta, max_seq_len)
    return _attend(x, w_q, w_k, w_v, w_o, gcd(num_heads, x.shape[-1] // 2), query=turn, key=turn)


# ------------------------------------------------------------------------------------ heads, signature and side effects


@fault(
    MHA,
    family="axis",
    does="merges the heads in reverse order",
    detected_by=("zeroing_a_heads_values_equals_zeroing_its_output_columns", "agrees_with_the_oracle"),
    mistake="Heads are collected on a stack.",
)
def merged_in_reverse_order(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    turn = _rotation(x, positions, theta, max_seq_len)
    return _attend(
        x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn, merge=lambda heads: merge_heads(heads.flip(-3))
    )


@fault(
    MHA,
    family="axis",
    does="attends along the batch axis",
    detected_by="rows_of_a_batch_are_independent",
    mistake="A module that expects (sequence, batch, d_model) is handed (batch, sequence, d_model).",
)
def batch_and_sequence_exchanged(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    exchanged = x.transpose(0, -2)
    turn = _rotation(exchanged, None, theta, max_seq_len)
    output = _attend(exchanged, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn)
    return output.transpose(0, -2).contiguous()


@fault(
    MHA,
    family="signature",
    does="takes every axis between the first and the last for the sequence",
    detected_by="takes_none_or_more_leading_axes",
    mistake="It was written for (batch, sequence, d_model) and reshapes whatever comes to that.",
)
def reshapes_to_three_axes(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    flat = x.reshape(len(x), -1, x.shape[-1])
    at = _counted(x, positions).repeat(x.numel())[: flat.shape[-2]]
    turn = _rotation(flat, at, theta, max_seq_len)
    return _attend(flat, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn).reshape(x.shape)


@fault(
    MHA,
    family="signature",
    kind="float64_returned",
    does="returns float64, the dtype of its table",
    detected_by="keeps_its_signature",
    mistake="A product with a float64 table is float64, and so is all that follows.",
)
def returns_the_dtype_of_the_table(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    x, w_q, w_k, w_v, w_o = (each.double() for each in (x, w_q, w_k, w_v, w_o))
    return functional.multihead_self_attention_with_rope(
        x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions
    )


@fault(
    MHA,
    family="arguments",
    does="advances the caller's positions by the length of the sequence",
    detected_by="does_not_change_its_arguments",
    mistake="The next call of a decoder is prepared in place.",
)
def positions_advanced_in_place(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    output = functional.multihead_self_attention_with_rope(
        x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions
    )
    if positions is not None:
        positions += x.shape[-2]
    return output


_TABLES: dict = {}


@fault(
    MHA,
    family="memory",
    does="caches its table by size and forgets theta",
    detected_by="has_no_memory",
    mistake="In one model theta never changes.",
)
def table_cached_without_theta(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    d_head = x.shape[-1] // num_heads
    key = (d_head, max_seq_len)
    if key not in _TABLES:
        _TABLES[key] = functional.rope_table(torch.arange(max_seq_len), d_head, theta)
    table = _TABLES[key][:, _counted(x, positions).unsqueeze(-2)]
    turn = partial(functional.rotate_pairs, table=table)
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn)
