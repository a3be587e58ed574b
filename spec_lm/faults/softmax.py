"""Faults of softmax: the maximum, the axis, the denominator, and what a call leaves behind."""

import torch

from spec_lm.faults import fault
from spec_lm.reference import functional

SOFTMAX = "softmax"


def _normalized(exponentials, dim):
    return exponentials / exponentials.sum(dim, keepdim=True)


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
    detected_by=("sums_to_one", "permuting_entries_permutes_probabilities", "agrees_with_the_oracle"),
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
