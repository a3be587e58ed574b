"""Faults of the Transformer block: residuals, norms, order of the halves, rotation, masks, what a call leaves."""

from collections.abc import Callable
from functools import partial
from math import log, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spec_lm.faults import fault
from spec_lm.reference import functional
from spec_lm.reference.functional import (
    BLOCK_EPS,
    linear,
    merge_heads,
    multihead_self_attention_with_rope,
    rmsnorm,
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


# ---------------------------------------------------------------------------------------------- the call and its traces


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
    detected_by=("has_no_memory", ORACLE),
    mistake="A module that was never told eval().",
)
def dropout_left_on(x, weights, num_heads, theta, max_seq_len):
    block = parts(weights, num_heads, theta, max_seq_len)
    y = x + torch.dropout(block.attend(block.norm1(x)), 0.25, True)
    return y + torch.dropout(block.feed(block.norm2(y)), 0.25, True)
