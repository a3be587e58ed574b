"""What a child process does: it runs clauses, and writes what they come to into a file, a line at a time."""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_lm.conformance.report import UserError, outcome_line, write_lines

if TYPE_CHECKING:
    from spec_lm.conformance.runner import Known

LINES, PRINTED = "lines.jsonl", "printed"  # the files in a job's folder


@dataclass(frozen=True)
class Job:
    """Clauses to run on an implementation, in a process of their own.

    Args:
        implementation: as text.
        settings: of the run.
        level: of the run, for the header.
        folder: where its lines and what it prints go.
        clauses: their ids in order, those of one operator together.
        memory: how many bytes it may take beside what it begins with; None for no limit.
        known: what earlier clauses of its first operator have shown.
    """

    implementation: Any
    settings: Any
    level: str
    folder: Path
    clauses: tuple[str, ...] = ()
    memory: int | None = None
    known: "Known | None" = None

    def run(self) -> None:
        """Write the header and every outcome, a line each as it comes, and end the process."""
        code = 1
        try:
            if self.folder.is_dir():  # else the parent is gone
                self._keep_to_itself()
                with open(self.folder / LINES, "a", encoding="utf-8") as file:
                    write_lines(file, [{"kind": "process", "parent": os.getppid()}])
                    self._run(lambda line: write_lines(file, [line]))
                    write_lines(file, [{"kind": "end"}])
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)  # without a wait for threads, or a word from what was registered for the end

    def _keep_to_itself(self) -> None:
        temporary = self.folder / "tmp"  # so that the folder around it, if it is removed, is no other's
        temporary.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
        if hasattr(os, "setsid"):
            with contextlib.suppress(PermissionError):  # it leads a group already
                os.setsid()
            _end_with_parent()
        keep_to_itself(self.folder / PRINTED)
        if sys.platform == "linux":
            _limit(self.memory)

    def _run(self, write: Callable[[dict[str, Any]], None]) -> None:
        from spec_lm.conformance.clause import CLAUSES
        from spec_lm.conformance.implementation import loaded
        from spec_lm.conformance.runner import Known, OperatorRun, header_of, preserved

        known = self.known or Known()
        try:
            with preserved(self.settings.seed), loaded(self.implementation) as subject:
                settings = self.settings.declared_by(subject)
                write({"kind": "header", **header_of(subject, settings, self.level)})
                for operator, ids in groupby(self.clauses, operator_of):
                    run = None
                    for clause_id in ids:
                        write({"kind": "begins", "clause": clause_id})
                        if run is None:  # it makes a call, which counts as the first clause's
                            provided = subject.functions.get(operator), settings, subject.origins.get(operator)
                            run, known = OperatorRun(operator, *provided, known), Known()
                        outcome = run.outcome(
                            CLAUSES[clause_id], lambda found: write({**outcome_line(found), "kind": "found"})
                        )
                        write({**outcome_line(outcome), "without": run.known.without, "lost": run.known.lost})
        except UserError as error:
            write({"kind": "unloadable", "message": str(error)})


def keep_to_itself(printed: Path | str = os.devnull) -> None:
    """An interrupt is the parent's; there is nothing to read; and what is printed, below Python too, goes to a file."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, target in enumerate((nothing, file, file)):
        os.dup2(target, number)
    os.close(nothing)
    os.close(file)


def _end_with_parent() -> None:
    """Where the parent is gone without a word, so is this group of processes."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        with contextlib.suppress(OSError, ValueError):  # the implementation closed what is waited for
            connection.wait([parent.sentinel])  # type: ignore[union-attr]
            os.killpg(0, signal.SIGKILL)

    if parent is not None:
        threading.Thread(target=watch, daemon=True).start()


def _limit(memory: int | None) -> None:
    """A limit of memory, if any; and where the system has none left, it is this process that ends."""
    import resource

    with contextlib.suppress(OSError):  # a container may forbid it
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    if memory is not None:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit, most = pages * resource.getpagesize() + memory, resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def operator_of(clause_id: str) -> str:
    """The operator that a clause is about, by the clause's id."""
    return clause_id.partition(".")[0]
