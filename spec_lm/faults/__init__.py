"""The catalogue of faults: deliberately wrong implementations that show the specification has teeth.

A fault is one small change of the reference, in the file of its operator. Adding one edits one file:

    @fault("softmax", detected_by="shift_invariance", does="no maximum is subtracted before exp")
    def no_maximum_subtracted(x, dim):
        return torch.exp(x) / torch.exp(x).sum(dim, keepdim=True)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from inspect import getsourcefile
from pathlib import Path
from typing import Any

from spec_lm.conformance.clause import CLAUSES, RegistrationError, nearest
from spec_lm.conformance.operators import OPERATORS


@dataclass(frozen=True)
class Fault:
    """A deliberately wrong implementation of one operator, of the plain signature.

    Args:
        operator: what it gets wrong.
        name: in the field's words.
        function: the wrong implementation.
        does: what it does.
        detected_by: the names of clauses of its operator that must detect it.
        mistake: why people make it, where that is not plain.
        report: a public report of it, owner/repo#n, where there is one.
    """

    operator: str
    name: str
    function: Callable[..., Any]
    does: str
    detected_by: tuple[str, ...]
    mistake: str = ""
    report: str = ""

    @property
    def id(self) -> str:
        """operator.name"""
        return f"{self.operator}.{self.name}"


_CATALOGUE: dict[str, Fault] = {}


def fault(
    operator: str, *, does: str, detected_by: str | tuple[str, ...], mistake: str = "", report: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of the plain signature as a fault; the arguments are `Fault`'s.

    Raises:
        RegistrationError: duplicate id or unknown operator.
    """
    names = (detected_by,) if isinstance(detected_by, str) else detected_by

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        new = Fault(operator, function.__name__, function, does, names, mistake, report)
        place = f"{getsourcefile(function)}, {function.__qualname__}"
        if operator not in OPERATORS:
            raise RegistrationError(f"{place}: unknown operator {operator!r}{nearest(operator, list(OPERATORS))}")
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
