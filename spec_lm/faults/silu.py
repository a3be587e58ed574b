"""Faults of silu: a sigmoid that cancels or overflows, another activation, and what a call leaves behind."""

import random

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
    detected_by=("accurate_on_the_negative_tail", "mirror_images_stand_in_the_ratio_exp"),
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
    detected_by="accurate_on_the_negative_tail",
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


@fault(
    SILU,
    family="overflow",
    does="x / (1 + exp(-x)) is computed in the dtype of the input",
    detected_by=("accurate_on_the_negative_tail_in_float16", "agrees_with_the_oracle_in_float16"),
    mistake="In float16 exp(12) is inf, and x / inf is 0, which is not yet what silu is there.",
)
def exponential_in_the_dtype_of_the_input(x):
    return x / (1 + (-x).exp())


@fault(
    SILU,
    family="formula",
    does="from 10 on the sigmoid is taken for 1",
    detected_by=("mirror_images_differ_by_the_input",),
    mistake="It is 1 to four digits there; float32 has seven.",
)
def sigmoid_taken_for_one(x):
    return torch.where(x > 10, x, functional.silu(x))


@fault(
    SILU,
    family="formula",
    does="below -20 the sigmoid is taken for 0",
    detected_by=("accurate_on_the_negative_tail",),
    mistake="A threshold of a fast path; the output there is small, and not 0.",
)
def sigmoid_taken_for_zero(x):
    return functional.silu(x).masked_fill(x < -20, 0.0)


@fault(
    SILU,
    family="precision",
    does="exponentials are read from a table with steps of 1/4096",
    detected_by=("mirror_images_stand_in_the_ratio_exp", "agrees_with_the_oracle"),
    mistake="Good to four digits, as an approximate instruction is.",
)
def exponentials_from_a_table(x):
    wide = functional.upcast(x)
    return (wide / (1 + ((-wide * 4096).round() / 4096).exp())).to(x.dtype)


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
    family="precision",
    does="float64 is computed in float32",
    detected_by=("agrees_with_the_oracle_in_float64",),
    mistake="float32 is written where float32 at least was meant.",
    no_invariant="float32's accuracy is all that any other clause asks for",
)
def float32_inside(x):
    return functional.silu(x.float()).to(x.dtype)


@fault(
    SILU,
    family="signature",
    does="half precision comes back as float32",
    detected_by=(
        "agrees_with_the_oracle_in_bfloat16",
        "agrees_with_the_oracle_in_float16",
        "accurate_on_the_negative_tail_in_float16",
    ),
    mistake="Widened for accuracy, never narrowed again.",
)
def float32_returned_for_half(x):
    return functional.silu(functional.upcast(x))


@fault(
    SILU,
    family="precision",
    kind="cancels_on_the_negative_side",
    does="in bfloat16, on the negative side the sigmoid is 1 - sigmoid(-x)",
    detected_by=("agrees_with_the_oracle_in_bfloat16",),
    mistake="At -6 the output is off by half, and no float32 test sees it.",
    report="skyzh/tiny-llm#164",
    no_invariant="its mirror images differ by x to bfloat16's accuracy, and only the ratio of one to the other is off",
)
def cancels_in_bfloat16(x):
    return cancels_on_the_negative_side(x) if x.dtype == torch.bfloat16 else functional.silu(x)


@fault(
    SILU,
    family="signature",
    does="the result stays in float64",
    detected_by=("keeps_its_signature",),
    mistake="Widened for accuracy, never narrowed again.",
)
def float64_returned(x):
    return functional.silu(x.double())


# ------------------------------------------------------------------------------------------------------- blocks, memory


@fault(
    SILU,
    family="boundary",
    kind="tail_left_out",
    does="entries beyond the last whole block of 64 come back as they were",
    detected_by="reversing_entries_reverses_outputs",
    mistake="The vectorized loop runs over whole blocks, and none follows for the rest.",
    report="66RING/tiny-flash-attention#12",
)
def tail_left_as_it_was(x):
    done = x.shape[-1] // 64 * 64 or x.shape[-1]
    return torch.cat([functional.silu(x[..., :done]), x[..., done:]], -1)


@fault(
    SILU,
    family="boundary",
    kind="beyond_a_block_not_written",
    does="entries from the 1025th on are 0",
    detected_by="reversing_entries_reverses_outputs",
    mistake="One block of threads is launched, and no loop follows.",
)
def entries_beyond_1024_not_written(x):
    return torch.cat([functional.silu(x[..., :1024]), torch.zeros_like(x[..., 1024:])], -1)


@fault(
    SILU,
    family="boundary",
    kind="tail_left_out",
    does="the last of an odd number of entries comes back as it was",
    detected_by=("mirror_images_differ_by_the_input", "agrees_with_the_oracle"),
    mistake="Entries are read in pairs.",
)
def odd_entry_left_as_it_was(x):
    return torch.cat([functional.silu(x[..., :-1]), x[..., -1:]], -1) if x.shape[-1] % 2 else functional.silu(x)


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


@fault(
    SILU,
    family="layout",
    does="the offset into memory is left out",
    detected_by=("any_memory_layout",),
    mistake="The address of the storage is taken for that of the tensor.",
)
def offset_ignored(x):
    return functional.silu(x.as_strided(x.shape, x.stride(), 0))


@fault(
    SILU,
    family="signature",
    kind="empty_batch_refused",
    does="the largest input is looked for, which fails where there is none",
    detected_by=("empty_batch_gives_an_empty_result",),
    mistake="A check before the kernel starts; max() of nothing raises.",
)
def largest_input_looked_for(x):
    return functional.silu(x.clamp(max=x.max().item()))


@fault(
    SILU,
    family="memory",
    kind="another_path_without_gradients",
    does="under no_grad it is the piecewise linear form",
    detected_by=("grad_mode_changes_nothing",),
    mistake="A faster path for inference, compared with nothing.",
)
def hard_swish_under_no_grad(x):
    return functional.silu(x) if torch.is_grad_enabled() else hard_swish(x)


@fault(
    SILU,
    family="memory",
    kind="another_path_with_gradients",
    does="where gradients are tracked the sigmoid comes from tanh, which cancels",
    detected_by=("grad_mode_changes_nothing",),
    mistake="The backward pass of tanh was at hand.",
)
def sigmoid_from_tanh_where_gradients_are_tracked(x):
    return sigmoid_from_tanh(x) if x.requires_grad else functional.silu(x)


_RESULTS: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}


@fault(
    SILU,
    family="memory",
    does="all results of a shape are written to one buffer",
    detected_by=("has_no_memory",),
    mistake="An allocation is saved, and an earlier result overwritten.",
)
def results_share_a_buffer(x):
    buffer = _RESULTS.setdefault((x.shape, x.dtype), torch.empty_like(x))
    return buffer.copy_(functional.silu(x).detach())


@fault(
    SILU,
    family="global_state",
    does="noise of a thousandth is added",
    detected_by=("the_global_random_state_decides_nothing", "agrees_with_the_oracle"),
    mistake="A regularization for training that is not switched off.",
)
def noise_added(x):
    return functional.silu(x) * (1 + 1e-3 * torch.randn_like(x))


@fault(
    SILU,
    family="global_state",
    does="the default dtype is set to float64 for good",
    detected_by=("leaves_global_settings_alone",),
    mistake="One line for accuracy; every tensor of the process that is made from then on is wider.",
)
def default_dtype_set(x):
    torch.set_default_dtype(torch.float64)
    return functional.silu(x)


@fault(
    SILU,
    family="global_state",
    does="a seed is set in every call",
    detected_by=("leaves_the_global_random_state_alone",),
    mistake="For repeatable results; everything else that draws repeats itself too.",
)
def seed_set(x):
    random.seed(0)
    return functional.silu(x)


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
