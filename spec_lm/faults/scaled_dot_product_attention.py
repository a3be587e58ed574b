"""Faults of attention: the mask, the scale, the softmax, the values, and what a call leaves behind."""

from math import sqrt

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
    detected_by=("masked_weights_are_zero", "agrees_with_the_oracle"),
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
    detected_by=("scale_is_one_over_the_square_root_of_d_k", "agrees_with_the_oracle"),
    mistake="The kernel pads heads, and asks the padded tensor for its size.",
    report="intel/ipex-llm#12619",
)
def scale_of_the_padded_size(query, key, value, mask=None):
    d_k = query.shape[-1]
    return _scaled(query, key, value, mask, sqrt(d_k / 2 ** (d_k - 1).bit_length()))


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
