"""How recipes, tensors and evidence are stored in a report and written as text."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from spec_lm.conformance.operators import Operator
from spec_lm.conformance.report import Outcome
from spec_lm.conformance.strategies import build, to_json
from spec_lm.conformance.tolerance import Evidence

MOST_NUMBERS = 64
_LONGEST_LINE = 150


def counterexample_of(recipes: Mapping[str, Any], operator: Operator) -> dict[str, Any]:
    """A counterexample for the report: its recipes, and what they build, up to 64 numbers each."""
    values = {name: _stored(value) for name, value in _flattened(recipes)}
    return {"recipes": {name: to_json(recipe) for name, recipe in recipes.items()}, "values": values}


def _flattened(recipes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every argument by name: a whole argument list, projections and weight dicts taken apart."""
    for name, recipe in recipes.items():
        value = build(recipe)
        if hasattr(value, "_asdict"):
            fields = value._asdict()
            prefix = "w_" if "q" in fields else ""
            yield from _flattened({f"{prefix}{field}": item for field, item in fields.items()})
        elif isinstance(value, Mapping):
            yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
        else:
            yield name, value


def _stored(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    stored = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if value.numel() <= MOST_NUMBERS:
        stored["data"] = (value.double() if value.is_floating_point() else value).tolist()
    return stored


def evidence_of(evidence: Evidence | None) -> dict[str, Any] | None:
    """What was seen, for the report: whole where small, else the worst entry."""
    if evidence is None:
        return None
    at = {"index": list(evidence.index), "error": evidence.error, "bound": evidence.bound}
    sides = {"got": evidence.got, "expected": evidence.expected}
    return {name: _side(side, evidence.index) for name, side in sides.items()} | at


def _side(side: Any, index: tuple[int, ...]) -> Any:
    if not isinstance(side, Tensor):
        return side
    return side.tolist() if side.numel() <= MOST_NUMBERS else float(side[index])


def tensor_text(stored: Any) -> str:
    """A stored value on one line: `[[1., 0.]]  (1, 2) float32`; a scalar is itself."""
    if not isinstance(stored, Mapping) or "shape" not in stored:
        return str(stored)
    shape = "(" + ", ".join(map(str, stored["shape"])) + ("," if len(stored["shape"]) == 1 else "") + ")"
    about = f"{shape} {stored['dtype']}"
    if "data" not in stored:
        return about
    text = numbers_text(stored["data"], stored["dtype"])
    return f"{text}  {about}" if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]} ..  {about}"


def numbers_text(data: Any, dtype: str = "float64") -> str:
    """Nested lists of numbers on one line, each as short as its dtype allows."""
    if isinstance(data, str):
        return data
    kinds = {"float64": np.float64, "bool": np.bool_, "int64": np.int64, "int32": np.int32}
    array = np.asarray(_numbers(data), dtype=kinds.get(dtype, np.float32))
    if array.ndim == 0:
        return f"{array.item():.7g}" if array.dtype.kind == "f" else str(array.item())
    text = np.array2string(array, separator=", ", threshold=10**6, max_line_width=10**6, floatmode="unique")
    return re.sub(r"\s+", " ", text).replace("[ ", "[")


def _numbers(data: Any) -> Any:
    """Numbers of a report's JSON, where inf and nan are strings."""
    if isinstance(data, list):
        return [_numbers(item) for item in data]
    return float(data) if isinstance(data, str) else data


def values_text(values: Mapping[str, Any]) -> Iterator[str]:
    """The arguments of a counterexample, a line each; weight dicts' large entries last, scalars together."""
    scalars = []
    for name, stored in values.items():
        if isinstance(stored, Mapping) and "shape" in stored:
            yield f"{name} = {tensor_text(stored)}"
        else:
            scalars.append(f"{name} = {stored}")
    if scalars:
        yield ", ".join(scalars)


def evidence_text(evidence: Mapping[str, Any]) -> Iterator[str]:
    """got, expected, and where they differ worst, by how much, and how much is allowed."""
    for side in ("got", "expected"):
        text = numbers_text(evidence[side])
        yield f"{side:9} {text if len(text) <= _LONGEST_LINE else text[:_LONGEST_LINE] + ' ..'}"
    where = ", ".join(map(str, evidence["index"]))
    if evidence["error"] is not None:
        error, bound = (float(evidence[name]) for name in ("error", "bound"))
        yield f"worst     at [{where}]: err {error:.2g}, bound {bound:.2g}"


def failure_text(outcome: Outcome, replay: str = "") -> str:
    """A failure as a person reads it: sentence, input, got, expected, how to run it again, where to read on."""
    lines = [f"FAILS  {outcome.clause:<90} {outcome.level.upper()}", f"  {outcome.sentence}"]
    if outcome.counterexample:
        lines += [f"  {line}" for line in values_text(outcome.counterexample["values"])]
    lines.append(f"  seen      {outcome.message}")
    if outcome.evidence:
        lines += [f"  {line}" for line in evidence_text(outcome.evidence)]
    if replay:
        lines.append(f"  again     {replay}")
    lines.append(f"  read      spec-lm explain {outcome.clause}")
    return "\n".join(lines)

