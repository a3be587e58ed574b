"""Faults of multi-head self-attention: who sees whom, heads, scale, projections, and what a call leaves behind."""

from math import gcd, sqrt
from typing import Any
from unittest.mock import patch

import torch

from spec_lm.faults import fault
from spec_lm.faults import scaled_dot_product_attention as attention
from spec_lm.reference import functional
from spec_lm.reference.functional import causal_mask, linear, merge_heads, scaled_dot_product_attention, split_heads

MHA = "multihead_self_attention"


def _attend(x, w_q, w_k, w_v, w_o, num_heads, *, mask=None, scale=1.0, split=split_heads, merge=merge_heads):
    """The equation with one of its steps replaced; `scale` comes on top of the right one."""
    query, key, value = (split(linear(x, weight), num_heads) for weight in (w_q, w_k, w_v))
    mask = causal_mask(query.shape[-2]) if mask is None else mask
    return linear(merge(scaled_dot_product_attention(query * scale, key, value, mask)), w_o)


def _ones(x):
    return torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool)


def _with(*call, **parts):
    """The reference with others in place of its own parts, as `softmax` or `linear`."""
    with patch.multiple(functional, **parts):
        return functional.multihead_self_attention(*call)


# -------------------------------------------------------------------------------------------------------- who sees whom


@fault(
    MHA,
    family="mask",
    does="has no causal mask",
    detected_by=(
        "causal_independence_from_future_tokens",
        "a_prefix_gives_the_first_outputs",
        "the_first_token_gives_its_projected_value",
        "head_split_round_trip",
        "gradient_to_later_tokens_is_zero",
    ),
    mistake="The mask is applied on one route and forgotten on the other.",
    report="keras-team/keras#23038",
)
def no_causal_mask(x, w_q, w_k, w_v, w_o, num_heads):
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, mask=_ones(x))


@fault(
    MHA,
    family="mask",
    does="lets a token see the next one",
    detected_by=("causal_independence_from_future_tokens", "gradient_to_later_tokens_is_zero"),
    mistake="tril(diagonal=1) for tril(diagonal=0).",
    report="onnx/onnx#8068",
)
def sees_the_next_token(x, w_q, w_k, w_v, w_o, num_heads):
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, mask=_ones(x).tril(1))


@fault(
    MHA,
    family="mask",
    does="inverts the mask, so that a token sees itself and the future",
    detected_by=("causal_independence_from_future_tokens", "the_past_influences_later_outputs"),
    mistake="In some libraries True means hidden.",
    report="rasbt/LLMs-from-scratch#1061",
)
def inverted_mask(x, w_q, w_k, w_v, w_o, num_heads):
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, mask=_ones(x).triu())


@fault(
    MHA,
    family="mask",
    does="lets a token see only itself and the one before",
    detected_by=("the_past_influences_later_outputs", "head_split_round_trip"),
    mistake="The window of another model is left on.",
    report="unslothai/unsloth#8253",
)
def window_of_two_tokens(x, w_q, w_k, w_v, w_o, num_heads):
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, mask=_ones(x).tril().triu(-1))


@fault(
    MHA,
    family="mask",
    does="hides a token from itself",
    detected_by=("the_first_token_gives_its_projected_value", "the_past_influences_later_outputs"),
    mistake="j < i for j <= i.",
)
def hidden_from_itself(x, w_q, w_k, w_v, w_o, num_heads):
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, mask=_ones(x).tril(-1))


@fault(
    MHA,
    family="gradient",
    does="gives the masked output, but the gradient of the unmasked one",
    detected_by="gradient_to_later_tokens_is_zero",
    mistake="The forward pass of a kernel has a mask; its backward pass was written for none.",
)
def gradient_without_the_mask(x, w_q, w_k, w_v, w_o, num_heads):
    masked = _attend(x, w_q, w_k, w_v, w_o, num_heads)
    unmasked = _attend(x, w_q, w_k, w_v, w_o, num_heads, mask=_ones(x))
    return masked.detach() + (unmasked - unmasked.detach())


@fault(
    MHA,
    family="formula",
    does="subtracts the mean of the whole sequence from queries and keys",
    detected_by=("a_prefix_gives_the_first_outputs", "causal_independence_from_future_tokens"),
    mistake="Centering keys changes nothing; centering queries does, and lets the future in.",
)
def centered_on_the_whole_sequence(x, w_q, w_k, w_v, w_o, num_heads):
    query, key = (linear(x, weight) for weight in (w_q, w_k))
    query, key = (split_heads(t - t.mean(-2, keepdim=True), num_heads) for t in (query, key))
    value = split_heads(linear(x, w_v), num_heads)
    return linear(merge_heads(scaled_dot_product_attention(query, key, value, causal_mask(x.shape[-2]))), w_o)


@fault(
    MHA,
    family="axis",
    does="attends along the batch axis",
    detected_by=("rows_of_a_batch_are_independent", "agrees_with_the_oracle"),
    mistake="A module that expects (sequence, batch, d_model) is handed (batch, sequence, d_model).",
)
def batch_and_sequence_exchanged(x, w_q, w_k, w_v, w_o, num_heads):
    return _attend(x.transpose(0, -2), w_q, w_k, w_v, w_o, num_heads).transpose(0, -2).contiguous()


@fault(
    MHA,
    family="mask",
    kind="mask_lost_without_gradients",
    does="has no causal mask under no_grad",
    detected_by="grad_mode_changes_nothing",
    mistake="A fast path for inference has no argument for the mask.",
    report="pytorch/pytorch#86120",
)
def no_causal_mask_without_gradients(x, w_q, w_k, w_v, w_o, num_heads):
    mask = None if torch.is_grad_enabled() else _ones(x)
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, mask=mask)


@fault(
    MHA,
    family="mask",
    does="takes tokens of zeros for padding, and hides them",
    detected_by="the_past_influences_later_outputs",
    mistake="Padding is zero; what is zero need not be padding.",
)
def zeros_taken_for_padding(x, w_q, w_k, w_v, w_o, num_heads):
    seen = (x != 0).any(-1)[..., None, None, :]
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, mask=causal_mask(x.shape[-2]) & seen)


@fault(
    MHA,
    family="mask",
    kind="window",
    does="lets a token see 64 tokens",
    detected_by=("running_means_at_any_length", "any_length"),
    mistake="The window of another model is left on, and short texts hide it.",
    report="unslothai/unsloth#8253",
)
def window_of_64_tokens(x, w_q, w_k, w_v, w_o, num_heads):
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, mask=_ones(x).tril().triu(-63))


@fault(
    MHA,
    family="boundary",
    does="lets the tokens after the last whole block of 64 see one another",
    detected_by="running_means_at_any_length",
    mistake="The last, partial block is masked for its length, and not for causality.",
    report="pytorch/executorch#9105",
)
def partial_block_not_causal(x, w_q, w_k, w_v, w_o, num_heads):
    sequence = x.shape[-2]
    whole, mask = sequence // 64 * 64, causal_mask(sequence)
    if whole:
        mask[whole:, whole:] = True
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, mask=mask)


@fault(
    MHA,
    family="boundary",
    kind="table_too_short",
    does="has a mask of 128 tokens, and shows later ones everything",
    detected_by="running_means_at_any_length",
    mistake="A buffer is made for the longest text of the training.",
    report="huggingface/transformers#28215",
)
def mask_of_128_tokens(x, w_q, w_k, w_v, w_o, num_heads):
    mask = causal_mask(x.shape[-2])
    mask[128:] = True
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, mask=mask)


@fault(
    MHA,
    family="boundary",
    does="does not rescale its running sum in sequences of more than 32 tokens",
    detected_by="earlier_tokens_have_no_order",
    mistake="Nothing shows while there is one block, or the first holds the maximum.",
    report="66RING/tiny-flash-attention#12",
)
def running_sum_not_rescaled(*call):
    return _with(*call, softmax=_softmax_of_blocks)


def _softmax_of_blocks(scores, dim):
    """Each exponential by the maximum so far."""
    if scores.shape[-1] <= 32:
        return scores.softmax(dim)
    exponentials = (scores - scores.cummax(dim).values).exp()
    return exponentials / exponentials.sum(dim, keepdim=True)


@fault(
    MHA,
    family="positions",
    does="lowers scores by the distance of the tokens",
    detected_by=("earlier_tokens_have_no_order", "head_split_round_trip"),
    mistake="A position bias of another model.",
)
def distance_lowers_scores(*call):
    return _with(*call, softmax=_softmax_of_near_ones)


def _softmax_of_near_ones(scores, dim):
    tokens = torch.arange(scores.shape[-1])
    return (scores - (tokens[:, None] - tokens).abs() / 8).softmax(dim)


# ---------------------------------------------------------------------------------------------------------------- heads


@fault(
    MHA,
    family="axis",
    kind="heads_without_transpose",
    does="merges heads without exchanging the axes of head and token",
    detected_by=(
        "head_split_round_trip",
        "zeroing_a_heads_values_equals_zeroing_its_output_columns",
        "each_head_alone_is_attention_on_its_slice",
        "permuting_heads_changes_nothing",
    ),
    mistake="A reshape to the right shape runs without the transpose before it.",
    report="jsbaan/transformer-from-scratch#6",
)
def merged_without_transpose(x, w_q, w_k, w_v, w_o, num_heads):
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, merge=lambda heads: heads.reshape(x.shape))


@fault(
    MHA,
    family="axis",
    kind="heads_without_transpose",
    does="splits and merges heads without exchanging the axes of head and token",
    detected_by=("head_split_round_trip", "each_head_alone_is_attention_on_its_slice"),
    mistake="view(batch, heads, sequence, d_head) straight from (batch, sequence, d_model).",
    report="reczoo/FuxiCTR#30",
)
def split_without_transpose(x, w_q, w_k, w_v, w_o, num_heads):
    def split(t, heads):
        return t.reshape(*t.shape[:-2], heads, t.shape[-2], t.shape[-1] // heads)

    return _attend(x, w_q, w_k, w_v, w_o, num_heads, split=split, merge=lambda heads: heads.reshape(x.shape))


@fault(
    MHA,
    family="axis",
    does="deals the features out to the heads in turn, where each head has a contiguous slice",
    detected_by=("permuting_heads_changes_nothing", "each_head_alone_is_attention_on_its_slice"),
    mistake="(d_head heads) for (heads d_head).",
)
def interleaved_heads(x, w_q, w_k, w_v, w_o, num_heads):
    def split(t, heads):
        return t.unflatten(-1, (-1, heads)).movedim(-1, -3)

    return _attend(x, w_q, w_k, w_v, w_o, num_heads, split=split, merge=lambda heads: heads.movedim(-3, -1).flatten(-2))


@fault(
    MHA,
    family="axis",
    does="merges the heads in reverse order",
    detected_by=("zeroing_a_heads_values_equals_zeroing_its_output_columns", "head_split_round_trip"),
    mistake="Heads are collected on a stack.",
)
def merged_in_reverse_order(x, w_q, w_k, w_v, w_o, num_heads):
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, merge=lambda heads: merge_heads(heads.flip(-3)))


@fault(
    MHA,
    family="weights",
    does="gives every head the first head's query projection",
    detected_by=("each_head_alone_is_attention_on_its_slice", "permuting_heads_changes_nothing"),
    mistake="One small projection is shared by all heads.",
    report="MarcoMeter/episodic-transformer-memory-ppo#22",
)
def one_query_projection_for_all_heads(x, w_q, w_k, w_v, w_o, num_heads):
    shared = w_q[: len(w_q) // num_heads].repeat(num_heads, 1)
    return _attend(x, shared, w_k, w_v, w_o, num_heads)


@fault(
    MHA,
    family="refusal",
    does="computes with the greatest number of heads that divides d_model",
    detected_by="refuses_a_number_of_heads_that_does_not_divide",
    mistake="Something close runs, where an error was due.",
    report="fla-org/flash-linear-attention#1029",
)
def heads_that_divide(x, w_q, w_k, w_v, w_o, num_heads):
    return _attend(x, w_q, w_k, w_v, w_o, gcd(num_heads, x.shape[-1]))


@fault(
    MHA,
    family="axis",
    does="lets the heads of a token attend to one another, where the tokens of a head should",
    detected_by=("head_split_round_trip", "the_past_influences_later_outputs"),
    mistake="(batch, sequence, heads, d_head) is scored without exchanging sequence and heads.",
)
def attends_across_heads(x, w_q, w_k, w_v, w_o, num_heads):
    def split(t, heads):
        return t.unflatten(-1, (heads, -1))

    mask = causal_mask(num_heads)
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, mask=mask, split=split, merge=lambda heads: heads.flatten(-2))


@fault(
    MHA,
    family="axis",
    does="exchanges examples and heads where there are as many of either",
    detected_by=("rows_of_a_batch_are_independent", "agrees_with_the_oracle"),
    mistake="Axes are told apart by their lengths.",
)
def examples_and_heads_exchanged(x, w_q, w_k, w_v, w_o, num_heads):
    def split(t, heads):
        as_many = t.ndim == 3 and len(t) == heads
        return split_heads(t, heads).transpose(0, 1) if as_many else split_heads(t, heads)

    return _attend(x, w_q, w_k, w_v, w_o, num_heads, split=split)


@fault(
    MHA,
    family="axis",
    does="does not transpose keys where there are as many as features in a head",
    detected_by=("agrees_with_the_oracle", "causal_independence_from_future_tokens"),
    mistake="Shapes that fit already are left as they are.",
)
def square_keys_not_transposed(x, w_q, w_k, w_v, w_o, num_heads):
    query, key, value = (split_heads(linear(x, weight), num_heads) for weight in (w_q, w_k, w_v))
    key = key.mT if key.shape[-1] == key.shape[-2] else key
    return linear(merge_heads(scaled_dot_product_attention(query, key, value, causal_mask(x.shape[-2]))), w_o)


@fault(
    MHA,
    family="boundary",
    does="leaves the last feature of a head of odd size out of the scores",
    detected_by="scale_holds_for_any_head_size",
    mistake="Features are read two at a time.",
)
def odd_feature_left_out(x, w_q, w_k, w_v, w_o, num_heads):
    size = len(w_q) // num_heads
    read = torch.ones(size, 1, dtype=w_q.dtype)
    read[size // 2 * 2 or 1 :] = 0
    return _attend(x, w_q * read.repeat(num_heads, 1), w_k, w_v, w_o, num_heads)


@fault(
    MHA,
    family="batch",
    does="gives lone tokens the output of the first example",
    detected_by="every_example_alone_where_sizes_coincide",
    mistake="The path for one new token forgets the batch.",
    report="ml-explore/mlx#3494",
)
def lone_tokens_of_the_first_example(x, w_q, w_k, w_v, w_o, num_heads):
    output = _attend(x, w_q, w_k, w_v, w_o, num_heads)
    return output[:1].expand_as(output).clone() if x.shape[-2] == 1 and x.ndim > 2 else output


@fault(
    MHA,
    family="batch",
    kind="batch_statistics",
    does="centers the values of a token on those of the other examples",
    detected_by=("rows_of_a_batch_are_independent", "the_first_token_gives_its_projected_value"),
    mistake="A normalization over the batch.",
)
def values_centered_on_the_batch(*call):
    def centered(t, heads):
        split = split_heads(t, heads)
        return split - split.mean(0, keepdim=True) if t.ndim > 2 else split

    return _with(*call, split_heads=centered)


# ---------------------------------------------------------------------------------------------------------------- scale


@fault(
    MHA,
    family="scale",
    does="divides scores by sqrt(d_model)",
    detected_by="scale_is_one_over_the_square_root_of_the_head_size",
    mistake="With one head the two are the same.",
    report="lucidrains/vit-pytorch#65",
)
def scaled_by_the_model_size(x, w_q, w_k, w_v, w_o, num_heads):
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, scale=1 / sqrt(num_heads))


@fault(
    MHA,
    family="scale",
    does="does not scale scores where there is one head",
    detected_by="one_head_equals_plain_causal_attention",
    mistake="A path of its own for one head is not kept up to date.",
    report="mlc-ai/mlc-llm#3426",
)
def unscaled_with_one_head(x, w_q, w_k, w_v, w_o, num_heads):
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, scale=sqrt(x.shape[-1]) if num_heads == 1 else 1.0)


@fault(
    MHA,
    family="scale",
    kind="scale_of_the_padded_size",
    does="takes the scale of heads beyond 64 features from a size padded to a multiple of 64",
    detected_by="scale_holds_for_any_head_size",
    mistake="The kernel pads heads, and asks the padded tensor for its size; 64 and 128 hide it.",
    report="intel/ipex-llm#12619",
)
def scaled_by_the_padded_head_size(x, w_q, w_k, w_v, w_o, num_heads):
    size = len(w_q) // num_heads
    scale = sqrt(size / (-(-size // 64) * 64)) if size > 64 else 1.0
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, scale=scale)


@fault(
    MHA,
    family="scale",
    does="scales queries, and then scores",
    detected_by=("scale_is_one_over_the_square_root_of_the_head_size", "agrees_with_the_oracle"),
    mistake="Both the module and the kernel it calls do.",
)
def scaled_twice(x, w_q, w_k, w_v, w_o, num_heads):
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, scale=1 / sqrt(len(w_q) // num_heads))


# ---------------------------------------------------------------------------------------------------------- projections


@fault(
    MHA,
    family="weights",
    does="makes values with the key projection",
    detected_by=("the_first_token_gives_its_projected_value", "agrees_with_the_oracle"),
    mistake="A line is copied, and one letter of it not changed.",
    report="meta-pytorch/torchtune#21",
)
def values_from_keys(x, w_q, w_k, w_v, w_o, num_heads):
    return _attend(x, w_q, w_k, w_k, w_o, num_heads)


@fault(
    MHA,
    family="weights",
    does="reads the stacked projection as (q, k, v) of one head after the other",
    detected_by=("the_first_token_gives_its_projected_value", "each_head_alone_is_attention_on_its_slice"),
    mistake="Two layouts of a fused weight have the same shape.",
    report="vllm-project/vllm#42803",
)
def stacked_projection_read_by_head(x, w_q, w_k, w_v, w_o, num_heads):
    by_head = torch.cat((w_q, w_k, w_v)).unflatten(0, (num_heads, 3, -1))
    w_q, w_k, w_v = (by_head[:, i].flatten(0, 1) for i in range(3))
    return _attend(x, w_q, w_k, w_v, w_o, num_heads)


@fault(
    MHA,
    family="weights",
    kind="square_weight_transposed",
    does="multiplies by the transpose of W_O",
    detected_by=("the_first_token_gives_its_projected_value", "agrees_with_the_oracle"),
    mistake="The weight is square, so both products run.",
    report="Integral2u/SharpMind#14",
)
def transposed_output_projection(x, w_q, w_k, w_v, w_o, num_heads):
    return _attend(x, w_q, w_k, w_v, w_o.T, num_heads)


@fault(
    MHA,
    family="weights",
    does="leaves W_O out",
    detected_by=("the_first_token_gives_its_projected_value", "one_head_equals_plain_causal_attention"),
    mistake="Merging the heads looks like the last step.",
)
def no_output_projection(x, w_q, w_k, w_v, w_o, num_heads):
    return _attend(x, w_q, w_k, w_v, torch.eye(len(w_o), dtype=w_o.dtype), num_heads)


@fault(
    MHA,
    family="weights",
    does="exchanges queries and keys",
    detected_by=("scale_is_one_over_the_square_root_of_the_head_size", "agrees_with_the_oracle"),
    mistake="The stacked weight is cut in another order than it was stacked.",
)
def queries_and_keys_exchanged(x, w_q, w_k, w_v, w_o, num_heads):
    return _attend(x, w_k, w_q, w_v, w_o, num_heads)


@fault(
    MHA,
    family="weights",
    does="has one projection for queries and keys",
    detected_by=("scale_is_one_over_the_square_root_of_the_head_size", "agrees_with_the_oracle"),
    mistake="A line is copied, and one letter of it not changed.",
)
def keys_from_queries(x, w_q, w_k, w_v, w_o, num_heads):
    return _attend(x, w_q, w_q, w_v, w_o, num_heads)


@fault(
    MHA,
    family="precision",
    kind="tf32_inside",
    does="projects with the products of TF32, which nobody declared",
    detected_by=("agrees_with_the_oracle", "the_first_token_gives_its_projected_value"),
    mistake="A default of some device, which keeps 11 bits of each factor.",
)
def tf32_projections(*call):
    return _with(*call, linear=lambda x, weight: linear(attention.tf32(x), attention.tf32(weight)))


@fault(
    MHA,
    family="precision",
    kind="bfloat16_inside",
    does="rounds the weights of attention to bfloat16",
    detected_by=("agrees_with_the_oracle", "head_split_round_trip"),
    mistake="The softmax runs in the dtype of the model, not of its input.",
)
def softmax_in_bfloat16(*call):
    return _with(*call, softmax=lambda scores, dim: scores.softmax(dim).bfloat16().to(scores.dtype))


@fault(
    MHA,
    family="precision",
    kind="sum_in_a_short_dtype",
    does="sums the products of its projections one by one in the dtype of the input",
    detected_by="first_token_in_bfloat16",
    mistake="A product of matrices is summed in float32; a loop is not.",
)
def projections_summed_in_the_input_dtype(*call):
    return _with(*call, linear=_summed_product)


def _summed_product(x, weight):
    if x.dtype == torch.float32:
        return linear(x, weight)
    return attention.summed(x[..., None, :] * weight)


@fault(
    MHA,
    family="precision",
    does="computes float64 in float32",
    detected_by="agrees_with_the_oracle_in_float64",
    mistake="A cast to float32 that was meant for half precision.",
    no_invariant="To float32's accuracy every relation holds: only more digits of the right value tell.",
)
def float32_inside(x, w_q, w_k, w_v, w_o, num_heads):
    narrow, w_q, w_k, w_v, w_o = (each.float() for each in (x, w_q, w_k, w_v, w_o))
    return functional.multihead_self_attention(narrow, w_q, w_k, w_v, w_o, num_heads).to(x.dtype)


@fault(
    MHA,
    family="overflow",
    does="subtracts no maximum before exp",
    detected_by="large_inputs_stay_finite",
    mistake="Inputs of rms 1, as a norm gives them, hide it.",
    report="tenstorrent/tt-metal#52131",
)
def no_maximum_subtracted(*call):
    return _with(*call, softmax=_without_maximum)


def _without_maximum(scores, dim):
    return scores.exp() / scores.exp().sum(dim, keepdim=True)


@fault(
    MHA,
    family="overflow",
    kind="maximum_of_the_whole_tensor",
    does="subtracts the maximum of all scores from every token's",
    detected_by=("large_inputs_stay_finite", "rows_of_a_batch_are_independent"),
    mistake="max() without an axis.",
)
def maximum_of_all_scores(*call):
    return _with(*call, softmax=lambda scores, dim: _without_maximum(scores - scores.max(), dim))


@fault(
    MHA,
    family="precision",
    kind="bfloat16_inside",
    does="computes in bfloat16 whatever the input's dtype",
    detected_by=("agrees_with_the_oracle", "the_first_token_gives_its_projected_value"),
    mistake="A cast for speed is left in.",
)
def attends_in_bfloat16(x, w_q, w_k, w_v, w_o, num_heads):
    w_q, w_k, w_v, w_o = (each.bfloat16() for each in (w_q, w_k, w_v, w_o))
    return _attend(x.bfloat16(), w_q, w_k, w_v, w_o, num_heads).to(x.dtype)


# ------------------------------------------------------------------------------------------- signature and side effects


@fault(
    MHA,
    family="signature",
    does="returns the output and the weights of attention",
    detected_by="keeps_its_signature",
    mistake="Weights that are wanted for a plot are returned beside the output.",
)
def returns_a_pair(x, w_q, w_k, w_v, w_o, num_heads):
    return _attend(x, w_q, w_k, w_v, w_o, num_heads), None


@fault(
    MHA,
    family="signature",
    does="returns a result of half precision in float32",
    detected_by=(
        "agrees_with_the_oracle_in_bfloat16",
        "agrees_with_the_oracle_in_float16",
        "first_token_in_bfloat16",
    ),
    mistake="Widened for the softmax, never narrowed again.",
)
def float32_returned_for_half(*call):
    output = functional.multihead_self_attention(*call)
    return output.to(torch.promote_types(output.dtype, torch.float32))


@fault(
    MHA,
    family="boundary",
    kind="empty_batch_refused",
    does="stacks examples one by one, and none cannot be stacked",
    detected_by="empty_batch_gives_an_empty_result",
    mistake="An empty batch was never met in training.",
    report="pytorch/pytorch#174939",
)
def examples_stacked_one_by_one(x, w_q, w_k, w_v, w_o, num_heads):
    if x.ndim == 2:
        return _attend(x, w_q, w_k, w_v, w_o, num_heads)
    return torch.stack([_attend(example, w_q, w_k, w_v, w_o, num_heads) for example in x])


@fault(
    MHA,
    family="layout",
    kind="strides_ignored",
    does="walks the memory of W_K as if it were contiguous",
    detected_by="any_memory_layout",
    mistake="A weight that arrives transposed is a view.",
    report="pytorch/pytorch#51713",
)
def weight_strides_ignored(x, w_q, w_k, w_v, w_o, num_heads):
    return _attend(x, w_q, attention.following(w_k), w_v, w_o, num_heads)


@fault(
    MHA,
    family="layout",
    kind="strides_ignored",
    does="walks the memory of its input as if it were contiguous",
    detected_by="any_memory_layout",
    mistake="A kernel that takes the address and the sizes, and forgets the strides.",
    report="pytorch/pytorch#163597",
)
def input_strides_ignored(x, w_q, w_k, w_v, w_o, num_heads):
    return _attend(attention.following(x), w_q, w_k, w_v, w_o, num_heads)


@fault(
    MHA,
    family="signature",
    does="takes every axis between the first and the last for the sequence",
    detected_by="takes_none_or_more_leading_axes",
    mistake="It was written for (batch, sequence, d_model) and reshapes whatever comes to that.",
)
def reshapes_to_three_axes(x, w_q, w_k, w_v, w_o, num_heads):
    return _attend(x.reshape(len(x), -1, x.shape[-1]), w_q, w_k, w_v, w_o, num_heads).reshape(x.shape)


@fault(
    MHA,
    family="arguments",
    does="multiplies the scale into the caller's W_Q",
    detected_by="does_not_change_its_arguments",
    mistake="Scaling the weight once is cheaper than scaling the scores, until the weight is used twice.",
)
def scale_folded_into_the_weight(x, w_q, w_k, w_v, w_o, num_heads):
    output = functional.multihead_self_attention(x, w_q, w_k, w_v, w_o, num_heads)
    w_q.mul_(1 / sqrt(x.shape[-1] // num_heads))
    return output


@fault(
    MHA,
    family="arguments",
    does="writes the output into the caller's input",
    detected_by="does_not_change_its_arguments",
    mistake="The input is not needed any more, here.",
)
def output_written_into_the_input(x, w_q, w_k, w_v, w_o, num_heads):
    output = functional.multihead_self_attention(x, w_q, w_k, w_v, w_o, num_heads)
    x.detach().copy_(output.detach())
    return output


@fault(
    MHA,
    family="memory",
    does="drops some of the attention, as in training",
    detected_by=("the_global_random_state_decides_nothing", "has_no_memory"),
    mistake="The functional form drops whatever the mode is.",
)
def dropout_left_on(*call):
    return _with(*call, softmax=lambda scores, dim: torch.dropout(scores.softmax(dim), 0.1, True))


@fault(
    MHA,
    family="global_state",
    kind="module_built_in_every_call",
    does="builds its modules in every call, and so draws their weights",
    detected_by="leaves_the_global_random_state_alone",
    mistake="The weights drawn are overwritten; the numbers drawn are gone.",
)
def modules_built_in_every_call(x, w_q, w_k, w_v, w_o, num_heads):
    for weight in (w_q, w_k, w_v, w_o):
        torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    return functional.multihead_self_attention(x, w_q, w_k, w_v, w_o, num_heads)


@fault(
    MHA,
    family="global_state",
    does="switches gradients off for good",
    detected_by="leaves_global_settings_alone",
    mistake="set_grad_enabled(False) is no context manager here.",
)
def gradients_switched_off(*call):
    torch.set_grad_enabled(False)
    return functional.multihead_self_attention(*call)


_OUTPUT_WEIGHTS: dict[Any, torch.Tensor] = {}


@fault(
    MHA,
    family="memory",
    kind="weight_kept_by_shape",
    does="keeps the first W_O of each size",
    detected_by="has_no_memory",
    mistake="A module is built once a size, its weights loaded when it is built.",
)
def output_weight_cached_by_size(x, w_q, w_k, w_v, w_o, num_heads):
    w_o = _OUTPUT_WEIGHTS.setdefault((w_o.shape, w_o.dtype), w_o.clone())
    return _attend(x, w_q, w_k, w_v, w_o, num_heads)


# ---------------------------------------------------------------------------------------------------------------- sizes


@fault(
    MHA,
    family="boundary",
    does="heads from the 9th on are 0",
    detected_by="running_means_at_any_length",
    mistake="The grid is made for the model that the kernel was written for.",
)
def heads_beyond_8_not_written(x, w_q, w_k, w_v, w_o, num_heads):
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, merge=eight_merged)


def eight_merged(heads):
    """The first eight heads side by side, and zeros for the others."""
    return merge_heads(torch.cat([heads[..., :8, :, :], torch.zeros_like(heads[..., 8:, :, :])], -3))
