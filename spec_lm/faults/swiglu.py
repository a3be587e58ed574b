"""Faults of swiglu: gate and up mixed up, another activation, hidden units lost, and what a call leaves behind."""

import os

import torch
import torch.nn.functional as F

from spec_lm.faults import fault
from spec_lm.reference import functional
from spec_lm.reference.functional import linear, silu

SWIGLU = "swiglu"


# ---------------------------------------------------------------------------------------------------------- gate and up


@fault(
    SWIGLU,
    family="weights",
    does="gate and up are exchanged: silu is applied to W3 x",
    detected_by=("gate_is_w1", "linear_in_w3", "agrees_with_the_oracle"),
    mistake="The names w1, w2, w3 do not tell which is which.",
    report="ml-explore/mlx-lm#767",
)
def gate_and_up_exchanged(x, w1, w2, w3):
    return functional.swiglu(x, w3, w2, w1)


@fault(
    SWIGLU,
    family="formula",
    does="silu is applied to the product of gate and up",
    detected_by=("linear_in_w3", "agrees_with_the_oracle"),
    mistake="A parenthesis closed too late.",
    report="Nijikadesu/breakdown-minimind#3",
)
def silu_of_the_product(x, w1, w2, w3):
    return linear(silu(linear(x, w1) * linear(x, w3)), w2)


@fault(SWIGLU, family="formula", does="gate and up are added", detected_by=("zero_gate_gives_zero", "linear_in_w3"))
def gate_plus_up(x, w1, w2, w3):
    return linear(silu(linear(x, w1)) + linear(x, w3), w2)


@fault(
    SWIGLU,
    family="formula",
    does="there is no up branch: W3 is not used",
    detected_by=("linear_in_w3", "zero_gate_gives_zero", "gate_is_w1"),
    mistake="That is a plain feed-forward network with silu.",
)
def no_up_branch(x, w1, w2, w3):
    return linear(silu(linear(x, w1)), w2)


@fault(
    SWIGLU,
    family="weights",
    does="the halves of one fused projection are taken alternately instead of one after the other",
    detected_by=("linear_in_w3", "gate_is_w1", "agrees_with_the_oracle"),
    mistake="Checkpoints exist in both orders.",
    report="vllm-project/vllm#3324",
)
def fused_projection_interleaved(x, w1, w2, w3):
    fused = linear(x, torch.cat([w1, w3]))
    return linear(silu(fused[..., ::2]) * fused[..., 1::2], w2)


@fault(
    SWIGLU,
    family="weights",
    does="each gate meets the up value of the next hidden unit",
    detected_by=("permuting_hidden_units_changes_nothing", "any_d_ff", "gate_is_w1"),
)
def gates_shifted_by_one(x, w1, w2, w3):
    return linear(silu(linear(x, w1)).roll(1, -1) * linear(x, w3), w2)


# ------------------------------------------------------------------------------------------------------- the activation


@fault(
    SWIGLU,
    family="formula",
    does="the gate is a sigmoid, without the factor W1 x",
    detected_by=("zero_gate_gives_zero", "gate_is_w1", "agrees_with_the_oracle"),
    mistake="That is the gated linear unit this one was named after.",
)
def sigmoid_gate(x, w1, w2, w3):
    return linear(linear(x, w1).sigmoid() * linear(x, w3), w2)


@fault(
    SWIGLU,
    family="formula",
    kind="gelu",
    does="the gate is GELU in its tanh form",
    detected_by=("mirrored_gates_stand_in_the_ratio_exp", "agrees_with_the_oracle"),
    mistake="GeGLU differs from SwiGLU in this alone.",
    report="kyutai-labs/pocket-tts#278",
)
def gelu_gate(x, w1, w2, w3):
    return linear(F.gelu(linear(x, w1), approximate="tanh") * linear(x, w3), w2)


@fault(
    SWIGLU,
    family="formula",
    kind="gelu",
    does="the gate is GELU in its erf form",
    detected_by=("mirrored_gates_stand_in_the_ratio_exp", "agrees_with_the_oracle"),
    report="huggingface/candle#900",
)
def gelu_gate_in_its_erf_form(x, w1, w2, w3):
    return linear(F.gelu(linear(x, w1)) * linear(x, w3), w2)


@fault(
    SWIGLU,
    family="formula",
    kind="relu",
    does="the gate is ReLU",
    detected_by=("mirrored_gates_stand_in_the_ratio_exp", "agrees_with_the_oracle"),
)
def relu_gate(x, w1, w2, w3):
    return linear(linear(x, w1).relu() * linear(x, w3), w2)


@fault(
    SWIGLU,
    family="formula",
    does="the gate has no activation",
    detected_by=("gate_is_w1", "agrees_with_the_oracle"),
)
def no_activation(x, w1, w2, w3):
    return linear(linear(x, w1) * linear(x, w3), w2)


@fault(
    SWIGLU,
    family="overflow",
    does="the sigmoid is exp(gate) / (1 + exp(gate)): inf / inf for a large gate",
    detected_by=("large_inputs_stay_finite",),
    mistake="The other form of the same formula overflows on the other side, where it does no harm.",
)
def inf_over_inf(x, w1, w2, w3):
    gate = linear(x, w1)
    return linear(gate * gate.exp() / (1 + gate.exp()) * linear(x, w3), w2)


@fault(
    SWIGLU,
    family="overflow",
    kind="outputs_clamped",
    does="hidden units are clamped to the range of float16",
    detected_by=("scaling_w3_scales_the_output",),
    mistake="A guard against overflow that float32 does not need.",
)
def hidden_units_clamped(x, w1, w2, w3):
    return linear((silu(linear(x, w1)) * linear(x, w3)).clamp(-65504, 65504), w2)


@fault(
    SWIGLU,
    family="overflow",
    does="the argument of the sigmoid is clamped to -18..18, the gate is not",
    detected_by=("deeply_negative_gates_are_closed",),
    mistake="The sigmoid is flat there, but the gate grows: what should be closed leaks.",
    report="sonos/tract#2506",
)
def clamped_inside_the_sigmoid(x, w1, w2, w3):
    gate = linear(x, w1)
    return linear(gate * gate.clamp(-18, 18).sigmoid() * linear(x, w3), w2)


@fault(
    SWIGLU,
    family="precision",
    does="on the negative side the sigmoid is 1 - sigmoid(-gate), which cancels",
    detected_by=("deeply_negative_gates_are_closed",),
    mistake="Absolute errors stay tiny, while the output loses all its digits.",
    report="skyzh/tiny-llm#164",
)
def cancels_on_the_negative_side(x, w1, w2, w3):
    gate = linear(x, w1)
    positive = gate.abs().sigmoid()
    return linear(gate * torch.where(gate < 0, 1 - positive, positive) * linear(x, w3), w2)


# --------------------------------------------------------------------------------------------- weights and hidden units


@fault(
    SWIGLU,
    family="boundary",
    kind="tail_left_out",
    does="hidden units beyond the last multiple of 4 are left out",
    detected_by=("any_d_ff", "agrees_with_the_oracle"),
    mistake="d_ff is a multiple of 64 in every real model.",
)
def tail_of_hidden_units_left_out(x, w1, w2, w3):
    kept = w1.shape[0] // 4 * 4 or w1.shape[0]
    return functional.swiglu(x, w1[:kept], w2[:, :kept], w3[:kept])


@fault(
    SWIGLU,
    family="boundary",
    kind="tail_left_out",
    does="hidden units beyond the last whole block of 64 are left out",
    detected_by="reversing_rows_features_and_hidden_units",
    mistake="The block loop runs over whole blocks only.",
)
def hidden_units_beyond_whole_blocks_left_out(x, w1, w2, w3):
    kept = w1.shape[0] // 64 * 64 or w1.shape[0]
    return functional.swiglu(x, w1[:kept], w2[:, :kept], w3[:kept])


@fault(
    SWIGLU,
    family="boundary",
    kind="tail_counted_twice",
    does="the last block of 32 hidden units is moved back to be a whole one, and counts again what it overlaps",
    detected_by=("reversing_rows_features_and_hidden_units", "any_length"),
    mistake="Right for writing results; a sum must not see a hidden unit twice.",
)
def last_block_overlaps(x, w1, w2, w3):
    n = w1.shape[0]
    y = functional.swiglu(x, w1, w2, w3)
    if n <= 32 or n % 32 == 0:
        return y
    twice = slice(n - 32, n // 32 * 32)
    return y + functional.swiglu(x, w1[twice], w2[:, twice], w3[twice])


@fault(
    SWIGLU,
    family="boundary",
    kind="beyond_a_block_not_read",
    does="hidden units from the 4097th on are left out",
    detected_by=("reversing_rows_features_and_hidden_units", "long_rows"),
    mistake="A buffer is sized for the model it was written for.",
)
def hidden_units_beyond_4096_left_out(x, w1, w2, w3):
    return functional.swiglu(x, w1[:4096], w2[:, :4096], w3[:4096])


@fault(
    SWIGLU,
    family="boundary",
    kind="beyond_a_block_not_written",
    does="rows from the 33rd on are 0",
    detected_by=("reversing_rows_features_and_hidden_units",),
    mistake="The grid is made for the batch of the benchmark.",
)
def rows_beyond_32_not_written(x, w1, w2, w3):
    y = functional.swiglu(x, w1, w2, w3).clone()
    if y.ndim > 1:
        y[32:] = 0
    return y


@fault(
    SWIGLU,
    family="boundary",
    does="no more than 8/3 d_model hidden units are computed",
    detected_by=("any_d_ff", "agrees_with_the_oracle"),
    mistake="The usual d_ff is computed anew instead of read off the weights.",
)
def d_ff_computed_from_d_model(x, w1, w2, w3):
    d_ff = 8 * w1.shape[1] // 3
    return functional.swiglu(x, w1[:d_ff], w2[:, :d_ff], w3[:d_ff])


@fault(
    SWIGLU,
    family="weights",
    does="square weights W2 and W3 are exchanged",
    detected_by=("permuting_hidden_units_changes_nothing", "gate_is_w1", "agrees_with_the_oracle"),
    mistake="They are handed over in the order gate, up, down; only where all are square does it pass.",
)
def square_w2_and_w3_exchanged(x, w1, w2, w3):
    square = w1.shape[0] == w1.shape[1]
    return functional.swiglu(x, w1, w3, w2) if square else functional.swiglu(x, w1, w2, w3)


@fault(
    SWIGLU,
    family="weights",
    kind="square_weight_transposed",
    does="square weights are used transposed",
    detected_by=("permuting_hidden_units_changes_nothing", "agrees_with_the_oracle"),
    mistake="Only square weights let it pass without an error.",
    report="Integral2u/SharpMind#14",
)
def square_weights_transposed(x, w1, w2, w3):
    square = w1.shape[0] == w1.shape[1]
    return functional.swiglu(x, *(w.T if square else w for w in (w1, w2, w3)))


@fault(
    SWIGLU,
    family="formula",
    does="a bias of 0.01 hides in every projection",
    detected_by=("zero_gate_gives_zero", "linear_in_w3"),
)
def hidden_bias(x, w1, w2, w3):
    return linear(silu(linear(x, w1) + 0.01) * (linear(x, w3) + 0.01), w2)


@fault(
    SWIGLU,
    family="formula",
    does="silu is applied once more after W2",
    detected_by=("linear_in_w2", "agrees_with_the_oracle"),
)
def activated_after_w2(x, w1, w2, w3):
    return silu(functional.swiglu(x, w1, w2, w3))


@fault(
    SWIGLU,
    family="residual",
    does="the input is added to the output",
    detected_by=("zero_gate_gives_zero", "linear_in_w2"),
    mistake="The residual is the block's, and would be there twice.",
)
def residual_added(x, w1, w2, w3):
    return x + functional.swiglu(x, w1, w2, w3)


# ------------------------------------------------------------------------------------------------------------ precision


@fault(
    SWIGLU, family="precision", does="computed in bfloat16 inside", detected_by=("agrees_with_the_oracle", "gate_is_w1")
)
def bfloat16_inside(x, w1, w2, w3):
    return functional.swiglu(*(t.bfloat16() for t in (x, w1, w2, w3))).to(x.dtype)


def _shortened(tensor, bits):
    """The tensor with that many mantissa bits dropped."""
    return (tensor.float().view(torch.int32) >> bits << bits).view(torch.float32).to(tensor.dtype)


@fault(
    SWIGLU,
    family="precision",
    does="factors keep 11 bits, as in TF32",
    detected_by=("agrees_with_the_oracle", "gate_is_w1"),
    mistake="A global switch; values of few bits do not show it.",
)
def tf32_inside(x, w1, w2, w3):
    x, w1, w2, w3 = (_shortened(t, 13) for t in (x, w1, w2, w3))
    return linear(_shortened(silu(linear(x, w1)) * linear(x, w3), 13), w2)


@fault(
    SWIGLU,
    family="precision",
    does="hidden units are kept in bfloat16",
    detected_by=("agrees_with_the_oracle", "gate_is_w1"),
    mistake="Activations are stored for the backward pass, and read back for the forward one.",
)
def hidden_units_in_bfloat16(x, w1, w2, w3):
    hidden = silu(linear(x, w1)) * linear(x, w3)
    return linear(hidden.bfloat16().to(x.dtype), w2)


@fault(
    SWIGLU,
    family="precision",
    kind="sum_in_a_short_dtype",
    does="hidden units are summed one by one in the input's dtype",
    detected_by=("thousands_of_equal_hidden_units_in_bfloat16",),
    mistake="In bfloat16, 256 + 1 is 256.",
)
def sum_in_the_dtype_of_the_input(x, w1, w2, w3):
    hidden = silu(linear(x, w1)) * linear(x, w3)
    total = x.new_zeros(*x.shape[:-1], w2.shape[0])
    for entries, column in zip(hidden.unbind(-1), w2.unbind(1), strict=True):
        total = total + entries[..., None] * column
    return total


@fault(
    SWIGLU,
    family="precision",
    does="float64 is computed in float32",
    detected_by=("agrees_with_the_oracle_in_float64",),
    mistake="float32 is written where float32 at least was meant.",
    no_invariant="float32's accuracy is all that any other clause asks for",
)
def float32_inside(x, w1, w2, w3):
    return functional.swiglu(x.float(), w1.float(), w2.float(), w3.float()).to(x.dtype)


@fault(
    SWIGLU,
    family="signature",
    does="half precision comes back as float32",
    detected_by=(
        "agrees_with_the_oracle_in_bfloat16",
        "agrees_with_the_oracle_in_float16",
        "long_rows_in_bfloat16",
        "thousands_of_equal_hidden_units_in_bfloat16",
    ),
    mistake="The accumulator of the last product is returned as it is.",
)
def float32_returned_for_half(x, w1, w2, w3):
    return functional.swiglu(*(functional.upcast(t) for t in (x, w1, w2, w3)))


@fault(
    SWIGLU,
    family="precision",
    does="computed in float16 inside",
    detected_by=("scaling_w3_scales_the_output", "gate_is_w1", "agrees_with_the_oracle"),
    mistake="Autocast, cast back; the product of two projections leaves its range first.",
)
def float16_inside(x, w1, w2, w3):
    return functional.swiglu(*(t.half() for t in (x, w1, w2, w3))).to(x.dtype)


@fault(
    SWIGLU,
    family="signature",
    does="the result stays in float64",
    detected_by=("keeps_its_signature",),
    mistake="Widened for accuracy, never narrowed again.",
)
def float64_returned(x, w1, w2, w3):
    return functional.swiglu(x.double(), w1.double(), w2.double(), w3.double())


# --------------------------------------------------------------------------------------- memory, and what a call leaves


@fault(
    SWIGLU,
    family="signature",
    does="several leading axes come back as one",
    detected_by=("takes_any_number_of_leading_axes",),
    mistake="Flattened for a matrix product, never unflattened.",
)
def leading_axes_flattened(x, w1, w2, w3):
    return functional.swiglu(x, w1, w2, w3).flatten(0, max(x.ndim - 2, 0))


@fault(
    SWIGLU,
    family="batch",
    does="the mean gate of the batch is subtracted from every gate",
    detected_by=("rows_of_a_batch_are_independent", "agrees_with_the_oracle"),
    mistake="A statistic of the batch leaks into every row.",
)
def batch_statistics(x, w1, w2, w3):
    gate = linear(x, w1)
    return linear(silu(gate - gate.mean()) * linear(x, w3), w2)


@fault(
    SWIGLU,
    family="arguments",
    does="W2 is transposed in place for a product that wants it so",
    detected_by=("does_not_change_its_arguments",),
    mistake="t_() makes no copy: it turns the caller's tensor.",
)
def weight_transposed_in_place(x, w1, w2, w3):
    return (silu(linear(x, w1)) * linear(x, w3)) @ w2.t_()


@fault(
    SWIGLU,
    family="layout",
    does="the memory of W1 and W3 is walked as if they were contiguous",
    detected_by=("any_memory_layout",),
    mistake="They may be the two halves of one tensor, or transposed.",
    report="pytorch/pytorch#162730",
)
def strides_ignored(x, w1, w2, w3):
    w1, w3 = (w.as_strided(w.shape, (w.shape[1], 1)) for w in (w1, w3))
    return functional.swiglu(x, w1, w2, w3)


@fault(
    SWIGLU,
    family="layout",
    kind="strides_ignored",
    does="the input's memory is walked as if it were contiguous",
    detected_by=("any_memory_layout",),
    mistake="A kernel that takes the address and the sizes, and forgets the strides.",
    report="vllm-project/vllm#3324",
)
def input_strides_ignored(x, w1, w2, w3):
    return functional.swiglu(x.as_strided(x.shape, x.new_empty(x.shape).stride()), w1, w2, w3)


@fault(
    SWIGLU,
    family="layout",
    kind="strides_ignored",
    does="the memory of W2 is walked as if it were contiguous",
    detected_by=("any_memory_layout",),
    mistake="W2 is often kept transposed, so as to lie like the other two.",
)
def strides_of_w2_ignored(x, w1, w2, w3):
    return functional.swiglu(x, w1, w2.as_strided(w2.shape, (w2.shape[1], 1)), w3)


@fault(
    SWIGLU,
    family="layout",
    does="the offset of W3 into its memory is left out",
    detected_by=("any_memory_layout",),
    mistake="The second half of one fused weight starts where the first does.",
)
def offset_ignored(x, w1, w2, w3):
    return functional.swiglu(x, w1, w2, w3.as_strided(w3.shape, w3.stride(), 0))


@fault(
    SWIGLU,
    family="signature",
    kind="empty_batch_refused",
    does="leading axes are flattened by view(batch, -1), which fails for a batch of none",
    detected_by=("empty_batch_gives_an_empty_result",),
    mistake="-1 cannot be computed where another size is 0.",
)
def flattened_by_a_guess(x, w1, w2, w3):
    rows = x.reshape(x.shape[0], -1, x.shape[-1]) if x.ndim > 1 else x
    return functional.swiglu(rows, w1, w2, w3).reshape(x.shape)


@fault(
    SWIGLU,
    family="memory",
    kind="another_path_without_gradients",
    does="under no_grad the gate is GELU",
    detected_by=("grad_mode_changes_nothing",),
    mistake="The fused kernel at hand for inference was made for another model.",
)
def gelu_under_no_grad(x, w1, w2, w3):
    return functional.swiglu(x, w1, w2, w3) if torch.is_grad_enabled() else gelu_gate(x, w1, w2, w3)


@fault(
    SWIGLU,
    family="memory",
    kind="another_path_with_gradients",
    does="where gradients are tracked hidden units are kept in bfloat16",
    detected_by=("grad_mode_changes_nothing",),
    mistake="They are stored for the backward pass, and the forward pass uses what is stored.",
)
def bfloat16_where_gradients_are_tracked(x, w1, w2, w3):
    path = hidden_units_in_bfloat16 if w1.requires_grad else functional.swiglu
    return path(x, w1, w2, w3)


_RESULTS: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}


@fault(
    SWIGLU,
    family="memory",
    does="all results of a shape are written to one buffer",
    detected_by=("has_no_memory",),
    mistake="An allocation is saved, and an earlier result overwritten.",
)
def results_share_a_buffer(x, w1, w2, w3):
    buffer = _RESULTS.setdefault((x.shape, x.dtype), torch.empty_like(x))
    return buffer.copy_(functional.swiglu(x, w1, w2, w3).detach())


@fault(
    SWIGLU,
    family="global_state",
    does="a tenth of the hidden units is dropped",
    detected_by=("the_global_random_state_decides_nothing", "agrees_with_the_oracle"),
    mistake="dropout() drops unless it is told not to.",
)
def dropout_left_on(x, w1, w2, w3):
    return linear(F.dropout(silu(linear(x, w1)) * linear(x, w3), 0.1), w2)


@fault(
    SWIGLU,
    family="global_state",
    does="a module is built in every call, and draws weights that are overwritten",
    detected_by=("leaves_the_global_random_state_alone",),
    mistake="Its initialization draws from the generator that everything else draws from.",
)
def module_built_in_every_call(x, w1, w2, w3):
    layer = torch.nn.Linear(w2.shape[1], w2.shape[0], bias=False, dtype=w2.dtype)
    return torch.func.functional_call(layer, {"weight": w2}, (silu(linear(x, w1)) * linear(x, w3),))


@fault(
    SWIGLU,
    family="global_state",
    does="an environment variable is set for good",
    detected_by=("leaves_global_settings_alone",),
    mistake="What is meant for one kernel is read by all that is loaded from then on.",
)
def environment_changed(x, w1, w2, w3):
    os.environ["PYTORCH_ENABLE_MPS_FALLBACK"] = "1"
    return functional.swiglu(x, w1, w2, w3)


_FUSED: dict[torch.Size, torch.Tensor] = {}


@fault(
    SWIGLU,
    family="memory",
    kind="weight_kept_by_shape",
    does="the fused weight of the first call of a shape serves all later ones",
    detected_by=("has_no_memory", "agrees_with_the_oracle"),
    mistake="W1 and W3 are stacked once, and the stack kept by its size.",
)
def fused_weight_kept_by_shape(x, w1, w2, w3):
    first, third = _FUSED.setdefault(w1.shape, torch.stack([w1, w3]))
    return functional.swiglu(x, first, w2, third)
