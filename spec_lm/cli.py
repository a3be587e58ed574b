"""The command line: `spec-lm check`, `clauses`, `explain` and `faults`; the other commands lie in `commands/`.

A thin front end: it prints what the runner emits. Nothing heavy is imported before a command needs it, so that
`spec-lm --help` answers at once.
"""

import contextlib
import io
import json
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

import spec_lm
from spec_lm.commands import bench, projects, reports
from spec_lm.commands.console import ERROR, mendable, new_console, print_failure, print_text, say, written
from spec_lm.conformance.report import Outcome, Report, UserError, outcome_line, write_lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from spec_lm.conformance.clause import Clause
    from spec_lm.conformance.config import Config

LAST = Path(".spec-lm/last.jsonl")
FAULTS_EXPLAINED = 10
MOST_MEMORY = 2**20  # GiB

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="The executable specification of a Transformer language model.",
)


class Level(StrEnum):
    """Which clauses: MUST alone, or SHOULD as well."""

    must = "must"
    should = "should"


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # text of unknown origin must not end the program in a narrow encoding
            stream.reconfigure(errors="backslashreplace")
    app()


def _version(asked: bool) -> None:
    if asked:
        print(f"spec_lm {spec_lm.__version__}, spec {spec_lm.SPEC_VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the versions and exit.")
    ] = False,
) -> None:
    """The executable specification of a Transformer language model."""


# --------------------------------------------------------------------------------------------------------------- check


@app.command()
def check(
    implementations: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[IMPL]...",
            help="A path (tests/adapters.py), a module, module:object, or operator=module:function pairs, which "
            "together are one implementation. Without one, the built-in reference is checked.",
            show_default=False,
        ),
    ] = None,
    level: Annotated[
        Level | None, typer.Option(help="MUST clauses alone (the default), or SHOULD clauses as well.")
    ] = None,
    operator: Annotated[
        list[str] | None, typer.Option(metavar="OP", help="Check this operator only; repeatable.")
    ] = None,
    clause: Annotated[list[str] | None, typer.Option(metavar="ID", help="Check this clause only; repeatable.")] = None,
    examples: Annotated[
        int | None, typer.Option(min=1, help="Examples drawn for each clause, 50 by default.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of all draws: the same seed gives the same report.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="Where the arguments lie: cpu, cuda, ..")] = "cpu",
    convention: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Declare a convention; repeatable.")
    ] = None,
    support: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=JSON", help="Declare the sizes, masks or dtypes it takes; repeatable."),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(metavar="OP|all", help="Exit with 2 where this operator is not provided; repeatable."),
    ] = None,
    shard: Annotated[
        str,
        typer.Option(metavar="I/N", help="Check only part I of N; `spec-lm merge` joins the parts."),
    ] = "",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Operators checked at a time; by default one a core, at most 4.")
    ] = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Check in this process, for debuggers; else each operator has its own.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read [tool.spec-lm] there, not in the nearest pyproject.toml.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="S", min=0.1, help="Seconds a clause may take, 60 by default.", show_default=False),
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB", min=0.1, help="GiB a process may take beside torch; not with a device, Linux only."
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write every outcome, as it comes, as JSON Lines.")
    ] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print failures and the last line only.")] = False,
    all_failures: Annotated[
        bool, typer.Option("--all-failures", help="Tell all failures of an operator in full, not the first three.")
    ] = False,
) -> None:
    """Check implementations against the clauses.

    Exit code: 0 all hold, 1 a clause fails, 2 it could not be checked (an error, interrupted, nothing or not everything
    required provided).
    """
    with mendable(), _ended_as_interrupted(), contextlib.ExitStack() as files:
        asked: dict[str, Any] = {"operators": operator, "clauses": clause, "seed": seed, "dtype": dtype}
        asked |= {"device": device, "require": require or (), "shard": shard}
        conventions = dict(_pair("--convention", each) for each in convention or ())
        supports = dict(_support(each) for each in support or ())
        sinks = [_Sink(report, files.enter_context(written(report)), required=True)] if report else []
        xml = files.enter_context(written(junit)) if junit else None
        again = report
        if report and report.resolve() == LAST.resolve():
            again = LAST
        elif last := _last_file(files):
            sinks.append(_Sink(LAST, last))
            again = LAST
        how = _how(in_process, jobs, timeout, memory, device)
        from spec_lm.conformance.implementation import grouped

        declared = _declared(config)
        named = implementations or list(declared.implementation)
        asked |= declared.asked(named, level, examples, conventions, supports)
        checks = _Checks(new_console(), sinks, asked, quiet, all_failures, str(again) if again else "", how)
        codes = [checks.one(each) for each in grouped(named) or [None]]
        if xml is not None and checks.reports:
            _write_junit(xml, checks.reports)
    is_whole = not checks.interrupted and not any(sink.required and sink.has_failed for sink in sinks)
    raise typer.Exit(ERROR if not is_whole else 1 if 1 in codes else max(codes))


@contextlib.contextmanager
def _ended_as_interrupted() -> Iterator[None]:
    """Inside, a request to end, as a CI sends it, is taken as an interrupt is, so that no process is left."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    asked = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in asked}
    for number in asked:
        if before[number] is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in asked:
            signal.signal(number, before[number] or signal.SIG_DFL)


def _how(
    in_process: bool, jobs: int | None, timeout: float | None, memory: float | None, device: str
) -> Callable[..., Report]:
    """What runs a check: worker processes, or this one."""
    if in_process and (jobs or memory):
        raise UserError("--jobs and --memory are about processes of their own; leave --in-process out")
    if memory and not memory <= MOST_MEMORY:
        raise UserError(f"--memory is {memory}; expected GiB, {MOST_MEMORY} at most; leave it out for no limit")
    if memory and sys.platform != "linux":
        raise UserError("--memory is kept on Linux only; leave it out")
    if memory and device != "cpu":
        raise UserError(
            f"--memory cannot be kept with --device {device}, which reserves more than it takes; leave it out"
        )
    if in_process:
        from spec_lm.conformance.runner import check as run

        return partial(run, timeout=timeout)
    from spec_lm.conformance import workers

    workers.start()
    jobs = jobs or (workers.default_jobs() if device == "cpu" else 1)
    return partial(workers.check_in_workers, jobs=jobs, timeout=timeout or workers.TIMEOUT, memory=memory)


def _declared(path: Path | None) -> "Config":
    """What the project declares; reading it takes the register of clauses."""
    from spec_lm.conformance.config import read_config

    return read_config(path)


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"{option} {text}: write it as name=value")
    return name, value


def _support(text: str) -> tuple[str, Any]:
    name, value = _pair("--support", text)
    try:
        return name, json.loads(value)
    except ValueError:
        raise UserError(f'--support {text}: write the value as JSON, as in d_head=[64] or mask=["causal"]') from None


@dataclass
class _Sink:
    """A report's file while it is written: that its disk is full is told once, and does not end the check.

    Args:
        path: of the file.
        file: opened.
        required: whether it was asked for; then nothing is run where not even the header can be written.
        has_failed: whether something could not be written.
    """

    path: Path
    file: TextIO
    required: bool = False
    has_failed: bool = False

    def write(self, line: dict[str, Any]) -> None:
        if self.has_failed:
            return
        try:
            write_lines(self.file, [line])
        except OSError as error:
            self.has_failed = True
            with contextlib.suppress(OSError):
                self.file.close()
            why = f"cannot write {self.path}: {error.strerror}"
            if self.required and line["kind"] == "header":
                raise UserError(f"{why}; make room, or give another path") from error
            say(f"spec-lm: {why}; it is not complete")


def _last_file(files: contextlib.ExitStack) -> TextIO | None:
    """The report of the last check, kept in the current folder for `spec-lm replay`."""
    try:
        LAST.parent.mkdir(exist_ok=True)
        ignored = LAST.parent / ".gitignore"
        if not ignored.exists():
            ignored.write_text("*\n", encoding="utf-8")
        return files.enter_context(_moved_to_last())
    except OSError as error:
        say(f"spec-lm: {LAST} cannot be written ({error.strerror}); failures of this check cannot be replayed from it")
        return None


@contextlib.contextmanager
def _moved_to_last() -> Iterator[TextIO]:
    """A file of this check's own, since others may run in the folder; it becomes the last report at its end, unless
    nothing was written."""
    own = LAST.with_name(f".{secrets.token_hex(8)}.jsonl")
    with own.open("x", encoding="utf-8") as file:
        try:
            yield file
        finally:
            with contextlib.suppress(OSError):  # of a full disk, which was told
                file.close()
            try:
                own.replace(LAST) if own.stat().st_size else own.unlink()
            except OSError as error:
                say(f"spec-lm: {LAST} cannot be written ({error.strerror}); this check's report is {own}")


def _write_junit(file: TextIO, reports: list[Report]) -> None:
    from spec_lm.conformance.junit import junit_text

    file.write(junit_text(reports))


@dataclass
class _Checks:
    """Checks implementations in turn, printing and writing outcomes as they come."""

    console: "Console"
    sinks: list[_Sink]
    asked: dict[str, Any]
    quiet: bool
    all_failures: bool
    again: str
    run: Callable[..., Report]
    reports: list[Report] = field(default_factory=list)
    interrupted: bool = False

    def one(self, implementation: Any) -> int:
        """Check one; its exit code. What cannot be loaded is told, and the next one is checked."""
        from spec_lm.conformance.implementation import BUILT_IN, ImplementationError

        if self.interrupted:
            return ERROR
        view = _View(self.console, self.sinks, self.quiet)
        try:
            with view:
                what = BUILT_IN if implementation is None else implementation
                report = self.run(what, **self.asked, on_start=view.start, on_outcome=view.outcome)
        except ImplementationError as error:
            say(f"spec-lm: {error}")
            return ERROR
        except KeyboardInterrupt:
            self.interrupted = True
            report = Report(view.header, tuple(view.outcomes), tuple(view.header.get("required", ())), complete=False)
            if not view.header:
                say(f"spec-lm: interrupted before {'the next' if self.reports else 'anything'} was checked")
                return ERROR
        self._finish(view, report, implementation is None)
        return report.exit_code

    def _finish(self, view: "_View", report: Report, built_in: bool) -> None:
        from spec_lm.conformance.display import failures_text, summary_text, warnings_text

        self.reports.append(report)
        view.write(report.footer())
        for number, text in enumerate(failures_text(report, self.again, self.all_failures)):
            if not self.quiet or number:
                self.console.print()
            print_failure(self.console, text)
        for line in warnings_text(report):
            print_text(self.console, line, style="yellow")
        if not self.quiet or report.of("fails", "error"):
            self.console.print()
        hint = "; check your own with `spec-lm check path/to/adapters.py`" if built_in else ""
        print_text(self.console, summary_text(report) + hint, style="bold")


class _View:
    """One check as it runs: its lines on the screen and in the report files."""

    def __init__(self, console: "Console", sinks: list[_Sink], quiet: bool) -> None:
        self.console, self.sinks, self.quiet = console, sinks, quiet
        self.header: dict[str, Any] = {}
        self.outcomes: list[Outcome] = []
        self._of_operator: list[Outcome] = []
        self._progress: Live | None = None

    def __enter__(self) -> "_View":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._end_operator()

    def write(self, line: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.write(line)

    def start(self, header: dict[str, Any]) -> None:
        """Before the first clause runs."""
        from spec_lm.conformance.display import header_text

        self.header = header
        self.write({"kind": "header", **header})
        self._line(header_text(header))
        if not self.quiet and sys.stdout.isatty() and not self.console.is_dumb_terminal:
            from rich.live import Live

            self._progress = Live(console=self.console, auto_refresh=False, transient=True)
            self._progress.start()
        self._show_progress()

    def outcome(self, outcome: Outcome) -> None:
        """A clause came to something."""
        self.write(outcome_line(outcome))
        if self._of_operator and self._of_operator[0].operator != outcome.operator:
            self._end_operator()
        self.outcomes.append(outcome)
        self._of_operator.append(outcome)
        self._show_progress()

    def _end_operator(self) -> None:
        from spec_lm.conformance.display import operator_text
        from spec_lm.conformance.operators import OPERATORS

        if self._of_operator:
            width = max(len(name) for name in OPERATORS)
            self._line(operator_text(self._of_operator[0].operator, self._of_operator, width))
        self._of_operator = []

    def _line(self, text: str) -> None:
        if not self.quiet:
            print_text(self.console, text)

    def _show_progress(self) -> None:
        if self._progress is not None:
            from rich.text import Text

            operator = self._of_operator[0].operator if self._of_operator else ""
            done = f"  {len(self.outcomes)} of {self.header['clauses']} clauses   {operator}"
            self._progress.update(Text(done, style="dim", no_wrap=True, overflow="ellipsis"), refresh=True)


# ----------------------------------------------------------------------------------------- clauses, and explain


@app.command()
def clauses(
    level: Annotated[Level, typer.Option(help="MUST clauses alone, or SHOULD clauses as well.")] = Level.should,
    operator: Annotated[list[str] | None, typer.Option(metavar="OP", help="Of this operator only; repeatable.")] = None,
) -> None:
    """List the clauses: id, level, sentence."""
    from spec_lm.conformance.runner import select

    with mendable():
        chosen = select(operator, None, level.value)
    console, widest = new_console(), max((len(each.id) for each in chosen), default=0)
    if console.is_terminal:
        from rich.table import Table
        from rich.text import Text

        table = Table("clause", "level", "sentence", box=None, padding=(0, 2, 0, 0))
        for each in chosen:
            table.add_row(Text(each.id, no_wrap=True), each.level.upper(), Text(each.sentence))
        console.print(table)
    else:
        for each in chosen:
            print_text(console, f"{each.id:<{widest}}  {each.level.upper():<6}  {each.sentence}")


@app.command()
def explain(
    clause: Annotated[str, typer.Argument(metavar="CLAUSE", help="Its id, as in softmax.shift_invariance.")],
) -> None:
    """Explain a clause: what it says, where that comes from, what it catches, and its property."""
    import inspect

    from spec_lm.conformance.runner import known_clause

    with mendable():
        found = known_clause(clause)
    console = new_console()
    print_text(console, f"{found.id}   {found.level.upper()}", style="bold")
    print_text(console, f"  {found.sentence}\n")
    for label, text in (("source", found.source), ("catches", found.catches), *_faults_of(found)):
        print_text(console, f"{label:<9} {text}")
    file = inspect.getsourcefile(found.body) or ""
    print_text(console, f"{'property':<9} {file}:{found.body.__code__.co_firstlineno}\n")
    print_text(console, inspect.getsource(found.body).rstrip())


def _faults_of(clause: "Clause") -> Iterator[tuple[str, str]]:
    """How many faults the clause detects, and the first of them, a line each."""
    from spec_lm.conformance.diagnosis import catalogue

    detected = [fault for fault in catalogue() if fault.operator == clause.operator and clause.name in fault.fails]
    yield "detects", f"{len(detected)} fault{'' if len(detected) == 1 else 's'}{':' if detected else ''}"
    for fault in detected[:FAULTS_EXPLAINED]:
        yield "", f"{fault.does} ({fault.report or fault.id})"
    if len(detected) > FAULTS_EXPLAINED:
        yield "", f"and {len(detected) - FAULTS_EXPLAINED} more"


# ------------------------------------------------------------------------------------------- reports and projects

for command in (
    *(reports.report, reports.replay, reports.diff, reports.compare, reports.merge),
    *(projects.waive, projects.init, bench.bench),
):
    app.command()(command)


# -------------------------------------------------------------------------------------------------------------- faults


@app.command()
def faults(
    examples: Annotated[int, typer.Option(min=1, help="Examples drawn for each clause.")] = 16,
    seed: Annotated[int, typer.Option(help="Of all draws: the same seed gives the same matrix.")] = 0,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes at a time; by default one a core, at most 4.")
    ] = None,
    operator: Annotated[
        list[str] | None, typer.Option(metavar="OP", help="Faults of this operator only; repeatable.")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Put the matrix, or this part of it, into the package.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--check", help="Also fail where the matrix in the package is not that of these sources.")
    ] = False,
) -> None:
    """Check the specification: run every clause on every fault of the catalogue.

    Exit code: 1 where a fault is missed, a clause detects nothing, a fault satisfies no clause or could not be run, or
    (with --check) the matrix in the package is stale or lacks a detection that the catalogue names.
    """
    from spec_lm import matrix
    from spec_lm.conformance import workers

    with mendable():
        known, clauses = matrix.chosen(operator or ())
        console = new_console()
        about = f"{len(known)} faults, {len(clauses)} clauses | seed {seed}, {examples} examples"
        print_text(console, f"spec_lm {spec_lm.__version__}, spec {spec_lm.SPEC_VERSION} | {about}")
        if write and operator:
            matrix.read(matrix.PACKAGED).refuse_part(examples, seed)
        with _counted(console, len(known)) as count:
            asked = {"examples": examples, "seed": seed, "jobs": jobs or workers.default_jobs()}
            measured = matrix.measure(known, clauses, **asked, on_found=count)
        if write and not measured.errors:
            whole = matrix.read(matrix.PACKAGED).with_part(measured, operator) if operator else measured
            text = whole.text()
            with written(matrix.PACKAGED) as file:
                file.write(text)
        stale = matrix.staleness(matrix.read(matrix.PACKAGED), known, clauses) if compare else None
        found = matrix.findings(measured, known, stale)
        for line in matrix.findings_text(found, measured):
            print_text(console, line)
    raise typer.Exit(found.exit_code)


@contextlib.contextmanager
def _counted(console: "Console", total: int) -> Iterator[Callable[[int], None]]:
    """On a terminal, how many faults have been run so far."""
    if not sys.stdout.isatty() or console.is_dumb_terminal:
        yield lambda number: None
        return
    from rich.live import Live
    from rich.text import Text

    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda number: live.update(Text(f"  {number} of {total} faults", style="dim"), refresh=True)
