"""`spec-lm waive` and `init`: what a project keeps beside its implementation."""

import json
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spec_lm.commands.console import ERROR, mendable, say, written
from spec_lm.conformance.report import Report, UserError

if TYPE_CHECKING:
    import tomlkit

    from spec_lm.conformance.config import Config
    from spec_lm.conformance.waivers import Waiver


# --------------------------------------------------------------------------------------------------------------- waive


def waive(
    implementations: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[IMPL]...", help="As for check; by default what the project declares.", show_default=False
        ),
    ] = None,
    reason: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Why clauses may fail that fail now and have no waiver yet.")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Put the list into the file, and keep the rest of it; else it is printed.")
    ] = False,
    level: Annotated[
        str | None, typer.Option(metavar="must|should", help="MUST clauses alone, or SHOULD clauses as well.")
    ] = None,
    operator: Annotated[list[str] | None, typer.Option(metavar="OP", help="This operator only; repeatable.")] = None,
    clause: Annotated[list[str] | None, typer.Option(metavar="ID", help="This clause only; repeatable.")] = None,
    examples: Annotated[int | None, typer.Option(min=1, help="Examples drawn for each clause.")] = None,
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 0,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Instead of the nearest pyproject.toml; it may be a new file.")
    ] = None,
) -> None:
    """Write or refresh the list of waivers: what fails now, each with its counterexample and a reason.

    Reasons that are there are kept; waivers of clauses that hold again are left out. With --write, a file that names no
    implementation gets the one they are about: they do not count for another.
    """
    from spec_lm.conformance import workers

    with mendable():
        workers.start()  # before this process imports torch itself
        from spec_lm.conformance.implementation import is_pair
        from spec_lm.conformance.waivers import Waiver

        declared = _declared(config)
        named = list(implementations or declared.implementation)
        if not named or (len(named) > 1 and not all(map(is_pair, named))):
            raise UserError("waive is about one implementation: a path, a module, or operator=module:function pairs")
        asked: dict[str, Any] = {"operators": operator, "clauses": clause, "seed": seed}
        asked |= declared.asked(named, level, examples)
        file = config or declared.path
        of = () if declared.implementation else tuple(named)
        if write:  # what stands in its way is told before the check
            _text_with({"any clause": Waiver("any reason")}, file, of)
        what: Any = tuple(named) if is_pair(named[0]) else named[0]
        report = workers.check_in_workers(what, jobs=workers.default_jobs(), **asked)
        found = _Refreshed.of(report, dict(declared.waivers), reason)
        if write:
            _write(found.waivers, file, of)
        else:
            print(_document(found.waivers).as_string(), end="")
        say(found.text())
        errors = [outcome for outcome in report.of("error") if outcome.clause not in found.dropped]
        for outcome in errors:
            say(f"ERROR  {outcome.clause}: {outcome.message}")
    if errors:
        raise typer.Exit(ERROR)


def _declared(path: Path | None) -> "Config":
    from spec_lm.conformance.config import Config, read_config

    return Config(path) if path and not path.exists() else read_config(path)


@dataclass(frozen=True)
class _Refreshed:
    """The waivers that are needed now.

    Args:
        waivers: by clause id.
        new: those that were not there.
        dropped: those of clauses that hold now.
    """

    waivers: dict[str, "Waiver"]
    new: tuple[str, ...]
    dropped: tuple[str, ...]

    @classmethod
    def of(cls, report: Report, before: dict[str, "Waiver"], reason: str | None) -> "_Refreshed":
        """By what a check came to; waivers of clauses that did not run stay.

        Raises:
            UserError: a new waiver has no reason.
        """
        from spec_lm.conformance.waivers import Waiver, is_needless

        new = [outcome.clause for outcome in report.of("fails")]
        if new and not (reason or "").strip():
            fail = f"{len(new)} clauses fail" if len(new) > 1 else "a clause fails"
            raise UserError(f"{fail} without a waiver: {', '.join(new)}; say why that is accepted by --reason")
        dropped = [outcome.clause for outcome in report if is_needless(outcome)]
        waivers = {clause: waiver for clause, waiver in before.items() if clause not in dropped}
        for outcome in report.of("fails", "waived"):
            kept = before[outcome.clause].reason if outcome.clause in before else str(reason).strip()
            stored = outcome.counterexample or {}
            waivers[outcome.clause] = Waiver(kept, stored.get("recipes"))
        return cls(waivers, tuple(new), tuple(dropped))

    def text(self) -> str:
        """What changed."""
        parts = [f"{len(self.waivers)} waived", f"new: {', '.join(self.new)}" if self.new else "none new"]
        parts += [f"no longer needed: {', '.join(self.dropped)}"] if self.dropped else []
        return f"spec-lm: {'; '.join(parts)}"


def _document(waivers: dict[str, "Waiver"]) -> "tomlkit.TOMLDocument":
    """The list by itself."""
    import tomlkit

    document = tomlkit.document()
    if waivers:
        document["tool"] = tomlkit.table(is_super_table=True)
        document["tool"]["spec-lm"] = tomlkit.table(is_super_table=True)  # type: ignore[index]
        document["tool"]["spec-lm"]["waivers"] = _table(waivers)  # type: ignore[index]
    return document


def _table(waivers: dict[str, "Waiver"]) -> Any:
    import tomlkit

    table = tomlkit.table(is_super_table=True)
    for clause, waiver in waivers.items():
        table[clause] = tomlkit.table()
        table[clause]["reason"] = waiver.reason
        if waiver.recipes is not None:
            table[clause]["counterexample"] = _literal(json.dumps(waiver.recipes))
    return table


def _literal(text: str) -> Any:
    """JSON between single quotes, in which TOML escapes nothing."""
    import tomlkit

    return tomlkit.string(text.replace("'", "\\u0027"), literal=True)


def _write(waivers: dict[str, "Waiver"], path: Path | None, of: Sequence[str]) -> None:
    """Put the list in the place of the one that is there, and leave everything else as it stands."""
    path, text = _text_with(waivers, path, of)
    with written(path) as file:
        file.write(text)


def _text_with(waivers: dict[str, "Waiver"], path: Path | None, of: Sequence[str]) -> tuple[Path, str]:
    """The file, and its text with the list in the place of the one that is there, and the implementation it is of.

    Raises:
        UserError: there is no file, or the list cannot be put into it.
    """
    import tomlkit

    if path is None:
        raise UserError("there is no pyproject.toml, here or above, to write to; name a file by --config")
    document = tomlkit.parse(path.read_text(encoding="utf-8")) if path.exists() else tomlkit.document()
    at_top = "tool" not in document and path.name != "pyproject.toml"
    holder: Any = document
    for name in () if at_top else ("tool", "spec-lm"):
        _make_table(holder, name)
        holder = holder[name]
    holder.pop("waivers", None)
    if waivers and of:
        holder["implementation"] = _seen_from(path.parent, of)
    if waivers:
        holder["waivers"] = _table(waivers)
        holder["waivers"][list(waivers)[-1]].add(tomlkit.nl())
    text = document.as_string()
    if tomllib.loads(text) != document.unwrap():  # dotted keys are not kept where they stand
        raise UserError(f"{path}: cannot add to what it declares of spec-lm; write that as a table, [tool.spec-lm]")
    return path, text


def _seen_from(folder: Path, named: Sequence[str]) -> str | list[str]:
    """An implementation as a file in this folder names it: a path from there on."""
    from spec_lm.conformance.implementation import is_pair, is_path

    if is_pair(named[0]):
        return list(named)
    spec = named[0]
    return Path(os.path.relpath(spec, folder)).as_posix() if is_path(spec) else spec


def _make_table(holder: Any, name: str) -> None:
    """A table of its own under this name, with what an inline one held, which cannot hold the tables of waivers."""
    import tomlkit
    from tomlkit.items import InlineTable

    if name not in holder:
        holder[name] = tomlkit.table(is_super_table=name == "tool")
    elif isinstance(holder[name], InlineTable):
        held = holder.pop(name)
        holder[name] = tomlkit.table()
        holder[name].update(held)


# ---------------------------------------------------------------------------------------------------------------- init


def init(
    path: Annotated[Path, typer.Option(metavar="DIR", help="The project's root.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")] = False,
) -> None:
    """Write adapters to fill in, a test module, and a workflow for GitHub Actions."""
    from spec_lm.commands.starter import ADAPTERS, TESTS, starter_files

    with mendable():
        files = {path / name: text for name, text in starter_files().items()}
        there = [str(file) for file in files if file.exists()]
        if there and not force:
            raise UserError(f"{', '.join(there)} would be overwritten; nothing was written; use --force to do so")
        for file, text in files.items():
            _write_whole(file, text)
            print(f"wrote {file}")
        print(f"Fill in {path / ADAPTERS}; then: spec-lm check {path / ADAPTERS}, or: pytest {path / TESTS}")


def _write_whole(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {file.parent}: {error.strerror}") from error
    with written(file) as opened:
        opened.write(text)
