"""Writes the generated parts of README.md: the failing session, the clause in full, the table of operators.

    python docs/generate.py

A test compares the README with what this would write.
"""

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from spec_lm import matrix
from spec_lm.conformance.clause import CLAUSES
from spec_lm.conformance.operators import OPERATORS

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def session(command: str) -> str:
    """What a command prints, as a console session."""
    arguments = [sys.executable, "-m", "spec_lm", *command.split()[1:]]
    printed = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, env=_plain_environment()).stdout
    return f"```console\n$ {command}\n{printed.rstrip()}\n```\n"


def _plain_environment() -> dict[str, str]:
    return {**os.environ, "NO_COLOR": "1", "COLUMNS": "140"}


def source(clause_id: str) -> str:
    """A clause's own source code."""
    return f"```python\n{inspect.getsource(CLAUSES[clause_id].body).rstrip()}\n```\n"


def table(what: str) -> str:
    """The operators with the numbers of their clauses, and of the faults that these detect."""
    rows = ["| operator | MUST | SHOULD | faults detected |", "|---|---|---|---|"]
    rows += [_row(f"`{name}`", (name,)) for name in OPERATORS]
    return "\n".join([*rows, _row("all", tuple(OPERATORS))]) + "\n"


def _row(name: str, operators: tuple[str, ...]) -> str:
    levels = [clause.level for clause in CLAUSES.values() if clause.operator in operators]
    detected = [bool(row.detected_by) for row in matrix.read().of(operators).faults.values()]
    faults = f"{sum(detected)} of {len(detected)}"
    return f"| {name} | {levels.count('must')} | {levels.count('should')} | {faults} |"


WRITERS: dict[str, Callable[[str], str]] = {"session": session, "source": source, "table": table}
# A marker, and the block or table that follows it.
_PART = re.compile(r"<!-- (session|source|table): (.+?) -->\n(```.*?\n```\n|(?:\|[^\n]*\n)*)", re.DOTALL)


def generated(text: str) -> str:
    """The text with each generated part written anew."""
    return _PART.sub(lambda m: f"<!-- {m[1]}: {m[2]} -->\n{WRITERS[m[1]](m[2])}", text)


if __name__ == "__main__":
    README.write_text(generated(README.read_text(encoding="utf-8")), encoding="utf-8")
