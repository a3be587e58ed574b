"""What is true of every operator: its signature, its values, and that a call has no effect but its result."""

from typing import Any

from spec_lm.conformance.clause import EVERY, clause, given
from spec_lm.conformance.operators import Checked, unchanged
from spec_lm.conformance.strategies import PLAINEST, arguments, batched, size
from spec_lm.conformance.tolerance import bit_equal, close

SOURCE = "adapter interface"
# The arguments that carry the leading axes; elsewhere it is the first alone.
_BATCHED = {"scaled_dot_product_attention": ("query", "key", "value")}
_ANY_RANK = ("softmax", "silu", "linear", "embedding", "rmsnorm", "swiglu", "rope", "scaled_dot_product_attention")
_RANKS = {f"{n} leading axes": lambda size, n=n: len(size.batch) == n for n in range(5)}


def _batched_names(operator: Checked) -> tuple[str, ...]:
    return _BATCHED.get(operator.operator.name, operator.operator.parameters[:1])


def _with_batch(operator: Checked, arguments: Any, change: Any) -> Any:
    """The arguments with every tensor that carries leading axes changed alike; softmax then runs along the last axis,
    and a mask for each example follows its example."""
    changed = {name: change(getattr(arguments, name)) for name in _batched_names(operator)}
    if "dim" in arguments._fields:
        changed["dim"] = -1
    mask = getattr(arguments, "mask", None)
    if mask is not None and mask.ndim > 2:
        changed["mask"] = change(mask)
    return arguments._replace(**changed)


@clause(
    EVERY,
    given(arguments=arguments()),
    where=PLAINEST,
    cases={},
    enough=5,
    catches="a missing axis, another dtype, or an array of another library",
    source=SOURCE,
)
def keeps_its_signature(operator, arguments):
    """The result is a torch.Tensor of the shape the equation gives, in the dtype and on the device of the input."""
    operator(*arguments)


@clause(EVERY, given(arguments=arguments()), catches="any deviation from the equation", source=SOURCE)
def agrees_with_the_oracle(operator, arguments):
    """The result is the equation's value, in float64 on the same inputs, within the derived rounding error."""
    close(operator(*arguments), operator.exact(*arguments))


@clause(
    EVERY,
    given(arguments=arguments()),
    catches="an in-place operation on a view of the caller's tensor, or a popped weight",
    source=SOURCE,
)
def does_not_change_its_arguments(operator, arguments):
    """A call leaves the tensors and the weight dict it was given bit for bit as they were."""
    operator(*arguments)
    unchanged(operator.handed, arguments, operator.operator.parameters)


@clause(
    EVERY,
    given(arguments=arguments(), variant=arguments(), other=arguments("other sizes")),
    enough=25,
    catches="a cache that forgets theta, a size or a weight",
    source=SOURCE,
)
def has_no_memory(operator, arguments, variant, other):
    """A result depends on the call's own arguments alone, whatever other sizes and parameters were used before."""
    first = operator(*arguments)
    operator(*other)
    close(operator(*variant), operator.exact(*variant), says="wrong after a call with other parameters")
    close(operator(*arguments), first, says="the same call came to something else after others")


@clause(
    EVERY,
    given(arguments=arguments(), others=arguments()),
    where=batched,
    catches="statistics, positions or masks shared across the batch",
    source=SOURCE,
)
def rows_of_a_batch_are_independent(operator, arguments, others):
    """A row of a batch has the result it has alone, and changing one row leaves the others bit for bit as they were."""
    arguments, others = (_with_batch(operator, each, lambda t: t) for each in (arguments, others))
    whole = operator(*arguments)
    changed = arguments._replace(**{name: _first_row_of(others, arguments, name) for name in _batched_names(operator)})
    bit_equal(operator(*changed)[1:], whole[1:], says="changing the first row changed another")
    close(operator(*_with_batch(operator, arguments, lambda t: t[:1])), whole[:1], says="the first row alone differs")


def _first_row_of(others: Any, arguments: Any, name: str) -> Any:
    mixed = getattr(arguments, name).clone()
    mixed[0] = getattr(others, name)[0]
    return mixed


@clause(
    _ANY_RANK,
    given(arguments=arguments(), batch=size("batch")),
    cases=_RANKS,
    feature="leading axes",
    catches="a hard-coded number of axes",
    source="adapter interface, ranks",
)
def takes_any_number_of_leading_axes(operator, arguments, batch):
    """Leading axes are independent examples, however many there are: flattening them into one changes nothing."""
    whole = operator(*_with_batch(operator, arguments, lambda t: t))
    if 3 in operator.supports.get("axes", (3,)):
        flat = operator(*_with_batch(operator, arguments, lambda t: t.reshape(-1, *t.shape[len(batch) :])))
        close(whole, flat.map(lambda t: t.reshape(whole.shape)))
