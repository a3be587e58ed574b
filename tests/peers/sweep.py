"""Correct implementations on many seeds: `python -m tests.peers.sweep --seeds 20`, from the top of a checkout.

What a clause draws does not depend on whom it judges: it is drawn once, and all peers are judged on it. `spec-lm check`
with the same seed and number of examples draws the same. Prints every failure as it comes, then for each clause the
largest err/bound and whose it is. Exit code 1 where anything fails.
"""

import argparse
import json
import traceback
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

import spec_lm
from spec_lm.conformance.clause import CLAUSES, Clause, Level
from spec_lm.conformance.display import failure_text
from spec_lm.conformance.implementation import Implementation, loaded
from spec_lm.conformance.operators import OPERATORS, Checked
from spec_lm.conformance.runner import Settings, preserved, quiet, run_clause
from spec_lm.conformance.strategies import Domain, NotJudged
from spec_lm.conformance.tolerance import Violation

FOLDER = Path(__file__).parent
ALL = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True)
class Peer:
    """An implementation, and the dtypes and the level at which it is expected to hold.

    Args:
        name: of its file.
        dtypes: those it is right in.
        level: up to which it holds.
        operators: those it computes in a way of its own.
        needs: a library that need not be there.
    """

    name: str
    dtypes: tuple[str, ...] = ALL
    level: Level = "must"
    operators: tuple[str, ...] = tuple(OPERATORS)
    needs: str = ""

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.py"

    def __str__(self) -> str:
        return self.name


_ATTENTION = "scaled_dot_product_attention"
_WITH_ROPE = ("rope", "multihead_self_attention_with_rope", "transformer_block", "transformer_lm")
_PRODUCTS = ("linear", "swiglu", _ATTENTION, "multihead_self_attention", "transformer_block")
# docs/peers.md says why a dtype is left out.
PEERS = (
    Peer("torch_functions", level="should"),
    Peer("fused", level="should"),
    Peer("torch_math_attention", ALL, "should", (_ATTENTION,)),
    Peer("blockwise_attention", ALL, "should", ("softmax", "silu", _ATTENTION)),
    Peer("einsum_everywhere"),
    Peer("finite_fill", ("float32", "float64", "bfloat16")),
    Peer("half_split", ALL, "must", ("rmsnorm", *_WITH_ROPE)),
    Peer("inverse_rotation", ALL, "must", _WITH_ROPE[:3]),
    Peer("inverse_half_split", ALL, "must", _WITH_ROPE),
    Peer("one_by_one"),
    Peer("course_modules"),
    Peer("tf32_products", ("float32",), "should", _PRODUCTS),
    Peer("reduced_products", ("bfloat16", "float16"), "should", _PRODUCTS),
    Peer("llama", ALL, "must", ("rmsnorm", "swiglu", "transformer_lm"), "transformers"),
    Peer("llama_eager", ALL, "must", ("transformer_lm",), "transformers"),
    Peer(
        "x_transformers_parts",
        ("float32", "bfloat16", "float16"),
        "must",
        ("rope", _ATTENTION, "swiglu"),
        "x_transformers",
    ),
)


@dataclass(frozen=True)
class _Recorder(Clause):
    """A clause that writes down what it would be run on, and judges nothing."""

    log: list[Mapping[str, Any]] = field(default_factory=list, repr=False)

    def run(self, checked: Checked, recipes: Mapping[str, Any]) -> None:
        self.log.append(recipes)


def drawn(clause: Clause, settings: Settings) -> list[Mapping[str, Any]]:
    """The recipes that a check under these settings runs a clause on, as long as it holds."""
    recorder = _Recorder(**{each.name: getattr(clause, each.name) for each in fields(clause)})
    domain = Domain(clause.operator, settings.dtype, supports=settings.supports)
    run_clause(recorder, Checked(OPERATORS[clause.operator], lambda *arguments: None), domain, settings)
    return recorder.log


@dataclass
class Tally:
    """What one clause came to for one peer in one dtype: how many examples were judged, the seeds on which it failed,
    the largest err/bound and its seed."""

    peer: str
    dtype: str
    clause: str
    examples: int = 0
    fails: list[int] = field(default_factory=list)
    worst: float = 0.0
    seed: int = 0

    def add(self, other: "Tally") -> None:
        """Count another's as well."""
        self.examples += other.examples
        self.fails += other.fails
        if other.worst > self.worst:
            self.worst, self.seed = other.worst, other.seed


# A search begins with the plainest draws, whatever the seed: what a peer held on in this process is not judged again.
_SEEN: set[int] = set()


def judged(clause: Clause, checked: Checked, recipes: list[Mapping[str, Any]], tally: Tally) -> str:
    """Run a clause on each of the recipes that is new to it, up to a failure, which is told; else the text is empty."""

    def observe(ratio: float) -> None:
        tally.worst = max(tally.worst, ratio)

    watched = replace(checked, observe=observe)
    for each in recipes:
        key = hash((tally.peer, tally.dtype, clause.id, *each.items()))
        if key in _SEEN:
            continue
        _SEEN.add(key)
        try:
            clause.run(watched, each)
        except NotJudged:
            continue
        except Violation as violation:
            tally.fails.append(tally.seed)
            return str(violation)
        except Exception:
            tally.fails.append(tally.seed)
            return traceback.format_exc()
        tally.examples += 1
    return ""


@dataclass(frozen=True)
class Sweep:
    """Peers, what of them is checked, and how much is drawn.

    Args:
        peers: those to check.
        examples: drawn for each clause on each seed.
        operators: whose clauses are run.
        level: up to which; by default each peer's own.
    """

    peers: tuple[Peer, ...] = PEERS
    examples: int = 20
    operators: tuple[str, ...] = tuple(OPERATORS)
    level: Level | None = None

    def tallies(self, dtype: str, seed: int) -> list[Tally]:
        """What every clause comes to, for every peer that is right in this dtype, on one seed; failures are printed."""
        with preserved(seed), ExitStack() as stack:
            subjects = {p: stack.enter_context(loaded(p.path)) for p in self.peers if dtype in p.dtypes}
            return [tally for peer, subject in subjects.items() for tally in self._of(peer, subject, dtype, seed)]

    def _of(self, peer: Peer, subject: Implementation, dtype: str, seed: int) -> Iterator[Tally]:
        settings = Settings(self.examples, seed, dtype).declared_by(subject)
        levels = ("must",) if (self.level or peer.level) == "must" else ("must", "should")
        for clause in CLAUSES.values():
            if clause.operator not in set(peer.operators) & set(self.operators) or clause.level not in levels:
                continue
            tally = Tally(peer.name, dtype, clause.id, seed=seed)
            function = subject.functions[clause.operator]
            checked = Checked(OPERATORS[clause.operator], function, settings.conventions, supports=settings.supports)
            with quiet():
                text = judged(clause, checked, _drawn_once(clause.id, settings), tally)
            if text:
                print(f"{peer.name} {dtype}, seed {seed}: {clause.id}: {text}\n{self._shrunk(peer, tally)}", flush=True)
            yield tally

    def _shrunk(self, peer: Peer, tally: Tally) -> str:
        """The failure again, as `spec-lm check` tells it."""
        report = spec_lm.check(
            peer.path, clauses=[tally.clause], dtype=tally.dtype, seed=tally.seed, examples=self.examples
        )
        return "".join(failure_text(outcome) for outcome in report.of("fails", "error"))


def _drawn_once(clause_id: str, settings: Settings) -> list[Mapping[str, Any]]:
    supports = {name: allowed for name, allowed in settings.supports.items() if name != "dtype"}
    return _drawn(clause_id, settings.examples, settings.seed, settings.dtype, json.dumps(supports))


@cache
def _drawn(clause_id: str, examples: int, seed: int, dtype: str, supports: str) -> list[Mapping[str, Any]]:
    return drawn(CLAUSES[clause_id], Settings(examples, seed, dtype, supports=json.loads(supports)))


def added(tallies: Iterable[Tally]) -> list[Tally]:
    """One for each peer, dtype and clause."""
    sums: dict[tuple[str, str, str], Tally] = {}
    for tally in tallies:
        key = (tally.peer, tally.dtype, tally.clause)
        sums.setdefault(key, Tally(*key)).add(tally)
    return list(sums.values())


def table(tallies: Iterable[Tally]) -> Iterator[str]:
    """A line for each clause with its largest err/bound, operators in their order."""
    worst: dict[str, Tally] = {}
    for tally in tallies:
        if tally.clause not in worst or tally.worst > worst[tally.clause].worst:
            worst[tally.clause] = tally
    order = list(OPERATORS)
    for tally in sorted(worst.values(), key=lambda each: (order.index(each.clause.split(".")[0]), -each.worst)):
        if tally.worst:
            yield f"{tally.worst:5.2f}  {tally.clause:<70} {tally.peer} {tally.dtype}, seed {tally.seed}"


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--examples", type=int, default=20)
    parser.add_argument("--peer", action="append", choices=[peer.name for peer in PEERS])
    parser.add_argument("--dtype", action="append", choices=ALL)
    parser.add_argument("--level", choices=("must", "should"), help="by default each peer's own")
    parser.add_argument("--operator", action="append", choices=list(OPERATORS))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--report", type=Path, help="write what every clause came to, as JSON")
    return parser.parse_args()


def main() -> int:
    asked = _asked()
    peers = tuple(peer for peer in PEERS if not asked.peer or peer.name in asked.peer)
    sweep = Sweep(peers, asked.examples, tuple(asked.operator or OPERATORS), asked.level)
    seeds = range(asked.first, asked.first + asked.seeds)
    todo = list(product(seeds, asked.dtype or ALL))
    with ProcessPoolExecutor(asked.jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        found = pool.map(sweep.tallies, [dtype for _, dtype in todo], [seed for seed, _ in todo])
        tallies = added(tally for each in found for tally in each)
    print(*table(tallies), sep="\n")
    failures = sum(len(tally.fails) for tally in tallies)
    print(f"{sum(tally.examples for tally in tallies)} examples on {len(seeds)} seeds: {failures} failures")
    if asked.report:
        asked.report.write_text(json.dumps([asdict(tally) for tally in tallies], indent=1), encoding="utf-8")
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
