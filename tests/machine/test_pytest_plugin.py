"""The pytest plugin: one item a clause, by the specification's place, and with the options that pytest users know."""

import importlib.metadata
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import spec_lm
from spec_lm import CLAUSES

pytest_plugins = "pytester"
pytestmark = pytest.mark.skipif(
    not [entry for entry in importlib.metadata.entry_points(group="pytest11") if entry.name == "spec_lm"],
    reason="pytest finds the plugin once spec_lm is installed: pip install -e .",
)
SOFTMAX = "entries_are_probabilities or one_element_axis_gives_one"
OVERFLOW = "softmax: how large numbers are kept finite"
NAIVE = "def run_softmax(in_features, dim):\n    e = in_features.exp()\n    return e / e.sum(dim, keepdim=True)\n"


@pytest.fixture(scope="module", autouse=True)
def _loaded_before():
    """pytester forgets what its sessions import, and torch cannot be imported twice: everything is loaded before."""
    spec_lm.check(clauses=["softmax.any_dim"], examples=1)


@pytest.fixture
def run(pytester, monkeypatch):
    """pytest on the installed specification, in a folder of its own."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:cacheprovider -p no:benchmark")

    def ran(*arguments: str, of: str = ".softmax"):
        specification = f"spec_lm.properties{of}"
        return pytester.runpytest_inprocess("--pyargs", specification, "--spec-lm-examples", "3", *arguments)

    return ran


def test_there_is_one_item_a_clause_named_by_its_id(run):
    ids = [line.split("::")[1] for line in run("--collect-only", "-q", of="").outlines if "::" in line]
    assert sorted(ids) == sorted(each.id for each in CLAUSES.values())


def test_the_reference_holds_and_can_be_selected_by_id_and_by_mark(run):
    result = run("-k", SOFTMAX, "-m", "hypothesis")
    result.assert_outcomes(passed=2, deselected=result.parseoutcomes()["deselected"])


def test_a_failure_is_what_the_command_prints_and_no_traceback(run, pytester):
    pytester.makepyfile(adapters=NAIVE)
    result = run("--spec-lm-impl", "adapters.py", "-k", "softmax.large_inputs_stay_finite")
    result.assert_outcomes(failed=1, deselected=result.parseoutcomes()["deselected"])
    result.stdout.fnmatch_lines(["FAILS  softmax.large_inputs_stay_finite *MUST", "  x = [[]*[]]  (1,) float32"])
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*runner.py*")


def test_what_may_be_wrong_is_told_in_the_end(run, pytester):
    pytester.makepyfile(adapters=NAIVE)
    run("--spec-lm-impl", "adapters.py").stdout.fnmatch_lines(["*what may be wrong with adapters.py*", f"{OVERFLOW}*"])
    assert "what may be wrong" not in run("-k", SOFTMAX).stdout.str(), "nothing is left of the run before"


def test_what_is_absent_or_not_judged_is_skipped_with_the_reason(run, pytester):
    pytester.makepyfile(adapters="def softmax(x, dim):\n    return x[None]\n")
    chosen = "softmax.has_no_memory or silu.agrees_with_the_oracle"
    result = run("--spec-lm-impl", "adapters.py", "-k", chosen, "-rs", of=".every_operator")
    result.assert_outcomes(skipped=2, deselected=result.parseoutcomes()["deselected"])
    result.stdout.fnmatch_lines_random(["*absent: not provided*", "*not judged: softmax.keeps_its_signature fails: *"])


def test_a_lacking_feature_leaves_the_draws_of_the_other_clauses_even_where_it_is_not_selected(run, pytester):
    body = "import torch\ndef scaled_dot_product_attention(query, key, value, mask):\n"
    body += "    return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)\n"
    pytester.makepyfile(adapters=body)
    chosen = "scaled_dot_product_attention.masked_rows_sum_to_one or attention.works_without_a_mask"
    result = run("--spec-lm-impl", "adapters.py", "-k", chosen, of=".scaled_dot_product_attention")
    result.assert_outcomes(passed=1, failed=1, deselected=result.parseoutcomes()["deselected"])


def test_levels_choose_the_items(run):
    must = run("--spec-lm-level", "must", "--collect-only", "-q", of="").outlines
    assert len([line for line in must if "::" in line]) == len([c for c in CLAUSES.values() if c.level == "must"])


def test_dtype_seed_and_statistics_of_hypothesis_work(run):
    options = ("-k", "softmax.any_dim", "--spec-lm-dtype", "bfloat16", "--hypothesis-seed", "3")
    result = run(*options, "--hypothesis-show-statistics")
    result.assert_outcomes(passed=1, deselected=result.parseoutcomes()["deselected"])
    result.stdout.fnmatch_lines(["*::softmax.any_dim:", "*Stopped because settings.max_examples=*"])


def test_x_stops_at_the_first_failure_and_junit_names_operator_file_and_clause(run, pytester):
    pytester.makepyfile(adapters="def softmax(x, dim):\n    return x * 0.5\n")
    result = run("--spec-lm-impl", "adapters.py", "-k", SOFTMAX, "-x", "--junit-xml", "out.xml")
    assert result.parseoutcomes()["failed"] == 1
    (case,) = ET.parse("out.xml").getroot().iter("testcase")
    assert case.get("name") in ("softmax.entries_are_probabilities", "softmax.one_element_axis_gives_one")
    assert case.find("failure") is not None


def test_last_failed_runs_what_failed(run, pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:benchmark")
    pytester.makepyfile(adapters=NAIVE)
    options = ("--spec-lm-impl", "adapters.py", "-k", "softmax.large_inputs_stay_finite or softmax.any_dim")
    assert run(*options).parseoutcomes()["failed"] == 1
    assert {"failed": 1, "passed": 0}.items() <= {"passed": 0, **run(*options, "--lf").parseoutcomes()}.items()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--spec-lm-impl", "nowhere.py"), "there is no file nowhere.py"),
        (("--spec-lm-impl", "a.py", "--spec-lm-impl", "b.py"), "give one implementation"),
        (("--spec-lm-dtype", "float31"), "did you mean float32?"),
    ],
)
def test_a_wrong_option_is_one_message(run, options, said):
    result = run(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert said in result.stderr.str()
    assert "Traceback" not in result.stderr.str() + result.stdout.str()


def test_pairs_together_are_one_implementation(run):
    pairs = ("--spec-lm-impl", "softmax=torch:softmax", "--spec-lm-impl", "silu=torch.nn.functional:silu")
    result = run(*pairs, "-k", "softmax.agrees or silu.agrees or rmsnorm.agrees", of=".every_operator")
    result.assert_outcomes(passed=2, skipped=1, deselected=result.parseoutcomes()["deselected"])


def test_folder_path_and_modules_are_afterwards_as_they_were(run, pytester):
    pytester.makepyfile(adapters=NAIVE)
    path = list(sys.path)
    run("--spec-lm-impl", "adapters.py", "-k", "softmax.any_dim")
    assert sys.path == path
    assert not Path(".hypothesis").exists()


def test_a_users_own_folder_named_properties_is_not_touched(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:cacheprovider -p no:benchmark")
    pytester.mkpydir("properties").joinpath("test_mine.py").write_text("def test_mine():\n    pass\n")
    pytester.path.joinpath("properties", "softmax.py").write_text("1 / 0\n")
    pytester.runpytest_inprocess().assert_outcomes(passed=1)


def test_a_checkout_beside_another_installed_spec_lm_is_refused(pytester, monkeypatch):
    """There pytest would silently run none of the checkout's clauses."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:cacheprovider -p no:benchmark")
    pytester.makeini("[pytest]\ntestpaths = tests properties\n")
    for name in ("properties/every_operator.py", "spec_lm/__init__.py", "tests/test_a.py"):
        pytester.path.joinpath(name).parent.mkdir(exist_ok=True)
        pytester.path.joinpath(name).write_text("def test_a():\n    pass\n")
    for arguments in ((), (".",), ("properties",), ("properties/every_operator.py",)):
        result = pytester.runpytest_inprocess(*arguments)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert "none of its clauses would run; install the checkout (pip install -e .)" in result.stderr.str()
    pytester.runpytest_inprocess("tests").assert_outcomes(passed=1)


def test_xdist_runs_the_items(pytester):
    pytest.importorskip("xdist")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-n", "1"]
    chosen = ["--pyargs", "spec_lm.properties.softmax", "--spec-lm-examples", "2", "-k", SOFTMAX]
    ran = subprocess.run([*command, *chosen], capture_output=True, text=True, cwd=pytester.path)
    assert "2 passed" in ran.stdout, ran.stdout + ran.stderr
    assert not [path for path in pytester.path.iterdir() if path.name == ".hypothesis"]


def test_the_processes_of_xdist_tell_what_may_be_wrong(pytester):
    pytest.importorskip("xdist")
    pytester.makepyfile(adapters=NAIVE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-n", "2"]
    chosen = ["--pyargs", "spec_lm.properties.softmax", "--spec-lm-examples", "3", "--spec-lm-impl", "adapters.py"]
    ran = subprocess.run([*command, *chosen], capture_output=True, text=True, cwd=pytester.path)
    assert OVERFLOW in ran.stdout, ran.stdout + ran.stderr


def test_a_selection_by_an_operators_name_deselects_the_others(tmp_path):
    """The folder's name contains "rope": it must not count."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "--pyargs", "spec_lm.properties", "-k", "rope", "--collect-only", "-q"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert "deselected" in ran.stdout
    assert "softmax.sums_to_one" not in ran.stdout
