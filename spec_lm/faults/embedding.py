"""Faults of embedding: ids outside, special or shifted, rows that are not copies, and what a call leaves behind."""

import torch

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
