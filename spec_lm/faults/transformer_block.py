"""Faults of the Transformer block: residuals, norms, order of the halves, rotation, masks, what a call leaves."""

from collections.abc import Callable
from functools import partial
from math import gcd, log, sqrt
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from spec_lm.faults import fault
from spec_lm.faults import multihead_self_attention as heads_faults
from spec_lm.faults import scaled_dot_product_attention as attention_faults
from spec_lm.reference import functional
from spec_lm.reference.functional import (
    BLOCK_EPS,
    linear,
    merge_heads,
    multihead_self_attention_with_rope,
    rmsnorm,
    silu,
    split_heads,
    swiglu,
)

BLOCK = "transformer_block"
ORACLE = "agrees_with_the_oracle"
BOTH_BRANCHES = ("attention_is_added_to_the_unnormalized_stream", "feed_forward_is_added_to_the_unnormalized_stream")


class Parts(NamedTuple):
    """What a block is made of, each a function of the stream."""

    norm1: Callable[..., Tensor]
    attend: Callable[..., Tensor]
    norm2: Callable[..., Tensor]
    feed: Callable[..., Tensor]


def parts(weights, num_heads, theta, max_seq_len, eps=BLOCK_EPS) -> Parts:
    """The four parts of a correct block; a fault puts them together wrongly, or replaces one."""
    w_q, w_k, w_v, w_o = (weights[f"attn.{name}_proj.weight"] for name in ("q", "k", "v", "output"))
    w1, w2, w3 = (weights[f"ffn.{name}.weight"] for name in ("w1", "w2", "w3"))
    sizes = {"num_heads": num_heads, "theta": theta, "max_seq_len": max_seq_len}
    return Parts(
        partial(rmsnorm, gain=weights["ln1.weight"], eps=eps),
        partial(multihead_self_attention_with_rope, w_q=w_q, w_k=w_k, w_v=w_v, w_o=w_o, **sizes),
        partial(rmsnorm, gain=weights["ln2.weight"], eps=eps),
        partial(swiglu, w1=w1, w2=w2, w3=w3),
    )


def assembled(x, block: Parts):
    """The parts in their right order."""
    y = x + block.attend(block.norm1(x))
    return y + block.feed(block.norm2(y))


def attention(x, weights, num_heads, *, rotate=lambda heads: heads, mask=None, scale=1.0):
    """Multi-head attention of a block, with another rotation, mask or scale of the scores."""
    w_q, w_k, w_v = (weights[f"attn.{name}_proj.weight"] for name in ("q", "k", "v"))
    query, key, value = (split_heads(linear(x, weight), num_heads) for weight in (w_q, w_k, w_v))
    mask = functional.causal_mask(x.shape[-2]) if mask is None else mask
    heads = functional.scaled_dot_product_attention(rotate(query) * scale, rotate(key), value, mask)
    return linear(merge_heads(heads), weights["attn.output_proj.weight"])


right = functional.transformer_block


def _with(*call, **replaced):
    """The reference with others in place of its own parts, as `rmsnorm` or `softmax`."""
    with patch.multiple(functional, **replaced):
        return right(*call)


def rotation(x, theta, max_seq_len):
    """RoPE at positions 0, 1, 2, ... for heads of x's tokens."""
    return partial(functional.rope, positions=torch.arange(x.shape[-2]), theta=theta, max_seq_len=max_seq_len)


# ------------------------------------------------------------------------------------------------------------ residuals


@fault(
    BLOCK,
    family="residual",
    does="both residuals carry the normalized stream: n + f(n)",
    detected_by=("zero_output_weights_give_the_input", "pre_norm", *BOTH_BRANCHES, ORACLE),
    mistake="x is overwritten by its norm. Inputs of unit rms nearly hide it.",
    report="Howuhh/faster-trajectory-transformer#3",
)
def residual_from_the_normalized_stream(x, weights, num_heads, theta, max_seq_len):
    block = parts(weights, num_heads, theta, max_seq_len)
    x = block.norm1(x)
    y = block.norm2(x + block.attend(x))
    return y + block.feed(y)


@fault(
    BLOCK,
    family="residual",
    kind="residual_from_the_normalized_stream",
    does="the second residual carries the normalized stream",
    detected_by=("zero_output_weights_give_the_input", "attention_is_added_to_the_unnormalized_stream"),
    report="allenai/OLMo#680",
)
def second_residual_from_the_normalized_stream(x, weights, num_heads, theta, max_seq_len):
    block = parts(weights, num_heads, theta, max_seq_len)
    normed = block.norm2(x + block.attend(block.norm1(x)))
    return normed + block.feed(normed)


@fault(
    BLOCK,
    family="residual",
    does="the stream is overwritten before it is added: attention's output is added to itself",
    detected_by=("zero_output_weights_give_the_input", "pre_norm", "attention_is_added_to_the_unnormalized_stream"),
    mistake="x = attend(norm(x)), then x + x.",
    report="kyegomez/BitNet#32",
)
def stream_overwritten_by_attention(x, weights, num_heads, theta, max_seq_len):
    block = parts(weights, num_heads, theta, max_seq_len)
    x = block.attend(block.norm1(x))
    y = x + x
    return y + block.feed(block.norm2(y))


@fault(
    BLOCK,
    family="residual",
    kind="no_residual",
    does="the residual around attention is missing",
    detected_by=("zero_output_weights_give_the_input", *BOTH_BRANCHES),
)
def no_residual_around_attention(x, weights, num_heads, theta, max_seq_len):
    block = parts(weights, num_heads, theta, max_seq_len)
    y = block.attend(block.norm1(x))
    return y + block.feed(block.norm2(y))


@fault(
    BLOCK,
    family="residual",
    kind="no_residual",
    does="the residual around the feed-forward network is missing",
    detected_by=("zero_output_weights_give_the_input", *BOTH_BRANCHES),
)
def no_residual_around_feed_forward(x, weights, num_heads, theta, max_seq_len):
    block = parts(weights, num_heads, theta, max_seq_len)
    return block.feed(block.norm2(x + block.attend(block.norm1(x))))


@fault(
    BLOCK,
    family="residual",
    does="the second residual is the block's input, so attention's result is lost: x + SwiGLU(RMSNorm_2(y))",
    detected_by=("attention_is_added_to_the_unnormalized_stream", "rope_is_on", ORACLE),
    mistake="The same name for the input and the stream.",
    report="NVIDIA-NeMo/Speech#4350",
)
def second_residual_is_the_input(x, weights, num_heads, theta, max_seq_len):
    block = parts(weights, num_heads, theta, max_seq_len)
    return x + block.feed(block.norm2(x + block.attend(block.norm1(x))))


@fault(
    BLOCK,
    family="residual",
    does="residuals are scaled by 1 / sqrt(2)",
    detected_by=("zero_output_weights_give_the_input", "pre_norm", *BOTH_BRANCHES),
    mistake="It keeps the variance, as other models do.",
)
def residuals_scaled(x, weights, num_heads, theta, max_seq_len):
    block = parts(weights, num_heads, theta, max_seq_len)
    y = (x + block.attend(block.norm1(x))) / sqrt(2)
    return (y + block.feed(block.norm2(y))) / sqrt(2)


# ---------------------------------------------------------------------------------------------------------------- norms


@fault(
    BLOCK,
    family="norm",
    does="post-norm: RMSNorm(x + f(x)), as in the first Transformer",
    detected_by=("pre_norm", "zero_output_weights_give_the_input", *BOTH_BRANCHES),
    mistake="The figure of the first Transformer shows it so.",
)
def post_norm(x, weights, num_heads, theta, max_seq_len):
    block = parts(weights, num_heads, theta, max_seq_len)
    y = block.norm1(x + block.attend(x))
    return block.norm2(y + block.feed(y))


@fault(
    BLOCK,
    family="norm",
    does="attention reads the stream without its norm",
    detected_by=("pre_norm", "attention_is_added_to_the_unnormalized_stream", "each_norm_has_its_own_gain"),
)
def attention_without_its_norm(x, weights, num_heads, theta, max_seq_len):
    block = parts(weights, num_heads, theta, max_seq_len)
    return assembled(x, block._replace(norm1=lambda stream: stream))


@fault(
    BLOCK,
    family="norm",
    does="what a half gives is normalized once more before it is added",
    detected_by=(*BOTH_BRANCHES, ORACLE),
    mistake="A norm before and after each half is another design.",
)
def branches_normalized_after_too(x, weights, num_heads, theta, max_seq_len):
    block = parts(weights, num_heads, theta, max_seq_len)
    y = x + block.norm1(block.attend(block.norm1(x)))
    return y + block.norm2(block.feed(block.norm2(y)))


@fault(
    BLOCK,
    family="norm",
    does="one norm, that of attention, serves both halves",
    detected_by=("each_norm_has_its_own_gain", "feed_forward_is_added_to_the_unnormalized_stream"),
    mistake="Gains of 1, as initialized, do not tell two norms apart.",
)
def one_norm_for_both(x, weights, num_heads, theta, max_seq_len):
    block = parts(weights, num_heads, theta, max_seq_len)
    return assembled(x, block._replace(norm2=block.norm1))


@fault(
    BLOCK,
    family="norm",
    does="the gains of the two norms are exchanged",
    detected_by=("each_norm_has_its_own_gain", *BOTH_BRANCHES),
)
def gains_exchanged(x, weights, num_heads, theta, max_seq_len):
    block = parts(weights, num_heads, theta, max_seq_len)
    return assembled(x, block._replace(norm1=block.norm2, norm2=block.norm1))


@fault(
    BLOCK,
    family="norm",
    kind="one_plus_gain",
    does="the gain is 1 + the weight",
    detected_by=("pre_norm", "each_norm_has_its_own_gain"),
    mistake="Some models store the gain's distance from 1.",
)
def gain_stored_as_distance_from_1(x, weights, num_heads, theta, max_seq_len):
    moved = {name: weight + 1 if name.startswith("ln") else weight for name, weight in weights.items()}
    return functional.transformer_block(x, moved, num_heads, theta, max_seq_len)


@fault(
    BLOCK, family="norm", kind="another_eps", does="the eps of the norms is 1e-6", detected_by=("eps_is_1e_5", ORACLE)
)
def eps_1e_6(x, weights, num_heads, theta, max_seq_len):
    return assembled(x, parts(weights, num_heads, theta, max_seq_len, eps=1e-6))


@fault(
    BLOCK, family="norm", kind="another_eps", does="the eps of the norms is 1e-8", detected_by=("eps_is_1e_5", ORACLE)
)
def eps_1e_8(x, weights, num_heads, theta, max_seq_len):
    return assembled(x, parts(weights, num_heads, theta, max_seq_len, eps=1e-8))


@fault(
    BLOCK,
    family="axis",
    kind="over_sequence_and_features",
    does="the root mean square is taken over the whole sequence",
    detected_by=("causal_independence_from_future_tokens", "prefix_gives_the_first_outputs", ORACLE),
    mistake="A norm of the last two axes looks alike in one token.",
)
def norm_over_the_sequence(x, weights, num_heads, theta, max_seq_len):
    def norm(stream, gain):
        return stream / (stream.square().mean((-2, -1), keepdim=True) + BLOCK_EPS).sqrt() * gain

    norms = {"norm1": partial(norm, gain=weights["ln1.weight"]), "norm2": partial(norm, gain=weights["ln2.weight"])}
    return assembled(x, parts(weights, num_heads, theta, max_seq_len)._replace(**norms))


@fault(
    BLOCK,
    family="norm",
    does="values are made of the stream, queries and keys of its norm",
    detected_by=("pre_norm", "each_norm_has_its_own_gain", "attention_is_added_to_the_unnormalized_stream"),
    mistake="The norm is a part of the projection of queries and keys in other models.",
)
def values_from_the_stream(x, weights, num_heads, theta, max_seq_len):
    def attend(x):
        values = split_heads(linear(x, weights["attn.v_proj.weight"]), num_heads)
        rotate, normed = rotation(x, theta, max_seq_len), rmsnorm(x, weights["ln1.weight"], BLOCK_EPS)
        query, key = (split_heads(linear(normed, weights[f"attn.{n}_proj.weight"]), num_heads) for n in "qk")
        mask = functional.causal_mask(x.shape[-2])
        heads = functional.scaled_dot_product_attention(rotate(query), rotate(key), values, mask)
        return linear(merge_heads(heads), weights["attn.output_proj.weight"])

    block = parts(weights, num_heads, theta, max_seq_len)
    return assembled(x, block._replace(norm1=lambda stream: stream, attend=attend))


@fault(
    BLOCK,
    family="norm",
    does="the norms subtract the mean, as LayerNorm does",
    detected_by=(
        "attention_is_added_to_the_unnormalized_stream",
        "feed_forward_is_added_to_the_unnormalized_stream",
        ORACLE,
    ),
    mistake="The norm of most models before.",
)
def mean_subtracted(x, weights, num_heads, theta, max_seq_len):
    def norm(x, gain, eps):
        return rmsnorm(x - x.mean(-1, keepdim=True), gain, eps)

    return _with(x, weights, num_heads, theta, max_seq_len, rmsnorm=norm)


@fault(
    BLOCK,
    family="norm",
    does="the gain is multiplied before the norm",
    detected_by=("feed_forward_is_added_to_the_unnormalized_stream", "each_norm_has_its_own_gain"),
    mistake="Gains of 1, as initialized, hide it.",
)
def gain_before_the_norm(x, weights, num_heads, theta, max_seq_len):
    def norm(x, gain, eps):
        return rmsnorm(x * gain, torch.ones_like(gain), eps)

    return _with(x, weights, num_heads, theta, max_seq_len, rmsnorm=norm)


@fault(
    BLOCK,
    family="norm",
    does="eps is added to the root mean square, not to the mean square",
    detected_by=("eps_is_1e_5", ORACLE),
    mistake="Nothing shows where the stream is not tiny.",
    report="allenai/OLMo#281",
)
def eps_outside_the_root(x, weights, num_heads, theta, max_seq_len):
    def norm(x, gain, eps):
        return x / (x.square().mean(-1, keepdim=True).sqrt() + eps) * gain

    return _with(x, weights, num_heads, theta, max_seq_len, rmsnorm=norm)


# -------------------------------------------------------------------------------------------------- order of the halves


@fault(
    BLOCK,
    family="residual",
    does="attention and the feed-forward network run in parallel on the block's input",
    detected_by=("second_half_sees_the_first_halfs_result", ORACLE),
    mistake="Some models do so for speed.",
)
def parallel_halves(x, weights, num_heads, theta, max_seq_len):
    block = parts(weights, num_heads, theta, max_seq_len)
    return x + block.attend(block.norm1(x)) + block.feed(block.norm2(x))


@fault(
    BLOCK,
    family="residual",
    does="the feed-forward network runs before attention",
    detected_by=("second_half_sees_the_first_halfs_result", ORACLE),
)
def feed_forward_first(x, weights, num_heads, theta, max_seq_len):
    block = parts(weights, num_heads, theta, max_seq_len)
    y = x + block.feed(block.norm2(x))
    return y + block.attend(block.norm1(y))


@fault(
    BLOCK,
    family="residual",
    does="one norm, computed once from the input, feeds both halves",
    detected_by=("second_half_sees_the_first_halfs_result", "each_norm_has_its_own_gain"),
)
def norm_computed_once(x, weights, num_heads, theta, max_seq_len):
    block = parts(weights, num_heads, theta, max_seq_len)
    normed = block.norm1(x)
    return x + block.attend(normed) + block.feed(normed)


@fault(
    BLOCK,
    family="weights",
    kind="gate_and_up_exchanged",
    does="W_1 and W_3 are exchanged: silu(W_3 x) * W_1 x",
    detected_by=("feed_forward_is_added_to_the_unnormalized_stream", ORACLE),
    mistake="Names differ from model to model: w1 w3 w2, gate up down, fc_1 fc_2 proj.",
)
def gate_exchanged(x, weights, num_heads, theta, max_seq_len):
    w1, w3 = weights["ffn.w1.weight"], weights["ffn.w3.weight"]
    exchanged = {**weights, "ffn.w1.weight": w3, "ffn.w3.weight": w1}
    return functional.transformer_block(x, exchanged, num_heads, theta, max_seq_len)


@fault(
    BLOCK,
    family="formula",
    does="the gate's SiLU is taken of the product: silu(W_1 x * W_3 x)",
    detected_by=("feed_forward_is_added_to_the_unnormalized_stream", ORACLE),
    mistake="A slip of the parenthesis.",
    report="Nijikadesu/breakdown-minimind#3",
)
def silu_of_the_product(x, weights, num_heads, theta, max_seq_len):
    def feed(x, w1, w2, w3):
        return linear(silu(linear(x, w1) * linear(x, w3)), w2)

    return _with(x, weights, num_heads, theta, max_seq_len, swiglu=feed)


@fault(
    BLOCK,
    family="formula",
    kind="gelu",
    does="the gate is GELU",
    detected_by=("feed_forward_is_added_to_the_unnormalized_stream", ORACLE),
    mistake="The gate of other models.",
)
def gelu_in_the_gate(x, weights, num_heads, theta, max_seq_len):
    return _with(x, weights, num_heads, theta, max_seq_len, silu=partial(torch.nn.functional.gelu, approximate="tanh"))


@fault(
    BLOCK,
    family="weights",
    kind="square_weight_transposed",
    does="W_2 is transposed where d_ff is d_model",
    detected_by=("feed_forward_is_added_to_the_unnormalized_stream", ORACLE),
    mistake="The weight is square, so both products run.",
    report="Integral2u/SharpMind#14",
)
def square_w_2_transposed(x, weights, num_heads, theta, max_seq_len):
    w2 = weights["ffn.w2.weight"]
    turned = {**weights, "ffn.w2.weight": w2.T if w2.shape[0] == w2.shape[1] else w2}
    return right(x, turned, num_heads, theta, max_seq_len)


@fault(
    BLOCK,
    family="weights",
    does="W_Q and W_K are exchanged",
    detected_by=("rope_is_on", "attention_is_added_to_the_unnormalized_stream", ORACLE),
    mistake="The stacked weight is cut in another order than it was stacked.",
)
def queries_and_keys_exchanged(x, weights, num_heads, theta, max_seq_len):
    q, k = "attn.q_proj.weight", "attn.k_proj.weight"
    return right(x, {**weights, q: weights[k], k: weights[q]}, num_heads, theta, max_seq_len)


@fault(
    BLOCK,
    family="weights",
    does="values are made with W_K",
    detected_by=("attention_is_added_to_the_unnormalized_stream", ORACLE),
    mistake="A line is copied, and one letter of it not changed.",
    report="meta-pytorch/torchtune#21",
)
def values_from_keys(x, weights, num_heads, theta, max_seq_len):
    return right(x, {**weights, "attn.v_proj.weight": weights["attn.k_proj.weight"]}, num_heads, theta, max_seq_len)


@fault(
    BLOCK,
    family="boundary",
    kind="tail_left_out",
    does="of more than 32 hidden units those after the last whole block of 32 are left out",
    detected_by="feed_forward_at_any_size",
    mistake="d_ff is a multiple of 64 in every model one has seen.",
)
def hidden_units_after_whole_blocks_left_out(x, weights, num_heads, theta, max_seq_len):
    def feed(x, w1, w2, w3):
        kept = len(w1) // 32 * 32 if len(w1) > 32 else len(w1)
        return swiglu(x, w1[:kept], w2[:, :kept], w3[:kept])

    return _with(x, weights, num_heads, theta, max_seq_len, swiglu=feed)


# --------------------------------------------------------------------------------------------------- rotation and masks


@fault(
    BLOCK,
    family="positions",
    kind="no_rotation",
    does="queries and keys are not rotated",
    detected_by=("rope_is_on", "attention_is_added_to_the_unnormalized_stream", ORACLE),
)
def no_rope(x, weights, num_heads, theta, max_seq_len):
    attend = partial(attention, weights=weights, num_heads=num_heads)
    return assembled(x, parts(weights, num_heads, theta, max_seq_len)._replace(attend=attend))


@fault(
    BLOCK,
    family="positions",
    kind="theta_is_always_10000",
    does="theta is always 10000",
    detected_by=("rope_is_on", ORACLE),
    mistake="A default that nobody overrides.",
)
def theta_ignored(x, weights, num_heads, theta, max_seq_len):
    return functional.transformer_block(x, weights, num_heads, 10000.0, max_seq_len)


@fault(
    BLOCK,
    family="positions",
    kind="head_index_as_position",
    does="the number of the head is taken for the position",
    detected_by=("rope_is_on", ORACLE),
    mistake="The table is sliced by the wrong axis; shapes agree where heads == sequence.",
    report="facebookresearch/xformers#841",
)
def head_taken_for_position(x, weights, num_heads, theta, max_seq_len):
    def rotate(heads):
        return rotation(heads.transpose(-2, -3), theta, max_seq_len)(heads.transpose(-2, -3)).transpose(-2, -3)

    attend = partial(attention, weights=weights, num_heads=num_heads, rotate=rotate)
    return assembled(x, parts(weights, num_heads, theta, max_seq_len)._replace(attend=attend))


@fault(
    BLOCK,
    family="positions",
    does="positions are stretched over max_seq_len, whatever the length",
    detected_by=("max_seq_len_is_only_a_limit", "rope_is_on", "prefix_gives_the_first_outputs"),
    mistake="Position interpolation for longer contexts, always on.",
)
def positions_stretched(x, weights, num_heads, theta, max_seq_len):
    def rotate(heads):
        stretched = theta ** -(torch.arange(0, heads.shape[-1], 2) / heads.shape[-1]) * max_seq_len / heads.shape[-2]
        angles = torch.arange(heads.shape[-2])[:, None] * stretched
        return functional.rotate_pairs(heads, torch.stack((angles.cos(), angles.sin())))

    attend = partial(attention, weights=weights, num_heads=num_heads, rotate=rotate)
    return assembled(x, parts(weights, num_heads, theta, max_seq_len)._replace(attend=attend))


@fault(
    BLOCK,
    family="boundary",
    does="only a sequence of exactly max_seq_len tokens is accepted",
    detected_by="max_seq_len_is_only_a_limit",
    mistake="The table of angles is added for its whole length.",
    report="unslothai/unsloth#1236",
)
def only_one_length(x, weights, num_heads, theta, max_seq_len):
    if x.shape[-2] not in (1, max_seq_len):
        raise ValueError(f"expected {max_seq_len} tokens, got {x.shape[-2]}")
    return functional.transformer_block(x, weights, num_heads, theta, max_seq_len)


@fault(
    BLOCK,
    family="mask",
    does="no causal mask",
    detected_by=("causal_independence_from_future_tokens", "prefix_gives_the_first_outputs", ORACLE),
)
def no_causal_mask(x, weights, num_heads, theta, max_seq_len):
    everything = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool)
    rotate = rotation(x, theta, max_seq_len)
    attend = partial(attention, weights=weights, num_heads=num_heads, rotate=rotate, mask=everything)
    return assembled(x, parts(weights, num_heads, theta, max_seq_len)._replace(attend=attend))


@fault(
    BLOCK,
    family="mask",
    kind="sees_the_next_token",
    does="the causal mask lets a token see the next one",
    detected_by=("causal_independence_from_future_tokens", "prefix_gives_the_first_outputs"),
    mistake="triu for tril, or a diagonal off by one.",
)
def mask_off_by_one(x, weights, num_heads, theta, max_seq_len):
    one_more = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril(1)
    rotate = rotation(x, theta, max_seq_len)
    attend = partial(attention, weights=weights, num_heads=num_heads, rotate=rotate, mask=one_more)
    return assembled(x, parts(weights, num_heads, theta, max_seq_len)._replace(attend=attend))


@fault(
    BLOCK,
    family="scale",
    does="scores grow with the logarithm of the sequence's length",
    detected_by=("prefix_gives_the_first_outputs", "rope_is_on", ORACLE),
    mistake="Other models do so to extrapolate to longer sequences.",
)
def scores_scaled_by_length(x, weights, num_heads, theta, max_seq_len):
    rotate = rotation(x, theta, max_seq_len)
    scale = 1 + log(x.shape[-2])
    attend = partial(attention, weights=weights, num_heads=num_heads, rotate=rotate, scale=scale)
    return assembled(x, parts(weights, num_heads, theta, max_seq_len)._replace(attend=attend))


@fault(
    BLOCK,
    family="batch",
    does="the batch is joined into one sequence for attention",
    detected_by=("rows_of_a_batch_are_independent", ORACLE),
    mistake="A view of (batch, sequence) as one axis; a batch of 1 hides it.",
)
def batch_joined_into_one_sequence(x, weights, num_heads, theta, max_seq_len):
    block = parts(weights, num_heads, theta, x.shape[:-1].numel())
    joined = partial(_through_one_sequence, attend=block.attend)
    return assembled(x, block._replace(attend=joined))


def _through_one_sequence(x, attend):
    return attend(x.reshape(1, -1, x.shape[-1])).reshape(x.shape)


@fault(
    BLOCK,
    family="mask",
    kind="mask_lost_without_gradients",
    does="no causal mask under no_grad",
    detected_by="grad_mode_changes_nothing",
    mistake="A fast path for inference has no argument for the mask.",
    report="pytorch/pytorch#86120",
)
def no_causal_mask_without_gradients(x, weights, num_heads, theta, max_seq_len):
    return (right if torch.is_grad_enabled() else no_causal_mask)(x, weights, num_heads, theta, max_seq_len)


@fault(
    BLOCK,
    family="mask",
    kind="window",
    does="a token sees 64 tokens",
    detected_by=("running_means_at_any_length", "any_length"),
    mistake="The window of another model is left on, and short texts hide it.",
    report="unslothai/unsloth#8253",
)
def window_of_64_tokens(x, weights, num_heads, theta, max_seq_len):
    mask = functional.causal_mask(x.shape[-2]).triu(-63)
    attend = partial(attention, weights=weights, num_heads=num_heads, rotate=rotation(x, theta, max_seq_len), mask=mask)
    return assembled(x, parts(weights, num_heads, theta, max_seq_len)._replace(attend=attend))


@fault(
    BLOCK,
    family="precision",
    kind="positions_in_a_narrow_dtype",
    does="positions are held in bfloat16: beyond 256 neighbors become one",
    detected_by="rope_reaches_distant_positions",
    mistake="The whole model is cast, its positions with it.",
    report="huggingface/transformers#29285",
)
def positions_in_bfloat16(x, weights, num_heads, theta, max_seq_len):
    def table(positions, d_k, theta):
        return functional.rope_table(positions.bfloat16().long(), d_k, theta)

    return _with_table(x, weights, num_heads, theta, max_seq_len, table)


def _with_table(x, weights, num_heads, theta, max_seq_len, table):
    """The block whose rotation comes of another table."""

    def rotate(heads):
        return functional.rotate_pairs(heads, table(torch.arange(heads.shape[-2]), heads.shape[-1], theta))

    functional.refuse_longer(x.shape[-2], max_seq_len, "max_seq_len")
    attend = partial(attention, weights=weights, num_heads=num_heads, rotate=rotate)
    return assembled(x, parts(weights, num_heads, theta, max_seq_len)._replace(attend=attend))


@fault(
    BLOCK,
    family="precision",
    kind="positions_in_a_narrow_dtype",
    does="positions are held in int8: 128 becomes -128",
    detected_by="rope_reaches_distant_positions",
    mistake="Enough for the texts of a test.",
)
def positions_in_int8(x, weights, num_heads, theta, max_seq_len):
    def table(positions, d_k, theta):
        return functional.rope_table(positions.to(torch.int8).long(), d_k, theta)

    return _with_table(x, weights, num_heads, theta, max_seq_len, table)


@fault(
    BLOCK,
    family="precision",
    does="angles are computed in bfloat16",
    detected_by=("rope_is_on", ORACLE),
    mistake="Frequencies are a buffer of the module, cast with its weights.",
    report="KellerJordan/modded-nanogpt#39",
)
def angles_in_bfloat16(x, weights, num_heads, theta, max_seq_len):
    def table(positions, d_k, theta):
        exponents = torch.arange(0, d_k, 2, dtype=torch.float64) / d_k
        angles = (positions[..., None] * (theta**-exponents).bfloat16()).bfloat16().double()
        return torch.stack((angles.cos(), angles.sin()))

    return _with_table(x, weights, num_heads, theta, max_seq_len, table)


# ----------------------------------------------------------------------------------------------- precision and overflow


@fault(
    BLOCK,
    family="precision",
    kind="bfloat16_inside",
    does="the stream is rounded to bfloat16 between the halves",
    detected_by=("zero_output_weights_give_the_input", "attention_is_added_to_the_unnormalized_stream", ORACLE),
    mistake="A residual kept short to save memory.",
)
def stream_in_bfloat16(x, weights, num_heads, theta, max_seq_len):
    block = parts(weights, num_heads, theta, max_seq_len)
    y = (x + block.attend(block.norm1(x))).bfloat16().to(x.dtype)
    return y + block.feed(block.norm2(y))


@fault(
    BLOCK,
    family="precision",
    kind="rough_inverse_root",
    does="the norms' inverse root is rounded to bfloat16",
    detected_by=("feed_forward_is_added_to_the_unnormalized_stream", ORACLE),
    mistake="A fast inverse root without the step that corrects it.",
)
def root_in_bfloat16(x, weights, num_heads, theta, max_seq_len):
    def norm(x, gain, eps):
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt().bfloat16().to(x.dtype) * gain

    return _with(x, weights, num_heads, theta, max_seq_len, rmsnorm=norm)


@fault(
    BLOCK,
    family="precision",
    kind="float16_inside",
    does="the norms read the stream in float16, which ends at 65504",
    detected_by=("large_streams_stay_finite", "feed_forward_is_added_to_the_unnormalized_stream"),
    mistake="The stream grows with depth; the first layers hide it.",
)
def norm_in_float16(x, weights, num_heads, theta, max_seq_len):
    def norm(x, gain, eps):
        return rmsnorm(x.half(), gain.half(), eps).to(x.dtype)

    return _with(x, weights, num_heads, theta, max_seq_len, rmsnorm=norm)


@fault(
    BLOCK,
    family="overflow",
    kind="squares_in_half_precision",
    does="the norms square in the dtype of the input: float16 ends at the square of 256, and x / inf is 0",
    detected_by="large_half_streams_stay_finite",
    mistake="Inputs of rms 1 are all that one has tried.",
    report="pytorch/pytorch#133085",
)
def squares_in_the_input_dtype(x, weights, num_heads, theta, max_seq_len):
    def norm(x, gain, eps):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain

    return _with(x, weights, num_heads, theta, max_seq_len, rmsnorm=norm)


@fault(
    BLOCK,
    family="precision",
    kind="tf32_inside",
    does="products are those of TF32, which nobody declared",
    detected_by=("feed_forward_is_added_to_the_unnormalized_stream", ORACLE),
    mistake="A default of some device, which keeps 11 bits of each factor.",
)
def tf32_products(x, weights, num_heads, theta, max_seq_len):
    return _with(x, weights, num_heads, theta, max_seq_len, linear=_tf32_product)


def _tf32_product(x, weight):
    return linear(attention_faults.tf32(x), attention_faults.tf32(weight))


@fault(
    BLOCK,
    family="precision",
    does="float64 is computed in bfloat16",
    detected_by="agrees_with_the_oracle_in_float64",
    mistake="Autocast takes whatever is not in half precision already.",
    no_invariant="Invariants are drawn in the dtype of the run, and only results in float64 show it.",
)
def float64_in_bfloat16(x, weights, num_heads, theta, max_seq_len):
    if x.dtype != torch.float64:
        return right(x, weights, num_heads, theta, max_seq_len)
    narrow = {name: weight.bfloat16() for name, weight in weights.items()}
    return right(x.bfloat16(), narrow, num_heads, theta, max_seq_len).to(x.dtype)


# --------------------------------------------------------------------------------------------- what a block must refuse


@fault(
    BLOCK,
    family="refusal",
    does="a sequence longer than max_seq_len is accepted",
    detected_by="refuses_a_sequence_over_max_seq_len",
    mistake="Nothing depends on a table, so nothing fails.",
    report="unslothai/unsloth#1236",
)
def over_long_accepted(x, weights, num_heads, theta, max_seq_len):
    return right(x, weights, num_heads, theta, max(max_seq_len, x.shape[-2]))


@fault(
    BLOCK,
    family="refusal",
    does="it computes with the greatest number of heads of even size that divides d_model",
    detected_by=("refuses_a_number_of_heads_that_does_not_divide", "refuses_an_odd_head_size"),
    mistake="Something close runs, where an error was due.",
    report="fla-org/flash-linear-attention#1029",
)
def heads_that_divide(x, weights, num_heads, theta, max_seq_len):
    return right(x, weights, gcd(num_heads, x.shape[-1] // 2), theta, max_seq_len)


# ---------------------------------------------------------------------------------------------- the call and its traces


@fault(
    BLOCK,
    family="signature",
    does="a result of half precision is returned in float32",
    detected_by=(
        "agrees_with_the_oracle_in_bfloat16",
        "agrees_with_the_oracle_in_float16",
        "large_half_streams_stay_finite",
    ),
    mistake="The stream is widened for the residuals, never narrowed again.",
)
def float32_returned_for_half(*call):
    output = right(*call)
    return output.to(torch.promote_types(output.dtype, torch.float32))


@fault(
    BLOCK,
    family="boundary",
    kind="empty_batch_refused",
    does="examples are stacked one by one, and none cannot be stacked",
    detected_by="empty_batch_gives_an_empty_result",
    mistake="An empty batch was never met in training.",
    report="pytorch/pytorch#174939",
)
def examples_stacked_one_by_one(x, weights, num_heads, theta, max_seq_len):
    return torch.stack([right(example[None], weights, num_heads, theta, max_seq_len)[0] for example in x])


@fault(
    BLOCK,
    family="batch",
    does="lone tokens get the output of the first example",
    detected_by="every_example_alone_where_sizes_coincide",
    mistake="The path for one new token forgets the batch.",
    report="ml-explore/mlx#3494",
)
def lone_tokens_of_the_first_example(x, weights, num_heads, theta, max_seq_len):
    output = right(x, weights, num_heads, theta, max_seq_len)
    return output[:1].expand_as(output).clone() if x.shape[-2] == 1 else output


@fault(
    BLOCK,
    family="layout",
    kind="strides_ignored",
    does="the memory of W_1 is walked as if it were contiguous",
    detected_by="any_memory_layout",
    mistake="A weight that arrives transposed is a view.",
    report="pytorch/pytorch#51713",
)
def weight_strides_ignored(x, weights, num_heads, theta, max_seq_len):
    held = {**weights, "ffn.w1.weight": attention_faults.following(weights["ffn.w1.weight"])}
    return right(x, held, num_heads, theta, max_seq_len)


@fault(
    BLOCK,
    family="layout",
    kind="strides_ignored",
    does="the memory of the input is walked as if it were contiguous",
    detected_by="any_memory_layout",
    mistake="A kernel that takes the address and the sizes, and forgets the strides.",
    report="pytorch/pytorch#163597",
)
def input_strides_ignored(x, weights, num_heads, theta, max_seq_len):
    return right(attention_faults.following(x), weights, num_heads, theta, max_seq_len)


@fault(
    BLOCK,
    family="arguments",
    does="the norms write into the stream, where float() makes no copy",
    detected_by=("does_not_change_its_arguments", "zero_output_weights_give_the_input"),
    mistake="In half precision float() copies; in float32 it gives the tensor itself.",
    report="GeeeekExplorer/nano-vllm#170",
)
def norm_written_into_the_stream(x, weights, num_heads, theta, max_seq_len):
    def norm(stream, gain, eps):
        wide = stream.float()
        return wide.mul_((wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(stream.dtype) * gain

    return _with(x, weights, num_heads, theta, max_seq_len, rmsnorm=norm)


@fault(
    BLOCK,
    family="memory",
    kind="another_path_with_gradients",
    does="dropout is on where weights require gradients",
    detected_by="grad_mode_changes_nothing",
    mistake="Whether one trains is told by the weights, not by the caller.",
)
def dropout_where_gradients_are_wanted(x, weights, num_heads, theta, max_seq_len):
    tracked = any(weight.requires_grad for weight in weights.values())
    return (dropout_left_on if tracked else right)(x, weights, num_heads, theta, max_seq_len)


_CACHE: dict[Any, Tensor] = {}


@fault(
    BLOCK,
    family="memory",
    does="tokens attend to those of the call before, where it had the same shape",
    detected_by="has_no_memory",
    mistake="A decoder's cache that nobody emptied between two texts.",
)
def cache_not_emptied(x, weights, num_heads, theta, max_seq_len):
    before = _CACHE.pop((x.shape, x.dtype), None)
    _CACHE[x.shape, x.dtype] = x.detach().clone()
    if before is None:
        return right(x, weights, num_heads, theta, max_seq_len)
    return right(torch.cat((before, x), -2), weights, num_heads, theta, 2 * max_seq_len)[..., x.shape[-2] :, :]


_TABLES: dict[Any, Tensor] = {}


@fault(
    BLOCK,
    family="memory",
    kind="table_cached_without_theta",
    does="the table of angles is kept by its sizes, without theta",
    detected_by="rope_is_on",
    mistake="In one model theta never changes.",
)
def table_kept_without_theta(x, weights, num_heads, theta, max_seq_len):
    def table(positions, d_k, theta):
        key = (len(positions), d_k)
        if key not in _TABLES:
            _TABLES[key] = functional.rope_table(positions, d_k, theta)
        return _TABLES[key]

    return _with_table(x, weights, num_heads, theta, max_seq_len, table)


@fault(
    BLOCK,
    family="global_state",
    kind="module_built_in_every_call",
    does="modules are built in every call, and so draw their weights",
    detected_by="leaves_the_global_random_state_alone",
    mistake="The weights drawn are overwritten; the numbers drawn are gone.",
)
def modules_built_in_every_call(x, weights, num_heads, theta, max_seq_len):
    for weight in weights.values():
        torch.nn.init.trunc_normal_(torch.empty_like(weight))
    return right(x, weights, num_heads, theta, max_seq_len)


@fault(
    BLOCK,
    family="global_state",
    does="gradients are switched off for good",
    detected_by="leaves_global_settings_alone",
    mistake="set_grad_enabled(False) is no context manager here.",
)
def gradients_switched_off(*call):
    torch.set_grad_enabled(False)
    return right(*call)


@fault(
    BLOCK,
    family="signature",
    kind="axes_squeezed",
    does="a batch of one loses its axis",
    detected_by="keeps_its_signature",
    mistake="squeeze() without an axis.",
)
def batch_of_one_squeezed(x, weights, num_heads, theta, max_seq_len):
    return functional.transformer_block(x, weights, num_heads, theta, max_seq_len).squeeze(0)


@fault(
    BLOCK,
    family="arguments",
    does="the caller's input is the stream that both halves add to, in place",
    detected_by="does_not_change_its_arguments",
    mistake="x += ... saves memory.",
)
def added_in_place(x, weights, num_heads, theta, max_seq_len):
    block = parts(weights, num_heads, theta, max_seq_len)
    x += block.attend(block.norm1(x))
    x += block.feed(block.norm2(x))
    return x


@fault(
    BLOCK,
    family="arguments",
    does="weights are popped from the caller's dict",
    detected_by="does_not_change_its_arguments",
    mistake="What is left over after loading is meant to show unknown keys.",
)
def weights_popped(x, weights, num_heads, theta, max_seq_len):
    taken = {name: weights.pop(name) for name in list(weights)}
    return functional.transformer_block(x, taken, num_heads, theta, max_seq_len)


_READY: dict[Any, Any] = {}


@fault(
    BLOCK,
    family="memory",
    does="the block made for one call serves the next of the same sizes too, with its own weights and theta",
    detected_by="has_no_memory",
    mistake="The cache's key holds the sizes only.",
    report="open-mmlab/mmcv#1418",
)
def cached_by_sizes_alone(x, weights, num_heads, theta, max_seq_len):
    sizes = (*x.shape, len(weights["ffn.w1.weight"]), num_heads, x.dtype)
    made = _READY.pop(sizes, None)
    if made is None:
        _READY.clear()
        made = _READY[sizes] = {"weights": weights, "theta": theta}
    return functional.transformer_block(x, num_heads=num_heads, max_seq_len=max_seq_len, **made)


@fault(
    BLOCK,
    family="memory",
    does="dropout is on",
    detected_by=("has_no_memory", "the_global_random_state_decides_nothing", ORACLE),
    mistake="A module that was never told eval().",
)
def dropout_left_on(x, weights, num_heads, theta, max_seq_len):
    block = parts(weights, num_heads, theta, max_seq_len)
    y = x + torch.dropout(block.attend(block.norm1(x)), 0.25, True)
    return y + torch.dropout(block.feed(block.norm2(y)), 0.25, True)


# ---------------------------------------------------------------------- paths, lengths, dtypes, layouts, global state


@fault(
    BLOCK,
    family="memory",
    kind="another_path_without_gradients",
    does="a fast path without gradients, which leaves the second norm out",
    detected_by="grad_mode_changes_nothing",
    mistake="Two texts of one block, of which one was mended.",
    report="pytorch/pytorch#190486",
)
def no_second_norm_without_gradients(x, weights, num_heads, theta, max_seq_len):
    block = parts(weights, num_heads, theta, max_seq_len)
    return assembled(x, block if torch.is_grad_enabled() else block._replace(norm2=lambda stream: stream))


@fault(
    BLOCK,
    family="boundary",
    kind="tokens_beyond_a_block",
    does="from the 33rd token on the feed-forward network is left out",
    detected_by=("feed_forward_at_any_size", "any_length"),
    mistake="A loop over blocks of 32 rows that leaves out the last, partial one.",
    report="66RING/tiny-flash-attention#12",
)
def feed_forward_of_the_first_32_tokens(x, weights, num_heads, theta, max_seq_len):
    block = parts(weights, num_heads, theta, max_seq_len)

    def feed(stream):
        return torch.cat((block.feed(stream[..., :32, :]), torch.zeros_like(stream[..., 32:, :])), -2)

    return assembled(x, block._replace(feed=feed))


@fault(
    BLOCK,
    family="precision",
    kind="short_dtype_inside",
    does="the stream is added up in float16, whatever the dtype",
    detected_by=("large_streams_stay_finite", ORACLE),
    mistake="The residual was thought to be small.",
)
def stream_in_float16(x, weights, num_heads, theta, max_seq_len):
    block = parts(weights, num_heads, theta, max_seq_len)
    y = (x.half() + block.attend(block.norm1(x)).half()).to(x.dtype)
    return (y.half() + block.feed(block.norm2(y)).half()).to(x.dtype)


@fault(
    BLOCK,
    family="signature",
    kind="empty_batch",
    does="a batch of no examples gives one example of zeros",
    detected_by="empty_batch_gives_an_empty_result",
    mistake="A default for a loop that never runs.",
    report="pytorch/pytorch#174939",
)
def empty_batch_gives_zeros(x, weights, num_heads, theta, max_seq_len):
    if x.numel() == 0:
        return x.new_zeros(1, *x.shape[1:])
    return functional.transformer_block(x, weights, num_heads, theta, max_seq_len)


# ---------------------------------------------------------------------------------------------------------------- sizes


@fault(
    BLOCK,
    family="boundary",
    does="heads from the 9th on are 0",
    detected_by="running_means_at_any_length",
    mistake="The grid is made for the model that the kernel was written for.",
)
def heads_beyond_8_not_written(x, weights, num_heads, theta, max_seq_len):
    with patch.object(functional, "merge_heads", heads_faults.eight_merged):
        return functional.transformer_block(x, weights, num_heads, theta, max_seq_len)
