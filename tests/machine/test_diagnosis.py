"""A diagnosis names what is likely wrong, first causes first, as sure as it is right."""

import json
from collections.abc import Iterable
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest
import torch
from torch.nn.functional import embedding, linear, rms_norm, silu

import spec_lm
from spec_lm import matrix
from spec_lm.conformance import diagnosis
from spec_lm.conformance.clause import CLAUSES
from spec_lm.conformance.diagnosis import (
    WORDS,
    Failure,
    Known,
    Likeness,
    accuracy,
    catalogue,
    diagnose,
    guesses,
    marks,
    sort_of,
)
from spec_lm.conformance.operators import OPERATORS, inside
from spec_lm.conformance.report import Outcome
from spec_lm.faults import FAMILIES


def outcome(clause: str, status: Any = "fails", message: str = "values differ", **options) -> Outcome:
    return Outcome(clause, clause.partition(".")[0], CLAUSES[clause].level, status, message, **options)


def outcomes_of(known: Known) -> list[Outcome]:
    """What a check of a fault of the catalogue comes to."""
    messages = {"raised": "raised TypeError: no", "nan": "got nan where 1 is expected", "accepted": "id 5 was accepted"}
    found = []
    for clause in CLAUSES.values():
        failure = known.fails.get(clause.name)
        if clause.operator == known.operator and failure is not None:
            message = messages.get(failure.sort, "values differ")
            found.append(outcome(clause.id, message=message, worst=failure.bounds or 0.0))
        elif clause.operator == known.operator:
            found.append(outcome(clause.id, "holds"))
    return found


def known(operator: str, name: str, fails: Iterable[str], family: str = "formula", **options) -> Known:
    pattern = {clause: Failure("value", 100.0) for clause in fails}
    fault = Known(f"{operator}.{name}", operator, family, name, f"{name} is done", "", pattern, ())
    return replace(fault, **options)


# -------------------------------------------------------------------------------------------------------- what was seen


@pytest.mark.parametrize(
    ("message", "sort"),
    [
        ("raised TypeError: no", "raised"),
        ("returned shape (1, 2), expected (2,)", "shape"),
        ("returned torch.float32, expected torch.bfloat16, the dtype of its input", "dtype"),
        ("returned None, expected a torch.Tensor", "type"),
        ("id 5 with a vocabulary of 5 was accepted; it must be refused with an exception", "accepted"),
        ("it changed its argument x", "changed"),
        ("got nan where 1 is expected", "nan"),
        ("a query's weights do not sum to 1: got -inf where 1 is expected", "nan"),
        ("a value is NaN", "nan"),
        ("nondeterministic: the same call came to different results; once it raised X", "changing"),
        ("values differ by more than rounding allows", "value"),
    ],
)
def test_what_was_seen_is_told_by_the_message(message, sort):
    assert sort_of(outcome("softmax.any_dim", message=message)) == sort
    assert sort_of(outcome("softmax.any_dim", "holds", message)) == ""


def test_marks_tell_clauses_what_was_seen_by_how_much_and_what_they_are_about():
    alone = set(marks({"any_memory_layout": Failure("value", 5.0)}))
    assert alone == {
        *("any_memory_layout", "value", "any_memory_layout by 0"),
        *("layouts value", "layouts alone"),
    }
    both = set(marks({"any_memory_layout": Failure("raised"), "agrees_with_the_oracle": Failure("value", 1e6)}))
    assert {"layouts raised", "raised", "agrees_with_the_oracle by 2"} <= both
    assert "layouts alone" not in both


# -------------------------------------------------------------------------------------------------------------- guesses


def test_a_fault_that_fails_in_the_very_same_way_is_named_first():
    faults = [
        known("silu", "first", ["agrees_with_the_oracle", "any_length"]),
        known("silu", "second", ["agrees_with_the_oracle"], "precision"),
        known("linear", "other", ["agrees_with_the_oracle"], "precision"),
    ]
    likeness = Likeness(faults, ["agrees_with_the_oracle", "any_length"])
    best = guesses("silu", faults[0].fails, likeness)[0]
    assert best.fault is faults[0]
    assert best.likeness == pytest.approx(1)


def test_clauses_that_were_not_judged_tell_nothing():
    faults = [known("silu", "first", ["any_length"]), known("silu", "second", ["no_bias"], "precision")]
    assert guesses("silu", faults[0].fails, Likeness(faults, ["no_bias"])) == []


def test_what_is_unlike_every_fault_is_no_guess():
    faults = [known("silu", "first", ["agrees_with_the_oracle", "any_length"])]
    likeness = Likeness(faults, ["agrees_with_the_oracle", "any_length", "keeps_its_signature"])
    assert guesses("silu", {"keeps_its_signature": Failure("type")}, likeness) == []


def test_a_kind_left_out_is_left_out_of_its_own_operator_alone():
    faults = [known("silu", "a", ["any_length"]), known("linear", "a", ["any_length"]), known("silu", "b", ["any_dim"])]
    assert Likeness(faults, ["any_length"]).without("silu", "a").known == (faults[1], faults[2])


# ------------------------------------------------------------------------------------------------------------ causes


def test_nothing_is_wrong_where_all_holds():
    assert diagnose([outcome("softmax.any_dim", "holds"), outcome("silu.agrees_with_the_oracle", "absent")]) == ()


def test_most_faults_of_the_catalogue_are_recognized_from_what_they_do():
    some = [fault for fault in catalogue() if not fault.fails.keys().isdisjoint(c.name for c in CLAUSES.values())][::9]
    named = [diagnose(outcomes_of(fault)) for fault in some]
    right = [bool(causes) and causes[0].fault == fault.id for causes, fault in zip(named, some, strict=True)]
    assert sum(right) > 0.6 * len(some)


def test_a_cause_says_what_is_done_how_sure_that_is_and_where_it_was_reported():
    fault = next(f for f in catalogue() if f.report and f.operator == "softmax")
    cause = diagnose(outcomes_of(fault))[0]
    assert cause.text.endswith(f"as in {fault.report})") or cause.fault != fault.id
    assert any(f"({word}" in cause.text for word in WORDS)
    assert cause.family in FAMILIES


def test_an_undeclared_convention_comes_before_faults():
    message = "this is the half-split pairing (i, i + d_k/2); if intended, declare spec_lm_conventions = {}"
    found = [outcome("rope.agrees_with_the_oracle"), outcome("rope.theta_is_honored", message=message)]
    (cause,) = diagnose(found)
    assert (cause.operator, cause.text, cause.fault) == ("rope", message, "")


def test_beside_a_convention_that_few_clauses_name_a_fault_is_told(monkeypatch):
    """A wrong softmax may give NaN to a query that sees no key as well: declaring that would mend one clause of six."""
    names = ["shift_invariance", "any_dim", "any_length", "long_rows", "has_no_memory", "agrees_with_the_oracle"]
    monkeypatch.setattr(diagnosis, "catalogue", lambda: (known("softmax", "own", names, "overflow"),))
    message = "this is NaN; if intended, declare spec_lm_conventions = {}"
    found = [outcome(f"softmax.{name}", message=message if name == names[0] else "") for name in names]
    convention, fault = diagnose(found)
    assert convention.text == message
    assert (fault.family, fault.text.partition(",")[0]) == ("overflow", "besides")


def test_a_fault_of_what_is_inside_comes_first(monkeypatch):
    """rope's fault would show in multi-head attention with RoPE, and not in the language model."""
    above = "multihead_self_attention_with_rope"
    fault = known("rope", "twisted", ["agrees_with_the_oracle"], "positions", shows_in=(above,))
    others = [
        known(above, "own", ["agrees_with_the_oracle"]),
        known("transformer_lm", "own", ["agrees_with_the_oracle"]),
    ]
    monkeypatch.setattr(diagnosis, "catalogue", lambda: (fault, *others))
    names = ("transformer_lm", above, "rope")
    found = [outcome(f"{name}.agrees_with_the_oracle", worst=100.0) for name in names]
    others_hold = [c for c in CLAUSES if c.partition(".")[0] in names and not c.endswith(".agrees_with_the_oracle")]
    found += [outcome(clause, "holds") for clause in others_hold]
    causes = {cause.operator: cause for cause in diagnose(found)}
    assert list(causes) == ["rope", above, "transformer_lm"]
    assert causes[above].below == "rope"
    assert causes[above].text == "it fails as a fault of rope would make it: mend rope first"
    assert causes["transformer_lm"].below == ""


def test_few_clauses_make_no_pattern():
    assert diagnose([outcome("softmax.shift_invariance"), outcome("softmax.sums_to_one")]) == ()


def test_two_guesses_of_which_the_second_says_or():
    fault = next(fault for fault in catalogue() if fault.operator == "softmax")
    found = [cause.text for cause in diagnose(outcomes_of(fault))]
    assert 1 <= len(found) <= 2
    assert [text.startswith("or ") for text in found] == [False, True][: len(found)]


@pytest.mark.parametrize(
    ("operator", "wrong", "family"),
    [
        ("silu", lambda x: x.sigmoid(), "formula"),
        ("linear", lambda x, w: linear(x.bfloat16(), w.bfloat16()).to(x.dtype), "precision"),
        ("embedding", lambda ids, w: embedding(ids % len(w), w), "refusal"),
        ("rmsnorm", lambda x, gain, eps: rms_norm(x, gain.shape, 1 + gain, eps), "norm"),
        ("softmax", lambda x, dim: x.exp() / x.exp().sum(dim, keepdim=True), "overflow"),
        ("silu", lambda x: silu(x.mul_(1.0)) * x.copy_(x + 1).div(x), "arguments"),
    ],
)
def test_what_is_wrong_with_an_implementation_is_told(operator, wrong, family):
    report = spec_lm.check({operator: wrong}, operators=[operator], examples=20)
    assert family in [cause.family for cause in report.diagnosis]


# ------------------------------------------------------------------------------------------------------------ the data


def test_what_an_operator_is_built_of_is_what_the_reference_calls():
    for operator in OPERATORS:
        assert {higher for higher in OPERATORS if operator in inside(higher)} == set(matrix.above(operator)), operator


def test_every_family_in_the_data_is_one_there_is():
    assert {fault.family for fault in catalogue()} <= set(FAMILIES)


def test_the_data_are_read_without_the_catalogue_of_faults():
    data = json.loads(files("spec_lm").joinpath("faults/matrix.json").read_text(encoding="utf-8"))
    assert [fault.id for fault in catalogue()] == list(data["faults"])


@pytest.fixture(scope="module")
def measured():
    with_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {level: accuracy(level) for level in ("must", "should")}
    torch.set_num_threads(with_threads)


def test_the_right_family_comes_first_far_more_often_than_the_most_frequent_one(measured):
    both, must = measured["should"], measured["must"]
    assert both.first > 0.65 * both.faults
    assert both.first > 2 * both.most_frequent
    assert both.among_two > 0.75 * both.faults
    assert both.recognized > 0.85 * both.faults
    assert must.first > 0.5 * must.faults
    assert must.first > must.most_frequent


def test_a_guess_is_as_sure_as_it_is_right(measured):
    for accurate in measured.values():
        shares = [right / said for right, said in accurate.by_word.values()]
        assert shares == sorted(shares, reverse=True)
        assert shares[0] > 0.7
