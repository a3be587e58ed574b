"""Faults of backward passes: what each operator returns is right, and a gradient of it is wrong.

Most come from kernels whose backward pass is written by hand, some from what is detached, and some from formulas that
are right and have no finite derivative.
"""

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_lm.conformance.clause import EVERY
from spec_lm.faults import fault
from spec_lm.reference import functional
from spec_lm.reference.functional import causal_mask, linear, merge_heads, rmsnorm, silu, split_heads, swiglu, upcast

INPUTS = "gradients_with_respect_to_inputs"
WEIGHTS = "gradients_with_respect_to_weights"
NOTHING = "backward_changes_nothing"
LAYOUT = "cotangent_in_any_memory_layout"
ADJOINT = "backward_is_the_adjoint"
ROWS = "weights_gather_gradients_from_many_rows"
ATTENTION = "scaled_dot_product_attention"
MHA = "multihead_self_attention"
MHA_WITH_ROPE = "multihead_self_attention_with_rope"
BLOCK = "transformer_block"
LM = "transformer_lm"

Backward = Callable[[Tensor], tuple[Tensor, ...]]


class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, backward: Backward, *tensors: Tensor) -> Tensor:
        ctx.by_hand = backward
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.by_hand(gradients[0])


def _by_hand(value: Tensor, backward: Backward, *tensors: Tensor) -> Tensor:
    """The value, as a function of the tensors whose gradients `backward` gives from that of the value."""
    return _ByHand.apply(value.detach(), backward, *tensors)  # pyright: ignore[reportReturnType]


def _changed(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """x, whose gradient is changed on its way back."""
    return _by_hand(x, lambda gradient: (change(gradient),), x)


def _with_gradient_of(other: Tensor, value: Tensor) -> Tensor:
    """The value, with the gradient of the other."""
    return _by_hand(value, lambda gradient: (gradient,), other)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


# ------------------------------------------------------------------------------------------------ whatever the operator


def _on_the_way_back(operator: str, name: str, change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The reference's operator, with the gradient of its output changed before anything else of backward."""

    def wrong(*arguments: Any) -> Tensor:
        return _changed(getattr(functional, operator)(*arguments), change)

    wrong.__name__ = wrong.__qualname__ = name
    return wrong


def _as_if_contiguous(gradient: Tensor) -> Tensor:
    """What lies one after the other in memory; past its end it begins again."""
    memory = gradient.as_strided((gradient.untyped_storage().nbytes() // gradient.element_size(),), (1,), 0)
    count = gradient.numel()
    return memory.repeat(-(-count // len(memory)))[:count].reshape(gradient.shape)


def _leaving_zeros(gradient: Tensor) -> Tensor:
    taken = gradient.clone()
    gradient.zero_()
    return taken


for _operator in EVERY:
    fault(
        _operator,
        family="layout",
        kind="cotangent_read_as_contiguous",
        does="backward reads the cotangent as if it were contiguous",
        detected_by=(LAYOUT, WEIGHTS if _operator in ("embedding", LM) else INPUTS),
        mistake="Only the forward pass makes what it is given contiguous; y.sum() hands back a stride of 0.",
        report="Dao-AILab/flash-attention#355" if _operator == ATTENTION else "flagos-ai/FlagGems#1068",
    )(_on_the_way_back(_operator, "cotangent_read_as_contiguous", _as_if_contiguous))
    fault(
        _operator,
        family="arguments",
        kind="cotangent_overwritten",
        does="backward works in the buffer of the cotangent, and leaves zeros there",
        detected_by=NOTHING,
        mistake="It saves an allocation; whoever else needs the cotangent gets what is left of it.",
        report="linkedin/Liger-Kernel#1305",
    )(_on_the_way_back(_operator, "cotangent_overwritten", _leaving_zeros))


# -------------------------------------------------------------------------------------------------------------- softmax


@fault(
    "softmax",
    family="gradient",
    kind="no_row_sum",
    does="backward is p dp for p (dp - sum p dp)",
    detected_by=INPUTS,
    mistake="The derivative of exp alone; the denominator depends on every entry, too.",
)
def backward_without_the_row_sum(x, dim):
    p = functional.softmax(x, dim).detach()
    return _by_hand(p, lambda dp: (p * dp,), x)


@fault(
    "softmax",
    family="gradient",
    does="backward sums along the last axis, whatever the axis asked for",
    detected_by=INPUTS,
    mistake="The backward kernel was written for attention.",
)
def backward_along_the_last_axis(x, dim):
    p = functional.softmax(x, dim).detach()
    return _by_hand(p, lambda dp: (p * (dp - (p * dp).sum(-1, keepdim=True)),), x)


@fault(
    "softmax",
    family="gradient",
    does="the largest entry gets the gradient of a maximum on top",
    detected_by=INPUTS,
    mistake="The maximum is subtracted above and below the fraction bar, and detached in one of the two.",
)
def gradient_of_the_maximum(x, dim):
    largest = x.amax(dim, keepdim=True)
    denominator = (x - largest.detach()).exp().sum(dim, keepdim=True)
    return (x - largest).exp() / denominator


@fault(
    "softmax",
    family="gradient",
    kind="zero_times_infinity",
    does="the gradient of an entry of -inf is NaN",
    detected_by=("minus_infinity_gets_no_gradient", INPUTS),
    mistake="1 / exp(max - x) is 0 there, and its derivative 0 times infinity.",
    report="tensorflow/tensorflow#11756",
)
def gradient_of_minus_infinity_is_nan(x, dim):
    powers = 1 / (x.amax(dim, keepdim=True).detach() - x).exp()
    return powers / powers.sum(dim, keepdim=True)


# ----------------------------------------------------------------------------------------------------------------- silu


@fault(
    "silu",
    family="gradient",
    kind="branch_detached",
    does="the sigmoid passes no gradient",
    detected_by=INPUTS,
    mistake="A gate is detached, as if it were a mask.",
)
def sigmoid_detached(x):
    return x * x.sigmoid().detach()


@fault(
    "silu",
    family="gradient",
    kind="zero_times_infinity",
    does="the gradient of a large negative entry is NaN",
    detected_by=INPUTS,
    mistake="x / (1 + exp(-x)) is right where exp overflows, and its derivative 0 times infinity.",
)
def gradient_overflows(x):
    return x / (1 + torch.exp(-x))


# --------------------------------------------------------------------------------------------------------------- linear


def _outer_in_bfloat16(dy: Tensor, x: Tensor) -> Tensor:
    """dy^T x, one row after the other added in bfloat16."""
    total = torch.zeros(dy.shape[-1], x.shape[-1], dtype=torch.bfloat16)
    for dy_row, x_row in zip(_rows(dy).bfloat16(), _rows(x).bfloat16(), strict=True):
        total += dy_row[:, None] * x_row
    return total.to(dy.dtype)


def _linear_with(x: Tensor, weight: Tensor, weight_gradient: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """W x, where the gradient of W is a function of dy and x."""
    rows, matrix = x.detach(), weight.detach()
    return _by_hand(linear(x, weight), lambda dy: (dy @ matrix, weight_gradient(dy, rows)), x, weight)


@fault(
    "linear",
    family="gradient",
    does="a square weight is used transposed in backward",
    detected_by=(ADJOINT, INPUTS),
    mistake="dx = W dy for W^T dy; a square weight lets it pass.",
)
def square_weight_transposed_in_backward(x, weight):
    matrix, rows = weight.detach(), x.detach()
    other = matrix.T if matrix.shape[0] == matrix.shape[1] else matrix
    return _by_hand(linear(x, weight), lambda dy: (dy @ other, _rows(dy).T @ _rows(rows)), x, weight)


@fault(
    "linear",
    family="gradient",
    kind="weight_gradient_in_bfloat16",
    does="the rows of the weight's gradient are added in bfloat16",
    detected_by=(WEIGHTS, ROWS),
    mistake="The accumulator has the dtype in which the weight is kept.",
    report="linkedin/Liger-Kernel#950",
)
def weight_gradient_in_bfloat16(x, weight):
    return _linear_with(x, weight, _outer_in_bfloat16)


@fault(
    "linear",
    family="gradient",
    does="the weight's gradient is the mean over the rows",
    detected_by=(WEIGHTS, ROWS),
    mistake="The loss was a mean; where it is, the cotangent has that factor already.",
)
def weight_gradient_averaged(x, weight):
    return _linear_with(x, weight, lambda dy, rows: _rows(dy).T @ _rows(rows) / len(_rows(rows)))


@fault(
    "linear",
    family="gradient",
    does="the weight's gradient takes 128 rows at most",
    detected_by=ROWS,
    mistake="One block of rows is the whole batch in every test.",
)
def weight_gradient_of_one_block(x, weight):
    return _linear_with(x, weight, lambda dy, rows: _rows(dy)[:128].T @ _rows(rows)[:128])


@fault(
    "linear",
    family="memory",
    does="the gradient of one call is added to that of the next",
    detected_by=NOTHING,
    mistake="The buffer that gathers gradients is cleared a call too late.",
)
def weight_gradient_kept(x, weight):
    def with_the_last(dy, rows):
        gradient = _rows(dy).T @ _rows(rows)
        last, _LAST_GRADIENTS[weight.shape] = _LAST_GRADIENTS.get(weight.shape, 0.0), gradient
        return gradient + last

    return _linear_with(x, weight, with_the_last)


_LAST_GRADIENTS: dict[torch.Size, Tensor] = {}


# ------------------------------------------------------------------------------------------------------------ embedding


@fault(
    "embedding",
    family="gradient",
    kind="weight_gradient_in_bfloat16",
    does="a frequent id loses gradient, since its rows are added in bfloat16",
    detected_by=(WEIGHTS, ROWS),
    mistake="After 256 ones the next one is rounded away.",
    report="tenstorrent/tt-metal#36341",
)
def repeats_added_in_bfloat16(token_ids, weight):
    def backward(dy):
        return (_outer_in_bfloat16(F.one_hot(token_ids.long(), len(weight)).to(dy.dtype), dy),)

    return _by_hand(functional.embedding(token_ids, weight), backward, weight)


@fault(
    "embedding",
    family="gradient",
    does="a repeated id keeps the gradient of one place alone",
    detected_by=(WEIGHTS, ROWS),
    mistake="gradient[ids] = dy assigns where it should add.",
)
def repeats_overwrite_each_other(token_ids, weight):
    def backward(dy):
        gradient = torch.zeros_like(weight)
        gradient[token_ids.reshape(-1).long()] = _rows(dy)
        return (gradient,)

    return _by_hand(functional.embedding(token_ids, weight), backward, weight)


@fault(
    "embedding",
    family="gradient",
    does="the gradient of an id is divided by how often it stands there",
    detected_by=(WEIGHTS, ROWS),
    mistake="scale_grad_by_freq is on.",
)
def gradient_scaled_by_frequency(token_ids, weight):
    return F.embedding(token_ids, weight, scale_grad_by_freq=True)


@fault(
    "embedding",
    family="gradient",
    does="id 0 gets no gradient",
    detected_by=(WEIGHTS, ROWS),
    mistake="padding_idx = 0, of a tokenizer that pads with it.",
)
def id_zero_gets_no_gradient(token_ids, weight):
    return F.embedding(token_ids, weight, padding_idx=0)


# -------------------------------------------------------------------------------------------------------------- rmsnorm


def _norm_with(x: Tensor, gain: Tensor, eps: float, backward: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
    """rmsnorm, whose gradients are a function of dy, the rows, their normed rows, their 1 / rms, and the gain."""
    rows, scale = x.detach(), gain.detach()
    r = (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
    return _by_hand(rmsnorm(x, gain, eps), lambda dy: backward(dy, rows, rows * r, r, scale), x, gain)


def _norm_backward(dy: Tensor, n: Tensor, r: Tensor, gain: Tensor) -> Tensor:
    """The right gradient of x."""
    dn = dy * gain
    return r * (dn - n * (dn * n).mean(-1, keepdim=True))


@fault(
    "rmsnorm",
    family="gradient",
    does="the root mean square passes no gradient",
    detected_by=INPUTS,
    mistake="Statistics are detached, as running ones are.",
)
def denominator_detached(x, gain, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt().detach() * gain


@fault(
    "rmsnorm",
    family="gradient",
    does="backward sums dn n over the row for its mean",
    detected_by=INPUTS,
    mistake="A factor 1 / d_model is lost between the derivative of the root and that of the mean.",
)
def row_sum_for_the_mean(x, gain, eps):
    def backward(dy, rows, n, r, scale):
        dn = dy * scale
        return r * (dn - n * (dn * n).sum(-1, keepdim=True)), _rows(dy * n).sum(0)

    return _norm_with(x, gain, eps, backward)


@fault(
    "rmsnorm",
    family="gradient",
    kind="zero_times_infinity",
    does="the gradient of a row of zeros is NaN",
    detected_by=INPUTS,
    mistake="The root is taken before eps is added to its square: at 0 it has no derivative.",
)
def gradient_of_a_zero_row_is_nan(x, gain, eps):
    root = x.square().mean(-1, keepdim=True).sqrt()
    return x / (root.square() + eps).sqrt() * gain


@fault(
    "rmsnorm",
    family="gradient",
    kind="weight_gradient_in_bfloat16",
    does="the rows of the gain's gradient are added in bfloat16",
    detected_by=(WEIGHTS, ROWS),
    mistake="The accumulator has the dtype in which the gain is kept.",
    report="linkedin/Liger-Kernel#950",
)
def gain_gradient_in_bfloat16(x, gain, eps):
    def backward(dy, rows, n, r, scale):
        total = torch.zeros_like(scale, dtype=torch.bfloat16)
        for row in _rows(dy * n).bfloat16():
            total += row
        return _norm_backward(dy, n, r, scale), total.to(dy.dtype)

    return _norm_with(x, gain, eps, backward)


@fault(
    "rmsnorm",
    family="gradient",
    does="the gain's gradient is sum dy x, of x before it is normed",
    detected_by=(WEIGHTS, ROWS),
    mistake="Backward keeps x, and forgets to norm it again.",
)
def gain_gradient_of_the_raw_input(x, gain, eps):
    return _norm_with(x, gain, eps, lambda dy, rows, n, r, g: (_norm_backward(dy, n, r, g), _rows(dy * rows).sum(0)))


# --------------------------------------------------------------------------------------------------------------- swiglu


@fault(
    "swiglu",
    family="gradient",
    kind="branch_detached",
    does="the gate passes no gradient",
    detected_by=INPUTS,
    mistake="The activation is computed under no_grad.",
)
def gate_detached(x, w1, w2, w3):
    return linear(silu(linear(x, w1)).detach() * linear(x, w3), w2)


@fault(
    "swiglu",
    family="gradient",
    does="every row's gradient is written to the first row",
    detected_by=INPUTS,
    mistake="The output pointer of the backward kernel is never advanced.",
    report="ByteDance-Seed/Triton-distributed#180",
)
def gradients_land_in_the_first_row(x, w1, w2, w3):
    def first(gradient):
        rows = torch.zeros_like(_rows(gradient))
        rows[0] = _rows(gradient)[-1]
        return rows.reshape(gradient.shape)

    return swiglu(_changed(x, first), w1, w2, w3)


@fault(
    "swiglu",
    family="gradient",
    kind="weight_gradients_exchanged",
    does="the gradients of gate and up are exchanged",
    detected_by=(WEIGHTS, ROWS),
    mistake="Both lie in one fused weight, in the other order.",
)
def gradients_of_gate_and_up_exchanged(x, w1, w2, w3):
    gate, up = _gradients_exchanged(w1, w3)
    return swiglu(x, gate, w2, up)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return first.clone(), second.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[1], gradients[0]


def _gradients_exchanged(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    return _Exchanged.apply(first, second)  # pyright: ignore[reportReturnType]


# ----------------------------------------------------------------------------------------------------------------- rope


@fault(
    "rope",
    family="gradient",
    does="backward rotates forward again",
    detected_by=(ADJOINT, INPUTS),
    mistake="The kernel is called with the same sine; the transpose of a rotation turns the other way.",
)
def backward_rotates_forward(x, positions, theta, max_seq_len):
    def forward(t):
        return functional.rope(t, positions, theta, max_seq_len)

    return _by_hand(forward(x), lambda dy: (forward(dy),), x)


@fault(
    "rope",
    family="gradient",
    does="backward passes the gradient on unrotated",
    detected_by=(ADJOINT, INPUTS),
    mistake="The rotation is done in place on .data.",
)
def gradient_passes_unrotated(x, positions, theta, max_seq_len):
    return _with_gradient_of(x, functional.rope(x, positions, theta, max_seq_len))


@fault(
    "rope",
    family="gradient",
    does="backward takes positions 0, 1, 2, .. whatever was given",
    detected_by=(ADJOINT, INPUTS),
    mistake="Positions are not saved for backward.",
)
def backward_counts_positions_from_zero(x, positions, theta, max_seq_len):
    plain = functional.rope(x, torch.arange(x.shape[-2]), theta, x.shape[-2])
    return _with_gradient_of(plain, functional.rope(x, positions, theta, max_seq_len))


# ------------------------------------------------------------------------------------------------------------ attention


def _attend(query, key, value, mask=None):
    return functional.scaled_dot_product_attention(query, key, value, mask)


@fault(
    ATTENTION,
    family="gradient",
    kind="branch_detached",
    does="the keys pass no gradient",
    detected_by=INPUTS,
    mistake="Keys come from a cache, which is detached.",
)
def keys_detached(query, key, value, mask=None):
    return _attend(query, key.detach(), value, mask)


@fault(
    ATTENTION,
    family="gradient",
    does="backward leaves 1 / sqrt(d_k) out of the gradient of the queries",
    detected_by=INPUTS,
    mistake="The scale is folded into the queries before the kernel, and their gradient never unfolded.",
)
def query_gradient_unscaled(query, key, value, mask=None):
    return _attend(_changed(query, lambda gradient: gradient * sqrt(query.shape[-1])), key, value, mask)


@fault(
    ATTENTION,
    family="gradient",
    does="backward divides the gradient of the keys by sqrt(d_k) twice",
    detected_by=INPUTS,
    mistake="The scale is in the gradient of the scores, and once more in the product that follows.",
)
def key_gradient_scaled_twice(query, key, value, mask=None):
    return _attend(query, _changed(key, lambda gradient: gradient / sqrt(query.shape[-1])), value, mask)


@fault(
    ATTENTION,
    family="gradient",
    kind="gradient_without_the_mask",
    does="backward knows no mask",
    detected_by=INPUTS,
    mistake="It recomputes the weights, and is not handed what hid some of them.",
)
def backward_without_the_mask(query, key, value, mask=None):
    return _with_gradient_of(_attend(query, key, value), _attend(query, key, value, mask))


@fault(
    ATTENTION,
    family="gradient",
    kind="no_row_sum",
    does="the gradient of a score is p dp for p (dp - sum p dp)",
    detected_by=INPUTS,
    mistake="The sum of do o over a row, which a kernel makes beforehand, is left at 0.",
)
def scores_without_the_row_sum(query, key, value, mask=None):
    scores = upcast(query) @ upcast(key).mT / sqrt(query.shape[-1])
    hidden = torch.zeros_like(scores, dtype=torch.bool) if mask is None else ~mask
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0).detach()
    output = _by_hand(p, lambda dp: (p * dp,), scores) @ upcast(value)
    return _with_gradient_of(output.to(query.dtype), _attend(query, key, value, mask))


@fault(
    ATTENTION,
    family="gradient",
    kind="zero_times_infinity",
    does="the gradients of hidden scores are NaN",
    detected_by=INPUTS,
    mistake="1 / exp(max - score) is 0 where a score is -inf, and its derivative 0 times infinity.",
    report="tensorflow/tensorflow#11756",
)
def gradient_of_hidden_scores_is_nan(query, key, value, mask=None):
    scores = upcast(query) @ upcast(key).mT / sqrt(query.shape[-1])
    scores = scores if mask is None else scores + torch.where(mask, 0.0, -torch.inf)
    powers = 1 / (scores.amax(-1, keepdim=True).detach() - scores).exp()
    output = (powers / powers.sum(-1, keepdim=True)) @ upcast(value)
    return _with_gradient_of(output.to(query.dtype), _attend(query, key, value, mask))


@fault(
    ATTENTION,
    family="gradient",
    does="a query that sees no key gets zeros, and gradients as if it saw all of them alike",
    detected_by="query_that_sees_nothing_passes_no_gradient",
    mistake="Its output is overwritten after the kernel, which filled its scores with one number.",
)
def blind_query_passes_gradients(query, key, value, mask=None):
    output = _attend(query, key, value, mask)
    if mask is None:
        return output
    mean = torch.zeros_like(output) + value.mean(-2, keepdim=True)
    blind = ~mask.any(-1, keepdim=True)
    return _with_gradient_of(torch.where(blind, mean, output), output)


# ------------------------------------------------------------------------------------------------- multi-head attention


@fault(
    MHA,
    family="gradient",
    does="backward uses the output projection transposed",
    detected_by=INPUTS,
    mistake="W_O is square, so that either way fits.",
)
def output_projection_transposed_in_backward(x, w_q, w_k, w_v, w_o, num_heads):
    def backward(dy):
        return dy @ w_o.detach().T, _rows(dy).T @ _rows(heads.detach())

    identity = torch.eye(x.shape[-1], dtype=x.dtype)
    heads = functional.multihead_self_attention(x, w_q, w_k, w_v, identity, num_heads)
    return _by_hand(linear(heads, w_o), backward, heads, w_o)


@fault(
    MHA,
    family="gradient",
    kind="branch_detached",
    does="the values pass no gradient",
    detected_by=INPUTS,
    mistake="They are read from a cache, which is detached.",
)
def values_detached(x, w_q, w_k, w_v, w_o, num_heads):
    query, key = (split_heads(linear(x, weight), num_heads) for weight in (w_q, w_k))
    value = split_heads(linear(x, w_v), num_heads).detach()
    return linear(merge_heads(_attend(query, key, value, causal_mask(x.shape[-2]))), w_o)


@fault(
    MHA,
    family="gradient",
    kind="weight_gradients_exchanged",
    does="the gradients of W_Q and W_K are exchanged",
    detected_by=WEIGHTS,
    mistake="Both lie in one fused weight, in the other order.",
)
def gradients_of_query_and_key_exchanged(x, w_q, w_k, w_v, w_o, num_heads):
    return functional.multihead_self_attention(x, *_gradients_exchanged(w_q, w_k), w_v, w_o, num_heads)


@fault(
    MHA_WITH_ROPE,
    family="gradient",
    does="backward does not turn the gradient of the keys back",
    detected_by=(INPUTS, WEIGHTS),
    mistake="Only the queries' gradient passes through the rotation.",
)
def key_gradient_not_turned_back(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    positions = torch.arange(x.shape[-2]) if positions is None else positions
    query, key, value = (split_heads(linear(x, weight), num_heads) for weight in (w_q, w_k, w_v))
    turned = [functional.rope(t, positions.unsqueeze(-2), theta, max_seq_len) for t in (query, key)]
    heads = _attend(turned[0], _with_gradient_of(key, turned[1]), value, causal_mask(x.shape[-2]))
    return linear(merge_heads(heads), w_o)


@fault(
    MHA_WITH_ROPE,
    family="gradient",
    kind="gradient_without_the_mask",
    does="backward has the mask of the queries and keys exchanged",
    detected_by=(INPUTS, WEIGHTS),
    mistake="It works on the transposed scores, and its triangle was not transposed with them.",
)
def mask_transposed_in_backward(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    positions = torch.arange(x.shape[-2]) if positions is None else positions
    query, key, value = (split_heads(linear(x, weight), num_heads) for weight in (w_q, w_k, w_v))
    query, key = (functional.rope(t, positions.unsqueeze(-2), theta, max_seq_len) for t in (query, key))
    mask = causal_mask(x.shape[-2])
    heads = _with_gradient_of(_attend(query, key, value, mask.T), _attend(query, key, value, mask))
    return linear(merge_heads(heads), w_o)


# --------------------------------------------------------------------------------------------- block and language model


def _halves_of_block(x, weights, num_heads, theta, max_seq_len):
    """What the attention half of a block adds to the stream, and what its feed-forward half adds after that."""
    q, k, v, o = (weights[f"attn.{name}_proj.weight"] for name in ("q", "k", "v", "output"))
    normed = rmsnorm(x, weights["ln1.weight"], functional.BLOCK_EPS)
    attended = functional.multihead_self_attention_with_rope(normed, q, k, v, o, num_heads, theta, max_seq_len)

    def fed_forward(y):
        normed = rmsnorm(y, weights["ln2.weight"], functional.BLOCK_EPS)
        return swiglu(normed, *(weights[f"ffn.{name}.weight"] for name in ("w1", "w2", "w3")))

    return attended, fed_forward


@fault(
    BLOCK,
    family="gradient",
    does="the stream passes no gradient beside the attention",
    detected_by=INPUTS,
    mistake="The residual is saved in a buffer, detached.",
)
def residual_detached(x, weights, num_heads, theta, max_seq_len):
    attended, fed_forward = _halves_of_block(x, weights, num_heads, theta, max_seq_len)
    y = x.detach() + attended
    return y + fed_forward(y)


@fault(
    BLOCK,
    family="gradient",
    does="the gradient of the stream beside the feed-forward network counts twice",
    detected_by=(INPUTS, WEIGHTS),
    mistake="It is added where the branches meet, and once more by the fused norm.",
)
def residual_gradient_counted_twice(x, weights, num_heads, theta, max_seq_len):
    attended, fed_forward = _halves_of_block(x, weights, num_heads, theta, max_seq_len)
    y = x + attended
    return _changed(y, lambda gradient: 2 * gradient) + fed_forward(y)


@fault(
    BLOCK,
    family="gradient",
    does="the feed-forward network's norm passes its gradient on as it is",
    detected_by=(INPUTS, WEIGHTS),
    mistake="The norm runs under no_grad, and its input takes over.",
)
def second_norm_passes_gradients_through(x, weights, num_heads, theta, max_seq_len):
    attended, _ = _halves_of_block(x, weights, num_heads, theta, max_seq_len)
    y = x + attended
    normed = _with_gradient_of(y, rmsnorm(y, weights["ln2.weight"], functional.BLOCK_EPS))
    return y + swiglu(normed, *(weights[f"ffn.{name}.weight"] for name in ("w1", "w2", "w3")))


@fault(
    LM,
    family="gradient",
    does="only the last position passes a gradient",
    detected_by=WEIGHTS,
    mistake="Generation needs the last logits alone, and training was given the same.",
)
def gradient_of_the_last_position_only(token_ids, weights, num_heads, theta, context_length):
    logits = functional.transformer_lm(token_ids, weights, num_heads, theta, context_length)
    return torch.cat((logits[..., :-1, :].detach(), logits[..., -1:, :]), -2)


@fault(
    LM,
    family="gradient",
    does="gradients are clipped to 1 on their way back",
    detected_by=WEIGHTS,
    mistake="A remedy for exploding gradients, left inside the model.",
)
def gradient_clipped(token_ids, weights, num_heads, theta, context_length):
    logits = functional.transformer_lm(token_ids, weights, num_heads, theta, context_length)
    return _changed(logits, lambda gradient: gradient.clamp(-1, 1))


@fault(
    LM,
    family="gradient",
    does="the head's gradient is added to that of the embeddings",
    detected_by=WEIGHTS,
    mistake="The two are tied in another model.",
)
def gradient_of_a_tied_head(token_ids, weights, num_heads, theta, context_length):
    logits = functional.transformer_lm(token_ids, weights, num_heads, theta, context_length)
    tied = {**weights, "lm_head.weight": weights["token_embeddings.weight"]}
    return _with_gradient_of(functional.transformer_lm(token_ids, tied, num_heads, theta, context_length), logits)
