"""The specification: one file an operator, one function a clause. Its docstring is the normative sentence.

`every_operator.py` holds the clauses that are true of each of the twelve.
"""

from importlib import import_module
from pathlib import Path

from spec_lm.conformance.operators import OPERATORS


def files() -> list[Path]:
    """The files of the specification: the clauses of every operator, then low operators first, then any other."""
    order = ["every_operator", *OPERATORS]
    found = [path for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__"]
    return sorted(found, key=lambda path: (order.index(path.stem) if path.stem in order else len(order), path.stem))


def load() -> None:
    """Import them all, which registers their clauses."""
    for path in files():
        import_module(f"{__name__}.{path.stem}")
