"""Faults of the Transformer language model: the head, the final norm, the layers, the context, what a call leaves."""

from functools import partial
from math import gcd, sqrt
from typing import Any
from unittest.mock import patch

import torch

from spec_lm.faults import fault, transformer_block
from spec_lm.faults import scaled_dot_product_attention as attention
from spec_lm.reference import functional
from spec_lm.reference.functional import BLOCK_EPS, embedding, linear, rmsnorm

LM = "transformer_lm"
ORACLE = "agrees_with_the_oracle"
EMBEDDING, FINAL_GAIN, HEAD = "token_embeddings.weight", "ln_final.weight", "lm_head.weight"


def held_by(layer, weights):
    """The weights of one layer, by the block's keys."""
    prefix = f"layers.{layer}."
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def numbers(weights):
    """The numbers of the layers, in order."""
    return sorted({int(name.split(".")[1]) for name in weights if name.startswith("layers.")})


def streamed(token_ids, weights, num_heads, theta, context_length, *, layers=None, block=functional.transformer_block):
    """The stream behind the last layer; a fault gives other layers, or another block."""
    x = embedding(token_ids, weights[EMBEDDING])
    for layer in numbers(weights) if layers is None else layers:
        x = block(x, held_by(layer, weights), num_heads, theta, context_length)
    return x


def scored(x, weights):
    """The logits of a stream."""
    return linear(rmsnorm(x, weights[FINAL_GAIN], BLOCK_EPS), weights[HEAD])


right = functional.transformer_lm


def _with(*call, **replaced):
    """The reference with others in place of its own parts, as `silu` or `linear`."""
    with patch.multiple(functional, **replaced):
        return right(*call)


# ------------------------------------------------------------------------------------------------------------- the head


@fault(
    LM,
    family="formula",
    does="a softmax at the end: probabilities for logits",
    detected_by=("unnormalized_logits", "final_norm_before_the_head", ORACLE),
    mistake="The model is drawn with a softmax at its end.",
)
def softmax_at_the_end(token_ids, weights, num_heads, theta, context_length):
    return functional.softmax(functional.transformer_lm(token_ids, weights, num_heads, theta, context_length), -1)


@fault(
    LM,
    family="formula",
    does="a log-softmax at the end",
    detected_by=("unnormalized_logits", "final_norm_before_the_head"),
    mistake="The loss is the same, so training looks right.",
)
def log_softmax_at_the_end(token_ids, weights, num_heads, theta, context_length):
    logits = functional.transformer_lm(token_ids, weights, num_heads, theta, context_length)
    return logits.log_softmax(-1)


@fault(
    LM,
    family="formula",
    does="the mean of each row of logits is subtracted",
    detected_by="unnormalized_logits",
    mistake="The softmax does not see it.",
)
def logits_centered(token_ids, weights, num_heads, theta, context_length):
    logits = functional.transformer_lm(token_ids, weights, num_heads, theta, context_length)
    return logits - logits.mean(-1, keepdim=True)


@fault(
    LM,
    family="formula",
    does="logits are capped: 30 tanh(logits / 30)",
    detected_by=("unnormalized_logits", "final_norm_before_the_head"),
    mistake="Another model's soft cap; small logits hardly show it.",
)
def logits_capped(token_ids, weights, num_heads, theta, context_length):
    return 30 * (functional.transformer_lm(token_ids, weights, num_heads, theta, context_length) / 30).tanh()


@fault(
    LM,
    family="weights",
    kind="tied_weights",
    does="the embedding serves as the head",
    detected_by=("head_is_not_tied_to_the_embedding", "unnormalized_logits", "final_norm_before_the_head"),
    mistake="Tied by a default of the configuration, whatever the weights say.",
    report="huggingface/transformers#42612",
)
def head_tied(token_ids, weights, num_heads, theta, context_length):
    tied = {**weights, HEAD: weights[EMBEDDING]}
    return functional.transformer_lm(token_ids, tied, num_heads, theta, context_length)


@fault(
    LM,
    family="weights",
    kind="tied_weights",
    does="the head overwrites the embedding",
    detected_by=("head_is_not_tied_to_the_embedding", "final_norm_before_the_head"),
    mistake="Two names for one parameter: whichever is loaded last wins.",
    report="facebookresearch/lingua#74",
)
def embedding_tied(token_ids, weights, num_heads, theta, context_length):
    tied = {**weights, EMBEDDING: weights[HEAD]}
    return functional.transformer_lm(token_ids, tied, num_heads, theta, context_length)


@fault(
    LM,
    family="formula",
    does="logits come one position late: those of the token before",
    detected_by=("final_norm_before_the_head", ORACLE),
    mistake="The shift that the loss needs is made in the model too.",
    report="huggingface/transformers#37830",
)
def logits_shifted(token_ids, weights, num_heads, theta, context_length):
    return functional.transformer_lm(token_ids, weights, num_heads, theta, context_length).roll(1, -2)


@fault(
    LM,
    family="formula",
    kind="softmax_at_the_end",
    does="a softmax at the end under no_grad",
    detected_by="grad_mode_changes_nothing",
    mistake="Probabilities are what inference wants, logits what the loss does.",
)
def probabilities_without_gradients(*call):
    logits = right(*call)
    return logits if torch.is_grad_enabled() else logits.softmax(-1)


@fault(
    LM,
    family="scale",
    does="logits are divided by sqrt(d_model)",
    detected_by=("final_norm_before_the_head", "zero_layers", ORACLE),
    mistake="A rule of scaling for wider models.",
)
def logits_scaled(token_ids, weights, num_heads, theta, context_length):
    return right(token_ids, weights, num_heads, theta, context_length) / sqrt(weights[HEAD].shape[1])


@fault(
    LM,
    family="precision",
    kind="bfloat16_inside",
    does="logits are rounded to bfloat16",
    detected_by=("final_norm_before_the_head", ORACLE),
    mistake="The head runs in the dtype of the model, and the loss in steps of its own.",
    report="Modalities/modalities#464",
)
def logits_in_bfloat16(*call):
    logits = right(*call)
    return logits.bfloat16().to(logits.dtype)


@fault(
    LM,
    family="weights",
    kind="square_weight_transposed",
    does="lm_head is transposed where it is square",
    detected_by="vocabulary_as_large_as_the_model",
    mistake="The weight is square, so both products run.",
    report="Integral2u/SharpMind#14",
)
def square_head_transposed(token_ids, weights, num_heads, theta, context_length):
    head = weights[HEAD]
    turned = {**weights, HEAD: head.T if head.shape[0] == head.shape[1] else head}
    return right(token_ids, turned, num_heads, theta, context_length)


@fault(
    LM,
    family="weights",
    kind="square_weight_transposed",
    does="the embedding is transposed where it is square",
    detected_by="vocabulary_as_large_as_the_model",
    mistake="(d_model, vocab) in one library, (vocab, d_model) in the other.",
)
def square_embedding_transposed(token_ids, weights, num_heads, theta, context_length):
    table = weights[EMBEDDING]
    turned = {**weights, EMBEDDING: table.T if table.shape[0] == table.shape[1] else table}
    return right(token_ids, turned, num_heads, theta, context_length)


# ------------------------------------------------------------------------------------------------------- the final norm


@fault(
    LM,
    family="norm",
    does="the final norm is missing",
    detected_by=("final_norm_before_the_head", "zero_layers", ORACLE),
    report="NVIDIA-NeMo/Speech#2197",
)
def no_final_norm(token_ids, weights, num_heads, theta, context_length):
    return linear(streamed(token_ids, weights, num_heads, theta, context_length), weights[HEAD])


@fault(
    LM,
    family="norm",
    does="the final norm comes after the head",
    detected_by=("final_norm_before_the_head", "unnormalized_logits", ORACLE),
)
def norm_after_the_head(token_ids, weights, num_heads, theta, context_length):
    x = streamed(token_ids, weights, num_heads, theta, context_length) * weights[FINAL_GAIN]
    logits = linear(x, weights[HEAD])
    return rmsnorm(logits, torch.ones_like(logits[(0,) * (logits.ndim - 1)]), BLOCK_EPS)


@fault(
    LM,
    family="norm",
    kind="gain_left_out",
    does="the final norm has no gain",
    detected_by=("final_norm_before_the_head", ORACLE),
    mistake="A gain of 1, as initialized, hides it.",
)
def final_norm_without_gain(token_ids, weights, num_heads, theta, context_length):
    plain = {**weights, FINAL_GAIN: torch.ones_like(weights[FINAL_GAIN])}
    return functional.transformer_lm(token_ids, plain, num_heads, theta, context_length)


@fault(LM, family="norm", kind="another_eps", does="the eps of the final norm is 1e-6", detected_by="eps_is_1e_5")
def final_eps_1e_6(token_ids, weights, num_heads, theta, context_length):
    x = streamed(token_ids, weights, num_heads, theta, context_length)
    return linear(rmsnorm(x, weights[FINAL_GAIN], 1e-6), weights[HEAD])


@fault(
    LM,
    family="scale",
    does="the embedding is scaled by sqrt(d_model)",
    detected_by=("eps_is_1e_5", ORACLE),
    mistake="The first Transformer does so; norms hide it but for eps and for what the layers add.",
)
def embedding_scaled(token_ids, weights, num_heads, theta, context_length):
    scaled = {**weights, EMBEDDING: weights[EMBEDDING] * sqrt(weights[EMBEDDING].shape[1])}
    return functional.transformer_lm(token_ids, scaled, num_heads, theta, context_length)


@fault(
    LM,
    family="formula",
    kind="id_is_padding",
    does="id 0 is padding: its embedding is zero",
    detected_by=("vocabulary_permutation_commutes", "final_norm_before_the_head"),
    mistake="padding_idx=0.",
)
def id_0_is_padding(token_ids, weights, num_heads, theta, context_length):
    table = weights[EMBEDDING].clone()
    table[0] = 0
    return functional.transformer_lm(token_ids, {**weights, EMBEDDING: table}, num_heads, theta, context_length)


@fault(
    LM,
    family="norm",
    does="the final norm runs twice",
    detected_by=("final_norm_before_the_head", "zero_layers"),
    mistake="In the stack of layers, and in the head again; gains of 1 nearly hide it.",
)
def final_norm_twice(token_ids, weights, num_heads, theta, context_length):
    x = streamed(token_ids, weights, num_heads, theta, context_length)
    return scored(rmsnorm(x, weights[FINAL_GAIN], BLOCK_EPS), weights)


@fault(
    LM,
    family="norm",
    does="the embedding is normalized",
    detected_by=("eps_is_1e_5", ORACLE),
    mistake="Some models do so; the norms that follow hide it but for what the layers add.",
)
def embedding_normalized(token_ids, weights, num_heads, theta, context_length):
    table = rmsnorm(weights[EMBEDDING], torch.ones_like(weights[FINAL_GAIN]), BLOCK_EPS)
    return right(token_ids, {**weights, EMBEDDING: table}, num_heads, theta, context_length)


@fault(
    LM,
    family="mask",
    kind="id_is_padding",
    does="tokens of the id 0 are padding, and no token sees them",
    detected_by=("vocabulary_permutation_commutes", "running_means_at_any_length"),
    mistake="The padding of another tokenizer.",
)
def id_0_is_hidden(token_ids, weights, num_heads, theta, context_length):
    seen = (token_ids != 0)[..., None, None, :]

    def mask(sequence, device):
        return torch.ones(sequence, sequence, dtype=torch.bool).tril() & seen

    return _with(token_ids, weights, num_heads, theta, context_length, causal_mask=mask)


# ------------------------------------------------------------------------------------------------------------- the ids


def _through(dtype, token_ids, weights, *rest):
    """The model whose ids pass through another dtype on their way to the embedding."""
    table = weights[EMBEDDING]
    numbers = torch.arange(len(table)).to(dtype).long().clamp(0, len(table) - 1)
    return right(token_ids, {**weights, EMBEDDING: table[numbers]}, *rest)


@fault(
    LM,
    family="precision",
    kind="ids_in_a_narrow_dtype",
    does="ids are held in bfloat16: beyond 256 neighbors become one",
    detected_by="large_vocabulary_permutation_commutes",
    mistake="Ids travel in the dtype of the model, or in one that was wide enough once.",
)
def ids_in_bfloat16(*call):
    return _through(torch.bfloat16, *call)


@fault(
    LM,
    family="precision",
    kind="ids_in_a_narrow_dtype",
    does="ids are held in float16: beyond 2048 neighbors become one",
    detected_by="large_vocabulary_permutation_commutes",
    mistake="Ids travel in the dtype of the model, or in one that was wide enough once.",
)
def ids_in_float16(*call):
    return _through(torch.float16, *call)


@fault(
    LM,
    family="precision",
    kind="ids_in_a_narrow_dtype",
    does="ids are held in int16: 32768 becomes -32768",
    detected_by="large_vocabulary_permutation_commutes",
    mistake="Ids travel in the dtype of the model, or in one that was wide enough once.",
)
def ids_in_int16(*call):
    return _through(torch.int16, *call)


@fault(
    LM,
    family="refusal",
    does="an id outside the vocabulary gets the last row",
    detected_by="id_outside_the_vocabulary_is_refused",
    mistake="A clamped index never fails.",
    report="jax-ml/jax#3774",
)
def ids_clamped(token_ids, weights, num_heads, theta, context_length):
    clamped = token_ids.clamp(max=len(weights[EMBEDDING]) - 1)
    return right(clamped, weights, num_heads, theta, context_length)


@fault(
    LM,
    family="refusal",
    does="an id outside the vocabulary gets zeros",
    detected_by="id_outside_the_vocabulary_is_refused",
    mistake="A masked lookup.",
    report="tinygrad/tinygrad#5873",
)
def zeros_for_ids_outside(token_ids, weights, num_heads, theta, context_length):
    table = torch.nn.functional.pad(weights[EMBEDDING], (0, 0, 0, 1))
    known = token_ids.clamp(max=len(table) - 1)
    return right(known, {**weights, EMBEDDING: table}, num_heads, theta, context_length)


@fault(
    LM,
    family="arguments",
    does="the caller's ids of 0 are replaced in place",
    detected_by="does_not_change_its_arguments",
    mistake="Padding is given an id that can be looked up.",
)
def padding_replaced_in_place(token_ids, weights, num_heads, theta, context_length):
    logits = right(token_ids, weights, num_heads, theta, context_length)
    token_ids.masked_fill_(token_ids == 0, 1)
    return logits


# ----------------------------------------------------------------------------------------------------------- the layers


@fault(
    LM,
    family="weights",
    does="all layers use the weights of the first",
    detected_by=("each_layer_has_its_own_weights", "layers_run_in_order", ORACLE),
    mistake="[layer] * n repeats one layer.",
    report="zalandoresearch/pytorch-vq-vae#2",
)
def first_layer_repeated(token_ids, weights, num_heads, theta, context_length):
    layers = [0] * len(numbers(weights))
    return scored(streamed(token_ids, weights, num_heads, theta, context_length, layers=layers), weights)


@fault(
    LM,
    family="weights",
    does="layers are sorted by name: 10 and 11 run before 2",
    detected_by="layers_run_in_order",
    mistake="Fewer than eleven layers hide it.",
)
def layers_sorted_by_name(token_ids, weights, num_heads, theta, context_length):
    layers = sorted(numbers(weights), key=str)
    return scored(streamed(token_ids, weights, num_heads, theta, context_length, layers=layers), weights)


@fault(
    LM,
    family="weights",
    does="layers run in reverse order",
    detected_by=("layers_run_in_order", ORACLE),
)
def layers_reversed(token_ids, weights, num_heads, theta, context_length):
    layers = numbers(weights)[::-1]
    return scored(streamed(token_ids, weights, num_heads, theta, context_length, layers=layers), weights)


@fault(
    LM,
    family="weights",
    does="the number of a layer is one digit: 10 and 11 are read as 1",
    detected_by="layers_run_in_order",
    mistake='A key that starts with "layers.1" belongs to layer 1, 10 or 11.',
)
def one_digit_layer_numbers(token_ids, weights, num_heads, theta, context_length):
    layers = [int(str(layer)[0]) for layer in numbers(weights)]
    return scored(streamed(token_ids, weights, num_heads, theta, context_length, layers=layers), weights)


@fault(
    LM,
    family="weights",
    does="the last layer is skipped where there are several",
    detected_by=("each_layer_has_its_own_weights", "layers_run_in_order", ORACLE),
    mistake="range(1, n) for layers counted from 0.",
)
def last_layer_skipped(token_ids, weights, num_heads, theta, context_length):
    layers = numbers(weights)[: max(1, len(numbers(weights)) - 1)]
    return scored(streamed(token_ids, weights, num_heads, theta, context_length, layers=layers), weights)


@fault(
    LM,
    family="norm",
    does="the final norm runs after every layer",
    detected_by=("a_layer_that_adds_nothing_can_be_removed", "each_layer_has_its_own_weights", ORACLE),
    mistake="The norm stands inside the loop.",
)
def norm_between_layers(token_ids, weights, num_heads, theta, context_length):
    def block(x, held, *sizes):
        return rmsnorm(functional.transformer_block(x, held, *sizes), weights[FINAL_GAIN], BLOCK_EPS)

    x = streamed(token_ids, weights, num_heads, theta, context_length, block=block)
    return linear(x, weights[HEAD])


@fault(
    LM,
    family="residual",
    does="what layers add is divided by the square root of their number",
    detected_by=("a_layer_that_adds_nothing_can_be_removed", "each_layer_has_its_own_weights"),
    mistake="A rule of initialization, applied in every call.",
)
def additions_scaled_by_depth(token_ids, weights, num_heads, theta, context_length):
    depth = len(numbers(weights))

    def block(x, held, *sizes):
        return x + (functional.transformer_block(x, held, *sizes) - x) / sqrt(depth)

    return scored(streamed(token_ids, weights, num_heads, theta, context_length, block=block), weights)


@fault(
    LM,
    family="norm",
    does="without layers there is no final norm either",
    detected_by="zero_layers",
    mistake="The norm is applied when the last layer is met.",
)
def no_norm_without_layers(token_ids, weights, num_heads, theta, context_length):
    if numbers(weights):
        return functional.transformer_lm(token_ids, weights, num_heads, theta, context_length)
    return linear(embedding(token_ids, weights[EMBEDDING]), weights[HEAD])


@fault(
    LM,
    family="mask",
    does="only the first layer is causal",
    detected_by=("causal_independence_from_future_tokens", "prefix_gives_the_first_logits", ORACLE),
    mistake="The mask is built once and consumed, or passed to the first layer alone.",
)
def only_the_first_layer_is_causal(token_ids, weights, num_heads, theta, context_length):
    x = embedding(token_ids, weights[EMBEDDING])
    for layer in numbers(weights):
        block = transformer_block.no_causal_mask if layer else functional.transformer_block
        x = block(x, held_by(layer, weights), num_heads, theta, context_length)
    return scored(x, weights)


@fault(
    LM,
    family="mask",
    does="no causal mask in any layer",
    detected_by=("causal_independence_from_future_tokens", "prefix_gives_the_first_logits"),
)
def no_causal_mask(token_ids, weights, num_heads, theta, context_length):
    block = transformer_block.no_causal_mask
    return scored(streamed(token_ids, weights, num_heads, theta, context_length, block=block), weights)


@fault(LM, family="positions", kind="no_rotation", does="queries and keys are not rotated", detected_by=ORACLE)
def no_rope(token_ids, weights, num_heads, theta, context_length):
    block = transformer_block.no_rope
    return scored(streamed(token_ids, weights, num_heads, theta, context_length, block=block), weights)


@fault(LM, family="positions", kind="theta_is_always_10000", does="theta is always 10000", detected_by=ORACLE)
def theta_ignored(token_ids, weights, num_heads, theta, context_length):
    return functional.transformer_lm(token_ids, weights, num_heads, 10000.0, context_length)


@fault(LM, family="norm", does="blocks are post-norm", detected_by=ORACLE)
def post_norm(token_ids, weights, num_heads, theta, context_length):
    block = transformer_block.post_norm
    return scored(streamed(token_ids, weights, num_heads, theta, context_length, block=block), weights)


@fault(
    LM,
    family="weights",
    does="all layers have the norms of the first",
    detected_by="each_layer_has_its_own_weights",
    mistake="Gains of 1, as initialized, hide it.",
    report="zalandoresearch/pytorch-vq-vae#2",
)
def first_norms_for_all_layers(token_ids, weights, num_heads, theta, context_length):
    def held(name):
        return "layers.0." + name.split(".", 2)[2] if ".ln" in name and name.startswith("layers.") else name

    shared = {name: weights[held(name)] for name in weights}
    return right(token_ids, shared, num_heads, theta, context_length)


@fault(
    LM,
    family="weights",
    does="layers after the second are left out",
    detected_by=("layers_run_in_order", "each_layer_has_its_own_weights"),
    mistake="A depth written into the code.",
)
def two_layers_at_most(token_ids, weights, num_heads, theta, context_length):
    layers = numbers(weights)[:2]
    return scored(streamed(token_ids, weights, num_heads, theta, context_length, layers=layers), weights)


@fault(
    LM,
    family="formula",
    kind="gelu",
    does="the gate is GELU",
    detected_by=("layers_run_in_order", "rope_reaches_distant_positions", ORACLE),
    mistake="The gate of other models.",
)
def gelu_in_the_gate(token_ids, weights, num_heads, theta, context_length):
    return _with(
        token_ids, weights, num_heads, theta, context_length, silu=partial(torch.nn.functional.gelu, approximate="tanh")
    )


@fault(
    LM,
    family="precision",
    kind="bfloat16_inside",
    does="the stream is rounded to bfloat16 between the layers",
    detected_by=("a_layer_that_adds_nothing_can_be_removed", "final_norm_before_the_head", ORACLE),
    mistake="A residual kept short to save memory.",
)
def stream_in_bfloat16(token_ids, weights, num_heads, theta, context_length):
    def block(x, held, *sizes):
        return functional.transformer_block(x, held, *sizes).bfloat16().to(x.dtype)

    return scored(streamed(token_ids, weights, num_heads, theta, context_length, block=block), weights)


@fault(
    LM,
    family="precision",
    kind="tf32_inside",
    does="products are those of TF32, which nobody declared",
    detected_by=("final_norm_before_the_head", ORACLE),
    mistake="A default of some device, which keeps 11 bits of each factor.",
)
def tf32_products(token_ids, weights, num_heads, theta, context_length):
    return _with(token_ids, weights, num_heads, theta, context_length, linear=_tf32_product)


def _tf32_product(x, weight):
    return linear(attention.tf32(x), attention.tf32(weight))


@fault(
    LM,
    family="mask",
    kind="window",
    does="a token sees 32 tokens",
    detected_by=("running_means_at_any_length", "any_length"),
    mistake="The window of another model is left on, and short texts hide it.",
    report="unslothai/unsloth#8253",
)
def window_of_32_tokens(token_ids, weights, num_heads, theta, context_length):
    def mask(sequence, device):
        return torch.ones(sequence, sequence, dtype=torch.bool).tril().triu(-31)

    return _with(token_ids, weights, num_heads, theta, context_length, causal_mask=mask)


rope_table = functional.rope_table


def _table_of_bfloat16(positions, d_k, theta):
    return rope_table(positions.bfloat16().long(), d_k, theta)


@fault(
    LM,
    family="precision",
    kind="positions_in_a_narrow_dtype",
    does="positions are held in bfloat16: beyond 256 neighbors become one",
    detected_by="rope_reaches_distant_positions",
    mistake="The whole model is cast, its positions with it.",
    report="huggingface/transformers#29285",
)
def positions_in_bfloat16(token_ids, weights, num_heads, theta, context_length):
    return _with(token_ids, weights, num_heads, theta, context_length, rope_table=_table_of_bfloat16)


@fault(
    LM,
    family="precision",
    kind="positions_in_a_narrow_dtype",
    does="positions are held in int8: 128 becomes -128",
    detected_by="rope_reaches_distant_positions",
    mistake="Enough for the texts of a test.",
)
def positions_in_int8(token_ids, weights, num_heads, theta, context_length):
    return _with(
        token_ids,
        weights,
        num_heads,
        theta,
        context_length,
        rope_table=lambda at, d_k, theta: rope_table(at.to(torch.int8).long(), d_k, theta),
    )


# ---------------------------------------------------------------------------------------------------------- the context


@fault(
    LM,
    family="refusal",
    does="a sequence longer than context_length is accepted",
    detected_by="over_long_input_is_refused",
    mistake="Nothing depends on a table, so nothing fails.",
    report="unslothai/unsloth#1236",
)
def over_long_accepted(token_ids, weights, num_heads, theta, context_length):
    context_length = max(context_length, token_ids.shape[-1])
    return functional.transformer_lm(token_ids, weights, num_heads, theta, context_length)


@fault(
    LM,
    family="refusal",
    does="a sequence longer than context_length is cut to its last tokens",
    detected_by="over_long_input_is_refused",
    mistake="What generation does before it calls the model.",
)
def over_long_truncated(token_ids, weights, num_heads, theta, context_length):
    token_ids = token_ids[..., -context_length:]
    return functional.transformer_lm(token_ids, weights, num_heads, theta, context_length)


@fault(
    LM,
    family="refusal",
    does="positions beyond context_length stay at its last one",
    detected_by="over_long_input_is_refused",
    mistake="A clamped index never fails.",
)
def positions_clamped(token_ids, weights, num_heads, theta, context_length):
    def block(x, held, *sizes):
        at = torch.arange(x.shape[-2]).clamp(max=context_length - 1)
        whole = transformer_block.parts(held, *sizes)
        return transformer_block.assembled(x, whole._replace(attend=_at(whole.attend, at)))

    return scored(streamed(token_ids, weights, num_heads, theta, context_length, block=block), weights)


def _at(attend, positions):
    return lambda x: attend(x, positions=positions)


@fault(
    LM,
    family="boundary",
    does="only sequences of exactly context_length tokens are accepted",
    detected_by="context_length_is_only_a_limit",
    mistake="Masks and tables are made for one length.",
    report="unslothai/unsloth#1236",
)
def only_one_length(token_ids, weights, num_heads, theta, context_length):
    if token_ids.shape[-1] not in (1, context_length):
        raise ValueError(f"expected {context_length} tokens, got {token_ids.shape[-1]}")
    return functional.transformer_lm(token_ids, weights, num_heads, theta, context_length)


@fault(
    LM,
    family="positions",
    does="positions are stretched over context_length, whatever the length",
    detected_by=("context_length_is_only_a_limit", ORACLE),
)
def positions_stretched(token_ids, weights, num_heads, theta, context_length):
    block = transformer_block.positions_stretched
    return scored(streamed(token_ids, weights, num_heads, theta, context_length, block=block), weights)


@fault(
    LM,
    family="refusal",
    does="the mask of a context of one token is broadcast: with context_length 1, future tokens are seen",
    detected_by="over_long_input_is_refused",
    mistake="A mask of one row and one column fits every sequence.",
    report="huggingface/transformers#28215",
)
def mask_of_one_broadcast(token_ids, weights, num_heads, theta, context_length):
    if context_length > 1:
        return functional.transformer_lm(token_ids, weights, num_heads, theta, context_length)
    return no_causal_mask(token_ids, weights, num_heads, theta, token_ids.shape[-1])


@fault(
    LM,
    family="refusal",
    does="it computes with the greatest number of heads of even size that divides d_model",
    detected_by="refuses_a_number_of_heads_that_does_not_divide",
    mistake="Something close runs, where an error was due.",
    report="fla-org/flash-linear-attention#1029",
)
def heads_that_divide(token_ids, weights, num_heads, theta, context_length):
    heads = gcd(num_heads, weights[EMBEDDING].shape[1] // 2)
    return right(token_ids, weights, heads, theta, context_length)


# ---------------------------------------------------------------------------------------------- the call and its traces


@fault(
    LM,
    family="signature",
    kind="float64_returned",
    does="logits are returned in float64",
    detected_by="keeps_its_signature",
    mistake="Logits are widened for the loss.",
)
def logits_widened(token_ids, weights, num_heads, theta, context_length):
    return functional.transformer_lm(token_ids, weights, num_heads, theta, context_length).double()


@fault(
    LM,
    family="signature",
    does="only the logits of the last token are returned",
    detected_by=("prefix_gives_the_first_logits", ORACLE),
    mistake="Generation needs no more.",
)
def last_token_only(token_ids, weights, num_heads, theta, context_length):
    return functional.transformer_lm(token_ids, weights, num_heads, theta, context_length)[..., -1:, :]


@fault(
    LM,
    family="arguments",
    does="weights are popped from the caller's dict",
    detected_by=("does_not_change_its_arguments", "the_same_weights_serve_twice"),
    mistake="What is left over after loading is meant to show unknown keys.",
)
def weights_popped(token_ids, weights, num_heads, theta, context_length):
    taken = {name: weights.pop(name) for name in list(weights)}
    return functional.transformer_lm(token_ids, taken, num_heads, theta, context_length)


@fault(
    LM,
    family="arguments",
    does="W_O is scaled in place in the caller's weights",
    detected_by=("does_not_change_its_arguments", "the_same_weights_serve_twice"),
    mistake="A rule of initialization, applied to weights that were given.",
)
def weights_scaled_in_place(token_ids, weights, num_heads, theta, context_length):
    logits = functional.transformer_lm(token_ids, weights, num_heads, theta, context_length)
    for name, weight in weights.items():
        if name.endswith("attn.output_proj.weight"):
            weight *= 0.5
    return logits


@fault(
    LM,
    family="batch",
    does="the batch is joined into one sequence",
    detected_by=("rows_of_a_batch_are_independent", ORACLE),
    mistake="A stream of documents packed into one row, without a mask between them.",
)
def batch_joined_into_one_sequence(token_ids, weights, num_heads, theta, context_length):
    block = transformer_block.batch_joined_into_one_sequence
    return scored(streamed(token_ids, weights, num_heads, theta, context_length, block=block), weights)


_READY: dict[Any, Any] = {}


@fault(
    LM,
    family="memory",
    does="the model made for one call serves the next of the same sizes too, with its own weights and theta",
    detected_by="has_no_memory",
    mistake="The cache's key holds the sizes only.",
)
def cached_by_sizes_alone(token_ids, weights, num_heads, theta, context_length):
    sizes = (*token_ids.shape, *weights[EMBEDDING].shape, len(weights), num_heads, weights[HEAD].dtype)
    made = _READY.pop(sizes, None)
    if made is None:
        _READY.clear()
        made = _READY[sizes] = {"weights": weights, "theta": theta}
    return functional.transformer_lm(token_ids, num_heads=num_heads, context_length=context_length, **made)


@fault(
    LM,
    family="memory",
    does="dropout is on",
    detected_by=("has_no_memory", ORACLE),
    mistake="A module that was never told eval().",
)
def dropout_left_on(token_ids, weights, num_heads, theta, context_length):
    block = transformer_block.dropout_left_on
    return scored(streamed(token_ids, weights, num_heads, theta, context_length, block=block), weights)


# ---------------------------------------------------------------------- paths, lengths, dtypes, layouts, global state


@fault(
    LM,
    family="memory",
    kind="another_path_without_gradients",
    does="without gradients the last layer is skipped",
    detected_by="grad_mode_changes_nothing",
    mistake="An early exit for generation, taken in evaluation too.",
    report="pytorch/pytorch#106630",
)
def last_layer_skipped_without_gradients(token_ids, weights, num_heads, theta, context_length):
    layers = numbers(weights) if torch.is_grad_enabled() else numbers(weights)[:-1]
    return scored(streamed(token_ids, weights, num_heads, theta, context_length, layers=layers), weights)


@fault(
    LM,
    family="boundary",
    kind="tokens_beyond_a_block",
    does="from the 33rd token on the final norm is left out",
    detected_by=("running_means_at_any_length", "any_length"),
    mistake="A loop over blocks of 32 rows that leaves out the last, partial one.",
    report="66RING/tiny-flash-attention#12",
)
def final_norm_of_the_first_32_tokens(token_ids, weights, num_heads, theta, context_length):
    x = streamed(token_ids, weights, num_heads, theta, context_length)
    return torch.cat((scored(x[..., :32, :], weights), linear(x[..., 32:, :], weights[HEAD])), -2)


@fault(
    LM,
    family="positions",
    kind="table_too_short",
    does="tokens from the 32nd on share the position 31",
    detected_by=("rope_reaches_distant_positions", "any_length"),
    mistake="A rotary table that was made for 32 tokens, and an index clamped to it.",
    report="unslothai/unsloth#1236",
)
def positions_stop_at_a_table_of_32(token_ids, weights, num_heads, theta, context_length):
    def block(x, held, num_heads, theta, max_seq_len):
        made = transformer_block.parts(held, num_heads, theta, max_seq_len)
        positions = torch.arange(x.shape[-2]).clamp(max=31)
        return transformer_block.assembled(x, made._replace(attend=partial(made.attend, positions=positions)))

    return scored(streamed(token_ids, weights, num_heads, theta, context_length, block=block), weights)


@fault(
    LM,
    family="precision",
    kind="bfloat16_inside",
    does="whatever is not float32 is computed in bfloat16",
    detected_by=("agrees_with_the_oracle_in_float64", "agrees_with_the_oracle_in_float16"),
    mistake="Autocast, where float64 was asked for.",
    no_invariant="Only results in other dtypes show it, and invariants are drawn in the dtype of the run.",
)
def computed_in_bfloat16_unless_float32(token_ids, weights, num_heads, theta, context_length):
    dtype = weights[HEAD].dtype
    inside = torch.float32 if dtype == torch.float32 else torch.bfloat16
    narrow = {name: weight.to(inside) for name, weight in weights.items()}
    return functional.transformer_lm(token_ids, narrow, num_heads, theta, context_length).to(dtype)


@fault(
    LM,
    family="layout",
    kind="strides_ignored",
    does="ids are read as if they were contiguous",
    detected_by="any_memory_layout",
    mistake="A kernel that takes the address and the sizes, and forgets the strides.",
    report="ml-explore/mlx#657",
)
def strides_of_the_ids_ignored(token_ids, weights, num_heads, theta, context_length):
    read = token_ids.as_strided(token_ids.shape, token_ids.new_empty(token_ids.shape).stride())
    return functional.transformer_lm(read, weights, num_heads, theta, context_length)


@fault(
    LM,
    family="signature",
    does="a batch of no examples is refused",
    detected_by="empty_batch_gives_an_empty_result",
    mistake="max() over no ids, to see whether they fit the vocabulary.",
    report="Dao-AILab/flash-attention#1159",
)
def empty_batch_refused(token_ids, weights, num_heads, theta, context_length):
    token_ids.max()
    return functional.transformer_lm(token_ids, weights, num_heads, theta, context_length)


@fault(
    LM,
    family="memory",
    kind="dropout_left_on",
    does="a tenth of the embedding is dropped, as in training",
    detected_by=("the_global_random_state_decides_nothing", "has_no_memory"),
    mistake="The functional form drops whatever the mode is.",
)
def embedding_dropout_left_on(token_ids, weights, num_heads, theta, context_length):
    dropped = {**weights, EMBEDDING: torch.dropout(weights[EMBEDDING], 0.1, True)}
    return functional.transformer_lm(token_ids, dropped, num_heads, theta, context_length)


@fault(
    LM,
    family="global_state",
    does="makes its own dtype the default of the process",
    detected_by="leaves_global_settings_alone",
    mistake="Tables are then made in the right dtype, and so is everything else.",
)
def default_dtype_set(token_ids, weights, num_heads, theta, context_length):
    logits = functional.transformer_lm(token_ids, weights, num_heads, theta, context_length)
    torch.set_default_dtype(torch.bfloat16)
    return logits


@fault(
    LM,
    family="signature",
    does="logits of half precision are returned in float32",
    detected_by=("agrees_with_the_oracle_in_bfloat16", "agrees_with_the_oracle_in_float16"),
    mistake="The loss wants them wide; the caller gets them so.",
    no_invariant="Only results in half precision show it, and invariants are drawn in the dtype of the run.",
)
def float32_returned_for_half(*call):
    logits = right(*call)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@fault(
    LM,
    family="batch",
    does="lone tokens get the logits of the first example",
    detected_by="every_example_alone_where_sizes_coincide",
    mistake="The path for one new token forgets the batch.",
    report="ml-explore/mlx#3494",
)
def lone_tokens_of_the_first_example(*call):
    logits = right(*call)
    return logits[:1].expand_as(logits).clone() if logits.shape[-2] == 1 else logits


@fault(
    LM,
    family="layout",
    kind="strides_ignored",
    does="the memory of lm_head is walked as if it were contiguous",
    detected_by="any_memory_layout",
    mistake="A head that is the transpose of something is a view.",
    report="pytorch/pytorch#51713",
)
def strides_of_the_head_ignored(token_ids, weights, num_heads, theta, context_length):
    held = {**weights, HEAD: attention.following(weights[HEAD])}
    return right(token_ids, held, num_heads, theta, context_length)


_RESULTS: dict[Any, torch.Tensor] = {}


@fault(
    LM,
    family="memory",
    does="all logits of one shape are written to the same memory",
    detected_by="has_no_memory",
    mistake="A buffer saves an allocation until two results are wanted at once.",
)
def results_share_a_buffer(*call):
    logits = right(*call).detach()
    return _RESULTS.setdefault((logits.shape, logits.dtype), torch.empty_like(logits)).copy_(logits)


@fault(
    LM,
    family="memory",
    kind="another_path_with_gradients",
    does="dropout is on where weights require gradients",
    detected_by="grad_mode_changes_nothing",
    mistake="Whether one trains is told by the weights, not by the caller.",
)
def dropout_where_gradients_are_wanted(token_ids, weights, num_heads, theta, context_length):
    tracked = any(weight.requires_grad for weight in weights.values())
    return (dropout_left_on if tracked else right)(token_ids, weights, num_heads, theta, context_length)


@fault(
    LM,
    family="global_state",
    kind="module_built_in_every_call",
    does="modules are built in every call, and so draw their weights",
    detected_by="leaves_the_global_random_state_alone",
    mistake="The weights drawn are overwritten; the numbers drawn are gone.",
)
def modules_built_in_every_call(token_ids, weights, num_heads, theta, context_length):
    torch.nn.Embedding(*weights[EMBEDDING].shape)
    return right(token_ids, weights, num_heads, theta, context_length)


@fault(
    LM,
    family="global_state",
    does="a seed is set in every call",
    detected_by="leaves_the_global_random_state_alone",
    mistake="For repeatable results; everything else that draws repeats itself too.",
)
def seed_set(*call):
    torch.manual_seed(0)
    return right(*call)
