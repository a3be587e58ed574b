"""Faults of embedding: ids outside, special or shifted, rows that are not copies, and what a call leaves behind."""

import torch
import torch.nn.functional as F

from spec_lm.faults import fault
from spec_lm.reference import functional

EMBEDDING = "embedding"


# ---------------------------------------------------------------------------------------------------------- ids outside


@fault(
    EMBEDDING,
    family="refusal",
    does="ids outside are clamped to the last row",
    detected_by=("ids_outside_are_refused",),
    mistake="A vocabulary that is too small goes unnoticed.",
    report="jax-ml/jax#3774",
)
def ids_clamped(token_ids, weight):
    return weight[token_ids.clamp(max=weight.shape[0] - 1)]


@fault(
    EMBEDDING,
    family="refusal",
    does="ids outside wrap around",
    detected_by=("ids_outside_are_refused",),
    mistake="A remainder keeps every id inside, and gives it another token's row.",
)
def ids_wrapped(token_ids, weight):
    return weight[token_ids % weight.shape[0]]


@fault(
    EMBEDDING,
    family="refusal",
    does="ids outside give a row of zeros",
    detected_by=("ids_outside_are_refused",),
    mistake="A gather with a mask, or a one-hot row without its 1.",
    report="pytorch/pytorch#144824",
)
def zeros_for_ids_outside(token_ids, weight):
    inside = token_ids < weight.shape[0]
    return weight[token_ids.where(inside, 0)] * inside[..., None]


@fault(
    EMBEDDING,
    family="refusal",
    does="negative ids count from the end",
    detected_by=("negative_ids_are_refused",),
    mistake="Indexing does so by itself, and -1 is what many give to padding.",
)
def negative_ids_count_from_the_end(token_ids, weight):
    functional.embedding(token_ids.clamp(min=0), weight)
    return weight[token_ids]


# ---------------------------------------------------------------------------------------- ids that are special, shifted


@fault(
    EMBEDDING,
    family="formula",
    kind="id_is_padding",
    does="id 0 gives zeros, as padding",
    detected_by=("id_zero_is_not_special", "rows_are_copied_exactly", "renumbering_the_vocabulary_changes_nothing"),
    mistake="padding_idx=0, copied from a model that pads with 0.",
)
def id_zero_is_padding(token_ids, weight):
    return functional.embedding(token_ids, weight) * (token_ids != 0)[..., None]


@fault(
    EMBEDDING,
    family="formula",
    kind="id_is_padding",
    does="the last id gives zeros, as an end-of-text token",
    detected_by=("renumbering_the_vocabulary_changes_nothing", "rows_are_copied_exactly"),
    mistake="padding_idx=-1.",
)
def last_id_is_padding(token_ids, weight):
    return functional.embedding(token_ids, weight) * (token_ids != weight.shape[0] - 1)[..., None]


@fault(
    EMBEDDING,
    family="formula",
    does="ids are counted from 1",
    detected_by=("rows_are_copied_exactly", "renumbering_the_vocabulary_changes_nothing", "id_zero_is_not_special"),
    mistake="Id 0 becomes -1, which is the last row.",
)
def ids_counted_from_one(token_ids, weight):
    functional.embedding(token_ids, weight)
    return weight[token_ids - 1]


@fault(
    EMBEDDING,
    family="signature",
    does="int32 ids are stepped through as if they were int64: every second one is read",
    detected_by=("int32_ids",),
    mistake="A kernel made for one width of integer, without a check.",
)
def int32_read_as_int64(token_ids, weight):
    if token_ids.dtype == torch.int32:
        flat = token_ids.reshape(-1)
        token_ids = flat[2 * torch.arange(flat.numel()) % flat.numel()].reshape(token_ids.shape)
    return functional.embedding(token_ids, weight)


def _by_way_of(dtype):
    """A lookup by ids that were held in a narrow dtype; what leaves the table there wraps around."""

    def narrowed(token_ids, weight):
        functional.embedding(token_ids, weight)
        return weight[token_ids.to(dtype).long() % weight.shape[0]]

    return narrowed


@fault(
    EMBEDDING,
    family="precision",
    kind="ids_in_a_narrow_dtype",
    does="ids are held in bfloat16",
    detected_by=("rows_of_a_large_table_are_found", "long_rows"),
    mistake="The batch is cast to the model's dtype as a whole; from 256 on, neighbors become one.",
)
def ids_in_bfloat16(token_ids, weight):
    return _by_way_of(torch.bfloat16)(token_ids, weight)


@fault(
    EMBEDDING,
    family="precision",
    kind="ids_in_a_narrow_dtype",
    does="ids are held in float16",
    detected_by=("rows_of_a_large_table_are_found",),
    mistake="The batch is cast to the model's dtype as a whole; from 2048 on, neighbors become one.",
)
def ids_in_float16(token_ids, weight):
    return _by_way_of(torch.float16)(token_ids.clamp(max=65000), weight)


@fault(
    EMBEDDING,
    family="precision",
    kind="ids_in_a_narrow_dtype",
    does="ids are held in int16",
    detected_by=("rows_of_a_large_table_are_found",),
    mistake="Enough for a vocabulary of 32768; data files of uint16 are read so too.",
)
def ids_in_int16(token_ids, weight):
    return _by_way_of(torch.int16)(token_ids, weight)


# --------------------------------------------------------------------------------------------- rows that are not copies


@fault(
    EMBEDDING,
    family="scale",
    kind="embedding_scaled",
    does="rows are multiplied by sqrt(d_model)",
    detected_by=("scaled_by_nothing", "rows_are_copied_exactly", "agrees_with_the_oracle"),
    mistake="The first Transformer did so, with tied weights.",
)
def scaled_by_the_root_of_d_model(token_ids, weight):
    return functional.embedding(token_ids, weight) * weight.shape[1] ** 0.5


@fault(
    EMBEDDING,
    family="norm",
    does="rows are normalized",
    detected_by=("rows_are_copied_exactly", "scaled_by_nothing"),
    mistake="max_norm, or the first layer's norm moved in.",
)
def rows_normalized(token_ids, weight):
    return torch.nn.functional.normalize(functional.embedding(token_ids, weight), dim=-1)


@fault(
    EMBEDDING,
    family="precision",
    kind="bfloat16_inside",
    does="the table is kept in bfloat16",
    detected_by=("rows_are_copied_exactly", "agrees_with_the_oracle"),
)
def table_in_bfloat16(token_ids, weight):
    return functional.embedding(token_ids, weight.bfloat16()).to(weight.dtype)


@fault(
    EMBEDDING,
    family="batch",
    does="an id that stands there already gets the next row",
    detected_by=("rows_are_copied_exactly", "agrees_with_the_oracle"),
    mistake="Distinct ids are gathered first, and scattered back by the wrong index.",
    report="pytorch/pytorch#943",
)
def repeated_ids_get_another_row(token_ids, weight):
    flat = token_ids.reshape(-1)
    repeated = torch.stack([(flat[:i] == flat[i]).any() for i in range(flat.numel())]).reshape(token_ids.shape)
    return weight[(token_ids + repeated) % weight.shape[0]]


@fault(
    EMBEDDING,
    family="weights",
    kind="square_weight_transposed",
    does="a square table is read by columns",
    detected_by=("rows_are_copied_exactly", "renumbering_the_vocabulary_changes_nothing"),
    mistake="A one-hot row times W^T; only where vocab is d_model does it pass without an error.",
    report="Integral2u/SharpMind#14",
)
def square_table_transposed(token_ids, weight):
    square = weight.shape[0] == weight.shape[1]
    return functional.embedding(token_ids, weight.T if square else weight)


@fault(
    EMBEDDING,
    family="overflow",
    kind="outputs_clamped",
    does="rows are clamped to the range of float16",
    detected_by=("rows_are_copied_exactly",),
    mistake="A guard against overflow that float32 does not need.",
)
def rows_clamped(token_ids, weight):
    return functional.embedding(token_ids, weight).clamp(-65504, 65504)


@fault(
    EMBEDDING,
    family="boundary",
    kind="tail_left_out",
    does="columns beyond the last whole block of 32 are 0",
    detected_by=("reversing_ids_and_columns", "any_length"),
    mistake="The copy runs over whole blocks only, and d_model is a multiple of 32 in every real model.",
)
def columns_beyond_whole_blocks_not_copied(token_ids, weight):
    kept = weight.shape[1] // 32 * 32 or weight.shape[1]
    return F.pad(functional.embedding(token_ids, weight)[..., :kept], (0, weight.shape[1] - kept))


@fault(
    EMBEDDING,
    family="boundary",
    kind="beyond_a_block_not_written",
    does="columns from the 1025th on are 0",
    detected_by=("reversing_ids_and_columns",),
    mistake="One block of threads is launched for each row, and no loop follows.",
)
def columns_beyond_1024_not_copied(token_ids, weight):
    rows = functional.embedding(token_ids, weight[:, :1024])
    return F.pad(rows, (0, weight.shape[1] - rows.shape[-1]))


@fault(
    EMBEDDING,
    family="boundary",
    kind="tail_left_out",
    does="ids beyond the last whole block of 64 get rows of zeros",
    detected_by="reversing_ids_and_columns",
    mistake="The block loop runs over whole blocks only.",
)
def ids_beyond_whole_blocks_not_looked_up(token_ids, weight):
    n = token_ids.numel()
    rows = functional.embedding(token_ids, weight).reshape(n, -1)
    done = n // 64 * 64 or n
    return F.pad(rows[:done], (0, 0, 0, n - done)).reshape(*token_ids.shape, -1)


@fault(
    EMBEDDING,
    family="precision",
    does="float64 is looked up in float32",
    detected_by=("rows_are_copied_exactly_in_float64",),
    mistake="float32 is written where float32 at least was meant.",
)
def float32_inside(token_ids, weight):
    return functional.embedding(token_ids, weight.float()).to(weight.dtype)


@fault(
    EMBEDDING,
    family="precision",
    kind="bfloat16_inside",
    does="float64 is looked up in bfloat16",
    detected_by=("agrees_with_the_oracle_in_float64", "rows_are_copied_exactly_in_float64"),
    mistake="There are tables for float32 and for half precision, and the choice knows no third dtype.",
)
def float64_in_bfloat16(token_ids, weight):
    path = table_in_bfloat16 if weight.dtype == torch.float64 else functional.embedding
    return path(token_ids, weight)


@fault(
    EMBEDDING,
    family="signature",
    does="half precision comes back as float32",
    detected_by=("agrees_with_the_oracle_in_bfloat16", "agrees_with_the_oracle_in_float16", "long_rows_in_bfloat16"),
    mistake="Widened for the first norm, never narrowed again.",
    no_invariant="in half precision a row is compared with that of the table alone, which is the oracle",
)
def float32_returned_for_half(token_ids, weight):
    return functional.embedding(token_ids, functional.upcast(weight))


# --------------------------------------------------------------------------------------- memory, and what a call leaves


@fault(
    EMBEDDING,
    family="arguments",
    does="rows longer than 1 are shortened in the caller's table",
    detected_by=("does_not_change_its_arguments",),
    mistake="max_norm writes its result into the weight during the forward pass.",
    report="pytorch/pytorch#28959",
)
def renormalized_in_place(token_ids, weight):
    weight /= weight.norm(dim=1, keepdim=True).clamp(min=1)
    return functional.embedding(token_ids, weight)


@fault(
    EMBEDDING,
    family="signature",
    kind="leading_axes_flattened",
    does="several axes of ids come back as one",
    detected_by=("takes_any_number_of_leading_axes",),
    mistake="Flattened for a gather, never unflattened.",
)
def axes_flattened(token_ids, weight):
    return functional.embedding(token_ids, weight).flatten(0, max(token_ids.ndim - 1, 0))


@fault(
    EMBEDDING,
    family="batch",
    does="the mean row of the batch is subtracted",
    detected_by=("rows_of_a_batch_are_independent", "rows_are_copied_exactly"),
    mistake="A statistic of the batch leaks into every row.",
)
def batch_statistics(token_ids, weight):
    rows = functional.embedding(token_ids, weight)
    return rows - rows.mean()


@fault(
    EMBEDDING,
    family="signature",
    does="the result stays in float64",
    detected_by=("keeps_its_signature",),
    mistake="A table widened for accuracy.",
)
def float64_returned(token_ids, weight):
    return functional.embedding(token_ids, weight.double())


@fault(
    EMBEDDING,
    family="layout",
    does="the table's memory is walked as if it were contiguous",
    detected_by=("any_memory_layout",),
    mistake="A kernel that takes the address and the sizes, and forgets the strides.",
)
def strides_ignored(token_ids, weight):
    return functional.embedding(token_ids, weight.as_strided(weight.shape, (weight.shape[1], 1)))


@fault(
    EMBEDDING,
    family="layout",
    kind="strides_ignored",
    does="the ids' memory is walked as if it were contiguous",
    detected_by=("any_memory_layout",),
    mistake="A batch that was transposed, or repeated without a copy, has the same address.",
)
def strides_of_ids_ignored(token_ids, weight):
    ids = token_ids.as_strided(token_ids.shape, token_ids.new_empty(token_ids.shape).stride())
    return functional.embedding(ids, weight)


@fault(
    EMBEDDING,
    family="layout",
    does="the offset of the table into its memory is left out",
    detected_by=("any_memory_layout",),
    mistake="A shard of one table starts where the whole does.",
)
def offset_ignored(token_ids, weight):
    return functional.embedding(token_ids, weight.as_strided(weight.shape, weight.stride(), 0))


@fault(
    EMBEDDING,
    family="signature",
    kind="empty_batch_refused",
    does="ids are checked by their maximum, which fails where there are none",
    detected_by=("empty_batch_gives_an_empty_result",),
    mistake="max() of nothing raises.",
    report="pytorch/pytorch#34202",
)
def checked_by_the_maximum(token_ids, weight):
    if token_ids.max() >= weight.shape[0]:
        raise IndexError("an id is outside the vocabulary")
    return functional.embedding(token_ids, weight)


@fault(
    EMBEDDING,
    family="memory",
    kind="another_path_without_gradients",
    does="under no_grad rows come from a table in bfloat16",
    detected_by=("grad_mode_changes_nothing",),
    mistake="A smaller table for inference, compared with nothing.",
)
def bfloat16_under_no_grad(token_ids, weight):
    return functional.embedding(token_ids, weight) if torch.is_grad_enabled() else table_in_bfloat16(token_ids, weight)


@fault(
    EMBEDDING,
    family="memory",
    kind="another_path_with_gradients",
    does="rows longer than 1 are shortened where gradients are tracked",
    detected_by=("grad_mode_changes_nothing",),
    mistake="max_norm is meant for training, and decides the forward pass.",
    report="pytorch/pytorch#26596",
)
def shortened_where_gradients_are_tracked(token_ids, weight):
    rows = functional.embedding(token_ids, weight)
    return rows / rows.norm(dim=-1, keepdim=True).clamp(min=1) if weight.requires_grad else rows


_RESULTS: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}


@fault(
    EMBEDDING,
    family="memory",
    does="all results of a shape are written to one buffer",
    detected_by=("has_no_memory",),
    mistake="An allocation is saved, and an earlier result overwritten.",
)
def results_share_a_buffer(token_ids, weight):
    rows = functional.embedding(token_ids, weight).detach()
    return _RESULTS.setdefault((rows.shape, rows.dtype), torch.empty_like(rows)).copy_(rows)


@fault(
    EMBEDDING,
    family="global_state",
    does="a tenth of the entries is dropped",
    detected_by=("the_global_random_state_decides_nothing", "scaled_by_nothing"),
    mistake="dropout() drops unless it is told not to.",
)
def dropout_left_on(token_ids, weight):
    return F.dropout(functional.embedding(token_ids, weight), 0.1)


@fault(
    EMBEDDING,
    family="global_state",
    does="a module is built in every call, and draws a table that is overwritten",
    detected_by=("leaves_the_global_random_state_alone",),
    mistake="Its initialization draws from the generator that everything else draws from.",
)
def module_built_in_every_call(token_ids, weight):
    layer = torch.nn.Embedding(*weight.shape, dtype=weight.dtype)
    functional.embedding(token_ids, weight)
    return torch.func.functional_call(layer, {"weight": weight}, (token_ids,))


@fault(
    EMBEDDING,
    family="global_state",
    does="the number of threads is set for good",
    detected_by=("leaves_global_settings_alone",),
    mistake="What suits this lookup does not suit the process.",
)
def threads_set(token_ids, weight):
    torch.set_num_threads(2)
    return functional.embedding(token_ids, weight)


_TABLES: dict[torch.Size, torch.Tensor] = {}


@fault(
    EMBEDDING,
    family="memory",
    kind="weight_kept_by_shape",
    does="the table of the first call of a shape serves all later ones",
    detected_by=("has_no_memory", "agrees_with_the_oracle"),
    mistake="A layer is built once for each size, and its weight never loaded again.",
)
def table_kept_by_shape(token_ids, weight):
    return functional.embedding(token_ids, _TABLES.setdefault(weight.shape, weight.clone()))
