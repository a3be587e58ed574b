"""What a process that is forked for each operator has imported already: torch, the runner and the specification."""

from spec_lm.conformance import runner  # noqa: F401
from spec_lm.conformance.clause import load_specification

load_specification()
