"""The JSON Schema in the package describes the lines that are written, and nothing else."""

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from jsonschema import Draft202012Validator

import spec_lm

SCHEMA = json.loads(files("spec_lm.conformance").joinpath("report.schema.json").read_text(encoding="utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)


def raising(x, dim):
    raise TypeError("\x1b <b> \udc80")


def of_softmax(function) -> dict:
    return {"implementation": {"softmax": function}, "operators": ["softmax"]}


CHECKS = {
    "the reference": {"clauses": ["softmax.any_dim", "transformer_lm.unnormalized_logits", "linear.no_bias"]},
    "a wrong one": of_softmax(lambda x, dim: x.exp() / x.exp().sum(dim, keepdim=True)),
    "one that raises": of_softmax(raising),
    "one of another shape": of_softmax(lambda x, dim: x[None]),
    "weights and words": {
        "implementation": {"embedding": lambda ids, weight: weight[ids % len(weight)], "linear": lambda x, w: x @ w},
        "operators": ["embedding", "linear"],
    },
    "large sides and infinities": of_softmax(lambda x, dim: torch.full_like(x, torch.inf)),
}


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_schema_is_one():
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("asked", CHECKS.values(), ids=CHECKS)
def test_each_line_of_a_report_is_as_the_schema_says_and_the_same_in_every_run(asked, tmp_path):
    """The times apart."""
    runs = []
    for name in ("first.jsonl", "second.jsonl"):
        report = spec_lm.check(**asked, level="should", examples=3, seed=5)
        replace(report, outcomes=tuple(replace(outcome, seconds=0.0) for outcome in report)).write(tmp_path / name)
        runs.append((tmp_path / name).read_text(encoding="utf-8"))
    for line in lines(tmp_path / "first.jsonl"):
        VALIDATOR.validate(line)
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "change",
    [
        {"outcome": "passes"},
        {"since": "later"},
        {"examples": -1},
        {"worst": "large"},
        {"evidence": {"got": 1}},
        {"kind": "song"},
        {"message": ""},
    ],
    ids=str,
)
def test_a_line_that_is_none_is_refused(change, tmp_path):
    spec_lm.check(**of_softmax(raising), clauses=["softmax.any_dim"], examples=1).write(tmp_path / "out.jsonl")
    outcome = lines(tmp_path / "out.jsonl")[1]
    assert VALIDATOR.is_valid(outcome)
    assert not VALIDATOR.is_valid({**outcome, **change})
