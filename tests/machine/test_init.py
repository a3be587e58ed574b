"""What `spec-lm init` writes works as it stands, and with a function filled in."""

import inspect
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from spec_lm.reference import adapters as reference

OF_SOFTMAX = ("--clause", "softmax.sums_to_one", "--clause", "silu.agrees_with_the_oracle", "--examples", "2")
FILES = ["tests/adapters.py", "tests/test_conformance.py", ".github/workflows/spec-lm.yml"]


@pytest.fixture
def project(spec_lm_command) -> Path:
    """A folder in which init has been run, and which is the current one."""
    ran = spec_lm_command("init")
    assert ran.code == 0
    assert [line.removeprefix("wrote ") for line in ran.out.splitlines()[:3]] == FILES
    return Path.cwd()


def fill_in(project: Path) -> None:
    path = project / FILES[0]
    head, signature, rest = path.read_text().partition("def run_softmax(in_features: Tensor, dim: int) -> Tensor:\n")
    assert signature
    body = rest.replace("raise NotImplementedError", "return in_features.softmax(dim)", 1)
    path.write_text(head + signature + body)


def test_the_adapters_have_the_signatures_of_the_interface_and_words(project):
    written = runpy.run_path(str(project / FILES[0]))
    functions = [name for name in dir(reference) if name.startswith("run_")]
    assert len(functions) == 12
    for name in functions:
        parameters, wanted = (inspect.signature(f).parameters for f in (written[name], getattr(reference, name)))
        assert list(parameters) == list(wanted)
        assert [p.default for p in parameters.values()] == [p.default for p in wanted.values()]
        assert "Source: " in (written[name].__doc__ or "")


def test_nothing_is_provided_until_a_function_is_filled_in(project, spec_lm_command):
    ran = spec_lm_command("check", FILES[0], *OF_SOFTMAX)
    assert ran.code == 2
    assert ran.last_line.startswith(
        "tests/adapters.py provides nothing that was to be checked: 0 of 2 MUST clauses ran"
    )
    assert "absent (run_softmax raises NotImplementedError)" in ran.out
    fill_in(project)
    ran = spec_lm_command("check", FILES[0], *OF_SOFTMAX)
    assert ran.code == 0
    assert ran.last_line == "tests/adapters.py conforms: 1 of 2 MUST clauses ran, 1 holds; not provided: silu (1)"


def test_the_test_module_runs(project):
    fill_in(project)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", FILES[1]]
    chosen = ["-k", "softmax.sums_to_one or silu.agrees_with_the_oracle"]
    ran = subprocess.run([*command, *chosen], capture_output=True, text=True, cwd=project)
    assert "1 passed, 1 skipped" in ran.stdout, ran.stdout + ran.stderr


def test_the_workflow_runs_the_check_and_shows_its_summary(project):
    """Its steps in a shell, but for what needs the network, with fewer clauses."""
    fill_in(project)
    workflow = yaml.safe_load((project / FILES[2]).read_text())
    (job,) = workflow["jobs"].values()
    steps = [step for step in job["steps"] if "run" in step]
    assert [step["run"] for step in steps if "install" in step["run"]] == ["pip install spec-lm"]
    command = project / "bin" / "spec-lm"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m spec_lm "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "GITHUB_STEP_SUMMARY": "summary.md"}
    for step in steps[1:]:
        script = step["run"].replace(f"check {FILES[0]}", f"check {FILES[0]} {' '.join(OF_SOFTMAX)}")
        ran = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, cwd=project, env=environment)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "`tests/adapters.py conforms: 1 of 2 MUST clauses ran" in (project / "summary.md").read_text()
    kept = next(step["with"]["path"] for step in job["steps"] if "upload-artifact" in step.get("uses", ""))
    assert {path.name for path in project.glob(kept)} == {"spec-lm.jsonl", "spec-lm.html"}
    shown = [step for step in job["steps"] if "report" in step.get("name", "")]
    assert [step["if"] for step in shown] == ["${{ !cancelled() }}"] * 2


def test_nothing_is_overwritten_unless_asked(project, spec_lm_command):
    (project / FILES[0]).write_text("mine")
    (project / FILES[2]).unlink()
    ran = spec_lm_command("init")
    assert ran.code == 2
    assert f"{FILES[0]}, {FILES[1]} would be overwritten; nothing was written; use --force" in ran.err
    assert (project / FILES[0]).read_text() == "mine"
    assert not (project / FILES[2]).exists()
    assert spec_lm_command("init", "--force").code == 0
    assert (project / FILES[0]).read_text() != "mine"


def test_another_folder_may_be_named(spec_lm_command, tmp_path):
    assert spec_lm_command("init", "--path", "sub/folder").code == 0
    assert all((tmp_path / "sub" / "folder" / name).is_file() for name in FILES)
    (tmp_path / "file").touch()
    ran = spec_lm_command("init", "--path", "file")
    assert ran.code == 2
    assert "cannot make file/tests" in ran.err
