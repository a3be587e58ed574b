"""The catalogue of faults: deliberately wrong implementations that show the specification has teeth.

A fault is one small change of the reference, in the file of its operator. Adding one edits one file:

    @fault("softmax", family="overflow", detected_by="shift_invariance", does="no maximum is subtracted")
    def no_maximum_subtracted(x, dim):
        return torch.exp(x) / torch.exp(x).sum(dim, keepdim=True)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from inspect import getsourcefile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from spec_lm.conformance.clause import CLAUSES, RegistrationError, nearest
from spec_lm.conformance.diagnosis import FAMILIES
from spec_lm.conformance.operators import OPERATORS
from spec_lm.reference import functional


@dataclass(frozen=True)
class Fault:
    """A deliberately wrong implementation of one operator, of the plain signature.

    Args:
        operator: what it gets wrong.
        name: in the field's words.
        function: the wrong implementation.
        family: what there is to mend, one of FAMILIES.
        does: what it does.
        detected_by: the names of clauses of its operator that must detect it.
        kind: shared by faults that are nearly the same; its name by default.
        mistake: why people make it, where that is not plain.
        report: a public report of it, owner/repo#n, where there is one.
        no_invariant: why only a comparison with the oracle can detect it, where that is so.
    """

    operator: str
    name: str
    function: Callable[..., Any]
    family: str
    does: str
    detected_by: tuple[str, ...]
    kind: str
    mistake: str = ""
    report: str = ""
    no_invariant: str = ""

    @property
    def id(self) -> str:
        """operator.name"""
        return f"{self.operator}.{self.name}"

    def __reduce__(self) -> tuple[Callable[..., "Fault"], tuple[str, str]]:
        """To another process it is sent by name: its function may be one that was made, and has none of its own."""
        return _registered, (self.function.__module__, self.id)


_CATALOGUE: dict[str, Fault] = {}


def _registered(module: str, fault_id: str) -> Fault:
    import_module(module)
    return _CATALOGUE[fault_id]


def fault(
    operator: str,
    *,
    family: str,
    does: str,
    detected_by: str | tuple[str, ...],
    kind: str = "",
    mistake: str = "",
    report: str = "",
    no_invariant: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of the plain signature as a fault; the arguments are `Fault`'s.

    Raises:
        RegistrationError: duplicate id, unknown operator or unknown family.
    """
    names = (detected_by,) if isinstance(detected_by, str) else detected_by

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        new = Fault(operator, name, function, family, does, names, kind or name, mistake, report, no_invariant)
        place = f"{getsourcefile(function)}, {function.__qualname__}"
        if operator not in OPERATORS:
            raise RegistrationError(f"{place}: unknown operator {operator!r}{nearest(operator, list(OPERATORS))}")
        if family not in FAMILIES:
            raise RegistrationError(f"{place}: unknown family {family!r}{nearest(family, list(FAMILIES))}")
        if new.id in _CATALOGUE:
            raise RegistrationError(f"{place}: the id {new.id} is taken; give the function another name")
        _CATALOGUE[new.id] = new
        return function

    return register


def catalogue() -> dict[str, Fault]:
    """All faults by id; their files are loaded on first use.

    Raises:
        RegistrationError: a fault names a clause that does not exist.
    """
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        import_module(f"{__name__}.{path.stem}")
    for each in _CATALOGUE.values():
        for clause_id in clauses_detecting(each):
            if clause_id not in CLAUSES:
                raise RegistrationError(f"fault {each.id}: no clause {clause_id}{nearest(clause_id, list(CLAUSES))}")
    return dict(_CATALOGUE)


def clauses_detecting(each: Fault) -> Iterator[str]:
    """The ids of the clauses that must detect a fault."""
    yield from (f"{each.operator}.{name}" for name in each.detected_by)


@contextmanager
def planted(each: Fault) -> Iterator[None]:
    """Inside, the reference contains the fault: whatever is built on its operator computes with it.

    During the fault's own call the reference is whole again, since a fault is made of the reference's other parts.
    """
    original = getattr(functional, each.operator)

    def wrong(*arguments: Any, rotate: Callable[..., Any] | None = None, **named: Any) -> Any:
        with patch.object(functional, each.operator, original), _rotating(each.function, rotate):
            return each.function(*arguments, **named)

    with patch.object(functional, each.operator, wrong):
        yield


@contextmanager
def _rotating(function: Callable[..., Any], rotate: Callable[..., Any] | None) -> Iterator[None]:
    """Inside, the attention that a fault of multi-head attention is built on turns queries and keys first.

    Attention with RoPE asks for this by an argument of the reference's own, which is not in the plain signature.
    """
    if rotate is None:
        yield
        return
    attend = functional.scaled_dot_product_attention

    def turned(query: Any, key: Any, value: Any, mask: Any = None) -> Any:
        return attend(rotate(query), rotate(key), value, mask)

    name = "scaled_dot_product_attention"
    with patch.object(functional, name, turned), patch.dict(function.__globals__, {name: turned}):
        yield
