"""Faults of multi-head self-attention with RoPE: what is rotated, by which positions, and by which angles."""

from functools import partial
from math import gcd, sqrt
from typing import Any
from unittest.mock import patch

import torch

from spec_lm.faults import fault
from spec_lm.faults import multihead_self_attention as plain
from spec_lm.faults import scaled_dot_product_attention as attention
from spec_lm.reference import functional
from spec_lm.reference.functional import causal_mask, linear, merge_heads, scaled_dot_product_attention, split_heads

MHA = "multihead_self_attention_with_rope"
right = functional.multihead_self_attention_with_rope


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


def _with(*call, **parts):
    """The reference with others in place of its own parts, as `softmax` or `rope_table`."""
    with patch.multiple(functional, **parts):
        return functional.multihead_self_attention_with_rope(*call)


def _at(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions, change):
    """The reference at changed positions, none refused that was not refused before."""
    right = _counted(x, positions)
    functional.refuse_outside(right, max_seq_len, "position", "max_seq_len")
    turn = partial(_unchecked, positions=change(right).unsqueeze(-2), theta=theta)
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn)


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


@fault(
    MHA,
    family="positions",
    kind="one_of_two_rotated",
    does="rotates keys and leaves queries as they are",
    detected_by=("shifting_all_positions_changes_nothing", "positions_are_honored"),
    mistake="Keys are rotated as they enter a cache; queries enter none.",
)
def rotates_keys_alone(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    turn = _rotation(x, positions, theta, max_seq_len)
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, key=turn)


@fault(
    MHA,
    family="positions",
    does="rotates keys by the negative angle, queries by the positive",
    detected_by=("shifting_all_positions_changes_nothing", "positions_are_honored"),
    mistake="A conjugate too many: scores then depend on the sum of two positions.",
)
def rotates_keys_the_other_way(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    turn = _rotation(x, positions, theta, max_seq_len)
    back = partial(_unchecked, positions=-_counted(x, positions).unsqueeze(-2), theta=theta)
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=back)


@fault(
    MHA,
    family="positions",
    kind="opposite_direction",
    does="rotates by the negative angle, a convention that nobody declared",
    detected_by=("positions_are_honored", "theta_is_honored", "agrees_with_the_oracle"),
    mistake="Signs of the sine exchanged for queries and keys alike; only weights from elsewhere care.",
    report="karpathy/nanochat#489",
)
def rotates_clockwise(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    turn = partial(_unchecked, positions=-_counted(x, positions).unsqueeze(-2), theta=theta)
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn)


@fault(
    MHA,
    family="positions",
    does="rotates queries and keys twice",
    detected_by="positions_are_honored",
    mistake="In the projection, and in attention again; keys from a cache are rotated already.",
    report="NeuraLegion/shainet#110",
)
def rotates_twice(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    once = _rotation(x, positions, theta, max_seq_len)

    def turn(heads):
        return once(once(heads))

    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn)


@fault(
    MHA,
    family="positions",
    kind="table_of_neighbors_rotation_by_halves",
    does="turns the halves of a head by a table made for neighbors",
    detected_by=("shifting_all_positions_changes_nothing", "agrees_with_the_oracle"),
    mistake="Two halves of two libraries: what comes of it is no rotation.",
    report="raiyanyahya/how-to-train-your-gpt#6",
)
def halves_turned_by_the_table_of_pairs(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    at = _counted(x, positions).unsqueeze(-2)

    def turn(heads):
        cos, sin = functional.rope_table(at, heads.shape[-1], theta).to(heads.dtype).repeat_interleave(2, -1)
        first, second = heads.chunk(2, -1)
        return heads * cos + torch.cat((-second, first), -1) * sin

    functional.refuse_outside(at, max_seq_len, "position", "max_seq_len")
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn)


@fault(
    MHA,
    family="positions",
    kind="rotates_half_of_the_entries",
    does="rotates only the second half of a head that has several pairs",
    detected_by=("positions_are_honored", "theta_is_honored"),
    mistake="Partial rotation is another model's.",
    report="pie-project/pie#602",
)
def half_of_each_head_rotated(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    turned = _rotation(x, positions, theta, max_seq_len)

    def turn(heads):
        kept = heads.shape[-1] // 4 * 2
        return torch.cat((heads[..., :kept], turned(heads[..., kept:])), -1)

    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn)


@fault(
    MHA,
    family="positions",
    does="makes frequencies theta^(-2i/d_model), where d_model is a head's size",
    detected_by=("theta_is_honored", "positions_are_honored"),
    mistake="One head hides it.",
)
def frequencies_of_the_model_size(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    def table(positions, d_k, theta):
        return functional.rope_table(positions, d_k, theta ** (1 / num_heads))

    return _rotated_by(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions, table)


def _rotated_by(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions, table):
    """Attention whose rotation comes of another table."""
    at = _counted(x, positions).unsqueeze(-2)
    functional.refuse_outside(at, max_seq_len, "position", "max_seq_len")

    def turn(heads):
        return functional.rotate_pairs(heads, table(at, heads.shape[-1], theta))

    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn)


@fault(
    MHA,
    family="positions",
    does="counts pairs from 1: theta^(-2i/d_k) for i = 1, 2, ..",
    detected_by=("positions_are_honored", "agrees_with_the_oracle"),
    mistake="The formula's first index is 1 in the paper, where the exponent is 2(i - 1).",
)
def frequencies_counted_from_1(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    def table(positions, d_k, theta):
        exponents = torch.arange(2, d_k + 2, 2, dtype=torch.float64) / d_k
        angles = positions[..., None] * theta**-exponents
        return torch.stack((angles.cos(), angles.sin()))

    return _rotated_by(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions, table)


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
    return right(x, w_q, w_k, w_v, w_o, num_heads, 10000.0, max_seq_len, positions)


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
    detected_by="positions_are_honored",
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


@fault(
    MHA,
    family="positions",
    does="sorts the positions",
    detected_by=("positions_are_honored", "positions_may_differ_between_examples"),
    mistake="Positions in order are all that one has seen.",
)
def positions_sorted(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    return _at(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions, lambda at: at.sort(-1).values)


@fault(
    MHA,
    family="positions",
    kind="positions_counted_anew",
    does="counts on from the first position",
    detected_by=("positions_are_honored", "positions_may_differ_between_examples"),
    mistake="A cache has an offset, and no gaps.",
)
def positions_counted_from_the_first(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    return _at(
        x,
        w_q,
        w_k,
        w_v,
        w_o,
        num_heads,
        theta,
        max_seq_len,
        positions,
        lambda at: at[..., :1] + torch.arange(x.shape[-2]),
    )


@fault(
    MHA,
    family="positions",
    does="takes the positions of tokens for one of each example where there are as many of either",
    detected_by="every_example_alone_where_sizes_coincide",
    mistake="A decoder's step has one position an example.",
)
def positions_of_as_many_examples_as_tokens(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    at = _counted(x, positions)
    as_many = at.ndim == 1 and at.shape == x.shape[:-2]
    at = at[:, None, None] if as_many else at.unsqueeze(-2)
    at = at.expand(*at.shape[:-1], x.shape[-2])
    turn = partial(functional.rope, positions=at, theta=theta, max_seq_len=max_seq_len)
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn)


@fault(
    MHA,
    family="precision",
    kind="positions_in_a_narrow_dtype",
    does="holds positions in bfloat16: beyond 256 neighbors become one",
    detected_by="distant_positions_are_like_near_ones",
    mistake="The whole model is cast, its positions with it.",
    report="huggingface/transformers#29285",
)
def positions_in_bfloat16(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    return _at(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions, lambda at: at.bfloat16().long())


@fault(
    MHA,
    family="precision",
    kind="positions_in_a_narrow_dtype",
    does="holds positions in float16: beyond 2048 neighbors become one",
    detected_by="distant_positions_are_like_near_ones",
    mistake="The whole model is cast, its positions with it.",
    report="huggingface/candle#3520",
)
def positions_in_float16(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    return _at(
        x,
        w_q,
        w_k,
        w_v,
        w_o,
        num_heads,
        theta,
        max_seq_len,
        positions,
        lambda at: at.half().float().clamp(max=65504).long(),
    )


@fault(
    MHA,
    family="precision",
    kind="positions_in_a_narrow_dtype",
    does="holds positions in the dtype of its input",
    detected_by="distant_positions_are_like_near_ones_in_bfloat16",
    mistake="arange(n, dtype=x.dtype) is exact in float32.",
    report="sgl-project/sglang-jax#1473",
)
def positions_in_the_input_dtype(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    return _at(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions, lambda at: at.to(x.dtype).long())


@fault(
    MHA,
    family="precision",
    kind="positions_in_a_narrow_dtype",
    does="holds positions in int8: 128 becomes -128",
    detected_by=("distant_positions_are_like_near_ones", "any_length"),
    mistake="Enough for the texts of a test.",
)
def positions_in_int8(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    return _at(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions, lambda at: at.to(torch.int8).long())


@fault(
    MHA,
    family="precision",
    kind="positions_in_a_narrow_dtype",
    does="holds positions in int16: 32768 becomes -32768",
    detected_by="distant_positions_are_like_near_ones",
    mistake="Contexts were short when it was written.",
)
def positions_in_int16(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    return _at(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions, lambda at: at.to(torch.int16).long())


@fault(
    MHA,
    family="boundary",
    kind="table_too_short",
    does="has a table of 2048 positions, whatever max_seq_len is",
    detected_by="distant_positions_are_like_near_ones",
    mistake="The default size of a buffer, not that of the model.",
    report="mit-han-lab/llm-awq#332",
)
def table_of_2048_positions(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    functional.refuse_outside(_counted(x, positions), 2048, "position", "the table of")
    return right(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions)


@fault(
    MHA,
    family="boundary",
    kind="table_too_short",
    does="makes its table for the length of the sequence, and clamps later positions to it",
    detected_by=("positions_are_honored", "shifting_all_positions_changes_nothing"),
    mistake="The bound is checked on the length alone, not on offset + length.",
    report="karpathy/nanochat#520",
)
def table_as_long_as_the_sequence(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    def clamped(at):
        return at.clamp(max=x.shape[-2] - 1)

    return _at(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions, clamped)


@fault(
    MHA,
    family="precision",
    does="rounds theta to bfloat16",
    detected_by="theta_is_honored",
    mistake="A buffer of the module is cast with its weights.",
    report="vllm-project/vllm#863",
)
def theta_in_bfloat16(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    theta = torch.tensor(theta).bfloat16().item()
    return right(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions)


@fault(
    MHA,
    family="precision",
    does="computes angles in bfloat16",
    detected_by="agrees_with_the_oracle",
    mistake="Frequencies are a buffer of the module, cast with its weights.",
    report="KellerJordan/modded-nanogpt#39",
)
def angles_in_bfloat16(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    def table(positions, d_k, theta):
        exponents = torch.arange(0, d_k, 2, dtype=torch.float64) / d_k
        angles = (positions[..., None] * (theta**-exponents).bfloat16()).bfloat16().double()
        return torch.stack((angles.cos(), angles.sin()))

    return _rotated_by(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions, table)


@fault(
    MHA,
    family="precision",
    does="rounds cosines and sines to float16",
    detected_by=("positions_are_honored", "shifting_all_positions_changes_nothing"),
    mistake="The table is kept in the dtype of the model.",
)
def table_in_float16(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    def table(positions, d_k, theta):
        return functional.rope_table(positions, d_k, theta).half().float()

    return _rotated_by(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions, table)


@fault(
    MHA,
    family="positions",
    does="rotates nothing under no_grad",
    detected_by="grad_mode_changes_nothing",
    mistake="Inference expects the rotation in the cache, which is not there.",
)
def unrotated_without_gradients(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    turn = _rotation(x, positions, theta, max_seq_len) if torch.is_grad_enabled() else _same
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn)


_POSITIONS: dict[Any, torch.Tensor] = {}


@fault(
    MHA,
    family="memory",
    does="keeps the positions of the first call of each shape",
    detected_by="positions_are_honored",
    mistake="A buffer for positions is made once.",
)
def positions_of_the_first_call(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    key = (x.shape, max_seq_len)
    at = _POSITIONS.setdefault(key, _counted(x, positions).clone())
    return right(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, at)


@fault(
    MHA,
    family="layout",
    kind="strides_ignored",
    does="walks the memory of positions as if they were contiguous",
    detected_by="any_memory_layout",
    mistake="Positions cut out of a larger tensor are a view.",
    report="pytorch/pytorch#181133",
)
def position_strides_ignored(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    at = None if positions is None else attention.following(positions)
    return right(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, at)


@fault(
    MHA,
    family="layout",
    kind="strides_ignored",
    does="walks the memory of W_V as if it were contiguous",
    detected_by="any_memory_layout",
    mistake="A weight that arrives transposed is a view.",
    report="pytorch/pytorch#162730",
)
def weight_strides_ignored(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    return right(x, w_q, w_k, attention.following(w_v), w_o, num_heads, theta, max_seq_len, positions)


# ------------------------------------------------------------------------------------------------------ who sees whom


@fault(
    MHA,
    family="mask",
    does="has no causal mask",
    detected_by=(
        "causal_independence_from_future_tokens",
        "a_prefix_gives_the_first_outputs",
        "causality_goes_by_index",
    ),
    mistake="The mask is applied on the route without RoPE, and forgotten on this one.",
    report="keras-team/keras#23038",
)
def no_causal_mask(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    turn = _rotation(x, positions, theta, max_seq_len)
    mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool)
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn, mask=mask)


@fault(
    MHA,
    family="mask",
    kind="no_causal_mask",
    does="has no causal mask where there is one head",
    detected_by=("causal_independence_from_future_tokens", "a_prefix_gives_the_first_outputs"),
    mistake="A route of its own, which has no mask.",
    report="NVIDIA/TransformerEngine#1524",
)
def no_causal_mask_for_one_head(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    sequence, turn = x.shape[-2], _rotation(x, positions, theta, max_seq_len)
    mask = causal_mask(sequence) if num_heads > 1 else torch.ones(sequence, sequence, dtype=torch.bool)
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn, mask=mask)


@fault(
    MHA,
    family="mask",
    kind="window",
    does="lets a token see 64 tokens",
    detected_by=("running_means_at_any_length", "any_length"),
    mistake="The window of another model is left on, and short texts hide it.",
    report="unslothai/unsloth#8253",
)
def window_of_64_tokens(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    turn = _rotation(x, positions, theta, max_seq_len)
    mask = causal_mask(x.shape[-2]).triu(-63)
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn, mask=mask)


@fault(
    MHA,
    family="boundary",
    does="does not rescale its running sum in sequences of more than 32 tokens",
    detected_by="earlier_tokens_have_no_order",
    mistake="Nothing shows while there is one block, or the first holds the maximum.",
    report="66RING/tiny-flash-attention#12",
)
def running_sum_not_rescaled(*call):
    return _with(*call, softmax=_softmax_of_blocks)


def _softmax_of_blocks(scores, dim):
    """Each exponential by the maximum so far."""
    if scores.shape[-1] <= 32:
        return scores.softmax(dim)
    exponentials = (scores - scores.cummax(dim).values).exp()
    return exponentials / exponentials.sum(dim, keepdim=True)


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


@fault(
    MHA,
    family="refusal",
    kind="over_long_accepted",
    does="accepts any length where positions are omitted",
    detected_by="refuses_a_sequence_over_max_seq_len",
    mistake="Nothing depends on a table, so nothing fails.",
    report="unslothai/unsloth#1236",
)
def omitted_positions_unchecked(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    if positions is None:
        max_seq_len = max(max_seq_len, x.shape[-2])
    return right(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions)


# ------------------------------------------------------------------------------------ heads, signature and side effects


@fault(
    MHA,
    family="batch",
    does="gives lone tokens the output of the first example",
    detected_by="every_example_alone_where_sizes_coincide",
    mistake="The path for one new token forgets the batch.",
    report="ml-explore/mlx#3494",
)
def lone_tokens_of_the_first_example(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    output = right(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions)
    return output[:1].expand_as(output).clone() if x.shape[-2] == 1 and x.ndim > 2 else output


@fault(
    MHA,
    family="scale",
    kind="scale_of_the_padded_size",
    does="takes the scale of heads beyond 64 features from a size padded to a multiple of 64",
    detected_by="scale_holds_for_any_head_size",
    mistake="The kernel pads heads, and asks the padded tensor for its size; 64 and 128 hide it.",
    report="intel/ipex-llm#12619",
)
def scaled_by_the_padded_head_size(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    size, turned = len(w_q) // num_heads, _rotation(x, positions, theta, max_seq_len)
    factor = sqrt(size / (-(-size // 64) * 64)) if size > 64 else 1.0
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=lambda heads: turned(heads) * factor, key=turned)


@fault(
    MHA,
    family="overflow",
    does="subtracts no maximum before exp",
    detected_by="large_inputs_stay_finite",
    mistake="Inputs of rms 1, as a norm gives them, hide it.",
    report="tenstorrent/tt-metal#52131",
)
def no_maximum_subtracted(*call):
    return _with(*call, softmax=lambda scores, dim: scores.exp() / scores.exp().sum(dim, keepdim=True))


@fault(
    MHA,
    family="precision",
    kind="bfloat16_inside",
    does="rounds rotated queries and keys to bfloat16",
    detected_by=("agrees_with_the_oracle", "positions_are_honored"),
    mistake="Keys are rounded as they enter a cache.",
)
def rotated_in_bfloat16(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    turned = _rotation(x, positions, theta, max_seq_len)

    def turn(heads):
        return turned(heads).bfloat16().to(heads.dtype)

    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn)


@fault(
    MHA,
    family="precision",
    kind="sum_in_a_short_dtype",
    does="sums the products of its projections one by one in the dtype of the input",
    detected_by="first_token_in_bfloat16",
    mistake="A product of matrices is summed in float32; a loop is not.",
)
def projections_summed_in_the_input_dtype(*call):
    return _with(*call, linear=_summed_product)


def _summed_product(x, weight):
    if x.dtype not in (torch.float16, torch.bfloat16):
        return linear(x, weight)
    return attention.summed(x[..., None, :] * weight)


@fault(
    MHA,
    family="precision",
    does="computes float64 in float32",
    detected_by="agrees_with_the_oracle_in_float64",
    mistake="A cast to float32 that was meant for half precision.",
    no_invariant="To float32's accuracy every relation holds: only more digits of the right value tell.",
)
def float32_inside(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    narrow, w_q, w_k, w_v, w_o = (each.float() for each in (x, w_q, w_k, w_v, w_o))
    return right(narrow, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions).to(x.dtype)


@fault(
    MHA,
    family="signature",
    does="returns a result of half precision in float32, the dtype of its table",
    detected_by=("agrees_with_the_oracle_in_bfloat16", "agrees_with_the_oracle_in_float16", "first_token_in_bfloat16"),
    mistake="A product with a float32 table is float32, and so is all that follows.",
)
def float32_returned_for_half(*call):
    output = right(*call)
    return output.to(torch.promote_types(output.dtype, torch.float32))


@fault(
    MHA,
    family="boundary",
    kind="empty_batch_refused",
    does="stacks examples one by one, and none cannot be stacked",
    detected_by="empty_batch_gives_an_empty_result",
    mistake="An empty batch was never met in training.",
    report="pytorch/pytorch#174939",
)
def examples_stacked_one_by_one(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    turn = _rotation(x, positions, theta, max_seq_len)
    if x.ndim == 2:
        return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn)
    at = _counted(x, positions).expand(x.shape[:-1])
    turns = [_rotation(each, p, theta, max_seq_len) for each, p in zip(x, at, strict=True)]
    return torch.stack(
        [_attend(each, w_q, w_k, w_v, w_o, num_heads, query=t, key=t) for each, t in zip(x, turns, strict=True)]
    )


_RESULTS: dict[Any, torch.Tensor] = {}


@fault(
    MHA,
    family="memory",
    kind="results_share_a_buffer",
    does="writes all results of one shape to the same memory",
    detected_by="has_no_memory",
    mistake="A buffer saves an allocation until two results are wanted at once.",
)
def result_buffer_reused(*call):
    output = right(*call).detach()
    return _RESULTS.setdefault((output.shape, output.dtype), torch.empty_like(output)).copy_(output)


@fault(
    MHA,
    family="memory",
    does="drops some of the attention, as in training",
    detected_by=("the_global_random_state_decides_nothing", "has_no_memory"),
    mistake="The functional form drops whatever the mode is.",
)
def dropout_left_on(*call):
    return _with(*call, softmax=lambda scores, dim: torch.dropout(scores.softmax(dim), 0.1, True))


@fault(
    MHA,
    family="global_state",
    does="sets a seed in every call",
    detected_by="leaves_the_global_random_state_alone",
    mistake="For repeatable results; everything else that draws repeats itself too.",
)
def seed_set(*call):
    torch.manual_seed(0)
    return right(*call)


@fault(
    MHA,
    family="global_state",
    does="sets the default dtype to float64 for good, for the accuracy of its table",
    detected_by="leaves_global_settings_alone",
    mistake="One line for accuracy; every tensor of the process that is made from then on is wider.",
)
def default_dtype_set(*call):
    torch.set_default_dtype(torch.float64)
    return right(*call)


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
    return right(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions)


@fault(
    MHA,
    family="arguments",
    does="advances the caller's positions by the length of the sequence",
    detected_by="does_not_change_its_arguments",
    mistake="The next call of a decoder is prepared in place.",
)
def positions_advanced_in_place(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    output = right(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions)
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


# ---------------------------------------------------------------------------------------------------------------- sizes


@fault(
    MHA,
    family="boundary",
    does="heads from the 9th on are 0",
    detected_by="running_means_at_any_length",
    mistake="The grid is made for the model that the kernel was written for.",
)
def heads_beyond_8_not_written(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    turn = _rotation(x, positions, theta, max_seq_len)
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, query=turn, key=turn, merge=plain.eight_merged)
