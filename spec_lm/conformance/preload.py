"""What a process that is forked for each operator has imported already: torch, the runner and the specification."""

import signal

signal.signal(
    signal.SIGINT, signal.SIG_IGN
)  # an interrupt at the terminal reaches this process too; it is the parent's

from spec_lm.conformance import runner  # noqa: E402, F401
from spec_lm.conformance.clause import load_specification  # noqa: E402

load_specification()
