"""Declared choices are followed, and undeclared ones are named by whichever clause fails."""

from collections.abc import Callable
from itertools import product

import pytest
import torch

import spec_lm
from spec_lm.conformance import oracle
from spec_lm.conformance.bounds import CONVENTIONS, FOLLOWED
from spec_lm.conformance.operators import OPERATORS, Checked, to_numpy
from spec_lm.conformance.tolerance import Violation, bit_equal, close
from spec_lm.faults import catalogue

ROPE = "rope"
ATTENTION = "scaled_dot_product_attention"


def by_oracle(operator: str, **choices: str) -> Callable:
    """An implementation that has made these choices."""

    def function(*arguments):
        return torch.from_numpy(getattr(oracle, operator)(*map(to_numpy, arguments), **choices)).float()

    return function


def rope_call() -> tuple:
    return torch.arange(1.0, 25.0).reshape(1, 3, 8), torch.tensor([1, 2, 5]), 100.0, 8


def attention_call() -> tuple:
    q, k = torch.arange(6.0).reshape(1, 3, 2), torch.arange(1.0, 5.0).reshape(1, 2, 2)
    return q, k, k, torch.tensor([[True, True], [False, False], [True, False]])


CALLS = {ROPE: rope_call(), ATTENTION: attention_call()}
CASES = [
    (operator, dict(zip(FOLLOWED[operator], choices, strict=True)))
    for operator in CALLS
    for choices in product(*(CONVENTIONS[name] for name in FOLLOWED[operator]))
]


@pytest.mark.parametrize(("operator", "made"), CASES)
@pytest.mark.parametrize("declared", [False, True])
def test_a_choice_is_followed_where_it_is_declared_and_named_where_it_is_not(
    operator: str, made: dict[str, str], declared: bool
):
    """Only what differs from the declared choices is named, with the words to declare it."""
    function = by_oracle(operator, **{FOLLOWED[operator][name]: choice for name, choice in made.items()})
    checked = Checked(OPERATORS[operator], function, made if declared else {})
    other = {name: choice for name, choice in made.items() if choice != CONVENTIONS[name][0]}
    call = CALLS[operator]

    def judge() -> None:
        with checked.naming(*call):
            close(checked(*call), checked.exact(*call))

    if declared or not other:
        judge()
        return
    with pytest.raises(Violation) as caught:
        judge()
    for name, choice in other.items():
        assert f"--convention {name}={choice}" in str(caught.value)
    assert f"spec_lm_conventions = {other}" in str(caught.value)
    assert str(caught.value).count("--convention") == len(other)


def test_a_choice_that_was_declared_but_not_made_is_named_too():
    """Declaring halves does not make neighbors wrong: they are what is not declared then."""
    checked = Checked(OPERATORS[ROPE], by_oracle(ROPE), {"rope_pairing": "halves"})
    call = CALLS[ROPE]
    with pytest.raises(Violation, match="this is the pairing of neighbors"), checked.naming(*call):
        close(checked(*call), checked.exact(*call))


def test_what_no_choice_explains_is_not_named():
    """Nor is what fails although the result is right."""
    call = CALLS[ROPE]
    wrong = Checked(OPERATORS[ROPE], lambda x, *rest: x)
    with pytest.raises(Violation, match="more than rounding"), wrong.naming(*call):
        close(wrong(*call), wrong.exact(*call))
    right = Checked(OPERATORS[ROPE], by_oracle(ROPE))
    with pytest.raises(Violation, match="something else"), right.naming(*call):
        raise Violation("something else", kind="other")


@pytest.mark.parametrize("operator", ["rope", "multihead_self_attention_with_rope", "transformer_block"])
def test_every_clause_that_an_undeclared_rotation_breaks_names_it(operator: str):
    """So that a reader of any failure learns what to declare; declared, all hold."""
    turned_back = {operator: by_oracle(operator, direction="clockwise")}
    assert spec_lm.check(turned_back, examples=12, conventions={"rope_direction": "clockwise"}).conforms
    fails = spec_lm.check(turned_back, examples=12).of("fails", "error")
    assert len(fails) > 2
    assert [outcome.clause for outcome in fails if "rope_direction=clockwise" not in outcome.message] == []


def test_products_that_are_declared_to_lose_bits_are_not_asked_for_them():
    """A bit more or less is a violation, unless it is declared that products are rounded."""
    call, nearly = (torch.ones(1, 2), torch.ones(1, 2)), torch.tensor([[2.0 + 2.0**-10]])
    with pytest.raises(Violation, match="not equal"):
        bit_equal(Checked(OPERATORS["linear"], lambda *_: nearly)(*call), 2.0)
    output = Checked(OPERATORS["linear"], lambda *_: nearly, {"accumulation": "tf32"})(*call)
    bit_equal(output, 2.0)
    bit_equal(output[0], 2.0)


def test_values_that_coincide_name_no_convention():
    """On a row of equal entries neighbors joined as halves are halves; on any other they are nothing that is known."""
    fault = catalogue()["rope.neighbors_joined_as_halves"]
    arguments = torch.full((1, 3, 8), 1.5), torch.tensor([1, 2, 5]), 100.0, 8
    checked = Checked(OPERATORS[ROPE], fault.function)
    with pytest.raises(Violation, match="differ") as seen, checked.naming(*arguments):
        close(checked(*arguments), checked.exact(*arguments))
    assert "declare" not in str(seen.value)
