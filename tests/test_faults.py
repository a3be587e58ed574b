"""The specification has teeth: every clause detects a fault, and every fault is detected where it says it is."""

import pytest

from spec_lm.conformance.clause import CLAUSES
from spec_lm.conformance.operators import OPERATORS, Checked
from spec_lm.conformance.runner import DTYPES, Settings, preserved, run_clause
from spec_lm.conformance.strategies import Domain
from spec_lm.faults import FAMILIES, Fault, catalogue
from spec_lm.matrix import findings, read, staleness

FAULTS = catalogue()
MATRIX = read()
REFRESH = "run spec-lm faults --write"


def test_the_packaged_matrix_is_that_of_these_sources():
    """Of these faults and clauses, as they are written now, with every detection that the catalogue names."""
    assert staleness(MATRIX, FAULTS, CLAUSES) == [], REFRESH


def test_every_fault_is_detected():
    assert [name for name, row in MATRIX.faults.items() if not row.detected_by] == []


@pytest.mark.parametrize("clause_id", CLAUSES)
def test_clause_detects_a_fault(clause_id):
    """A clause that detects nothing says nothing."""
    assert MATRIX.detected_by(clause_id), REFRESH


def test_every_fault_is_a_small_change():
    """Some clause holds on it, unless its signature is wrong, where the others are not judged."""
    assert findings(MATRIX, FAULTS).nothing_else == []


def test_no_fault_says_in_vain_that_no_invariant_detects_it():
    said = {name: row for name, row in MATRIX.faults.items() if row.no_invariant}
    assert [name for name, row in said.items() if not row.by_the_oracle_alone] == []


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_fault_is_detected_by_the_first_clause_it_names(fault: Fault):
    """Run as a check runs it, at once and with Hypothesis: it comes to "fails", a Violation, never a crash."""
    supports = {"dtype": DTYPES}
    checked = Checked(OPERATORS[fault.operator], fault.function, supports=supports)
    settings = Settings(shrink=False, supports=supports)
    with preserved(0):
        clause = CLAUSES[f"{fault.operator}.{fault.detected_by[0]}"]
        outcome, _ = run_clause(clause, checked, Domain(fault.operator, supports=supports), settings)
    assert outcome.outcome == "fails", outcome.message


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_fault_says_what_it_does_and_is_of_a_family(fault: Fault):
    """A catalogue entry without words is no catalogue entry."""
    assert len(fault.does.split()) >= 3
    assert fault.report == "" or "#" in fault.report
    assert fault.family in FAMILIES
