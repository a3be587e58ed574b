"""What the lines of a report may hold: the fields of each kind, and what is said of one that is something else.

A report may have been written by hand, by another version or by a broken disk. Fields that this version does not know
are passed over, as are those it can do without; whatever else reads a report may rely on the rest.
"""

import math
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# From a value and its place to what is wrong with it; nothing where it is as expected.
Check = Callable[[Any, str], Iterator[str]]

DEEPEST = 24  # lists and objects in each other, in one line


def is_deep(value: Any, left: int = DEEPEST) -> bool:
    """Whether JSON is nested deeper than any line of a report."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(not left or is_deep(each, left - 1) for each in inside)


def _is(expected: str, fits: Callable[[Any], bool]) -> Check:
    def check(value: Any, place: str) -> Iterator[str]:
        if not fits(value):
            yield f"{place} is {reprlib.repr(value)}, expected {expected}"

    return check


def _each(kind: type[dict] | type[list], expected: str, item: Check) -> Check:
    """A list or an object, of which all items are alike."""

    def check(value: Any, place: str) -> Iterator[str]:
        if not isinstance(value, kind):
            yield f"{place} is {reprlib.repr(value)}, expected {expected}"
        else:
            for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                yield from item(each, f"{place}[{key!r}]")

    return check


def _record(needed: Mapping[str, Check], others: Mapping[str, Check]) -> Check:
    """An object of named fields, of which some must be there."""

    def check(value: Any, place: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{place} is {reprlib.repr(value)}, expected an object"
            return
        for name, field in {**needed, **others}.items():
            inside = f"{place}.{name}" if place else name
            if name in value:
                yield from field(value[name], inside)
            elif name in needed:
                yield f"{inside} is missing"

    return check


def _or_null(check: Check) -> Check:
    return lambda value, place: iter(()) if value is None else check(value, place)


def _is_integer(value: Any) -> bool:
    """Whether it is an integer of 64 bits, with or without a sign."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**64


def _is_finite(value: Any) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def _is_number(value: Any) -> bool:
    return value in ("nan", "inf", "-inf") or _is_finite(value)


def _shape(value: Any) -> tuple[int, ...] | None:
    """The shape of nested lists of numbers; None where they are none, or ragged."""
    if not isinstance(value, list):
        return () if isinstance(value, bool) or _is_number(value) else None
    shapes = {_shape(each) for each in value} or {()}
    first = shapes.pop()
    return None if shapes or first is None else (len(value), *first)


def _matching(pattern: str, expected: str) -> Check:
    return _is(expected, lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None)


def _one_of(*words: str) -> Check:
    return _is(f"one of {', '.join(words)}", lambda value: value in words)


_ANY = _is("anything", lambda value: True)
_TEXT = _is("a text", lambda value: isinstance(value, str))
_TRUTH = _is("true or false", lambda value: isinstance(value, bool))
_INTEGER = _is("an integer of 64 bits", _is_integer)
_COUNT = _is("a count", lambda value: _is_integer(value) and value >= 0)
_SECONDS = _is("seconds, a number of at least 0", lambda value: _is_finite(value) and value >= 0)
_NUMBER = _is('a number, "nan", "inf" or "-inf"', _is_number)
_NUMBERS = _is("a number, or nested lists of numbers", lambda value: _shape(value) is not None)
_LIST = _is("a list of numbers", lambda value: bool(_shape(value)))
_OPERATOR = _matching("[a-z_]+", "an operator's name")
_CLAUSE = _matching(r"[a-z_]+\.\w+", "a clause's id, as softmax.any_dim")
_OBJECT = _each(dict, "an object", _ANY)
_TEXTS = _each(list, "a list of texts", _TEXT)
_ENTRIES = _each(list, "a list of lists of an index and a number", _LIST)
_TENSOR = _record(
    {"shape": _each(list, "a list of counts", _COUNT), "dtype": _TEXT},
    {"data": _NUMBERS, "fill": _NUMBERS, "entries": _ENTRIES},
)
_WINDOW = _record({"first": _COUNT, "entries": _LIST}, {})


def _value(value: Any, place: str) -> Iterator[str]:
    """An argument of a counterexample: a tensor, or whatever JSON has for it."""
    return _TENSOR(value, place) if isinstance(value, dict) and "shape" in value else iter(())


def _side(value: Any, place: str) -> Iterator[str]:
    """Of a comparison: numbers, some of them, or words."""
    if isinstance(value, dict):
        return _WINDOW(value, place)
    return iter(()) if isinstance(value, str) or value is None else _NUMBERS(value, place)


def _evidence(value: Any, place: str) -> Iterator[str]:
    number = _or_null(_NUMBER)
    needed = {"got": _side, "expected": _side, "index": _each(list, "a list of integers", _INTEGER)}
    yield from _record({**needed, "error": number, "bound": number}, {"dtype": _TEXT, "ordered": _TRUTH})(value, place)
    if isinstance(value, dict) and (value.get("error") is None) != (value.get("bound") is None):
        yield f"{place} has one of error and bound, expected both or none"


NEEDED: dict[str, dict[str, Check]] = {
    "header": {
        "implementation": _TEXT,
        "spec": _INTEGER,
        "versions": _record({"spec_lm": _TEXT, "torch": _TEXT}, {}),
        "dtype": _TEXT,
        "device": _TEXT,
        "seed": _INTEGER,
        "examples": _COUNT,
        "level": _TEXT,
    },
    "outcome": {
        "clause": _CLAUSE,
        "operator": _OPERATOR,
        "level": _TEXT,
        "outcome": _one_of("holds", "fails", "waived", "absent", "not_judged", "error"),
    },
    "footer": {},
    "cause": {"operator": _TEXT, "text": _TEXT},
}
OTHERS: dict[str, dict[str, Check]] = {
    "header": {
        "conventions": _each(dict, "an object of texts", _TEXT),
        "supports": _OBJECT,
        "clauses": _COUNT,
        "shard": _TEXT,
        "clauses_in_all": _COUNT,
        "required": _TEXTS,
    },
    "outcome": {
        "message": _TEXT,
        "sentence": _TEXT,
        "counterexample": _or_null(
            _record({"values": _each(dict, "an object", _value)}, {"recipes": _OBJECT}),
        ),
        "evidence": _or_null(_evidence),
        "reproduction": _TEXT,
        "examples": _COUNT,
        "seconds": _SECONDS,
        "worst": _NUMBER,
        "reached": _each(dict, "an object of counts", _COUNT),
    },
    "cause": {"fault": _TEXT, "family": _TEXT, "below": _TEXT},
}
OTHERS["footer"] = {
    "complete": _TRUTH,
    "required": _TEXTS,
    "diagnosis": _each(list, "a list", _record(NEEDED["cause"], OTHERS["cause"])),
}


def wrong_in(line: Any) -> str:
    """What is wrong with the fields of a header, an outcome or a footer; empty where nothing is."""
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return "not a line of a report (JSON with a kind)"
    if line["kind"] not in ("header", "outcome", "footer"):
        return f"unknown kind {line['kind']!r}"
    check = _record(NEEDED[line["kind"]], OTHERS[line["kind"]])
    return next(check(line, ""), "")
