"""What a process that is forked for each operator has behind it: torch, the runner, the specification, a first draw."""

import contextlib
import ctypes
import gc
import signal
import sys
import warnings
from typing import Any

signal.signal(
    signal.SIGINT, signal.SIG_IGN
)  # an interrupt at the terminal reaches this process too; it is the parent's

sys.path[:] = filter(None, sys.path)  # not the current folder, where a numpy.py may lie that is somebody's to check

import hypothesis  # noqa: E402
from hypothesis import strategies  # noqa: E402

from spec_lm.conformance import job, runner  # noqa: E402, F401
from spec_lm.conformance.clause import load_specification  # noqa: E402

_PR_SET_CHILD_SUBREAPER = 36


def _draw() -> None:
    """Hypothesis looks through the source of what is imported when it first draws: once, and in no child again."""

    slow: Any = tuple(hypothesis.HealthCheck)  # as it is on a busy machine

    @hypothesis.seed(0)
    @hypothesis.settings(database=None, deadline=None, max_examples=5, suppress_health_check=slow)
    @hypothesis.given(strategies.lists(strategies.integers(0, 1), min_size=200))
    def drawn(numbers: list[int]) -> None:
        pass

    with contextlib.suppress(Exception), runner.storage_elsewhere():  # without it, children are only slower
        drawn()


def _adopt() -> None:
    """Processes that a child leaves behind become children of this one, whatever session they are in, and are found."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    warnings.filterwarnings("ignore", "forkserver: waitpid returned")


load_specification()
_draw()
if sys.platform == "linux":
    _adopt()
gc.freeze()  # what is imported stays: no child looks through it again, which would copy its memory
