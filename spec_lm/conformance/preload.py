"""What a process that is forked for each operator has imported already: torch, the runner and the specification."""

import contextlib
import ctypes
import gc
import signal
import sys
import warnings

signal.signal(
    signal.SIGINT, signal.SIG_IGN
)  # an interrupt at the terminal reaches this process too; it is the parent's

from spec_lm.conformance import runner  # noqa: E402, F401
from spec_lm.conformance.clause import load_specification  # noqa: E402

_PR_SET_CHILD_SUBREAPER = 36


def _adopt() -> None:
    """Processes that a child leaves behind become children of this one, whatever session they are in, and are found."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    warnings.filterwarnings("ignore", "forkserver: waitpid returned")


load_specification()
if sys.platform == "linux":
    _adopt()
gc.freeze()  # what is imported stays: no child looks through it again, which would copy its memory
