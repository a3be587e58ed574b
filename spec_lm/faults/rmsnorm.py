"""Faults of rmsnorm: eps, the mean, the axis, the gain, the width of its arithmetic, and what a call leaves behind."""

import numpy as np
import torch
import torch.nn.functional as F

from spec_lm.faults import fault
from spec_lm.reference import functional

RMSNORM = "rmsnorm"


def _mean_square(x, dim=-1):
    return x.square().mean(dim, keepdim=True)


# ------------------------------------------------------------------------------------------------------------------ eps


@fault(
    RMSNORM,
    family="norm",
    does="eps is added to the root mean square, outside the root",
    detected_by=("eps_is_inside_the_root", "unit_rms", "agrees_with_the_oracle"),
    mistake="At a root mean square near 1 the two agree to seven digits.",
    report="allenai/OLMo#281",
)
def eps_outside_the_root(x, gain, eps):
    return x / (_mean_square(x).sqrt() + eps) * gain


@fault(
    RMSNORM,
    family="norm",
    kind="another_eps",
    does="a tenth of eps is used",
    detected_by=("eps_is_inside_the_root", "unit_rms", "agrees_with_the_oracle"),
    mistake="1e-6 where the other default is 1e-5.",
)
def tenth_of_eps(x, gain, eps):
    return functional.rmsnorm(x, gain, eps / 10)


@fault(
    RMSNORM,
    family="norm",
    does="eps is added to the sum of the squares, before it is divided by their number",
    detected_by=("eps_is_inside_the_root", "agrees_with_the_oracle"),
)
def eps_in_the_sum(x, gain, eps):
    return functional.rmsnorm(x, gain, eps / x.shape[-1])


@fault(
    RMSNORM,
    family="norm",
    does="eps is a floor under the mean of the squares instead of a term",
    detected_by=("eps_is_inside_the_root", "unit_rms"),
    mistake="A clamp prevents 0 / 0 just as well.",
)
def eps_as_a_floor(x, gain, eps):
    return x / _mean_square(x).clamp(min=eps).sqrt() * gain


@fault(
    RMSNORM,
    family="norm",
    kind="another_eps",
    does="the argument eps is ignored: it is always 1e-5",
    detected_by=("scaling_input_and_eps_together_changes_nothing", "eps_is_inside_the_root"),
    mistake="The default of the class was never overwritten.",
)
def eps_ignored(x, gain, eps):
    return functional.rmsnorm(x, gain, 1e-5)


@fault(
    RMSNORM,
    family="norm",
    does="there is no eps",
    detected_by=("zero_row_gives_zero", "eps_is_inside_the_root"),
    mistake="Needless, until a row is all 0.",
)
def no_eps(x, gain, eps):
    return x / _mean_square(x).sqrt() * gain


@fault(
    RMSNORM,
    family="norm",
    kind="another_eps",
    does="an eps below 1e-5 is raised to it",
    detected_by=("eps_is_inside_the_root", "scaling_input_and_eps_together_changes_nothing"),
    mistake="A guard against a division by 0, which eps is already.",
)
def eps_raised_to_1e_5(x, gain, eps):
    return functional.rmsnorm(x, gain, max(eps, 1e-5))


@fault(
    RMSNORM,
    family="norm",
    does="rows with a root mean square below 1e-3 are left as they are",
    detected_by=("eps_is_inside_the_root", "unit_rms"),
    mistake="Another guard against a division by 0.",
)
def small_rows_left_alone(x, gain, eps):
    small = _mean_square(functional.upcast(x)) < 1e-6
    return torch.where(small, x * gain, functional.rmsnorm(x, gain, eps))


# ----------------------------------------------------------------------------------------------------- mean, root, sign


@fault(
    RMSNORM,
    family="norm",
    does="the mean is subtracted first",
    detected_by=("no_mean_is_subtracted", "agrees_with_the_oracle"),
    mistake="That is layer normalization.",
)
def mean_subtracted(x, gain, eps):
    return functional.rmsnorm(x - x.mean(-1, keepdim=True), gain, eps)


@fault(
    RMSNORM,
    family="norm",
    does="divided by the standard deviation, while the mean stays in",
    detected_by=("no_mean_is_subtracted", "unit_rms"),
    mistake="var() is not the mean of the squares.",
)
def variance_instead(x, gain, eps):
    return x / (x.var(-1, keepdim=True, unbiased=False) + eps).sqrt() * gain


@fault(
    RMSNORM,
    family="norm",
    does="divided by the root of the sum of the squares",
    detected_by=("unit_rms", "no_mean_is_subtracted"),
    mistake="The norm of the row lacks the factor 1 / sqrt(d_model).",
)
def sum_instead_of_mean(x, gain, eps):
    return x / (x.square().sum(-1, keepdim=True) + eps).sqrt() * gain


@fault(
    RMSNORM,
    family="norm",
    does="the sum of the squares is divided by d_model - 1",
    detected_by=("unit_rms", "no_mean_is_subtracted", "agrees_with_the_oracle"),
    mistake="The unbiased form of a variance, where no mean has been taken.",
)
def divided_by_one_less(x, gain, eps):
    mean_square = x.square().sum(-1, keepdim=True) / max(x.shape[-1] - 1, 1)
    return x / (mean_square + eps).sqrt() * gain


@fault(
    RMSNORM,
    family="boundary",
    does="the sum of the squares is divided by d_model rounded up to a multiple of 8",
    detected_by=("unit_rms", "agrees_with_the_oracle"),
    mistake="The padding adds nothing to the sum, and counts in the mean.",
    report="intel/ipex-llm#12619",
)
def divided_by_a_padded_width(x, gain, eps):
    padded = -(-x.shape[-1] // 8) * 8
    return x / (x.square().sum(-1, keepdim=True) / padded + eps).sqrt() * gain


@fault(
    RMSNORM,
    family="boundary",
    kind="tail_left_out",
    does="entries beyond the last whole block of 64 are left out of the mean",
    detected_by=("unit_rms_at_any_width", "any_length"),
    mistake="The block loop runs over whole blocks only, and d_model is a multiple of 64 in every real model.",
)
def tail_left_out_of_the_mean(x, gain, eps):
    kept = x.shape[-1] // 64 * 64 or x.shape[-1]
    return x / (_mean_square(x[..., :kept]) + eps).sqrt() * gain


@fault(
    RMSNORM,
    family="boundary",
    kind="tail_counted_twice",
    does="the last block of 32 is moved back to be a whole one, and counts again what it overlaps",
    detected_by=("unit_rms_at_any_width", "any_length"),
    mistake="Right for writing results; a sum must not see an entry twice.",
)
def last_block_overlaps(x, gain, eps):
    n = x.shape[-1]
    squares = x.square()
    total = squares.sum(-1, keepdim=True)
    if n > 32 and n % 32:
        total = total + squares[..., n - 32 : n // 32 * 32].sum(-1, keepdim=True)
    return x / (total / n + eps).sqrt() * gain


@fault(
    RMSNORM,
    family="boundary",
    kind="beyond_a_block_not_read",
    does="the mean sees no more than 1024 entries",
    detected_by=("unit_rms_at_any_width", "long_rows"),
    mistake="One block of threads is launched for each row, and no loop follows.",
)
def mean_of_1024_entries(x, gain, eps):
    return x / (_mean_square(x[..., :1024]) + eps).sqrt() * gain


@fault(
    RMSNORM,
    family="boundary",
    kind="beyond_a_block_not_written",
    does="rows from the 65th on are 0",
    detected_by=("unit_rms_at_any_width",),
    mistake="The grid is made for the batch of the benchmark.",
)
def rows_beyond_64_not_written(x, gain, eps):
    y = functional.rmsnorm(x, gain, eps).clone()
    if y.ndim > 1:
        y[64:] = 0
    return y


@fault(
    RMSNORM,
    family="precision",
    does="the inverse root is good to three digits",
    detected_by=("unit_rms", "agrees_with_the_oracle"),
    mistake="One Newton step after a bit trick, where an approximate instruction would need one too.",
)
def rough_inverse_root(x, gain, eps):
    mean_square = (_mean_square(x) + eps).float()
    guess = (0x5F3759DF - (mean_square.view(torch.int32) >> 1)).view(torch.float32)
    return x * (guess * (1.5 - 0.5 * mean_square * guess.square())).to(x.dtype) * gain


@fault(
    RMSNORM,
    family="formula",
    does="magnitudes are normalized, signs are lost",
    detected_by=("signs_are_kept", "agrees_with_the_oracle"),
)
def signs_lost(x, gain, eps):
    return functional.rmsnorm(x.abs(), gain, eps)


# ------------------------------------------------------------------------------------------------------------- the axis


@fault(
    RMSNORM,
    family="axis",
    does="the mean is over every axis but the first: sequence and d_model alike",
    detected_by=("takes_any_number_of_leading_axes",),
    mistake="For (batch, d_model), which the tests draw, it is the same.",
    report="bkitano/llama-from-scratch#4",
)
def over_sequence_and_features(x, gain, eps):
    axes = tuple(range(1, x.ndim)) or (-1,)
    return x / (x.square().mean(axes, keepdim=True) + eps).sqrt() * gain


@fault(
    RMSNORM,
    family="axis",
    does="the mean is over the axis before the last",
    detected_by=("rows_do_not_see_each_other", "unit_rms", "rows_of_a_batch_are_independent"),
    mistake="It broadcasts whatever the sizes.",
)
def over_the_axis_before(x, gain, eps):
    return x / (_mean_square(x, -2 if x.ndim > 1 else -1) + eps).sqrt() * gain


@fault(
    RMSNORM,
    family="axis",
    does="one mean for the whole tensor",
    detected_by=("rows_do_not_see_each_other", "rows_of_a_batch_are_independent", "unit_rms"),
    mistake="mean() without an axis.",
)
def one_mean_for_all(x, gain, eps):
    return x / (x.square().mean() + eps).sqrt() * gain


@fault(
    RMSNORM,
    family="axis",
    does="the mean's axis is dropped, so that means line up with the wrong axis",
    detected_by=("takes_any_number_of_leading_axes",),
    mistake="keepdim was forgotten; a vector needs none, and a square matrix broadcasts without complaint.",
)
def keepdim_forgotten(x, gain, eps):
    return x / (x.square().mean(-1) + eps).sqrt() * gain


@fault(
    RMSNORM,
    family="signature",
    does="several leading axes come back as one",
    detected_by=("takes_any_number_of_leading_axes",),
    mistake="Flattened for a kernel, never unflattened.",
)
def leading_axes_flattened(x, gain, eps):
    return functional.rmsnorm(x, gain, eps).flatten(0, max(x.ndim - 2, 0))


# ------------------------------------------------------------------------------------------------------------- the gain


@fault(
    RMSNORM,
    family="norm",
    does="the factor is 1 + gain",
    detected_by=("zero_gain_gives_zero", "linear_in_the_gain", "agrees_with_the_oracle"),
    mistake="Right for weights stored as offsets from 1, as some model families do.",
    report="linkedin/Liger-Kernel#74",
)
def one_plus_gain(x, gain, eps):
    return functional.rmsnorm(x, 1 + gain, eps)


@fault(
    RMSNORM,
    family="norm",
    does="the gain is applied before the root mean square is taken",
    detected_by=("linear_in_the_gain", "agrees_with_the_oracle"),
)
def gain_before_the_root(x, gain, eps):
    return functional.rmsnorm(x * gain, torch.ones_like(gain), eps)


@fault(
    RMSNORM,
    family="norm",
    does="the gain is left out",
    detected_by=("zero_gain_gives_zero", "linear_in_the_gain"),
    mistake="It is all 1 at initialization.",
)
def gain_left_out(x, gain, eps):
    return functional.rmsnorm(x, torch.ones_like(gain), eps)


@fault(
    RMSNORM,
    family="norm",
    does="the factor is gain (1 + gain)",
    detected_by=("linear_in_the_gain",),
    mistake="The offset was added at loading, and once more in the kernel.",
    report="utensils/mold#1078",
)
def gain_applied_twice(x, gain, eps):
    return functional.rmsnorm(x, gain * (1 + gain), eps)


@fault(
    RMSNORM,
    family="axis",
    does="the gain weighs rows instead of features where there are as many",
    detected_by=("rows_of_a_batch_are_independent", "agrees_with_the_oracle"),
    mistake="gain[:, None] has the right shape where sizes coincide.",
)
def gain_along_the_rows_of_a_square(x, gain, eps):
    square = x.ndim > 1 and x.shape[-2] == x.shape[-1]
    normalized = functional.rmsnorm(x, torch.ones_like(gain), eps)
    return normalized * (gain[:, None] if square else gain)


# ------------------------------------------------------------------------------------------------------------ precision


@fault(
    RMSNORM,
    family="overflow",
    does="squares are taken in the dtype of the input: in float16 they are inf from 256 on",
    detected_by=("large_half_inputs_are_normalized",),
    mistake="No test used float16, or none used activations of that size.",
    report="pytorch/pytorch#133085",
)
def squares_in_half_precision(x, gain, eps):
    return x / (_mean_square(x) + eps).sqrt() * gain


@fault(
    RMSNORM,
    family="overflow",
    does="squares are taken in float32 and summed in the dtype of the input",
    detected_by=("large_half_inputs_are_normalized",),
    mistake="In float16 it takes no large entry, only many: 256 squares of 16 are beyond 65504.",
    report="nntrainer/nntrainer#3935",
)
def sum_beyond_float16(x, gain, eps):
    wide = functional.upcast(x)
    total = wide.square().sum(-1, keepdim=True).to(x.dtype)
    return (wide / (functional.upcast(total) / x.shape[-1] + eps).sqrt() * gain).to(x.dtype)


@fault(
    RMSNORM,
    family="precision",
    kind="sum_in_a_short_dtype",
    does="squares are summed one by one in the input's dtype",
    detected_by=("unit_rms_of_long_rows_in_bfloat16", "long_rows_in_bfloat16"),
    mistake="In bfloat16, 256 + 1 is 256.",
)
def sum_in_the_dtype_of_the_input(x, gain, eps):
    total = torch.zeros_like(x[..., :1])
    for square in functional.upcast(x).square().to(x.dtype).split(1, -1):
        total = total + square
    wide = functional.upcast(x)
    return (wide / (functional.upcast(total) / x.shape[-1] + eps).sqrt() * gain).to(x.dtype)


@fault(
    RMSNORM,
    family="norm",
    kind="another_eps",
    does="eps is held in float16",
    detected_by=("eps_is_inside_the_root", "unit_rms"),
    mistake="A constant of the model is cast with it; 1e-6 has three bits left there.",
)
def eps_in_float16(x, gain, eps):
    return functional.rmsnorm(x, gain, float(np.float16(eps)))


@fault(
    RMSNORM,
    family="precision",
    kind="float16_inside",
    does="float64 is computed in float16",
    detected_by=("agrees_with_the_oracle_in_float64",),
    mistake="There are kernels for float32 and for half precision, and the choice knows no third dtype.",
    no_invariant="no other clause is about float64",
)
def float64_in_float16(x, gain, eps):
    return float16_inside(x, gain, eps) if x.dtype == torch.float64 else functional.rmsnorm(x, gain, eps)


@fault(
    RMSNORM,
    family="precision",
    does="computed in float16 inside",
    detected_by=("large_inputs_are_normalized", "agrees_with_the_oracle"),
)
def float16_inside(x, gain, eps):
    return functional.rmsnorm(x.half(), gain.half(), eps).to(x.dtype)


@fault(
    RMSNORM, family="precision", does="computed in bfloat16 inside", detected_by=("agrees_with_the_oracle", "unit_rms")
)
def bfloat16_inside(x, gain, eps):
    return functional.rmsnorm(x.bfloat16(), gain.bfloat16(), eps).to(x.dtype)


@fault(
    RMSNORM,
    family="precision",
    does="inputs are rounded to 1024 steps of the largest one in the tensor",
    detected_by=("rows_do_not_see_each_other", "rows_of_a_batch_are_independent", "agrees_with_the_oracle"),
    mistake="A scale for the whole tensor, as in 8-bit inference.",
)
def quantized_by_the_largest_entry(x, gain, eps):
    step = x.abs().max().clamp(min=1e-30) / 1024
    return functional.rmsnorm((x / step).round() * step, gain, eps)


@fault(
    RMSNORM,
    family="overflow",
    does="inputs are clamped to -8..8",
    detected_by=("scaling_input_and_eps_together_changes_nothing", "agrees_with_the_oracle"),
    mistake="A guard against overflow that float32 does not need.",
)
def inputs_clamped(x, gain, eps):
    return functional.rmsnorm(x.clamp(-8, 8), gain, eps)


@fault(
    RMSNORM,
    family="signature",
    does="half precision comes back as float32",
    detected_by=(
        "agrees_with_the_oracle_in_bfloat16",
        "agrees_with_the_oracle_in_float16",
        "unit_rms_of_long_rows_in_bfloat16",
    ),
    mistake="Widened for accuracy, never narrowed again; the next product then fails, or is slow.",
)
def float32_returned_for_half(x, gain, eps):
    return functional.rmsnorm(functional.upcast(x), functional.upcast(gain), eps)


@fault(
    RMSNORM,
    family="signature",
    does="the result stays in float64",
    detected_by=("keeps_its_signature",),
    mistake="Widened for accuracy, never narrowed again.",
)
def float64_returned(x, gain, eps):
    return functional.rmsnorm(x.double(), gain.double(), eps)


# --------------------------------------------------------------------------------------- memory, and what a call leaves


@fault(
    RMSNORM,
    family="arguments",
    does="the input is multiplied in place, in float32 only",
    detected_by=("does_not_change_its_arguments",),
    mistake="x.float() is a copy in half precision, and x itself in float32.",
    report="GeeeekExplorer/nano-vllm#170",
)
def multiplied_in_place(x, gain, eps):
    wide = x.float()
    return wide.mul_((_mean_square(wide) + eps).rsqrt()).to(x.dtype) * gain


@fault(
    RMSNORM,
    family="layout",
    does="memory is walked as if x were contiguous",
    detected_by=("any_memory_layout",),
    mistake="A kernel that takes the address and the sizes, and forgets the strides.",
    report="torch-spyre/torch-spyre#1781",
)
def strides_ignored(x, gain, eps):
    return functional.rmsnorm(x.as_strided(x.shape, x.new_empty(x.shape).stride()), gain, eps)


@fault(
    RMSNORM,
    family="layout",
    kind="strides_ignored",
    does="the gain's memory is walked as if it were contiguous",
    detected_by=("any_memory_layout",),
    mistake="Strides are taken for the input alone.",
    report="ModelTC/LightLLM#874",
)
def strides_of_the_gain_ignored(x, gain, eps):
    return functional.rmsnorm(x, gain.as_strided(gain.shape, (1,)), eps)


@fault(
    RMSNORM,
    family="layout",
    does="the offset into memory is left out",
    detected_by=("any_memory_layout",),
    mistake="The address of the storage is taken for that of the tensor.",
)
def offset_ignored(x, gain, eps):
    return functional.rmsnorm(x.as_strided(x.shape, x.stride(), 0), gain, eps)


@fault(
    RMSNORM,
    family="arguments",
    does="the gain is raised by 1 in the caller's tensor, and not put back",
    detected_by=("does_not_change_its_arguments",),
    mistake="An offset of stored weights, added on loading; here every call loads.",
)
def gain_raised_in_place(x, gain, eps):
    y = functional.rmsnorm(x, gain, eps)
    gain += 1
    return y


@fault(
    RMSNORM,
    family="signature",
    kind="empty_batch_refused",
    does="rows are computed one by one and stacked, which fails where there are none",
    detected_by=("empty_batch_gives_an_empty_result",),
    mistake="There is nothing to take the shape from.",
)
def rows_stacked(x, gain, eps):
    rows = [functional.rmsnorm(row, gain, eps) for row in x.reshape(-1, x.shape[-1])]
    return torch.stack(rows).reshape(x.shape)


@fault(
    RMSNORM,
    family="memory",
    kind="another_path_without_gradients",
    does="under no_grad eps is added outside the root",
    detected_by=("grad_mode_changes_nothing",),
    mistake="A fused kernel for inference, compared with nothing.",
)
def eps_outside_under_no_grad(x, gain, eps):
    return functional.rmsnorm(x, gain, eps) if torch.is_grad_enabled() else eps_outside_the_root(x, gain, eps)


@fault(
    RMSNORM,
    family="memory",
    kind="another_path_with_gradients",
    does="where gradients are tracked it is computed in bfloat16",
    detected_by=("grad_mode_changes_nothing",),
    mistake="Mixed precision is for training, and was put into the layer.",
)
def bfloat16_where_gradients_are_tracked(x, gain, eps):
    return bfloat16_inside(x, gain, eps) if x.requires_grad else functional.rmsnorm(x, gain, eps)


_RESULTS: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}


@fault(
    RMSNORM,
    family="memory",
    does="all results of a shape are written to one buffer",
    detected_by=("has_no_memory",),
    mistake="An allocation is saved, and an earlier result overwritten.",
)
def results_share_a_buffer(x, gain, eps):
    buffer = _RESULTS.setdefault((x.shape, x.dtype), torch.empty_like(x))
    return buffer.copy_(functional.rmsnorm(x, gain, eps).detach())


@fault(
    RMSNORM,
    family="global_state",
    does="a tenth of the entries is dropped",
    detected_by=("the_global_random_state_decides_nothing", "unit_rms"),
    mistake="dropout() drops unless it is told not to.",
)
def dropout_left_on(x, gain, eps):
    return F.dropout(functional.rmsnorm(x, gain, eps), 0.1)


@fault(
    RMSNORM,
    family="global_state",
    does="a seed of NumPy's generator is set in every call",
    detected_by=("leaves_the_global_random_state_alone",),
    mistake="For repeatable results; everything else that draws repeats itself too.",
)
def seed_set(x, gain, eps):
    np.random.seed(0)
    return functional.rmsnorm(x, gain, eps)


@fault(
    RMSNORM,
    family="global_state",
    does="subnormal numbers are flushed to 0 for good",
    detected_by=("leaves_global_settings_alone",),
    mistake="A switch for speed, which holds for all that the thread computes from then on.",
)
def subnormals_flushed(x, gain, eps):
    torch.set_flush_denormal(True)
    return functional.rmsnorm(x, gain, eps)


_EPS: dict[int, float] = {}


@fault(
    RMSNORM,
    family="memory",
    does="the eps of the first call with a d_model serves all later ones",
    detected_by=("has_no_memory",),
    mistake="Kernels, or modules, are kept by their size, and eps is not part of the key.",
)
def eps_kept_by_size(x, gain, eps):
    return functional.rmsnorm(x, gain, _EPS.setdefault(gain.shape[0], eps))


_GAINS: dict[int, torch.Tensor] = {}


@fault(
    RMSNORM,
    family="memory",
    kind="weight_kept_by_shape",
    does="the gain of the first call with a d_model serves all later ones",
    detected_by=("has_no_memory", "agrees_with_the_oracle"),
    mistake="A module is built once for each size, and its weight never loaded again.",
)
def gain_kept_by_size(x, gain, eps):
    return functional.rmsnorm(x, _GAINS.setdefault(gain.shape[0], gain.clone()), eps)


@fault(
    RMSNORM,
    family="batch",
    does="the mean of the squares is blended with that of the batch",
    detected_by=("rows_of_a_batch_are_independent", "rows_do_not_see_each_other"),
    mistake="Statistics of the batch belong to batch normalization.",
)
def batch_statistics(x, gain, eps):
    mean_square = _mean_square(x)
    return x / (0.9 * mean_square + 0.1 * mean_square.mean() + eps).sqrt() * gain


@fault(
    "rmsnorm",
    family="overflow",
    kind="inputs_clamped",
    does="clamps its input to 1e4",
    detected_by="large_inputs_are_normalized",
    mistake="A guard against overflow changes the direction of what it guards.",
)
def clamps_large_inputs(x, gain, eps):
    return functional.rmsnorm(x.clamp(-1e4, 1e4), gain, eps)
