"""`check` in child processes, one an operator: what strangers' code does to its process costs no other operator.

Each child is forked from a process that has imported torch and the specification and has run nothing (where there is no
fork, it is a new process).
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from typing import Any, cast

from pebble import ProcessExpired, concurrent

from spec_lm.conformance.report import Outcome, Report

MOST_JOBS = 4


def start() -> None:
    """Begin to import torch and the specification, in the process that children are forked from."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the oracle's matrices are tiny; children inherit this
    if _forks():
        _context().set_forkserver_preload(["spec_lm.conformance.preload"])  # type: ignore[attr-defined]
        forkserver.ensure_running()


def default_jobs() -> int:
    """As many as there are cores, at most four."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, MOST_JOBS)


def _forks() -> bool:
    return "forkserver" in multiprocessing.get_all_start_methods() and sys.platform == "linux"


def _context() -> BaseContext:
    return multiprocessing.get_context("forkserver" if _forks() else "spawn")


@dataclass(frozen=True)
class Job:
    """The clauses of one operator of one implementation; with no operator, its header alone."""

    implementation: Any
    settings: Any
    level: str
    operator: str = ""
    clauses: tuple[str, ...] = ()

    def run(self) -> tuple[dict[str, Any], list[Outcome]]:
        """The header, and the outcomes in their order."""
        keep_to_itself(silent=bool(self.operator))
        from spec_lm.conformance.clause import CLAUSES
        from spec_lm.conformance.implementation import loaded
        from spec_lm.conformance.runner import header_of, preserved, run_operator

        outcomes: list[Outcome] = []
        with preserved(self.settings.seed), loaded(self.implementation) as subject:
            settings = self.settings.declared_by(subject)
            header = header_of(subject, settings, self.level)
            if self.operator:
                chosen = [CLAUSES[clause_id] for clause_id in self.clauses]
                run_operator(self.operator, chosen, subject, settings, outcomes.append)
        return header, outcomes


def keep_to_itself(silent: bool) -> None:
    """What the process prints, below Python too, does not reach the parent's stdout; an interrupt is the parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere if silent else 2, 1)
    if silent:
        os.dup2(nowhere, 2)
    os.close(nowhere)


def check_in_workers(
    implementation: Any,
    *,
    jobs: int,
    operators: Iterable[str] | None = None,
    clauses: Iterable[str] | None = None,
    level: str = "must",
    examples: int = 50,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
    conventions: Mapping[str, str] | None = None,
    supports: Mapping[str, Any] | None = None,
    waive: Mapping[str, Any] | None = None,
    require: Iterable[str] = (),
    shard: str = "",
    on_start: Callable[[dict[str, Any]], None] = lambda header: None,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> Report:
    """`runner.check` with each operator in a process of its own, `jobs` at a time; the report is the same.

    Args:
        implementation: as text: a path, a module name or pairs. A live object cannot be sent to another process.
        jobs: how many operators are checked at a time; the other arguments are `runner.check`'s.

    Raises:
        ImplementationError: the implementation cannot be loaded.
        UsageError: an unknown operator, clause, level, dtype or device.
    """
    from spec_lm.conformance.diagnosis import diagnose
    from spec_lm.conformance.runner import Settings, by_operator, required_of, select, sharded
    from spec_lm.conformance.waivers import waivers_of

    settings = Settings(
        examples, seed, dtype, device, conventions or {}, supports or {}, waivers=waivers_of(waive or {})
    )
    chosen = select(operators, clauses, level)
    required = required_of(require, chosen)
    chosen, about = sharded(chosen, shard)
    header, _ = launch(Job(implementation, settings, level)).result()
    header |= about | {"required": list(required)}
    on_start(header)
    outcomes: list[Outcome] = []
    groups = by_operator(chosen)
    work = [Job(implementation, settings, level, name, tuple(c.id for c in group)) for name, group in groups.items()]
    for outcome in _in_order(work, jobs):
        outcomes.append(outcome)
        on_outcome(outcome)
    return Report(header, tuple(outcomes), required, diagnosis=diagnose(outcomes))


def launch(job: Any) -> Future:
    """Begin `job.run()` in a child process."""
    in_child = cast(Any, concurrent.process)(context=_context(), daemon=True)
    return in_child(job.run)()


def _in_order(work: list[Job], jobs: int) -> Iterator[Outcome]:
    """The outcomes in the order of the work, whatever ends first.

    One slot works from the front, so that the first outcomes come soon; the others from the back, where the long ones
    are, so that none is left for the end.
    """
    waiting, running, done = list(work), dict[Future, Job](), dict[str, list[Outcome]]()
    front: Future | None = None
    try:
        for job in work:
            while job.operator not in done:
                while waiting and len(running) < jobs:
                    takes_front = front not in running
                    launched = waiting.pop(0 if takes_front else -1)
                    future = launch(launched)
                    running[future] = launched
                    front = future if takes_front else front
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    ended = running.pop(future)
                    done[ended.operator] = _outcomes(ended, future)
            yield from done[job.operator]
    finally:
        for future in running:
            future.cancel()


def _outcomes(job: Job, future: Future) -> list[Outcome]:
    try:
        return future.result()[1]
    except ProcessExpired as death:
        why = f"its process ended with exit code {death.exitcode}"
    except (KeyboardInterrupt, SystemExit) as raised:  # by the implementation: the child itself is not interrupted
        why = f"it raised {type(raised).__name__} outside a call"
    from spec_lm.conformance.runner import known_clause, outcome_of

    return [outcome_of(known_clause(clause_id), "error", why) for clause_id in job.clauses]
