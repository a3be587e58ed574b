"""What is true of every operator: its signature, its values, and that a call has no effect but its result."""

from dataclasses import replace
from typing import Any

import torch

from spec_lm.conformance.clause import EVERY, clause, given
from spec_lm.conformance.operators import Checked, unchanged
from spec_lm.conformance.strategies import (
    BLOCK_SIZES,
    LAYOUTS,
    LONG_SIZES,
    PLAINEST,
    NotJudged,
    arguments,
    batched,
    laid_out,
    map_tensors,
    size,
    takes_the_dtype,
)
from spec_lm.conformance.surroundings import GENERATORS, SETTINGS, drawn_from, seeded, undisturbed
from spec_lm.conformance.tolerance import Raised, bit_equal, close

SOURCE = "adapter interface"
# The arguments that carry the leading axes; elsewhere it is the first alone.
_BATCHED = {"scaled_dot_product_attention": ("query", "key", "value")}
_ANY_RANK = ("softmax", "silu", "linear", "embedding", "rmsnorm", "swiglu", "rope", "scaled_dot_product_attention")
_EACH_LENGTH = {
    ", ".join(f"{axis} {n}" for axis, n in vars(size).items()): size.__eq__
    for table in BLOCK_SIZES.values()
    for size in table
}
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
    with operator.naming(*arguments):
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
    catches="a cache that forgets theta, a size or a weight; a buffer that every result is written to",
    source=SOURCE,
)
def has_no_memory(operator, arguments, variant, other):
    """A result depends on the call's own arguments alone, whatever other sizes and parameters were used before, and
    stays as it is when others follow."""
    first = operator(*arguments)
    operator(*other)
    with operator.naming(*variant):
        close(operator(*variant), operator.exact(*variant), says="the last of three calls is wrong")
    bit_equal(first.raw, first.value, says="a later call changed an earlier result")
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


# ------------------------------------------------------------------------------------------- where the source is silent


@clause(
    EVERY,
    given(arguments=arguments()),
    level="should",
    cases={},
    enough=15,
    catches="strides are ignored: memory is walked as if it were contiguous",
    source="practice: heads are split without a copy, weights arrive transposed, masks expanded",
)
def any_memory_layout(operator, arguments):
    """The result depends on the values of inputs, weights, masks and positions, not on how they lie in memory."""
    for layout in LAYOUTS[1:]:
        laid = map_tensors(arguments, lambda tensor, layout=layout: laid_out(tensor, layout))
        plain = map_tensors(laid, lambda tensor: tensor.clone(memory_format=torch.contiguous_format))
        close(operator(*laid), operator(*plain), says=f"it differs where its arguments are {layout} in memory")


@clause(
    EVERY,
    given(arguments=arguments()),
    level="should",
    cases={},
    enough=25,
    catches="a fast path for inference that computes something else",
    source="practice: one model is trained with gradients and used without",
)
def grad_mode_changes_nothing(operator, arguments):
    """The result is the same under no_grad and where the arguments require gradients."""
    plain = operator(*arguments)
    with torch.no_grad():
        close(operator(*arguments), plain, says="it differs under no_grad")
    try:
        tracked = replace(operator, requires_grad=True)(*arguments)
    except Raised as raised:
        raise NotJudged(f"it takes no arguments that require gradients: {raised}") from None
    close(tracked, plain, says="it differs where the arguments require gradients")


def _is_accurate(operator: Checked, arguments: Any) -> None:
    takes_the_dtype(operator, arguments)
    with operator.naming(*arguments):
        close(operator(*arguments), operator.exact(*arguments))


@clause(
    EVERY,
    given(arguments=arguments()),
    level="should",
    cases={},
    dtype="bfloat16",
    catches="another dtype returned; squares, sums or angles computed in 8 bits",
    source="practice: models are trained in bfloat16",
)
def agrees_with_the_oracle_in_bfloat16(operator, arguments):
    """In bfloat16 the result is bfloat16, and the equation's value within the rounding of that dtype."""
    _is_accurate(operator, arguments)


@clause(
    EVERY,
    given(arguments=arguments()),
    level="should",
    cases={},
    dtype="float16",
    catches="another dtype returned; exp, squares or a mask's fill beyond 65504",
    source="practice: models are served in float16",
)
def agrees_with_the_oracle_in_float16(operator, arguments):
    """In float16 the result is float16, finite, and the equation's value within the rounding of that dtype."""
    _is_accurate(operator, arguments)


@clause(
    EVERY,
    given(arguments=arguments()),
    level="should",
    cases={},
    dtype="float64",
    catches="a step in float32, which no longer shows in the result's dtype",
    source="practice: float64 is used where accuracy is what matters",
)
def agrees_with_the_oracle_in_float64(operator, arguments):
    """Where float64 is among the declared dtypes, the result is accurate to float64 (norms and rotary tables to
    float32, unless declared otherwise)."""
    if "float64" not in operator.supports.get("dtype", ()):
        raise NotJudged('it does not declare float64: spec_lm_supports = {"dtype": ["float32", "float64"]}')
    _is_accurate(operator, arguments)


@clause(
    EVERY,
    given(arguments=arguments()),
    where=batched,
    level="should",
    cases={},
    enough=10,
    catches="a division by the number of elements; a loop that never runs",
    source="practice: the last batch of a filtered set may be empty",
)
def empty_batch_gives_an_empty_result(operator, arguments):
    """A batch of no examples gives a result of no examples, of the right shape."""
    operator(*_with_batch(operator, arguments, lambda t: t[:0]))


@clause(
    tuple(BLOCK_SIZES),
    given(arguments=arguments()),
    sizes=BLOCK_SIZES,
    cases=_EACH_LENGTH,
    level="should",
    enough=20,
    catches="the tail of a block of 32, 64 or 512 is dropped, counted twice or wrongly masked; a padded head size",
    source="practice: kernels work in blocks, and lengths are not multiples of them",
)
def any_length(operator, arguments):
    """Lengths one below, at and one above a power of two, and any number of heads, are like any other."""
    with operator.naming(*arguments):
        close(operator(*arguments), operator.exact(*arguments))


@clause(
    tuple(LONG_SIZES),
    given(arguments=arguments()),
    sizes=LONG_SIZES,
    level="should",
    enough=6,
    catches="an index or a table too narrow for it; sums of thousands of terms in a short dtype",
    source="practice: vocabularies have 50000 entries and more",
)
def long_rows(operator, arguments):
    """Rows of thousands of entries, and tables of the size of a vocabulary, are like any other."""
    with operator.naming(*arguments):
        close(operator(*arguments), operator.exact(*arguments))


@clause(
    tuple(LONG_SIZES),
    given(arguments=arguments()),
    sizes=LONG_SIZES,
    level="should",
    dtype="bfloat16",
    enough=6,
    catches="a sum that is kept in bfloat16: from 256 on, adding 1 changes nothing",
    source="practice: rows of thousands of entries are summed in every layer",
)
def long_rows_in_bfloat16(operator, arguments):
    """In bfloat16 long rows are summed in float32 at least."""
    _is_accurate(operator, arguments)


@clause(
    EVERY,
    given(arguments=arguments()),
    level="should",
    cases={},
    enough=20,
    catches="dropout that is never switched off; noise",
    source="practice: evaluation must be repeatable",
)
def the_global_random_state_decides_nothing(operator, arguments):
    """The result does not depend on the global random generators of torch, NumPy and Python."""
    with seeded(0):
        first = operator(*arguments)
    with seeded(1):
        close(operator(*arguments), first, says="it differs with the state of a global random generator")


@clause(
    EVERY,
    given(arguments=arguments()),
    level="should",
    cases={},
    enough=5,
    catches="modules built, and their weights drawn, in every call; a seed set for convenience",
    source="practice: other code draws from the same generators",
)
def leaves_the_global_random_state_alone(operator, arguments):
    """A call leaves the global random generators of torch, NumPy and Python where they were."""
    with drawn_from(), undisturbed(GENERATORS):
        operator(*arguments)


@clause(
    EVERY,
    given(arguments=arguments()),
    level="should",
    cases={},
    enough=5,
    catches="set_default_dtype, set_grad_enabled or a number of threads that is never put back",
    source="practice: these settings belong to the whole process",
)
def leaves_global_settings_alone(operator, arguments):
    """A call leaves the process as it was: torch's default dtype and device, grad mode, threads and precision, NumPy's
    error handling, the current folder and the environment."""
    with undisturbed(SETTINGS):
        operator(*arguments)
