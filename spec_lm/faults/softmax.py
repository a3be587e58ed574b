"""Faults of softmax: the maximum, the axis, the denominator, and what a call leaves behind."""

import torch
import torch.nn.functional as F

from spec_lm.faults import fault
from spec_lm.reference import functional

SOFTMAX = "softmax"


def _normalized(exponentials, dim):
    return exponentials / exponentials.sum(dim, keepdim=True)


def _exponentials(x, dim):
    """Relative to the largest of the slice, in float32 at least."""
    wide = functional.upcast(x)
    return (wide - wide.amax(dim, keepdim=True)).exp()


# --------------------------------------------------------------------------------------------------------- the maximum


@fault(
    SOFTMAX,
    family="overflow",
    does="no maximum is subtracted before exp",
    detected_by=("large_inputs_stay_finite", "shift_invariance", "agrees_with_the_oracle"),
    mistake="The formula has no maximum in it, and small inputs do not miss it.",
    report="ARM-software/ComputeLibrary#148",
)
def no_maximum_subtracted(x, dim):
    return _normalized(x.exp(), dim)


@fault(
    SOFTMAX,
    family="overflow",
    does="the maximum of the whole tensor is subtracted from every slice",
    detected_by=(
        "large_inputs_stay_finite",
        "shift_invariance",
        "slices_do_not_see_each_other",
        "rows_of_a_batch_are_independent",
    ),
    mistake="x.max() without an axis is finite too, until one slice lies far below another.",
)
def maximum_of_the_whole_tensor(x, dim):
    return _normalized((x - x.max()).exp(), dim)


@fault(
    SOFTMAX,
    family="overflow",
    does="inputs are clamped to -20..20 instead of subtracting the maximum",
    detected_by=("shift_invariance", "ratios_are_exponentials_of_differences"),
    mistake="A clamp keeps exp finite, and moves every input beyond it.",
)
def inputs_clamped(x, dim):
    return _normalized(x.clamp(-20, 20).exp(), dim)


@fault(
    SOFTMAX,
    family="boundary",
    does="a running sum is not rescaled when a larger maximum is met",
    detected_by=("permuting_entries_permutes_probabilities", "sums_to_one", "agrees_with_the_oracle"),
    mistake="The online form keeps a sum relative to the largest entry so far.",
)
def running_sum_not_rescaled(x, dim):
    largest_so_far = x.cummax(dim).values
    total = (x - largest_so_far).exp().sum(dim, keepdim=True)
    return (x - x.amax(dim, keepdim=True)).exp() / total


@fault(
    SOFTMAX,
    family="overflow",
    does="the maximum is subtracted only where an entry exceeds 100",
    detected_by=("shifts_to_the_edges_of_exp",),
    mistake="The threshold of a fast path is set by feel: float32's exp overflows from 88.8 on.",
)
def maximum_subtracted_beyond_100(x, dim):
    return functional.softmax(x, dim) if (x.abs() > 100).any() else _normalized(x.exp(), dim)


@fault(
    SOFTMAX,
    family="overflow",
    does="the largest magnitude is subtracted instead of the maximum",
    detected_by=("shift_invariance", "shifts_to_the_edges_of_exp", "large_inputs_stay_finite"),
    mistake="It is large enough, and so much too large where all entries are negative that every exponential is 0.",
)
def largest_magnitude_subtracted(x, dim):
    return _normalized((x - x.abs().amax(dim, keepdim=True)).exp(), dim)


_LARGEST = {"so far": -torch.inf}


@fault(
    SOFTMAX,
    family="memory",
    does="the running maximum is not reset between calls",
    detected_by=("has_no_memory", "shift_invariance"),
    mistake="The state of the online form lives in the module.",
)
def maximum_kept_between_calls(x, dim):
    _LARGEST["so far"] = max(_LARGEST["so far"], x.amax().item())
    return _normalized((x - _LARGEST["so far"]).exp(), dim)


@fault(
    SOFTMAX,
    family="boundary",
    does="the online form over blocks of 64 gives NaN where the first block is all -inf",
    detected_by=("whole_blocks_of_minus_infinity_get_zero",),
    mistake="The running maximum is still -inf then, and -inf - -inf is NaN.",
    report="pytorch/pytorch#127055",
)
def first_block_of_minus_infinity(x, dim):
    wide = functional.upcast(x)
    blocks = wide.split(64, dim)
    largest = torch.full_like(wide.narrow(dim, 0, 1), -torch.inf)
    total = torch.zeros_like(largest)
    for block in blocks:
        larger = largest.maximum(block.amax(dim, keepdim=True))
        total = total * (largest - larger).exp() + (block - larger).exp().sum(dim, keepdim=True)
        largest = larger
    return ((wide - largest).exp() / total).to(x.dtype)


# ------------------------------------------------------------------------------------------------------------ the axis


@fault(
    SOFTMAX,
    family="axis",
    does="the axis is ignored: it is always the last one",
    detected_by=("any_dim", "sums_to_one", "agrees_with_the_oracle"),
)
def always_the_last_axis(x, dim):
    return functional.softmax(x, -1)


@fault(
    SOFTMAX,
    family="axis",
    does="an axis counted from the end is counted as if x were a matrix",
    detected_by=("takes_any_number_of_leading_axes",),
    mistake="Axis 1 is the last axis in the one test that was run.",
    report="labmlai/annotated_deep_learning_paper_implementations#146",
)
def axis_of_a_matrix(x, dim):
    return functional.softmax(x, min(dim + 2, x.ndim - 1) if dim < 0 else dim)


@fault(
    SOFTMAX,
    family="axis",
    does="normalized over the axis before the one asked for",
    detected_by=("sums_to_one", "ratios_are_exponentials_of_differences", "rows_of_a_batch_are_independent"),
    mistake="Attention weights normalized over queries have the right shape where queries == keys.",
    report="PetrochukM/PyTorch-NLP#2",
)
def over_the_axis_before(x, dim):
    return functional.softmax(x, (dim % x.ndim - 1) % x.ndim)


@fault(
    SOFTMAX,
    family="axis",
    does="one sum for the whole tensor",
    detected_by=("sums_to_one", "slices_do_not_see_each_other", "rows_of_a_batch_are_independent"),
    mistake="sum() without an axis broadcasts without complaint.",
)
def one_sum_for_all(x, dim):
    exponentials = (x - x.amax(dim, keepdim=True)).exp()
    return exponentials / exponentials.sum()


@fault(
    SOFTMAX,
    family="axis",
    does="the sum's axis is dropped, so that sums line up with the wrong axis",
    detected_by=("takes_any_number_of_leading_axes", "one_element_axis_gives_one"),
    mistake="keepdim was forgotten; a vector needs none, and a square matrix broadcasts without complaint.",
)
def keepdim_forgotten(x, dim):
    exponentials = _exponentials(x, dim)
    return (exponentials / exponentials.sum(dim)).to(x.dtype)


@fault(
    SOFTMAX,
    family="axis",
    does="a square matrix is normalized over its first axis",
    detected_by="slices_do_not_see_each_other",
    mistake="Where sizes coincide no shape tells that the matrix was transposed for a kernel, and never back.",
)
def first_axis_of_a_square_matrix(x, dim):
    square = x.ndim == 2 and x.shape[0] == x.shape[1]
    return functional.softmax(x, 0 if square else dim)


@fault(
    SOFTMAX,
    family="axis",
    does="probabilities come back sorted",
    detected_by=("permuting_entries_permutes_probabilities", "order_is_kept", "agrees_with_the_oracle"),
    mistake="Sorted for a cut of small ones, and never scattered back.",
)
def probabilities_sorted(x, dim):
    return functional.softmax(x, dim).sort(dim, descending=True).values


# ----------------------------------------------------------------------------------------------------- the denominator


@fault(
    SOFTMAX,
    family="formula",
    does="1e-6 is added to the denominator",
    detected_by=("one_element_axis_gives_one", "agrees_with_the_oracle"),
    mistake="A guard against division by 0, which cannot happen: the largest entry contributes 1.",
)
def epsilon_in_the_denominator(x, dim):
    exponentials = (x - x.amax(dim, keepdim=True)).exp()
    return exponentials / (exponentials.sum(dim, keepdim=True) + 1e-6)


@fault(
    SOFTMAX,
    family="formula",
    does="1e-6 is added to every exponential, so that none is 0",
    detected_by=("minus_infinity_gets_zero", "ratios_are_exponentials_of_differences"),
    mistake="Done for the sake of a later logarithm; masked entries come back.",
)
def small_share_for_all(x, dim):
    return _normalized((x - x.amax(dim, keepdim=True)).exp() + 1e-6, dim)


@fault(
    SOFTMAX,
    family="formula",
    does="1 is added to the denominator",
    detected_by=("sums_to_one", "one_element_axis_gives_one", "shift_invariance"),
    mistake="The variant that may attend to nothing is another function.",
)
def one_more_in_the_denominator(x, dim):
    largest = x.amax(dim, keepdim=True).clamp(min=0)
    exponentials = (x - largest).exp()
    return exponentials / (exponentials.sum(dim, keepdim=True) + (-largest).exp())


@fault(
    SOFTMAX,
    family="boundary",
    kind="tail_left_out",
    does="the last entries are left out of the sum where the axis is not a multiple of 4",
    detected_by=("permuting_entries_permutes_probabilities", "sums_to_one_at_any_length"),
    mistake="The block loop runs over whole blocks only.",
    report="66RING/tiny-flash-attention#12",
)
def tail_left_out_of_the_sum(x, dim):
    exponentials = (x - x.amax(dim, keepdim=True)).exp()
    whole_blocks = x.shape[dim] // 4 * 4 or x.shape[dim]
    return exponentials / exponentials.narrow(dim, 0, whole_blocks).sum(dim, keepdim=True)


@fault(
    SOFTMAX,
    family="boundary",
    kind="padding_takes_part",
    does="the axis is padded to a multiple of 4 with zeros, which take part",
    detected_by=("sums_to_one", "one_element_axis_gives_one", "shift_invariance"),
    mistake="Padding must be -inf: exp(0) is 1.",
    report="66RING/tiny-flash-attention#12",
)
def padded_with_zeros(x, dim):
    missing = -x.shape[dim] % 4
    padding = x.new_zeros([missing if axis == dim % x.ndim else n for axis, n in enumerate(x.shape)])
    return functional.softmax(torch.cat([x, padding], dim), dim).narrow(dim, 0, x.shape[dim])


@fault(
    SOFTMAX,
    family="boundary",
    kind="tail_counted_twice",
    does="the last block of 32 is moved back to be a whole one, and counts again what it overlaps",
    detected_by=("sums_to_one_at_any_length", "any_length"),
    mistake="Right for a maximum, and for writing results; a sum must not see an entry twice.",
)
def last_block_overlaps(x, dim):
    exponentials, n = _exponentials(x, dim), x.shape[dim]
    total = exponentials.sum(dim, keepdim=True)
    if n > 32 and n % 32:
        total = total + exponentials.narrow(dim, n - 32, 32 - n % 32).sum(dim, keepdim=True)
    return (exponentials / total).to(x.dtype)


@fault(
    SOFTMAX,
    family="boundary",
    kind="padding_takes_part",
    does="an axis of whole blocks of 64 gets one block of zeros more",
    detected_by=("sums_to_one_at_any_length",),
    mistake="n // 64 + 1 blocks are right but for multiples of 64.",
)
def one_block_too_many(x, dim):
    missing = 64 if x.shape[dim] % 64 == 0 else 0
    padding = x.new_zeros([missing if axis == dim % x.ndim else n for axis, n in enumerate(x.shape)])
    return functional.softmax(torch.cat([x, padding], dim), dim).narrow(dim, 0, x.shape[dim])


@fault(
    SOFTMAX,
    family="boundary",
    kind="last_of_whole_blocks_left_out",
    does="the sum of whole blocks of 128 leaves the last entry out",
    detected_by=("sums_to_one_at_any_length", "any_length"),
    mistake="The rest of the last block is n % 128, which is 0 for a whole one, and its end is counted from that.",
)
def last_entry_of_whole_blocks_left_out(x, dim):
    n = x.shape[dim]
    return _over_the_first(n - (n % 128 == 0), x, dim)


def _over_the_first(seen, x, dim):
    """The sum in the denominator sees so many entries."""
    exponentials = _exponentials(x, dim)
    return (exponentials / exponentials.narrow(dim, 0, seen).sum(dim, keepdim=True)).to(x.dtype)


@fault(
    SOFTMAX,
    family="boundary",
    kind="beyond_a_block_not_read",
    does="the sum sees no more than 512 entries",
    detected_by=("sums_to_one_at_any_length", "long_rows"),
    mistake="One block of threads is launched for each slice, and no loop follows.",
)
def sum_of_512_entries(x, dim):
    return _over_the_first(min(512, x.shape[dim]), x, dim)


# -------------------------------------------------------------------------------------------------- another function


@fault(
    SOFTMAX,
    family="formula",
    does="the logarithm of the probabilities is returned",
    detected_by=("entries_are_probabilities", "sums_to_one", "minus_infinity_gets_zero"),
    mistake="log_softmax is what a loss wants.",
)
def logarithm_returned(x, dim):
    return x - x.logsumexp(dim, keepdim=True)


@fault(
    SOFTMAX,
    family="formula",
    does="exponentials are not divided by their sum",
    detected_by=("entries_are_probabilities", "sums_to_one"),
)
def not_normalized(x, dim):
    return x.exp()


@fault(
    SOFTMAX,
    family="formula",
    does="a sigmoid of each entry by itself",
    detected_by=("sums_to_one", "one_element_axis_gives_one", "ratios_are_exponentials_of_differences"),
)
def sigmoid_instead(x, dim):
    return x.sigmoid()


@fault(
    SOFTMAX,
    family="formula",
    does="the smallest input gets the largest probability",
    detected_by=("order_is_kept", "agrees_with_the_oracle"),
    mistake="maximum - x in place of x - maximum.",
)
def sign_reversed(x, dim):
    return functional.softmax(-x, dim)


@fault(
    SOFTMAX, family="formula", does="magnitudes decide, signs do not", detected_by=("order_is_kept", "shift_invariance")
)
def absolute_values(x, dim):
    return functional.softmax(x.abs(), dim)


@fault(
    SOFTMAX,
    family="scale",
    kind="temperature",
    does="powers of 2 in place of exponentials",
    detected_by=("ratios_are_exponentials_of_differences", "agrees_with_the_oracle"),
    mistake="exp2 is faster; the factor log2(e) was forgotten.",
)
def powers_of_two(x, dim):
    return functional.softmax(x * 0.6931471805599453, dim)


@fault(
    SOFTMAX,
    family="scale",
    does="a temperature of 1.01",
    detected_by=("ratios_are_exponentials_of_differences", "agrees_with_the_oracle"),
    mistake="A sampling parameter that stayed in.",
)
def temperature(x, dim):
    return functional.softmax(x / 1.01, dim)


@fault(
    SOFTMAX,
    family="scale",
    kind="temperature",
    does="log2(e) is rounded to 1.4427",
    detected_by=("ratios_are_exponentials_of_differences", "agrees_with_the_oracle"),
    mistake="Five digits look like enough; the error grows with the distance from the maximum.",
)
def rounded_log2_of_e(x, dim):
    wide = functional.upcast(x)
    return _normalized(((wide - wide.amax(dim, keepdim=True)) * 1.4427).exp2(), dim).to(x.dtype)


@fault(
    SOFTMAX,
    family="mask",
    does="a slice of nothing but -inf and NaN becomes zeros",
    detected_by=("nan_is_not_hidden",),
    mistake="A slice that is hidden throughout is told by its maximum, and that drops NaN.",
    report="intel/torch-xpu-ops#5022",
)
def nan_taken_for_hidden(x, dim):
    visible = (x > -torch.inf).any(dim, keepdim=True)
    return torch.where(visible, functional.softmax(x, dim), 0.0)


@fault(
    SOFTMAX,
    family="mask",
    does="NaN is read as 0",
    detected_by=("nan_is_not_hidden",),
    mistake="nan_to_num makes the loss finite, and its cause invisible.",
)
def nan_read_as_zero(x, dim):
    return functional.softmax(x.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf), dim)


@fault(
    SOFTMAX,
    family="mask",
    does="-inf is taken for a missing value and read as 0",
    detected_by=("minus_infinity_gets_zero",),
    mistake="nan_to_num and its like, to be rid of NaN.",
)
def infinities_read_as_zero(x, dim):
    return functional.softmax(torch.where(x.isinf(), 0.0, x), dim)


@fault(
    SOFTMAX,
    family="mask",
    does="-inf minus the maximum is computed by a product with 0",
    detected_by=("minus_infinity_gets_zero",),
    mistake="0 * inf is NaN; a mask must select, not multiply.",
    report="tensorflow/tensorflow#11756",
)
def infinities_masked_by_a_product(x, dim):
    shifted = x - x.amax(dim, keepdim=True)
    return _normalized((shifted * (shifted > -torch.inf)).exp(), dim)


# ----------------------------------------------------------------------------------------------------------- precision


@fault(
    SOFTMAX,
    family="precision",
    does="computed in bfloat16 inside",
    detected_by=("agrees_with_the_oracle", "ratios_are_exponentials_of_differences"),
    mistake="Autocast, or a kernel made for one dtype.",
)
def bfloat16_inside(x, dim):
    return x.bfloat16().softmax(dim).to(x.dtype)


@fault(
    SOFTMAX,
    family="precision",
    does="computed in float16 inside: inputs beyond 65504 become inf",
    detected_by=("large_inputs_stay_finite", "agrees_with_the_oracle"),
)
def float16_inside(x, dim):
    return functional.softmax(x.half(), dim).to(x.dtype)


@fault(
    SOFTMAX,
    family="precision",
    kind="sum_in_a_short_dtype",
    does="the denominator is summed one by one in the input's dtype",
    detected_by=("thousands_of_entries_sum_to_one_in_bfloat16", "long_rows_in_bfloat16"),
    mistake="In bfloat16, 256 + 1 is 256: rows sum to far more than 1.",
    report="huggingface/candle#3727",
)
def sum_in_the_dtype_of_the_input(x, dim):
    exponentials = _exponentials(x, dim)
    total = torch.zeros_like(x.narrow(dim, 0, 1))
    for term in exponentials.to(x.dtype).split(1, dim):
        total = total + term
    return (exponentials / total).to(x.dtype)


@fault(
    SOFTMAX,
    family="precision",
    kind="sum_in_a_short_dtype",
    does="the sum is returned by way of bfloat16",
    detected_by=("sums_to_one", "agrees_with_the_oracle"),
    mistake="A reduction under autocast.",
)
def sum_in_bfloat16(x, dim):
    exponentials = _exponentials(x, dim)
    return (exponentials / exponentials.sum(dim, keepdim=True).bfloat16()).to(x.dtype)


@fault(
    SOFTMAX,
    family="precision",
    does="exponentials are read from a table with steps of 1/4096",
    detected_by=("ratios_are_exponentials_of_differences", "agrees_with_the_oracle"),
    mistake="Good to four digits, as an approximate instruction is.",
)
def exponentials_from_a_table(x, dim):
    wide = functional.upcast(x)
    steps = (wide - wide.amax(dim, keepdim=True)) * 4096
    return _normalized((steps.round() / 4096).exp(), dim).to(x.dtype)


@fault(
    SOFTMAX,
    family="precision",
    does="float64 is computed in float32",
    detected_by=("agrees_with_the_oracle_in_float64",),
    mistake="float32 is written where float32 at least was meant.",
    no_invariant="float32's accuracy is all that any other clause asks for",
)
def float32_inside(x, dim):
    return functional.softmax(x.float(), dim).to(x.dtype)


@fault(
    SOFTMAX,
    family="signature",
    does="half precision comes back as float32",
    detected_by=(
        "agrees_with_the_oracle_in_bfloat16",
        "agrees_with_the_oracle_in_float16",
        "thousands_of_entries_sum_to_one_in_bfloat16",
    ),
    mistake="Widened for accuracy, never narrowed again.",
)
def float32_returned_for_half(x, dim):
    return functional.softmax(functional.upcast(x), dim)


@fault(
    SOFTMAX,
    family="signature",
    does="the result stays in float64",
    detected_by=("keeps_its_signature",),
    mistake="Widened for accuracy, never narrowed again.",
)
def float64_returned(x, dim):
    return x.double().softmax(dim) if x.dtype != torch.float64 else x.float().softmax(dim)


@fault(
    SOFTMAX,
    family="signature",
    does="axes of one element disappear from the result",
    detected_by=("keeps_its_signature",),
    mistake="squeeze() without an axis.",
)
def axes_squeezed(x, dim):
    return functional.softmax(x, dim).squeeze()


# --------------------------------------------------------------------------------------- memory, and what a call leaves


@fault(
    SOFTMAX,
    family="layout",
    does="memory is walked as if x were contiguous",
    detected_by=("any_memory_layout",),
    mistake="A kernel that takes the address and the sizes, and forgets the strides.",
    report="ml-explore/mlx#657",
)
def strides_ignored(x, dim):
    return functional.softmax(x.as_strided(x.shape, x.new_empty(x.shape).stride()), dim)


@fault(
    SOFTMAX,
    family="layout",
    does="the offset into memory is left out",
    detected_by=("any_memory_layout",),
    mistake="The address of the storage is taken for that of the tensor.",
)
def offset_ignored(x, dim):
    return functional.softmax(x.as_strided(x.shape, x.stride(), 0), dim)


@fault(
    SOFTMAX,
    family="signature",
    kind="empty_batch_refused",
    does="rows are computed one by one and stacked, which fails where there are none",
    detected_by=("empty_batch_gives_an_empty_result",),
    mistake="There is nothing to take the shape from.",
)
def rows_stacked(x, dim):
    moved = x.movedim(dim, -1)
    rows = [functional.softmax(row, 0) for row in moved.reshape(-1, moved.shape[-1])]
    return torch.stack(rows).reshape(moved.shape).movedim(-1, dim)


@fault(
    SOFTMAX,
    family="memory",
    kind="another_path_without_gradients",
    does="under no_grad it is computed in bfloat16",
    detected_by=("grad_mode_changes_nothing",),
    mistake="A faster path for inference, compared with nothing.",
)
def bfloat16_under_no_grad(x, dim):
    return functional.softmax(x, dim) if torch.is_grad_enabled() else bfloat16_inside(x, dim)


@fault(
    SOFTMAX,
    family="memory",
    kind="another_path_with_gradients",
    does="a tenth is shared out evenly where gradients are tracked",
    detected_by=("grad_mode_changes_nothing",),
    mistake="A smoothing for training, put into the operator.",
)
def smoothed_where_gradients_are_tracked(x, dim):
    probabilities = functional.softmax(x, dim)
    return 0.9 * probabilities + 0.1 / x.shape[dim] if x.requires_grad else probabilities


_RESULTS: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}


@fault(
    SOFTMAX,
    family="memory",
    does="all results of a shape are written to one buffer",
    detected_by=("has_no_memory",),
    mistake="An allocation is saved, and an earlier result overwritten.",
)
def results_share_a_buffer(x, dim):
    buffer = _RESULTS.setdefault((x.shape, x.dtype), torch.empty_like(x))
    return buffer.copy_(functional.softmax(x, dim).detach())


@fault(
    SOFTMAX,
    family="global_state",
    does="a tenth of the probabilities is dropped",
    detected_by=("the_global_random_state_decides_nothing", "sums_to_one"),
    mistake="dropout() drops unless it is told not to: there is no model.eval() for a function.",
)
def dropout_left_on(x, dim):
    return F.dropout(functional.softmax(x, dim), 0.1)


@fault(
    SOFTMAX,
    family="global_state",
    does="gradients are switched off for good",
    detected_by=("leaves_global_settings_alone",),
    mistake="set_grad_enabled(False) is no context manager here.",
)
def gradients_switched_off(x, dim):
    torch.set_grad_enabled(False)
    return functional.softmax(x, dim)


@fault(
    SOFTMAX,
    family="global_state",
    does="a seed is set in every call",
    detected_by=("leaves_the_global_random_state_alone",),
    mistake="For repeatable results; everything else that draws repeats itself too.",
)
def seed_set(x, dim):
    torch.manual_seed(0)
    return functional.softmax(x, dim)


@fault(
    SOFTMAX,
    family="arguments",
    does="the maximum is subtracted in place",
    detected_by=("does_not_change_its_arguments",),
    mistake="x -= saves an allocation, and the caller's tensor with it.",
)
def maximum_subtracted_in_place(x, dim):
    x -= x.amax(dim, keepdim=True)
    return _normalized(x.exp(), dim)


_SUMS: dict[tuple[torch.Size, int], torch.Tensor] = {}


@fault(
    SOFTMAX,
    family="memory",
    does="the sum of the first call of a shape serves all later ones",
    detected_by=("has_no_memory", "sums_to_one"),
    mistake="A workspace kept by its size, and taken for filled.",
)
def sum_kept_by_shape(x, dim):
    exponentials = (x - x.amax(dim, keepdim=True)).exp()
    total = _SUMS.setdefault((x.shape, dim), exponentials.sum(dim, keepdim=True))
    return exponentials / total


@fault(
    SOFTMAX,
    family="batch",
    kind="batch_statistics",
    does="the mean of the whole batch is added to the first entry of each slice",
    detected_by=("rows_of_a_batch_are_independent", "slices_do_not_see_each_other"),
    mistake="A statistic of the batch leaks into every row.",
)
def batch_statistic(x, dim):
    leak = torch.zeros_like(x)
    leak.select(dim, 0).fill_(1.0)
    return functional.softmax(x + leak * x.mean(), dim)
