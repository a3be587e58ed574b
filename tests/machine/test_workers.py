"""Each operator has a process of its own: what one implementation does to it costs no other operator its verdict."""

import pytest

import spec_lm
from spec_lm.conformance.implementation import ImplementationError
from spec_lm.conformance.workers import check_in_workers

CLAUSES = ["softmax.sums_to_one", "softmax.any_dim", "silu.agrees_with_the_oracle", "linear.no_bias"]
GOOD = """
import torch
from torch.nn.functional import linear, silu
softmax = torch.softmax
"""


def plain(report):
    return [(outcome.clause, outcome.outcome, outcome.examples, outcome.worst) for outcome in report]


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_report_is_that_of_one_process(write, jobs):
    path = str(write("adapters.py", GOOD))
    seen = []
    report = check_in_workers(path, jobs=jobs, clauses=CLAUSES, examples=5, on_outcome=seen.append)
    assert plain(report) == plain(spec_lm.check(path, clauses=CLAUSES, examples=5))
    assert tuple(seen) == report.outcomes


@pytest.mark.parametrize("end", ["import os; os._exit(3)", "import os; os.abort()"])
def test_an_operator_that_ends_its_process_is_an_error_and_the_others_hold(write, end):
    path = str(write("adapters.py", GOOD + f"def silu(x):\n    {end}\n"))
    report = check_in_workers(path, jobs=2, clauses=CLAUSES, examples=5)
    assert {o.operator: o.outcome for o in report} == {"softmax": "holds", "silu": "error", "linear": "holds"}
    assert report["silu.agrees_with_the_oracle"].message.startswith("it")
    assert report.exit_code == 2


def test_what_an_operator_raises_or_prints_stays_with_it(write, capfd):
    """Even KeyboardInterrupt, and even what is written below sys.stdout."""
    loud = GOOD + "def silu(x):\n    import os\n    os.write(1, b'loud')\n    raise KeyboardInterrupt\n"
    report = check_in_workers(str(write("loud.py", loud)), jobs=2, clauses=CLAUSES, examples=2)
    assert {o.operator: o.outcome for o in report} == {"softmax": "holds", "silu": "fails", "linear": "holds"}
    assert "loud" not in capfd.readouterr().out


def test_what_cannot_be_imported_is_told_by_the_parent(write):
    with pytest.raises(ImplementationError, match="no_such_module"):
        check_in_workers(str(write("adapters.py", "import no_such_module")), jobs=1)
