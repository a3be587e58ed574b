"""What a clause may say about an output, and the sentence printed when it is not so.

A clause compares; it never states a tolerance. Every `Output` carries the error that a correct implementation of its
operator may have on that input (`bounds.py` derives it), arithmetic on outputs carries the error along, and the
comparisons below allow exactly that much.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_lm.conformance.bounds import PRECISIONS


@dataclass(frozen=True)
class Evidence:
    """What was seen where a comparison failed worst: index, values, error and the bound it exceeds.

    `dtype` is the output's, in whose digits the values are written; `ordered` says that got should be at most expected;
    `sides` are what was compared, as the clause gave them.
    """

    got: Any
    expected: Any
    index: tuple[int, ...] = ()
    error: float | None = None
    bound: float | None = None
    dtype: str = "float64"
    ordered: bool = False
    sides: "tuple[Comparable, ...]" = ()


class NotJudged(Exception):
    """A clause cannot be judged here; the text is the reason a report gives."""


class Violation(AssertionError):
    """An implementation broke a clause.

    `kind` tells one sort of violation from another, so that shrinking does not slip from the bug it found to the next.
    `recipes` are what it was found on, once a search has found it.
    """

    recipes: dict[str, Any] | None = None

    def __init__(self, message: str, *, kind: str, evidence: Evidence | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.evidence = evidence


class Raised(Violation):
    """An implementation raised on an input it must take; `refuses` is the clause's way to ask for it."""

    def __init__(self, exception: BaseException, where: str = "") -> None:
        name = type(exception).__name__
        super().__init__(f"raised {name}: {_said(exception)}{where}", kind=f"raised {name}")
        self.exception = exception


class OutOfMemory(Exception):
    """An implementation ran out of memory: what it would have returned, nobody knows."""

    def __init__(self, exception: BaseException) -> None:
        super().__init__(f"it ran out of memory: {_said(exception)}")


_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "Unable to allocate")  # torch on the CPU and on CUDA, NumPy


def is_out_of_memory(exception: BaseException) -> bool:
    """Whether an exception says that memory ran out."""
    return isinstance(exception, MemoryError) or (
        isinstance(exception, RuntimeError) and any(text in _said(exception) for text in _OUT_OF_MEMORY)
    )


def _said(exception: BaseException, longest: int = 400) -> str:
    try:
        text = str(exception)
    except Exception as broken:  # an implementation's exception may fail even at this
        return f"(its text cannot be read: {type(broken).__name__})"
    return text if len(text) <= longest else text[:longest] + " ..."


class Output:
    """What an implementation returned, in float64, beside the error it may have.

    Indexing, sums and products with exact factors carry the error along: y[i] has error E[i], y.sum(d) has E.sum(d),
    y * c has E |c|, y + z has E(y) + E(z). The error is computed on first use, since most comparisons never need it.

    Args:
        raw: the tensor as it was returned.
        error: computes E, elementwise, of the same shape.
        observe: told the largest err/bound of each comparison.
        rounds_products: whether the implementation declares that its products lose bits.
    """

    def __init__(
        self,
        raw: Tensor,
        error: Callable[[], Tensor],
        observe: Callable[[float], None] = lambda ratio: None,
        rounds_products: bool = False,
    ) -> None:
        self.raw = raw
        self.keeps_bits = raw.device.type == "cpu" and not rounds_products
        self.value = raw.detach().cpu().double()
        self.roundoff = PRECISIONS[str(raw.dtype).removeprefix("torch.")].u
        self.observe = observe
        self._compute_error = error
        self._error: Tensor | None = None
        self._rearranged: Callable[[Tensor], Tensor] = lambda entries: entries

    @property
    def error(self) -> Tensor:
        """The bound E on |value - exact|, elementwise."""
        if self._error is None:
            self._error = self._compute_error()
        return self._error

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    def _derived(self, value: Tensor, error: Callable[[], Tensor]) -> "Output":
        result = Output.__new__(Output)
        result.raw, result.value, result.roundoff, result.observe = self.raw, value, self.roundoff, self.observe
        result.keeps_bits = self.keeps_bits
        result._compute_error, result._error = error, None
        result._rearranged = self._rearranged
        return result

    def map(self, rearrange: Callable[[Tensor], Tensor]) -> "Output":
        """Apply a rearrangement (permute, select, reshape) or a sum to the value and to its error alike."""
        result = self._derived(rearrange(self.value), lambda: rearrange(self.error))
        result._rearranged = lambda entries: rearrange(self._rearranged(entries))
        return result

    def sources(self) -> Tensor:
        """Where in the flattened `raw` each entry stood; meaningless where entries were summed."""
        return self._rearranged(torch.arange(self.raw.numel(), dtype=torch.float64).reshape(self.raw.shape))

    def __getitem__(self, index: Any) -> "Output":
        return self.map(lambda t: t[index])

    def sum(self, dim: int, keepdim: bool = False) -> "Output":
        return self.map(lambda t: t.sum(dim, keepdim))

    def movedim(self, source: int, destination: int) -> "Output":
        return self.map(lambda t: t.movedim(source, destination))

    def __mul__(self, factor: Tensor | float) -> "Output":
        factor = torch.as_tensor(factor, dtype=torch.float64)
        return self._derived(self.value * factor, lambda: self.error * factor.abs())

    def __neg__(self) -> "Output":
        return self * -1.0

    def __add__(self, other: "Output | Tensor | float") -> "Output":
        value, error = _exactly(other)
        return self._derived(self.value + value, lambda: self.error + error())

    def __sub__(self, other: "Output | Tensor | float") -> "Output":
        value, error = _exactly(other)
        return self._derived(self.value - value, lambda: self.error + error())

    def matmul(self, matrix: Tensor) -> "Output":
        """y M, with error E |M|."""
        matrix = matrix.double()
        return self._derived(self.value @ matrix, lambda: self.error @ matrix.abs())

    def inner(self, other: "Output") -> "Output":
        """Inner products along the last axis: sum y z has error sum |y| E(z) + E(y) (|z| + E(z))."""

        def error() -> Tensor:
            return (self.value.abs() * other.error + self.error * (other.value.abs() + other.error)).sum(-1)

        return self._derived((self.value * other.value).sum(-1), error)


Comparable = Output | Tensor | np.ndarray | float


def _exactly(side: Comparable) -> tuple[Tensor, Callable[[], Tensor]]:
    """The value of a side in float64, and its error: that of an output, or none."""
    if isinstance(side, Output):
        return side.value, lambda: side.error
    value = torch.as_tensor(side).detach().cpu().double()
    return value, lambda: torch.zeros((), dtype=torch.float64)


def _outputs(*sides: Comparable) -> list[Output]:
    return [side for side in sides if isinstance(side, Output)]


def _dtype(*sides: Comparable) -> str:
    """That of the first output among the sides."""
    outputs = _outputs(*sides)
    return str(outputs[0].raw.dtype).removeprefix("torch.") if outputs else "float64"


def close(got: Comparable, expected: Comparable, *, says: str = "") -> None:
    """|got - expected| <= E(got) + E(expected), elementwise; NaN equals only NaN, inf only inf of its sign.

    Args:
        got: usually an output of the implementation.
        expected: another output, or exact values (which have no error), of the same shape or a scalar.
        says: what this comparison means, where a clause makes several.

    Raises:
        Violation: names the worst entry, its error and its bound.
    """
    (value, value_error), (wanted, wanted_error) = _exactly(got), _exactly(expected)
    value, wanted = torch.broadcast_tensors(value, wanted)
    _same_special_values(value, wanted, says, _dtype(got, expected))
    difference = (value - wanted).abs().nan_to_num(nan=0.0)
    roundings = sum(output.roundoff for output in _outputs(got, expected))
    if bool((difference <= roundings * wanted.abs()).all()):
        return
    bound = (value_error() + wanted_error()).expand_as(difference)
    ratio = torch.where(difference == 0, 0.0, difference / bound)
    worst = float(ratio.max())
    for output in _outputs(got, expected):
        output.observe(worst)
    if not worst <= 1.0:
        index = _index(ratio.argmax(), ratio)
        numbers = float(difference[index]), float(bound[index])
        evidence = Evidence(value, wanted, index, *numbers, dtype=_dtype(got, expected), sides=(got, expected))
        raise Violation(says or "values differ by more than rounding allows", kind=f"close {says}", evidence=evidence)


def at_most(low: Comparable, high: Comparable, *, says: str = "") -> None:
    """low <= high + E(low) + E(high), elementwise; a NaN on either side is a violation."""
    (left, left_error), (right, right_error) = _exactly(low), _exactly(high)
    left, right = torch.broadcast_tensors(left, right)
    excess = left - right
    if bool((excess <= 0).all()):
        return
    if bool((is_nan := left.isnan() | right.isnan()).any()):
        evidence = Evidence(left, right, _index(is_nan.int().argmax(), is_nan), dtype=_dtype(low, high), ordered=True)
        raise Violation("a value is NaN", kind="finite", evidence=evidence)
    bound = (left_error() + right_error()).expand_as(excess)
    broken = ~(excess <= bound)
    if bool(broken.any()):
        index = _index(torch.where(broken, excess.nan_to_num(nan=torch.inf), -torch.inf).argmax(), excess)
        numbers = float(excess[index]), float(bound[index])
        evidence = Evidence(left, right, index, *numbers, dtype=_dtype(low, high), ordered=True)
        raise Violation(says or "the order is broken", kind=f"at_most {says}", evidence=evidence)


def bit_equal(got: Comparable, expected: Comparable, *, says: str = "") -> None:
    """got equals expected in every entry (-0 is 0, NaN equals NaN); `close` off the CPU, where kernels split sums, and
    where products are declared to lose bits."""
    if not all(output.keeps_bits for output in _outputs(got, expected)):
        close(got, expected, says=says)
        return
    value, wanted = torch.broadcast_tensors(_exactly(got)[0], _exactly(expected)[0])
    unequal = ~((value == wanted) | (value.isnan() & wanted.isnan()))
    if bool(unequal.any()):
        difference = torch.where(unequal, (value - wanted).abs().nan_to_num(nan=torch.inf), -1.0)
        index = _index(difference.argmax(), difference)
        numbers = float(difference[index]), 0.0
        evidence = Evidence(value, wanted, index, *numbers, dtype=_dtype(got, expected), sides=(got, expected))
        raise Violation(says or "values are not equal", kind=f"bit_equal {says}", evidence=evidence)


def finite(got: Comparable, *, says: str = "") -> None:
    """No entry is NaN or infinite."""
    value = _exactly(got)[0]
    broken = ~value.isfinite()
    if bool(broken.any()):
        index = _index(broken.int().argmax(), broken)
        what = "NaN" if bool(value[index].isnan()) else "infinite"
        evidence = Evidence(value, "finite values", index, dtype=_dtype(got))
        raise Violation(says or f"a value is {what}", kind=f"finite {says}", evidence=evidence)


def refuses(call: Callable[[], Any], *, what: str) -> None:
    """The call raises; any exception counts as a refusal.

    Raises:
        Violation: it returned instead, saying `what` was accepted.
    """
    try:
        call()
    except Raised:
        return
    except Violation:
        pass  # it returned something, of whatever shape: accepted all the same
    raise Violation(f"{what} was accepted; it must be refused with an exception", kind="accepted")


def _same_special_values(value: Tensor, wanted: Tensor, says: str, dtype: str) -> None:
    agrees = torch.where(wanted.isfinite(), value.isfinite(), (value == wanted) | (value.isnan() & wanted.isnan()))
    if not bool(agrees.all()):
        index = _index((~agrees).int().argmax(), agrees)
        message = f"{says + ': ' if says else ''}got {float(value[index])} where {float(wanted[index]):.6g} is expected"
        raise Violation(message, kind=f"special {says}", evidence=Evidence(value, wanted, index, dtype=dtype))


def _index(flat: Tensor, like: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(flat), tuple(like.shape)))
