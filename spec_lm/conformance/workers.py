"""`check` in child processes, one an operator: what strangers' code does to its process costs no other operator.

Each child is forked from a process that has imported torch and the specification and has run nothing (where there is no
fork, one new process serves all operators). It leads a group of processes of its own, has nothing to read, prints into
a file, and appends what it comes to, a line at a time, to another. The parent reads the lines; when the child has come
to its end, died, or taken too long, it ends the child and whatever that has started; and where clauses of an operator
are left it starts one more. Nothing is unpickled from a child.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from multiprocessing import connection, forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from spec_lm.conformance.job import LINES, PRINTED, Job, operator_of
from spec_lm.conformance.report import Outcome, Report, Tail, UserError, outcome_from, printable

if TYPE_CHECKING:
    from spec_lm.conformance.clause import Clause
    from spec_lm.conformance.runner import Known

MOST_JOBS = 4
TIMEOUT = 60.0
_TO_START = 120.0  # seconds, for torch to be imported on a busy machine
_TO_DIE = 5.0  # seconds, for the system to end what was killed
_POLL = 0.02
_MOST_PRINTED = 2**20
# An index outside a table ends the context of a device, and with it every later call in that process.
ENDS_A_CONTEXT = (
    "ids_outside_are_refused",
    "negative_ids_are_refused",
    "id_outside_the_vocabulary_is_refused",
    "over_long_input_is_refused",
    "refuses_a_position_outside_max_seq_len",
    "refuses_a_sequence_over_max_seq_len",
)


def start(*modules: str) -> None:
    """Begin to import torch and the specification, and then modules, in the process that children are forked from."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the oracle's matrices are tiny; children inherit this
    if _forks():
        context().set_forkserver_preload(["spec_lm.conformance.preload", *modules])  # type: ignore[attr-defined]
        forkserver.ensure_running()


def default_jobs() -> int:
    """As many as there are cores, at most four."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, MOST_JOBS)


def context() -> BaseContext:
    """What children are started with."""
    return multiprocessing.get_context("forkserver" if _forks() else "spawn")


def _forks() -> bool:
    return "forkserver" in multiprocessing.get_all_start_methods() and sys.platform == "linux"


def check_in_workers(
    implementation: Any,
    *,
    jobs: int,
    timeout: float = TIMEOUT,
    memory: float | None = None,
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
        jobs: how many operators are checked at a time.
        timeout: seconds a clause may take, and loading the implementation.
        memory: GiB that a process may take beside what torch takes; None for no limit.
        operators: these and all others are `runner.check`'s.

    Raises:
        ImplementationError: the implementation cannot be loaded.
        UsageError: an unknown operator, clause, level, dtype or device.
        UserError: there is no folder for temporary files.
    """
    from spec_lm.conformance.diagnosis import diagnose
    from spec_lm.conformance.runner import Settings, required_of, select, sharded
    from spec_lm.conformance.waivers import waivers_of

    declared, waivers = (conventions or {}, supports or {}), waivers_of(waive or {})
    settings = Settings(examples, seed, dtype, device, *declared, waivers=waivers, timeout=timeout)
    chosen = select(operators, clauses, level)
    required = required_of(require, chosen)
    chosen, about = sharded(chosen, shard)
    outcomes: list[Outcome] = []
    header: dict[str, Any] = {}

    def begin(loaded: dict[str, Any]) -> None:
        header.update(loaded | about | {"required": list(required)})
        on_start(header)

    def emit(outcome: Outcome) -> None:
        outcomes.append(outcome)
        on_outcome(outcome)

    with _temporary_folder() as folder:
        template = Job(implementation, settings, level, folder, memory=None if memory is None else int(memory * 2**30))
        pool = _Pool([_Worker(template, batches) for batches in batches_of(chosen, device)], jobs, begin)
        try:
            with contextlib.closing(pool.outcomes()) as coming:
                for outcome in coming:
                    emit(outcome)
        except KeyboardInterrupt:
            for outcome in pool.known():
                emit(outcome)
            raise
    return Report(header, tuple(outcomes), required, diagnosis=diagnose(outcomes))


def batches_of(clauses: list["Clause"], device: str) -> list[list[tuple[str, ...]]]:
    """The ids of the clauses as processes take them: for each worker its batches, each a process's, in turn.

    A worker takes an operator; where there is no fork, all of them. Not on the CPU, a clause that may end the device's
    context comes last, in a process of its own.
    """
    from spec_lm.conformance.runner import by_operator, in_order

    groups = [tuple(clause.id for clause in in_order(group)) for group in by_operator(clauses).values()]
    return [_batches(group, device) for group in (groups if _forks() else [tuple(chain(*groups))])]


def _batches(ids: tuple[str, ...], device: str) -> list[tuple[str, ...]]:
    alone = [each for each in ids if device != "cpu" and each.partition(".")[2] in ENDS_A_CONTEXT]
    together = tuple(each for each in ids if each not in alone)
    return [batch for batch in (together, *((each,) for each in alone)) if batch]


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    try:
        folder = tempfile.TemporaryDirectory(prefix="spec_lm-", ignore_cleanup_errors=True)
    except OSError as error:
        raise UserError(f"cannot write temporary files: {error}; set TMPDIR to a folder with room") from error
    with folder as name:
        yield Path(name)


class _Pool:
    """Workers, some at a time.

    Args:
        workers: in the order in which their outcomes are wanted.
        jobs: how many run at a time.
        on_header: told the report's header, once it is known.
    """

    def __init__(self, workers: list["_Worker"], jobs: int, on_header: Callable[[dict[str, Any]], None]) -> None:
        self.workers, self.jobs, self.on_header = workers, jobs, on_header
        self._waiting, self._running = list(workers), list[_Worker]()
        self._front: _Worker | None = None
        self._is_loaded = False

    def outcomes(self) -> Generator[Outcome]:
        """The outcomes in the order of the workers, each as soon as it and all before it are there."""
        try:
            for worker in self.workers:
                while not worker.done:
                    self._step()
                    yield from worker.take()
                yield from worker.take()
        finally:
            with _uninterrupted():
                for worker in self.workers:
                    worker.end()

    def known(self) -> Iterator[Outcome]:
        """The outcomes that are there and were not asked for in turn."""
        for worker in self.workers if self._is_loaded else ():
            yield from worker.take()

    def _step(self) -> None:
        """Let everything that runs come a little further.

        One slot works from the front, so that the first outcomes come soon; the others from the back, where the long
        ones are, so that none is left for the end.
        """
        while self._waiting and len(self._running) < self.jobs:
            takes_front = self._front not in self._running
            self._running.append(self._waiting.pop(0 if takes_front else -1))
            self._front = self._running[-1] if takes_front else self._front
            self._running[-1].begin()
        connection.wait([worker.sentinel for worker in self._running], timeout=_POLL)
        for worker in self._running:
            worker.step()
            if not self._is_loaded:
                self._load(worker)
        self._running = [worker for worker in self._running if not worker.done]

    def _load(self, worker: "_Worker") -> None:
        if worker.header is not None:
            self._is_loaded = True
            self.on_header(worker.header)
        elif worker.unloadable:
            from spec_lm.conformance.implementation import ImplementationError

            raise ImplementationError(worker.unloadable)


class _Worker:
    """A group of clauses and the processes that run it, one after the other.

    Args:
        template: what all jobs share.
        batches: the ids of the clauses, each batch for a process; of one operator they stand together.
    """

    def __init__(self, template: Job, batches: list[tuple[str, ...]]) -> None:
        self.header: dict[str, Any] | None = None
        self.unloadable = ""
        self._template, self._batches = template, batches
        self._child: _Child | None = None
        self._outcomes: list[Outcome] = []
        self._begun, self._found = "", cast("Outcome | None", None)
        self._known: dict[str, Known] = {}
        self._deaths: Counter[str] = Counter()

    @property
    def done(self) -> bool:
        """Whether every clause has its outcome."""
        return not self._batches

    @property
    def sentinel(self) -> int:
        """What becomes ready when the process ends."""
        return cast(_Child, self._child).process.sentinel

    def take(self) -> list[Outcome]:
        """The outcomes that came since it was last asked."""
        taken, self._outcomes = self._outcomes, []
        return taken

    def begin(self) -> None:
        """Start a process for the first of the batches that are left."""
        self._template.folder.mkdir(parents=True, exist_ok=True)  # whoever runs there may have removed it
        folder = Path(tempfile.mkdtemp(dir=self._template.folder))
        self._begun, self._found = "", None
        batch, known = self._batches[0], self._known.get(operator_of(self._next))
        self._child = _Child(replace(self._template, folder=folder, clauses=batch, known=known))

    def step(self) -> None:
        """Take in what the process wrote; where it has ended or takes too long, see to what is left."""
        child = cast(_Child, self._child)
        alive = child.process.is_alive()  # asked first: what it wrote before its end is there
        self._read(child)
        if child.has_ended or not alive:
            self._gone(child, "" if child.has_ended else child.death())
        elif child.is_late(self._template.settings.timeout):
            self._gone(child, _too_long(self._template.settings.timeout))

    def end(self) -> None:
        """End its process, whatever that does; what it wrote before counts."""
        if self._child is not None:
            self._child.end()
            self._read(self._child)
            self._child = None

    def _read(self, child: "_Child") -> None:
        for line in child.lines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # it is none of ours
                self._take_in(line)

    def _take_in(self, line: dict[str, Any]) -> None:
        kind = line.pop("kind")
        if kind == "header":
            self.header = line
        elif kind == "unloadable":
            self.unloadable = str(line["message"])
        elif kind == "begins":
            self._begun = line["clause"]
        elif kind == "found":
            self._found = self._found or outcome_from(line)
        elif kind == "outcome" and self._batches and line["clause"] == self._next:
            from spec_lm.conformance.runner import Known

            outcome = outcome_from(line)
            self._known[outcome.operator] = Known(tuple(line["without"]), line["lost"])
            self._came_to(outcome)

    @property
    def _next(self) -> str:
        """The first clause that has no outcome yet."""
        return self._batches[0][0]

    def _came_to(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._begun, self._found = "", None
        self._batches = [ids for ids in (self._batches[0][1:], *self._batches[1:]) if ids]

    def _gone(self, child: "_Child", why: str) -> None:
        """The process has come to its end, or why it has not; go on where clauses are left."""
        batch = child.job.clauses
        self.end()
        if not self._batches:
            return
        if self._next in batch:
            self._died(why or self.unloadable or "it ended early")
        if self._batches:
            self.begin()

    def _died(self, why: str) -> None:
        """The clause that was running has its outcome; after a second death within its operator, so have the others."""
        if self.header is None and not self.unloadable:
            name = printable(str(self._template.implementation))
            self.unloadable = f"{name} cannot be imported: {why}; try to import it in a Python of its own"
        operator = operator_of(self._next)
        self._deaths[operator] += 1
        if self._begun == self._next:
            self._came_to(_cut_short(self._next, self._found, why))
        if self._deaths[operator] > 1:
            while self._batches and operator_of(self._next) == operator:
                self._came_to(_cut_short(self._next, None, f"not run: its process ended twice; the last time {why}"))


class _Child:
    """A process that runs a job, and what it has written."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.has_ended = False
        self.process = cast(Any, context()).Process(target=job.run)
        self._written = Tail(job.folder / LINES)
        self._is_running = False
        self._is_forked, self._server = _forks(), cast("int | None", None)
        self._since = time.monotonic()
        with _without_main():
            self.process.start()

    def lines(self) -> Iterator[dict[str, Any]]:
        """The lines that it has written since it was last asked."""
        for line in self._written.lines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # it is none of ours
                self._note(line)
                yield line
        self._cap_what_it_prints()

    def _note(self, line: dict[str, Any]) -> None:
        kind = line.get("kind")
        if kind == "process" and not self._is_running:  # a second such line is none of ours
            self._is_running, self._server = True, int(line["parent"]) if self._is_forked else None
        self.has_ended = self.has_ended or kind == "end"
        if kind != "found":  # what was found leaves its clause no more time
            self._since = time.monotonic()

    def is_late(self, timeout: float) -> bool:
        """Whether what it does now takes too long: to begin, to load the implementation, or a clause.

        It ends a clause itself when its time is up, between two calls; that which has begun is given a little more.
        """
        more = max(1.0, timeout / 4) if self._is_running else _TO_START
        return time.monotonic() - self._since > timeout + more

    def death(self) -> str:
        """How a process that is gone has ended, with the last of what it printed."""
        code = self.process.exitcode
        how = signal.Signals(-code).name if -code in set(signal.Signals) else f"exit code {code}"
        printed = self._last_printed()
        return f"its process ended with {how}" + (f"; the last it printed: {printed}" if printed else "")

    def _last_printed(self, longest: int = 300) -> str:
        with contextlib.suppress(OSError), open(self.job.folder / PRINTED, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4 * longest))
            text = file.read().decode("utf-8", "replace")
            return printable(" ".join(text.split()))[-longest:]
        return ""

    def _cap_what_it_prints(self) -> None:
        """It appends, so that nothing changes for it where all of it is thrown away."""
        with contextlib.suppress(OSError):
            if os.stat(self.job.folder / PRINTED).st_size > _MOST_PRINTED:
                os.truncate(self.job.folder / PRINTED, 0)

    def end(self) -> None:
        """Kill it, its group, and whatever it has started."""
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it leads none yet, or none is left
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join(_TO_DIE)
        while self._server is not None and (strays := _strays(self._server)):
            for pid in strays:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL)


def _strays(server: int) -> list[int]:
    """What is below the process that children are forked from, and below no child that runs: it inherits what children
    leave behind."""
    parents = dict(_parents())
    if parents.get(server) != os.getpid():
        return []
    children = {process.pid for process in multiprocessing.active_children()}
    strays = []
    for pid in parents:
        above = [pid]
        while above[-1] in parents and above[-1] != server:
            above.append(parents[above[-1]])
        if above[-1] == server and len(above) > 1 and above[-2] not in children:
            strays.append(pid)
    return strays


def _parents() -> Iterator[tuple[int, int]]:
    """Every process and its parent; what has ended and waits to be noticed is none."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            state, parent = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                yield int(folder.name), int(parent)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """A second interrupt does not keep from being ended what the first one asked to end."""
    if threading.current_thread() is not threading.main_thread():  # it takes no interrupts
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """A child has no use for the program that runs here, and does not import it."""
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _cut_short(clause_id: str, found: Outcome | None, why: str) -> Outcome:
    from spec_lm.conformance.runner import cut_short, known_clause

    return cut_short(known_clause(clause_id), found, why)


def _too_long(timeout: float) -> str:
    from spec_lm.conformance.runner import too_long

    return too_long(timeout)
