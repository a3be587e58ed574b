"""The harness against `torch.utils.benchmark.Timer`: `python -m tests.bench.against_timer`, from the top of a checkout.

Both time the same variant on the same inputs, in turn; on a machine at rest their medians differ by less than 3%.
"""

import argparse
import sys
from statistics import median

import torch
from torch.utils.benchmark import Timer

from spec_lm.bench.cases import Case, Sizes
from spec_lm.bench.devices import Cpu
from spec_lm.bench.results import Results
from spec_lm.bench.row import ready
from spec_lm.bench.run import measured
from spec_lm.bench.session import Plan
from spec_lm.bench.variants import variant

CASES = (
    Case("softmax", Sizes(batch=4, sequence=256)),
    Case("swiglu", Sizes(batch=2, sequence=128)),
    Case("scaled_dot_product_attention", Sizes(batch=2, sequence=256)),
)


def timer_seconds(case: Case, seconds: float) -> float:
    """The median by torch's timer."""
    row = ready(case, variant("fused"), Cpu(), seconds)
    timer = Timer("call()", globals={"call": row.call}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=seconds).median


def harness_seconds(case: Case, seconds: float) -> float:
    """The median by the harness, in a child process as always."""
    plan = Plan(((case, ("fused",)),), sessions=3, seconds=seconds / 3, threads=torch.get_num_threads())
    data = measured(plan)
    asked = {"work": [(case.told(), ["fused"])], "verdicts": {}, "asked": {}}
    found = Results({**data, "spec_lm": {**data["spec_lm"], **asked}}).cells()[case][0].seconds
    assert found is not None
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.6)
    asked = parser.parse_args()
    worst = 0.0
    for case in CASES:
        ratios = []
        for _ in range(asked.rounds):
            before = timer_seconds(case, asked.seconds)
            ours = harness_seconds(case, asked.seconds)
            after = timer_seconds(case, asked.seconds)
            ratios.append(2 * ours / (before + after))
        worst = max(worst, abs(median(ratios) - 1))
        print(f"{median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})  {case}", flush=True)
    return int(worst > 0.03)


if __name__ == "__main__":
    sys.exit(main())
