"""`parametrize_with_clauses`: a user's own module has one item a clause, and pytest's own options work on them."""

import importlib.util
import subprocess
import sys

import pytest

import spec_lm
from spec_lm.conformance.clause import CLAUSES
from spec_lm.conformance.report import UserError
from spec_lm.testing import parametrize_with_clauses

pytest_plugins = "pytester"
ADAPTERS = """
import torch
def run_softmax(in_features, dim):
    e = in_features.exp()
    return e / e.sum(dim, keepdim=True)
def silu(x):
    return torch.nn.functional.silu(x)
def linear(x, weight):
    return None
def embedding(token_ids, weight):
    return weight[token_ids].double()
"""
FAILING = "softmax.large_inputs_stay_finite"
HOLDING = ("softmax.any_dim", "silu.agrees_with_the_oracle")
CHOSEN = (FAILING, *HOLDING, "linear.no_bias", "embedding.keeps_its_signature", "embedding.has_no_memory")


@pytest.fixture(scope="module", autouse=True)
def _loaded_before():
    """pytester forgets what its sessions import, and torch cannot be imported twice: everything is loaded before."""
    spec_lm.check(clauses=["softmax.any_dim"], examples=1)


@pytest.fixture
def module(pytester, monkeypatch):
    """A test module with these arguments of the decorator, beside adapters.py; running it."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:benchmark")
    pytester.makepyfile(adapters=ADAPTERS)

    def written(arguments: str = "'adapters.py'", clauses: tuple[str, ...] = CHOSEN):
        chosen = f"clauses={list(clauses)!r}, examples=10" if clauses else ""
        pytester.makepyfile(
            test_spec=f"""
            from spec_lm.testing import parametrize_with_clauses

            @parametrize_with_clauses({arguments}, {chosen})
            def test_conforms(check):
                check()
            """
        )
        return lambda *options: pytester.runpytest_inprocess(*options)

    return written


def test_there_is_one_item_a_clause_named_by_its_id(module):
    lines = module(clauses=())("--collect-only", "-q").outlines
    ids = [line.partition("[")[2].rstrip("]") for line in lines if "::" in line]
    assert sorted(ids) == sorted(each.id for each in CLAUSES.values() if each.level == "must")


def test_outcomes_are_those_of_a_check_and_a_failure_is_what_it_prints(module):
    result = module()("-rs")
    result.assert_outcomes(passed=2, failed=2, skipped=2)
    result.stdout.fnmatch_lines(
        ["*ClauseFailed: FAILS  softmax.large_inputs_stay_finite *MUST", "*x = [[]*[]]  (1,) float32"]
    )
    result.stdout.fnmatch_lines_random(["*absent: linear returns None*", "*not judged: embedding.keeps_its_signature*"])
    result.stdout.no_fnmatch_line("*runner.py*")


def test_a_live_object_and_pairs_serve_as_well(module, pytester):
    chosen = ("softmax.any_dim", "silu.agrees_with_the_oracle")
    pairs = "('softmax=torch:softmax', 'silu=torch.nn.functional:silu')"
    module(pairs, clauses=chosen)().assert_outcomes(passed=2)
    module("{'softmax': __import__('torch').softmax}", clauses=chosen)().assert_outcomes(passed=1, skipped=1)


def test_k_x_and_lf_work(module):
    run = module()
    run("-k", "softmax").assert_outcomes(failed=1, passed=1, deselected=4)
    run("-k", "softmax", "-x").assert_outcomes(failed=1)
    run("-k", "softmax", "--lf").assert_outcomes(failed=1)


def test_xdist_runs_the_items(module, pytester):
    pytest.importorskip("xdist")
    module()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-n", "2"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=pytester.path)
    assert "2 failed, 2 passed, 2 skipped" in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.parametrize("waiver", ["'why'", "{'reason': 'why', 'counterexample': %s}"])
def test_a_waiver_is_a_strict_xfail(module, pytester, waiver):
    if "%s" in waiver:
        outcome = spec_lm.check(pytester.path / "adapters.py", clauses=[FAILING], examples=10)[FAILING]
        assert outcome.counterexample
        waiver = waiver % outcome.counterexample["recipes"]
    run = module(f"'adapters.py', waive={{{FAILING!r}: {waiver}}}", clauses=(FAILING,))
    result = run("-rx")
    result.assert_outcomes(xfailed=1)
    result.stdout.fnmatch_lines(["XFAIL *softmax.large_inputs_stay_finite* - why*"])
    pytester.makepyfile(adapters="def run_softmax(in_features, dim):\n    return in_features.softmax(dim)\n")
    result = run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*XPASS(strict)* why*"])


def test_a_waiver_hides_no_implementation_that_cannot_be_loaded(module, pytester):
    pytester.makepyfile(adapters="import not_there")
    result = module(f"'adapters.py', waive={{{FAILING!r}: 'why'}}", clauses=(FAILING, "softmax.any_dim"))()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*adapters.py cannot be imported: ModuleNotFoundError: No module named 'not_there'*"])


def test_a_config_declares_implementation_and_waivers(module, pytester):
    text = f'[tool.spec-lm]\nimplementation = "adapters.py"\nwaivers = {{"{FAILING}" = {{reason = "why"}}}}\n'
    pytester.path.joinpath("pyproject.toml").write_text(text)
    module("config='pyproject.toml'", clauses=(FAILING, "softmax.any_dim"))().assert_outcomes(xfailed=1, passed=1)


def test_wrong_arguments_are_told_when_the_module_is_collected(module):
    result = module("'adapters.py', level='may'", clauses=())()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*level 'may' is neither must nor should*"])
    with pytest.raises(UserError, match="name an implementation"):
        parametrize_with_clauses()


def test_it_coexists_with_the_plugins_of_hypothesis_jaxtyping_xdist_and_schemathesis(module, pytester):
    """All of them loaded at once, with warnings as errors, beside a Hypothesis test and a checked annotation."""
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed: pip install -e .[dev]")
    module(clauses=HOLDING)
    pytester.makepyfile(
        shapes="from jaxtyping import Float\nfrom torch import Tensor\ndef f(x: Float[Tensor, 'n']):\n    pass\n"
    )
    pytester.makepyfile(
        test_others="""
        import pytest, torch
        from hypothesis import given, strategies as st
        from shapes import f

        @given(st.integers())
        def test_hypothesis(n):
            assert n == n

        def test_annotations_are_checked():
            f(torch.zeros(1))
            with pytest.raises(Exception, match="type"):
                f(torch.zeros(1, 1))
        """
    )
    options = ["-n", "1", "-W", "error", "--jaxtyping-packages=shapes,beartype.beartype", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "-p", "no:benchmark", "--trace-config"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=pytester.path)
    assert "4 passed" in ran.stdout, ran.stdout + ran.stderr
    for plugin in ("spec_lm.pytest_plugin", "jaxtyping", "schemathesis", "xdist", "hypothesis"):
        assert plugin in ran.stdout
