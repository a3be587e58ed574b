"""Faults of silu: a sigmoid that cancels or overflows, another activation, and what a call leaves behind."""

import torch
import torch.nn.functional as F

from spec_lm.faults import fault
from spec_lm.reference import functional

SILU = "silu"


# ---------------------------------------------------------------------------------------------------------- the sigmoid


@fault(
    SILU,
    family="precision",
    does="on the negative side the sigmoid is 1 - sigmoid(-x), which cancels",
    detected_by=("accurate_on_the_negative_tail", "mirror_images_stand_in_the_ratio_exp", "agrees_with_the_oracle"),
    mistake="Absolute errors stay tiny, while the output loses all its digits.",
    report="skyzh/tiny-llm#164",
)
def cancels_on_the_negative_side(x):
    positive = x.abs().sigmoid()
    return x * torch.where(x < 0, 1 - positive, positive)


@fault(
    SILU,
    family="precision",
    kind="cancels_on_the_negative_side",
    does="the sigmoid is computed from tanh, which cancels on the negative side",
    detected_by=("accurate_on_the_negative_tail", "mirror_images_stand_in_the_ratio_exp"),
    mistake="(1 + tanh(x / 2)) / 2 is the same function, but not the same arithmetic.",
)
def sigmoid_from_tanh(x):
    return x * 0.5 * (1 + (x / 2).tanh())


@fault(
    SILU,
    family="overflow",
    does="the argument of the sigmoid is clamped to -18..18, the factor x is not",
    detected_by=("accurate_on_the_negative_tail", "agrees_with_the_oracle"),
    mistake="The sigmoid is flat there, but x is not: the output goes to -inf.",
    report="sonos/tract#2506",
)
def clamped_inside_the_sigmoid(x):
    return x * x.clamp(-18, 18).sigmoid()


@fault(
    SILU,
    family="overflow",
    does="the sigmoid is exp(x) / (1 + exp(x)): inf / inf for large x",
    detected_by=("finite_for_every_finite_input", "agrees_with_the_oracle"),
    mistake="The other form of the same formula overflows on the other side, where it does no harm.",
)
def inf_over_inf(x):
    return x * x.exp() / (1 + x.exp())


@fault(
    SILU,
    family="formula",
    does="the sigmoid of -x",
    detected_by=("mirror_images_stand_in_the_ratio_exp", "agrees_with_the_oracle"),
    mistake="1 / (1 + exp(x)) for 1 / (1 + exp(-x)); mirror images differ by x all the same.",
)
def sign_in_the_exponent(x):
    return x * (-x).sigmoid()


@fault(
    SILU,
    family="formula",
    does="the sigmoid alone, without the factor x",
    detected_by=("mirror_images_differ_by_the_input", "lies_between_zero_and_the_input"),
)
def sigmoid_alone(x):
    return x.sigmoid()


# --------------------------------------------------------------------------------------------------- another activation


@fault(
    SILU,
    family="formula",
    does="x sigmoid(1.702 x), an approximation of GELU",
    detected_by=("mirror_images_stand_in_the_ratio_exp", "agrees_with_the_oracle"),
    mistake="Both go by the name of swish.",
)
def scaled_sigmoid(x):
    return x * (1.702 * x).sigmoid()


@fault(
    SILU,
    family="formula",
    kind="gelu",
    does="GELU in its tanh form",
    detected_by=("mirror_images_stand_in_the_ratio_exp", "agrees_with_the_oracle"),
    mistake="The activations look alike, and each is the default somewhere.",
    report="chelsea0x3b/dfdx#804",
)
def gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


@fault(
    SILU,
    family="formula",
    kind="gelu",
    does="GELU in its erf form",
    detected_by=("mirror_images_stand_in_the_ratio_exp", "agrees_with_the_oracle"),
    report="huggingface/candle#900",
)
def gelu_erf(x):
    return F.gelu(x)


@fault(
    SILU,
    family="formula",
    does="negative inputs give 0",
    detected_by=("mirror_images_stand_in_the_ratio_exp", "agrees_with_the_oracle"),
    mistake="Its mirror images differ by x too.",
)
def relu(x):
    return x.relu()


@fault(
    SILU,
    family="formula",
    does="a piecewise linear sigmoid",
    detected_by=("mirror_images_stand_in_the_ratio_exp", "agrees_with_the_oracle"),
    mistake="The hard form is cheaper, and another function.",
)
def hard_swish(x):
    return F.hardswish(x)


@fault(
    SILU,
    family="formula",
    does="softplus, log(1 + exp(x))",
    detected_by=("lies_between_zero_and_the_input", "agrees_with_the_oracle"),
    mistake="Its mirror images differ by x too.",
)
def softplus(x):
    return F.softplus(x)


@fault(
    SILU,
    family="formula",
    does="0.001 is added to the output",
    detected_by=("lies_between_zero_and_the_input", "accurate_on_the_negative_tail"),
)
def hidden_bias(x):
    return functional.silu(x) + 0.001


# ------------------------------------------------------------------------------------------------------------ precision


@fault(
    SILU,
    family="precision",
    does="computed in bfloat16 inside",
    detected_by=("mirror_images_differ_by_the_input", "agrees_with_the_oracle"),
    mistake="Autocast, cast back.",
)
def bfloat16_inside(x):
    return functional.silu(x.bfloat16()).to(x.dtype)


@fault(
    SILU,
    family="precision",
    does="computed in float16 inside: inputs beyond 65504 become inf",
    detected_by=("finite_for_every_finite_input", "accurate_on_the_negative_tail"),
)
def float16_inside(x):
    return functional.silu(x.half()).to(x.dtype)


@fault(
    SILU,
    family="signature",
    does="the result stays in float64",
    detected_by=("keeps_its_signature",),
    mistake="Widened for accuracy, never narrowed again.",
)
def float64_returned(x):
    return functional.silu(x.double())


# ---------------------------------------------------------------------------------- other entries, memory, what is left


@fault(
    SILU,
    family="precision",
    does="rounded to 256 steps between 0 and the largest entry of the tensor",
    detected_by=("entries_do_not_see_each_other", "rows_of_a_batch_are_independent", "agrees_with_the_oracle"),
    mistake="A scale for the whole tensor, as in 8-bit inference.",
)
def quantized_by_the_largest_entry(x):
    y = functional.silu(x)
    step = y.abs().max().clamp(min=1e-30) / 256
    return (y / step).round() * step


@fault(
    SILU,
    family="batch",
    does="the sigmoid sees the mean of the batch subtracted",
    detected_by=("rows_of_a_batch_are_independent", "entries_do_not_see_each_other"),
    mistake="A statistic of the batch leaks into every row.",
)
def batch_statistics(x):
    return x * (x - x.mean()).sigmoid()


@fault(
    SILU,
    family="signature",
    does="several leading axes come back as one",
    detected_by=("takes_any_number_of_leading_axes",),
    mistake="Flattened for a kernel, never unflattened.",
)
def leading_axes_flattened(x):
    return functional.silu(x).flatten(0, max(x.ndim - 2, 0))


@fault(
    SILU,
    family="arguments",
    does="multiplied in place",
    detected_by=("does_not_change_its_arguments",),
    mistake="inplace=True saves an allocation, and the caller's tensor with it.",
)
def multiplied_in_place(x):
    return x.mul_(x.sigmoid())


@fault(
    SILU,
    family="layout",
    does="memory is walked as if x were contiguous",
    detected_by=("any_memory_layout",),
    mistake="A kernel that takes the address and the sizes, and forgets the strides.",
    report="vllm-project/vllm#3324",
)
def strides_ignored(x):
    return functional.silu(x.as_strided(x.shape, x.new_empty(x.shape).stride()))


_SIGMOIDS: dict[torch.Size, torch.Tensor] = {}


@fault(
    SILU,
    family="memory",
    does="the sigmoid of the first call of a shape serves all later ones",
    detected_by=("has_no_memory", "agrees_with_the_oracle"),
    mistake="A workspace kept by its size, and taken for filled.",
)
def sigmoid_kept_by_shape(x):
    return x * _SIGMOIDS.setdefault(x.shape, x.sigmoid())
