"""A counterexample made plainer at its size: what does not matter becomes 0, a matrix the identity, a number whole.

Hypothesis makes smaller what was drawn: sizes, regimes and seeds. Which entries of a tensor matter is looked for here,
where each is a number of its own. A plainer counterexample counts only where the reference holds on it: so it lies
where the clause is true, whatever the clause asks of its inputs.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from math import prod

import torch
from torch import Tensor

from spec_lm.conformance.clause import Search
from spec_lm.conformance.implementation import BUILT_IN, loaded
from spec_lm.conformance.operators import OPERATORS, Checked
from spec_lm.conformance.strategies import EntriesRecipe, NotJudged, TensorRecipe, parts_of, with_part
from spec_lm.conformance.tolerance import Violation

MOST_CALLS = 80
MOST_CALLS_IF_LARGE = 24
LARGE = 256  # numbers; attention to hundreds of tokens, and its bound, takes a tenth of a second
MOST_ENTRIES = 64
_Place = tuple[str, tuple[str, ...]]
_Stays = Callable[[Tensor], bool]  # whether the violation is there with these numbers too


def plainer(search: Search, violation: Violation) -> Violation:
    """The same kind of violation, on numbers as plain as a limited number of calls finds them.

    Args:
        search: that found the violation.
        violation: with its recipes.
    """
    plainest = _Plainest(search, violation)
    # The inputs last: where weights are the identity, the inputs show what is wrong.
    places = [place for place, part in plainest.places() if bool(part.build().isfinite().all())][::-1]
    with suppress(_NoCallsLeft):
        for change in (_whole, _sparse, _rounded):
            places = [place for place in places if not change(plainest.values(place), partial(plainest.stays, place))]
    return plainest.violation


class _NoCallsLeft(Exception):
    """The calls are used up: the plainest violation so far is the one."""


class _Plainest:
    """The plainest violation so far, and whether a plainer one stays one."""

    def __init__(self, search: Search, violation: Violation) -> None:
        self.violation, self._search = violation, search
        numbers = sum(prod(part.shape) for _, part in self.places())
        self._calls_left = MOST_CALLS if numbers <= LARGE else MOST_CALLS_IF_LARGE
        operator = search.clause.operator
        with loaded(BUILT_IN) as reference:
            self._reference = Checked(OPERATORS[operator], reference.functions[operator])

    def places(self) -> Iterator[tuple[_Place, TensorRecipe | EntriesRecipe]]:
        """Where tensors of numbers stand in the counterexample, and their recipes."""
        for argument, recipe in (self.violation.recipes or {}).items():
            yield from (((argument, path), part) for path, part in parts_of(recipe).items())

    def values(self, place: _Place) -> Tensor:
        """The numbers that stand there now."""
        return self._part(place).build().contiguous()

    def _part(self, place: _Place) -> TensorRecipe | EntriesRecipe:
        argument, path = place
        return parts_of((self.violation.recipes or {})[argument])[path]

    def stays(self, place: _Place, values: Tensor) -> bool:
        """Whether the violation is there with other numbers at a place; if they are few, they are kept.

        Raises:
            _NoCallsLeft: this is not to be found out any more.
        """
        if self._calls_left == 0:
            raise _NoCallsLeft
        self._calls_left -= 1
        (argument, path), recipes = place, dict(self.violation.recipes or {})
        entries = _entries(values, self._part(place).layout)
        recipes[argument] = with_part(recipes[argument], path, entries)
        violation = self._search.again(recipes)
        if violation is None or not self._is_true_there(recipes):
            return False
        if len(entries.entries) <= MOST_ENTRIES:
            self.violation = violation
        return True

    def _is_true_there(self, recipes: dict[str, object]) -> bool:
        try:
            self._search.clause.run(self._reference, recipes)
        except (Violation, NotJudged):
            return False
        return True


def _entries(values: Tensor, layout: str) -> EntriesRecipe:
    numbers, counts = values.unique(return_counts=True)
    fill = float(numbers[counts.argmax()]) if len(numbers) else 0.0
    others = [(index, value) for index, value in enumerate(values.flatten().tolist()) if value != fill]
    dtype = str(values.dtype).removeprefix("torch.")
    return EntriesRecipe(tuple(values.shape), fill, tuple(others), dtype, layout)


def _whole(values: Tensor, stays: _Stays) -> bool:
    """Whether a tensor is, or may be, all 0, the identity or all 1."""
    plain = [torch.zeros_like(values), torch.ones_like(values)]
    if values.ndim == 2 and values.shape[0] == values.shape[1] > 1:
        plain.insert(1, torch.eye(len(values), dtype=values.dtype))
    return any(torch.equal(values, each) for each in plain) or any(map(stays, plain))


def _sparse(values: Tensor, stays: _Stays) -> bool:
    """Make entries 0 that may be, half of them at once, then a quarter, ..; those left may be rounded."""
    kept = values.flatten().nonzero().flatten().tolist()
    size = len(kept)
    while size > 1:
        size = (size + 1) // 2
        first = 0
        while first < len(kept):
            fewer = kept[:first] + kept[first + size :]
            if stays(_only(values, fewer)):
                kept = fewer
            else:
                first += size
    return False


def _only(values: Tensor, kept: list[int]) -> Tensor:
    only = torch.zeros_like(values).flatten()
    only[kept] = values.flatten()[kept]
    return only.reshape(values.shape)


def _rounded(values: Tensor, stays: _Stays) -> bool:
    """Whether all numbers are, or may be, whole, or of one decimal."""
    # -0.3 becomes 0, not -0, which would be no plainer.
    whole, short = values.round() + 0.0, (values.double() * 10).round().div(10).to(values.dtype) + 0.0
    return torch.equal(values, whole) or stays(whole) or (not torch.equal(values, short) and stays(short))
