"""How every command prints: text as it is, and what the user can mend as one message."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import typer

from spec_lm.conformance.report import UserError, printable

if TYPE_CHECKING:
    from rich.console import Console

ERROR = 2


@contextlib.contextmanager
def mendable() -> Iterator[None]:
    """What the user can mend is one message on stderr and exit code 2, without a traceback."""
    try:
        yield
    except UserError as error:
        say(f"spec-lm: {error}")
        raise typer.Exit(ERROR) from None
    except KeyboardInterrupt:
        say("spec-lm: interrupted")
        raise typer.Exit(ERROR) from None


def say(text: str) -> None:
    """Print on stderr."""
    print(printable(text), file=sys.stderr)


@contextlib.contextmanager
def written(path: Path) -> Iterator[TextIO]:
    """A file to write to, opened before anything runs, so that a wrong path is told at once."""
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    try:
        yield file
    finally:
        try:
            file.close()
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error


def new_console() -> "Console":
    """A terminal that interprets nothing in what it is given."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_text(console: "Console", text: str, style: str = "") -> None:
    """Print text as it is: no markup, no wrapping."""
    from rich.text import Text

    console.print(Text(printable(text), style=style), soft_wrap=True)


def print_failure(console: "Console", text: str) -> None:
    """Print a failure, its first line in red."""
    first, _, rest = text.partition("\n")
    print_text(console, first, style="bold red")
    print_text(console, rest)
