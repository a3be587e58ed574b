"""What the tests of the machine share: the command line in this process, and small implementations."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from spec_lm import cli
from spec_lm.conformance import workers
from spec_lm.conformance.report import Cause, Outcome, Report

MARKUP = "<img src=x onerror=alert(1)></pre></details><script>alert(2)</script>"
MARKDOWN = "\n\n# head\n\n```\n````\n~~~\n|a|b|\n|-|-|\n[l](javascript:alert(3)) ![i](//x.example/i) `c` @you **b**"
HOSTILE = f"raised TypeError: {MARKUP}{MARKDOWN} {{{{ 7 * 7 }}}} \x1b[2J\x07\u202e\udc80 www.x.example"


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
    taken: dict[int, Any] = {signal.SIGINT: signal.default_int_handler}
    if hasattr(signal, "SIGHUP"):
        taken[signal.SIGHUP] = signal.SIG_DFL
    before = {number: signal.signal(number, handler) for number, handler in taken.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def hostile_report() -> Report:
    """A failure, an error and an absent operator, of which every text tries to be more than text."""
    said: dict[str, Any] = {"message": HOSTILE, "sentence": HOSTILE}
    stored = {"x": {"shape": [1], "dtype": "float32", "data": [1.0]}, HOSTILE: HOSTILE}
    evidence = {"got": HOSTILE, "expected": [1.0], "index": [0], "error": None, "bound": None, "dtype": "float32"}
    failed = Outcome("softmax.any_dim", "softmax", "must", "fails", **said, reproduction=HOSTILE, reached={HOSTILE: 1})
    failed = replace(failed, counterexample={"recipes": {}, "values": stored}, evidence=evidence)
    error = Outcome("softmax.sums_to_one", "softmax", "must", "error", **said)
    absent = Outcome("silu.agrees_with_the_oracle", "silu", "must", "absent", **said)
    header = {"implementation": HOSTILE, "spec": 1, "versions": {"spec_lm": HOSTILE, "torch": HOSTILE}, "level": "must"}
    header |= {"device": HOSTILE, "dtype": HOSTILE, "seed": 0, "examples": 5, "conventions": {HOSTILE: HOSTILE}}
    return Report(header, (failed, error, absent), diagnosis=(Cause("softmax", HOSTILE),))
