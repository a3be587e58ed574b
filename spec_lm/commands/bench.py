"""`spec-lm bench`."""

import json
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spec_lm.commands.console import mendable, new_console, print_text, say, written
from spec_lm.conformance.report import UserError

if TYPE_CHECKING:
    from spec_lm.bench.results import Change, Results


class Suite(StrEnum):
    """How much is measured."""

    quick = "quick"
    standard = "standard"
    model = "model"


def bench(
    implementations: Annotated[
        list[str] | None,
        typer.Argument(metavar="[IMPL]...", help="Measured beside the built-in variants.", show_default=False),
    ] = None,
    variant: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Of the built-in variants only this; repeatable.")
    ] = None,
    operator: Annotated[
        list[str] | None, typer.Option(metavar="OP", help="Measure this operator only; repeatable.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where: cpu, cuda, ..")] = "cpu",
    dtype: Annotated[
        list[str] | None, typer.Option(help="float32 (the default), float64, bfloat16 or float16; repeatable.")
    ] = None,
    suite: Annotated[
        Suite,
        typer.Option(
            help="quick: about a minute; standard: everything; model: the language model, and long attention."
        ),
    ] = Suite.quick,
    sessions: Annotated[int, typer.Option(min=1, help="Of each case, the order of the variants rotated.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.001, help="That a variant may take in a session.")] = 0.05,
    threads: Annotated[int | None, typer.Option(min=1, help="Of torch, by default one a core.")] = None,
    examples: Annotated[int, typer.Option(min=1, help="Examples drawn for each clause that must hold.")] = 5,
    against: Annotated[str, typer.Option(metavar="NAME", help="What speed-ups are stated against.")] = "reference",
    report: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write benchmarks.json, benchmarks.md and benchmarks.html there."),
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The benchmarks.json of an earlier run, to compare with.")
    ] = None,
    fail_if_slower: Annotated[
        str | None, typer.Option(metavar="PERCENT", help="Exit with 1 where a figure is slower than the baseline's.")
    ] = None,
) -> None:
    """Measure implementations: time, memory, growth; a figure only where the clauses of its operator hold.

    Exit code: 0 measured, 1 slower than the baseline allows, 2 it could not be measured.
    """
    with mendable():
        _refuse_without("pytest-benchmark", "times")  # before anything of the bench is imported, which needs it
        from spec_lm.bench.results import Results, changes, read
        from spec_lm.bench.run import Asked, run
        from spec_lm.conformance.implementation import grouped

        allowed = _allowed(fail_if_slower, baseline)
        before = Results(read(baseline)) if baseline else None
        folder = _folder(report)
        asked = Asked(
            tuple(grouped(implementations or [])), tuple(variant or ()), tuple(operator or ()), device,
            tuple(dtype or ("float32",)), suite.value, sessions, seconds, threads, examples,
        )  # fmt: skip
        results = Results(run(asked, lambda text: say(f"spec-lm: {text}")), against)
        changed = changes(before, results) if before else []
        _show(results, changed)
        if folder:
            _write(folder, results, changed)
    if allowed is not None and any(change.slower > 1 + allowed for change in changed):
        raise typer.Exit(1)


def _refuse_without(library: str, does: str) -> None:
    """Say what to install where a library of the extra is not there."""
    if not find_spec(library.replace("-", "_")):
        raise UserError(f"{library} is not installed, which {does}; install spec-lm[bench]")


def _allowed(percent: str | None, baseline: Path | None) -> float | None:
    if percent is None:
        return None
    try:
        allowed = float(percent.removesuffix("%")) / 100
    except ValueError:
        raise UserError(f"--fail-if-slower {percent}: write it as a percentage, as in 10%") from None
    if baseline is None:
        raise UserError("--fail-if-slower needs --baseline FILE, the benchmarks.json of an earlier run")
    return allowed


def _folder(report: Path | None) -> Path | None:
    """The folder to write to, made before anything runs, so that a wrong path is told at once."""
    if report is not None:
        _refuse_without("matplotlib", "draws the plots of a report")
        try:
            report.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder {report}: {error.strerror}") from error
    return report


def _show(results: "Results", changed: list["Change"]) -> None:
    from spec_lm.bench.display import change_text, terminal

    print_text(new_console(), "\n\n".join([*terminal(results), *map(change_text, changed)]))


def _write(folder: Path, results: "Results", changed: list["Change"]) -> None:
    from spec_lm.bench.display import html, markdown

    texts: dict[str, Any] = {
        "benchmarks.json": json.dumps(results.data, indent=1),
        "benchmarks.md": markdown(results, changed),
        "benchmarks.html": html(results, changed),
    }
    for name, text in texts.items():
        with written(folder / name) as file:
            file.write(text)
