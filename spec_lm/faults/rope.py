"""Faults of rope: pairs, angles, precision, positions, and what a call leaves behind."""

import torch

from spec_lm.faults import fault
from spec_lm.reference import functional

ROPE = "rope"


def _turned(x, cos, sin):
    """Neighbors (a, b) become (a cos - b sin, a sin + b cos)."""
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


def _turned_halves(x, cos, sin):
    """The same with the pairs (i, i + d_k/2)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


def _table(positions, d_k, theta):
    return functional.rope_table(positions, d_k, theta)


# ----------------------------------------------------------------------------------------------------- pairs and angles


@fault(
    ROPE,
    family="positions",
    does="pairs the entries i and i + d_k/2, a convention that nobody declared",
    detected_by=(
        "pair_i_turns_by_position_times_theta_to_minus_2i_over_d",
        "positions_are_honored",
        "theta_is_honored",
        "agrees_with_the_oracle",
    ),
    mistake="Weights trained with one pairing are loaded into the other, which has the same shapes.",
    report="karpathy/nanochat#264",
)
def half_split_pairing(x, positions, theta, max_seq_len):
    return _turned_halves(x, *_table(positions, x.shape[-1], theta))


@fault(
    ROPE,
    family="positions",
    does="lays the table out for neighbors and rotates by halves",
    detected_by=("norms_of_pairs_are_kept", "inner_products_depend_on_the_distance_alone"),
    mistake="Two pieces of code, each right by itself, follow different pairings.",
    report="raiyanyahya/how-to-train-your-gpt#6",
)
def table_of_neighbors_rotation_by_halves(x, positions, theta, max_seq_len):
    cos, sin = (table.repeat_interleave(2, -1) for table in _table(positions, x.shape[-1], theta))
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)


@fault(
    ROPE,
    family="positions",
    does="turns in the opposite direction",
    detected_by="pair_i_turns_by_position_times_theta_to_minus_2i_over_d",
    mistake="Inner products of two rotated vectors do not see the direction.",
    report="karpathy/nanochat#489",
)
def opposite_direction(x, positions, theta, max_seq_len):
    cos, sin = _table(positions, x.shape[-1], theta)
    return _turned(x, cos, -sin)


@fault(
    ROPE,
    family="positions",
    does="takes theta^(-i/d_k) for theta^(-2i/d_k)",
    detected_by=("pair_i_turns_by_position_times_theta_to_minus_2i_over_d", "theta_is_honored"),
    mistake="i counts pairs in one place and entries in the other.",
)
def exponent_without_the_factor_2(x, positions, theta, max_seq_len):
    return _turned(x, *_table(positions, x.shape[-1], theta**0.5))


@fault(
    ROPE,
    family="positions",
    does="rotates the first half of the entries only",
    detected_by="pair_i_turns_by_position_times_theta_to_minus_2i_over_d",
    mistake="A partial rotation of another model is taken over.",
    report="pie-project/pie#602",
)
def rotates_half_of_the_entries(x, positions, theta, max_seq_len):
    pairs = x.shape[-1] // 4
    cos, sin = _table(positions, x.shape[-1], theta)
    cos[..., pairs:], sin[..., pairs:] = 1.0, 0.0
    return _turned(x, cos, sin)


@fault(
    ROPE,
    family="positions",
    does="attenuates vectors the more, the farther their position",
    detected_by=("norms_of_pairs_are_kept", "inner_products_depend_on_the_distance_alone"),
    mistake="A decay with the distance is put where only the position is known.",
)
def attenuates_with_the_position(x, positions, theta, max_seq_len):
    cos, sin = _table(positions, x.shape[-1], theta)
    decay = 0.99 ** positions.double()[..., None]
    return _turned(x, cos * decay, sin * decay)


@fault(
    ROPE,
    family="positions",
    does="counts positions from 1",
    detected_by=("position_0_is_the_identity", "rotations_compose"),
    mistake="Inner products do not see a shift of all positions.",
)
def positions_start_at_1(x, positions, theta, max_seq_len):
    return _turned(x, *_table(positions + 1, x.shape[-1], theta))


@fault(
    ROPE,
    family="norm",
    does="normalizes vectors before it rotates them",
    detected_by=("linear_in_x", "norms_of_pairs_are_kept"),
    mistake="Normalized queries and keys belong to another model.",
)
def normalizes_vectors(x, positions, theta, max_seq_len):
    return functional.rope(torch.nn.functional.normalize(x, dim=-1), positions, theta, max_seq_len)


# ------------------------------------------------------------------------------------------------------------ precision


@fault(
    ROPE,
    family="precision",
    does="holds positions in bfloat16",
    detected_by=(
        "adjacent_positions_stay_distinct_far_from_0",
        "pair_i_turns_by_position_times_theta_to_minus_2i_over_d",
    ),
    mistake="The model is cast as a whole; past 256 neighboring positions become one.",
    report="huggingface/transformers#29285",
)
def positions_in_bfloat16(x, positions, theta, max_seq_len):
    return _turned(x, *_table(positions.bfloat16().long(), x.shape[-1], theta))


@fault(
    ROPE,
    family="precision",
    does="holds frequencies in float16",
    detected_by="adjacent_positions_stay_distinct_far_from_0",
    mistake="A buffer of inverse frequencies is cast with the model.",
    report="KellerJordan/modded-nanogpt#39",
)
def frequencies_in_float16(x, positions, theta, max_seq_len):
    exponents = torch.arange(0, x.shape[-1], 2) / x.shape[-1]
    angles = positions[..., None] * (theta**-exponents).half().double()
    return _turned(x, angles.cos(), angles.sin())


@fault(
    ROPE,
    family="precision",
    kind="bfloat16_inside",
    does="rotates in bfloat16 whatever the input's dtype",
    detected_by=("agrees_with_the_oracle", "linear_in_x", "norms_of_pairs_are_kept"),
    mistake="The tables are in the dtype of the model, not of the input.",
    report="NVIDIA/TransformerEngine#1245",
)
def rotates_in_bfloat16(x, positions, theta, max_seq_len):
    cos, sin = (table.bfloat16() for table in _table(positions, x.shape[-1], theta))
    return _turned(x.bfloat16(), cos, sin).to(x.dtype)


# ------------------------------------------------------------------------------------------------------------ arguments


@fault(
    ROPE,
    family="positions",
    does="uses 10000 for every theta",
    detected_by=("theta_is_honored", "agrees_with_the_oracle"),
    mistake="The default is typed in twice.",
)
def theta_is_always_10000(x, positions, theta, max_seq_len):
    return functional.rope(x, positions, 10000.0, max_seq_len)


@fault(
    ROPE,
    family="positions",
    does="uses 0, 1, 2, ... for every vector of positions",
    detected_by=("positions_are_honored", "agrees_with_the_oracle"),
    mistake="The first rows of the table are taken, as many as there are tokens.",
)
def positions_counted_anew(x, positions, theta, max_seq_len):
    return _turned(x, *_table(torch.arange(x.shape[-2]), x.shape[-1], theta))


@fault(
    ROPE,
    family="positions",
    does="uses the first example's positions for all",
    detected_by="positions_may_differ_between_examples",
    mistake="Without padding all examples have the same positions.",
)
def positions_of_the_first_example(x, positions, theta, max_seq_len):
    return _turned(x, *_table(positions.reshape(-1, positions.shape[-1])[0], x.shape[-1], theta))


@fault(
    ROPE,
    family="positions",
    does="takes the index on the second last leading axis for the position where there are two leading axes",
    detected_by="takes_any_number_of_leading_axes",
    mistake="It was written for (batch, sequence, heads, d_k) and is handed (batch, heads, sequence, d_k).",
    report="mlfoundations/open_lm#4",
)
def head_index_as_position(x, positions, theta, max_seq_len):
    if x.ndim == 4:
        positions = torch.arange(x.shape[1])[:, None].expand(x.shape[1:3])
    return _turned(x, *_table(positions, x.shape[-1], theta))


@fault(
    ROPE,
    family="positions",
    does="repeats each position for every row of the batch before the next one comes",
    detected_by=("rows_of_a_batch_are_independent", "agrees_with_the_oracle"),
    mistake="The batch is flattened row by row, and positions are repeated token by token.",
)
def positions_repeated_in_the_wrong_order(x, positions, theta, max_seq_len):
    rows = x.reshape(-1, x.shape[-1])
    repeated = positions.repeat_interleave(len(rows) // len(positions))
    return _turned(rows, *_table(repeated, x.shape[-1], theta)).reshape(x.shape)


@fault(
    ROPE,
    family="boundary",
    does="leaves all rows of a batch but the first at zero where the sequence has one token",
    detected_by="agrees_with_the_oracle",
    mistake="A launch grid leaves the batch out of the case for one token.",
    report="ml-explore/mlx#3494",
)
def zeros_beyond_the_first_row_for_one_token(x, positions, theta, max_seq_len):
    y = functional.rope(x, positions, theta, max_seq_len).clone()
    if x.ndim > 2 and x.shape[-2] == 1:
        y[1:] = 0
    return y


@fault(
    ROPE,
    family="refusal",
    does="passes the last entry of an odd vector through",
    detected_by="refuses_an_odd_size",
    mistake="x[..., ::2] is one entry longer than x[..., 1::2], and the code copes.",
)
def odd_size_accepted(x, positions, theta, max_seq_len):
    even = x.shape[-1] // 2 * 2
    if even == 0:
        return x.clone()
    return torch.cat((functional.rope(x[..., :even], positions, theta, max_seq_len), x[..., even:]), -1)


@fault(
    ROPE,
    family="refusal",
    does="clamps positions to the last one of its table",
    detected_by="refuses_a_position_outside_max_seq_len",
    mistake="A clamp avoids the crash of an index outside a table.",
)
def positions_clamped(x, positions, theta, max_seq_len):
    return functional.rope(x, positions.clamp(max=max_seq_len - 1), theta, max_seq_len)


@fault(
    ROPE,
    family="refusal",
    does="computes angles on the fly and never reads max_seq_len",
    detected_by="refuses_a_position_outside_max_seq_len",
    mistake="Without a table nothing fails by itself.",
    report="karpathy/nanochat#520",
)
def max_seq_len_ignored(x, positions, theta, max_seq_len):
    return _turned(x, *_table(positions, x.shape[-1], theta))


# --------------------------------------------------------------------------------------------------------- side effects


@fault(
    ROPE,
    family="signature",
    kind="float64_returned",
    does="returns float64, the dtype of its table",
    detected_by="keeps_its_signature",
    mistake="A product with a float64 table is float64.",
)
def returns_the_dtype_of_the_table(x, positions, theta, max_seq_len):
    return functional.rope(x, positions, theta, max_seq_len).double()


@fault(
    ROPE,
    family="arguments",
    does="rotates the caller's tensor in place",
    detected_by="does_not_change_its_arguments",
    mistake="Writing back into a query saves memory, and the query is seldom used again.",
    report="ml-explore/mlx-lm#939",
)
def rotates_in_place(x, positions, theta, max_seq_len):
    return x.copy_(functional.rope(x, positions, theta, max_seq_len))


_TABLES = {}


@fault(
    ROPE,
    family="memory",
    does="caches its table by size and forgets theta",
    detected_by="has_no_memory",
    mistake="In one model theta never changes.",
)
def table_cached_without_theta(x, positions, theta, max_seq_len):
    key = (x.shape[-1], max_seq_len)
    if key not in _TABLES:
        _TABLES[key] = _table(torch.arange(max_seq_len), x.shape[-1], theta)
    cos, sin = _TABLES[key]
    return _turned(x, cos[positions], sin[positions])
