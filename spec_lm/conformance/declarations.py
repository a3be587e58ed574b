"""What an implementation may declare of itself: conventions, and the part of the domain that it supports."""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from spec_lm.conformance.bounds import CONVENTIONS
from spec_lm.conformance.clause import nearest

DTYPES = ("float32", "float64", "bfloat16", "float16")
MASKS = ("none", "all", "causal", "random", "one key")
LARGEST_SIZE = 2**18  # a vocabulary's; examples of more would not fit into memory
MOST_AXES = 16
_SIZES = ("sequence", "queries", "keys", "heads", "d_head", "d_k", "d_v")
_SIZES += ("n", "d_model", "d_ff", "d_in", "d_out", "vocab")


def wrong_conventions(given: Any) -> str:
    """What is wrong with conventions as they are declared, and what is expected; empty where nothing is."""
    known = ", ".join(f"{each}={'|'.join(choices)}" for each, choices in CONVENTIONS.items())
    if not isinstance(given, Mapping):
        return f"is {reprlib.repr(given)}, expected choices by name; there are {known}"
    for name, choice in given.items():
        if choice not in CONVENTIONS.get(name, ()):
            shown = choice if isinstance(choice, str) else reprlib.repr(choice)
            word, words = (choice, CONVENTIONS[name]) if name in CONVENTIONS else (name, CONVENTIONS)
            near = nearest(str(word), list(words))
            return f"no convention is {name}={shown}{near}; there are {known}"
    return ""


def wrong_supports(given: Any) -> str:
    """What is wrong with a support as it is declared, and what is expected; empty where nothing is."""
    if not isinstance(given, Mapping):
        return f'is {reprlib.repr(given)}, expected a table by name, as in {{"d_head": [64]}}'
    for name, allowed in given.items():
        if name not in _SUPPORTS:
            return f"no support is named {name}{nearest(str(name), list(_SUPPORTS))}; there are {', '.join(_SUPPORTS)}"
        is_right, expected = _SUPPORTS[name]
        if not is_right(allowed):
            return f"support {name} is {reprlib.repr(allowed)}, expected {expected}"
    return ""


def _is_list_of(is_one: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda given: isinstance(given, list | tuple) and len(given) > 0 and all(map(is_one, given))


def _is_number(given: Any, least: int, most: int) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and least <= given <= most


def _is_size(given: Any) -> bool:
    return _is_number(given, 1, LARGEST_SIZE)


def _are_sizes(given: Any) -> bool:
    if isinstance(given, Mapping):
        return list(given) == ["multiple_of"] and _is_size(given["multiple_of"])
    return _is_list_of(_is_size)(given)


# By name: whether a value is right, and what is.
_SUPPORTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "axes": (_is_list_of(lambda axes: _is_number(axes, 0, MOST_AXES)), f"a list of numbers from 0 to {MOST_AXES}"),
    "dtype": (_is_list_of(lambda dtype: dtype in DTYPES), f"a list of {', '.join(DTYPES)}"),
    "mask": (_is_list_of(lambda kind: kind in MASKS), f"a list of {', '.join(MASKS)}"),
}
_SUPPORTS |= dict.fromkeys(
    _SIZES, (_are_sizes, f'a list of sizes from 1 to {LARGEST_SIZE}, or {{"multiple_of": such a size}}')
)
