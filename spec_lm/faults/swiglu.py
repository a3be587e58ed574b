"""Faults of swiglu: gate and up mixed up, another activation, hidden units lost, and what a call leaves behind."""

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
    detected_by=("agrees_with_the_oracle",),
    mistake="GeGLU differs from SwiGLU in this alone.",
    report="kyutai-labs/pocket-tts#278",
)
def gelu_gate(x, w1, w2, w3):
    return linear(F.gelu(linear(x, w1), approximate="tanh") * linear(x, w3), w2)


@fault(SWIGLU, family="formula", kind="relu", does="the gate is ReLU", detected_by=("agrees_with_the_oracle",))
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
