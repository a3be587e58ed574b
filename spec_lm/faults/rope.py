"""Faults of rope: pairs, angles, precision, positions, and what a call leaves behind."""

import numpy as np
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
    does="splits neighbors and joins the turned entries as halves: they lie in another order",
    detected_by=("position_0_is_the_identity", "agrees_with_the_oracle"),
    mistake="x[..., 0::2] and x[..., 1::2] are put together by cat, which is right for halves.",
)
def neighbors_joined_as_halves(x, positions, theta, max_seq_len):
    turned = _turned(x, *_table(positions, x.shape[-1], theta))
    return torch.cat((turned[..., ::2], turned[..., 1::2]), -1)


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


@fault(
    ROPE,
    family="positions",
    does="takes theta^(2i/d_k) for theta^(-2i/d_k)",
    detected_by=("pair_i_turns_by_position_times_theta_to_minus_2i_over_d", "theta_is_honored"),
    mistake="It multiplies where it should divide; pairs turn faster and faster instead of slower.",
)
def exponent_of_the_wrong_sign(x, positions, theta, max_seq_len):
    return _turned(x, *_table(positions, x.shape[-1], 1 / theta))


@fault(
    ROPE,
    family="positions",
    does="spaces exponents from 0 to 1, the last included",
    detected_by=("pair_i_turns_by_position_times_theta_to_minus_2i_over_d", "theta_is_honored"),
    mistake="linspace(0, 1, pairs) has its end in it, arange(0, d_k, 2) / d_k has not.",
)
def exponents_up_to_one(x, positions, theta, max_seq_len):
    exponents = torch.linspace(0, 1, x.shape[-1] // 2, dtype=torch.float64)
    angles = positions[..., None] * theta**-exponents
    return _turned(x, angles.cos(), angles.sin())


@fault(
    ROPE,
    family="boundary",
    kind="padded_head_size",
    does="computes exponents with d_k rounded up to a multiple of 16",
    detected_by=("pair_i_turns_by_position_times_theta_to_minus_2i_over_d", "theta_is_honored"),
    mistake="The head is padded for a kernel, and its size read off the padded one.",
    report="intel/ipex-llm#12619",
)
def exponents_of_a_padded_size(x, positions, theta, max_seq_len):
    cos, sin = _table(positions, -(-x.shape[-1] // 16) * 16, theta)
    pairs = x.shape[-1] // 2
    return _turned(x, cos[..., :pairs], sin[..., :pairs])


@fault(
    ROPE,
    family="positions",
    does="takes angles for degrees",
    detected_by=(
        "pair_i_turns_by_position_times_theta_to_minus_2i_over_d",
        "adjacent_positions_stay_distinct_far_from_0",
    ),
    mistake="It is a rotation all the same, a slower one.",
)
def angles_in_degrees(x, positions, theta, max_seq_len):
    angles = torch.deg2rad(positions[..., None] * theta ** -(torch.arange(0, x.shape[-1], 2).double() / x.shape[-1]))
    return _turned(x, angles.cos(), angles.sin())


@fault(
    ROPE,
    family="formula",
    does="has one sign wrong: (a cos + b sin, a sin + b cos)",
    detected_by=("norms_of_pairs_are_kept", "rotations_compose"),
    mistake="The minus sign is lost where the partner is fetched; at position 0 nothing shows.",
)
def minus_sign_lost(x, positions, theta, max_seq_len):
    cos, sin = (table.repeat_interleave(2, -1) for table in _table(positions, x.shape[-1], theta))
    partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (x * cos + partner * sin).to(x.dtype)


@fault(
    ROPE,
    family="formula",
    does="exchanges sine and cosine",
    detected_by=("position_0_is_the_identity", "rotations_compose"),
    mistake="The table holds both, and the code takes the wrong half.",
)
def sine_and_cosine_exchanged(x, positions, theta, max_seq_len):
    cos, sin = _table(positions, x.shape[-1], theta)
    return _turned(x, sin, cos)


@fault(
    ROPE,
    family="scale",
    does="pads the last pairs of its table with 1, for cosine and sine alike",
    detected_by=("position_0_is_the_identity", "norms_of_pairs_are_kept"),
    mistake="Entries that should pass through need 1 and 0.",
    report="vllm-project/vllm#55204",
)
def sine_padded_with_one(x, positions, theta, max_seq_len):
    cos, sin = _table(positions, x.shape[-1], theta)
    rotated = cos.shape[-1] - x.shape[-1] // 8
    cos[..., rotated:], sin[..., rotated:] = 1.0, 1.0
    return _turned(x, cos, sin)


@fault(
    ROPE,
    family="positions",
    does="stretches positions where max_seq_len exceeds 4096",
    detected_by=(
        "pair_i_turns_by_position_times_theta_to_minus_2i_over_d",
        "adjacent_positions_stay_distinct_far_from_0",
    ),
    mistake="An extension of the context of another model is taken over with its constants.",
    report="TransformerLensOrg/TransformerLens#910",
)
def positions_stretched_for_long_contexts(x, positions, theta, max_seq_len):
    return _turned(x, *_table(positions * min(1.0, 4096 / max_seq_len), x.shape[-1], theta))


@fault(
    ROPE,
    family="positions",
    does="stretches positions by max_seq_len / 16",
    detected_by=("max_seq_len_changes_no_angle",),
    mistake="A table of whatever size is spread over the positions of the one that was trained with.",
)
def positions_stretched_over_the_table(x, positions, theta, max_seq_len):
    return _turned(x, *_table(positions * (16 / max_seq_len), x.shape[-1], theta))


@fault(
    ROPE,
    family="overflow",
    does="clamps entries to -100..100",
    detected_by="long_and_short_vectors_turn_alike",
    mistake="A guard against overflow; queries and keys are seldom that large.",
)
def inputs_clamped(x, positions, theta, max_seq_len):
    return functional.rope(x.clamp(-100, 100), positions, theta, max_seq_len)


@fault(
    ROPE,
    family="precision",
    does="rotates in float16",
    detected_by=("long_and_short_vectors_turn_alike", "norms_of_pairs_are_kept", "agrees_with_the_oracle"),
    mistake="A kernel made for one dtype, or autocast.",
)
def float16_inside(x, positions, theta, max_seq_len):
    return functional.rope(x.half(), positions, theta, max_seq_len).to(x.dtype)


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
    kind="positions_in_a_narrow_dtype",
    does="holds positions in the dtype of the input",
    detected_by=("adjacent_positions_stay_distinct_in_bfloat16", "adjacent_positions_stay_distinct_in_float16"),
    mistake="In float32 no test sees it.",
    report="huggingface/candle#3520",
)
def positions_in_the_dtype_of_the_input(x, positions, theta, max_seq_len):
    return _turned(x, *_table(positions.to(x.dtype).long(), x.shape[-1], theta))


@fault(
    ROPE,
    family="precision",
    kind="positions_in_a_narrow_dtype",
    does="holds positions in float16",
    detected_by=("adjacent_positions_stay_distinct_far_from_0", "positions_of_a_long_context"),
    mistake="From 2048 on, neighbors become one, and beyond 65504 all is inf.",
    report="sgl-project/sglang-jax#1473",
)
def positions_in_float16(x, positions, theta, max_seq_len):
    angles = positions.half()[..., None] * theta ** -(torch.arange(0, x.shape[-1], 2).double() / x.shape[-1])
    return _turned(x, angles.cos(), angles.sin())


@fault(
    ROPE,
    family="precision",
    kind="positions_in_a_narrow_dtype",
    does="holds positions in int16",
    detected_by=("positions_of_a_long_context",),
    mistake="Enough for contexts of 32768 tokens.",
)
def positions_in_int16(x, positions, theta, max_seq_len):
    return _turned(x, *_table(positions.short(), x.shape[-1], theta))


@fault(
    ROPE,
    family="precision",
    does="holds theta in float16",
    detected_by=("theta_is_honored", "pair_i_turns_by_position_times_theta_to_minus_2i_over_d"),
    mistake="10000 fits, 500000 is inf.",
)
def theta_in_float16(x, positions, theta, max_seq_len):
    with np.errstate(over="ignore"):
        return _turned(x, *_table(positions, x.shape[-1], float(np.float16(theta))))


@fault(
    ROPE,
    family="precision",
    does="holds angles in bfloat16",
    detected_by=("adjacent_positions_stay_distinct_far_from_0", "rotations_compose", "agrees_with_the_oracle"),
    mistake="Positions and frequencies are exact, and their product is cast before cosine and sine.",
    report="huggingface/transformers#29285",
)
def angles_in_bfloat16(x, positions, theta, max_seq_len):
    exponents = torch.arange(0, x.shape[-1], 2) / x.shape[-1]
    angles = (positions[..., None] * theta**-exponents).bfloat16().double()
    return _turned(x, angles.cos(), angles.sin())


@fault(
    ROPE,
    family="precision",
    kind="bfloat16_inside",
    does="reads cosine and sine from tables in bfloat16",
    detected_by=("norms_of_pairs_are_kept", "agrees_with_the_oracle"),
    mistake="A buffer is cast with the model.",
)
def tables_in_bfloat16(x, positions, theta, max_seq_len):
    return _turned(x, *(table.bfloat16().double() for table in _table(positions, x.shape[-1], theta)))


@fault(
    ROPE,
    family="precision",
    kind="bfloat16_inside",
    does="rotates float64 in bfloat16",
    detected_by="agrees_with_the_oracle_in_float64",
    mistake="There are kernels for float32 and for half precision, and the choice knows no third dtype.",
    no_invariant="no other clause is about float64",
)
def rotates_float64_in_bfloat16(x, positions, theta, max_seq_len):
    path = rotates_in_bfloat16 if x.dtype == torch.float64 else functional.rope
    return path(x, positions, theta, max_seq_len)


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
    family="positions",
    does="lines positions up with the batch where there are as many rows as tokens",
    detected_by=("rows_of_a_batch_are_independent", "agrees_with_the_oracle"),
    mistake="The table is (sequence, 1, pairs), for tokens before examples; it broadcasts where sizes coincide.",
    report="tensorgi/TPA#4",
)
def positions_along_the_batch(x, positions, theta, max_seq_len):
    cos, sin = _table(positions, x.shape[-1], theta)
    if x.ndim == 3 and positions.ndim == 1 and x.shape[0] == x.shape[1]:
        cos, sin = cos[:, None], sin[:, None]
    return _turned(x, cos, sin)


@fault(
    ROPE,
    family="positions",
    does="reads its table by columns where there are as many tokens as pairs",
    detected_by=("positions_are_honored", "a_token_alone_turns_as_among_others"),
    mistake="Only where sizes coincide does a transposed table pass without an error.",
)
def square_table_transposed(x, positions, theta, max_seq_len):
    cos, sin = _table(positions, x.shape[-1], theta)
    square = cos.shape[-2] == cos.shape[-1]
    return _turned(x, cos.mT if square else cos, sin.mT if square else sin)


@fault(
    ROPE,
    family="boundary",
    does="returns a single head as it came",
    detected_by=("rows_of_a_batch_are_independent",),
    mistake="A view of one head is contiguous, so that the result is written to another buffer.",
    report="linkedin/Liger-Kernel#342",
)
def single_head_not_rotated(x, positions, theta, max_seq_len):
    single = x.ndim > 2 and x.shape[-3] == 1
    return x.clone() if single else functional.rope(x, positions, theta, max_seq_len)


@fault(
    ROPE,
    family="boundary",
    kind="tail_left_out",
    does="rotates no pair beyond the 32nd",
    detected_by="every_pair_turns_at_any_size",
    mistake="Heads have 64 entries in the model it was written for.",
)
def pairs_beyond_32_not_rotated(x, positions, theta, max_seq_len):
    cos, sin = _table(positions, x.shape[-1], theta)
    cos[..., 32:], sin[..., 32:] = 1.0, 0.0
    return _turned(x, cos, sin)


@fault(
    ROPE,
    family="boundary",
    kind="tail_left_out",
    does="rotates no token beyond the last whole block of 32",
    detected_by=("reversing_tokens_and_their_positions", "any_length"),
    mistake="The block loop runs over whole blocks only.",
)
def tokens_beyond_whole_blocks_not_rotated(x, positions, theta, max_seq_len):
    done = x.shape[-2] // 32 * 32 or x.shape[-2]
    y = functional.rope(x, positions, theta, max_seq_len)
    return torch.cat([y[..., :done, :], x[..., done:, :]], -2)


@fault(
    ROPE,
    family="boundary",
    does="gives tokens from the 513th on the positions of the first",
    detected_by="reversing_tokens_and_their_positions",
    mistake="The index inside a block of 512 is taken for that of the token.",
)
def positions_start_again_after_512(x, positions, theta, max_seq_len):
    repeated = positions[..., torch.arange(x.shape[-2]) % 512]
    return functional.rope(x, repeated, theta, max_seq_len)


@fault(
    ROPE,
    family="boundary",
    does="reads position 2047 for all later ones",
    detected_by=("adjacent_positions_stay_distinct_far_from_0", "positions_of_a_long_context"),
    mistake="The table has 2048 rows, whatever is asked for, and the index is clamped.",
    report="THUDM/SwissArmyTransformer#165",
)
def table_of_2048_rows(x, positions, theta, max_seq_len):
    return functional.rope(x, positions.clamp(max=2047) if max_seq_len > 2048 else positions, theta, max_seq_len)


@fault(
    ROPE,
    family="boundary",
    does="leaves all rows of a batch but the first at zero where the sequence has one token",
    detected_by="a_token_alone_turns_as_among_others",
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
    family="signature",
    does="returns float32 for half precision",
    detected_by=(
        "agrees_with_the_oracle_in_bfloat16",
        "agrees_with_the_oracle_in_float16",
        "adjacent_positions_stay_distinct_in_bfloat16",
    ),
    mistake="Widened for the rotation, never narrowed again.",
)
def float32_returned_for_half(x, positions, theta, max_seq_len):
    return functional.rope(functional.upcast(x), positions, theta, max_seq_len)


@fault(
    ROPE,
    family="arguments",
    does="gives the caller's positions one axis more",
    detected_by="does_not_change_its_arguments",
    mistake="unsqueeze_ makes no new tensor.",
)
def positions_unsqueezed_in_place(x, positions, theta, max_seq_len):
    angles = positions.unsqueeze_(-1) * theta ** -(torch.arange(0, x.shape[-1], 2).double() / x.shape[-1])
    return _turned(x, angles.cos(), angles.sin())


@fault(
    ROPE,
    family="layout",
    kind="strides_ignored",
    does="walks memory as if x were contiguous",
    detected_by="any_memory_layout",
    mistake="Heads are split without a copy; a kernel that forgets the strides rotates other heads' entries.",
    report="torch-spyre/torch-spyre#1781",
)
def strides_ignored(x, positions, theta, max_seq_len):
    return functional.rope(x.as_strided(x.shape, x.new_empty(x.shape).stride()), positions, theta, max_seq_len)


@fault(
    ROPE,
    family="layout",
    kind="strides_ignored",
    does="walks the memory of positions as if they were contiguous",
    detected_by="any_memory_layout",
    mistake="Every second position of a longer tensor is a view of it.",
)
def strides_of_positions_ignored(x, positions, theta, max_seq_len):
    packed = positions.as_strided(positions.shape, positions.new_empty(positions.shape).stride())
    return functional.rope(x, packed % max_seq_len, theta, max_seq_len)


@fault(
    ROPE,
    family="layout",
    does="leaves out the offset of x into its memory",
    detected_by="any_memory_layout",
    mistake="Keys are a slice of one fused projection, which starts where queries do.",
)
def offset_ignored(x, positions, theta, max_seq_len):
    return functional.rope(x.as_strided(x.shape, x.stride(), 0), positions, theta, max_seq_len)


@fault(
    ROPE,
    family="signature",
    kind="empty_batch_refused",
    does="rotates examples one by one and stacks them, which fails where there are none",
    detected_by="empty_batch_gives_an_empty_result",
    mistake="There is nothing to take the shape from.",
)
def examples_stacked(x, positions, theta, max_seq_len):
    if positions.ndim > 1 or x.ndim < 3:
        return functional.rope(x, positions, theta, max_seq_len)
    examples = x.reshape(-1, *x.shape[-2:])
    return torch.stack([functional.rope(each, positions, theta, max_seq_len) for each in examples]).reshape(x.shape)


@fault(
    ROPE,
    family="memory",
    kind="another_path_without_gradients",
    does="under no_grad pairs the entries i and i + d_k/2",
    detected_by="grad_mode_changes_nothing",
    mistake="The fused kernel at hand for inference follows the other pairing.",
)
def half_split_under_no_grad(x, positions, theta, max_seq_len):
    path = functional.rope if torch.is_grad_enabled() else half_split_pairing
    return path(x, positions, theta, max_seq_len)


@fault(
    ROPE,
    family="memory",
    kind="another_path_with_gradients",
    does="rotates in bfloat16 where gradients are tracked",
    detected_by="grad_mode_changes_nothing",
    mistake="Mixed precision is for training, and was put into the operator.",
)
def bfloat16_where_gradients_are_tracked(x, positions, theta, max_seq_len):
    path = rotates_in_bfloat16 if x.requires_grad else functional.rope
    return path(x, positions, theta, max_seq_len)


_RESULTS = {}


@fault(
    ROPE,
    family="memory",
    does="writes all results of a shape to one buffer",
    detected_by="has_no_memory",
    mistake="An allocation is saved, and an earlier result overwritten.",
)
def results_share_a_buffer(x, positions, theta, max_seq_len):
    buffer = _RESULTS.setdefault((x.shape, x.dtype), torch.empty_like(x))
    return buffer.copy_(functional.rope(x, positions, theta, max_seq_len).detach())


@fault(
    ROPE,
    family="global_state",
    does="shifts all positions by a random number",
    detected_by=("the_global_random_state_decides_nothing", "position_0_is_the_identity"),
    mistake="An augmentation for training; distances do not see it.",
)
def positions_shifted_at_random(x, positions, theta, max_seq_len):
    return _turned(x, *_table(positions + torch.randint(64, ()), x.shape[-1], theta))


@fault(
    ROPE,
    family="global_state",
    does="draws a dropout mask that it never applies",
    detected_by="leaves_the_global_random_state_alone",
    mistake="A rate of 0 drops nothing, and draws from the generator all the same.",
)
def unused_mask_drawn(x, positions, theta, max_seq_len):
    y = functional.rope(x, positions, theta, max_seq_len)
    return y.masked_fill(torch.rand_like(y) < 0, 0.0)


@fault(
    ROPE,
    family="global_state",
    does="sets the default dtype to float64 for good",
    detected_by="leaves_global_settings_alone",
    mistake="Angles need it; every tensor of the process that is made from then on gets it too.",
)
def default_dtype_set(x, positions, theta, max_seq_len):
    torch.set_default_dtype(torch.float64)
    return functional.rope(x, positions, theta, max_seq_len)


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


_LONGEST = {}


@fault(
    ROPE,
    family="memory",
    does="keeps the table of the first max_seq_len, and clamps positions to it",
    detected_by="max_seq_len_changes_no_angle",
    mistake="The table is made once; a longer sequence that comes later was not thought of.",
)
def table_kept_from_a_shorter_sequence(x, positions, theta, max_seq_len):
    rows = _LONGEST.setdefault((x.shape[-1], theta), max_seq_len)
    functional.rope(x, positions, theta, max_seq_len)
    return _turned(x, *_table(positions.clamp(max=rows - 1), x.shape[-1], theta))
