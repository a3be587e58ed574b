"""Registering a clause wrongly is an error that names place and mend; a clause is a test of anybody's function."""

import inspect
import warnings

import hypothesis
import pytest
import torch
from hypothesis import is_hypothesis_test
from hypothesis import strategies as st

import spec_lm
from spec_lm import CLAUSES, Violation, clause
from spec_lm.conformance import clause as clause_module
from spec_lm.conformance.clause import RegistrationError, given
from spec_lm.conformance.strategies import tensors
from spec_lm.conformance.tolerance import close


@pytest.fixture(autouse=True)
def _register_as_before(monkeypatch):
    loaded = dict(CLAUSES)
    monkeypatch.setattr(clause_module, "_REGISTER", loaded)


def registers(body, *, operator="softmax", draws=None, **kwargs):
    clause(operator, draws or given(x=tensors("*batch n")), catches="nothing", **kwargs)(body)
    return CLAUSES[f"{operator}.{body.__name__}"]


def test_a_function_becomes_a_clause_and_stays_callable():
    def some_law(softmax, x):
        """A sentence
        on two lines."""

    found = registers(some_law)
    assert (found.id, found.sentence, found.level) == ("softmax.some_law", "A sentence on two lines.", "must")
    assert found.body is some_law


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"operator": "sofmax"}, r"unknown operator 'sofmax'; did you mean softmax\?"),
        ({"level": "may"}, "level 'may' is neither 'must' nor 'should'"),
        ({"draws": given(y=tensors("*batch n"))}, r"its parameters .* are \['x'\], but given\(\) draws \['y'\]"),
    ],
)
def test_a_wrong_registration_names_file_function_and_mend(kwargs, said):
    def some_law(softmax, x):
        """A sentence."""

    with pytest.raises(RegistrationError, match=said) as error:
        registers(some_law, **kwargs)
    assert f"{__file__}, " in str(error.value)
    assert "some_law" in str(error.value)


def test_a_clause_needs_its_sentence():
    def some_law(softmax, x):
        pass

    with pytest.raises(RegistrationError, match="no docstring; write the normative sentence there"):
        registers(some_law)


def test_an_id_is_taken_once():
    def shift_invariance(softmax, x):
        """Another sentence."""

    with pytest.raises(RegistrationError, match=r"the id softmax\.shift_invariance is taken"):
        registers(shift_invariance)


def test_the_five_named_invariants_are_there():
    named = {
        "softmax.shift_invariance",
        "scaled_dot_product_attention.masked_rows_sum_to_one",
        "multihead_self_attention.causal_independence_from_future_tokens",
        "multihead_self_attention.head_split_round_trip",
        "transformer_lm.unnormalized_logits",
    }
    assert named <= set(CLAUSES)


def test_every_clause_says_what_it_catches_and_where_it_comes_from():
    lacking = [each.id for each in CLAUSES.values() if not (each.catches and each.source and each.sentence)]
    assert lacking == []


def test_no_clause_has_a_bare_assert():
    with_assert = [each.id for each in CLAUSES.values() if "\n    assert " in inspect.getsource(each.body)]
    assert with_assert == []


def test_anybody_may_make_a_test_of_a_clause():
    test = CLAUSES["softmax.shift_invariance"].test(torch.softmax, examples=5)
    assert is_hypothesis_test(test)
    test()
    hypothesis.seed(1)(test)()
    wrong = CLAUSES["softmax.sums_to_one"].test(lambda x, dim: torch.ones_like(x), examples=5)
    with pytest.raises(Violation):
        wrong()


def test_strategies_of_hypothesis_serve_as_well():
    def some_law(softmax, x, n):
        """A sentence."""
        close(softmax(x, -1) * n, softmax(x, -1) * n)

    registers(some_law, draws=given(x=tensors("*batch n"), n=st.integers(1, 3))).test(torch.softmax, examples=3)()


def test_public_names_are_loaded_on_first_use():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(getattr(spec_lm, name) is not None for name in spec_lm.__all__)
    assert dir(spec_lm) == sorted(spec_lm.__all__)
    with pytest.raises(AttributeError, match="no attribute 'song'"):
        spec_lm.song  # noqa: B018
