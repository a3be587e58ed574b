"""`spec-lm bench` from end to end, on the smallest of everything."""

import json
from itertools import product
from pathlib import Path

import pytest

from spec_lm import cli
from spec_lm.bench import cases, run, session
from spec_lm.bench.cases import Case, Sizes
from spec_lm.conformance import workers

WRONG = "def softmax(x, dim):\n    return x.softmax(dim) * 1.01\n"
RIGHT = "def softmax(x, dim):\n    return x.softmax(dim)\n"
RAISES = "def softmax(x, dim):\n    return x.softmax(dim) if x.numel() != 1024 else [][0]\n"
FEW = ("--variant", "reference", "--variant", "fused", "--sessions", "2", "--seconds", "0.001", "--examples", "3")


@pytest.fixture(scope="module", autouse=True)
def _children_are_forked():
    workers.start()


@pytest.fixture
def command(tmp_path: Path, monkeypatch, capsys):
    """`spec-lm bench` on one small case."""
    scanned = [Case("softmax", Sizes(1, n, 4), scan="sequence", memory=True) for n in (2, 16, 256)]
    monkeypatch.setitem(cases.SUITES, "quick", lambda device: iter(scanned))
    monkeypatch.chdir(tmp_path)
    for name, text in (("wrong", WRONG), ("right", RIGHT), ("raises", RAISES)):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")

    def ran(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exited:
            cli.app(["bench", *arguments], prog_name="spec-lm")
        captured = capsys.readouterr()
        return int(exited.value.code or 0), captured.out, captured.err

    return ran


def test_a_run_shows_figures_of_what_holds_and_the_clause_that_does_not(command, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, err = command("./right.py", "./wrong.py", "./raises.py", *FEW, "--report", "found")
    assert code == 0, err
    assert {path.name for path in (tmp_path / "found").iterdir()} == {
        *("benchmarks.json", "benchmarks.md", "benchmarks.html")
    }
    blocks = out.split("\n\n")
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in blocks[3].splitlines()[2:]}
    assert list(rows) == ["reference", "fused", "./right.py", "./wrong.py", "./raises.py"]
    assert rows["./wrong.py"].endswith("fails")
    assert rows["./wrong.py"].startswith("softmax.")
    assert rows["./raises.py"] == "IndexError: list index out of range"
    assert " us .. " in rows["./right.py"] or " ms .. " in rows["./right.py"]
    assert rows["reference"].split()[7] == "1"
    assert "./right.py: time ~ sequence^" in blocks[4]
    assert "wrong" not in blocks[4]
    data = json.loads((tmp_path / "found" / "benchmarks.json").read_text(encoding="utf-8"))
    orders = [b["extra_info"]["variant"] for b in data["benchmarks"] if "case" in b["extra_info"]][:8]
    assert orders[:4] == ["reference", "fused", "./right.py", "./raises.py"]
    assert orders[4:] == [*orders[1:4], orders[0]], "the second session begins with the second variant"
    beside = [info for b in data["benchmarks"] if "beside" in (info := b["extra_info"])]
    seen = {(str(Case.of(each["beside"])), each["session"], each["ceiling"]) for each in beside}
    cases = [str(Case.of(case)) for case, _ in data["spec_lm"]["work"]]
    assert seen == set(product(cases, (0, 1), ("product", "copy"))), "every session has ceilings of its own"
    assert {"torch", "threads", "device"} <= set(data["machine_info"]["spec_lm"])

    baseline = str(tmp_path / "found" / "benchmarks.json")
    fast = json.loads(Path(baseline).read_text(encoding="utf-8"))
    for bench in fast["benchmarks"]:
        bench["stats"]["median"] /= 1e3
    Path("fast.json").write_text(json.dumps(fast), encoding="utf-8")
    code, out, err = command(*FEW, "--baseline", "fast.json", "--fail-if-slower", "10%")
    assert code == 1
    assert "times the time of the baseline: reference, softmax" in out


def test_nothing_else_is_started_before_all_is_timed(monkeypatch, tmp_path):
    """The process that children are forked from imports torch for seconds: the ceilings were half of what they are."""
    happened: list[str] = []
    monkeypatch.setattr(workers, "start", lambda *modules: happened.append("started"))
    monkeypatch.setattr(session, "_peak", lambda *row: happened.append("peak"))

    def timed(arguments, plugins):
        happened.append("timed")
        session.memory(plugins[0].bench)
        return 0

    monkeypatch.setattr(pytest, "main", timed)
    plan = session.Plan(((Case("softmax", Sizes(1, 2, 4), memory=True), ("fused",)),))
    assert session.measure(plan, tmp_path / "result.json") == 0
    assert happened == ["timed", "started", "peak"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--variant", "nobody"), "no variant is named nobody"),
        (("--operator", "softmx"), "no operator is named softmx; did you mean softmax?"),
        (("--operator", "rope"), "the suite quick measures none of rope"),
        (("--dtype", "float8"), "dtype 'float8' is none of"),
        (("--device", "cuda"), "sees no such device"),
        (("missing.py",), "there is no file missing.py"),
        (("--fail-if-slower", "10%"), "needs --baseline FILE"),
        (("--fail-if-slower", "much", "--baseline", "x"), "write it as a percentage"),
        (("--baseline", "x"), "cannot read x"),
    ],
)
def test_what_cannot_be_measured_is_told(command, arguments, told):
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert told in err


def test_gradients_must_hold_where_training_is_measured():
    forward, training = run.clauses_of("softmax", False), run.clauses_of("softmax", True)
    assert set(training) - set(forward) == {"softmax.gradients_with_respect_to_inputs"}
    assert "softmax.sums_to_one" in forward


def test_without_its_extra_it_says_what_to_install(command, monkeypatch):
    monkeypatch.setattr("spec_lm.commands.bench.find_spec", lambda name: None)
    code, out, err = command(*FEW)
    assert (code, out) == (2, "")
    assert "install spec-lm[bench]" in err
