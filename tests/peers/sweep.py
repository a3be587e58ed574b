"""Correct implementations that nobody here wrote, on many seeds: `python tests/peers/sweep.py --seeds 20`.

Prints, for each implementation and dtype, the failures and the largest err/bound. Exit code 1 where anything fails.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import spec_lm
from spec_lm.conformance.clause import Level
from spec_lm.conformance.display import failure_text
from spec_lm.conformance.report import Outcome

FOLDER = Path(__file__).parent
ALL = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True)
class Peer:
    """An implementation, and the dtypes and the level at which it is expected to hold."""

    name: str
    dtypes: tuple[str, ...] = ALL
    level: Level = "must"

    def check(self, dtype: str, seed: int, examples: int) -> spec_lm.Report:
        """Check it once."""
        file = FOLDER / f"{self.name}.py"
        return spec_lm.check(file, dtype=dtype, seed=seed, examples=examples, level=self.level)


# Llama's rotary table takes the model's dtype, and x-transformers computes half precision in half precision.
PEERS = (
    Peer("torch_functions", level="should"),
    Peer("torch_math_attention", level="should"),
    Peer("blockwise_attention", level="should"),
    Peer("llama", ("float32",)),
    Peer("llama_eager", ("float32",)),
    Peer("x_transformers_parts", ("float32",)),
)


def swept(peer: Peer, dtype: str, seeds: range, examples: int) -> Iterator[Outcome]:
    """Every outcome of a peer on these seeds."""
    for seed in seeds:
        yield from peer.check(dtype, seed, examples)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--examples", type=int, default=50)
    parser.add_argument("--peer", action="append", choices=[peer.name for peer in PEERS])
    parser.add_argument("--dtype", action="append", choices=ALL)
    asked = parser.parse_args()
    failures = 0
    for peer in PEERS:
        for dtype in peer.dtypes:
            if (asked.peer and peer.name not in asked.peer) or (asked.dtype and dtype not in asked.dtype):
                continue
            seeds = range(asked.first, asked.first + asked.seeds)
            outcomes = list(swept(peer, dtype, seeds, asked.examples))
            wrong = [outcome for outcome in outcomes if outcome.outcome in ("fails", "error")]
            worst = max(outcomes, key=lambda outcome: outcome.worst)
            held = sum(outcome.outcome == "holds" for outcome in outcomes)
            counts = f"{held} hold, {len(wrong)} fail"
            print(f"{peer.name:<22} {dtype:<9} {counts}; worst {worst.worst:.2f} ({worst.clause})")
            for outcome in wrong:
                print(failure_text(outcome))
            failures += len(wrong)
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
