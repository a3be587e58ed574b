"""A row: one variant in one case, made ready to be timed."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_lm.bench.cases import Case, arguments, traffic
from spec_lm.bench.devices import Cpu, Cuda
from spec_lm.bench.variants import Variant

MOST_SETS = 8
_WARM_CALLS = 3
_LONG = 0.5  # seconds: a call that takes so long is neither repeated nor finds its inputs in a cache


@dataclass(frozen=True)
class Row:
    """What is timed, and how often.

    Args:
        call: computes once, on the next set of inputs.
        rounds: how often the clock is read.
        iterations: calls between two readings.
        seconds: one call takes, about.
        compile_seconds: the first call of a compiled row took; None where it is eager.
        in_cache: whether a call may find its inputs in a cache, so that the rate of memory is no limit to it.
    """

    call: Callable[[], Any]
    rounds: int
    iterations: int
    seconds: float
    compile_seconds: float | None = None
    in_cache: bool = False


def ready(case: Case, variant: Variant, device: Cpu | Cuda, budget: float) -> Row:
    """Build, compile, warm up and calibrate.

    Args:
        case: what is computed.
        variant: by whom.
        device: where.
        budget: seconds that a session may take for it.
    """
    first = single_call(case, variant)
    took = _first(first, device)
    calls = [first, *_others(case, variant, device, took)]
    turn = cycle(calls)
    results: deque[Any] = deque(maxlen=len(calls) - 1)  # held, so that the next is written elsewhere

    def timed() -> None:
        results.append(next(turn)())

    for _ in calls:
        timed()
    seconds = _calibrated(timed, device)
    iterations = max(1, round(min(budget / 10, 0.01) / seconds))
    in_cache = took < _LONG and len(calls) * traffic(case) < device.cache
    rounds = _rounds(seconds, iterations, budget)
    return Row(timed, rounds, iterations, seconds, took if case.compiled else None, in_cache)


def _rounds(seconds: float, iterations: int, budget: float) -> int:
    """As many as fit into the budget, but enough for quartiles where a call is not long."""
    return max(3 if seconds < _LONG else 1, min(50, round(budget / (seconds * iterations))))


def _first(call: Callable[[], Any], device: Cpu | Cuda) -> float:
    started = time.perf_counter()
    call()
    device.synchronize()
    return time.perf_counter() - started


def _calibrated(call: Callable[[], Any], device: Cpu | Cuda) -> float:
    """About how long a call takes, the fastest of a few: one that was disturbed would make the session short."""
    took = [_first(call, device)]
    while len(took) < _WARM_CALLS and took[0] < _LONG:
        took.append(_first(call, device))
    return max(1e-9, min(took))


def _others(case: Case, variant: Variant, device: Cpu | Cuda, took: float) -> list[Callable[[], Any]]:
    """Calls on other inputs, as many as fill the cache if it takes no more than a few."""
    if took > _LONG or case.operator == "transformer_lm" or case.compiled:
        return []  # a model has weights enough; with others it would be compiled again
    sets = min(MOST_SETS, -(-device.cache // traffic(case)))
    return [single_call(case, variant, seed) for seed in range(1, sets)]


def single_call(case: Case, variant: Variant, seed: int = 0) -> Callable[[], Any]:
    """What computes a case once: forward without a graph, or forward, loss and backward."""
    call, inputs, leaves = variant.build(case.operator, arguments(case, seed))
    if case.compiled:
        call = torch.compile(call, dynamic=False)
    if case.direction == "forward":
        return _forward(call, inputs)
    for leaf in leaves:
        leaf.requires_grad_()
    if case.operator == "transformer_lm":
        return _training_step(call, inputs, leaves)
    return _backward(call, inputs, leaves)


def _forward(call: Callable[..., Tensor], inputs: tuple[Any, ...]) -> Callable[[], Any]:
    def forward() -> Tensor:
        with torch.no_grad():
            return call(*inputs)

    return forward


def _training_step(
    call: Callable[..., Tensor], inputs: tuple[Any, ...], leaves: tuple[Tensor, ...]
) -> Callable[[], Any]:
    following = inputs[0].roll(-1, -1).flatten()

    def step() -> Any:
        loss = F.cross_entropy(call(*inputs).flatten(0, -2), following)
        return torch.autograd.grad(loss, leaves)

    return step


def _backward(call: Callable[..., Tensor], inputs: tuple[Any, ...], leaves: tuple[Tensor, ...]) -> Callable[[], Any]:
    cotangents: list[Tensor] = []

    def both() -> Any:
        output = call(*inputs)
        if not cotangents:
            cotangents.append(torch.randn_like(output))
        return torch.autograd.grad(output, leaves, cotangents[0], allow_unused=True)

    return both


# ------------------------------------------------------------------------------------------------------------- ceilings


@dataclass(frozen=True)
class Ceiling:
    """What the machine is asked to do as fast as it can.

    Args:
        kind: product or copy.
        size: the rows of square matrices, or the bytes that are copied.
        dtype: of the numbers.
    """

    kind: str
    size: int
    dtype: str = "float32"

    @property
    def work(self) -> float:
        """The operations, or bytes read and written, of one call."""
        return 2.0 * (self.size**3 if self.kind == "product" else self.size)

    def row(self, device: Cpu | Cuda, budget: float) -> Row:
        """As a row."""
        of = {"dtype": getattr(torch, self.dtype), "device": device.name}
        if self.kind == "product":
            a, b, c = (torch.ones(self.size, self.size, **of) for _ in range(3))
            return _calibrated_row(lambda: torch.mm(a, b, out=c), device, budget)
        source, target = (torch.ones(self.size // of["dtype"].itemsize, **of) for _ in range(2))
        return _calibrated_row(lambda: target.copy_(source), device, budget)


def ceilings(dtypes: Iterable[str], device: Cpu | Cuda) -> Iterator[Ceiling]:
    """Products of each dtype, and copies."""
    for dtype in dtypes:
        yield from (Ceiling("product", size, dtype) for size in device.products)
    yield from (Ceiling("copy", size) for size in device.copies)


def beside(dtype: str, device: Cpu | Cuda) -> tuple[Ceiling, Ceiling]:
    """What is measured in every session, beside the variants: a product and a copy, the largest of each."""
    return Ceiling("product", device.products[-1], dtype), Ceiling("copy", device.copies[-1])


def _calibrated_row(call: Callable[[], Any], device: Cpu | Cuda, budget: float) -> Row:
    seconds = _calibrated(call, device)
    return Row(call, _rounds(seconds, 1, budget), 1, seconds)
