"""How recipes, tensors and evidence are stored in a report and written as text.

Whatever comes from an implementation (its messages, its name) is of unknown origin: it is made printable here.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_lm.conformance.report import Cause, Outcome, Report, printable, shortened
from spec_lm.conformance.strategies import build, to_json
from spec_lm.conformance.tolerance import Evidence

MOST_NUMBERS = 64
MOST_TO_READ = 16  # of more numbers the commonest is told, and where there are others ..
MOST_EXCEPTIONS = 8  # .. if these are few
_WHOLE_WEIGHT = 8  # an entry of a weight dict with more numbers is shown by its shape
_WIDTH = 110
_LONGEST_LINE = 150
_LABEL = 10
_LONGEST_SEEN = 90  # of a reason in a list
_MOST_LINES = 12  # of code
_TOLD_IN_FULL = 3  # failures of one operator
_AROUND = 3  # entries on each side of the worst one
_BUILT_IN = "spec_lm.reference.adapters"


# --------------------------------------------------------------------------------------------------------- to a report


def counterexample_of(recipes: Mapping[str, Any], arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A counterexample for the report: its recipes, and up to 64 numbers each of what they build, or of the arguments
    of the call that was made of it, where these tell more."""
    named: dict[str, dict[str, Any]] = {}
    for argument, recipe in (recipes if arguments is None else arguments).items():
        for name, value in _flattened({argument: recipe}):
            named.setdefault(name, {})[argument] = _stored(value)
    values: dict[str, Any] = {}
    for name, stored in named.items():  # where two argument lists differ, they are told apart by their names
        first, *others = stored.values()
        alike = all(other == first for other in others)
        values |= {name: first} if alike else {f"{argument}.{name}": each for argument, each in stored.items()}
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
        stored["data"] = _listed(value)
    return stored | (_filled(value) if value.numel() > MOST_TO_READ else {})


def _filled(value: Tensor) -> dict[str, Any]:
    if (found := exceptions(value)) is None:
        return {}
    fill, others = found
    return {"fill": _listed(fill), "entries": [[*index, _listed(value[index])] for index in others]}


def exceptions(tensor: Tensor) -> tuple[Tensor, list[tuple[int, ...]]] | None:
    """The value that all entries have but a few, and where these are; None where they are not few."""
    first = tensor.flatten()[: 2 * MOST_EXCEPTIONS + 1]  # more than half of these have it
    values, counts = first.unique(return_counts=True)
    fill = values[counts.argmax()]
    others = tensor != fill
    if int(others.sum()) > MOST_EXCEPTIONS:
        return None
    return fill, [tuple(index) for index in others.nonzero().tolist()]


def _listed(value: Tensor) -> Any:
    return (value.double() if value.is_floating_point() else value).tolist()


def evidence_of(evidence: Evidence | None) -> dict[str, Any] | None:
    """What was seen, for the report: whole where small, else the entries beside the worst one on its last axis."""
    if evidence is None:
        return None
    about = {"index": list(evidence.index), "error": evidence.error, "bound": evidence.bound}
    about |= {"dtype": evidence.dtype, "ordered": evidence.ordered}
    sides = {"got": evidence.got, "expected": evidence.expected}
    tensor = next((side for side in sides.values() if isinstance(side, Tensor)), None)
    about["shape"] = None if tensor is None else list(tensor.shape)
    return {name: _side(side, evidence.index) for name, side in sides.items()} | about


def _side(side: Any, index: tuple[int, ...]) -> Any:
    if not isinstance(side, Tensor):
        return side
    if side.numel() <= MOST_NUMBERS:
        return _listed(side)
    if not index:
        return {"first": 0, "entries": _listed(side.flatten()[: 2 * _AROUND])}
    first = max(0, index[-1] - _AROUND)
    return {"first": first, "entries": _listed(side[index[:-1]][first : index[-1] + _AROUND + 1])}


# ------------------------------------------------------------------------------------------------------------- numbers


def tensor_text(stored: Any) -> str:
    """A stored value on one line: `[[1., 0.]]  (1, 2) float32`; a scalar is itself."""
    if not isinstance(stored, Mapping) or "shape" not in stored:
        return printable(str(stored))
    about = f"{shape_text(stored['shape'])} {stored['dtype']}"
    texts = [_but_text(stored)] if "fill" in stored else []
    texts += [numbers_text(stored["data"], stored["dtype"])] if "data" in stored else []
    return f"{min(texts, key=len)}  {about}" if texts else about


def _but_text(stored: Mapping[str, Any]) -> str:
    """One value, and the few places where there is another: `0. but 1.5 at [64]`."""
    fill, dtype = numbers_text(stored["fill"], stored["dtype"]), stored["dtype"]
    others = (f"{numbers_text(value, dtype)} at {list(index)}" for *index, value in stored.get("entries", ()))
    told = ", ".join(others)
    return f"{fill} but {told}" if told else f"all {fill}"


def shape_text(shape: Iterable[int]) -> str:
    """A shape as a tuple: (2,), (2, 3)."""
    return str(tuple(shape))


def numbers_text(data: Any, dtype: str = "float64", longest: int = _LONGEST_LINE) -> str:
    """Nested lists of numbers on one line, each as short as its dtype allows, the middle of long ones left out."""
    if data is None or (isinstance(data, str) and data not in ("nan", "inf", "-inf")):
        return printable(str(data))
    array = np.asarray(_numbers(data))
    text = _written(array, dtype, edge=10**6)
    for edge in (3, 2, 1):
        text = _written(array, dtype, edge) if len(text) > longest else text
    return text if len(text) <= longest else f"{text[:longest]} .."


def _written(array: np.ndarray, dtype: str, edge: int) -> str:
    formatter: Any = {"float_kind": lambda number: shortest(number, dtype)}
    text = np.array2string(
        array, separator=", ", threshold=0, edgeitems=edge, max_line_width=10**6, formatter=formatter
    )
    return re.sub(r"\s+", " ", text).replace("[ ", "[").replace("...", "..")


def shortest(number: float, dtype: str) -> str:
    """The fewest digits that tell a number from its neighbors in a dtype: 0.1 in bfloat16, 0.1001 in float16."""
    if not math.isfinite(number):
        return "NaN" if math.isnan(number) else str(number)
    texts = (f"{number:.{digits}g}" for digits in range(1, 18))
    text = next((each for each in texts if _rounded(float(each), dtype) == _rounded(number, dtype)), repr(number))
    text = f"{float(text):.6f}".rstrip("0") if "e+" in text and abs(number) < 1e6 else text
    return text if set(text) & {".", "e"} else f"{text}."


def _rounded(number: float, dtype: str) -> float:
    """The nearest number of a dtype; what lies beyond its range stays as it is."""
    if dtype == "bfloat16":
        rounded = float(torch.tensor(number, dtype=torch.float64).bfloat16())
    elif dtype in ("float16", "float32"):  # NumPy knows them, and is faster at single numbers
        with np.errstate(over="ignore"):
            rounded = float(np.dtype(dtype).type(number))
    else:
        rounded = number
    return rounded if math.isfinite(rounded) else number


def _numbers(data: Any) -> Any:
    """Numbers of a report's JSON, where inf and nan are strings."""
    if isinstance(data, list):
        return [_numbers(item) for item in data]
    return float(data) if isinstance(data, str) else data


# ------------------------------------------------------------------------------------------------------------ failures


def values_text(values: Mapping[str, Any]) -> Iterator[str]:
    """The arguments of a counterexample: a line each; then weight dicts, closely set; scalars by the last tensor."""
    lines: list[str] = []
    dicts: dict[str, list[str]] = {}
    scalars: list[str] = []
    for name, stored in values.items():
        if not isinstance(stored, Mapping) or "shape" not in stored:
            scalars.append(f"{name} = {tensor_text(stored)}")
        elif inside := re.fullmatch(r"([\w.]+)\['(.+)'\]", name):
            dicts.setdefault(inside[1], []).append(_weight_text(inside[2], stored))
        else:
            lines.append(f"{name} = {tensor_text(stored)}")
    beside = ", ".join(scalars)
    if beside and lines and len(lines[-1]) + 4 + len(beside) <= _WIDTH:
        lines[-1] += f"    {beside}"
    elif beside:
        lines.append(beside)
    for name, entries in dicts.items():
        lines += _set_closely(name, [entry for entry in entries if entry])
    yield from lines


def _weight_text(key: str, stored: Mapping[str, Any]) -> str:
    """An entry of a weight dict: whole where it is small, by its shape where it is not plain."""
    if "data" in stored and math.prod(stored["shape"]) <= _WHOLE_WEIGHT:
        return f"{key} {numbers_text(stored['data'], stored['dtype'])}"
    if re.match(r"layers\.[1-9]", key):  # the shapes of all layers are alike: those of the first are enough
        return ""
    told = f"{_but_text(stored)} " if "fill" in stored else ""
    return f"{key} {told}{shape_text(stored['shape'])}"


def _set_closely(label: str, entries: list[str]) -> Iterator[str]:
    """Entries side by side, as many on a line as fit, under a label."""
    line, indent = f"{label:{_LABEL - 1}} ", " " * _LABEL
    for number, entry in enumerate(entries):
        text = entry + (";" if number + 1 < len(entries) else "")
        if len(line) + len(text) > _WIDTH and line.strip() not in ("", label):
            yield line.rstrip()
            line = indent
        line += f"{text} "
    yield line.rstrip()


def evidence_text(evidence: Mapping[str, Any]) -> Iterator[str]:
    """got, expected, where they differ worst, by how much, and how much is allowed: on one line where it fits."""
    labels = ("low", "high") if evidence.get("ordered") else ("got", "expected")
    texts = _sides_text(evidence)
    pieces = [f"{label:{_LABEL - 1}} {text}" for label, text in zip(labels, texts, strict=True)]
    if worst := _worst_text(evidence):
        pieces.append(f"{'worst':{_LABEL - 1}} {worst}")
    joined = "   ".join([pieces[0], *(re.sub(r" +", " ", piece[:_LABEL]) + piece[_LABEL:] for piece in pieces[1:])])
    yield from [joined] if len(joined) <= _WIDTH else pieces


def _sides_text(evidence: Mapping[str, Any]) -> list[str]:
    """Both sides in the digits of the output's dtype, or in those of float64 where they would read the same."""
    index, dtype = evidence["index"], evidence.get("dtype", "float64")
    texts = [_side_text(evidence[name], index, dtype) for name in ("got", "expected")]
    if texts[0] == texts[1]:
        texts = [_side_text(evidence[name], index, "float64") for name in ("got", "expected")]
    return texts


def _side_text(side: Any, index: list[int], dtype: str) -> str:
    if isinstance(side, Mapping):
        return _window_text(side["entries"], side["first"], index, dtype)
    if len(text := numbers_text(side, dtype, longest=10**6)) <= _WIDTH - _LABEL:
        return text
    if not index or not isinstance(side, list):
        return numbers_text(side, dtype, longest=_WIDTH - _LABEL)
    try:
        for axis in index[:-1]:
            side = side[axis if len(side) > 1 else 0]
    except (IndexError, TypeError):  # a report may have been written by hand
        return numbers_text(side, dtype, longest=_WIDTH - _LABEL)
    first = max(0, index[-1] - _AROUND)
    return _window_text(side[first : index[-1] + _AROUND + 1], first, index, dtype)


def _window_text(entries: list[Any], first: int, index: list[int], dtype: str) -> str:
    """A part of the last axis, with the place where it begins."""
    place = ", ".join([*map(str, index[:-1]), f"{first}:{first + len(entries)}"])
    return f"{numbers_text(entries, dtype)} at [{place}]"


def _worst_text(evidence: Mapping[str, Any]) -> str:
    index = ", ".join(map(str, evidence["index"]))
    place = f"at [{index}]" if index else ""
    if evidence["error"] is None:
        return place
    error, bound = (float(evidence[name]) for name in ("error", "bound"))
    what = "low exceeds high by" if evidence.get("ordered") else "err"
    return f"{place + ': ' if place else ''}{what} {error:.2g}, bound {bound:.2g}".replace("nan", "NaN")


# Messages of plain comparisons, which say no more than the evidence below them.
_PLAIN = re.compile(
    r"values differ by more than rounding allows|values are not equal|the order is broken|got \S+ where .*"
)


def is_plain(message: str) -> bool:
    """Whether a message says no more than the evidence of its comparison."""
    return _PLAIN.fullmatch(message) is not None


def failure_text(outcome: Outcome, replay: str = "", causes: Iterable[Cause] = ()) -> str:
    """A failure as a person reads it: sentence, input, what was seen, why that may be, how to run it again, in plain
    PyTorch too where that is short, and where to read on."""
    if outcome.outcome == "error":
        return f"ERROR  {outcome.clause:<72} {outcome.level.upper()}\n{_indented(outcome.message)}"
    lines = [f"FAILS  {outcome.clause:<72} {outcome.level.upper()}", f"  {outcome.sentence}"]
    if outcome.counterexample:
        lines += [f"  {line}" for line in values_text(outcome.counterexample["values"])]
    if not (outcome.evidence and is_plain(outcome.message)):
        said = outcome.message.replace("\n", "\n" + " " * (_LABEL + 2))
        lines.append(f"  {'seen':{_LABEL - 1}} {printable(said)}")
    if outcome.evidence:
        lines += [f"  {line}" for line in evidence_text(outcome.evidence)]
    lines += [f"  {'likely':{_LABEL - 1}} {printable(cause.text)}" for cause in causes]
    if replay:
        lines.append(f"  {'again':{_LABEL - 1}} {replay}")
    lines += [f"  {line}" for line in _code_text(outcome.reproduction, replay)]
    lines.append(f"  {'read':{_LABEL - 1}} spec-lm explain {outcome.clause}")
    return "\n".join(lines)


def _code_text(code: str, replay: str) -> Iterator[str]:
    """The failure in plain PyTorch, where it is short; else where it is."""
    lines = code.splitlines()
    if len(lines) <= _MOST_LINES and all(len(line) <= _LONGEST_LINE for line in lines):
        for number, line in enumerate(lines):
            yield f"{'' if number else 'code':{_LABEL - 1}} {printable(line)}"
    elif replay:
        yield f"{'code':{_LABEL - 1}} {replay} --code"


def failures_text(report: Report, file: str = "", whole: bool = False) -> Iterator[str]:
    """All failures and errors of a report, a block each. Of an operator where many clauses fail the first ones are told
    in full and the others in a line each; errors that read the same are told once.

    Args:
        report: of a check.
        file: where the report was written to; empty where it cannot be replayed.
        whole: tell every failure in full.
    """
    for operator, outcomes in by_operator(report.of("fails", "error")).items():
        failing = _telling_first([outcome for outcome in outcomes if outcome.outcome == "fails"])
        shown = len(failing) if whole or len(failing) <= _TOLD_IN_FULL + 1 else _TOLD_IN_FULL
        for number, outcome in enumerate(failing[:shown]):
            again = f"spec-lm replay {file} {outcome.clause}" if file else ""
            yield failure_text(outcome, again, report.causes(operator) if number == 0 else ())
        if rest := failing[shown:]:
            yield _rest_text(rest, f"--all-failures or spec-lm replay {file}" if file else "--all-failures")
        yield from _errors_text([outcome for outcome in outcomes if outcome.outcome == "error"])


def warnings_text(report: Report) -> Iterator[str]:
    """What is said of clauses that hold, a line each: waivers that may no longer be needed."""
    yield from (f"WARNS  {o.clause}: {printable(o.message)}" for o in report.of("holds") if o.message)


# Clauses that fail wherever any value is wrong; whatever else fails then tells more of what is wrong with it.
_SAYS_LITTLE = ("agrees_with_the_oracle", "any_length", "any_memory_layout", "long_rows", "has_no_memory")


def _telling_first(failing: list[Outcome]) -> list[Outcome]:
    """In their order, but where values are wrong, what says no more than that last, and of memory last of all."""
    names = [outcome.clause.partition(".")[2] for outcome in failing]
    if not any(name.startswith(_SAYS_LITTLE[0]) for name in names):
        return failing
    return [outcome for _, outcome in sorted(zip(names, failing, strict=True), key=lambda pair: _little(pair[0]))]


def _little(name: str) -> int:
    return max((place for place, each in enumerate(_SAYS_LITTLE, 1) if name.startswith(each)), default=0)


def by_operator(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """Outcomes in their order, those of an operator together."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.operator, []).append(outcome)
    return groups


def _rest_text(outcomes: list[Outcome], how: str) -> str:
    """Failures a line each: the clause, and what was seen."""
    head = f"FAIL   {len(outcomes)} more clauses of {outcomes[0].operator}; in full: {how}"
    widest = max(len(outcome.clause) for outcome in outcomes)
    return "\n".join([head, *(f"  {o.clause:<{widest}}  {shortened(_seen_text(o), _LONGEST_SEEN)}" for o in outcomes)])


def _seen_text(outcome: Outcome) -> str:
    """What was seen, in a few words."""
    evidence = outcome.evidence
    if not evidence or not is_plain(outcome.message) or outcome.message.startswith("got "):
        return outcome.message
    return _worst_text(evidence) or outcome.message


def _errors_text(outcomes: list[Outcome]) -> Iterator[str]:
    """Errors, those of one message together."""
    by_message: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_message.setdefault(outcome.message, []).append(outcome)
    for alike in by_message.values():
        others = ", ".join(outcome.clause for outcome in alike[1:])
        yield failure_text(alike[0]) + (f"\n  so did {others}" if others else "")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in printable(text).splitlines())


# ------------------------------------------------------------------------------------------------------- a whole check


def header_text(header: Mapping[str, Any]) -> str:
    """What is checked, with what, and how."""
    versions = header["versions"]
    torch_version = str(versions["torch"]).split("+")[0]
    parts = [
        f"spec_lm {versions['spec_lm']}, spec {header['spec']}",
        name_of(header),
        f"torch {torch_version} {header['device']} {header['dtype']}",
        f"seed {header['seed']}, {header['examples']} examples, level {header['level']}",
    ]
    parts += [f"shard {header['shard']}"] if "shard" in header else []
    declared = [f"{name}={choice}" for name, choice in header.get("conventions", {}).items()]
    declared += [f"supports {name}" for name in header.get("supports", {})]
    return printable(" | ".join(parts + ([", ".join(declared)] if declared else [])))


def name_of(header: Mapping[str, Any]) -> str:
    """The implementation as its user wrote it."""
    name = str(header["implementation"])
    return "the built-in reference" if name == _BUILT_IN else printable(name)


def operator_text(operator: str, outcomes: list[Outcome], width: int = 0) -> str:
    """One line about an operator: how many clauses came to what, and why some were not judged."""
    counts = Counter(outcome.outcome for outcome in outcomes)
    if counts["absent"]:
        return f"  {operator:<{width}}   absent ({printable(outcomes[0].message)})"
    parts = [f"{counts['holds']:>2} {_verb(counts['holds'], 'hold')}"]
    parts += [f"{counts[status]} {_verb(counts[status], 'fail')}" for status in ("fails",) if counts[status]]
    parts += [f"{counts[status]} {status}" for status in ("waived", "error") if counts[status]]
    reasons = Counter(outcome.message for outcome in outcomes if outcome.outcome == "not_judged")
    parts += [f"{n} not judged ({shortened(reason, _LONGEST_SEEN)})" for reason, n in reasons.items()]
    return f"  {operator:<{width}}   " + "   ".join(parts)


def _verb(count: int, verb: str) -> str:
    return verb + "s" if count == 1 else verb


def summary_text(report: Report) -> str:
    """The last line: the verdict, and of how many clauses."""
    counts, total = report.counts, report.header.get("clauses", len(report.outcomes))
    levels = sorted({outcome.level for outcome in report}) or [str(report.header["level"])]
    ran = counts["holds"] + counts["fails"] + counts["waived"]
    parts = [f"{ran} of {total} {' and '.join(levels).upper().replace('AND', 'and')} clauses ran"]
    parts[0] += f", {counts['holds']} {_verb(counts['holds'], 'hold')}"
    parts[0] += f", {counts['fails']} {_verb(counts['fails'], 'fail')}" if counts["fails"] else ""
    parts[0] += f", {counts['waived']} waived" if counts["waived"] else ""
    parts += [f"not judged: {counts['not_judged']}"] if counts["not_judged"] else []
    parts += [f"errors: {counts['error']}"] if counts["error"] else []
    sizes = Counter(outcome.operator for outcome in report.of("absent"))
    absent = [f"{operator} ({sizes[operator]})" for operator in report.absent]
    parts += [f"not provided: {', '.join(absent)}"] if absent else []
    return f"{name_of(report.header)} {_verdict(report)}: {'; '.join(parts)}"


def _verdict(report: Report) -> str:
    if not report.complete:
        return "was not checked to the end"
    if report.of("fails"):
        return "does not conform"
    if not report.provided:
        return "provides nothing that was to be checked"
    if not report.judged:
        return "could not be judged"
    if report.missing:
        return f"does not provide what is required ({', '.join(report.missing)})"
    return "could not be checked in full" if report.of("error") else "conforms"
