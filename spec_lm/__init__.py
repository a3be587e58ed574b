"""The executable specification of a Transformer language model.

PYTEST_DONT_REWRITE: pytest warns about modules it meets already imported, and the plugin imports this one.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spec_lm.conformance.clause import CLAUSES, Clause, clause
    from spec_lm.conformance.report import Outcome, Report
    from spec_lm.conformance.runner import check
    from spec_lm.conformance.tolerance import Violation

__version__ = "0.1.0"
SPEC_VERSION = 1

# In a checkout the specification lies beside this package; in a wheel, inside it.
if not (Path(__file__).parent / "properties").is_dir():
    __path__.append(str(Path(__file__).parent.parent))

_HOMES = {
    "CLAUSES": "spec_lm.conformance.clause",
    "Clause": "spec_lm.conformance.clause",
    "clause": "spec_lm.conformance.clause",
    "Outcome": "spec_lm.conformance.report",
    "Report": "spec_lm.conformance.report",
    "check": "spec_lm.conformance.runner",
    "Violation": "spec_lm.conformance.tolerance",
}
__all__ = ["CLAUSES", "SPEC_VERSION", "Clause", "Outcome", "Report", "Violation", "__version__", "check", "clause"]


def __getattr__(name: str) -> Any:
    """Load a public name on its first use, so that importing this package never imports torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
