"""What may be wrong with an operator, told by which of its clauses fail, and how: the faults that fail alike.

Every fault of the catalogue has been run against every clause of its operator, and the package holds what came of it as
data. A pattern of failures is a set of marks: the clauses that fail, what was seen, by how much, and what the clauses
that fail are about. The family of a fault is told by ridge regression from marks to families, over all operators; of
the faults of that family the one is named that fails most alike.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from itertools import compress
from typing import Any

import numpy as np

from spec_lm.conformance.clause import CLAUSES, Level
from spec_lm.conformance.operators import OPERATORS, inside
from spec_lm.conformance.report import Cause, Outcome

# What a fault gets wrong, and what there is to mend.
FAMILIES = {
    "axis": "the axis that is worked along, or how axes are split, merged and exchanged",
    "mask": "the mask: who sees whom, and what becomes of a query that sees nothing",
    "scale": "a factor: that of the scores, or one that belongs nowhere",
    "formula": "the formula itself: a term, a sign, an index or a function in it",
    "precision": "the precision inside: the dtype that is computed in, or digits that cancel",
    "overflow": "how large numbers are kept finite: which maximum is subtracted, and what is clamped",
    "positions": "positions and the rotation: pairs, angles, theta, and whose positions they are",
    "norm": "a norm: its mean, eps and gain, and where it stands",
    "residual": "the stream: what each half reads of it, and what is added to it",
    "weights": "which weight is used where, in which orientation and order",
    "batch": "what rows, examples and heads take from one another",
    "memory": "what a call keeps for the next, or whatever else makes two calls differ",
    "arguments": "that arguments are written to",
    "layout": "how memory is read: strides and offsets",
    "boundary": "edges: the last partial block, between two blocks, a length of one, and where sizes coincide",
    "signature": "the signature: dtype, shape and rank of what is taken and returned, and arguments left out",
    "refusal": "that an invalid input is computed instead of refused",
    "gradient": "the backward pass",
    "global_state": "that global state is changed: random numbers, the default dtype, grad mode",
}

_SORTS = {
    "changing": r"^nondeterministic",
    "raised": r"^raised ",
    "shape": r"^returned shape",
    "dtype": r"^returned torch\.",
    "type": r"^returned ",
    "accepted": r"was accepted",
    "changed": r"^it changed",
    "nan": r"got (nan|-?inf) where|value is (NaN|infinite)",
}


def sort_of(outcome: Outcome) -> str:
    """What was seen where a clause fails, as "raised" or "nan"; "value" for any wrong number; empty where it holds."""
    if outcome.outcome != "fails":
        return ""
    return next((sort for sort, pattern in _SORTS.items() if re.search(pattern, outcome.message)), "value")


@dataclass(frozen=True)
class Failure:
    """How a clause fails: what was seen, and how many bounds a wrong number was off."""

    sort: str
    bounds: float | None = None


@dataclass(frozen=True, eq=False)
class Known:
    """A fault of the catalogue: what it is, which clauses of its operator fail, and where it shows above."""

    id: str
    operator: str
    family: str
    kind: str
    does: str
    report: str
    fails: Mapping[str, Failure]
    shows_in: tuple[str, ...]


@cache
def catalogue() -> tuple[Known, ...]:
    """The faults in the package's data."""
    data = json.loads(files("spec_lm").joinpath("faults/matrix.json").read_text(encoding="utf-8"))
    return tuple(_known(name, row) for name, row in data["faults"].items())


def _known(name: str, row: Mapping[str, Any]) -> Known:
    seen = row.get("seen", {})
    fails = {clause: Failure(seen.get(clause, "value"), bounds) for clause, bounds in row["detected_by"].items()}
    about = {each: row[each] for each in ("operator", "family", "kind", "does", "report")}
    return Known(name, **about, fails=fails, shows_in=tuple(row["shows_in"]))


# ---------------------------------------------------------------------------------------------------------- likenesses

# Clauses about one thing: where they fail alone it is that thing.
_TOPICS = {
    "gradients": r"gradient|backward",
    "16 bits": r"16|_half_",
    "float64": r"float64",
    "lengths": r"any_length|long_rows|block|any_width|thousands",
    "refusals": r"refus",
    "the process": r"leaves_|random_state",
    "layouts": r"layout",
    "ranks": r"leading_axes|unbatched|empty_batch",
    "memory": r"has_no_memory|serve_twice",
    "rows": r"rows_of_a_batch|not_see_each_other",
    "arguments": r"does_not_change",
    "signature": r"signature",
    "order": r"permut|revers|renumber",
    "masks": r"mask|causal|prefix|future",
}
# Errors up to the first are roundings in a shorter dtype, beyond the second they are as large as the values.
_BOUNDS = (30.0, 1e4)
_RIDGE = 0.3


def marks(fails: Mapping[str, Failure]) -> Iterator[str]:
    """What tells one pattern of failures from another."""
    for name, failure in fails.items():
        yield from (name, failure.sort, *(f"{topic} {failure.sort}" for topic in _topics(name)))
        if failure.bounds is not None:
            yield f"{name} by {sum(failure.bounds >= bound for bound in _BOUNDS)}"
    topics = Counter(topic for name in fails for topic in _topics(name))
    yield from (f"{topic} alone" for topic, number in topics.items() if number == len(fails))


@cache
def _topics(name: str) -> tuple[str, ...]:
    return tuple(topic for topic, pattern in _TOPICS.items() if re.search(pattern, name))


class Likeness:
    """How much a pattern of failures is like those of the faults known.

    Args:
        known: the faults.
        judged: the names of the clauses that were judged; others tell nothing.
    """

    def __init__(self, known: Iterable[Known], judged: Iterable[str]) -> None:
        self.known, self._judged = tuple(known), frozenset(judged)
        patterns = [set(marks(self._told(fault.fails))) for fault in self.known]
        self._places = {mark: place for place, mark in enumerate(sorted(set().union(*patterns)))}
        self._vectors = np.array([self._vector(pattern) for pattern in patterns])
        self._is_known = np.ones(len(self.known), dtype=bool)
        families = [list(FAMILIES).index(fault.family) for fault in self.known]
        self._inverse = np.linalg.inv(self._vectors @ self._vectors.T + _RIDGE * np.eye(len(self.known)))
        self._weights = self._inverse @ np.eye(len(FAMILIES))[families]  # of each fault for each family

    def without(self, operator: str, kind: str) -> "Likeness":
        """As if the operator's faults of a kind were not known."""
        out = np.array([fault.operator == operator and fault.kind == kind for fault in self.known])
        other = copy(self)
        other.known = tuple(compress(self.known, ~out))
        other._is_known = ~out
        # What the weights would be, by the Schur complement of what is left out; its own become 0.
        corner = self._inverse[np.ix_(out, out)]
        other._weights = self._weights - self._inverse[:, out] @ np.linalg.solve(corner, self._weights[out])
        return other

    def _told(self, fails: Mapping[str, Failure]) -> dict[str, Failure]:
        return {name: failure for name, failure in fails.items() if name in self._judged}

    def _vector(self, pattern: set[str]) -> np.ndarray:
        """Of length 1, an entry for each mark."""
        vector = np.zeros(len(self._places))
        vector[[self._places[mark] for mark in pattern if mark in self._places]] = 1
        return vector / max(np.linalg.norm(vector), 1)

    def families(self, fails: Mapping[str, Failure]) -> dict[str, float]:
        """How much each family fits; 1 is a fault as those of the family are, and the most fitting comes first."""
        found = dict(zip(FAMILIES, map(float, self._cosines(fails) @ self._weights), strict=True))
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def faults(self, fails: Mapping[str, Failure]) -> dict[Known, float]:
        """The cosine of each fault's marks with these."""
        return dict(zip(self.known, map(float, self._cosines(fails)[self._is_known]), strict=True))

    def _cosines(self, fails: Mapping[str, Failure]) -> np.ndarray:
        return self._vectors @ self._vector(set(marks(self._told(fails))))


# ------------------------------------------------------------------------------------------------------------ diagnosis

# By how much a family must fit better than any other, in words; docs/diagnosis.md tells how often each is right.
WORDS = {"very likely": 0.45, "likely": 0.2, "possibly": 0.0}
_FITS = 0.15  # a family that fits less is no guess
_THE_SAME = 0.99  # fails as a fault does, in every mark
_NEARLY = 0.05  # how much less a fault may be alike than the best, which does not tell the two apart
_MOST_NAMED = 3
_OF_PARTS = {"mask", "norm", "positions", "residual"}  # guessed only of operators with such faults: silu has no mask
_LEAST_JUDGED = 6  # fewer clauses make no pattern: too many faults fail in the same way
_CONVENTION = re.compile(r"this is .*; if intended, declare .*")


@dataclass(frozen=True)
class Guess:
    """A family that fits, how sure that is in words, and the operator's faults of that family that fail most alike.

    Args:
        faults: the most alike first, and those that are nearly as much; none where the operator has none.
        likeness: of the first of them.
    """

    family: str
    word: str
    faults: tuple[Known, ...]
    likeness: float

    @property
    def fault(self) -> Known | None:
        """The fault that is most alike."""
        return self.faults[0] if self.faults else None


def guesses(operator: str, fails: Mapping[str, Failure], likeness: Likeness) -> list[Guess]:
    """At most two guesses, the best first; none where nothing fits, and one where it is very likely.

    Families of the operator's own faults that fail in the very same way come first; where there are several, none of
    them is sure.
    """
    own = {fault: alike for fault, alike in likeness.faults(fails).items() if fault.operator == operator}
    foreign = _OF_PARTS - {fault.family for fault in own}
    scores = {family: score for family, score in likeness.families(fails).items() if family not in foreign}
    same = {fault.family for fault, alike in own.items() if alike >= _THE_SAME}
    best, second = sorted(scores, key=lambda family: (family not in same, -scores[family]))[:2]
    margin = scores[best] - max(score for family, score in scores.items() if family != best)
    word = next((word for word, least in WORDS.items() if margin >= least and len(same) < 2), "possibly")
    guessed = [_guess(best, word, own), _guess(second, "possibly", own)][: 1 if word == "very likely" else 2]
    return [guess for guess in guessed if scores[guess.family] >= _FITS or guess.family in same]


def _guess(family: str, word: str, own: Mapping[Known, float]) -> Guess:
    of_family = {fault: alike for fault, alike in own.items() if fault.family == family}
    best = max(of_family.values(), default=0.0)
    alike = sorted((each for each in of_family if of_family[each] >= best - _NEARLY), key=lambda each: -of_family[each])
    return Guess(family, word, tuple(alike), best)


def diagnose(outcomes: Iterable[Outcome]) -> tuple[Cause, ...]:
    """What may be wrong with each operator that has failures, low operators first.

    An undeclared convention that a clause named comes before any fault, and alone where most clauses that fail name
    one; a fault of an operator inside, which would show in this one too, comes before faults of its own.
    """
    judged: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.outcome in ("holds", "fails"):
            judged.setdefault(outcome.operator, []).append(outcome)
    found: dict[str, list[Guess]] = {}
    causes: list[Cause] = []
    for operator in OPERATORS:
        if any(outcome.outcome == "fails" for outcome in judged.get(operator, ())):
            found[operator] = _guesses_about(operator, judged[operator])
            causes += _causes(operator, judged[operator], found)
    return tuple(causes)


def _guesses_about(operator: str, outcomes: list[Outcome]) -> list[Guess]:
    if len(outcomes) < _LEAST_JUDGED:
        return []
    fails = {_name(o): Failure(sort_of(o), _bounds(o)) for o in outcomes if o.outcome == "fails"}
    return guesses(operator, fails, _likeness(catalogue(), frozenset(map(_name, outcomes))))


@lru_cache(maxsize=len(OPERATORS))
def _likeness(known: tuple[Known, ...], judged: frozenset[str]) -> Likeness:
    return Likeness(known, judged)


def _name(outcome: Outcome) -> str:
    return outcome.clause.partition(".")[2]


def _bounds(outcome: Outcome) -> float | None:
    """How many bounds the first wrong number was off; of an order that is broken, the smallest found."""
    if outcome.worst > 1:
        return outcome.worst if outcome.worst < float("inf") else None
    error, bound = ((outcome.evidence or {}).get(each) for each in ("error", "bound"))
    return float(error) / float(bound) if error and bound else None


def _causes(operator: str, outcomes: list[Outcome], found: Mapping[str, list[Guess]]) -> Iterator[Cause]:
    conventions = [outcome.message for outcome in outcomes if _CONVENTION.fullmatch(outcome.message)]
    if conventions:
        yield Cause(operator, conventions[0])
        if 2 * len(conventions) >= sum(outcome.outcome == "fails" for outcome in outcomes):
            return
    for lower in inside(operator):
        best = next(iter(found.get(lower, ())), None)
        if best is not None and best.fault is not None and operator in best.fault.shows_in:
            yield Cause(operator, f"it fails as a fault of {lower} would make it: mend {lower} first", below=lower)
            return
    leads = ("besides, ",) if conventions else ("", "or ")
    yield from (_cause(operator, guess, lead) for guess, lead in zip(found[operator], leads, strict=False))


def _cause(operator: str, guess: Guess, lead: str) -> Cause:
    """A guess in words: what the fault does, where all fails as it does and as no other of the family; else what there
    is to mend, and what the faults do that are most alike."""
    fault, named = guess.fault, guess.faults[:_MOST_NAMED]
    what = FAMILIES[guess.family]
    if fault is not None and len(named) == 1 and guess.likeness >= _THE_SAME:
        what = fault.does
    elif named:
        what += f"; most like {'a known fault' if len(named) == 1 else 'known faults'}: "
        what += ", or: ".join(each.does for each in named)
    how = guess.word + (f", as in {fault.report}" if fault is not None and fault.report and len(named) == 1 else "")
    return Cause(operator, f"{lead}{what} ({how})", fault.id if fault else "", guess.family)


# ------------------------------------------------------------------------------------------------------- how good it is


@dataclass(frozen=True)
class Accuracy:
    """How many of the catalogue's faults are told rightly, as if none of their kind were known of their operator.

    Args:
        faults: how many there are that a clause detects.
        first: those whose family is guessed first.
        among_two: those whose family is one of the two guessed.
        most_frequent: those of the family that is most frequent in their operator, for comparison.
        recognized: those whose own kind is guessed first where it is known.
        by_word: by how sure the guess was, in words: right ones, and all.
    """

    faults: int
    first: int
    among_two: int
    most_frequent: int
    recognized: int
    by_word: Mapping[str, tuple[int, int]]


def accuracy(level: Level) -> Accuracy:
    """Guess each fault of the catalogue from what it does to the clauses of a level, or of both."""
    counts, by_word = Counter(), {word: [0, 0] for word in WORDS}
    for operator in OPERATORS:
        judged = [c.name for c in CLAUSES.values() if c.operator == operator and level in ("should", c.level)]
        whole = Likeness(catalogue(), judged)
        own = [
            fault for fault in whole.known if fault.operator == operator and not fault.fails.keys().isdisjoint(judged)
        ]
        for fault in own:
            without = whole.without(operator, fault.kind)
            others = Counter(other.family for other in without.known if other.operator == operator)
            guessed = guesses(operator, fault.fails, without)
            known = guesses(operator, fault.fails, whole)
            is_right = [guess.family == fault.family for guess in guessed]
            counts["faults"] += 1
            counts["first"] += is_right[:1] == [True]
            counts["among_two"] += any(is_right)
            counts["most_frequent"] += max(others, key=lambda family: others[family], default="") == fault.family
            counts["recognized"] += bool(known) and known[0].fault is not None and known[0].fault.kind == fault.kind
            if guessed:
                by_word[guessed[0].word][0] += is_right[0]
                by_word[guessed[0].word][1] += 1
    names = ("faults", "first", "among_two", "most_frequent", "recognized")
    by_word = {word: (right, said) for word, (right, said) in by_word.items()}
    return Accuracy(**{name: counts[name] for name in names}, by_word=by_word)
