"""What pytest collects in the child: one benchmark for each case, session and variant (see `session.Plugin`)."""

from typing import Any


def test_row(benchmark: Any, timed: Any) -> None:
    """Time one variant in one case, in one session; why it cannot be is written down with it."""
    row = timed.prepared()
    benchmark.extra_info.update(timed.told(row))
    benchmark._timer = timed.bench.device.clock(row.seconds)
    benchmark.pedantic(row.call, rounds=row.rounds, iterations=row.iterations)
