"""Each operator has a process of its own: what becomes of it is told, and the report is that of one process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import spec_lm
from spec_lm.conformance import workers
from spec_lm.conformance.clause import CLAUSES
from spec_lm.conformance.implementation import ImplementationError
from spec_lm.conformance.report import UserError, outcome_line
from spec_lm.conformance.workers import batches_of, check_in_workers

SILU = "silu.agrees_with_the_oracle"
CHOSEN = ["softmax.sums_to_one", "softmax.any_dim", SILU, "linear.no_bias"]
GOOD = """
import itertools, os, time
import torch
from torch.nn.functional import linear, silu
softmax, good_silu = torch.softmax, silu
CALLS = itertools.count()
"""
# Wrong in values, in a feature, and from call to call; and one operator that is not there.
WRONG = f"""{GOOD}
def silu(x):
    return good_silu(x) + 1e-3 * (x > 2)
def linear(x, weight):
    return good_linear(x, weight) + (next(CALLS) % 3 == 1)
good_linear = torch.nn.functional.linear
def scaled_dot_product_attention(query, key, value, mask):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
"""


def plain(report):
    return [report.header, *(outcome_line(outcome) | {"seconds": 0} for outcome in report), report.diagnosis]


def states(report):
    return [outcome.outcome for outcome in report]


# -------------------------------------------------------------------------------------------------------- the report


def test_the_report_is_the_same_in_one_process_in_several_and_in_those_of_another(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = str(write("adapters.py", WRONG))
    asked = {"clauses": [*CHOSEN, *(c for c in CLAUSES if c.startswith("scaled_dot") and "mask" in c)], "examples": 4}
    asked |= {"supports": {"d_head": [1, 2, 4]}, "conventions": {"all_masked": "nan"}}
    here = plain(spec_lm.check(path, **asked))
    assert {line.get("outcome") for line in here[1:-1]} >= {"holds", "fails"}
    seen = []
    for jobs in (1, 2):
        seen.clear()
        report = check_in_workers(path, jobs=jobs, on_outcome=seen.append, **asked)
        assert plain(report) == here
        assert tuple(seen) == report.outcomes
    headers = []
    seen.clear()
    report = spec_lm.check(path, isolate=True, jobs=2, on_start=headers.append, on_outcome=seen.append, **asked)
    assert plain(report) == here
    assert (tuple(seen), headers) == (report.outcomes, [report.header])


def test_what_lives_in_this_process_alone_cannot_be_isolated():
    with pytest.raises(UserError, match="a dict lives in this process alone"):
        spec_lm.check({"softmax": None}, isolate=True)


def test_what_cannot_be_imported_is_told_where_it_is_isolated(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ImplementationError, match=r"adapters\.py cannot be imported: ModuleNotFoundError"):
        spec_lm.check(write("adapters.py", "import no_such_module"), isolate=True)


# ------------------------------------------------------------------------------------------------------ loading it


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("import os; print('bye', flush=True); os._exit(3)", "its process ended with exit code 3.* printed: bye"),
        ("import time; time.sleep(1000)", "it took longer than the time-out of 2 s"),
        ("", "provides no operator"),
    ],
)
def test_what_cannot_be_loaded_is_told_by_the_parent(write, text, said):
    with pytest.raises(ImplementationError, match=f"adapters.py .*{said}"):
        check_in_workers(str(write("adapters.py", text)), jobs=2, timeout=2, clauses=CHOSEN)


def test_what_is_loaded_slowly_has_the_time_of_a_clause_for_it(write):
    path = write("adapters.py", f"{GOOD}\ntime.sleep(1.2)\n")
    assert states(check_in_workers(str(path), jobs=2, timeout=2, clauses=CHOSEN, examples=1)) == ["holds"] * 4


# --------------------------------------------------------------------------------------------- deaths and time-outs


def test_an_operator_is_started_again_for_what_is_left_with_what_is_known_of_it(write, tmp_path, monkeypatch):
    """It takes no call without a mask, and dies once; the rest is judged as it is by one process."""
    monkeypatch.chdir(tmp_path)
    text = f"""{GOOD}
def scaled_dot_product_attention(query, key, value, mask):
    if next(CALLS) == 12 and os.path.exists("once"):
        os.remove("once")
        os._exit(3)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
"""
    path = str(write("adapters.py", text))
    clauses = [c.id for c in CLAUSES.values() if c.operator == "scaled_dot_product_attention" and c.level == "must"][:8]
    whole = check_in_workers(path, jobs=1, clauses=clauses, examples=4)
    assert whole.of("fails")[0].message.startswith("raised TypeError")
    (tmp_path / "once").touch()
    report = check_in_workers(path, jobs=1, clauses=clauses, examples=4)
    (cut,) = report.of("error")
    assert [plain(report)[1:][n] for n, o in enumerate(report) if o != cut] == [
        plain(whole)[1:][n] for n, o in enumerate(whole) if o.clause != cut.clause
    ]


def test_after_a_second_death_the_rest_of_the_operator_is_an_error(write):
    path = str(write("adapters.py", f"{GOOD}\ndef silu(x):\n    os._exit(3)\n"))
    silu = [clause_id for clause_id in CLAUSES if clause_id.startswith("silu.")][:4]
    report = check_in_workers(path, jobs=2, clauses=[*CHOSEN, *silu], examples=1)
    messages = [outcome.message for outcome in report if outcome.operator == "silu"]
    why = "its process ended with exit code 3"
    assert messages == [why, why] + [f"not run: its process ended twice; the last time {why}"] * (len(messages) - 2)
    assert states(report).count("holds") == 3


@pytest.mark.parametrize(("waive", "outcome"), [({}, "fails"), ({SILU: "see issue 12"}, "waived")])
def test_a_failure_that_was_found_before_it_hung_counts(write, waive, outcome):
    """It hangs where a smaller counterexample is looked for."""
    hangs = "def silu(x):\n    if next(CALLS) > 6: time.sleep(1000)\n    return good_silu(x) + 1\n"
    path = str(write("adapters.py", f"{GOOD}\n{hangs}"))
    report = check_in_workers(path, jobs=2, timeout=2, clauses=CHOSEN, waive=waive)
    assert report[SILU].outcome == outcome
    assert report[SILU].message.endswith("(not fully shrunk: it took longer than the time-out of 2 s)")
    assert report[SILU].counterexample is not None
    assert states(report).count("holds") == 3


def test_a_slow_operator_keeps_its_process_when_a_clause_takes_too_long(write):
    """Each call takes 0.05 s, and some of its clauses more calls than their time allows."""
    text = f"{GOOD}\nopen({{!r}}, 'a').write('.')\ndef silu(x):\n    time.sleep(0.05)\n    return good_silu(x)\n"
    path = write("adapters.py", "")
    path.write_text(text.format(str(path.parent / "imported")))
    clauses = [clause_id for clause_id in CLAUSES if clause_id.startswith("silu.")][:4]
    report = check_in_workers(str(path), jobs=1, timeout=1, clauses=clauses, examples=50)
    assert report[SILU].message == "it took longer than the time-out of 1 s"
    assert {outcome.message for outcome in report} <= {"", report[SILU].message}
    assert (path.parent / "imported").read_text() == "."


def test_a_failure_found_by_a_slow_operator_counts_without_a_smaller_one():
    def silu(x):
        time.sleep(0.2)
        return x

    report = spec_lm.check({"silu": silu}, clauses=[SILU], timeout=1)
    assert report[SILU].message.endswith("(not fully shrunk: it took longer than the time-out of 1 s)")


# ---------------------------------------------------------------------------------------------- where there is no fork


def test_without_fork_one_process_serves_all_operators_and_is_replaced_when_it_dies(write, monkeypatch):
    monkeypatch.setattr(workers, "_forks", lambda: False)
    text = f"open({{!r}}, 'a').write('.')\n{GOOD}\ndef silu(x):\n    os._exit(3)\n"
    path = write("adapters.py", "")
    path.write_text(text.format(str(path.parent / "imported")))
    report = check_in_workers(str(path), jobs=2, clauses=CHOSEN, examples=1)
    assert states(report) == ["holds", "holds", "error", "holds"]
    assert (path.parent / "imported").read_text() == ".."


# ----------------------------------------------------------------------------------------------------- on a device


def test_on_a_device_what_may_end_its_context_comes_last_in_a_process_of_its_own():
    chosen = [clause for clause in CLAUSES.values() if clause.operator in ("embedding", "rope")]
    on_cpu, on_device = batches_of(chosen, "cpu"), batches_of(chosen, "cuda")
    assert [len(batches) for batches in on_cpu] == [1, 1]
    embedding, rope = on_device
    assert embedding[1:] == [("embedding.ids_outside_are_refused",), ("embedding.negative_ids_are_refused",)]
    assert rope[1:] == [("rope.refuses_a_position_outside_max_seq_len",)]
    assert [sorted(sum(batches, ())) for batches in on_device] == [sorted(batches[0]) for batches in on_cpu]


def test_where_only_such_a_clause_is_chosen_it_is_the_only_process():
    assert batches_of([CLAUSES["embedding.ids_outside_are_refused"]], "cuda") == [
        [("embedding.ids_outside_are_refused",)]
    ]


def test_what_may_end_a_context_are_names_of_clauses():
    assert {clause.name for clause in CLAUSES.values()} >= set(workers.ENDS_A_CONTEXT)


# -------------------------------------------------------------------------------------------------------- interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_ends_the_check_and_what_is_known_is_told(spec_lm_command, write, number):
    """The implementation itself interrupts the check, and never returns."""
    text = f"{GOOD}\ndef linear(x, weight):\n    os.kill({os.getpid()}, {int(number)})\n    time.sleep(1000)\n"
    write("adapters.py", text)
    chosen = [each for clause_id in CHOSEN for each in ("--clause", clause_id)]
    ran = spec_lm_command("check", "adapters.py", *chosen, "--examples", "1", "--jobs", "1", "--report", "out.jsonl")
    assert ran.code == 2
    assert ran.last_line == "adapters.py was not checked to the end: 3 of 4 MUST clauses ran, 3 hold"
    assert '"complete": false' in Path("out.jsonl").read_text().splitlines()[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="what runs is looked for in /proc")
def test_a_process_ends_with_the_check_that_is_killed(write, tmp_path):
    """Not even a check that cannot say a word any more leaves a process that hangs."""
    hangs = f"def silu(x):\n    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n    while True: pass\n"
    path = str(write("adapters.py", f"{GOOD}\n{hangs}"))
    check = subprocess.Popen([sys.executable, "-m", "spec_lm", "check", path, "--clause", SILU], cwd=tmp_path)
    pid = int(eventually(lambda: (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text()))
    check.kill()
    check.wait()
    assert eventually(lambda: not is_running(pid))


def eventually(seen, seconds=60.0):
    """What is seen as soon as it is there, or what it is when time is up."""
    end = time.monotonic() + seconds
    while not (found := seen()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
