"""Results as text: a table in the terminal, Markdown, and one HTML page with plots."""

from collections.abc import Iterable, Iterator

from jinja2 import Environment

from spec_lm.bench.cases import Case
from spec_lm.bench.results import Cell, Change, Growth, Results
from spec_lm.conformance.pages import templates_of
from spec_lm.conformance.report import printable

HEADINGS = ("variant", "time", "quartiles", "speed-up", "products", "memory", "limit", "peak", "compiling")


def about(results: Results) -> str:
    """The machine and what a run depends on, in one line."""
    machine, asked = results.machine, results.own["asked"]
    threads = f"{machine.get('threads', '?')} threads"
    known = [f"{name} {machine[name]}" for name in ("driver", "cuda") if machine.get(name)]
    versions = [f"spec_lm {machine.get('spec_lm', '?')}", f"torch {machine.get('torch', '?')}", *known]
    versions += [f"Python {results.data['machine_info'].get('python_version', '?')}"]
    run = f"suite {asked['suite']}, {asked['sessions']} sessions of {asked['seconds']:g} s"
    return " | ".join([str(machine.get("device", "?")), threads, *versions, run])


def ceilings(results: Results) -> str:
    """What the machine can do, as it was measured."""
    found = []
    for (kind, dtype), rate in results.ceilings.items():
        what, unit = (f"products in {dtype}", "FLOP/s") if kind == "product" else ("copies", "B/s")
        sessions = results.ceilings_of_sessions(kind, dtype)
        within = f" (in a session {_si(min(sessions))}{unit} .. {_si(max(sessions))}{unit})" if sessions else ""
        found.append(f"{what} {_si(rate)}{unit}{within}")
    return "ceilings: " + ", ".join(found)


def rows(results: Results) -> Iterator[tuple[Case, list[tuple[str, ...]]]]:
    """Each case with its table, a row a variant."""
    for case, cells in results.cells().items():
        yield case, [cell_texts(cell) for cell in cells]


def cell_texts(cell: Cell) -> tuple[str, ...]:
    """A row of the table; without a figure, why."""
    if cell.seconds is None:
        return (printable(cell.variant), printable(" ".join(cell.note.split())))
    quartiles = " .. ".join(map(seconds, cell.quartiles))
    speedup = "1" if cell.speedup is None else "{:.2f} ({:.2f} .. {:.2f})".format(*cell.speedup)
    products, memory = ("" if part is None else f"{part:.0%}" for part in cell.share)
    peak = "" if cell.memory is None else f"{cell.memory / 2**20:.1f} MiB"
    compiling = "" if cell.compile_seconds is None else seconds(cell.compile_seconds)
    name = printable(cell.variant)
    memory = "in cache" if cell.in_cache else memory
    return (name, seconds(cell.seconds), quartiles, speedup, products, memory, cell.limit, peak, compiling)


def seconds(value: float) -> str:
    """A time with three digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * scale >= 1 or unit == "us":
            return f"{value * scale:.3g} {unit}"
    raise AssertionError  # the last unit takes what is left


def _si(value: float) -> str:
    return next(
        f"{value / scale:.3g} {prefix}"
        for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("", 1))
        if value >= scale or scale == 1
    )


def growth_text(growth: Growth) -> str:
    """How a curve grows, in a line."""
    memory = "" if growth.memory_exponent is None else f", peak memory ~ {growth.scan}^{growth.memory_exponent:.2f}"
    return f"{printable(growth.variant)}: time ~ {growth.scan}^{growth.exponent:.2f}{memory}   ({growth.curve})"


def change_text(change: Change) -> str:
    """A cell against the baseline, in a line."""
    return f"{change.slower:.2f} times the time of the baseline: {printable(change.variant)}, {change.case}"


def terminal(results: Results) -> Iterator[str]:
    """Blocks of text."""
    yield f"{about(results)}\n{ceilings(results)}"
    for case, table in rows(results):
        whole = [row for row in (HEADINGS, *table) if len(row) > 2]
        widths = [max(len(row[i]) for row in whole) for i in range(len(HEADINGS))]
        widths[0] = max(widths[0], *(len(row[0]) for row in table))
        lines = (
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=False)) for row in (HEADINGS, *table)
        )
        yield "\n".join([str(case), *(f"  {line.rstrip()}" for line in lines)])
    if growths := results.growths():
        yield "\n".join(map(growth_text, growths))


def markdown(results: Results, changed: Iterable[Change] = ()) -> str:
    """A page of tables."""
    return _environment().get_template("bench.md.j2").render(_context(results, changed))


def html(results: Results, changed: Iterable[Change] = ()) -> str:
    """One page that needs nothing else, with its plots in it."""
    from spec_lm.bench.plots import plots

    context = _context(results, changed) | {"plots": plots(results)}
    return _environment(escaped=True).get_template("bench.html.j2").render(context)


def _context(results: Results, changed: Iterable[Change]) -> dict[str, object]:
    return {
        "about": about(results),
        "ceilings": ceilings(results),
        "against": results.against,
        "headings": HEADINGS,
        "rows": list(rows(results)),
        "growths": list(map(growth_text, results.growths())),
        "changes": list(map(change_text, changed)),
    }


def _environment(escaped: bool = False) -> Environment:
    return templates_of("spec_lm.bench", {"cell": in_markdown}, autoescape=escaped, keep_trailing_newline=True)


def in_markdown(text: str) -> str:
    """Text of unknown origin in a cell of a table: no markup, no link, no tag."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>()#!|~&" and c not in "()" else c for c in text)
