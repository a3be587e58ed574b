"""What a call does to its process is seen, named, and undone."""

import os
import random

import numpy as np
import pytest
import torch

import spec_lm
from spec_lm.conformance.surroundings import GENERATORS, SETTINGS, drawn_from, seeded, undisturbed
from spec_lm.conformance.tolerance import Violation

DISTURBANCES = {
    "torch's global random generator": lambda: torch.rand(1),
    "NumPy's global random generator": lambda: np.random.rand(),
    "Python's global random generator": random.random,
    "torch's default dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch's default device": lambda: torch.set_default_device("meta"),
    "torch's grad mode": lambda: torch.set_grad_enabled(False),
    "torch's number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch's matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "torch's deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "torch's flush of subnormal numbers": lambda: torch.set_flush_denormal(True),
    "NumPy's error handling": lambda: np.seterr(all="raise"),
    "the current folder": lambda: os.chdir("/"),
    "the environment variables": lambda: os.environ.update(SPEC_LM_TEST="1"),
}


def read(parts):
    return {name: get() for name, (get, _) in parts.items()}


def test_every_part_has_a_disturbance():
    assert list(DISTURBANCES) == [*GENERATORS, *SETTINGS]


@pytest.mark.parametrize("name", DISTURBANCES)
def test_a_disturbance_is_named_and_undone(name):
    parts = GENERATORS if name in GENERATORS else SETTINGS
    before = read(parts)
    with pytest.raises(Violation, match=f"^it changed {name}$"), undisturbed(parts):
        DISTURBANCES[name]()
    assert read(parts) == before


@pytest.mark.parametrize("name", DISTURBANCES)
def test_a_disturbance_is_undone_where_the_call_raises(name):
    parts = GENERATORS if name in GENERATORS else SETTINGS
    before = read(parts)

    def disturb_and_raise():
        DISTURBANCES[name]()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), undisturbed(parts):
        disturb_and_raise()
    assert read(parts) == before


def test_a_folder_that_a_call_goes_to_and_deletes_is_a_change_of_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def loses_the_folder(x, dim):
        os.mkdir("gone")
        os.chdir("gone")
        os.rmdir(tmp_path / "gone")
        return x.softmax(dim)

    asked = {"clauses": ["softmax.leaves_global_settings_alone"], "examples": 2}
    outcome = spec_lm.check({"softmax": loses_the_folder}, **asked)[asked["clauses"][0]]
    assert (outcome.outcome, "changed the current folder" in outcome.message) == ("fails", True), outcome.message
    assert os.getcwd() == str(tmp_path)


def test_nothing_happens_where_nothing_is_disturbed():
    with undisturbed(GENERATORS | SETTINGS):
        torch.ones(2).softmax(0)


def test_generators_are_seeded_inside_and_as_before_afterwards():
    before = read(GENERATORS)
    drawn = []
    for _ in range(2):
        with seeded(5):
            drawn.append((torch.rand(1).item(), np.random.rand(), random.random()))
    assert drawn[0] == drawn[1]
    assert read(GENERATORS) == before


@pytest.mark.parametrize("name", GENERATORS)
def test_a_seed_changes_generators_that_were_drawn_from(name):
    """Where a call sets a seed, its generator must not happen to be at that seed already."""
    before = read(GENERATORS)
    seeds = {
        "torch's global random generator": torch.manual_seed,
        "NumPy's global random generator": np.random.seed,
        "Python's global random generator": random.seed,
    }
    with pytest.raises(Violation, match=f"^it changed {name}$"), drawn_from(), undisturbed(GENERATORS):
        seeds[name](0)
    assert read(GENERATORS) == before


def test_a_dtype_that_is_refused_is_not_judged():
    """Refusing a dtype gives no wrong numbers; failing in it for some values does."""

    def refuses(x, dim):
        if x.dtype == torch.float16:
            raise TypeError("no half precision")
        return torch.softmax(x, dim)

    def overflows(x, dim):
        return (x.exp() / x.exp().sum(dim, keepdim=True)) if x.dtype == torch.float16 else torch.softmax(x, dim)

    clause = "softmax.agrees_with_the_oracle_in_float16"
    for function, expected in ((refuses, "not_judged"), (overflows, "fails"), (torch.softmax, "holds")):
        assert spec_lm.check({"softmax": function}, clauses=[clause], level="should")[clause].outcome == expected


def test_float64_is_judged_where_it_is_declared():
    clause = "softmax.agrees_with_the_oracle_in_float64"

    def narrow(x, dim):
        return torch.softmax(x.float(), dim).to(x.dtype)

    asked = {"clauses": [clause], "level": "should"}
    declared = {"dtype": ["float32", "float64"]}
    assert spec_lm.check({"softmax": narrow}, **asked)[clause].outcome == "not_judged"
    assert spec_lm.check({"softmax": narrow}, supports=declared, **asked)[clause].outcome == "fails"
    assert spec_lm.check({"softmax": torch.softmax}, supports=declared, **asked)[clause].outcome == "holds"
