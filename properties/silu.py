"""x sigmoid(x): each entry weighed by its own sigmoid."""

from spec_lm.conformance.clause import clause, given
from spec_lm.conformance.strategies import BLOCK_SIZES, GENERAL, MODERATE, takes_the_dtype, tensors
from spec_lm.conformance.tolerance import at_most, close, finite

SOURCE = "adapter interface: Building blocks, silu"

_X = {"x": tensors("*batch n", GENERAL)}
_TAIL = "negative tail"


@clause(
    "silu",
    given(x=tensors("*batch n", (*GENERAL, _TAIL, _TAIL, _TAIL))),
    catches="the sigmoid alone, a shift of its argument, or one that is taken for 1 too soon",
    source=SOURCE,
)
def mirror_images_differ_by_the_input(silu, x):
    """silu(x) - silu(-x) = x, since sigmoid(x) + sigmoid(-x) = 1."""
    close(silu(x) - silu(-x), x)


@clause(
    "silu",
    given(x=tensors("*batch n", (*MODERATE, _TAIL))),
    catches="GELU, ReLU, a hard or scaled sigmoid",
    source=SOURCE,
)
def mirror_images_stand_in_the_ratio_exp(silu, x):
    """silu(x) = -exp(x) silu(-x), since sigmoid(x) = exp(x) sigmoid(-x)."""
    close(silu(x), -silu(-x) * x.double().exp())


@clause("silu", given(**_X), catches="softplus; a bias", source=SOURCE)
def lies_between_zero_and_the_input(silu, x):
    """silu(x) lies between 0 and x, for the sigmoid lies between 0 and 1."""
    y = silu(x)
    at_most(x.clamp(max=0), y, says="an output is below both 0 and the input")
    at_most(y, x.clamp(min=0), says="an output is above both 0 and the input")


@clause(
    "silu",
    given(x=tensors("*batch n", ("large integers", "large", "one large", "huge"))),
    catches="exp(x) / (1 + exp(x)): inf / inf",
    source=SOURCE,
)
def finite_for_every_finite_input(silu, x):
    """Every finite input, however large, gives a finite output."""
    finite(silu(x))
    finite(silu(-x))


def _keeps_its_digits(silu, x):
    exact = x.double()
    close(silu(x), exact * exact.exp() / (1 + exact.exp()))


@clause(
    "silu",
    given(x=tensors("*batch n", (_TAIL,))),
    catches="1 - sigmoid(-x), which cancels, or a clamp inside the sigmoid",
    source=SOURCE,
)
def accurate_on_the_negative_tail(silu, x):
    """Where x is far below 0 the small output keeps its digits: x exp(x) / (1 + exp(x))."""
    _keeps_its_digits(silu, x)


@clause(
    "silu",
    given(**_X, others=tensors("*batch n", GENERAL)),
    where=lambda size: size.n > 1,
    catches="a statistic or a scale of the whole tensor",
    source=SOURCE,
)
def entries_do_not_see_each_other(silu, x, others):
    """Changing all other entries leaves an entry's output as it was."""
    first = (0,) * x.ndim
    others[first] = x[first]
    close(silu(others)[first], silu(x)[first])


# ------------------------------------------------------------------------------------------- where the source is silent


@clause(
    "silu",
    given(x=tensors("*batch n", (_TAIL,))),
    level="should",
    dtype="float16",
    catches="exp(-x) in float16, which is inf from 12 on; 1 - sigmoid(-x)",
    source="practice: models are served in float16",
)
def accurate_on_the_negative_tail_in_float16(silu, x):
    """In float16 the small output of an x far below 0 keeps the digits that float16 can hold."""
    takes_the_dtype(silu, (x,))
    _keeps_its_digits(silu, x)


@clause(
    "silu",
    given(x=tensors("*batch n", ("plain", *GENERAL))),
    sizes=BLOCK_SIZES,
    cases={f"{size.n} entries": size.__eq__ for size in BLOCK_SIZES["silu"]},
    level="should",
    enough=20,
    catches="the tail of a block is left as it was, or never written",
    source="practice: kernels work in blocks, and lengths are not multiples of them",
)
def reversing_entries_reverses_outputs(silu, x):
    """However many entries there are, an output does not depend on where its input stands."""
    close(silu(x.flip(-1)), silu(x).map(lambda t: t.flip(-1)))
