"""A row: one variant in one case, made ready to be timed."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_lm.bench.cases import Case, arguments
from spec_lm.bench.devices import Cpu, Cuda
from spec_lm.bench.variants import Variant

MOST_SETS = 8
_WARM_CALLS = 3


@dataclass(frozen=True)
class Row:
    """What is timed, and how often.

    Args:
        call: computes once, on the next set of inputs.
        rounds: how often the clock is read.
        iterations: calls between two readings.
        seconds: one call takes, about.
        compile_seconds: the first call of a compiled row took; None where it is eager.
    """

    call: Callable[[], Any]
    rounds: int
    iterations: int
    seconds: float
    compile_seconds: float | None = None


def ready(case: Case, variant: Variant, device: Cpu | Cuda, budget: float) -> Row:
    """Build, compile, warm up and calibrate.

    Args:
        case: what is computed.
        variant: by whom.
        device: where.
        budget: seconds that a session may take for it.
    """
    calls = _calls(case, variant, device)
    took = _first(calls[0], device)
    for call in calls[1:]:
        call()
    turn = cycle(calls)

    def timed() -> Any:
        return next(turn)()

    seconds = _calibrated(timed, device)
    iterations = max(1, round(min(budget / 10, 0.01) / seconds))
    rounds = max(3, min(50, round(budget / (seconds * iterations))))
    return Row(timed, rounds, iterations, seconds, took if case.compiled else None)


def _first(call: Callable[[], Any], device: Cpu | Cuda) -> float:
    started = time.perf_counter()
    call()
    device.synchronize()
    return time.perf_counter() - started


def _calibrated(call: Callable[[], Any], device: Cpu | Cuda) -> float:
    """About how long a call takes, the fastest of a few: one that was disturbed would make the session short."""
    return max(1e-9, min(_first(call, device) for _ in range(_WARM_CALLS)))


def _calls(case: Case, variant: Variant, device: Cpu | Cuda) -> list[Callable[[], Any]]:
    """One call for each set of inputs; there are as many as fill the cache, so that no call finds its inputs there."""
    size = _size(arguments(case, 0))
    sets = max(1, min(MOST_SETS, -(-device.cache // max(1, size))))
    if case.operator == "transformer_lm" or case.compiled:
        sets = 1  # a model has weights enough; with others it would be compiled again
    return [single_call(case, variant, seed) for seed in range(sets)]


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


def _size(given: tuple[Any, ...]) -> int:
    flat = [item for value in given for item in (value.values() if isinstance(value, dict) else [value])]
    return sum(item.nbytes for item in flat if isinstance(item, Tensor))


# ------------------------------------------------------------------------------------------------------------- ceilings


def ceiling(kind: str, dtype: str, device: Cpu | Cuda, budget: float) -> tuple[Row, float]:
    """A large matrix product, or a large copy, as a row; and the operations, or bytes, of one call."""
    of = {"dtype": getattr(torch, dtype), "device": device.name}
    if kind == "product":
        n = device.product
        a, b, c = (torch.ones(n, n, **of) for _ in range(3))
        return _calibrated_row(lambda: torch.mm(a, b, out=c), device, budget), 2.0 * n**3
    source, target = (torch.ones(device.copied // 4, dtype=torch.float32, device=device.name) for _ in range(2))
    return _calibrated_row(lambda: target.copy_(source), device, budget), 2.0 * source.nbytes


def _calibrated_row(call: Callable[[], Any], device: Cpu | Cuda, budget: float) -> Row:
    seconds = _calibrated(call, device)
    return Row(call, max(3, min(50, round(budget / seconds))), 1, seconds)
