"""Faults of linear: the weight transposed, biased, scaled or shortened, and what a call leaves behind."""

import torch

from spec_lm.faults import fault
from spec_lm.reference import functional

LINEAR = "linear"


# ----------------------------------------------------------------------------------------------------------- the weight


@fault(
    LINEAR,
    family="weights",
    does="a square weight is used transposed",
    detected_by=("basis_vectors_give_columns", "agrees_with_the_oracle"),
    mistake="x W for x W^T; only a square weight lets it pass without an error.",
    report="Integral2u/SharpMind#14",
)
def square_weight_transposed(x, weight):
    return functional.linear(x, weight.T if weight.shape[0] == weight.shape[1] else weight)


@fault(
    LINEAR,
    family="formula",
    does="a bias of 0.01 is added",
    detected_by=("no_bias", "additive", "identity_weight_returns_the_input"),
    mistake="Layers of most libraries have one unless told otherwise.",
)
def hidden_bias(x, weight):
    return functional.linear(x, weight) + 0.01


@fault(
    LINEAR,
    family="scale",
    does="the output is divided by sqrt(d_in)",
    detected_by=("identity_weight_returns_the_input", "basis_vectors_give_columns"),
    mistake="The scale of the initialization, applied at every call.",
)
def scaled_by_the_input_size(x, weight):
    return functional.linear(x, weight) / weight.shape[1] ** 0.5


@fault(
    LINEAR,
    family="formula",
    does="negative outputs become 0",
    detected_by=("additive", "identity_weight_returns_the_input"),
    mistake="The activation of the next layer, fused in.",
)
def activation_fused(x, weight):
    return functional.linear(x, weight).relu()


@fault(
    LINEAR,
    family="boundary",
    kind="tail_left_out",
    does="input features beyond the last multiple of 4 are left out",
    detected_by=("basis_vectors_give_columns", "identity_weight_returns_the_input", "agrees_with_the_oracle"),
    mistake="The block loop runs over whole blocks only.",
)
def tail_of_features_left_out(x, weight):
    kept = weight.shape[1] // 4 * 4 or weight.shape[1]
    return functional.linear(x[..., :kept], weight[:, :kept])


@fault(
    LINEAR,
    family="precision",
    does="the weight is rounded to 127 steps of its largest entry",
    detected_by=("each_row_of_the_weight_gives_one_output", "basis_vectors_give_columns"),
    mistake="One scale for the whole weight, as in 8-bit inference.",
)
def quantized_by_the_largest_entry(x, weight):
    step = weight.abs().max().clamp(min=1e-30) / 127
    return functional.linear(x, (weight / step).round() * step)


@fault(
    LINEAR,
    family="norm",
    does="rows of the weight are normalized",
    detected_by=("basis_vectors_give_columns", "agrees_with_the_oracle"),
    mistake="Weight normalization without its gain.",
)
def rows_normalized(x, weight):
    return functional.linear(x, weight / weight.norm(dim=1, keepdim=True).clamp(min=1e-12))


@fault(
    LINEAR,
    family="precision",
    kind="quantized_by_the_largest_entry",
    does="inputs are rounded to 127 steps of the largest one in the tensor",
    detected_by=("additive", "rows_of_a_batch_are_independent"),
    mistake="Activations quantized with one scale for the whole tensor.",
)
def input_quantized_by_the_largest_entry(x, weight):
    step = x.abs().max().clamp(min=1e-30) / 127
    return functional.linear((x / step).round() * step, weight)


# ------------------------------------------------------------------------------------------------------------ precision


def _shortened(tensor, bits):
    """The tensor with that many mantissa bits dropped."""
    return (tensor.float().view(torch.int32) >> bits << bits).view(torch.float32).to(tensor.dtype)


@fault(
    LINEAR,
    family="precision",
    does="factors keep 11 bits, as in TF32",
    detected_by=("agrees_with_the_oracle", "identity_weight_returns_the_input", "basis_vectors_give_columns"),
    mistake="A global switch; values of few bits do not show it.",
)
def tf32_inside(x, weight):
    return functional.linear(_shortened(x, 13), _shortened(weight, 13))


@fault(
    LINEAR,
    family="precision",
    does="the sum is returned by way of bfloat16",
    detected_by=("exact_where_nothing_rounds", "identity_weight_returns_the_input", "agrees_with_the_oracle"),
    mistake="Autocast, cast back.",
)
def bfloat16_inside(x, weight):
    return functional.linear(x.bfloat16(), weight.bfloat16()).to(x.dtype)


@fault(
    LINEAR,
    family="signature",
    does="the result stays in float64",
    detected_by=("keeps_its_signature",),
    mistake="Widened for accuracy, never narrowed again.",
)
def float64_returned(x, weight):
    return functional.linear(x.double(), weight.double())


# ------------------------------------------------------------------------------- other rows, memory, what a call leaves


@fault(
    LINEAR,
    family="signature",
    does="several leading axes come back as one",
    detected_by=("takes_any_number_of_leading_axes",),
    mistake="Flattened for a matrix product, never unflattened.",
)
def leading_axes_flattened(x, weight):
    return functional.linear(x, weight).flatten(0, max(x.ndim - 2, 0))


@fault(
    LINEAR,
    family="batch",
    does="the mean of the batch is subtracted from the input",
    detected_by=("rows_of_a_batch_are_independent", "identity_weight_returns_the_input"),
    mistake="A statistic of the batch leaks into every row.",
)
def batch_statistics(x, weight):
    return functional.linear(x - x.mean(), weight)


@fault(
    LINEAR,
    family="layout",
    does="the weight's memory is walked as if it were contiguous",
    detected_by=("any_memory_layout",),
    mistake="W = A.T is a view with its strides exchanged.",
    report="pytorch/pytorch#162730",
)
def strides_ignored(x, weight):
    return functional.linear(x, weight.as_strided(weight.shape, (weight.shape[1], 1)))


@fault(
    LINEAR,
    family="arguments",
    does="the weight is transposed in place for a product that wants it so",
    detected_by=("does_not_change_its_arguments",),
    mistake="t_() makes no copy: it turns the caller's tensor.",
)
def weight_transposed_in_place(x, weight):
    return x @ weight.t_()


_WEIGHTS: dict[torch.Size, torch.Tensor] = {}


@fault(
    LINEAR,
    family="memory",
    does="the weight of the first call of a shape serves all later ones",
    detected_by=("has_no_memory", "agrees_with_the_oracle"),
    mistake="A layer is built once for each size, and its weight never loaded again.",
)
def weight_kept_by_shape(x, weight):
    return functional.linear(x, _WEIGHTS.setdefault(weight.shape, weight.clone()))
