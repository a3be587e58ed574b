"""The matrix is measured as a check is run, survives what faults do to their process, and says what is to be mended."""

import json
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module

import numpy as np
import pytest
import torch
from jaxtyping import config

from spec_lm import faults, matrix
from spec_lm.conformance.clause import CLAUSES, RegistrationError
from spec_lm.conformance.operators import OPERATORS, Checked
from spec_lm.conformance.report import outcome_line
from spec_lm.conformance.runner import DTYPES, Settings, preserved, run_clause
from spec_lm.conformance.strategies import Domain
from spec_lm.faults import Fault, catalogue, planted
from spec_lm.reference import functional

SMALL = """
    import os

    from spec_lm.faults import fault
    from spec_lm.reference import functional

    TOO_MUCH = ("agrees_with_the_oracle", "lies_between_zero_and_the_input")


    @fault("silu", family="formula", does="adds one to each entry", detected_by=TOO_MUCH)
    def one_too_much(x):
        return functional.silu(x) + 1


    @fault("silu", family="formula", does="nothing that is wrong", detected_by=())
    def nothing_wrong(x):
        return functional.silu(x)


    @fault("silu", family="arguments", does="multiplies in place", detected_by="does_not_change_its_arguments")
    def multiplied_in_place(x):
        return x.mul_(x.sigmoid())


    @fault("silu", family="formula", does="ends the process", detected_by=())
    def ends_its_process(x):
        os._exit(3)
"""
NAMES = ("agrees_with_the_oracle", "lies_between_zero_and_the_input", "does_not_change_its_arguments")
GOOD = ("one_too_much", "multiplied_in_place")


@pytest.fixture
def small(write, monkeypatch, tmp_path):
    """A catalogue of four faults of silu, in a module that child processes can import."""
    write("small_catalogue.py", SMALL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(faults, "_CATALOGUE", {})
    monkeypatch.delitem(sys.modules, "small_catalogue", raising=False)
    import_module("small_catalogue")
    yield {fault.name: fault for fault in faults._CATALOGUE.values()}
    del sys.modules["small_catalogue"]


@pytest.fixture
def ran(spec_lm_command, small, monkeypatch, tmp_path):
    """`spec-lm faults` on some of the small catalogue, by some clauses of silu, with a package of its own."""
    monkeypatch.setattr(matrix, "PACKAGED", tmp_path / "matrix.json")

    def run(names, clauses, *options):
        chosen = {small[name].id: small[name] for name in names}, {f"silu.{n}": CLAUSES[f"silu.{n}"] for n in clauses}
        monkeypatch.setattr(matrix, "chosen", lambda operators: chosen)
        return spec_lm_command("faults", "--examples", "5", "--jobs", "2", *options)

    return run


# ------------------------------------------------------------------------------------------------------------- planted


def of(operator: str, function, **said) -> Fault:
    return Fault(operator, "made_here", function, "formula", "a function of this test", (), "made_here", **said)


def test_operators_above_compute_with_a_planted_fault():
    x, one = torch.ones(1, 2), torch.eye(2)
    before = functional.swiglu(x, one, one, one)
    with planted(of("silu", lambda x: 2 * functional.silu(x))):
        assert torch.equal(functional.swiglu(x, one, one, one), 2 * before)
    assert torch.equal(functional.swiglu(x, one, one, one), before)


def test_the_reference_is_whole_again_where_a_planted_fault_raises():
    def refuses(x):
        raise ArithmeticError

    original = functional.silu
    with pytest.raises(ArithmeticError), planted(of("silu", refuses)):
        functional.swiglu(torch.ones(1, 2), torch.eye(2), torch.eye(2), torch.eye(2))
    assert functional.silu is original


def test_attention_that_is_planted_rotates_as_attention_with_rope_asks():
    """A right multi-head attention, made of parts as the faults are, changes nothing where it is planted."""
    parts = import_module("spec_lm.faults.multihead_self_attention")
    x, weights = torch.randn(2, 3, 8), torch.randn(4, 8, 8)
    attend = partial(functional.multihead_self_attention_with_rope, x, *weights, num_heads=2, theta=1e4, max_seq_len=16)
    right = attend()
    with planted(of("multihead_self_attention", parts._attend)):
        assert torch.equal(attend(), right)
    assert not torch.allclose(right, functional.multihead_self_attention(x, *weights, num_heads=2))


def test_what_is_above_is_read_off_the_equations():
    assert matrix.above("silu") == ["swiglu", "transformer_block", "transformer_lm"]
    assert matrix.above("rope") == ["multihead_self_attention_with_rope", "transformer_block", "transformer_lm"]
    assert matrix.above("transformer_lm") == []


# ----------------------------------------------------------------------------------------------------------- measuring


@pytest.mark.parametrize(
    "fault_id", ["softmax.no_maximum_subtracted", "softmax.axis_of_a_matrix", "softmax.sum_kept_by_shape"]
)
@pytest.mark.parametrize("name", ["agrees_with_the_oracle", "any_dim", "takes_any_number_of_leading_axes"])
def test_a_clause_that_draws_once_comes_to_what_the_clause_comes_to(fault_id, name):
    fault, clause, seen = catalogue()[fault_id], CLAUSES[f"softmax.{name}"], []
    once = matrix._DrawnOnce.of(clause, seed=0)
    for each in (clause, once, once):
        sys.modules[fault.function.__module__]._SUMS.clear()
        with preserved(0):
            checked = Checked(OPERATORS["softmax"], fault.function)
            outcome, lacking = run_clause(each, checked, Domain("softmax"), Settings(20, shrink=False))
        seen.append((json.dumps(outcome_line(replace(outcome, seconds=0.0))), lacking))  # as text: NaN is not NaN
    assert seen[0] == seen[1] == seen[2]


def test_the_matrix_is_the_same_whatever_the_number_of_processes():
    names = ("hidden_bias", "weight_kept_by_shape", "scaled_by_the_input_size", "activation_fused")
    known = {f"linear.{name}": catalogue()[f"linear.{name}"] for name in names}
    clauses = {name: CLAUSES[name] for name in ("linear.has_no_memory", "linear.additive", "linear.no_bias")}
    alone, together = (matrix.measure(known, clauses, examples=10, jobs=jobs) for jobs in (1, 2))
    assert alone.text() == together.text()
    assert "has_no_memory" in alone.faults["linear.weight_kept_by_shape"].detected_by


def test_a_fault_that_ends_its_process_costs_no_other_its_row(small):
    clauses = {"silu.agrees_with_the_oracle": CLAUSES["silu.agrees_with_the_oracle"]}
    measured = matrix.measure({fault.id: fault for fault in small.values()}, clauses, examples=5, jobs=2)
    assert measured.errors == {"silu.ends_its_process": "its process ended with exit code 3"}
    assert list(measured.faults["silu.one_too_much"].detected_by) == ["agrees_with_the_oracle"]
    assert measured.faults["silu.one_too_much"].shows_in == ("swiglu", "transformer_block", "transformer_lm")
    assert measured.faults["silu.nothing_wrong"].detected_by == {}


@pytest.mark.parametrize(
    "fault_id", ["swiglu.gate_and_up_exchanged", "swiglu.float64_returned", "swiglu.bfloat16_inside"]
)
def test_what_is_saved_changes_nothing(fault_id):
    """A fault is found as a check finds it, with shapes checked and everything drawn and computed anew."""
    fault = catalogue()[fault_id]
    clauses = [clause for clause in CLAUSES.values() if clause.operator == "swiglu"]
    settings = Settings(5, shrink=False, supports={"dtype": DTYPES})
    once = [matrix._DrawnOnce.of(clause, settings.seed) for clause in clauses]
    with matrix._unchecked_shapes(), matrix._remembering():
        saved = [matrix._found(fault, once, [], settings) for _ in range(2)]
    assert saved == [matrix._found(fault, clauses, [], settings)] * 2


def test_the_oracle_computes_once_what_it_is_asked_twice():
    calls = []
    remembered = matrix._remembered(lambda *arguments: calls.append(arguments) or np.zeros(2))
    same, other = {"w": np.ones(2)}, {"w": np.array([1.0, 2.0])}
    first = remembered("silu", (same,), {})
    first += 1
    assert remembered("silu", ({"w": np.ones(2)},), {}).tolist() == [0.0, 0.0]
    remembered("silu", (other,), {})
    assert [arguments[1][0] for arguments in calls] == [same, other]


def test_shapes_are_checked_again_afterwards():
    with matrix._unchecked_shapes():
        assert config.jaxtyping_disable
    assert not config.jaxtyping_disable


def test_a_matrix_is_read_as_it_was_written(tmp_path, small):
    measured = matrix.measure({each.id: each for each in small.values()}, {}, examples=1)
    path = tmp_path / "matrix.json"
    path.write_text(measured.text(), encoding="utf-8")
    assert matrix.read(path) == measured
    assert sum(line.startswith('"silu.') for line in path.read_text(encoding="utf-8").splitlines()) == len(small)


# --------------------------------------------------------------------------------------------------------- the command


def test_all_is_well_where_each_fault_is_detected_and_each_clause_detects(ran):
    seen = ran(GOOD, NAMES, "--write", "--check")
    assert (seen.code, seen.err) == (0, "")
    counts = "2 of 2 faults are detected, 3 of 3 clauses detect one"
    assert seen.last_line == f"{counts}; the packaged matrix is up to date"


def test_a_missed_fault_is_named(ran):
    seen = ran([*GOOD, "nothing_wrong"], NAMES)
    assert seen.code == 1
    assert "1  detected by no clause\n  silu.nothing_wrong: nothing that is wrong\n" in seen.out
    assert seen.last_line == "2 of 3 faults are detected, 3 of 3 clauses detect one"


def test_a_clause_that_detects_nothing_is_named(ran):
    seen = ran(["one_too_much"], NAMES)
    assert seen.code == 1
    assert "1  clauses that detect nothing\n  silu.does_not_change_its_arguments\n" in seen.out


def test_a_detection_that_the_catalogue_names_and_that_is_not_there_is_told(ran, small, monkeypatch):
    monkeypatch.setitem(small, "one_too_much", replace(small["one_too_much"], detected_by=(*NAMES[:2], "additive")))
    told = "\n  silu.one_too_much: additive does not detect it\n"
    assert ran(GOOD, NAMES, "--write").out.count(told) == 1
    seen = ran(GOOD, NAMES, "--check")
    assert seen.code == 1
    assert seen.out.count(told) == 2


def test_a_fault_that_satisfies_no_clause_is_no_small_change(ran):
    seen = ran(["one_too_much"], NAMES[:2])
    assert seen.code == 1
    assert "1  satisfy no clause at all; a fault is a small change\n  silu.one_too_much\n" in seen.out
    assert "satisfy no clause" not in ran(["one_too_much"], NAMES).out


def test_a_fault_that_ends_its_process_is_an_error_and_is_not_written(ran):
    seen = ran([*GOOD, "ends_its_process"], NAMES, "--write")
    assert seen.code == 1
    assert "\n  silu.ends_its_process: its process ended with exit code 3\n" in seen.out
    assert not matrix.PACKAGED.exists()


def test_a_matrix_of_other_sources_is_stale(ran, small):
    assert ran(GOOD, NAMES, "--write").code == 0
    text = matrix.PACKAGED.read_text(encoding="utf-8")
    row = matrix.read(matrix.PACKAGED).faults["silu.one_too_much"]
    matrix.PACKAGED.write_text(text.replace(row.fingerprint, "00000000"), encoding="utf-8")
    others = "mirror_images_differ_by_the_input", *NAMES[1:]
    seen = ran([*GOOD, "nothing_wrong"], others, "--check")
    assert seen.code == 1
    assert seen.last_line.endswith("; the packaged matrix is stale")
    for line in (
        "fault silu.one_too_much has changed",
        "fault silu.nothing_wrong is not in it",
        "clause silu.agrees_with_the_oracle is no more",
        "clause silu.mirror_images_differ_by_the_input is not in it",
        "silu.one_too_much: agrees_with_the_oracle does not detect it",
    ):
        assert f"\n  {line}\n" in seen.out


def test_a_fault_that_only_the_oracle_sees_is_told_unless_it_says_why(ran, small, monkeypatch):
    asks = "1  detected by comparison with the oracle alone"
    assert asks in ran(["one_too_much"], NAMES[:1]).out
    monkeypatch.setitem(small, "one_too_much", replace(small["one_too_much"], no_invariant="none is known"))
    assert asks not in ran(["one_too_much"], NAMES[:1]).out


def test_faults_that_show_nowhere_above_are_told_by_operator(ran):
    assert "1  show in no operator above\n  silu: multiplied_in_place\n" in ran(GOOD, NAMES).out


def test_explain_tells_how_many_faults_a_clause_detects_and_the_first_of_them(spec_lm_command):
    detected = matrix.read().detected_by("softmax.agrees_with_the_oracle")
    seen = spec_lm_command("explain", "softmax.agrees_with_the_oracle")
    assert f"detects   {len(detected)} faults:\n" in seen.out
    assert "(softmax.always_the_last_axis)\n" in seen.out or "(ARM-software/ComputeLibrary#148)\n" in seen.out
    assert f"          and {len(detected) - 10} more\n" in seen.out


def test_a_part_of_the_matrix_is_written_beside_the_rest(ran):
    whole = matrix.read()
    matrix.PACKAGED.write_text(whole.text(), encoding="utf-8")
    ran(GOOD, NAMES, "--operator", "silu", "--write", "--examples", whole.examples)
    written = matrix.read(matrix.PACKAGED)
    assert list(written.of(["silu"]).faults) == ["silu.multiplied_in_place", "silu.one_too_much"]
    others = [name for name in OPERATORS if name != "silu"]
    assert written.of(others) == whole.of(others)


def test_a_part_that_was_measured_otherwise_is_not_written(ran):
    before = matrix.read().text()
    matrix.PACKAGED.write_text(before, encoding="utf-8")
    seen = ran(GOOD, NAMES, "--operator", "silu", "--write", "--seed", 7)
    assert seen.code == 2
    assert "--seed 0" in seen.err
    assert matrix.PACKAGED.read_text(encoding="utf-8") == before


def test_an_unknown_operator_is_a_usage_error(spec_lm_command):
    seen = spec_lm_command("faults", "--operator", "sillu")
    assert seen.code == 2
    assert "did you mean silu?" in seen.err


def test_an_unknown_family_is_refused_with_the_nearest_one(monkeypatch):
    monkeypatch.setattr(faults, "_CATALOGUE", {})
    with pytest.raises(RegistrationError, match="unknown family 'masks'; did you mean mask"):
        faults.fault("silu", family="masks", does="", detected_by=())(lambda x: x)


def test_a_missing_matrix_is_told_with_its_mend(ran):
    seen = ran(GOOD, NAMES, "--check")
    assert seen.code == 2
    assert "run spec-lm faults --write" in seen.err
