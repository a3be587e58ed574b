"""A run: first the clauses, then the figures of what holds, measured in a child process."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spec_lm.bench import variants
from spec_lm.bench.cases import SUITES, WIDTHS, Case
from spec_lm.bench.results import HOLDS, verdict_key
from spec_lm.bench.session import Plan, environment
from spec_lm.bench.variants import Variant, of_implementation
from spec_lm.conformance import workers
from spec_lm.conformance.clause import CLAUSES
from spec_lm.conformance.implementation import loaded
from spec_lm.conformance.report import UserError
from spec_lm.conformance.runner import known_operators

_TOLD_LAST = 12


@dataclass(frozen=True)
class Asked:
    """What a user asks for.

    Args:
        implementations: to measure beside those built in.
        only: built-in variants to measure; all where it is empty.
        operators: all of the suite where it is empty.
        dtypes: each case is run in each.
        suite: the name of a list of cases.
        sessions: of each case.
        seconds: that a variant may take in a session.
        threads: of torch; its own default where it is None.
        examples: drawn for each clause.
    """

    implementations: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    device: str = "cpu"
    dtypes: tuple[str, ...] = ("float32",)
    suite: str = "quick"
    sessions: int = 5
    seconds: float = 0.05
    threads: int | None = None
    examples: int = 5

    def cases(self) -> list[Case]:
        """The cases of the suite, in each dtype.

        Raises:
            UserError: an unknown operator or dtype, or a device that is not there.
        """
        wanted = known_operators(self.operators)
        for dtype in self.dtypes:
            if dtype not in WIDTHS:
                raise UserError(f"dtype {dtype!r} is none of {', '.join(WIDTHS)}")
        if self.device != "cpu" and not torch.cuda.is_available():
            raise UserError(f"device {self.device!r} was asked for, but this torch sees no such device; use cpu")
        suite = [case for case in SUITES[self.suite](self.device) if not wanted or case.operator in wanted]
        if not suite:
            raise UserError(f"the suite {self.suite} measures none of {', '.join(wanted)}; try --suite standard")
        return [replace(case, dtype=dtype) for dtype in self.dtypes for case in suite]

    def variants(self) -> list[Variant]:
        """Those built in, and the user's.

        Raises:
            UserError: an unknown variant, or an implementation that cannot be loaded.
        """
        there = variants.names()
        for name in self.only:
            if name not in there:
                raise UserError(f"no variant is named {name}; there are {', '.join(there)}")
        found = [variants.variant(name) for name in there if not self.only or name in self.only]
        for spec in self.implementations:
            with loaded(spec) as implementation:
                found.append(of_implementation(implementation))
        return found


def run(asked: Asked, tell: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Check, measure, and give pytest-benchmark's JSON with what a report needs in `spec_lm`.

    Args:
        asked: what to measure.
        tell: told what it is about to do.

    Raises:
        UserError: something asked for is not there, or the child process failed.
    """
    workers.start("spec_lm.bench.preload")
    cases, chosen = asked.cases(), asked.variants()
    tell(f"checks the clauses of {len(chosen)} variants")
    verdicts = dict(_verdicts(asked, cases, chosen))
    work = [(case, [v.name for v in chosen if v.has(case.operator)]) for case in cases]
    timed = [
        (case, tuple(name for name in names if not verdicts[verdict_key(name, case.operator, case.dtype)]))
        for case, names in work
    ]
    plan = Plan(
        tuple((case, names) for case, names in timed if names),
        asked.implementations,
        asked.device,
        asked.sessions,
        asked.seconds,
        asked.threads,
    )
    tell(f"measures {sum(len(names) for _, names in timed)} figures in {asked.sessions} sessions each")
    data = measured(plan) if plan.work else {"benchmarks": [], "machine_info": {"spec_lm": {}}, "spec_lm": {}}
    for bench in data["benchmarks"]:
        bench["stats"].pop("data", None)  # every round of every session: megabytes that no report shows
    told = {"asked": {**vars(asked)}, "verdicts": verdicts, "work": [(case.told(), names) for case, names in work]}
    data["spec_lm"] = {"memory": [], "errors": {}, **data["spec_lm"], **told}
    return data


def _verdicts(asked: Asked, cases: Iterable[Case], chosen: list[Variant]) -> Iterable[tuple[str, str]]:
    """For each variant, operator and dtype: the clause that fails, or nothing where all hold."""
    directions: dict[tuple[str, str], set[str]] = {}
    for case in cases:
        directions.setdefault((case.operator, case.dtype), set()).add(case.direction)
    for dtype in asked.dtypes:
        for variant in chosen:
            mine = {op: ways for (op, of), ways in directions.items() if of == dtype and variant.has(op)}
            ids = [clause_id for op, ways in mine.items() for clause_id in clauses_of(op, "training" in ways)]
            outcomes = _checked(variant, ids, dtype, asked)
            for operator in mine:
                yield verdict_key(variant.name, operator, dtype), outcomes.get(operator, HOLDS)


def clauses_of(operator: str, training: bool) -> list[str]:
    """The clauses that must hold where an operator is measured: MUST, and in training those of its gradients."""
    return [
        clause.id
        for clause in CLAUSES.values()
        if clause.operator == operator
        and (clause.level == "must" or (training and clause.name.startswith("gradients_with_respect_to")))
    ]


def _checked(variant: Variant, ids: list[str], dtype: str, asked: Asked) -> dict[str, str]:
    """By operator the first clause that fails, or why it was not judged at all."""
    if not ids:
        return {}
    how = {"clauses": ids, "level": "should", "examples": asked.examples, "dtype": dtype, "device": asked.device}
    report = workers.check_in_workers(variant.spec, jobs=workers.default_jobs(), **how)
    found: dict[str, str] = {}
    judged = {outcome.operator for outcome in report.of("holds", "fails")}
    for outcome in report:
        if outcome.outcome in ("fails", "error"):
            found.setdefault(outcome.operator, f"{outcome.clause} {outcome.outcome}")
    for outcome in report:
        if outcome.operator not in judged:
            found.setdefault(outcome.operator, f"not judged: {outcome.message or outcome.outcome}")
    return found


def measured(plan: Plan) -> dict[str, Any]:
    """The plan carried out in a process of its own.

    Raises:
        UserError: the process failed; the last of what it printed is told.
    """
    with tempfile.TemporaryDirectory() as folder:
        told, result = Path(folder, "plan.json"), Path(folder, "result.json")
        told.write_text(json.dumps(plan.told()), encoding="utf-8")
        command = [sys.executable, "-m", "spec_lm.bench.session", str(told), str(result)]
        ran = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
        if ran.returncode or not result.is_file():
            last = "\n".join((ran.stdout + ran.stderr).strip().splitlines()[-_TOLD_LAST:])
            raise UserError(f"the process that measures ended with exit code {ran.returncode}:\n{last}")
        return json.loads(result.read_text(encoding="utf-8"))
