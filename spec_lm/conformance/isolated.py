"""`check(isolate=True)`: the command line in a process of its own, and its report's lines as they come."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spec_lm.conformance.implementation import ImplementationError, is_pair
from spec_lm.conformance.report import Outcome, Report, ReportError, Tail, UserError, outcome_from, read_reports
from spec_lm.conformance.waivers import Waiver, toml_of

_POLL = 0.05
_TO_END = 20.0  # seconds, for the command line to end its own processes


def check_isolated(
    implementation: Any,
    options: Mapping[str, Any],
    waivers: Mapping[str, Waiver],
    on_start: Callable[[dict[str, Any]], None],
    on_outcome: Callable[[Outcome], None],
) -> Report:
    """The report of `spec-lm check` on an implementation.

    Args:
        implementation: as text: a path, a module name or pairs.
        options: of the command, by name; those that are None or empty are left out.
        waivers: by clause id; what a project's own file declares is left aside, as `check` leaves it.
        on_start: called with the report's header before the first clause runs.
        on_outcome: called with each outcome as it comes.

    Raises:
        UserError: the implementation is no text.
        ImplementationError: it cannot be loaded, or the command line ended without a report.
    """
    arguments = [*_flags(options), "--", *_as_text(implementation)]
    with tempfile.TemporaryDirectory(prefix="spec_lm-") as folder:
        path, said = Path(folder, "report.jsonl"), Path(folder, "said")
        declared = Path(folder, "spec-lm.toml")
        declared.write_text(toml_of(waivers), encoding="utf-8")
        files = ["--report", str(path), "--config", str(declared)]
        command = [sys.executable, "-P", "-m", "spec_lm", "check", "--quiet", *files, *arguments]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path)}
        nothing = subprocess.DEVNULL
        with open(said, "w", encoding="utf-8") as errors:
            process = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=errors, env=environment)
        try:
            for line in _lines(Tail(path), process):
                if line["kind"] == "header":
                    on_start({name: value for name, value in line.items() if name != "kind"})
                elif line["kind"] == "outcome":
                    on_outcome(outcome_from(line))
        finally:
            _end(process)
        try:
            return read_reports(path)[0]
        except (ReportError, IndexError):
            why = said.read_text(encoding="utf-8", errors="replace").strip().removeprefix("spec-lm: ")
            raise ImplementationError(why or f"the check ended with exit code {process.returncode}") from None


def _as_text(implementation: Any) -> Sequence[str]:
    if isinstance(implementation, str):
        return implementation.split() if is_pair(implementation) else [implementation]
    if isinstance(implementation, Path):
        return [str(implementation)]
    if isinstance(implementation, list | tuple):
        return [str(pair) for pair in implementation]
    raise UserError(
        f"a {type(implementation).__name__} lives in this process alone and cannot be checked in another; "
        "give it as text (a path, a module, operator=module:function), or leave isolate out"
    )


def _flags(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            value = [f"{key}={item if isinstance(item, str) else json.dumps(item)}" for key, item in value.items()]
        for each in value if isinstance(value, list | tuple) else [value]:
            if each is not None:
                yield f"--{name}={each}"


def _lines(report: Tail, process: subprocess.Popen) -> Iterator[dict[str, Any]]:
    """The lines of a report while a process writes it, and those that are there at its end."""
    while process.poll() is None:
        yield from report.lines()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL)
    yield from report.lines()


def _end(process: subprocess.Popen) -> None:
    """Where it has not ended, ask it to, and then make it."""
    process.terminate()
    try:
        process.wait(_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
