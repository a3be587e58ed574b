"""Statements in plain PyTorch that import an implementation's function, call it, and assert what should be so."""

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_lm.conformance.literals import Drawn, laid_out, literal, number
from spec_lm.conformance.operators import OPERATORS, Call, Operator, result_dtype
from spec_lm.conformance.tolerance import Output

_LONGEST_LINE = 110
_SHORT = 28  # an argument as short as this needs no name of its own
_SHOWN_WHOLE = 24  # an expected value of more entries is shown around its worst one
# What the statements have another use for.
_TAKEN = {"torch", "sys", "np", "os", "random", "got", "expected", "before", "first", "second", "kept", "cotangent"}


@dataclass(frozen=True)
class Origin:
    """How an implementation's function is reached from plain Python.

    Args:
        function: itself, as its user wrote it.
        name: the expression that is called, as "run_softmax".
        statement: what binds it, as "from adapters import run_softmax"; where there is none a reader puts it in place.
        folders: what sys.path must begin with.
        adapter: whether it takes the arguments of the adapter interface.
        anew: a context in which the statement imports its modules anew, so that nothing is left of earlier calls.
    """

    function: Callable[..., Any]
    name: str = "f"
    statement: str = ""
    folders: tuple[str, ...] = ()
    adapter: bool = False
    anew: Callable[[], AbstractContextManager[Any]] = nullcontext


def is_taken(name: str) -> bool:
    """Whether statements have another use for a name than for the function."""
    return name in _TAKEN or any(name in operator.parameters for operator in OPERATORS.values())


def quoted(text: str) -> str:
    """A string literal."""
    return json.dumps(text)


class Expected:
    """What a result should be around its worst entry, in the digits of its dtype, with one bound for all entries.

    Args:
        result: of a call, with the error it may have.
        exact: the oracle's values.
    """

    def __init__(self, result: Output, exact: Tensor) -> None:
        dtype = torch.float64 if result.raw.dtype == torch.float64 else torch.float32
        got, value = result.raw.detach().cpu().double(), exact.to(dtype)
        same = (got == value) | (got.isnan() & value.isnan())
        off = torch.where(same, 0.0, (got - value.double()).abs().nan_to_num(nan=torch.inf))
        allowed = result.error.nan_to_num(nan=torch.inf) + (exact - value.double()).abs()
        allowed = torch.where(value.isfinite(), allowed, 0.0)
        self.is_wrong = bool((off > allowed).any())
        self.index: tuple[int, ...] = ()
        if self.is_wrong:
            self.index = next(i for i in _parts(off, allowed) if bool((off[i] > allowed[i].max()).any()))
            self.value, self.bound = value[self.index], float(allowed[self.index].max())


def _parts(off: Tensor, allowed: Tensor) -> Iterator[tuple[int, ...]]:
    """The whole and the last axis through the worst entry, where they are short; then that entry."""
    worst = np.unravel_index(int((off - allowed).nan_to_num(nan=torch.inf).argmax()), tuple(off.shape))
    index = tuple(int(i) for i in worst)
    yield from (part for part in dict.fromkeys(((), index[:-1])) if off[part].numel() <= _SHOWN_WHOLE)
    yield index


@dataclass(frozen=True)
class Entry:
    """An entry of a call's output, or of the gradient that is named, as a comparison has it: times a factor."""

    call: Call
    gradient: str
    index: tuple[int, ...]
    factor: float


@dataclass(frozen=True)
class Pair:
    """Two entries, or an entry and a number, that should agree up to a bound."""

    sides: tuple[Entry | float, ...]
    bound: float

    @property
    def calls(self) -> list[Call]:
        return list({id(side.call): side.call for side in self.sides if isinstance(side, Entry)}.values())


Leaves = Callable[[str], bool]


def _every(name: str) -> bool:
    return True


def _none(name: str) -> bool:
    return False


# The states from which a call must not move, where a process need not begin at them.
_STATES = {
    "torch's global random generator": "torch.manual_seed(7919)",
    "NumPy's global random generator": "np.random.seed(7919)",
    "Python's global random generator": "random.seed(7919)",
    "torch's number of threads": "torch.set_num_threads(1)",
}
# What reads a part of the process that a call must leave as it was.
_PARTS = {
    "torch's global random generator": "torch.get_rng_state().tolist()",
    "NumPy's global random generator": "np.random.get_state()[1].tolist()",
    "Python's global random generator": "random.getstate()",
    "torch's default dtype": "torch.get_default_dtype()",
    "torch's default device": "torch.get_default_device()",
    "torch's grad mode": "torch.is_grad_enabled()",
    "torch's number of threads": "torch.get_num_threads()",
    "torch's matmul precision": "torch.get_float32_matmul_precision()",
    "torch's deterministic algorithms": "torch.are_deterministic_algorithms_enabled()",
    "torch's flush of subnormal numbers": "(torch.tensor([1e-38]) / 2).tolist()",
    "NumPy's error handling": "np.geterr()",
    "the current folder": "os.getcwd()",
    "the environment variables": "dict(os.environ)",
}
_MODULES = {"np.": "numpy as np", "os.": "os", "random.": "random"}
SEEDS = ("torch.manual_seed", "np.random.seed", "random.seed")


class Script:
    """Statements in the making. Arguments that need a name get one; where another call has an equal one, they share it.

    Args:
        operator: that is called.
        origin: of the function.
        device: where the arguments lie.
        drawn: what large arguments may be draws of.
        exact_layout: whether arguments lie in memory as they did, and keep the sign of 0.
    """

    def __init__(self, operator: Operator, origin: Origin, device: str, drawn: Drawn, exact_layout: bool) -> None:
        self.operator, self.origin, self.device = operator, origin, device
        self._drawn, self._exact_layout, self._on_cpu = drawn, exact_layout, torch.device(device).type == "cpu"
        self._lines: list[str] = []
        self._variables: dict[str, dict[str, str]] = {}  # what each holds: a text, or the texts of a dict's entries
        self._latest: dict[str, str] = {}  # the variable of an argument

    # ---- the whole

    def imports(self) -> str:
        """The statements that bring in torch and the function."""
        used = {name for mark, name in _MODULES.items() if any(mark in line for line in self._lines)}
        used |= {"sys"} if self.origin.folders else set()
        lines = [f"import {', '.join([*sorted(used), 'torch'])}"]
        folders = ", ".join(map(quoted, self.origin.folders))
        if len(self.origin.folders) == 1:
            lines[0] += f"; sys.path.insert(0, {folders})"
        elif folders:
            lines.append(f"sys.path[:0] = [{folders}]")
        missing = f"{self.origin.name} = ...  # put the function here that was checked as {self.operator.name}"
        return "\n".join([*lines, self.origin.statement or missing])

    def body(self, times: int) -> str:
        """The statements after the imports, several times over where results change."""
        lines = "\n".join(self._lines)
        return lines if times == 1 else f"for _ in range({times}):\n" + textwrap.indent(lines, "    ")

    def _add(self, line: str) -> None:
        """A statement, broken between the numbers of a long list."""
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        is_long = len(line) > _LONGEST_LINE and not line.startswith("assert")
        wrapped = textwrap.wrap(line, _LONGEST_LINE, subsequent_indent=indent, break_long_words=False)
        self._lines += wrapped if is_long else [line]

    # ---- what is asserted

    def value(self, call: Call, name: str, expected: Expected, leaves: Leaves = _none) -> None:
        """A result, and what it should be; a gradient goes by the name of its argument."""
        place = f"[{', '.join(map(str, expected.index))}]" if expected.index else ""
        if name:
            self._backward(call, lambda each: each == name or leaves(each))
            got = f"{self._reached(name)}.grad{place}"
        else:
            got = "got"
            self._assign(got, call, place)
        if expected.value.ndim == 0:
            wanted = number(float(expected.value), str(expected.value.dtype).removeprefix("torch."))
            self._add(f"assert {_near(got, wanted, expected.bound)}, {got}")
            return
        self._add(f"expected = {literal(expected.value)}")
        self._add(f"assert {_all_near(got, expected)}, {got}")

    def arrives(self, call: Call, name: str) -> None:
        """The gradient with respect to an argument is there."""
        self._backward(call, _every)
        self._add(f"assert {self._reached(name)}.grad is not None")

    def pair(self, pair: Pair, calls: list[Call], seeds: tuple[str, ...] = ()) -> None:
        """These calls, and entries of two of their results that should agree; generators are seeded before each."""
        names: dict[int, str] = {}
        gradients = {id(side.call): side.gradient for side in pair.sides if isinstance(side, Entry)}
        for call in calls:
            self._lines += [f"{seed}({call.seed})" for seed in seeds]
            if id(call) in gradients:
                names[id(call)] = ("first", "second")[len(names)]
                self._assign(names[id(call)], call, gradient=gradients[id(call)])
            else:
                self.result(call)
        left, right = (_side(side, names) for side in pair.sides)
        self._add(f"assert {_near(left, right, pair.bound)}, ({left}, {right})")

    def twice(self, call: Call, index: tuple[int, ...], bound: float) -> None:
        """A call and the same call again, with what the first one left of its arguments."""
        for name in _given(self.operator, call):
            self._name(name, call)
        self._assign("first", call)
        self._assign("second", call)
        place = f"[{', '.join(map(str, index))}]" if index else ""
        self._add(f"assert {_near(f'first{place}', f'second{place}', bound)}, (first{place}, second{place})")

    def result(self, call: Call) -> None:
        """A call of which nothing is asked but that it returns."""
        if call.cotangent is None:
            self._assign("", call)
        else:
            self._backward(call, _every)

    def kept(self, call: Call, later: Call) -> None:
        """A result that stays as it is when another call follows."""
        self._assign("first", call)
        self._add("kept = first.clone()")
        self.result(later)
        self._add('assert torch.equal(first, kept), "a later call changed an earlier result"')

    def refused(self, call: Call, message: str) -> None:
        """A call that must raise."""
        text = self._expression(call)
        self._lines += ["try:", f"    {text}", "except Exception:", "    pass"]
        self._lines += ["else:", f"    raise AssertionError({quoted(message)})"]

    def changed(self, call: Call, message: str) -> None:
        """What a call must leave as it was: an argument, or a part of the process."""
        part = message.removeprefix("it changed ")
        if part in _PARTS:
            self._lines += [_STATES[part]] if part in _STATES else []
            before, after = _PARTS[part], f"{_PARTS[part]} == before"
        else:
            name = part.removeprefix("the keys of ").removeprefix("its argument ")
            self._name(name.partition("[")[0], call)
            reached = self._reached(name)
            keys = part.startswith("the keys of ")
            before = f"list({reached})" if keys else f"{reached}.clone()"
            after = f"list({reached}) == before" if keys else f"torch.equal({reached}, before)"
        self._add(f"before = {before}")
        self.result(call)
        self._add(f"assert {after}, {quoted(message)}")

    def signature(self, call: Call, kind: str) -> None:
        """Type, shape, dtype or device of a result."""
        self._assign("got", call, on_cpu=True)
        arguments = _given(self.operator, call).values()
        asked = {
            "type": lambda: ("isinstance(got, torch.Tensor)", "type(got)"),
            "shape": lambda: (f"got.shape == {tuple(self.operator.shape(*arguments))}", "got.shape"),
            "dtype": lambda: (f"got.dtype == {result_dtype(tuple(arguments))}", "got.dtype"),
            "device": lambda: (f"got.device.type == {quoted(torch.device(self.device).type)}", "got.device"),
        }
        condition, shown = asked[kind]()
        self._add(f"assert {condition}, {shown}")

    # ---- calls and their arguments

    def _assign(self, target: str, call: Call, place: str = "", gradient: str = "", on_cpu: bool = False) -> None:
        """A call, its result under a name; or the gradient with respect to one of its arguments."""
        if gradient:
            self._backward(call, _every)
            self._add(f"{target} = {self._reached(gradient)}.grad")
            return
        text = self._expression(call, _every if call.requires_grad else _none)
        text = f"{target + ' = ' if target else ''}{text}{'' if on_cpu or self._on_cpu else '.cpu()'}{place}"
        if call.grad_mode:
            self._add(text)
        else:
            self._lines += ["with torch.no_grad():", f"    {text}"]

    def _backward(self, call: Call, leaves: Leaves) -> None:
        """A call forward, and one backward from the cotangent; every leaf has a name, and its gradient is in .grad."""
        assert call.cotangent is not None
        text, cotangent = self._expression(call, leaves), self._tensor(call.cotangent)
        if len(text) + len(cotangent) > _LONGEST_LINE or "cotangent" in self._variables:
            cotangent = self._named("cotangent", cotangent)
        self._add(f"{text}.backward({cotangent})")

    def _expression(self, call: Call, leaves: Leaves = _none) -> str:
        """The call as one expression, its arguments inside where that is short; else they are named before."""
        before = len(self._lines), dict(self._variables), dict(self._latest)
        text = self._called(call, leaves, _LONGEST_LINE)
        if len(text) <= _LONGEST_LINE - len("expected = "):
            return text
        self._lines, self._variables, self._latest = self._lines[: before[0]], before[1], before[2]
        return self._called(call, leaves, _SHORT)

    def _called(self, call: Call, leaves: Leaves, longest: int) -> str:
        given = _given(self.operator, call)
        texts = {id(value): self._argument(name, value, leaves, longest) for name, value in given.items()}

        def text(value: Any) -> str:
            return texts.get(id(value)) or _scalar(value)

        if not self.origin.adapter:
            return f"{self.origin.name}({', '.join(map(text, given.values()))})"
        positional, named = self.operator.adapter(*call.arguments)
        parts = [*map(text, positional), *(f"{name}={text(value)}" for name, value in named.items())]
        return f"{self.origin.name}({', '.join(parts)})"

    def _argument(self, name: str, value: Any, leaves: Leaves, longest: int) -> str:
        if isinstance(value, Mapping):
            return self._dict(name, {key: self._leaf(f"{name}[{key!r}]", item, leaves) for key, item in value.items()})
        if not isinstance(value, Tensor):
            return _scalar(value)
        text = self._leaf(name, value, leaves)
        needs_a_name = name in self._variables or _is_leaf(text) or len(text) > longest
        return self._named(name, text) if needs_a_name else text

    def _leaf(self, name: str, value: Tensor, leaves: Leaves) -> str:
        text = self._tensor(value)
        return f"{text}.requires_grad_()" if value.is_floating_point() and leaves(name) else text

    def _tensor(self, value: Tensor) -> str:
        if self._exact_layout:
            text = laid_out(value, self._drawn)
        else:  # 0 for -0: what was multiplied by 0 is zeros
            text = literal(value + 0.0 if value.is_floating_point() else value, self._drawn)
        return text if self._on_cpu else f"{text}.to({quoted(self.device)})"

    def _name(self, name: str, call: Call) -> None:
        """Give an argument of a call a name, so that it can be looked at afterwards."""
        value = call.cotangent if name == "cotangent" else _given(self.operator, call)[name]
        if isinstance(value, Mapping):
            self._dict(name, {key: self._tensor(item) for key, item in value.items()})
        elif isinstance(value, Tensor):
            self._named(name, self._tensor(value))

    def _named(self, name: str, text: str) -> str:
        """The variable that holds this text: one there is, or a new one. A leaf gathers gradients: it is not shared."""
        known = (variable for variable in _variables(name) if variable not in self._variables or not _is_leaf(text))
        variable = next(each for each in known if self._variables.get(each, {"": text}) == {"": text})
        if variable not in self._variables:
            self._add(f"{variable} = {text}")
        self._variables[variable], self._latest[name] = {"": text}, variable
        return variable

    def _dict(self, name: str, texts: Mapping[str, str]) -> str:
        """The variable that holds a dict of weights; one like the last but for a few entries is written by those."""
        last = self._variables.get(self._latest.get(name, ""), {})
        changed = {key: text for key, text in texts.items() if last.get(key) != text or _is_leaf(text)}
        if list(last) == list(texts) and not changed:
            return self._latest[name]
        variable = next(each for each in _variables(name) if each not in self._variables)
        is_like_last = list(last) == list(texts) and 2 * len(changed) <= len(texts)
        self._lines.append(f"{variable} = {self._latest[name]} | {{" if is_like_last else f"{variable} = {{")
        for key, text in (changed if is_like_last else texts).items():
            self._add(f"    {quoted(key)}: {text},")
        self._lines.append("}")
        self._variables[variable], self._latest[name] = dict(texts), variable
        return variable

    def _reached(self, name: str) -> str:
        """An argument, or an entry of a dict of weights, by its variable."""
        argument, bracket, key = name.partition("[")
        return self._latest[argument] + (f"[{quoted(key[1:-2])}]" if bracket else "")


def _variables(name: str) -> Iterator[str]:
    """x, x2, x3, .."""
    yield name
    yield from (f"{name}{number}" for number in count(2))


def _is_leaf(text: str) -> bool:
    return text.endswith(".requires_grad_()")


def _given(operator: Operator, call: Call) -> dict[str, Any]:
    """The arguments by name, without what was left out."""
    given = dict(zip(operator.parameters, call.arguments, strict=False))
    return {name: value for name, value in given.items() if not (name in operator.optional and value is None)}


def _side(side: Entry | float, names: Mapping[int, str]) -> str:
    if isinstance(side, Entry):
        text = f"{names[id(side.call)]}[{', '.join(map(str, side.index))}]" if side.index else names[id(side.call)]
        return text if side.factor == 1 else f"{number(side.factor)} * {text}"
    return number(side)


def _scalar(value: Any) -> str:
    return number(value) if isinstance(value, int | float) else repr(value)


def _near(got: str, expected: str, bound: float) -> str:
    """That a number is as it should be."""
    if expected == "torch.nan":
        return f"{got}.isnan()"
    if bound == 0 or "inf" in expected:
        return f"{got} == {expected}"
    return f"abs({got} - {expected}) <= {_rounded_up(bound)}"


def _all_near(got: str, expected: Expected) -> str:
    if not bool(expected.value.isfinite().all()):
        alike = f"{got}.to(expected.dtype), expected, rtol=0, atol={_rounded_up(expected.bound)}, equal_nan=True"
        return f"torch.allclose({alike})"
    if expected.bound == 0:
        return f"({got} == expected).all()"
    return f"(({got} - expected).abs() <= {_rounded_up(expected.bound)}).all()"


def _rounded_up(bound: float) -> str:
    """A bound in two digits, never below itself."""
    text = f"{bound:.1e}"
    if float(text) < bound:
        digits, exponent = text.split("e")
        text = f"{float(digits) + 0.1:.1f}e{exponent}"
    return f"{float(text):g}"
