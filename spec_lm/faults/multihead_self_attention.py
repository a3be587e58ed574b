"""Faults of multi-head self-attention: who sees whom, heads, scale, projections, and what a call leaves behind."""

from math import gcd, sqrt

import torch

from spec_lm.faults import fault
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


_OUTPUT_WEIGHTS: dict = {}


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
