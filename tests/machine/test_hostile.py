"""Whatever an implementation does, the run ends, every other operator has its verdict, and no process is left."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from spec_lm.conformance.operators import OPERATORS
from spec_lm.conformance.report import Report, outcome_line
from spec_lm.conformance.workers import check_in_workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is left is looked for in /proc")

GOOD = """
import itertools, multiprocessing, os, random, signal, subprocess, sys, threading, time, warnings
import numpy as np
import torch
from spec_lm.reference.functional import *

CALLS = itertools.count()

class Mine(torch.Tensor): ...

class Unspeakable(Exception):
    def __str__(self):
        raise ValueError

def left(pid):
    with open({pids!r}, "a") as file:
        file.write(f"{pid}\\n")
"""


@dataclass(frozen=True)
class Case:
    """What an operator does before, or instead of, what it should; and what its clause comes to."""

    does: str
    outcome: str
    message: str = ""

    def text(self, operator: str) -> str:
        """The operator that does it."""
        body = self.does.replace("GOOD", f"good_{operator}(*a)").replace("AGAIN", f"{operator}(*a)")
        return f"good_{operator} = {operator}\ndef {operator}(*a):\n    {body}\n"


ENDING = {
    "never returns": Case("while True: pass", "error", "took longer than the time-out of 3 s"),
    "sleeps and ignores signals": Case(
        "[signal.signal(s, signal.SIG_IGN) for s in (1, 2, 10, 14, 15)]; time.sleep(1000)",
        "error",
        "longer than the time-out of 3 s",
    ),
    "exits at once": Case("os._exit(0)", "error", "exit code 0"),
    "exits from a timer": Case(
        "threading.Timer(0.1, os._exit, (7,)).start(); time.sleep(1); return GOOD", "error", "exit code 7"
    ),
    "aborts": Case("os.abort()", "error", "SIGABRT"),
    "reads memory that is not its own": Case("os.kill(os.getpid(), signal.SIGSEGV)", "error", "SIGSEGV"),
    "kills its group": Case("os.killpg(0, signal.SIGKILL)", "error", "SIGKILL"),
    "sets an interval timer": Case("signal.setitimer(signal.ITIMER_REAL, 0.1); time.sleep(1)", "error", "SIGALRM"),
    "closes every file": Case("os.closerange(0, 256); return GOOD", "error", "exit code 1"),
    "takes all memory": Case("kept = [torch.empty(2**26) for _ in range(2**20)]", "error", "ran out of memory"),
    "leaves processes": Case(
        "left(subprocess.Popen(['sleep', '1000']).pid)\n"
        "    left(subprocess.Popen(['sleep', '1000'], env={}, start_new_session=True, stdout=-3, stderr=-3).pid)\n"
        "    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
        "            left(os.getpid()); os.closerange(0, 256); time.sleep(1000)\n        os._exit(0)\n    return GOOD",
        "holds",
    ),
}
OTHER = {
    "raises SystemExit": Case("raise SystemExit(0)", "fails", "raised SystemExit"),
    "raises KeyboardInterrupt": Case("raise KeyboardInterrupt", "fails", "raised KeyboardInterrupt"),
    "raises BaseException": Case("raise BaseException('no')", "fails", "raised BaseException: no"),
    "raises what cannot be printed": Case("raise Unspeakable", "fails", "its text cannot be read"),
    "recurses without end": Case("return AGAIN", "fails", "raised RecursionError"),
    "prints megabytes": Case("print('loud' * 10**6); os.write(2, b'loud' * 10**6); return GOOD", "holds"),
    "reads its input": Case("sys.stdin.read(); os.read(0, 1); input()", "fails", "raised EOFError"),
    "leaves a thread": Case("threading.Thread(target=time.sleep, args=(1000,)).start(); return GOOD", "holds"),
    "comes back from a fork twice": Case("os.fork(); return GOOD", "holds"),
    "has processes of its own": Case(
        "own = multiprocessing.get_context('fork').Process(target=int); own.start(); own.join(); return GOOD", "holds"
    ),
    "is not there": Case("return None", "absent"),
    "returns None later": Case("return None if next(CALLS) else GOOD", "fails", "returned None"),
    "returns a tuple": Case("return (GOOD,)", "fails", "returned a builtins.tuple"),
    "returns NumPy": Case("return GOOD.numpy()", "fails", "returned a numpy.ndarray"),
    "returns a list": Case("return [GOOD]", "fails", "returned a builtins.list"),
    "returns a scalar": Case("return 0.5", "fails", "returned a builtins.float"),
    "returns a view of its input": Case("return a[0].view(-1)", "fails", "returned"),
    "returns another shape": Case("return GOOD[None]", "fails", "returned shape"),
    "returns another dtype": Case("return GOOD.double()", "fails", "returned torch.float64"),
    "returns another device": Case("return GOOD.to('meta')", "fails", "returned a tensor on meta"),
    "returns what requires grad": Case("return GOOD.requires_grad_()", "holds"),
    "returns a subclass": Case("return GOOD.as_subclass(Mine)", "holds"),
    "changes the default dtype": Case("torch.set_default_dtype(torch.float64); return GOOD", "holds"),
    "changes grad mode": Case("torch.set_grad_enabled(False); return GOOD", "holds"),
    "changes threads": Case("torch.set_num_threads(2); return GOOD", "holds"),
    "changes generators": Case("torch.manual_seed(1); random.seed(1); np.random.seed(1); return GOOD", "holds"),
    "changes flags": Case("torch.use_deterministic_algorithms(True); return GOOD", "holds"),
    "changes warnings": Case("warnings.simplefilter('error'); return GOOD", "holds"),
    "changes the environment": Case("os.environ.clear(); os.chdir('/'); sys.path.clear(); return GOOD", "holds"),
    "patches torch": Case("result = GOOD; torch.softmax = torch.nn.functional.linear = None; return result", "holds"),
    "differs from call to call": Case("return GOOD + (next(CALLS) % 3 == 1)", "fails", "nondeterministic"),
    "differs with the time": Case("return GOOD + 1 + time.perf_counter_ns() % 100", "fails"),
    "differs at random": Case("return GOOD + 1 + random.random()", "fails"),
    "forges a line of its process": Case(
        "folder = os.path.dirname(os.environ['TMPDIR'])\n"
        "    open(folder + '/lines.jsonl', 'a').write('{\"kind\": \"process\", \"parent\": 1}\\n'); return GOOD",
        "holds",
    ),
    "removes the folder of its lines": Case(
        "__import__('shutil').rmtree(os.path.dirname(os.environ['TMPDIR'])); return GOOD", "error", "exit code 0"
    ),
}
SOFTMAX, *HOSTILE = OPERATORS
BATCHES = {
    "together": list(ENDING.items()),
    **{f"{start}": list(OTHER.items())[start : start + len(HOSTILE)] for start in range(0, len(OTHER), len(HOSTILE))},
}
PLACES = {name: (batch, number) for batch, cases in BATCHES.items() for number, (name, _) in enumerate(cases)}


def check(path: Path, operators: list[str]) -> Report:
    clauses = ["softmax.any_dim", "softmax.sums_to_one", *(f"{name}.agrees_with_the_oracle" for name in operators)]
    return check_in_workers(str(path), jobs=2, clauses=clauses, examples=3, timeout=3, memory=1)


def written(folder: Path, cases: list[Case]) -> Path:
    """An implementation whose operators, softmax apart, do this."""
    text = GOOD.replace("{pids!r}", repr(str(folder / "pids")))
    path = folder / "adapters.py"
    path.write_text(text + "".join(case.text(operator) for case, operator in zip(cases, HOSTILE, strict=False)))
    return path


def of_softmax(report: Report) -> list[dict]:
    return [outcome_line(outcome) | {"seconds": 0} for outcome in report if outcome.operator == SOFTMAX]


def left_over(folder: Path) -> list[str]:
    """What still runs of the processes that were started and named."""
    found = []
    for pid in (folder / "pids").read_text().split() if (folder / "pids").exists() else ():
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists() and " Z " not in stat.read_text():
            found.append(stat.read_text())
    return found


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> list[dict]:
    """What softmax comes to where every operator is good."""
    return of_softmax(check(written(tmp_path_factory.mktemp("good"), []), ["silu", "linear"]))


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The report on a batch, and the folder of its implementation; each batch is run once."""
    known: dict[str, tuple[Report, Path]] = {}

    def report(batch: str) -> tuple[Report, Path]:
        if batch not in known:
            folder = tmp_path_factory.mktemp("hostile")
            cases = [case for _, case in BATCHES[batch]]
            known[batch] = check(written(folder, cases), HOSTILE[: len(cases)]), folder
        return known[batch]

    return report


@pytest.mark.parametrize("name", PLACES)
def test_what_an_operator_does_is_told(reports, name):
    batch, number = PLACES[name]
    report, _ = reports(batch)
    outcome, case = report[f"{HOSTILE[number]}.agrees_with_the_oracle"], BATCHES[batch][number][1]
    assert (outcome.outcome, case.message in outcome.message) == (case.outcome, True), outcome


@pytest.mark.parametrize("batch", BATCHES)
def test_all_together_cost_no_other_operator_its_verdict_and_leave_no_process(reports, good, batch):
    report, folder = reports(batch)
    assert of_softmax(report) == good
    assert left_over(folder) == []


@pytest.mark.parametrize("name", ENDING)
def test_alone_it_costs_no_other_operator_its_verdict_and_leaves_no_process(tmp_path, good, name):
    report = check(written(tmp_path, [ENDING[name]]), ["silu"])
    assert of_softmax(report) == good
    assert report["silu.agrees_with_the_oracle"].outcome == ENDING[name].outcome
    assert left_over(tmp_path) == []


def test_the_test_of_what_is_left_can_fail(tmp_path):
    (tmp_path / "pids").write_text(str(os.getpid()))
    assert left_over(tmp_path) != []
