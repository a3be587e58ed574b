"""How every command prints: text as it is, and what the user can mend as one message."""

import contextlib
import io
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import typer

from spec_lm.conformance.report import UserError, printable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
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
    """A file to write to, opened before anything runs, so that a wrong path is told at once; what it held stays until
    something is written, and one that nothing is written to is not left behind."""
    is_new = not os.path.lexists(path)
    try:
        raw = _Replacing(path, "a")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    file = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace")
    try:
        yield file
    finally:
        try:
            file.close()
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        finally:
            if is_new and not raw.has_begun:
                path.unlink(missing_ok=True)


class _Replacing(io.FileIO):
    """A file opened to append, which loses what it held at the first write; what is no regular file has nothing to."""

    has_begun = False

    def write(self, data: "ReadableBuffer", /) -> int | None:
        """Write bytes."""
        if not self.has_begun and stat.S_ISREG(os.fstat(self.fileno()).st_mode):
            self.truncate(0)
        self.has_begun = True
        return super().write(data)


def new_console() -> "Console":
    """A terminal that interprets nothing in what it is given. Where its reader goes away, as `head` does, nothing more
    is printed; what else there is to do is done."""
    from rich.console import Console

    class Unread(Console):
        def on_broken_pipe(self) -> None:
            with contextlib.suppress(SystemExit):
                super().on_broken_pipe()

    return Unread(highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_text(console: "Console", text: str, style: str = "") -> None:
    """Print text as it is: no markup, no wrapping."""
    from rich.text import Text

    console.print(Text(printable(text), style=style), soft_wrap=True)


def print_failure(console: "Console", text: str) -> None:
    """Print a failure, its first line in red."""
    first, _, rest = text.partition("\n")
    print_text(console, first, style="bold red")
    print_text(console, rest)
