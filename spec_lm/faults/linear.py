"""Faults of linear: the weight transposed, biased, scaled or shortened, and what a call leaves behind."""

import torch
import torch.nn.functional as F

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


@fault(
    LINEAR,
    family="weights",
    does="a square input is multiplied from the left: W X",
    detected_by=("basis_vectors_give_columns",),
    mistake="Where all sizes coincide W X has the right shape.",
)
def square_input_from_the_left(x, weight):
    square = x.ndim == 2 and x.shape == weight.shape and x.shape[0] == x.shape[1]
    return functional.linear(weight, x.T) if square else functional.linear(x, weight)


@fault(
    LINEAR,
    family="overflow",
    does="outputs are clamped to the range of float16",
    detected_by=("identity_weight_returns_the_input",),
    mistake="A guard against overflow that float32 does not need.",
)
def outputs_clamped(x, weight):
    return functional.linear(x, weight).clamp(-65504, 65504)


@fault(
    LINEAR,
    family="boundary",
    kind="tail_left_out",
    does="input features beyond the last whole block of 64 are left out",
    detected_by=("reversing_rows_features_and_outputs", "any_length"),
    mistake="The block loop runs over whole blocks only.",
    report="66RING/tiny-flash-attention#12",
)
def features_beyond_whole_blocks_left_out(x, weight):
    kept = weight.shape[1] // 64 * 64 or weight.shape[1]
    return functional.linear(x[..., :kept], weight[:, :kept])


@fault(
    LINEAR,
    family="boundary",
    kind="tail_counted_twice",
    does="the last block of 32 features is moved back to be a whole one, and counts again what it overlaps",
    detected_by=("reversing_rows_features_and_outputs", "any_length"),
    mistake="Right for writing results; a sum must not see a feature twice.",
)
def last_block_overlaps(x, weight):
    n = weight.shape[1]
    y = functional.linear(x, weight)
    if n <= 32 or n % 32 == 0:
        return y
    twice = slice(n - 32, n // 32 * 32)
    return y + functional.linear(x[..., twice], weight[:, twice])


@fault(
    LINEAR,
    family="boundary",
    kind="beyond_a_block_not_read",
    does="input features from the 1025th on are left out",
    detected_by=("reversing_rows_features_and_outputs", "long_rows"),
    mistake="One block of threads is launched for each row, and no loop follows.",
)
def features_beyond_1024_left_out(x, weight):
    return functional.linear(x[..., :1024], weight[:, :1024])


@fault(
    LINEAR,
    family="boundary",
    kind="beyond_a_block_not_written",
    does="outputs from the 65th on are 0",
    detected_by=("reversing_rows_features_and_outputs",),
    mistake="One block of threads is launched for each row, and no loop follows.",
)
def outputs_beyond_64_not_written(x, weight):
    return _first_outputs(64, x, weight)


def _first_outputs(most, x, weight):
    """No more outputs than so many; zeros for the others."""
    y = functional.linear(x, weight[:most])
    return F.pad(y, (0, weight.shape[0] - y.shape[-1]))


@fault(
    LINEAR,
    family="boundary",
    kind="beyond_a_block_not_written",
    does="outputs from the 1025th on are 0",
    detected_by=("reversing_rows_features_and_outputs",),
    mistake="The grid is made for d_model, and the head of a language model has a vocabulary of outputs.",
)
def outputs_beyond_1024_not_written(x, weight):
    return _first_outputs(1024, x, weight)


@fault(
    LINEAR,
    family="boundary",
    kind="beyond_a_block_not_written",
    does="rows from the 65th on are 0",
    detected_by=("reversing_rows_features_and_outputs",),
    mistake="The grid is made for the batch of the benchmark.",
)
def rows_beyond_64_not_written(x, weight):
    y = functional.linear(x, weight).clone()
    if y.ndim > 1:
        y[64:] = 0
    return y


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
    family="precision",
    kind="sum_in_a_short_dtype",
    does="products are summed one by one in the input's dtype",
    detected_by=("counts_to_thousands_in_bfloat16", "long_rows_in_bfloat16"),
    mistake="In bfloat16, 256 + 1 is 256.",
    report="tenstorrent/tt-metal#52045",
)
def sum_in_the_dtype_of_the_input(x, weight):
    total = x.new_zeros(*x.shape[:-1], weight.shape[0])
    for entries, column in zip(x.unbind(-1), weight.unbind(1), strict=True):
        total = total + entries[..., None] * column
    return total


@fault(
    LINEAR,
    family="precision",
    does="float64 is computed in float32",
    detected_by=("agrees_with_the_oracle_in_float64",),
    mistake="float32 is written where float32 at least was meant.",
    no_invariant="float32's accuracy is all that any other clause asks for",
)
def float32_inside(x, weight):
    return functional.linear(x.float(), weight.float()).to(x.dtype)


@fault(
    LINEAR,
    family="signature",
    does="half precision comes back as float32",
    detected_by=(
        "agrees_with_the_oracle_in_bfloat16",
        "agrees_with_the_oracle_in_float16",
        "counts_to_thousands_in_bfloat16",
    ),
    mistake="The accumulator is returned as it is.",
)
def float32_returned_for_half(x, weight):
    return functional.linear(functional.upcast(x), functional.upcast(weight))


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
    family="layout",
    kind="strides_ignored",
    does="the input's memory is walked as if it were contiguous",
    detected_by=("any_memory_layout",),
    mistake="Heads are views of one tensor; their rows do not follow one another.",
    report="pytorch/pytorch#51713",
)
def input_strides_ignored(x, weight):
    return functional.linear(x.as_strided(x.shape, x.new_empty(x.shape).stride()), weight)


@fault(
    LINEAR,
    family="layout",
    does="the offset of the weight into its memory is left out",
    detected_by=("any_memory_layout",),
    mistake="A slice of one fused weight starts where the whole does.",
)
def offset_ignored(x, weight):
    return functional.linear(x, weight.as_strided(weight.shape, weight.stride(), 0))


@fault(
    LINEAR,
    family="signature",
    kind="empty_batch_refused",
    does="leading axes are flattened by view(batch, -1), which fails for a batch of none",
    detected_by=("empty_batch_gives_an_empty_result",),
    mistake="-1 cannot be computed where another size is 0.",
    report="pytorch/pytorch#27619",
)
def flattened_by_a_guess(x, weight):
    rows = x.reshape(x.shape[0], -1, x.shape[-1]) if x.ndim > 1 else x
    return functional.linear(rows, weight).reshape(*x.shape[:-1], weight.shape[0])


@fault(
    LINEAR,
    family="memory",
    kind="another_path_without_gradients",
    does="under no_grad the weight is rounded to 127 steps",
    detected_by=("grad_mode_changes_nothing",),
    mistake="A faster path for inference, compared with nothing.",
)
def quantized_under_no_grad(x, weight):
    return functional.linear(x, weight) if torch.is_grad_enabled() else quantized_by_the_largest_entry(x, weight)


@fault(
    LINEAR,
    family="memory",
    kind="another_path_with_gradients",
    does="where gradients are tracked factors are rounded to bfloat16",
    detected_by=("grad_mode_changes_nothing",),
    mistake="Mixed precision is for training, and was put into the layer.",
)
def bfloat16_where_gradients_are_tracked(x, weight):
    return bfloat16_inside(x, weight) if weight.requires_grad else functional.linear(x, weight)


_RESULTS: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}


@fault(
    LINEAR,
    family="memory",
    does="all results of a shape are written to one buffer",
    detected_by=("has_no_memory",),
    mistake="out= saves an allocation, and overwrites an earlier result.",
)
def results_share_a_buffer(x, weight):
    y = functional.linear(x, weight).detach()
    return _RESULTS.setdefault((y.shape, y.dtype), torch.empty_like(y)).copy_(y)


@fault(
    LINEAR,
    family="global_state",
    does="a tenth of the weights is dropped",
    detected_by=("the_global_random_state_decides_nothing", "agrees_with_the_oracle"),
    mistake="dropout() drops unless it is told not to.",
)
def dropout_left_on(x, weight):
    return functional.linear(x, F.dropout(weight, 0.1))


@fault(
    LINEAR,
    family="global_state",
    does="a module is built in every call, and draws weights that are overwritten",
    detected_by=("leaves_the_global_random_state_alone",),
    mistake="Its initialization draws from the generator that everything else draws from.",
)
def module_built_in_every_call(x, weight):
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    return torch.func.functional_call(layer, {"weight": weight}, (x,))


@fault(
    LINEAR,
    family="global_state",
    does="the precision of products is lowered for good",
    detected_by=("leaves_global_settings_alone",),
    mistake="A switch for the whole process, thrown by one layer.",
)
def matmul_precision_lowered(x, weight):
    torch.set_float32_matmul_precision("high")
    return functional.linear(x, weight)


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
