"""`spec-lm report`, `diff`, `compare`, `merge` and `replay`: what is done with reports once they are written."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spec_lm.commands.console import ERROR, mendable, new_console, print_failure, print_text, written
from spec_lm.conformance.report import Outcome, Report, UserError, read_reports, write_lines

if TYPE_CHECKING:
    from rich.console import Console

ReportFile = Annotated[Path, typer.Argument(metavar="REPORT", help="A report file, as in .spec-lm/last.jsonl.")]


class Format(StrEnum):
    """How a report is shown."""

    terminal = "terminal"
    markdown = "markdown"
    html = "html"
    junit = "junit"


# -------------------------------------------------------------------------------------------------------------- report


def report(
    report: ReportFile,
    format: Annotated[Format, typer.Option(help="How to show it.")] = Format.terminal,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it there, not to stdout.")
    ] = None,
    all_failures: Annotated[
        bool, typer.Option("--all-failures", help="In a terminal: tell all failures in full, not the first three.")
    ] = False,
) -> None:
    """Show a report: in a terminal, as Markdown for a pull request, as one HTML page, or as JUnit XML for a CI.

    The exit code says whether it could be shown, not what it says.
    """
    with mendable():
        reports = _read(report)
        if format is Format.terminal and output is None:
            _print_blocks(reports, str(report), all_failures)
            return
        text = _rendered(reports, format, str(report), all_failures)
        if output is None:
            sys.stdout.write(text)
            return
        with written(output) as file:
            file.write(text)


def _rendered(reports: list[Report], format: Format, file: str, all_failures: bool) -> str:
    """Reports in one of the formats; each is imported where it is asked for."""
    if format is Format.markdown:
        from spec_lm.conformance.markdown import markdown_text

        return markdown_text(reports, file)
    if format is Format.html:
        from spec_lm.conformance.html import html_text

        return html_text(reports, file)
    if format is Format.junit:
        from spec_lm.conformance.junit import junit_text

        return junit_text(reports)
    from spec_lm.conformance.terminal import terminal_blocks

    return "\n\n".join(terminal_blocks(reports, file, all_failures)) + "\n"


def _print_blocks(reports: list[Report], file: str, all_failures: bool) -> None:
    from spec_lm.conformance.terminal import terminal_blocks

    console = new_console()
    for number, block in enumerate(terminal_blocks(reports, file, all_failures)):
        if number:
            console.print()
        if block.startswith(("FAILS", "ERROR")):
            print_failure(console, block)
        else:
            print_text(console, block)


# -------------------------------------------------------------------------------------------------- several reports


def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="An earlier report.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="A later one.")],
) -> None:
    """Print what changed from one report to another, and nothing else.

    Exit code: 1 where a clause that held fails or could not be run, or one that was waived fails; 2 where a report
    cannot be read or the new one is incomplete; else 0.
    """
    from spec_lm.conformance.changes import difference, paired

    with mendable():
        pairs = list(paired(_read(old), _read(new)))
        found = [difference(*pair) for pair in pairs]
        console = new_console()
        for (_, report), each in zip(pairs, found, strict=True):
            if len(pairs) > 1:
                print_text(console, str(report.header.get("implementation", "")), style="bold")
            for line in each.lines():
                print_text(console, line, style="red" if line.startswith("worse ") else "")
    if any(each.of("worse") for each in found):
        raise typer.Exit(1)
    if not all(each.complete for each in found):
        raise typer.Exit(ERROR)


def compare(
    files: Annotated[list[Path], typer.Argument(metavar="REPORT...", help="Report files.")],
    every: Annotated[
        bool, typer.Option("--all", help="Every clause, not only those that came to different outcomes.")
    ] = False,
) -> None:
    """Show implementations side by side: a column each, a row a clause."""
    from spec_lm.conformance.changes import side_by_side

    with mendable():
        reports = [report for file in files for report in _read(file)]
        if len(reports) < 2:
            raise UserError("compare needs the reports of at least two implementations")
        console = new_console()
        for line in side_by_side(reports, every):
            print_text(console, line)


def merge(
    files: Annotated[list[Path], typer.Argument(metavar="REPORT...", help="The reports of all shards of one check.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the whole report.")],
) -> None:
    """Join the reports of `spec-lm check --shard 1/N` to N/N into one. Exit code: the verdict's, as of a check.

    Shards of different implementations, versions, seeds or settings are refused, and so are missing ones.
    """
    from spec_lm.conformance.display import summary_text
    from spec_lm.conformance.shards import merged

    with mendable():
        found = {str(file): _read(file) for file in files}
        first, *others = found
        for other in others:
            if len(found[other]) != len(found[first]):
                numbers = f"{len(found[first])} in {first}, {len(found[other])} in {other}"
                raise UserError(f"these are no shards of one check: the number of implementations is {numbers}")
        whole = [merged(dict(zip(found, each, strict=True))) for each in zip(*found.values(), strict=True)]
        with written(output) as file:
            for report in whole:
                write_lines(file, report.lines())
        console = new_console()
        for report in whole:
            print_text(console, summary_text(report), style="bold")
    codes = [report.exit_code for report in whole]
    raise typer.Exit(1 if 1 in codes else max(codes))


def _read(file: Path) -> list[Report]:
    """The reports of a file, at least one.

    Raises:
        UserError: there is none.
    """
    if reports := read_reports(file):
        return reports
    raise UserError(f"{file} holds no report; write one with `spec-lm check --report {file}`")


# -------------------------------------------------------------------------------------------------------------- replay


def replay(
    report: ReportFile,
    clause: Annotated[
        str | None, typer.Argument(metavar="[CLAUSE]", help="Only this clause; by default all that fail.")
    ] = None,
    code: Annotated[bool, typer.Option("--code", help="Print failures in plain PyTorch, and run nothing.")] = False,
) -> None:
    """Run a report's counterexamples again, as its header says.

    Exit code: 1 where one still fails, 2 where an operator is no longer provided, else 0.
    """
    from spec_lm.conformance.runner import known_clause
    from spec_lm.conformance.runner import replay as run

    with mendable():
        wanted = [known_clause(clause).id] if clause else []
        reports = _read(report)
        failed = [outcome for each in reports for outcome in each.of("fails")]
        if wanted and wanted[0] not in [outcome.clause for outcome in failed]:
            raise UserError(f"{report} holds no counterexample of {clause}; {_stored_text(failed)}")
        if code:
            print("\n\n".join(_codes(failed, wanted, report)))
            return
        view = _Again(new_console(), report)
        outcomes = [outcome for each in reports for outcome in run(each, wanted, on_outcome=view.outcome)]
        still = [outcome.outcome for outcome in outcomes]
        total = f"{len(still)} counterexample{'' if len(still) == 1 else 's'}"
        counts = f"{still.count('fails')} still fail, {still.count('holds')} fixed"
        counts += f", {still.count('absent')} not provided" if "absent" in still else ""
        counts += f", {still.count('not_judged')} not judged" if "not_judged" in still else ""
        print_text(
            view.console, f"{total} of {report} replayed: {counts}" if still else f"{report} holds no counterexample"
        )
    raise typer.Exit(1 if "fails" in still else ERROR if "absent" in still else 0)


def _stored_text(failed: list[Outcome]) -> str:
    ids = dict.fromkeys(outcome.clause for outcome in failed)
    return f"it holds those of {', '.join(ids)}" if ids else "nothing fails in it"


def _codes(failed: list[Outcome], wanted: list[str], report: Path) -> Iterator[str]:
    """The code of one failure; of all of them with their ids above, where none is named.

    Raises:
        UserError: there is none.
    """
    chosen = [o for o in failed if o.reproduction and (not wanted or o.clause in wanted)]
    if not chosen and wanted:
        again = f"`spec-lm replay {report} {wanted[0]}` runs it again"
        raise UserError(f"{wanted[0]} has no code in {report}, since none fails by itself in plain PyTorch; {again}")
    if not chosen:
        raise UserError(f"{report} holds no code; {_stored_text(failed)}")
    if wanted:
        yield chosen[0].reproduction
    else:
        yield from (f"# {outcome.clause}\n{outcome.reproduction}" for outcome in chosen)


@dataclass
class _Again:
    """Prints what stored counterexamples come to now."""

    console: "Console"
    report: Path

    def outcome(self, outcome: Outcome) -> None:
        from spec_lm.conformance.display import failure_text

        if outcome.outcome == "fails":
            print_text(self.console, f"still fails   {outcome.clause}")
            print_failure(self.console, failure_text(outcome, f"spec-lm replay {self.report} {outcome.clause}"))
            self.console.print()
        else:
            word = {"holds": "fixed", "not_judged": "not judged"}.get(outcome.outcome, "not provided")
            print_text(self.console, f"{word:<13} {outcome.clause}")
