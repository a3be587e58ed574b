"""Plots as SVG: time and memory against size on logarithmic axes, and bars of speed-ups."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from spec_lm.bench.cases import Case
from spec_lm.bench.results import Cell, Results
from spec_lm.conformance.report import printable

_SIZE = (6.4, 3.6)  # inches


@dataclass(frozen=True)
class Plot:
    """A picture."""

    title: str
    svg: str


def plots(results: Results) -> list[Plot]:
    """Curves of every scan of three sizes or more, then bars of every case without a scan."""
    cells = results.cells()
    return [*_curves(cells), *_bars(cells, results.against)]


def _curves(cells: dict[Case, list[Cell]]) -> Iterator[Plot]:
    curves: dict[tuple[str, str], list[Cell]] = {}
    for case, row in cells.items():
        if case.scan:
            curves.setdefault((case.curve, case.scan), []).extend(row)
    for (curve, scan), row in curves.items():
        yield from _curve(f"time: {curve}", "seconds", scan, row, lambda cell: cell.seconds)
        yield from _curve(f"peak memory: {curve}", "MiB", scan, row, _mebibytes)


def _mebibytes(cell: Cell) -> float | None:
    return None if cell.memory is None else cell.memory / 2**20


def _curve(title: str, unit: str, scan: str, row: list[Cell], value: Callable[[Cell], float | None]) -> Iterator[Plot]:
    points: dict[str, list[tuple[int, float]]] = {}
    for cell in row:
        if found := value(cell):
            points.setdefault(cell.variant, []).append((cell.case.size, found))
    if not any(len(each) >= 3 for each in points.values()):
        return

    def draw(axes: Any) -> None:
        for name, each in points.items():
            axes.loglog(*zip(*each, strict=True), marker="o", markersize=3, label=_text(name))
        axes.set(xlabel=scan, ylabel=unit)
        axes.legend(fontsize=7)

    yield _drawn(title, draw)


def _bars(cells: dict[Case, list[Cell]], against: str) -> Iterator[Plot]:
    for case, row in cells.items():
        bars = [cell for cell in row if cell.speedup is not None]
        if case.scan or not bars:
            continue

        def draw(axes: Any, bars: list[Cell] = bars) -> None:
            middle = [cell.speedup[0] for cell in bars if cell.speedup]
            spread = [(s[0] - s[1], s[2] - s[0]) for cell in bars if (s := cell.speedup)]
            axes.barh([_text(cell.variant) for cell in bars], middle, xerr=list(zip(*spread, strict=True)))
            axes.axvline(1, color="black", linewidth=0.8)
            axes.set(xlabel=f"speed-up against {_text(against)}")

        yield _drawn(str(case), draw)


def _text(name: str) -> str:
    """A name of unknown origin: no formula is made of it."""
    return printable(name).replace("$", r"\$")


def _drawn(title: str, draw: Callable[[Any], None]) -> Plot:
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    draw(axes)
    axes.set_title(_text(title), fontsize=7, wrap=True)
    written = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "spec_lm", "svg.fonttype": "path"}):
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    _, tag, rest = written.getvalue().partition("<svg")
    return Plot(title, tag + rest)
