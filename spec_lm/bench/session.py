"""The child process: it measures the ceilings, then every case in short sessions, the order of the variants rotated.

`python -m spec_lm.bench.session PLAN RESULT` reads a plan (`Plan.told`) and writes pytest-benchmark's JSON.
"""

import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import spec_lm
from spec_lm.bench import row as rows
from spec_lm.bench.cases import Case, operations, traffic
from spec_lm.bench.devices import Cpu, Cuda, device_of
from spec_lm.bench.row import Ceiling, Row
from spec_lm.bench.variants import Variant, of_implementation, variant
from spec_lm.conformance import workers
from spec_lm.conformance.implementation import loaded

CEILING = "ceiling"
_OPTIONS = ("--benchmark-quiet", "--benchmark-disable-gc", "-q", "-p", "no:cacheprovider", "--import-mode=importlib")


@dataclass(frozen=True)
class Plan:
    """What a run measures.

    Args:
        work: each case with the variants that are measured in it, by name.
        user: the specs of variants that are not built in.
        device: where.
        sessions: how many, of each case.
        seconds: that a variant may take in a session.
        threads: of torch; its own default where it is None.
    """

    work: tuple[tuple[Case, tuple[str, ...]], ...]
    user: tuple[str, ...] = ()
    device: str = "cpu"
    sessions: int = 5
    seconds: float = 0.05
    threads: int | None = None

    def told(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {**asdict(self), "work": [(case.told(), names) for case, names in self.work]}

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> "Plan":
        """The plan that `told` gave."""
        work = tuple((Case.of(case), tuple(names)) for case, names in told["work"])
        return cls(**{**told, "work": work, "user": tuple(told["user"])})


@dataclass
class Bench:
    """Rows made ready, those of one case at a time."""

    plan: Plan
    device: Cpu | Cuda
    variants: Mapping[str, Variant]
    errors: dict[str, dict[str, str]] = field(default_factory=dict)
    _case: Case | None = None
    _rows: dict[str, Row] = field(default_factory=dict)
    _ceilings: dict[Ceiling, Row] = field(default_factory=dict)

    def row(self, case: Case, name: str) -> Row:
        """The row of a variant in a case; the first time it is built."""
        if case != self._case:
            self._case, self._rows = case, {}
            torch.compiler.reset()  # past a few shapes of one function, nothing more would be compiled
            gc.collect()
        if name not in self._rows:
            self._rows[name] = rows.ready(case, self.variants[name], self.device, self.plan.seconds)
        return self._rows[name]

    def ceiling(self, ceiling: Ceiling) -> Row:
        """The row of a ceiling; the first time it is calibrated."""
        if ceiling not in self._ceilings:
            self._ceilings[ceiling] = ceiling.row(self.device, self.plan.seconds)
        return self._ceilings[ceiling]

    def timed(self) -> Iterator["Timed | TimedCeiling"]:
        """Everything that is timed, in order; the ceilings first, in every session, and once more in the end."""
        dtypes = dict.fromkeys(case.dtype for case, _ in self.plan.work)
        everything = [TimedCeiling(self, each) for each in rows.ceilings(dtypes, self.device)]
        yield from everything
        for case, names in self.plan.work:
            for session in range(self.plan.sessions):
                yield from (TimedCeiling(self, each, case, session) for each in rows.beside(case.dtype, self.device))
                first = session % len(names)
                for name in (*names[first:], *names[:first]):
                    yield Timed(self, case, name, session)
        yield from everything


@dataclass(frozen=True, repr=False)
class Timed:
    """A variant in a case in a session."""

    bench: Bench
    case: Case
    name: str
    session: int

    def __repr__(self) -> str:
        return f"{self.case}; {self.name}; session {self.session}"

    def prepared(self) -> Row:
        """Its row; where it cannot be built, it is skipped, and the reason kept."""
        failed = self.bench.errors.get(str(self.case), {})
        if self.name not in failed:
            try:
                return self.bench.row(self.case, self.name)
            except Exception as error:  # a stranger's code; one row that cannot be built costs no other
                failed = self.bench.errors.setdefault(str(self.case), {})
                failed[self.name] = f"{type(error).__name__}: {error}"
        pytest.skip(failed[self.name])

    def told(self, row: Row) -> dict[str, Any]:
        """What a report needs beside the times."""
        about = {"case": self.case.told(), "variant": self.name, "session": self.session}
        return about | {
            "operations": operations(self.case),
            "bytes": traffic(self.case),
            "compile_seconds": row.compile_seconds,
            "in_cache": row.in_cache,
        }


@dataclass(frozen=True, repr=False)
class TimedCeiling:
    """A limit of the machine, by itself or beside the variants of a case in a session."""

    bench: Bench
    ceiling: Ceiling
    beside: Case | None = None
    session: int = 0

    def __repr__(self) -> str:
        where = f"{self.beside}; session {self.session}; " if self.beside else ""
        return f"{where}{CEILING}: {self.ceiling.kind} {self.ceiling.size}, {self.ceiling.dtype}"

    def prepared(self) -> Row:
        """Its row."""
        return self.bench.ceiling(self.ceiling)

    def told(self, row: Row) -> dict[str, Any]:
        """What one call does, and beside what."""
        about = {CEILING: self.ceiling.kind, "dtype": self.ceiling.dtype, "work": self.ceiling.work}
        return about | ({"beside": self.beside.told(), "session": self.session} if self.beside else {})


class Plugin:
    """What pytest and pytest-benchmark ask."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One item for everything that is timed."""
        if "timed" in metafunc.fixturenames:
            timed = list(self.bench.timed())
            metafunc.parametrize("timed", timed, ids=list(map(str, timed)))

    def pytest_benchmark_update_machine_info(self, config: Any, machine_info: dict[str, Any]) -> None:
        """The device, its threads, and the versions that figures depend on."""
        versions = {"torch": torch.__version__, "spec_lm": spec_lm.__version__}
        machine_info["spec_lm"] = {**self.bench.device.about(), "name": self.bench.device.name, **versions}

    def pytest_benchmark_update_json(self, config: Any, benchmarks: Any, output_json: dict[str, Any]) -> None:
        """Peak memory, and what could not be built."""
        output_json["spec_lm"] = {"memory": memory(self.bench), "errors": self.bench.errors}


def memory(bench: Bench) -> list[dict[str, Any]]:
    """The peak memory of one call, where a case asks for it.

    Only now the process is started that children are forked from: while it imports, it takes a core from what is timed.
    """
    asked = [(case, name) for case, names in bench.plan.work if case.memory for name in names]
    if asked and isinstance(bench.device, Cpu):
        workers.start("spec_lm.bench.variants")
    return [
        {"case": case.told(), "variant": name, "bytes": peak}
        for case, name in asked
        if name not in bench.errors.get(str(case), {}) and (peak := _peak(bench, case, name)) is not None
    ]


def _peak(bench: Bench, case: Case, name: str) -> int | None:
    if isinstance(bench.device, Cuda):
        return bench.device.peak(rows.single_call(case, bench.variants[name]))
    receiver, sender = workers.context().Pipe(duplex=False)
    process: Any = workers.context()
    child = process.Process(target=_peak_in_child, args=(case, bench.variants[name].spec, name, sender))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return None
    finally:
        child.join()


def _peak_in_child(case: Case, spec: str, name: str, sender: Any) -> None:
    """A process that has run nothing else."""
    with ExitStack() as stack:
        device = Cpu()
        device.give_back_memory()
        found = _variants((name,), (spec,), stack)
        sender.send(device.peak(rows.single_call(case, found[name])))


def _variants(names: tuple[str, ...], user: tuple[str, ...], stack: ExitStack) -> dict[str, Variant]:
    """Those built in by name; the user's by what they wrote."""
    found = {spec: of_implementation(stack.enter_context(loaded(spec))) for spec in user if spec in names}
    return found | {name: variant(name) for name in names if name not in found}


def measure(plan: Plan, result: Path) -> int:
    """Measure in this process, and write the result; pytest's exit code."""
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    torch.manual_seed(0)
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        names = tuple(dict.fromkeys(name for _, each in plan.work for name in each))
        bench = Bench(plan, device_of(plan.device), _variants(names, plan.user, stack))
        ini = Path(folder, "pytest.ini")
        ini.write_text("[pytest]\n", encoding="utf-8")
        here = Path(__file__).with_name("rows.py")
        arguments = [str(here), f"--benchmark-json={result}", "-c", str(ini), f"--rootdir={here.parent}", *_OPTIONS]
        return int(pytest.main(arguments, plugins=[Plugin(bench)]))


def environment() -> dict[str, str]:
    """Of the child: no settings of the user's own pytest reach it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return kept | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_benchmark.plugin"}


if __name__ == "__main__":
    raise SystemExit(measure(Plan.of(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), Path(sys.argv[2])))
