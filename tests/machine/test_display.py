"""Failures read well: short numbers, NaN in plain sight, large tensors around their worst entry."""

import math
from dataclasses import replace

import pytest
import torch

from spec_lm.conformance.clause import CLAUSES
from spec_lm.conformance.display import (
    counterexample_of,
    evidence_of,
    evidence_text,
    failure_text,
    failures_text,
    numbers_text,
    operator_text,
    summary_text,
    values_text,
)
from spec_lm.conformance.operators import OPERATORS
from spec_lm.conformance.report import Cause, Outcome, Report
from spec_lm.conformance.strategies import ArgumentsRecipe, EntriesRecipe, TensorRecipe, WeightsRecipe, with_part
from spec_lm.conformance.tolerance import Evidence, Output, Violation, at_most, bit_equal, close, finite


def output(*values: float, dtype=torch.float32) -> Output:
    raw = torch.tensor(values, dtype=dtype)
    return Output(raw, lambda: torch.full(raw.shape, 2.0**-20, dtype=torch.float64))


def seen_by(compare, *sides) -> tuple[str, list[str]]:
    """The message of a comparison that fails, and the lines of its evidence."""
    with pytest.raises(Violation) as violation:
        compare(*sides)
    evidence = evidence_of(violation.value.evidence)
    assert evidence is not None
    return str(violation.value), list(evidence_text(evidence))


@pytest.mark.parametrize(
    ("number", "dtype", "text"),
    [
        (0.1, "float64", "0.1"),
        (float(torch.tensor(0.1)), "float32", "0.1"),
        (float(torch.tensor(0.1, dtype=torch.bfloat16)), "bfloat16", "0.1"),
        (float(torch.tensor(0.1, dtype=torch.float16)), "float16", "0.1"),
        (1.0, "float32", "1."),
        (-0.0, "float32", "-0."),
        (128.0, "bfloat16", "128."),
        (70000.0, "float16", "70000."),
        (1e300, "float32", "1e+300"),
        (2.0**-20, "float32", "9.536743e-07"),
        (math.nan, "float32", "NaN"),
        ("inf", "float32", "inf"),
        (3, "int64", "3"),
        ([[True, False]], "bool", "[[True, False]]"),
        ([[1.0, 0.5], [-2.0, 4.0]], "float32", "[[1., 0.5], [-2., 4.]]"),
        ([], "float32", "[]"),
    ],
)
def test_numbers_are_as_short_as_their_dtype_allows(number, dtype, text):
    assert numbers_text(number, dtype) == text


def test_got_expected_and_worst_are_on_one_line_where_they_fit():
    _, lines = seen_by(close, output(1.0, 0.5), torch.tensor([1.0, 0.25]))
    assert lines == ["got       [1., 0.5]   expected [1., 0.25]   worst at [1]: err 0.25, bound 9.5e-07"]


def test_longer_ones_have_a_line_each_aligned():
    values = [1.0 + i / 7 for i in range(12)]
    _, lines = seen_by(close, output(*values), torch.tensor(values) + 1)
    assert [line[:10] for line in lines] == ["got       ", "expected  ", "worst     "]


def test_a_large_tensor_is_shown_around_its_worst_entry():
    got = torch.zeros(3, 50)
    got[1, 20] = 1.0
    error = Output(got, lambda: torch.full(got.shape, 1e-9, dtype=torch.float64))
    _, lines = seen_by(close, error, torch.zeros(3, 50))
    assert lines[0].startswith("got       [0., 0., 0., 1., 0., 0., 0.] at [1, 17:24]")
    assert "worst at [1, 20]" in lines[-1] or "worst     at [1, 20]" in lines[-1]


def test_a_tensor_of_many_digits_is_shown_around_its_worst_entry():
    got = torch.arange(60.0).reshape(6, 10) / 7
    expected = got.clone()
    expected[4, 9] = 0
    _, lines = seen_by(close, Output(got, lambda: torch.zeros(6, 10)), expected)
    assert lines[0] == "got       [6.571429, 6.714286, 6.857143, 7.] at [4, 6:10]"
    assert lines[1] == "expected  [6.571429, 6.714286, 6.857143, 0.] at [4, 6:10]"


def test_sides_that_read_alike_are_written_with_more_digits():
    exact = torch.tensor([1.0 + 2.0**-30], dtype=torch.float64)
    _, lines = seen_by(bit_equal, output(1.0), exact)
    assert "got       [1.]   expected [1.000000000931" in lines[0]


def test_nan_is_in_plain_sight():
    message, lines = seen_by(close, output(math.nan, 1.0), torch.tensor([1.0, 1.0]))
    assert message == "got nan where 1 is expected"
    assert lines == ["got       [NaN, 1.]   expected [1., 1.]   worst at [0]"]
    assert seen_by(finite, output(math.nan))[1] == ["got       [NaN]   expected finite values   worst at [0]"]


def test_an_order_is_shown_as_low_and_high():
    _, lines = seen_by(at_most, output(1.5), 1.0)
    assert lines == ["low       [1.5]   high [1.]   worst at [0]: low exceeds high by 0.5, bound 9.5e-07"]


@pytest.mark.parametrize("compare", [close, bit_equal, at_most])
def test_seen_is_left_out_where_the_evidence_says_it_all(compare):
    with pytest.raises(Violation) as violation:
        compare(output(2.0), torch.tensor([1.0]))
    for says, shown in (("", False), ("the first row differs", True)):
        message = says or str(violation.value)
        evidence = evidence_of(violation.value.evidence)
        text = failure_text(Outcome("softmax.x", "softmax", "must", "fails", message, "Sentence.", evidence=evidence))
        assert ("  seen      " in text) == shown


def test_scalars_stand_beside_the_last_tensor():
    recipes = {"x": TensorRecipe((1, 2), "small integers", 3, "float32"), "dim": -1, "theta": 10000.0}
    (line,) = values_text(counterexample_of(recipes)["values"])
    assert line.endswith("]  (1, 2) float32    dim = -1, theta = 10000.0")


@pytest.mark.parametrize(
    ("shape", "entries", "text"),
    [
        ((33,), (), "all 0.  (33,) float32"),
        ((3, 40), ((41, 2.0), (7, -1.5)), "0. but -1.5 at [0, 7], 2. at [1, 1]  (3, 40) float32"),
        ((2,), ((1, 2.0),), "[0., 2.]  (2,) float32"),
        ((70,), tuple((i, 1.0 + i) for i in range(9)), "(70,) float32"),
    ],
)
def test_of_many_numbers_that_are_nearly_all_alike_the_others_are_told(shape, entries, text):
    recipes = {"x": EntriesRecipe(shape, 0.0, entries, "float32")}
    assert list(values_text(counterexample_of(recipes)["values"])) == [f"x = {text}"]


def test_a_weight_dict_is_set_closely_small_entries_whole_and_large_ones_by_shape():
    recipes = {"weights": WeightsRecipe(4, 8, "small integers", 1, "float32", layers=2, vocab=5)}
    lines = list(values_text(counterexample_of(recipes)["values"]))
    assert lines[0].startswith("weights   token_embeddings.weight (5, 4); ")
    assert "layers.0.ln1.weight [" in " ".join(lines)
    assert len(lines) < 10
    assert all(len(line) <= 125 for line in lines)


def test_a_plain_entry_of_a_weight_dict_is_told_with_its_shape():
    plain = EntriesRecipe((5, 4), 0.0, ((6, 1.0),), "float32")
    recipes = {"weights": WeightsRecipe(4, 8, "halves", 1, "float32", None, 0, (("attn.q_proj.weight", plain),))}
    recipes["weights"] = with_part(recipes["weights"], ("ffn.w1.weight",), EntriesRecipe((8, 4), 0.0, (), "float32"))
    text = " ".join(values_text(counterexample_of(recipes)["values"]))
    assert "attn.q_proj.weight 0. but 1. at [1, 2] (5, 4);" in text
    assert "ffn.w1.weight all 0. (8, 4);" in text


def test_two_argument_lists_are_told_apart_where_they_differ():
    def arguments(seed):
        return ArgumentsRecipe((("x", TensorRecipe((2,), "plain", seed, "float32")), ("dim", 0)))

    recipes = {"arguments": arguments(1), "variant": arguments(2)}
    assert list(counterexample_of(recipes)["values"]) == ["arguments.x", "variant.x", "dim"]


def test_evidence_of_any_shape_is_shown():
    cases = [
        Evidence(torch.zeros(100), torch.ones(100)),
        Evidence(torch.tensor(1.0), torch.tensor(2.0), (), 1.0, 0.0),
        Evidence(torch.zeros(0), torch.zeros(0)),
        Evidence("text\x1b", None),
    ]
    for evidence in cases:
        stored = evidence_of(evidence)
        assert stored is not None
        assert "\x1b" not in "\n".join(evidence_text(stored))


def outcomes(operator="softmax", **counts: int) -> list[Outcome]:
    status_of = {"hold": "holds", "fail": "fails"}
    return [
        Outcome(f"{operator}.{status}{i}", operator, "must", status_of.get(status, status), f"reason {status}")  # type: ignore[arg-type]
        for status, count in counts.items()
        for i in range(count)
    ]


def test_a_line_an_operator_counts_and_gives_reasons():
    assert operator_text("softmax", outcomes(hold=14)) == "  softmax   14 hold"
    assert operator_text("softmax", outcomes(hold=1, fail=2), 9) == "  softmax      1 holds   2 fail"
    assert operator_text("silu", outcomes(absent=2)) == "  silu   absent (reason absent)"
    text = operator_text("softmax", outcomes(hold=3, not_judged=2, error=1))
    assert text == "  softmax    3 hold   1 error   2 not judged (reason not_judged)"


def test_the_last_line_is_a_denominator():
    several = outcomes(hold=3, fail=1, not_judged=1) + outcomes("silu", absent=2)
    report = Report({"implementation": "adapters.py", "level": "must", "clauses": 7}, tuple(several))
    assert summary_text(report) == (
        "adapters.py does not conform: 4 of 7 MUST clauses ran, 3 hold, 1 fails; not judged: 1; not provided: silu (2)"
    )


def test_every_clause_has_a_failure_that_can_be_shown():
    """A whole text for a clause of each operator, from nothing but its id and sentence."""
    for operator in OPERATORS:
        clause = CLAUSES[f"{operator}.agrees_with_the_oracle"]
        text = failure_text(Outcome(clause.id, operator, clause.level, "fails", "raised X", clause.sentence))
        assert text.splitlines()[0].split() == ["FAILS", clause.id, "MUST"]


# ------------------------------------------------------------------------------------------------------- many failures


def failing(number: int, operator="softmax", message="the rows differ") -> list[Outcome]:
    return [Outcome(f"{operator}.c{i}", operator, "must", "fails", message, "Sentence.") for i in range(number)]


def blocks(report: Report, **options) -> list[list[str]]:
    return [text.splitlines() for text in failures_text(report, "last.jsonl", **options)]


def test_of_many_failures_of_an_operator_three_are_told_in_full_and_the_others_in_a_line_each():
    told = blocks(Report({}, (*failing(5), *failing(2, "silu"))))
    assert [block[0].split()[:2] for block in told] == [
        *(["FAILS", f"softmax.c{i}"] for i in range(3)),
        ["FAIL", "2"],
        *(["FAILS", f"silu.c{i}"] for i in range(2)),
    ]
    assert told[3] == [
        "FAIL   2 more clauses of softmax; in full: --all-failures or spec-lm replay last.jsonl",
        "  softmax.c3  the rows differ",
        "  softmax.c4  the rows differ",
    ]
    assert len(blocks(Report({}, tuple(failing(5))), whole=True)) == 5
    assert len(blocks(Report({}, tuple(failing(4))))) == 4, "one line more would save nothing"


def test_a_line_says_how_far_off_a_wrong_number_is():
    evidence = evidence_of(Evidence(torch.zeros(2), torch.ones(2), (1,), 1.0, 0.25))
    wrong = replace(failing(1)[0], message="values differ by more than rounding allows", evidence=evidence)
    *_, rest = blocks(Report({}, (*failing(3), wrong, wrong)))
    assert rest[1] == "  softmax.c0  at [1]: err 1, bound 0.25"


def test_errors_that_read_the_same_are_told_once():
    said = [replace(outcome, outcome="error") for outcome in (*failing(3, message="it died"), *failing(1))]
    first, second = blocks(Report({}, tuple(said)))
    assert first[0].split()[:2] == ["ERROR", "softmax.c0"]
    assert first[1:] == ["  it died", "  so did softmax.c1, softmax.c2"]
    assert second[1:] == ["  the rows differ"]


def test_what_is_likely_stands_in_the_first_failure_of_its_operator():
    causes = (Cause("silu", "the sigmoid alone (likely)"), Cause("silu", "or a bias\x1b (possibly)"))
    told = blocks(Report({}, (*failing(2), *failing(2, "silu")), diagnosis=causes))
    likely = [[line for line in block if line.startswith("  likely ")] for block in told]
    assert likely == [
        *([], []),
        ["  likely    the sigmoid alone (likely)", "  likely    or a bias\\x1b (possibly)"],
        [],
    ]


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("a = 1\nassert a", ["  code      a = 1", "            assert a"]),
        ("\n".join(["a = 1"] * 12), 12),
        ("\n".join(["a = 1"] * 13), ["  code      spec-lm replay x --code"]),
        ("a = " + "1" * 150, ["  code      spec-lm replay x --code"]),
        ("", []),
    ],
)
def test_code_is_shown_where_it_is_short_and_found_elsewhere_where_it_is_not(code, shown):
    lines = failure_text(replace(failing(1)[0], reproduction=code), "spec-lm replay x").splitlines()
    between = lines[lines.index("  again     spec-lm replay x") + 1 : -1]
    assert (between if isinstance(shown, list) else len(between)) == shown
    if len(code.splitlines()) > 12:
        assert not any("code" in line for line in failure_text(replace(failing(1)[0], reproduction=code)).splitlines())


def test_what_fails_with_any_wrong_value_is_told_last_and_memory_after_it():
    names = ("has_no_memory", "agrees_with_the_oracle", "sums_to_one")
    failed = {name: Outcome(f"softmax.{name}", "softmax", "must", "fails", "seen", "Sentence.") for name in names}
    told = [block[0].split()[1].partition(".")[2] for block in blocks(Report({}, tuple(failed.values())))]
    assert told == ["sums_to_one", "agrees_with_the_oracle", "has_no_memory"]
    del failed["agrees_with_the_oracle"]
    assert blocks(Report({}, tuple(failed.values())))[0][0].split()[1] == "softmax.has_no_memory"
