"""The specification has teeth: every clause detects a fault, every fault is detected where it says it is."""

import pytest

from spec_lm.conformance.clause import CLAUSES
from spec_lm.conformance.operators import OPERATORS, Checked
from spec_lm.conformance.runner import Settings, preserved, run_clause
from spec_lm.conformance.strategies import Domain
from spec_lm.faults import Fault, catalogue, clauses_detecting

FAULTS = catalogue()
SETTINGS = Settings(shrink=False)


def outcome_on(fault: Fault, clause_id: str):
    checked = Checked(OPERATORS[fault.operator], fault.function)
    with preserved(0):
        return run_clause(CLAUSES[clause_id], checked, Domain(fault.operator), SETTINGS)[0]


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_fault_is_detected_by_the_clauses_it_names(fault):
    """Each named clause comes to "fails": a Violation, never a crash of the clause."""
    seen = {clause_id: outcome_on(fault, clause_id) for clause_id in clauses_detecting(fault)}
    assert {i: o.outcome for i, o in seen.items()} == dict.fromkeys(seen, "fails"), [o.message for o in seen.values()]


@pytest.mark.parametrize("clause_id", CLAUSES)
def test_clause_detects_a_fault(clause_id):
    """A clause that detects nothing says nothing."""
    assert any(clause_id in clauses_detecting(fault) for fault in FAULTS.values())


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_fault_says_what_it_does(fault):
    """A catalogue entry without words is no catalogue entry."""
    assert len(fault.does.split()) >= 3
    assert fault.report == "" or "#" in fault.report
