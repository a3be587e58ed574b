"""A failure as plain PyTorch: a few statements that import the implementation's function, call it, and fail.

They import nothing of this package. Each text is executed before it is kept: where none fails by itself, there is none.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_lm.conformance.literals import MOST_NUMBERS, Drawn, TooLong
from spec_lm.conformance.operators import Call, Checked
from spec_lm.conformance.script import SEEDS, Entry, Expected, Origin, Pair, Script
from spec_lm.conformance.surroundings import GENERATORS, SETTINGS, seeded, undisturbed
from spec_lm.conformance.tolerance import Comparable, Evidence, Output, Raised, Violation

# Of the global random generators where a text is tried: none that an implementation sets.
_SEEDS = (7919, 104729, 1299709)
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
    writer = _Writer(seen, checked, origin)
    return next(filter(None, map(writer.text, writer.ways())), "")


class _Writer:
    """The ways to write a violation down, and what comes of each."""

    def __init__(self, seen: Recording, checked: Checked, origin: Origin) -> None:
        self.seen, self.checked, self.origin = seen, checked, origin
        self._tried: set[str] = set()

    # ---- what comes of a way

    def text(self, write: _Write) -> str:
        """The text of one way, with plain arguments or with arguments as they lay in memory; empty where none fails."""
        for exact_layout in (False, True):
            script = self._written(write, exact_layout)
            for times in (1, _REPEATS) if self.seen.changing else (1,):
                text = f"{script.imports()}\n{script.body(times)}" if script else ""
                if script and text not in self._tried:
                    self._tried.add(text)
                    seeds = _SEEDS if self.seen.changing else _SEEDS[:1]
                    if all(_fails(script, times, self.seen.violation, seed) for seed in seeds):
                        return text
        return ""

    def _written(self, write: _Write, exact_layout: bool = False) -> Script | None:
        """A script of numbers; where these are too many, of draws; None where it is too long all the same."""
        for few in (64, 8):
            drawn = Drawn(self.seen.violation.recipes or {}, few)
            script = Script(self.checked.operator, self.origin, self.checked.device, drawn, exact_layout)
            with suppress(TooLong):
                write(script)
                if script.body(1).count(",") <= MOST_NUMBERS:
                    return script
        return None

    # ---- the ways, the plainest first

    def ways(self) -> Iterator[_Write]:
        """What could be written."""
        violation, calls = self.seen.violation, self.seen.calls
        kind, message = violation.kind, str(violation)
        if not calls or (isinstance(violation, Raised) and not isinstance(violation.exception, Exception)):
            return  # what ends a process is not raised once more
        last = calls[-1]
        if isinstance(violation, Raised):
            yield from _after_others(calls, lambda script: script.result(last))
        elif kind == "accepted":
            yield lambda script: script.refused(last, message)
        elif kind.startswith("changed"):
            yield lambda script: script.changed(last, message)
        elif kind.startswith("no gradient at "):
            yield lambda script: script.arrives(last, kind.removeprefix("no gradient at "))
        elif kind in ("type", "shape", "dtype", "device"):
            yield from _after_others(calls, lambda script: script.signature(last, kind))
        elif self.seen.remembers and not self.origin.statement:
            # It cannot be imported anew, and may be so full of what it remembers that any call fails here.
            yield from (_after(calls[: calls.index(call)], write) for call, write in self._wrong[::-1])
        else:
            yield from self._values()

    def _values(self) -> Iterator[_Write]:
        """A result that is wrong by itself; two that should agree; a result that is wrong after other calls."""
        pair, calls = self._pair, self.seen.calls
        if pair and len({call.seed for call in pair.calls}) > 1:
            yield lambda script: script.pair(pair, pair.calls, SEEDS[:1])
            yield lambda script: script.pair(pair, pair.calls, SEEDS)
        yield from self._overwritten()
        yield from (write for _, write in self._wrong)
        if pair:
            yield lambda script: script.pair(pair, pair.calls)
        for call, write in self._wrong:
            yield from _after_others(calls[: calls.index(call) + 1], write)
        if pair:
            yield lambda script: script.pair(pair, calls)
        if (first := self._compared) and not pair and isinstance(first.sides[1], Entry):
            earliest = min((side for side in first.sides if isinstance(side, Entry)), key=lambda e: calls.index(e.call))
            yield lambda script: script.twice(earliest.call, earliest.index, first.bound)
        if any(self._written(write) for _, write in self._wrong):
            yield from (_after([call], self._wrong[-1][1]) for call in self.seen.earlier)

    def _overwritten(self) -> Iterator[_Write]:
        """A result that is no longer what it was, each time after one of the calls that followed."""
        for number, call in enumerate(self.seen.calls):
            if call.output is not None and not torch.equal(call.output.raw.detach().cpu().double(), call.output.value):
                for later in self.seen.calls[number + 1 :] if not bool(call.output.value.isnan().any()) else ():
                    yield lambda script, call=call, later=later: script.kept(call, later)

    @cached_property
    def _wrong(self) -> list[tuple[Call, _Write]]:
        """Every result that is wrong: its call, and how to write it."""
        return [(call, write) for call in self.seen.calls for write in self._wrong_results(call)]

    def _wrong_results(self, call: Call) -> Iterator[_Write]:
        for name, exact in self._exact(call).items():
            expected = Expected(_outputs(call)[name], exact)
            if expected.is_wrong:
                yield lambda script, name=name, expected=expected: script.value(call, name, expected)
            if expected.is_wrong and name:
                yield lambda script, n=name, expected=expected: script.value(call, n, expected, lambda each: True)

    def _exact(self, call: Call) -> dict[str, Tensor]:
        if call.cotangent is None:
            return {} if call.output is None else {"": self.checked.exact(*call.arguments)}
        exact = self.checked.exact_gradients(call.arguments, call.cotangent)
        return {name: exact[name] for name in call.gradients}

    @cached_property
    def _pair(self) -> Pair | None:
        """The entries that differ most, where they are equal by the oracle too.

        They are not where an input depends on what the implementation did, as the weights that a call left.
        """
        if self._compared is None:
            return None
        exact, allowed = [], self._compared.bound
        for side in self._compared.sides:
            if isinstance(side, Entry):
                allowed += float(_outputs(side.call)[side.gradient].error[side.index]) * abs(side.factor)
                exact.append(float(self._exact(side.call)[side.gradient][side.index]) * side.factor)
            else:
                exact.append(side)
        return self._compared if abs(exact[0] - exact[1]) <= allowed else None

    @cached_property
    def _compared(self) -> Pair | None:
        """The entries that a comparison found to differ most, where they are single entries of results."""
        evidence = self.seen.violation.evidence
        if evidence is None or not evidence.sides:
            return None
        sides = [_entry_of(side, evidence, self.seen.calls) for side in evidence.sides]
        known = tuple(side for side in sides if side is not None)
        return Pair(known, evidence.bound or 0.0) if len(known) == 2 and isinstance(known[0], Entry) else None


def _fails(script: Script, times: int, violation: Violation, seed: int) -> bool:
    """Whether the text raises what it says, with the implementation imported anew and whatever it changes undone."""
    expected = type(violation.exception) if isinstance(violation, Raised) else AssertionError
    for anew in (script.origin.anew, nullcontext):  # there are modules that cannot be imported twice
        names: dict[str, Any] = {}
        is_imported = False
        try:
            with undisturbed({**GENERATORS, **SETTINGS}), seeded(seed), anew():
                exec(script.imports(), names)
                is_imported = True
                names |= {} if script.origin.statement else {script.origin.name: script.origin.function}
                exec(script.body(times), names)
        except KeyboardInterrupt:
            raise
        except BaseException as raised:
            if is_imported:
                return type(raised) is expected
            continue
        return False
    return False


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


def _outputs(call: Call) -> Mapping[str, Output]:
    """Of a plain call its output, by the name ""; of one for gradients those that arrived, by their names."""
    return call.gradients if call.output is None else {"": call.output}


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
