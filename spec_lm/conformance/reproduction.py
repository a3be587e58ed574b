"""A failure as plain PyTorch: a few statements that import the implementation's function, call it, and fail.

They import nothing of this package. Each text is executed before it is kept: where none fails by itself, there is none.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_lm.conformance.literals import MOST_NUMBERS, Drawn, TooLong
from spec_lm.conformance.operators import Call, Checked
from spec_lm.conformance.script import SEEDS, Entry, Expected, Origin, Pair, Script
from spec_lm.conformance.surroundings import GENERATORS, SETTINGS, undisturbed
from spec_lm.conformance.tolerance import Comparable, Evidence, Output, Raised, Violation

_REPEATS = 100  # calls of an implementation whose results change from call to call
_Write = Callable[[Script], None]


@dataclass(frozen=True)
class Recording:
    """A violation, and the calls that led to it.

    Args:
        violation: as the clause raised it.
        calls: in their order.
        earlier: what the implementation was called with before, on other inputs.
        changing: whether results change from call to call.
        remembers: whether the violation is about what a call leaves for the next.
    """

    violation: Violation
    calls: list[Call]
    earlier: Iterable[Call] = ()
    changing: bool = False
    remembers: bool = False


def reproduction(seen: Recording, checked: Checked, origin: Origin) -> str:
    """Write the text for a violation of an operator; empty where none fails by itself."""
    drawn, tried = Drawn(seen.violation.recipes or {}), set[str]()
    # A function that cannot be imported anew may be full of what it remembers, so that any call fails here.
    ways = _ways(seen, checked) if origin.statement or not seen.remembers else _in_order(seen, checked)
    for write in ways:
        for exact_layout in (False, True):
            script = Script(checked.operator, origin, checked.device, drawn, exact_layout)
            try:
                write(script)
            except TooLong:
                continue
            for times in (1, _REPEATS) if seen.changing else (1,):
                text = f"{script.imports()}\n{script.body(times)}"
                if text in tried or text.count(",") > MOST_NUMBERS:
                    continue
                tried.add(text)
                if all(_fails(script, times, seen.violation) for _ in range(3 if seen.changing else 1)):
                    return text
    return ""


def _fails(script: Script, times: int, violation: Violation) -> bool:
    """Whether the text raises what it says, with the implementation imported anew and whatever it changes undone."""
    expected = type(violation.exception) if isinstance(violation, Raised) else AssertionError
    for anew in (script.origin.anew, nullcontext):  # there are modules that cannot be imported twice
        names: dict[str, Any] = {}
        is_imported = False
        try:
            with undisturbed({**GENERATORS, **SETTINGS}), anew():
                exec(script.imports(), names)
                is_imported = True
                names |= {} if script.origin.statement else {script.origin.name: script.origin.function}
                exec(script.body(times), names)
        except KeyboardInterrupt:
            raise
        except BaseException as raised:
            if is_imported:
                return type(raised) is expected and isinstance(raised, Exception)
            continue
        return False
    return False


def _ways(seen: Recording, checked: Checked) -> Iterator[_Write]:
    """What could be written, the plainest first."""
    if not seen.calls:
        return
    last, kind, message = seen.calls[-1], seen.violation.kind, str(seen.violation)
    if isinstance(seen.violation, Raised):
        yield from _after_others(seen.calls, lambda script: script.result(last))
    elif kind == "accepted":
        yield lambda script: script.refused(last, message)
    elif kind.startswith("changed"):
        yield lambda script: script.changed(last, message)
    elif kind.startswith("no gradient at "):
        yield lambda script: script.arrives(last, kind.removeprefix("no gradient at "))
    elif kind in ("type", "shape", "dtype", "device"):
        yield from _after_others(seen.calls, lambda script: script.signature(last, kind))
    else:
        yield from _values(seen, checked)


def _after_others(calls: list[Call], write: _Write) -> Iterator[_Write]:
    """The last call by itself; then after one of those before it; then after them all."""
    *before, _ = calls
    yield write
    yield from (_after([call], write) for call in before)
    yield _after(before, write)


def _after(before: list[Call], write: _Write) -> _Write:
    def written(script: Script) -> None:
        for call in before:
            script.result(call)
        write(script)

    return written


def _values(seen: Recording, checked: Checked) -> Iterator[_Write]:
    """A result that is wrong by itself; two that should agree; a result that is wrong after other calls."""
    pair = _pair_of(seen.violation.evidence, seen.calls)
    if pair is not None and len({call.seed for call in pair.calls}) > 1:
        yield lambda script: script.pair(pair, pair.calls, SEEDS[:1])
        yield lambda script: script.pair(pair, pair.calls, SEEDS)
    wrong = [(call, write) for call in seen.calls for write in _wrong_results(checked, call)]
    yield from (write for _, write in wrong)
    if pair is not None:
        yield lambda script: script.pair(pair, pair.calls)
    for call, write in wrong:
        yield from _after_others(seen.calls[: seen.calls.index(call) + 1], write)
    if pair is not None:
        yield lambda script: script.pair(pair, seen.calls)
    for call in seen.earlier if wrong else ():
        yield _after([call], wrong[-1][1])


def _in_order(seen: Recording, checked: Checked) -> Iterator[_Write]:
    """Each wrong result after all calls before it."""
    for number, call in enumerate(seen.calls):
        yield from (_after(seen.calls[:number], write) for write in _wrong_results(checked, call) if number)


def _wrong_results(checked: Checked, call: Call) -> Iterator[_Write]:
    """Ways to write each result of a call that is wrong: its output, or its gradients."""
    for name, exact in _exact(checked, call).items():
        expected = Expected(_outputs(call)[name], exact)
        if expected.is_wrong:
            yield lambda script, name=name, expected=expected: script.value(call, name, expected)
        if expected.is_wrong and name:
            yield lambda script, n=name, expected=expected: script.value(call, n, expected, lambda each: True)


def _outputs(call: Call) -> Mapping[str, Output]:
    """Of a plain call its output, by the name ""; of one for gradients those that arrived, by their names."""
    return call.gradients if call.output is None else {"": call.output}


def _exact(checked: Checked, call: Call) -> dict[str, Tensor]:
    if call.cotangent is None:
        return {} if call.output is None else {"": checked.exact(*call.arguments)}
    exact = checked.exact_gradients(call.arguments, call.cotangent)
    return {name: exact[name] for name in call.gradients}


def _pair_of(evidence: Evidence | None, calls: list[Call]) -> Pair | None:
    """The entries that a comparison found to differ most, where they are single entries of results."""
    if evidence is None or not evidence.sides:
        return None
    sides = [_entry_of(side, evidence, calls) for side in evidence.sides]
    known = tuple(side for side in sides if side is not None)
    return Pair(known, evidence.bound or 0.0) if len(known) == 2 and isinstance(known[0], Entry) else None


def _entry_of(side: Comparable, evidence: Evidence, calls: list[Call]) -> Entry | float | None:
    shape = evidence.got.shape
    if not isinstance(side, Output):
        return float(torch.as_tensor(side).double().broadcast_to(shape)[evidence.index])
    results = ((call, name, output) for call in calls for name, output in _outputs(call).items())
    found = next(((call, name) for call, name, output in results if output.raw is side.raw), None)
    value, source = side.value.broadcast_to(shape)[evidence.index], side.sources()
    if found is None or source.shape != side.value.shape:
        return None
    position = float(source.broadcast_to(shape)[evidence.index])
    if not (position.is_integer() and 0 <= position < side.raw.numel()):
        return None
    index = tuple(int(i) for i in np.unravel_index(int(position), tuple(side.raw.shape)))
    entry = side.raw.detach().cpu().double()[index]
    factors = [factor for factor in (1.0, 2.0, 0.5, -1.0) if bool(entry * factor == value)]
    return Entry(*found, index, factors[0]) if factors else None
