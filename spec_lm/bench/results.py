"""From pytest-benchmark's JSON to what a report shows: a cell for each variant in each case, and how a curve grows."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from spec_lm.bench.cases import Case
from spec_lm.conformance.report import UserError

HOLDS = ""


def verdict_key(variant: str, operator: str, dtype: str) -> str:
    """Under which a run keeps what the clauses of an operator came to."""
    return f"{variant} {operator} {dtype}"


@dataclass(frozen=True)
class Cell:
    """What a variant came to in a case.

    Args:
        seconds: the median of the sessions' medians; None where there is no figure.
        quartiles: of the sessions' medians.
        speedup: how many times faster than the variant compared with, in the same session: median, lowest, highest.
        share: operations and bytes a second, as shares of the ceilings in the same session, their median; no share of
            memory where a call may find its inputs in a cache.
        in_cache: whether it may.
        compile_seconds: of its first call.
        memory: bytes at the peak.
        note: why there is no figure.
    """

    case: Case
    variant: str
    seconds: float | None = None
    quartiles: tuple[float, float] = (0.0, 0.0)
    speedup: tuple[float, float, float] | None = None
    share: tuple[float | None, float | None] = (None, None)
    in_cache: bool = False
    compile_seconds: float | None = None
    memory: int | None = None
    note: str = ""

    @property
    def limit(self) -> str:
        """Which ceiling is nearer; neither, where both are far away."""
        product, copy = (part or 0.0 for part in self.share)
        if self.seconds is None:
            return ""
        if max(product, copy) < 0.2:
            return "neither"
        return "products" if product > copy else "memory"


@dataclass(frozen=True)
class Growth:
    """How a variant's time grows along a scan: seconds ~ size^exponent."""

    curve: str
    scan: str
    variant: str
    exponent: float
    memory_exponent: float | None = None


class Results:
    """One run.

    Args:
        data: pytest-benchmark's JSON with `spec_lm` in it.
        against: the variant that speed-ups are stated against; the first of a case where it was not measured there.
    """

    def __init__(self, data: Mapping[str, Any], against: str = "reference") -> None:
        self.data, self.against = data, against
        self.machine: dict[str, Any] = data["machine_info"]["spec_lm"]
        self.own: dict[str, Any] = data["spec_lm"]
        self.ceilings: dict[tuple[str, str], float] = {}  # the best of all that were measured
        self._beside: dict[tuple[str, str], dict[int, float]] = {}
        for bench in data["benchmarks"]:
            if "ceiling" in (info := bench["extra_info"]):
                key, rate = (info["ceiling"], info["dtype"]), info["work"] / bench["stats"]["min"]
                self.ceilings[key] = max(rate, self.ceilings.get(key, 0.0))
                if "beside" in info:
                    rates = self._beside.setdefault((str(Case.of(info["beside"])), info["ceiling"]), {})
                    rates[info["session"]] = info["work"] / bench["stats"]["median"]
        self._sessions: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
        for bench in data["benchmarks"]:
            if "case" in (info := bench["extra_info"]):
                key = str(Case.of(info["case"])), info["variant"]
                self._sessions.setdefault(key, {})[info["session"]] = bench
        self._peaks = {(str(Case.of(each["case"])), each["variant"]): each["bytes"] for each in self.own["memory"]}
        self.work = [(Case.of(case), tuple(names)) for case, names in self.own["work"]]

    def ceilings_of_sessions(self, kind: str, dtype: str) -> list[float]:
        """What a ceiling came to in each session; where they differ much, the machine was busy with something else."""
        cases = [case for case, _ in self.work if kind == "copy" or case.dtype == dtype]
        return [rate for case in cases for rate in self._beside.get((str(case), kind), {}).values()]

    def cells(self) -> dict[Case, list[Cell]]:
        """Those of each case, in the order of the run; where the clauses do not hold there is no figure."""
        return {case: [self._cell(case, name) for name in names] for case, names in self.work}

    def _cell(self, case: Case, name: str) -> Cell:
        verdict = self.own["verdicts"].get(verdict_key(name, case.operator, case.dtype), HOLDS)
        error = self.own["errors"].get(str(case), {}).get(name, "")
        sessions = self._sessions.get((str(case), name), {})
        if verdict or error or not sessions:
            return Cell(case, name, note=verdict or error or "not measured")
        stats = [bench["stats"] for bench in sessions.values()]
        info = next(iter(sessions.values()))["extra_info"]
        times = [each["median"] for each in stats]
        product = self._share(case, name, "product", "operations")
        copy = None if info["in_cache"] else self._share(case, name, "copy", "bytes")
        return Cell(
            case,
            name,
            median(times),
            _quartiles(times),
            self._speedup(case, name),
            (product, copy),
            info["in_cache"],
            info["compile_seconds"],
            self._peaks.get((str(case), name)),
        )

    def _share(self, case: Case, name: str, kind: str, work: str) -> float | None:
        """What is done a second, as a share of the ceiling's in the same session: the median of the sessions."""
        sessions, ceilings = self._sessions[str(case), name], self._beside.get((str(case), kind), {})
        shares = [
            bench["extra_info"][work] / bench["stats"]["median"] / ceilings[session]
            for session, bench in sessions.items()
            if session in ceilings and bench["extra_info"][work]
        ]
        return median(shares) if shares else None

    def _speedup(self, case: Case, name: str) -> tuple[float, float, float] | None:
        measured = [each for each in dict(self.work)[case] if (str(case), each) in self._sessions]
        other = self.against if self.against in measured else measured[0]
        if name == other:
            return None
        theirs, own = self._sessions[str(case), other], self._sessions[str(case), name]
        ratios = [theirs[k]["stats"]["median"] / own[k]["stats"]["median"] for k in own if k in theirs]
        return (median(ratios), min(ratios), max(ratios)) if ratios else None

    def growths(self) -> list[Growth]:
        """The exponent of every curve of at least three sizes, by least squares on logarithms."""
        curves: dict[tuple[str, str, str], list[Cell]] = {}
        for case, cells in self.cells().items():
            for cell in cells:
                if case.scan and cell.seconds is not None:
                    curves.setdefault((case.curve, case.scan, cell.variant), []).append(cell)
        found = []
        for (curve, scan, name), cells in curves.items():
            if len(cells) >= 3:
                times = [(cell.case.size, cell.seconds) for cell in cells if cell.seconds]
                peaks = [(cell.case.size, cell.memory) for cell in cells if cell.memory]
                memory = slope(peaks) if len(peaks) == len(cells) else None
                found.append(Growth(curve, scan, name, slope(times), memory))
        return found


def _quartiles(values: list[float]) -> tuple[float, float]:
    low, _, high = quantiles(values, method="inclusive") if len(values) > 1 else 3 * values
    return low, high


def slope(points: Iterable[tuple[float, float]]) -> float:
    """The exponent e of y ~ x^e, by least squares on logarithms."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    x_mean, y_mean = (sum(axis) / len(logs) for axis in zip(*logs, strict=True))
    return sum((x - x_mean) * (y - y_mean) for x, y in logs) / sum((x - x_mean) ** 2 for x, _ in logs)


# ------------------------------------------------------------------------------------------------------------- baseline


@dataclass(frozen=True)
class Change:
    """A cell now and in an earlier run: how many times slower it is now."""

    case: str
    variant: str
    slower: float


def read(path: Path) -> dict[str, Any]:
    """The data of a run.

    Raises:
        UserError: it cannot be read, or was not written by `spec-lm bench`.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        Results(data)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no result of `spec-lm bench`: expected the benchmarks.json of a report") from error
    return data


def changes(before: Results, now: Results) -> list[Change]:
    """Every cell that both runs have a figure for, the slowest first."""
    earlier = {(str(case), cell.variant): cell.seconds for case, cells in before.cells().items() for cell in cells}
    found = [
        Change(str(case), cell.variant, cell.seconds / seconds)
        for case, cells in now.cells().items()
        for cell in cells
        if cell.seconds and (seconds := earlier.get((str(case), cell.variant)))
    ]
    return sorted(found, key=lambda change: -change.slower)
