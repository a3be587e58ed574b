"""Every form of naming an implementation leads to its operators, and leaves the process as it was."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import spec_lm
from spec_lm.conformance.implementation import BUILT_IN, ImplementationError, loaded

SOFTMAX = "def run_softmax(in_features, dim):\n    return in_features.softmax(dim)\n"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "somebodys-model"\n')


def operators_of(spec) -> set[str]:
    with loaded(spec) as implementation:
        return set(implementation.functions)


def test_a_file_by_its_path(write):
    path = write("adapters.py", SOFTMAX)
    for spec in ("adapters.py", "./adapters.py", str(path), path, f"{path.parent}/"):
        assert operators_of(spec) == {"softmax"}


def test_a_file_finds_modules_beside_it_and_in_its_project_and_its_src(write):
    write("beside/near.py", "import torch")
    write("at_the_root.py", "")
    write("src/somebodys/inner.py", "")
    imports = "import near\nimport at_the_root\nimport somebodys.inner\n"
    write("beside/adapters.py", imports + SOFTMAX)
    assert operators_of("beside/adapters.py") == {"softmax"}


@pytest.mark.parametrize("with_init", [True, False])
def test_relative_imports_of_a_package_work(write, with_init):
    write("tests/common.py", SOFTMAX)
    write("tests/adapters.py", "from .common import run_softmax")
    if with_init:
        write("tests/__init__.py", "")
    assert operators_of("tests/adapters.py") == {"softmax"}


def test_two_files_of_one_name_with_helpers_of_one_name_are_checked_in_one_process(write):
    for name, scale in (("one", 1), ("two", 2)):
        write(f"{name}/helper.py", f"SCALE = {scale}")
        write(f"{name}/adapters.py", "from helper import SCALE\ndef softmax(x, dim):\n    return SCALE")
        write(f"{name}/pyproject.toml", "")
    for name, scale in (("one", 1), ("two", 2), ("one", 1)):
        with loaded(f"{name}/adapters.py") as implementation:
            assert implementation.functions["softmax"](None, 0) == scale


def test_sys_path_and_modules_are_afterwards_as_they_were(write):
    write("helper.py", "")
    write("adapters.py", "import helper\n" + SOFTMAX)
    path, modules = list(sys.path), set(sys.modules)
    operators_of("adapters.py")
    assert sys.path == path
    assert {"helper", "adapters"}.isdisjoint(set(sys.modules) - modules)


def test_a_module_loaded_before_under_a_helpers_name_comes_back(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "helper", other := type(sys)("helper"))
    write("helper.py", SOFTMAX)
    write("adapters.py", "from helper import run_softmax")
    assert operators_of("adapters.py") == {"softmax"}
    assert sys.modules["helper"] is other


def test_a_module_an_object_in_it_and_pairs(write):
    write("somebodys.py", SOFTMAX + "class Kernels:\n    @staticmethod\n    def silu(x):\n        return x\n")
    assert operators_of("somebodys") == {"softmax"}
    assert operators_of("somebodys:Kernels") == {"silu"}
    assert operators_of(("softmax=torch:softmax", "silu=somebodys:Kernels.silu")) == {"softmax", "silu"}
    assert operators_of("softmax=torch:softmax silu=somebodys:Kernels.silu") == {"softmax", "silu"}
    assert operators_of("softmax=torch:softmax") == {"softmax"}


def test_a_pair_that_names_a_run_function_calls_it_through_the_adapter_interface(write):
    write("somebodys.py", SOFTMAX)
    with loaded("softmax=somebodys:run_softmax") as implementation:
        assert torch.equal(implementation.functions["softmax"](torch.zeros(2), 0), torch.tensor([0.5, 0.5]))


def test_live_objects_and_the_built_in_reference():
    assert operators_of({"softmax": torch.softmax}) == {"softmax"}
    assert operators_of({"run_softmax": torch.softmax}) == {"softmax"}
    assert {"softmax", "silu"} <= operators_of(torch.nn.functional)
    assert len(operators_of(BUILT_IN)) == 12


def test_missing_metadata_of_the_implementations_own_project_does_not_stop_it(write):
    write("somebodys_package/__init__.py", "from importlib.metadata import version\nversion('somebodys_package')")
    imports = "from importlib.metadata import version\nimport somebodys_package\nversion('somebodys-model')\n"
    write("adapters.py", imports + SOFTMAX)
    assert operators_of("adapters.py") == {"softmax"}


def test_metadata_of_strangers_is_still_missing(write):
    write("adapters.py", "import importlib.metadata\nimportlib.metadata.version('no-such-stranger')\n" + SOFTMAX)
    with pytest.raises(ImplementationError, match="PackageNotFoundError"):
        operators_of("adapters.py")


def test_what_cannot_be_imported_says_why_and_what_to_try(write):
    write("syntax.py", "def run_softmax(:")
    write("needs.py", "import not_installed")
    write("raises.py", "1 / 0")
    reasons = {
        "syntax.py": "SyntaxError.*the line is `def run_softmax.*this is Python 3",
        "needs.py": "No module named 'not_installed'; install not_installed into",
        "raises.py": "ZeroDivisionError: division by zero; try `python -c",
        "not_installed": "is not_installed installed in .*path/to/adapters.py",
        "torch:nothing": "torch has no attribute nothing",
        "softmax=torch.softmax": "write torch:softmax for softmax in the module torch",
        "softmax=math:pi": "math:pi is a float, expected a function",
    }
    for spec, reason in reasons.items():
        with pytest.raises(ImplementationError, match=reason):
            operators_of(spec)


def test_warnings_of_an_import_are_no_errors(write):
    write("adapters.py", "import warnings\nwarnings.warn('old', DeprecationWarning)\n" + SOFTMAX)
    assert operators_of("adapters.py") == {"softmax"}


def test_declarations_are_read(write):
    declared = 'spec_lm_conventions = {"rope_pairing": "halves"}\nspec_lm_supports = {"n": [5]}\n'
    path = write("adapters.py", SOFTMAX + declared)
    with loaded(path) as implementation:
        assert implementation.conventions == {"rope_pairing": "halves"}
    report = spec_lm.check(path, clauses=["softmax.sums_to_one"], examples=2)
    assert report.header["supports"] == {"n": [5]}
    assert Path(report.header["implementation"]) == path


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ('spec_lm_supports = {"nope": [1]}', "spec_lm_supports: no support is named nope; there are axes, dtype"),
        ('spec_lm_supports = ["n"]', "spec_lm_supports: is ['n'], expected a table by name"),
        ('spec_lm_supports = {"n": 5}', "spec_lm_supports: support n is 5, expected a list of sizes from 1 to"),
        ('spec_lm_conventions = {"all_masked": ["nan"]}', "spec_lm_conventions: no convention is all_masked=['nan']"),
        ("spec_lm_conventions = 3", "spec_lm_conventions: is 3, expected choices by name; there are rope_pairing="),
    ],
)
def test_a_declaration_that_is_not_understood_is_told_with_file_and_name(spec_lm_command, write, declared, said):
    """By a check in other processes, which must not tell it as the end of a process."""
    write("adapters.py", SOFTMAX + declared)
    ran = spec_lm_command("check", "adapters.py", "--clause", "softmax.sums_to_one")
    assert (ran.code, ran.err.startswith(f"spec-lm: adapters.py, {said}")) == (2, True), ran.err


def test_a_docstrings_words_are_no_relative_import(write):
    """In a folder with a dot in its name, where a package would have to be imported in parts."""
    write("v1.0/good.py", '"""Weights\n    from .5 to 1.\n"""\n' + SOFTMAX)
    assert operators_of("v1.0/good.py") == {"softmax"}


@pytest.mark.parametrize("with_init", [True, False])
def test_relative_imports_work_in_a_folder_with_a_dot_in_its_name(write, with_init):
    write("v1.0/common.py", SOFTMAX)
    write("v1.0/adapters.py", "from .common import run_softmax")
    if with_init:
        write("v1.0/__init__.py", "")
    before = set(sys.modules)
    assert operators_of("v1.0/adapters.py") == {"softmax"}
    assert {name for name in set(sys.modules) - before if "v1" in name} == set()


@pytest.mark.parametrize("name", ["numpy.py", "torch.py", "hypothesis.py", "json.py", "torch/adapters.py"])
def test_a_file_that_would_hide_what_the_checker_runs_on_is_refused(write, name):
    write(name, SOFTMAX)
    write("torch/__init__.py", "")
    module = name.partition("/")[0].removesuffix(".py")
    with pytest.raises(ImplementationError, match=f"{name} would hide the module {module}, .*; rename the f"):
        operators_of(name)


def test_a_file_beside_that_is_named_as_what_the_checker_runs_on_does_not_break_it(write):
    write("adapters.py", "import numpy\nnumpy.float32\n" + SOFTMAX)
    write("numpy.py", "")
    assert operators_of("adapters.py") == {"softmax"}


def test_such_a_file_in_the_current_folder_is_refused_by_the_command_too(write, tmp_path):
    """The process that children are forked from must not import it."""
    write("numpy.py", SOFTMAX)
    command = write("bin/command.py", "from spec_lm.cli import main\nmain()")
    arguments = [sys.executable, str(command), "check", "numpy.py", "--clause", "softmax.sums_to_one"]
    ran = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True)
    assert (ran.returncode, "Traceback" in ran.stderr) == (2, False), ran.stderr
    assert f"{tmp_path}/numpy.py would hide the module numpy" in ran.stderr


def test_files_of_this_package_are_checked_by_their_path():
    assert "softmax" in operators_of(Path(spec_lm.__file__).parent / "reference" / "adapters.py")


def test_a_path_may_hold_an_equals_sign(spec_lm_command, write):
    path = write("lr=3/run=1.py", SOFTMAX)
    assert operators_of("lr=3/run=1.py") == {"softmax"}
    asked = ("--clause", "softmax.sums_to_one", "--examples", "1")
    for spec in ("lr=3/run=1.py", path):
        assert spec_lm_command("check", spec, *asked).code == 0
    report = spec_lm.check("lr=3/run=1.py", clauses=[asked[1]], examples=1, isolate=True)
    assert report.conforms
    write("lr=3/pyproject.toml", '[tool.spec-lm]\nimplementation = "./run=1.py"')
    assert spec_lm_command("check", *asked, "--config", "lr=3/pyproject.toml").code == 0


def test_an_import_that_deletes_its_folder_leaves_the_checkers_own(write, tmp_path):
    write("adapters.py", "import os\nos.mkdir('gone')\nos.chdir('gone')\nos.rmdir(os.getcwd())\n" + SOFTMAX)
    assert operators_of("adapters.py") == {"softmax"}
    assert Path.cwd() == tmp_path


def test_an_adapter_of_other_parameters_is_told_how_it_is_called(write):
    """Its own line, not one of the machine's; what it raises itself stays as it is."""
    write("adapters.py", "def run_linear(weight, x):\n    return x @ weight.T\n")
    (outcome,) = spec_lm.check("adapters.py", clauses=["linear.keeps_its_signature"]).of("fails")
    assert outcome.message.endswith("it is called as run_linear(d_in=_, d_out=_, weights=_, in_features=_)")
