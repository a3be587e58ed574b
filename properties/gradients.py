"""What is true of the gradients of every operator whose output carries them; none need arrive."""

from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from spec_lm.conformance.clause import EVERY, clause, given
from spec_lm.conformance.operators import Checked, unchanged
from spec_lm.conformance.strategies import (
    ARGUMENTS,
    LAYOUTS,
    NONZERO,
    ArgumentsRecipe,
    Domain,
    Draw,
    NotJudged,
    Size,
    index_of,
    projections,
    tensors,
    weights,
)
from spec_lm.conformance.tolerance import Output, Violation, bit_equal, close

SOURCE = "practice: an operator is trained as often as it is run"
_INPUTS = ("x", "query", "key", "value")
_WITH_INPUTS = tuple(name for name in EVERY if name not in ("embedding", "transformer_lm"))
_WITH_WEIGHTS = tuple(name for name in EVERY if name not in ("softmax", "silu", "rope", "scaled_dot_product_attention"))
# The axes of each operator's result.
_RESULT = {
    "softmax": "*batch n",
    "silu": "*batch n",
    "linear": "*batch d_out",
    "embedding": "*batch d_model",
    "rmsnorm": "*batch d_model",
    "swiglu": "*batch d_model",
    "rope": "*batch sequence d_k",
    "scaled_dot_product_attention": "*batch queries d_v",
    "multihead_self_attention": "*batch sequence d_model",
    "multihead_self_attention_with_rope": "*batch sequence d_model",
    "transformer_block": "*batch sequence d_model",
    "transformer_lm": "*batch sequence vocab",
}
# In 16 bits a score over 30 moves its probability by more than it is.
_MODERATE = ("zeros", "small integers", "plain", "plain", "tiny", "ones and zeros")
_HALVES = ("halves",)
_STREAM = {"x": tensors("*batch sequence d_model", _MODERATE)}
_IN_16_BITS: dict[str, dict[str, Draw]] = {
    "softmax": {"x": tensors("*batch n", _MODERATE)},
    "swiglu": {
        "x": tensors("*batch d_model", _MODERATE),
        "w1": tensors("d_ff d_model", _HALVES),
        "w2": tensors("d_model d_ff", _HALVES),
        "w3": tensors("d_ff d_model", _HALVES),
    },
    "scaled_dot_product_attention": {
        "query": tensors("*batch queries d_k", _MODERATE),
        "key": tensors("*batch keys d_k", _MODERATE),
        "value": tensors("*batch keys d_v", _MODERATE),
    },
    "multihead_self_attention": {**_STREAM, "w": projections(_HALVES)},
    "multihead_self_attention_with_rope": {**_STREAM, "w": projections(_HALVES)},
    "transformer_block": {**_STREAM, "weights": weights(_HALVES)},
    "transformer_lm": {"weights": weights(_HALVES)},
}


# Where exp(-x) overflows, and where 1 - sigmoid(x) has no digits.
_TAILS = {"silu": {"x": tensors("*batch n", ("zeros", "plain", "shifted", "negative tail", "large", "large integers"))}}


def _arguments(domain: Domain, name: str) -> SearchStrategy[ArgumentsRecipe]:
    """All arguments of the domain's operator, in any layout; in 16 bits of moderate size."""
    table = {**_TAILS, **(_IN_16_BITS if domain.dtype in ("float16", "bfloat16") else {})}
    draws = {**ARGUMENTS[domain.operator], **table.get(domain.operator, {})}
    drawn = {n: draw(domain, f"{name} {n}") for n, draw in draws.items()}

    def recipe(layout: str, *values: Any) -> ArgumentsRecipe:
        return ArgumentsRecipe(tuple(zip(drawn, values, strict=True)), layout)

    return st.builds(recipe, st.sampled_from(LAYOUTS), *drawn.values())


# At an odd offset the backward pass of PyTorch's own view_as_real raises.
_LAYOUTS_OF_COTANGENTS = tuple(layout for layout in LAYOUTS if layout != "offset")


def _cotangents(*regimes: str, layouts: tuple[str, ...] = _LAYOUTS_OF_COTANGENTS) -> Draw:
    """Gradients with respect to the result, of its axes."""
    return lambda domain, name: tensors(_RESULT[domain.operator], regimes, layouts)(domain, name)


_CALL = given(arguments=_arguments, cotangent=_cotangents(*NONZERO))
_MANY = given(arguments=_arguments, cotangent=_cotangents("positive", layouts=("contiguous", "transposed")))
_ENOUGH = 25
# More rows than the 256 after which a sum of ones in bfloat16 grows no more.
_MANY_ROWS = {
    "linear": (Size(batch=(300,), d_in=1, d_out=1), Size(batch=(2, 300), d_in=3, d_out=2)),
    "embedding": (Size(batch=(300,), vocab=1, d_model=1), Size(batch=(2, 300), vocab=2, d_model=3)),
    "rmsnorm": (Size(batch=(300,), d_model=1), Size(batch=(2, 300), d_model=3)),
    "swiglu": (Size(batch=(300,), d_model=1, d_ff=1), Size(batch=(2, 300), d_model=2, d_ff=3)),
}


def _agree(operator: Checked, arguments: Any, cotangent: Tensor, got: Mapping[str, Output]) -> None:
    exact = operator.exact_gradients(arguments, cotangent)
    with operator.naming(*arguments, cotangent=cotangent):
        for name, gradient in got.items():
            close(gradient, exact[name], says=f"the gradient with respect to {name} is wrong")


def _those_that_arrive(operator: Checked, arguments: Any, cotangent: Tensor) -> dict[str, Output]:
    """The gradients with respect to inputs and weights.

    Raises:
        NotJudged: none arrived.
    """
    got = operator.gradients(arguments, cotangent)
    if not got:
        raise NotJudged("no gradient arrives at an argument")
    return got


def _those_of_inputs(operator: Checked, arguments: Any, cotangent: Tensor) -> dict[str, Output]:
    """The gradients with respect to the inputs.

    Raises:
        NotJudged: none arrived.
        Violation: some did, but not all.
    """
    got = operator.gradients(arguments, cotangent)
    missing = [name for name in operator.operator.parameters if name in _INPUTS and name not in got]
    if not any(name in _INPUTS for name in got):
        raise NotJudged(f"no gradient arrives at {' or '.join(missing)}")
    if missing:
        raise Violation(f"no gradient arrives at {missing[0]}, though others do", kind=f"no gradient at {missing[0]}")
    return {name: gradient for name, gradient in got.items() if name in _INPUTS}


@clause(
    _WITH_INPUTS,
    _CALL,
    level="should",
    enough=_ENOUGH,
    catches="a backward pass written for another forward, or one that reads the cotangent as if it were contiguous",
    source=SOURCE,
)
def gradients_with_respect_to_inputs(operator, arguments, cotangent):
    """The gradients of sum(cotangent * output) with respect to x, or to Q, K and V, are the derivatives of the equation
    within the derived rounding error, however arguments and cotangent lie in memory."""
    _agree(operator, arguments, cotangent, _those_of_inputs(operator, arguments, cotangent))


@clause(
    _WITH_WEIGHTS,
    _CALL,
    level="should",
    enough=_ENOUGH,
    catches="a weight's gradient that misses rows, a transpose, or digits",
    source=SOURCE,
)
def gradients_with_respect_to_weights(operator, arguments, cotangent):
    """A gradient of sum(cotangent * output) that arrives at a weight is the derivative of the equation within the
    derived rounding error, however arguments and cotangent lie in memory."""
    got = {n: g for n, g in operator.gradients(arguments, cotangent).items() if n not in _INPUTS}
    if not got:
        raise NotJudged("no gradient arrives at a weight; it may copy them into its own")
    _agree(operator, arguments, cotangent, got)


@clause(
    EVERY,
    _CALL,
    level="should",
    enough=_ENOUGH,
    catches="a backward pass that works in the buffer of the cotangent, or keeps a gradient for the next call",
    source=SOURCE,
)
def backward_changes_nothing(operator, arguments, cotangent):
    """Backward leaves the arguments and the cotangent bit for bit as they were, and the same call has the same
    gradients again."""
    first = _those_that_arrive(operator, arguments, cotangent)
    unchanged(operator.handed, arguments, operator.operator.parameters)
    unchanged((operator.handed_cotangent,), (cotangent,), ("cotangent",))
    for name, gradient in operator.gradients(arguments, cotangent).items():
        close(gradient, first[name], says=f"the second time the gradient with respect to {name} is another")


@clause(
    EVERY,
    _CALL,
    level="should",
    enough=_ENOUGH,
    catches="a backward pass that reads the cotangent as if its entries lay one after the other",
    source=SOURCE,
)
def cotangent_in_any_memory_layout(operator, arguments, cotangent):
    """A cotangent that is a view has the gradients of its contiguous copy within the derived rounding error."""
    got = _those_that_arrive(operator, arguments, cotangent)
    for name, gradient in operator.gradients(arguments, cotangent.contiguous()).items():
        close(got[name], gradient, says=f"the gradient with respect to {name} changes with the cotangent's strides")


@clause(
    ("linear", "rope"),
    _CALL,
    level="should",
    enough=_ENOUGH,
    catches="a backward pass of another matrix than the transposed one",
    source=SOURCE,
)
def backward_is_the_adjoint(operator, arguments, cotangent):
    """The result is linear in x: a row of x has the same inner product with its gradient as the row of the result with
    its cotangent."""
    got = _those_of_inputs(operator, arguments, cotangent)
    close((got["x"] * arguments.x).sum(-1), (operator(*arguments) * cotangent).sum(-1))


# PyTorch on the CPU adds the rows of a repeated id in bfloat16, where that is the dtype, and loses them past 256.
@clause(
    "embedding",
    _MANY,
    level="should",
    sizes=_MANY_ROWS,
    dtypes=("float32", "float64"),
    enough=5,
    catches="a frequent token that loses gradient, its rows added in bfloat16",
    source=SOURCE,
)
@clause(
    ("linear", "rmsnorm", "swiglu"),
    _MANY,
    level="should",
    sizes=_MANY_ROWS,
    enough=5,
    catches="a sum over rows that is accumulated in a shorter dtype",
    source=SOURCE,
)
def weights_gather_gradients_from_many_rows(operator, arguments, cotangent):
    """A gradient that arrives at a weight from hundreds of rows is their sum within the derived rounding error."""
    gradients_with_respect_to_weights(operator, arguments, cotangent)


# ------------------------------------------------------------------------------------------------------ what is hidden


@clause(
    "softmax",
    given(arguments=_arguments, cotangent=_cotangents(*NONZERO), hidden=index_of("n", 1)),
    level="should",
    where=lambda size: size.n > 1,
    catches="-inf made by a product, whose gradient is 0 times infinity",
    source=SOURCE,
)
def minus_infinity_gets_no_gradient(softmax, arguments, cotangent, hidden):
    """The gradient of an entry of -inf is 0, and those of the others are as if it were not there."""
    x = arguments.x.clone()
    x[..., hidden] = -torch.inf
    got = _those_of_inputs(softmax, (x, -1), cotangent)
    bit_equal(got["x"][..., hidden], 0.0, says="the gradient of an entry of -inf is not 0")
    _agree(softmax, (x, -1), cotangent, got)


@clause(
    "scaled_dot_product_attention",
    given(arguments=_arguments, cotangent=_cotangents(*NONZERO), blind=index_of("queries")),
    level="should",
    where=lambda size: size.queries > 1,
    catches="a query that sees nothing spoiling the gradients of the keys and values that others see",
    source=SOURCE,
)
def query_that_sees_nothing_passes_no_gradient(attention, arguments, cotangent, blind):
    """Where a query that sees no key gets zeros, it adds nothing to the gradients of Q, K and V."""
    if attention.conventions.get("all_masked", "zeros") != "zeros":
        raise NotJudged(f"it declares {attention.conventions['all_masked']} for a query that sees no key")
    q, k, v, mask = arguments
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool) if mask is None else mask.clone()
    mask[..., blind, :] = False
    call = (q, k, v, mask)
    _agree(attention, call, cotangent, _those_of_inputs(attention, call, cotangent))
