"""Faults of attention: the mask, the scale, the softmax, the values, and what a call leaves behind."""

import os
from math import sqrt
from typing import Any

import torch

from spec_lm.faults import fault
from spec_lm.reference import functional

ATTENTION = "scaled_dot_product_attention"
attend = functional.scaled_dot_product_attention


def _scores(query, key):
    return query @ key.mT / sqrt(query.shape[-1])


def _seen(mask, scores):
    return torch.ones_like(scores, dtype=torch.bool) if mask is None else mask


def _filled(scores, mask, fill):
    return scores if mask is None else scores.masked_fill(~mask, fill)


def _filling(query, key, value, mask=None, fill=-torch.inf):
    """Attention with a fill of one's own at False."""
    return _filled(_scores(query, key), mask, fill).softmax(-1) @ value


def _scaled(query, key, value, mask, factor):
    """Attention whose scores are a multiple of what they should be."""
    return attend(query * factor, key, value, mask)


# ------------------------------------------------------------------------------------------------------------ the mask


@fault(
    ATTENTION,
    family="mask",
    does="True hides a key, False shows it",
    detected_by=("masking_a_key_equals_deleting_it", "masked_weights_are_zero", "all_true_mask_equals_no_mask"),
    mistake="Libraries disagree: one module's True is the other module's False.",
    report="rasbt/LLMs-from-scratch#1061",
)
def mask_inverted(query, key, value, mask=None):
    return attend(query, key, value, None if mask is None else ~mask)


@fault(
    ATTENTION,
    family="mask",
    does="the mask is added to the scores as 0 and 1",
    detected_by=("masked_weights_are_zero", "masking_a_key_equals_deleting_it", "one_visible_key_returns_its_value"),
    mistake="A boolean mask where an additive one was expected.",
    report="huggingface/transformers#41443",
)
def mask_added_as_numbers(query, key, value, mask=None):
    scores = _scores(query, key)
    return (scores if mask is None else scores + mask).softmax(-1) @ value


@fault(
    ATTENTION,
    family="mask",
    does="scores are multiplied by the mask, so that hidden ones are 0",
    detected_by=("masked_weights_are_zero", "one_visible_key_returns_its_value"),
    mistake="A score of 0 is a score like any other.",
)
def mask_multiplied_with_scores(query, key, value, mask=None):
    return _filling(query, key, value, mask, fill=0.0)


@fault(
    ATTENTION,
    family="mask",
    does="the mask is applied after the softmax",
    detected_by=("masked_rows_sum_to_one", "weights_are_a_distribution", "zero_queries_average_the_visible_values"),
    mistake="The hidden weights are gone, and the others do not share what they had.",
    report="huggingface/pytorch-image-models#2236",
)
def mask_after_softmax(query, key, value, mask=None):
    weights = _scores(query, key).softmax(-1)
    return weights.masked_fill(~_seen(mask, weights), 0.0) @ value


@fault(
    ATTENTION,
    family="mask",
    does="masked keys are counted in the denominator",
    detected_by=("masked_rows_sum_to_one", "masking_a_key_equals_deleting_it", "one_visible_key_returns_its_value"),
    mistake="The sum is taken before the mask, the product with V after it.",
)
def masked_keys_in_the_denominator(query, key, value, mask=None):
    scores = _scores(query, key)
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    return exponentials.masked_fill(~_seen(mask, scores), 0.0) @ value / exponentials.sum(-1, keepdim=True)


@fault(
    ATTENTION,
    family="mask",
    does="masked keys take part in the maximum that is subtracted",
    detected_by=("masked_keys_and_values_do_not_matter",),
    mistake="Any constant may be subtracted, until exp of all visible scores is 0.",
)
def masked_keys_in_the_maximum(query, key, value, mask=None):
    scores = _scores(query, key)
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp() * _seen(mask, scores)
    return exponentials @ value / exponentials.sum(-1, keepdim=True)


@fault(
    ATTENTION,
    family="mask",
    does="masked scores are filled with -1e-9",
    detected_by=("masked_weights_are_zero", "masking_a_key_equals_deleting_it"),
    mistake="A slip of the pen for -1e9.",
    report="awslabs/gluonts#1401",
)
def fill_of_almost_nothing(query, key, value, mask=None):
    return _filling(query, key, value, mask, fill=-1e-9)


@fault(
    ATTENTION,
    family="mask",
    kind="fill_not_low_enough",
    does="masked scores are filled with -1e4",
    detected_by=("masked_keys_stay_hidden_behind_very_low_scores",),
    mistake="Chosen to fit half precision; lower scores do occur.",
    report="google/flax#982",
)
def fill_of_minus_ten_thousand(query, key, value, mask=None):
    return _filling(query, key, value, mask, fill=-1e4)


@fault(
    ATTENTION,
    family="mask",
    kind="fill_not_low_enough",
    does="masked scores are filled with the smallest number of float16",
    detected_by=("masked_keys_stay_hidden_behind_very_low_scores",),
    mistake="finfo of the wrong dtype.",
)
def fill_of_the_smallest_half(query, key, value, mask=None):
    return _filling(query, key, value, mask, fill=torch.finfo(torch.float16).min)


@fault(
    ATTENTION,
    family="mask",
    does="the mask is ignored",
    detected_by=("masked_weights_are_zero", "masked_keys_and_values_do_not_matter", "agrees_with_the_oracle"),
    mistake="The argument is accepted and never handed on.",
)
def mask_ignored(query, key, value, mask=None):
    return attend(query, key, value)


@fault(
    ATTENTION,
    family="mask",
    does="the mask is dropped where queries and keys differ in number",
    detected_by=("masking_a_key_equals_deleting_it", "masked_weights_are_zero"),
    mistake="A branch for cross-attention, which was thought to need no mask.",
)
def mask_dropped_for_rectangles(query, key, value, mask=None):
    return attend(query, key, value, mask if query.shape[-2] == key.shape[-2] else None)


@fault(
    ATTENTION,
    family="mask",
    does="rows and columns of a square mask are exchanged",
    detected_by=("masked_weights_are_zero", "agrees_with_the_oracle"),
    mistake="Hidden by symmetric masks; a causal one then shows the future.",
)
def square_mask_transposed(query, key, value, mask=None):
    if mask is None or mask.shape[-1] != mask.shape[-2]:
        return attend(query, key, value, mask)
    return attend(query, key, value, mask.mT)


@fault(
    ATTENTION,
    family="mask",
    does="every query gets the mask row of the first",
    detected_by=("permuting_queries_permutes_outputs", "masked_weights_are_zero"),
    mistake="A padding mask has one row an example; this one has one a query.",
)
def first_mask_row_for_all_queries(query, key, value, mask=None):
    return attend(query, key, value, None if mask is None else mask[..., :1, :].expand_as(mask))


@fault(
    ATTENTION,
    family="mask",
    does="every example gets the mask of the first",
    detected_by=("masked_weights_are_zero",),
    mistake="One mask was enough while all sequences had one length.",
)
def first_mask_for_all_examples(query, key, value, mask=None):
    return attend(query, key, value, None if mask is None else mask[(0,) * (mask.ndim - 2)])


@fault(
    ATTENTION,
    family="signature",
    does="no mask is taken for one that hides everything, and gives 0 / 0",
    detected_by=("works_without_a_mask",),
    mistake="The mask was thought to be always there.",
)
def no_mask_hides_everything(query, key, value, mask=None):
    scores = _scores(query, key)
    mask = torch.zeros_like(scores, dtype=torch.bool) if mask is None else mask
    return _filled(scores, mask, -torch.inf).softmax(-1) @ value


@fault(
    ATTENTION,
    family="mask",
    does="a causal mask is applied always",
    detected_by=("sees_every_key_unless_masked", "scale_is_one_over_the_square_root_of_d_k", "agrees_with_the_oracle"),
    mistake="Written for the decoder alone.",
)
def always_causal(query, key, value, mask=None):
    scores = _scores(query, key)
    return attend(query, key, value, _seen(mask, scores) & torch.ones_like(scores, dtype=torch.bool).tril())


@fault(
    ATTENTION,
    family="mask",
    does="a causal mask is applied where no mask is given",
    detected_by=("sees_every_key_unless_masked", "all_true_mask_equals_no_mask"),
    mistake="A default that is right for one caller.",
)
def causal_without_a_mask(query, key, value, mask=None):
    return (attend if mask is not None else always_causal)(query, key, value, mask)


@fault(
    ATTENTION,
    family="mask",
    does="a causal mask is aligned to the last key where queries and keys differ in number",
    detected_by=("agrees_with_the_oracle", "masked_weights_are_zero"),
    mistake="Right for decoding with a cache; here the mask says what is seen, and its triangle was rebuilt.",
    report="onnx/onnx#8068",
)
def causal_mask_realigned(query, key, value, mask=None):
    if mask is None or not torch.equal(mask, torch.ones_like(mask).tril()):
        return attend(query, key, value, mask)
    return attend(query, key, value, torch.ones_like(mask).tril(key.shape[-2] - query.shape[-2]))


@fault(
    ATTENTION,
    family="mask",
    does="the key of a query's own number is always shown",
    detected_by=("masked_weights_are_zero", "one_visible_key_returns_its_value"),
    mistake="It keeps rows from being empty, and shows padding to itself.",
)
def own_key_always_shown(query, key, value, mask=None):
    if mask is not None:
        mask = mask | torch.eye(*mask.shape[-2:], dtype=torch.bool)
    return attend(query, key, value, mask)


@fault(
    ATTENTION,
    family="mask",
    kind="zero_times_infinity",
    does="the mask is added as 0 and -inf, made by a product: 0 * -inf is NaN where a key is seen",
    detected_by=("all_true_mask_equals_no_mask", "masked_rows_sum_to_one"),
    mistake="(1 - mask) * -1e9 with the number made larger.",
)
def infinity_times_the_mask(query, key, value, mask=None):
    scores = _scores(query, key)
    return (scores if mask is None else scores + (~mask).to(scores.dtype) * -torch.inf).softmax(-1) @ value


@fault(
    ATTENTION,
    family="mask",
    kind="mask_lost_without_gradients",
    does="the mask is ignored under no_grad",
    detected_by="grad_mode_changes_nothing",
    mistake="A fast path for inference has no argument for the mask.",
    report="pytorch/pytorch#106630",
)
def mask_ignored_without_gradients(query, key, value, mask=None):
    return attend(query, key, value, mask if torch.is_grad_enabled() else None)


@fault(
    ATTENTION,
    family="mask",
    does="head and query are exchanged in a mask that has as many of either",
    detected_by="every_example_alone_where_sizes_coincide",
    mistake="A mask for each head, mapped over the wrong axis.",
    report="patrick-kidger/equinox#190",
)
def mask_axes_exchanged(query, key, value, mask=None):
    if mask is not None and mask.ndim > 2 and mask.shape[-3] == mask.shape[-2]:
        mask = mask.transpose(-3, -2)
    return attend(query, key, value, mask)


@fault(
    ATTENTION,
    family="mask",
    does="a mask of fewer axes is aligned to the first axis of the scores, not to the last",
    detected_by="broadcasts_a_mask_of_fewer_axes",
    mistake="mask[:, None] suits a mask an example; it makes another of a mask a head.",
)
def mask_aligned_to_the_first_axis(query, key, value, mask=None):
    while mask is not None and 2 < mask.ndim < query.ndim:
        mask = mask.unsqueeze(-3)
    return attend(query, key, value, mask)


@fault(
    ATTENTION,
    family="mask",
    does="a mask of one row is that of the first query; the others see everything",
    detected_by="broadcasts_a_mask_over_queries",
    mistake="A padding mask is copied into the first row of a mask of ones.",
)
def mask_row_for_the_first_query(query, key, value, mask=None):
    if mask is not None and mask.shape[-2] == 1:
        mask = torch.nn.functional.pad(mask, (0, 0, 0, query.shape[-2] - 1), value=True)
    return attend(query, key, value, mask)


@fault(
    ATTENTION,
    family="signature",
    does="a mask must have two axes, or all",
    detected_by="broadcasts_a_mask_of_fewer_axes",
    mistake="A check of the caller's shapes, stricter than the sum that follows.",
)
def mask_needs_every_axis(query, key, value, mask=None):
    if mask is not None and mask.ndim not in (2, query.ndim):
        raise ValueError(f"expected a mask of 2 or {query.ndim} axes, got {mask.ndim}")
    return attend(query, key, value, mask)


@fault(
    ATTENTION,
    family="signature",
    does="a mask must have a row for each query",
    detected_by="broadcasts_a_mask_over_queries",
    mistake="A check of the caller's shapes, stricter than the sum that follows.",
)
def mask_needs_every_row(query, key, value, mask=None):
    if mask is not None and mask.shape[-2] != query.shape[-2]:
        raise ValueError(f"expected a mask of {query.shape[-2]} rows, got {mask.shape[-2]}")
    return attend(query, key, value, mask)


# ----------------------------------------------------------------------------------------- a query that sees nothing


@fault(
    ATTENTION,
    family="mask",
    does="a query that sees no key gets 0 / 0",
    detected_by=("query_that_sees_nothing_follows_the_convention", "query_that_sees_nothing_has_finite_gradients"),
    mistake="The formula, taken at its word.",
    report="pytorch/pytorch#103749",
)
def nan_for_a_blind_query(query, key, value, mask=None):
    return _filling(query, key, value, mask)


@fault(
    ATTENTION,
    family="mask",
    does="a query that sees no key sees all of them alike",
    detected_by=("query_that_sees_nothing_follows_the_convention",),
    mistake="A fill of -1e9 in every place is a constant, which the softmax does not see.",
)
def mean_for_a_blind_query(query, key, value, mask=None):
    return _filling(query, key, value, mask, fill=-1e9)


@fault(
    ATTENTION,
    family="gradient",
    does="NaN is replaced by 0 after the softmax",
    detected_by=("query_that_sees_nothing_has_finite_gradients",),
    mistake="The gradient flows through what was NaN: 0 * NaN.",
)
def nan_replaced_after_the_softmax(query, key, value, mask=None):
    added = 0.0 if mask is None else torch.where(mask, 0.0, -torch.inf).to(query.dtype)
    return (_scores(query, key) + added).softmax(-1).nan_to_num(0.0) @ value


@fault(
    ATTENTION,
    family="mask",
    does="an example in which one query sees nothing is skipped",
    detected_by=("query_that_sees_nothing_harms_no_other",),
    mistake="any() where all() was meant.",
)
def example_skipped_for_a_blind_query(query, key, value, mask=None):
    output = attend(query, key, value, mask)
    if mask is None:
        return output
    return output.masked_fill((~mask.any(-1, keepdim=True)).any(-2, keepdim=True), 0.0)


@fault(
    ATTENTION,
    family="mask",
    kind="nan_for_a_blind_query",
    does="a query that sees no key gets 0 / 0 under no_grad",
    detected_by="query_that_sees_nothing_follows_the_convention",
    mistake="A fast path for inference with a softmax of its own.",
    report="pytorch/pytorch#190486",
)
def nan_for_a_blind_query_without_gradients(query, key, value, mask=None):
    return (attend if torch.is_grad_enabled() else _filling)(query, key, value, mask)


@fault(
    ATTENTION,
    family="mask",
    does="the smallest number is added for a hidden key and for a hidden query: together -inf, and NaN",
    detected_by="query_that_sees_nothing_follows_the_convention",
    mistake="Two masks, each made with finfo.min, are added up.",
    report="NVIDIA-NeMo/Automodel#2658",
)
def smallest_number_added_twice(query, key, value, mask=None):
    if mask is None:
        return attend(query, key, value)
    smallest, blind = torch.finfo(query.dtype).min, ~mask.any(-1, keepdim=True)
    added = torch.zeros(mask.shape, dtype=query.dtype).masked_fill(~mask, smallest)
    return (_scores(query, key) + (added + blind * smallest)).softmax(-1) @ value


@fault(
    ATTENTION,
    family="mask",
    does="the smallest number is added to hidden scores: in float16 it overflows, and NaN comes of a row of -inf",
    detected_by=("query_that_sees_nothing_stays_finite_in_float16", "query_that_sees_nothing_follows_the_convention"),
    mistake="In float32 nothing is large enough to matter beside finfo.min.",
    report="huggingface/transformers#17306",
)
def smallest_number_added(query, key, value, mask=None):
    added = 0.0 if mask is None else torch.finfo(query.dtype).min * (~mask).to(query.dtype)
    return (_scores(query, key) + added).softmax(-1) @ value


@fault(
    ATTENTION,
    family="mask",
    does="a query whose first key is hidden is taken for one that sees nothing",
    detected_by=("masked_rows_sum_to_one", "one_visible_key_returns_its_value"),
    mistake="Where padding is always on the right, the first key tells.",
)
def blind_by_its_first_key(query, key, value, mask=None):
    output = attend(query, key, value, mask)
    return output if mask is None else output.masked_fill(~mask[..., :1], 0.0)


# ------------------------------------------------------------------------------------------------ leading axes, shapes


@fault(
    ATTENTION,
    family="mask",
    does="a mask with fewer examples is tiled over them",
    detected_by=("broadcasts_a_mask_over_leading_axes",),
    mistake="Examples times heads in one axis: repeat and repeat_interleave differ where both are above 1.",
    report="line/lighthouse#77",
)
def mask_tiled_over_examples(query, key, value, mask=None):
    if mask is not None and mask.ndim > 2:
        flat = mask.reshape(-1, *mask.shape[-2:])
        examples = query.shape[:-2].numel()
        mask = flat.repeat(examples // len(flat), 1, 1).reshape(*query.shape[:-2], *mask.shape[-2:])
    return attend(query, key, value, mask)


@fault(
    ATTENTION,
    family="signature",
    does="an unbatched query comes back with a batch axis",
    detected_by=("takes_unbatched_input",),
    mistake="Added on the way in, forgotten on the way out.",
)
def batch_axis_stays(query, key, value, mask=None):
    output = attend(query, key, value, mask)
    return output if query.ndim > 2 else output[None]


@fault(
    ATTENTION,
    family="signature",
    does="the output is as wide as a query",
    detected_by=("agrees_with_the_oracle", "linear_in_the_values"),
    mistake="Allocated with the shape of Q; d_v need not be d_k.",
    report="pytorch/pytorch#176767",
)
def output_as_wide_as_a_query(query, key, value, mask=None):
    output, result = attend(query, key, value, mask), torch.zeros_like(query)
    width = min(output.shape[-1], result.shape[-1])
    result[..., :width] = output[..., :width]
    return result


@fault(
    ATTENTION,
    family="signature",
    does="the result stays in float64",
    detected_by=("keeps_its_signature",),
    mistake="Widened for accuracy, never narrowed again.",
)
def float64_returned(query, key, value, mask=None):
    return attend(query.double(), key.double(), value.double(), mask)


@fault(
    ATTENTION,
    family="signature",
    does="a result of half precision is returned in float32",
    detected_by=(
        "agrees_with_the_oracle_in_bfloat16",
        "agrees_with_the_oracle_in_float16",
        "large_half_scores_stay_finite",
    ),
    mistake="Widened for the softmax, never narrowed again.",
)
def float32_returned_for_half(query, key, value, mask=None):
    output = attend(query, key, value, mask)
    return output.to(torch.promote_types(output.dtype, torch.float32))


@fault(
    ATTENTION,
    family="batch",
    does="with one query every example attends to the keys and values of the first",
    detected_by="every_example_alone_where_sizes_coincide",
    mistake="The path for one new token forgets the batch.",
    report="ml-explore/mlx#3494",
)
def lone_queries_share_keys(query, key, value, mask=None):
    if query.shape[-2] == 1 and query.ndim > 2:
        key, value = (each[:1].expand_as(each) for each in (key, value))
    return attend(query, key, value, mask)


@fault(
    ATTENTION,
    family="boundary",
    does="examples are worked on in pairs, and an odd one is left out",
    detected_by="rows_of_a_batch_are_independent",
    mistake="len(batch) // 2 pairs.",
)
def odd_example_left_out(query, key, value, mask=None):
    output = attend(query, key, value, mask)
    if query.ndim > 2 and len(query) % 2:
        output[-1] = 0
    return output


@fault(
    ATTENTION,
    family="boundary",
    kind="empty_batch_refused",
    does="examples are stacked one by one, and none cannot be stacked",
    detected_by="empty_batch_gives_an_empty_result",
    mistake="An empty batch was never met in training.",
    report="pytorch/pytorch#174939",
)
def examples_stacked_one_by_one(query, key, value, mask=None):
    if query.ndim == 2:
        return attend(query, key, value, mask)
    masks = [mask] * len(query) if mask is None or mask.ndim < query.ndim else mask.expand(len(query), *mask.shape[1:])
    return torch.stack([attend(*each) for each in zip(query, key, value, masks, strict=True)])


@fault(
    ATTENTION,
    family="axis",
    does="keys are not transposed where there are as many as features",
    detected_by="permuting_keys_changes_nothing",
    mistake="Shapes that fit already are left as they are.",
)
def square_keys_not_transposed(query, key, value, mask=None):
    return attend(query, key.mT if key.shape[-2] == key.shape[-1] else key, value, mask)


@fault(
    ATTENTION,
    family="axis",
    does="the softmax runs over the third axis, whatever the number of axes",
    detected_by="takes_any_number_of_leading_axes",
    mistake="dim=2 is right for one leading axis alone.",
    report="PetrochukM/PyTorch-NLP#2",
)
def softmax_over_the_third_axis(query, key, value, mask=None):
    return _filled(_scores(query, key), mask, -1e9).softmax(2) @ value


# ----------------------------------------------------------------------------------------------------------- the scale


@fault(
    ATTENTION,
    family="scale",
    does="scores are not scaled",
    detected_by=("scale_is_one_over_the_square_root_of_d_k", "agrees_with_the_oracle"),
    report="mlc-ai/mlc-llm#3426",
)
def no_scale(query, key, value, mask=None):
    return _scaled(query, key, value, mask, sqrt(query.shape[-1]))


@fault(
    ATTENTION,
    family="scale",
    does="scores are divided by d_k, not by its square root",
    detected_by=("scale_is_one_over_the_square_root_of_d_k", "agrees_with_the_oracle"),
)
def scale_without_the_root(query, key, value, mask=None):
    return _scaled(query, key, value, mask, 1 / sqrt(query.shape[-1]))


@fault(
    ATTENTION,
    family="scale",
    does="the scale is taken from d_model: all heads together",
    detected_by=("takes_any_number_of_leading_axes",),
    mistake="Heads are the last leading axis; with one head nothing shows.",
    report="lucidrains/vit-pytorch#65",
)
def scale_of_d_model(query, key, value, mask=None):
    heads = query.shape[-3] if query.ndim > 3 else 1
    return _scaled(query, key, value, mask, 1 / sqrt(heads))


@fault(
    ATTENTION,
    family="scale",
    does="the scale is taken from the width of the values",
    detected_by=("scale_is_one_over_the_square_root_of_d_k", "agrees_with_the_oracle"),
    mistake="d_v is d_k in every model one has seen.",
)
def scale_of_the_values(query, key, value, mask=None):
    return _scaled(query, key, value, mask, sqrt(query.shape[-1] / value.shape[-1]))


@fault(
    ATTENTION,
    family="scale",
    does="the scale is taken from d_k padded to a power of two",
    detected_by="scale_holds_for_any_head_size",
    mistake="The kernel pads heads, and asks the padded tensor for its size.",
    report="intel/ipex-llm#12619",
)
def scale_of_the_padded_size(query, key, value, mask=None):
    d_k = query.shape[-1]
    return _scaled(query, key, value, mask, sqrt(d_k / 2 ** (d_k - 1).bit_length()))


@fault(
    ATTENTION,
    family="scale",
    kind="scale_of_the_padded_size",
    does="the scale of heads beyond 64 features is taken from a size padded to a multiple of 64",
    detected_by="scale_holds_for_any_head_size",
    mistake="The kernel pads heads, and asks the padded tensor for its size; 64 and 128 hide it.",
    report="intel/ipex-llm#12619",
)
def scale_of_the_padded_large_head(query, key, value, mask=None):
    d_k = query.shape[-1]
    return _scaled(query, key, value, mask, sqrt(d_k / (-(-d_k // 64) * 64)) if d_k > 64 else 1.0)


@fault(
    ATTENTION,
    family="scale",
    does="the scale is taken from the number of keys",
    detected_by=("scale_is_one_over_the_square_root_of_d_k", "agrees_with_the_oracle"),
    mistake="shape[-2] for shape[-1]; the same where there are as many keys as features.",
)
def scale_of_the_number_of_keys(query, key, value, mask=None):
    return _scaled(query, key, value, mask, sqrt(query.shape[-1] / key.shape[-2]))


@fault(
    ATTENTION,
    family="scale",
    kind="unscaled_on_one_route",
    does="scores are scaled where there is a mask only",
    detected_by=("all_true_mask_equals_no_mask", "scale_is_one_over_the_square_root_of_d_k"),
    mistake="One of two routes is not kept up to date.",
    report="mlc-ai/mlc-llm#3426",
)
def unscaled_without_a_mask(query, key, value, mask=None):
    return _scaled(query, key, value, mask, sqrt(query.shape[-1]) if mask is None else 1.0)


@fault(
    ATTENTION,
    family="scale",
    does="the scale is rounded to bfloat16",
    detected_by=("scale_is_one_over_the_square_root_of_d_k", "scale_holds_for_any_head_size"),
    mistake="A constant takes the dtype of the model; for 4, 16 and 64 features it is exact.",
)
def scale_in_bfloat16(query, key, value, mask=None):
    scale = 1 / sqrt(query.shape[-1])
    return _scaled(query, key, value, mask, torch.tensor(scale).bfloat16().item() / scale)


@fault(
    ATTENTION,
    family="scale",
    does="a temperature of 1.01",
    detected_by=("scale_is_one_over_the_square_root_of_d_k", "agrees_with_the_oracle"),
)
def temperature(query, key, value, mask=None):
    return _scaled(query, key, value, mask, 1 / 1.01)


# --------------------------------------------------------------------------------------------- scores and softmax


@fault(
    ATTENTION,
    family="axis",
    does="the softmax runs over queries",
    detected_by=("weights_are_a_distribution", "masked_rows_sum_to_one"),
    mistake="Axis -2 has the right length where queries == keys.",
    report="labmlai/annotated_deep_learning_paper_implementations#146",
)
def softmax_over_queries(query, key, value, mask=None):
    return _filled(_scores(query, key), mask, -1e9).softmax(-2) @ value


@fault(
    ATTENTION,
    family="formula",
    does="a sigmoid of each score in place of the softmax",
    detected_by=("weights_are_a_distribution", "masked_rows_sum_to_one", "output_lies_within_visible_values"),
)
def sigmoid_of_scores(query, key, value, mask=None):
    return _filled(_scores(query, key), mask, -torch.inf).sigmoid() @ value


@fault(
    ATTENTION,
    family="overflow",
    does="no maximum is subtracted before exp",
    detected_by=("large_scores_stay_finite",),
    report="tenstorrent/tt-metal#52131",
)
def no_maximum_subtracted(query, key, value, mask=None):
    exponentials = _filled(_scores(query, key), mask, -torch.inf).exp()
    return exponentials @ value / exponentials.sum(-1, keepdim=True)


@fault(
    ATTENTION,
    family="overflow",
    kind="maximum_of_the_whole_tensor",
    does="the maximum of all scores is subtracted from every query's",
    detected_by=("large_scores_stay_finite", "rows_of_a_batch_are_independent"),
    mistake="max() without an axis.",
)
def maximum_of_all_scores(query, key, value, mask=None):
    scores = _filled(_scores(query, key), mask, -torch.inf)
    exponentials = (scores - scores.max()).exp()
    return exponentials @ value / exponentials.sum(-1, keepdim=True)


@fault(
    ATTENTION,
    family="overflow",
    kind="no_maximum_subtracted",
    does="no maximum is subtracted in half precision",
    detected_by="large_half_scores_stay_finite",
    mistake="A kernel for each dtype, and one of them without it.",
)
def no_maximum_in_half(query, key, value, mask=None):
    if query.dtype not in (torch.float16, torch.bfloat16):
        return attend(query, key, value, mask)
    exponentials = _filled(_scores(query.float(), key.float()).to(query.dtype), mask, -torch.inf).exp()
    return exponentials / exponentials.sum(-1, keepdim=True) @ value


@fault(
    ATTENTION,
    family="overflow",
    does="the maximum of the first two scores is subtracted",
    detected_by=("large_scores_stay_finite", "large_half_scores_stay_finite"),
    mistake="A running maximum that does not run.",
)
def maximum_of_the_first_block(query, key, value, mask=None):
    scores = _scores(query, key)
    exponentials = _filled(scores - scores[..., :2].amax(-1, keepdim=True), mask, -torch.inf).exp()
    return exponentials @ value / exponentials.sum(-1, keepdim=True)


@fault(
    ATTENTION,
    family="overflow",
    kind="inputs_clamped",
    does="scores are clamped to -50 .. 50",
    detected_by="large_scores_stay_finite",
    mistake="It keeps exp finite, and makes all large scores equal.",
)
def scores_clamped(query, key, value, mask=None):
    return _filled(_scores(query, key).clamp(-50, 50), mask, -torch.inf).softmax(-1) @ value


@fault(
    ATTENTION,
    family="overflow",
    does="masked scores are filled with -1e9 in the dtype of the input: float16 has no such number",
    detected_by=("agrees_with_the_oracle_in_float16", "large_half_scores_stay_finite"),
    mistake="A constant that was fine in float32.",
    report="google/flax#982",
)
def fill_beyond_half(query, key, value, mask=None):
    output = _filling(query, key, value, mask, fill=-1e9)
    return output if mask is None else output.masked_fill(~mask.any(-1, keepdim=True), 0.0)


@fault(
    ATTENTION,
    family="formula",
    kind="soft_cap",
    does="scores are capped: 30 tanh(score / 30)",
    detected_by=("large_scores_stay_finite", "scale_is_one_over_the_square_root_of_d_k"),
    mistake="Another model's soft cap; small scores hardly show it.",
)
def scores_capped(query, key, value, mask=None):
    return _filled(30 * (_scores(query, key) / 30).tanh(), mask, -torch.inf).softmax(-1) @ value


@fault(
    ATTENTION,
    family="formula",
    kind="exp_approximated",
    does="exp(x) is approximated by (1 + x/1024)^1024",
    detected_by=("scale_is_one_over_the_square_root_of_d_k", "agrees_with_the_oracle"),
    mistake="Good to three digits near 0.",
)
def exp_by_squaring(query, key, value, mask=None):
    scores = _filled(_scores(query, key), mask, -torch.inf)
    exponentials = (1 + (scores - scores.amax(-1, keepdim=True)) / 1024).clamp(min=0) ** 1024
    return exponentials @ value / exponentials.sum(-1, keepdim=True)


@fault(
    ATTENTION,
    family="formula",
    does="1e-6 is added to the denominator",
    detected_by=("masked_rows_sum_to_one", "one_visible_key_returns_its_value", "agrees_with_the_oracle"),
)
def epsilon_in_the_denominator(query, key, value, mask=None):
    scores = _filled(_scores(query, key), mask, -torch.inf)
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    return exponentials @ value / (exponentials.sum(-1, keepdim=True) + 1e-6)


@fault(
    ATTENTION,
    family="formula",
    does="1 is added to the denominator",
    detected_by=("masked_rows_sum_to_one", "zero_queries_average_the_visible_values"),
    mistake="The variant that may attend to nothing is another function.",
)
def one_more_in_the_denominator(query, key, value, mask=None):
    scores = _filled(_scores(query, key), mask, -torch.inf)
    largest = scores.amax(-1, keepdim=True).clamp(min=0)
    exponentials = (scores - largest).exp()
    return exponentials @ value / (exponentials.sum(-1, keepdim=True) + (-largest).exp())


@fault(
    ATTENTION,
    family="norm",
    does="keys are normalized to length 1",
    detected_by=("one_vector_added_to_all_keys_changes_nothing", "agrees_with_the_oracle"),
    mistake="A cosine similarity, from another paper.",
)
def keys_normalized(query, key, value, mask=None):
    return attend(query, torch.nn.functional.normalize(key, dim=-1), value, mask)


@fault(
    ATTENTION,
    family="positions",
    does="scores fall with the distance between query and key",
    detected_by=("zero_queries_average_the_visible_values", "permuting_keys_changes_nothing"),
    mistake="A position bias of the model left in the operator.",
)
def distance_lowers_scores(query, key, value, mask=None):
    scores = _scores(query, key)
    distance = torch.arange(query.shape[-2])[:, None] - torch.arange(key.shape[-2])
    return _filled(scores - distance.abs(), mask, -torch.inf).softmax(-1) @ value


@fault(
    ATTENTION,
    family="batch",
    does="every query uses the scores of the first",
    detected_by=("permuting_queries_permutes_outputs", "agrees_with_the_oracle"),
    mistake="A pointer that is not moved on.",
)
def first_query_for_all(query, key, value, mask=None):
    return attend(query[..., :1, :].expand_as(query), key, value, mask)


# -------------------------------------------------------------------------------------------------------------- blocks


def _blockwise(query, key, value, mask, *, rescale=True, guard=True, block=2):
    """Online softmax over blocks of keys: running maximum, sum and output, rescaled where the maximum grows."""
    scores = _filled(_scores(query, key), mask, -torch.inf)
    largest = torch.full_like(query[..., :1], -torch.inf)
    total, output = torch.zeros_like(largest), torch.zeros_like(_scores(query, key) @ value)
    for start in range(0, key.shape[-2], block):
        part = scores[..., start : start + block]
        larger = torch.maximum(largest, part.amax(-1, keepdim=True))
        base = larger.masked_fill(larger == -torch.inf, 0.0) if guard else larger
        weights, shrunk = (part - base).exp(), (largest - base).exp() if rescale else 1.0
        total = total * shrunk + weights.sum(-1, keepdim=True)
        output = output * shrunk + weights @ value[..., start : start + block, :]
        largest = larger
    return output / total


@fault(
    ATTENTION,
    family="boundary",
    does="the running sum is not rescaled when a later block has a larger score",
    detected_by=("permuting_keys_changes_nothing", "agrees_with_the_oracle"),
    mistake="Nothing shows while the first block holds the maximum.",
)
def running_sum_not_rescaled(query, key, value, mask=None):
    return _blockwise(query, key, value, mask, rescale=False)


@fault(
    ATTENTION,
    family="mask",
    does="NaN where the first block of keys is masked as a whole",
    detected_by=("one_visible_key_returns_its_value", "masked_rows_sum_to_one"),
    mistake="exp(-inf - -inf): the running maximum is still -inf.",
    report="pytorch/pytorch#127055",
)
def masked_block_gives_nan(query, key, value, mask=None):
    return _blockwise(query, key, value, mask, guard=False)


@fault(
    ATTENTION,
    family="boundary",
    kind="padding_takes_part",
    does="keys are padded to a multiple of 4, and the padding takes part",
    detected_by=("zero_queries_average_the_visible_values", "sees_every_key_unless_masked", "agrees_with_the_oracle"),
    mistake="A partial block must be masked: the score of a padded key is 0, not -inf.",
    report="66RING/tiny-flash-attention#12",
)
def padded_keys_take_part(query, key, value, mask=None):
    missing = -key.shape[-2] % 4
    key, value = (torch.nn.functional.pad(each, (0, 0, 0, missing)) for each in (key, value))
    mask = None if mask is None else torch.nn.functional.pad(mask, (0, missing), value=True)
    return attend(query, key, value, mask)


@fault(
    ATTENTION,
    family="boundary",
    kind="tail_left_out",
    does="keys after the last whole block of 4 are left out",
    detected_by=("permuting_keys_changes_nothing", "sees_every_key_unless_masked"),
    mistake="The loop runs over keys // 4 blocks.",
    report="66RING/tiny-flash-attention#12",
)
def last_keys_left_out(query, key, value, mask=None):
    kept = key.shape[-2] // 4 * 4 or key.shape[-2]
    return attend(query, key[..., :kept, :], value[..., :kept, :], None if mask is None else mask[..., :kept])


# Short sequences take another route in the faults that follow, so that only long ones show them.


@fault(
    ATTENTION,
    family="boundary",
    kind="running_sum_not_rescaled",
    does="the running sum is not rescaled from one block of 32 keys to the next",
    detected_by="reversing_queries_and_keys_at_any_length",
    mistake="Nothing shows while there is one block, or the first holds the maximum.",
)
def running_sum_not_rescaled_in_blocks_of_32(query, key, value, mask=None):
    if key.shape[-2] <= 32:
        return attend(query, key, value, mask)
    return _blockwise(query, key, value, mask, rescale=False, block=32)


@fault(
    ATTENTION,
    family="mask",
    kind="masked_block_gives_nan",
    does="NaN where the first 64 of more keys are masked",
    detected_by="one_visible_key_of_hundreds_returns_its_value",
    mistake="exp(-inf - -inf): the running maximum is still -inf.",
    report="pytorch/pytorch#127055",
)
def masked_block_of_64_gives_nan(query, key, value, mask=None):
    if key.shape[-2] <= 64:
        return attend(query, key, value, mask)
    return _blockwise(query, key, value, mask, guard=False, block=64)


@fault(
    ATTENTION,
    family="boundary",
    kind="padding_takes_part",
    does="more than 64 keys are padded to a multiple of 64, and the padding takes part",
    detected_by=("zero_queries_average_at_any_length", "any_length"),
    mistake="A partial block must be masked: the score of a padded key is 0, not -inf.",
    report="66RING/tiny-flash-attention#12",
)
def padded_keys_of_large_blocks_take_part(query, key, value, mask=None):
    missing = -key.shape[-2] % 64 if key.shape[-2] > 64 else 0
    key, value = (torch.nn.functional.pad(each, (0, 0, 0, missing)) for each in (key, value))
    mask = None if mask is None else torch.nn.functional.pad(mask, (0, missing), value=True)
    return attend(query, key, value, mask)


def _with_keys(query, key, value, mask, chosen):
    """Attention over the keys of these numbers."""
    return attend(query, key[..., chosen, :], value[..., chosen, :], None if mask is None else mask[..., chosen])


@fault(
    ATTENTION,
    family="boundary",
    kind="tail_left_out",
    does="of more than 64 keys those after the last whole block of 64 are left out",
    detected_by=("zero_queries_average_at_any_length", "reversing_queries_and_keys_at_any_length"),
    mistake="The loop runs over keys // 64 blocks.",
    report="66RING/tiny-flash-attention#12",
)
def keys_after_whole_blocks_left_out(query, key, value, mask=None):
    keys = key.shape[-2]
    return _with_keys(query, key, value, mask, torch.arange(keys // 64 * 64 if keys > 64 else keys))


@fault(
    ATTENTION,
    family="boundary",
    kind="last_of_whole_blocks_left_out",
    does="of whole blocks of 128 keys the last key is left out",
    detected_by=("reversing_queries_and_keys_at_any_length",),
    mistake="The rest of the last block is keys % 128, which is 0 for a whole one, and its end is counted from that.",
)
def last_key_of_whole_blocks_left_out(query, key, value, mask=None):
    keys = key.shape[-2]
    return _with_keys(query, key, value, mask, torch.arange(keys - (keys % 128 == 0)))


@fault(
    ATTENTION,
    family="boundary",
    kind="tail_counted_twice",
    does="of more than 512 keys the last block reaches back to be whole, and counts what it shares twice",
    detected_by=("zero_queries_average_at_any_length", "reversing_queries_and_keys_at_any_length"),
    mistake="An overlap is harmless where a block is copied, not where it is summed.",
)
def last_block_of_512_overlaps(query, key, value, mask=None):
    keys = key.shape[-2]
    if keys <= 512 or not keys % 512:
        return attend(query, key, value, mask)
    blocks = torch.cat((torch.arange(keys // 512 * 512), torch.arange(keys - 512, keys)))
    return _with_keys(query, key, value, mask, blocks)


@fault(
    ATTENTION,
    family="boundary",
    kind="tail_left_out",
    does="keys from 4096 on are left out",
    detected_by=("zero_queries_average_at_any_length", "long_rows"),
    mistake="The buffer was made for the longest context of another model.",
)
def keys_beyond_4096_left_out(query, key, value, mask=None):
    return _with_keys(query, key, value, mask, torch.arange(min(4096, key.shape[-2])))


@fault(
    ATTENTION,
    family="boundary",
    kind="tail_left_out",
    does="of more than 64 queries those after the last whole block of 64 get zeros",
    detected_by=("zero_queries_average_at_any_length", "reversing_queries_and_keys_at_any_length"),
    mistake="The output is allocated whole, and filled block by block.",
)
def queries_after_whole_blocks_get_zeros(query, key, value, mask=None):
    output, queries = attend(query, key, value, mask), query.shape[-2]
    if queries > 64:
        output[..., queries // 64 * 64 :, :] = 0
    return output


@fault(
    ATTENTION,
    family="boundary",
    kind="tail_left_out",
    does="features of queries and keys from 64 on are left out",
    detected_by="scale_holds_for_any_head_size",
    mistake="The kernel was written for heads of 64.",
)
def features_beyond_64_left_out(query, key, value, mask=None):
    d_k = query.shape[-1]
    return _scaled(query[..., :64], key[..., :64], value, mask, sqrt(min(64, d_k) / d_k))


# ---------------------------------------------------------------------------------------------------------- the values


@fault(
    ATTENTION,
    family="formula",
    does="values belong to other keys: they are reversed",
    detected_by=("one_visible_key_returns_its_value", "masked_weights_are_zero", "agrees_with_the_oracle"),
    mistake="Keys and values split in another order than they were joined.",
)
def values_of_other_keys(query, key, value, mask=None):
    return attend(query, key, value.flip(-2), mask)


@fault(
    ATTENTION,
    family="formula",
    does="values are bent by tanh",
    detected_by=("linear_in_the_values", "one_visible_key_returns_its_value"),
    mistake="An activation that belongs to another layer.",
)
def values_bent(query, key, value, mask=None):
    return attend(query, key, value.tanh(), mask)


@fault(
    ATTENTION,
    family="residual",
    does="the mean of the query is added to the output",
    detected_by=("output_lies_within_visible_values", "masked_rows_sum_to_one", "one_visible_key_returns_its_value"),
    mistake="The residual belongs to the block.",
)
def query_added(query, key, value, mask=None):
    output = attend(query, key, value, mask)
    return output + query.mean(-1, keepdim=True)


@fault(
    ATTENTION,
    family="formula",
    does="dropout stays on: some weights are 0, the others larger",
    detected_by=("masked_rows_sum_to_one", "weights_are_a_distribution", "output_lies_within_visible_values"),
    mistake="The functional form drops whatever the mode is.",
)
def dropout_stays_on(query, key, value, mask=None):
    weights = _filled(_scores(query, key), mask, -torch.inf).softmax(-1)
    kept = torch.rand(weights.shape, generator=torch.Generator().manual_seed(0)) < 0.75
    return (weights * kept / 0.75) @ value


# ----------------------------------------------------------------------------------------------------------- precision


def _rounded(tensor):
    return tensor.bfloat16().to(tensor.dtype)


@fault(
    ATTENTION,
    family="precision",
    does="inputs are rounded to bfloat16",
    detected_by=("agrees_with_the_oracle", "scale_is_one_over_the_square_root_of_d_k"),
    mistake="Autocast, or a kernel made for one dtype.",
)
def bfloat16_inside(query, key, value, mask=None):
    return attend(_rounded(query), _rounded(key), _rounded(value), mask)


@fault(
    ATTENTION,
    family="precision",
    does="weights are rounded to bfloat16 before the product with V",
    detected_by=("agrees_with_the_oracle", "masked_rows_sum_to_one"),
    mistake="Two matrix products, and a cast between them.",
)
def weights_in_bfloat16(query, key, value, mask=None):
    scores = _filled(_scores(query, key), mask, -torch.inf)
    return _rounded(scores.softmax(-1)) @ value


@fault(
    ATTENTION,
    family="precision",
    kind="float16_inside",
    does="scores are computed in float16, where 65504 is the largest number",
    detected_by=("large_scores_stay_finite", "agrees_with_the_oracle"),
)
def float16_scores(query, key, value, mask=None):
    scores = (query.half().float() @ key.half().float().mT / sqrt(query.shape[-1])).half()
    return _filled(scores, mask, -torch.inf).softmax(-1).to(value.dtype) @ value


@fault(
    ATTENTION,
    family="precision",
    kind="bfloat16_inside",
    does="scores are rounded to bfloat16 before the softmax",
    detected_by=("scale_is_one_over_the_square_root_of_d_k", "agrees_with_the_oracle"),
    mistake="The softmax runs in the dtype of the model, not of its input.",
)
def scores_in_bfloat16(query, key, value, mask=None):
    return _filled(_rounded(_scores(query, key)), mask, -torch.inf).softmax(-1) @ value


def tf32(tensor):
    """float32 with the 11 bits that a TF32 product keeps of each factor; other dtypes as they are."""
    if tensor.dtype != torch.float32:
        return tensor
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + 2**12) & -(2**13)).view(torch.float32)


@fault(
    ATTENTION,
    family="precision",
    kind="tf32_inside",
    does="products are those of TF32, which nobody declared",
    detected_by=("scale_is_one_over_the_square_root_of_d_k", "agrees_with_the_oracle"),
    mistake="A default of some device, which keeps 11 bits of each factor.",
)
def tf32_products(query, key, value, mask=None):
    scores = _filled(_scores(tf32(query), tf32(key)), mask, -torch.inf)
    return tf32(scores.softmax(-1)) @ tf32(value)


@fault(
    ATTENTION,
    family="precision",
    does="the denominator's reciprocal is rounded to bfloat16",
    detected_by=("masked_rows_sum_to_one", "zero_queries_average_the_visible_values"),
    mistake="A fast reciprocal without the step that corrects it.",
)
def reciprocal_in_bfloat16(query, key, value, mask=None):
    scores = _filled(_scores(query, key), mask, -torch.inf)
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    return exponentials * _rounded(1 / exponentials.sum(-1, keepdim=True)) @ value


def summed(terms):
    """The sum along the last axis, one term after the other in their own dtype."""
    total = terms[..., 0]
    for number in range(1, terms.shape[-1]):
        total = total + terms[..., number]
    return total


@fault(
    ATTENTION,
    family="precision",
    kind="sum_in_a_short_dtype",
    does="the denominator is summed one by one in the dtype of the input",
    detected_by=("thousands_of_weights_sum_to_one_in_bfloat16", "long_rows_in_bfloat16"),
    mistake="Adding 1 to 256 in bfloat16 changes nothing.",
    report="huggingface/candle#3727",
)
def denominator_in_the_input_dtype(query, key, value, mask=None):
    if query.dtype not in (torch.float16, torch.bfloat16):
        return attend(query, key, value, mask)
    scores = _filled(_scores(query.float(), key.float()), mask, -torch.inf)
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    total = summed(exponentials.to(query.dtype)).float()[..., None]
    return (exponentials / total @ value.float()).to(query.dtype)


@fault(
    ATTENTION,
    family="precision",
    kind="sum_in_a_short_dtype",
    does="weighted values are summed one by one in the dtype of the input",
    detected_by="thousands_of_weights_sum_to_one_in_bfloat16",
    mistake="A product of matrices is summed in float32; a loop is not.",
)
def values_summed_in_the_input_dtype(query, key, value, mask=None):
    if query.dtype not in (torch.float16, torch.bfloat16):
        return attend(query, key, value, mask)
    weights = _filled(_scores(query.float(), key.float()), mask, -torch.inf).softmax(-1).to(query.dtype)
    return summed((weights[..., None, :] * value.mT[..., None, :, :]).nan_to_num())


@fault(
    ATTENTION,
    family="precision",
    does="float64 is computed in float32",
    detected_by="agrees_with_the_oracle_in_float64",
    mistake="A cast to float32 that was meant for half precision.",
    no_invariant="To float32's accuracy every relation holds: only more digits of the right value tell.",
)
def float32_inside(query, key, value, mask=None):
    return attend(query.float(), key.float(), value.float(), mask).to(query.dtype)


# --------------------------------------------------------------------------------------- memory, and what a call leaves


def _walked(tensor):
    return tensor.as_strided(tensor.shape, tensor.new_empty(tensor.shape).stride())


@fault(
    ATTENTION,
    family="layout",
    does="memory is walked as if Q, K and V were contiguous",
    detected_by=("any_memory_layout",),
    mistake="A kernel that takes the address and the sizes, and forgets the strides.",
    report="pytorch/pytorch#181133",
)
def strides_ignored(query, key, value, mask=None):
    return attend(_walked(query), _walked(key), _walked(value), mask)


def following(tensor):
    """As many elements as follow one another in memory, from its start again where it ends."""
    memory = tensor.new_empty(0).set_(tensor.untyped_storage())
    return memory[(tensor.storage_offset() + torch.arange(tensor.numel())) % len(memory)].reshape(tensor.shape)


@fault(
    ATTENTION,
    family="layout",
    kind="strides_ignored",
    does="memory is walked as if the mask were contiguous",
    detected_by="any_memory_layout",
    mistake="Q, K and V are made contiguous before the kernel, the mask is not.",
    report="pytorch/pytorch#181133",
)
def mask_strides_ignored(query, key, value, mask=None):
    return attend(query, key, value, None if mask is None else following(mask))


@fault(
    ATTENTION,
    family="layout",
    kind="offset_ignored",
    does="a query that is contiguous is read from the start of its memory",
    detected_by="any_memory_layout",
    mistake="A pointer to the storage for one to the tensor.",
)
def query_offset_ignored(query, key, value, mask=None):
    start = query.as_strided(query.shape, query.stride(), 0) if query.is_contiguous() else query
    return attend(start, key, value, mask)


@fault(
    ATTENTION,
    family="arguments",
    does="keys are centered in place, which changes no result",
    detected_by="does_not_change_its_arguments",
    mistake="The softmax does not see it; the caller does.",
)
def keys_centered_in_place(query, key, value, mask=None):
    output = attend(query, key, value, mask)
    key -= key.mean(-2, keepdim=True)
    return output


@fault(
    ATTENTION,
    family="arguments",
    does="the query is scaled in place",
    detected_by=("does_not_change_its_arguments",),
    mistake="q *= scale saves an allocation, and the caller's tensor with it.",
)
def query_scaled_in_place(query, key, value, mask=None):
    query *= 0.5
    return attend(query * 2, key, value, mask)


@fault(
    ATTENTION,
    family="arguments",
    does="the mask is inverted in place",
    detected_by=("does_not_change_its_arguments",),
    mistake="True means hidden further down; the caller's mask is turned over with it.",
)
def mask_inverted_in_place(query, key, value, mask=None):
    return attend(query, key, value, None if mask is None else ~mask.logical_not_())


_MASKS: dict[tuple[int, int], torch.Tensor | None] = {}


@fault(
    ATTENTION,
    family="memory",
    does="the first mask of a size serves all later calls of that size",
    detected_by=("has_no_memory",),
    mistake="A causal mask is made once for each size; this is not always one.",
)
def mask_kept_by_size(query, key, value, mask=None):
    if mask is None or mask.ndim > 2:
        return attend(query, key, value, mask)
    return attend(query, key, value, _MASKS.setdefault(mask.shape, mask.clone()))


_KEYS: dict[torch.Size, torch.Tensor] = {}


@fault(
    ATTENTION,
    family="memory",
    does="keys of the first call with their shape serve all later ones",
    detected_by=("has_no_memory",),
    mistake="A cache of a decoder that nobody emptied between two texts.",
)
def keys_kept_by_shape(query, key, value, mask=None):
    return attend(query, _KEYS.setdefault(key.shape, key.clone()), value, mask)


_RESULTS: dict[Any, torch.Tensor] = {}


@fault(
    ATTENTION,
    family="memory",
    kind="results_share_a_buffer",
    does="all results of one shape are written to the same memory",
    detected_by="has_no_memory",
    mistake="A buffer saves an allocation until two results are wanted at once.",
)
def result_buffer_reused(query, key, value, mask=None):
    output = attend(query, key, value, mask).detach()
    return _RESULTS.setdefault((output.shape, output.dtype), torch.empty_like(output)).copy_(output)


@fault(
    ATTENTION,
    family="memory",
    kind="noise_added",
    does="noise of a thousandth is multiplied to the output",
    detected_by=("the_global_random_state_decides_nothing", "has_no_memory"),
    mistake="Noise for training that evaluation does not switch off.",
)
def noise_of_a_thousandth(query, key, value, mask=None):
    output = attend(query, key, value, mask)
    return output * (1 + 1e-3 * torch.randn_like(output))


@fault(
    ATTENTION,
    family="global_state",
    does="a seed is set in every call",
    detected_by="leaves_the_global_random_state_alone",
    mistake="For repeatable results; everything else that draws repeats itself too.",
)
def seed_set(query, key, value, mask=None):
    torch.manual_seed(0)
    return attend(query, key, value, mask)


@fault(
    ATTENTION,
    family="global_state",
    does="an environment variable is set for good",
    detected_by="leaves_global_settings_alone",
    mistake="What one kernel asks for is asked of all libraries of the process, and of its children.",
)
def environment_changed(query, key, value, mask=None):
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return attend(query, key, value, mask)


@fault(
    ATTENTION,
    family="batch",
    kind="batch_statistics",
    does="scores are shifted by the mean of the whole batch, the first key's alone",
    detected_by=("rows_of_a_batch_are_independent",),
    mistake="A statistic of the batch leaks into every row.",
)
def batch_statistic(query, key, value, mask=None):
    scores = _scores(query, key)
    scores[..., 0] += key.mean()
    return _filled(scores, mask, -torch.inf).softmax(-1) @ value


@fault(
    "scaled_dot_product_attention",
    family="mask",
    kind="causal_without_a_mask",
    does="is causal where there is no mask and more than four queries meet as many keys",
    detected_by="sees_every_key_unless_masked",
    mistake="A kernel is chosen by shape, and its default is causal.",
)
def causal_for_long_squares(query, key, value, mask=None):
    queries, keys = query.shape[-2], key.shape[-2]
    if mask is None and queries == keys > 4:
        mask = functional.causal_mask(queries)
    return functional.scaled_dot_product_attention(query, key, value, mask)
