"""What the tests of the machine share: the command line in this process, and small implementations."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

from spec_lm import cli
from spec_lm.conformance import workers


@dataclass
class Ran:
    """What a command came to."""

    code: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        return self.out.rstrip().splitlines()[-1]


@pytest.fixture
def spec_lm_command(tmp_path: Path, monkeypatch, capsys) -> Callable[..., Ran]:
    """`spec-lm` with these arguments, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> Ran:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exited:
            cli.app([str(argument) for argument in arguments], prog_name="spec-lm")
        captured = capsys.readouterr()
        return Ran(int(exited.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Write a file below the test's folder; its path."""

    def written(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text), encoding="utf-8")
        return path

    return written


@pytest.fixture(autouse=True, scope="session")
def children_are_forked_from_a_process_that_has_imported_torch() -> None:
    """Before any test starts a child: what they are forked from cannot be changed later."""
    workers.start()


@pytest.fixture(autouse=True)
def interrupts_are_taken() -> Iterator[None]:
    """A test run in the background ignores interrupts; what is tested here is a process that takes them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
