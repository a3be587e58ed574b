"""A check is repeatable, leaves the process as it was, and turns whatever an implementation does into an outcome."""

import os
import random
import sys
import unittest
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis.errors import UnsatisfiedAssumption

import spec_lm
from spec_lm.conformance import clause as clause_module
from spec_lm.conformance.clause import CLAUSES, MOST_CALLS_TO_SHRINK
from spec_lm.conformance.runner import UsageError, replay


def check(softmax, *names: str, **kwargs):
    """softmax against the named clauses of softmax, by default its oracle's."""
    ids = [f"softmax.{name}" for name in names or ("agrees_with_the_oracle",)]
    return spec_lm.check({"softmax": softmax}, clauses=ids, **{"examples": 12, **kwargs})


def only(report):
    (outcome,) = report.outcomes
    return outcome


def naive(x, dim):
    e = x.exp()
    return e / e.sum(dim, keepdim=True)


# ---------------------------------------------------------------------------------------------------------- repeatable


def test_the_same_seed_gives_the_same_report_apart_from_seconds():
    def told(seed):
        report = check(naive, "agrees_with_the_oracle", "large_inputs_stay_finite", "any_dim", seed=seed)
        return [asdict(replace(outcome, seconds=0.0)) for outcome in report]

    assert repr(told(3)) == repr(told(3))
    assert repr(told(3)) != repr(told(4))


def test_outcomes_come_as_they_are_found_after_the_header():
    events = []
    report = check(
        torch.softmax,
        "sums_to_one",
        "any_dim",
        on_start=lambda header: events.append(header["clauses"]),
        on_outcome=lambda outcome: events.append(outcome.clause),
    )
    assert events == [2, *[outcome.clause for outcome in report]]


def test_a_stored_counterexample_fails_again_and_not_on_a_right_implementation(write):
    right = "def run_softmax(in_features, dim):\n    return in_features.softmax(dim)\n"
    path = write("adapters.py", right.replace("softmax(dim)\n", "softmax(dim) * 2\n"))
    report = spec_lm.check(path, clauses=["softmax.sums_to_one"], examples=3)
    assert [outcome.outcome for outcome in replay(report)] == ["fails"]
    write("adapters.py", right)
    assert [outcome.outcome for outcome in replay(report)] == ["holds"]


# -------------------------------------------------------------------------------------------- the process as it was


def test_global_state_is_afterwards_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def meddles(x, dim):
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        warnings.simplefilter("ignore")
        os.environ["SPEC_LM_TEST"] = "1"
        os.chdir("/")
        sys.setrecursionlimit(5000)
        return torch.softmax(x, dim)

    def state():
        return [
            random.getstate(),
            repr(np.random.get_state()),
            torch.get_rng_state().tolist(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            list(warnings.filters),
            os.getcwd(),
            dict(os.environ),
            list(sys.path),
            sys.getrecursionlimit(),
        ]

    before = state()
    check(meddles)
    assert state() == before
    assert list(tmp_path.iterdir()) == [], "no .hypothesis folder"


def test_threads_grad_mode_and_default_dtype_of_the_caller_do_not_matter():
    with torch.no_grad():
        assert check(torch.softmax, "agrees_with_the_oracle").conforms
        assert not torch.is_grad_enabled()


def test_the_global_rng_is_neither_used_nor_needed():
    torch.manual_seed(1)
    first = check(naive)
    torch.manual_seed(2)
    assert repr(replace(only(first), seconds=0)) == repr(replace(only(check(naive)), seconds=0))


# ------------------------------------------------------------------------------------------------------------ outcomes


@pytest.mark.parametrize(
    "exception",
    [
        unittest.SkipTest("skipped"),
        UnsatisfiedAssumption(),
        SystemExit(0),
        TypeError("no"),
        NotImplementedError("later"),
        AssertionError(),
        pytest.skip.Exception("skipped"),
    ],
    ids=lambda exception: type(exception).__name__,
)
def test_whatever_an_implementation_raises_on_legal_input_is_a_failure(exception):
    def raises(x, dim):
        if x.any():
            raise exception
        return torch.softmax(x, dim)

    outcome = only(check(raises))
    assert outcome.outcome == "fails"
    assert f"raised {type(exception).__name__}: " in outcome.message


def test_memory_that_runs_out_is_an_error_and_no_failure():
    """One-hot rows of a large vocabulary are right, and too large for some machines."""

    def softmax(x, dim):
        return torch.empty(2**50, dtype=torch.uint8) if x.numel() > 1 else torch.softmax(x, dim)

    outcome = only(check(softmax))
    assert outcome.outcome == "error"
    assert "it ran out of memory: " in outcome.message


def test_an_exception_whose_text_raises_is_a_failure_too():
    class Broken(Exception):
        def __str__(self):
            raise RuntimeError

    def raises(x, dim):
        raise Broken

    assert "its text cannot be read" in only(check(raises)).message


def test_not_implemented_on_the_plainest_input_is_absent_and_so_is_none():
    def not_yet(x, dim):
        raise NotImplementedError

    outcome = only(check(not_yet))
    assert (outcome.outcome, outcome.message) == ("absent", "not_yet raises NotImplementedError")
    assert only(check(lambda x, dim: None)).message.startswith("<lambda> returns None: ")
    assert only(spec_lm.check({"silu": naive}, clauses=["softmax.any_dim"])).message == "not provided"


def test_behavior_that_changes_from_call_to_call_is_a_failure_and_is_called_nondeterministic():
    calls = []

    def changes(x, dim):
        calls.append(1)
        return torch.softmax(x, dim) + len(calls) % 3

    outcome = only(check(changes))
    assert outcome.outcome == "fails"
    assert outcome.message.startswith("nondeterministic: the same call came to different results")


def test_mutation_is_detected_by_its_own_clause_alone():
    """And by that about layouts: torch refuses to write to a tensor whose entries share memory."""

    def mutates(x, dim):
        result = torch.softmax(x, dim)
        x += 1
        return result

    report = spec_lm.check({"softmax": mutates}, operators=["softmax"], examples=12, level="should")
    broken = [outcome.clause for outcome in report.of("fails", "error")]
    assert broken == ["softmax.does_not_change_its_arguments", "softmax.any_memory_layout"]
    assert report.of("fails")[0].message == "it changed its argument x"


def test_what_one_clause_saw_changed_for_good_is_seen_by_the_clause_about_it_too():
    def widens(x, dim):
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)
        return torch.softmax(x, dim)

    names = ("agrees_with_the_oracle", "leaves_the_global_random_state_alone", "leaves_global_settings_alone")
    report = spec_lm.check({"softmax": widens}, clauses=[f"softmax.{name}" for name in names], seed=0)
    assert [outcome.outcome for outcome in report.outcomes] == ["holds", "fails", "fails"]


def test_a_wrong_signature_is_judged_once_and_the_rest_is_not_judged():
    report = spec_lm.check({"softmax": lambda x, dim: x[None]}, operators=["softmax"], examples=5)
    first, *rest = report
    assert (first.clause, first.outcome) == ("softmax.keeps_its_signature", "fails")
    assert {outcome.outcome for outcome in rest} == {"not_judged"}
    assert rest[0].message == f"softmax.keeps_its_signature fails: {first.message}"


def test_a_missing_feature_fails_its_clause_and_leaves_the_draws_of_the_others():
    """An attention that needs a mask, one that takes 3 axes only, and one that does neither."""

    def attention(query, key, value, mask):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)

    def three_axes(query, key, value, mask=None):
        assert query.ndim == 3
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)

    def neither(query, key, value, mask):
        assert query.ndim == 3
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)

    name = "scaled_dot_product_attention"
    lacking = {
        attention: {"works_without_a_mask"},
        three_axes: {"takes_any_number_of_leading_axes"},
        neither: {"works_without_a_mask", "takes_any_number_of_leading_axes"},
    }
    for function, expected in lacking.items():
        report = spec_lm.check({name: function}, operators=[name], examples=10)
        assert {outcome.clause for outcome in report.of("fails")} == {f"{name}.{each}" for each in expected}
        assert len(report.of("holds")) > 10


def test_a_declared_support_narrows_the_draws_and_what_needs_more_is_not_judged():
    def only_five(x, dim):
        assert x.shape[-1] == 5
        return torch.softmax(x, dim)

    assert only(check(only_five, supports={"n": [5]})).outcome == "holds"
    name = "multihead_self_attention"
    ids = [f"{name}.agrees_with_the_oracle"]
    outcome = only(spec_lm.check(operators=[name], clauses=ids, examples=10, supports={"heads": [1]}))
    assert outcome.outcome == "holds", "a required case that the support excludes is left out, not the clause"
    ids = ["scaled_dot_product_attention.works_without_a_mask"]
    nothing = only(spec_lm.check(clauses=ids, examples=10, supports={"mask": ["causal"]}))
    assert (nothing.outcome, "mask" in nothing.message) == ("not_judged", True)


def test_a_clause_that_breaks_is_an_error_not_a_failure(monkeypatch):
    broken = replace(CLAUSES["softmax.any_dim"], body=lambda softmax, x, dim: 1 / 0)
    monkeypatch.setitem(clause_module._REGISTER, "softmax.any_dim", broken)
    report = check(torch.softmax, "any_dim")
    assert only(report).outcome == "error"
    assert "ZeroDivisionError" in only(report).message
    assert report.exit_code == 2


def test_a_keyboard_interrupt_is_the_callers():
    def interrupted(x, dim):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(interrupted)


# ---------------------------------------------------------------------------------------------------------- shrinking


def test_a_naive_softmax_is_shown_as_one_number():
    outcome = only(check(naive, "large_inputs_stay_finite"))
    assert outcome.counterexample is not None
    assert outcome.counterexample["values"]["x"] == {"shape": [1], "dtype": "float32", "data": [128.0]}


@pytest.mark.parametrize("seed", range(3))
def test_shrinking_takes_a_bounded_number_of_calls(seed):
    calls = []

    def wrong(x, dim):
        calls.append(1)
        return torch.softmax(x, dim) * (1.01 if x.numel() > 1 else 1.0)

    outcome = only(check(wrong, "sums_to_one", seed=seed, examples=50))
    assert outcome.counterexample is not None
    assert len(outcome.counterexample["values"]["x"]["data"]) <= 3
    assert len(calls) <= MOST_CALLS_TO_SHRINK + 60


def test_shrinking_does_not_slip_to_another_bug():
    """Two bugs: the first found stays the one reported."""

    def two_bugs(x, dim):
        if x.numel() == 1:
            raise ValueError("the smaller bug")
        return torch.softmax(x, dim) * 1.5

    outcome = only(check(two_bugs, "sums_to_one", examples=30))
    assert outcome.counterexample is not None
    raised = "the smaller bug" in outcome.message
    assert (len(outcome.counterexample["values"]["x"]["data"]) == 1) == raised


# ---------------------------------------------------------------------------------------------------------------- usage


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"clauses": ["softmax.any"]}, "did you mean softmax.any_dim"),
        ({"operators": ["soft"]}, "no operator is named soft"),
        ({"level": "may"}, "neither must nor should"),
        ({"dtype": "float8"}, "none of float32, float64, bfloat16, float16"),
        ({"examples": 0}, "at least 1 must be drawn"),
        ({"device": "cuda:99"}, "device|clauses"),
        (
            {"conventions": {"pairing": "halves"}},
            r"pairing=halves; did you mean rope_pairing\?; there are rope_pairing=neighbors|halves",
        ),
        ({"require": ["everything"]}, "no operator is named everything"),
        ({"seed": 2**64}, "seed is 18446744073709551616; torch takes whole numbers from"),
        ({"seed": -(2**63) - 1}, "seed is -9223372036854775809"),
        ({"timeout": float("nan")}, "timeout is nan; expected seconds"),
    ],
)
def test_what_is_asked_for_wrongly_is_said(kwargs, said):
    if "device" in kwargs and torch.cuda.is_available():
        pytest.skip("this machine has the device")
    with pytest.raises(UsageError, match=said.replace("|", r"\|") if "pairing" in said else said):
        spec_lm.check({"softmax": torch.softmax}, **kwargs)


def test_levels_choose_clauses_and_an_explicit_id_runs_whatever_its_level():
    should = next((each for each in CLAUSES.values() if each.level == "should"), None)
    if should is None:
        pytest.skip("no SHOULD clause yet")
    report = spec_lm.check(clauses=[should.id], examples=1)
    assert only(report).clause == should.id


def test_the_report_says_where_it_comes_from(tmp_path: Path):
    header = check(torch.softmax, seed=5, dtype="bfloat16").header
    expected = {"seed": 5, "dtype": "bfloat16", "examples": 12, "spec": spec_lm.SPEC_VERSION, "clauses": 1}
    assert expected.items() <= header.items()
    assert {"spec_lm", "python", "torch", "numpy", "hypothesis"} <= set(header["versions"])
