"""Variants compute the operators' equations, and those without checks of shapes differ in nothing else."""

import importlib
import sys
from importlib.util import find_spec, module_from_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import spec_lm
from spec_lm import fused
from spec_lm.bench import variants
from spec_lm.bench.cases import Case, Direction, Sizes, arguments
from spec_lm.bench.row import single_call
from spec_lm.bench.unchecked import unchecked
from spec_lm.conformance import workers
from spec_lm.conformance.operators import OPERATORS
from spec_lm.reference import functional, modules
from spec_lm.reference.shapes import ShapeError

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # when peers are imported
SMALL = Sizes(batch=2, sequence=6, d_model=8, heads=2, d_ff=12, vocab=10, layers=2)
WEIGHED = ("swiglu", "multihead_self_attention_with_rope", "transformer_lm")
NAMES = [
    *("reference", "reference_checked", "matmul_attention", "one_projection", "fused", "torch_functions"),
    pytest.param("llama_eager", marks=pytest.mark.skipif(not find_spec("transformers"), reason="extra peers")),
    pytest.param("llama_sdpa", marks=pytest.mark.skipif(not find_spec("transformers"), reason="extra peers")),
    pytest.param("x_transformers", marks=pytest.mark.skipif(not find_spec("x_transformers"), reason="extra peers")),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_variant_computes_what_the_reference_does(name):
    variant = variants.variant(name)
    provided = [operator for operator in OPERATORS if variant.has(operator)]
    assert provided
    for operator in provided:
        case = Case(operator, SMALL)
        expected = getattr(functional, operator)(*arguments(case, 3))
        torch.testing.assert_close(single_call(case, variant, seed=3)(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_training_gives_a_gradient_of_every_weight(name):
    variant = variants.variant(name)
    for operator in OPERATORS:
        if variant.has(operator):
            direction: Direction = "training"
            gradients = single_call(Case(operator, SMALL, direction=direction), variant)()
            assert gradients
            assert all(each is not None and each.isfinite().all() for each in gradients)


@pytest.mark.parametrize("name", ["matmul_attention", "one_projection", NAMES[-1]])
def test_a_variant_is_checked_as_it_is_measured(name):
    report = spec_lm.check(f"spec_lm.bench.variants:{name}", examples=3)
    assert report.conforms, report
    assert {outcome.operator for outcome in report.of("holds")} == set(variants.variant(name).builders) or set(
        variants.variant(name).functions
    )


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("matmul_attention", "torch_functions")])
def test_gradients_of_what_is_built_are_judged(name):
    """Its weights are copies, packed or reordered; what they get comes back to the weights it was built of."""
    clauses = [
        f"{each}.gradients_with_respect_to_weights" for each in variants.variant(name).builders if each in WEIGHED
    ]
    report = spec_lm.check(f"spec_lm.bench.variants:{name}", clauses=clauses, examples=5)
    assert [outcome.outcome for outcome in report] == ["holds"] * len(clauses)
    assert clauses


def test_a_built_model_with_a_wrong_gradient_is_seen():
    def build(*arguments):
        call, inputs, leaves = variants.variant("fused").build("transformer_lm", arguments)
        return (lambda ids: call(ids) + call(ids).detach() - call(ids)), inputs, leaves

    wrong = variants.Variant("wrong", "", {}, {"transformer_lm": build})
    report = spec_lm.check(wrong.operators(), clauses=["transformer_lm.gradients_with_respect_to_weights"], examples=5)
    assert [outcome.outcome for outcome in report] == ["fails"]


def test_copies_without_checks_leave_the_originals_as_they_are():
    copies = unchecked()
    x, wrong = torch.ones(2, 3), torch.ones(5, 4)
    for name, original in (("spec_lm.reference.functional", functional), ("spec_lm.fused", fused)):
        assert sys.modules[name] is original
        with pytest.raises(ShapeError):
            original.linear(x, wrong)
        with pytest.raises(RuntimeError):
            copies[name].linear(x, wrong)
    assert copies["spec_lm.reference.modules"].functional is copies["spec_lm.reference.functional"]
    assert modules.functional is functional
    assert copies["spec_lm.fused"].modules is copies["spec_lm.reference.modules"]


def test_a_peer_that_cannot_be_imported_ends_no_process(monkeypatch):
    asked: list[str] = []

    def broken(name: str) -> None:
        asked.append(name)
        raise RuntimeError(name)

    monkeypatch.setattr(importlib, "import_module", broken)
    found: Any = find_spec("spec_lm.bench.preload")
    found.loader.exec_module(module_from_spec(found))
    assert {name.partition(".")[0] for name in asked} == {"transformers", "x_transformers"}


def test_a_start_asks_for_what_its_children_need_after_the_specification(monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(workers, "context", lambda: SimpleNamespace(set_forkserver_preload=asked.extend))
    monkeypatch.setattr(workers, "_forks", lambda: True)
    monkeypatch.setattr(workers.forkserver, "ensure_running", lambda: None)
    workers.start("spec_lm.bench.preload")
    assert asked == ["spec_lm.conformance.preload", "spec_lm.bench.preload"]


def test_a_name_that_is_no_variant_is_no_attribute():
    with pytest.raises(AttributeError, match="has no attribute 'fusd'"):
        variants.fusd  # noqa: B018
