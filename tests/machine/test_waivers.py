"""A waiver accepts a failure with its reason, and cannot outlive it."""

import json
import tomllib
from pathlib import Path

import pytest
import torch

import spec_lm
from spec_lm import CLAUSES
from spec_lm.conformance.report import UserError
from spec_lm.conformance.waivers import toml_of, waivers_of

CLAUSE, FLAT = "softmax.large_inputs_stay_finite", "softmax.shift_invariance"
NAIVE = """
calls = 0
def run_softmax(in_features, dim):
    global calls
    calls += 1
    e = in_features.exp()
    return e / e.sum(dim, keepdim=True)
"""
RIGHT = "def run_softmax(in_features, dim):\n    return in_features.softmax(dim)\n"


CALLS: list[int] = []


def naive(x, dim):
    CALLS.append(x.numel())
    return x.exp() / x.exp().sum(dim, keepdim=True)


@pytest.fixture(scope="module")
def pinned() -> dict:
    """The waiver of the naive softmax's failure, with its counterexample."""
    outcome = spec_lm.check({"softmax": naive}, clauses=[CLAUSE], examples=10)[CLAUSE]
    assert outcome.counterexample
    return {CLAUSE: {"reason": "kept small by its caller", "counterexample": outcome.counterexample["recipes"]}}


def checked(function, waive, **kwargs):
    return spec_lm.check({"softmax": function}, clauses=[CLAUSE], waive=waive, **{"examples": 10, **kwargs})


# ----------------------------------------------------------------------------------------------------------- in a check


def test_a_failure_is_waived_with_its_reason_and_the_check_conforms():
    report = checked(naive, {CLAUSE: "kept small by its caller"})
    assert report[CLAUSE].outcome == "waived"
    assert report[CLAUSE].message.startswith("kept small by its caller (seen: a value is NaN")
    assert (report.exit_code, report.counts["waived"]) == (0, 1)


def test_a_pinned_counterexample_is_run_first_and_without_a_search(pinned):
    CALLS.clear()
    report = checked(naive, pinned, examples=50)
    assert report[CLAUSE].outcome == "waived"
    assert (report[CLAUSE].counterexample or {})["recipes"] == pinned[CLAUSE]["counterexample"]
    assert len(CALLS) <= 3


def test_a_waiver_whose_counterexample_and_search_hold_is_an_error(pinned):
    report = checked(torch.softmax, pinned)
    assert report[CLAUSE].outcome == "error"
    assert report[CLAUSE].message.startswith(
        "mend the waiver: it holds on 10 examples and on its pinned counterexample"
    )
    assert report.exit_code == 2


def test_without_a_pinned_counterexample_a_search_that_holds_is_a_warning():
    report = checked(torch.softmax, {CLAUSE: "once it failed"})
    assert report[CLAUSE].outcome == "holds"
    assert report[CLAUSE].message.startswith("waived, but it holds on 10 examples; remove the waiver")
    assert report.exit_code == 0


def test_a_pinned_counterexample_that_holds_does_not_hide_another_failure(pinned):
    def wrong_elsewhere(x, dim):
        return torch.softmax(x, dim) if x.numel() == 1 else naive(x, dim)

    assert checked(wrong_elsewhere, pinned)[CLAUSE].outcome == "waived"


@pytest.mark.parametrize("recipes", [{"y": 1}, {"x": {"recipe": "Song"}}, {"x": {"recipe": "TensorRecipe"}}, {"x": {}}])
def test_a_counterexample_that_cannot_be_read_is_an_error_of_the_waiver(recipes):
    report = checked(naive, {CLAUSE: {"reason": "why", "counterexample": recipes}})
    assert report[CLAUSE].outcome == "error"
    assert report[CLAUSE].message.startswith("mend the waiver: softmax.large_inputs_stay_finite: ")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shape": [-1]}, "its shape is [-1], expected a list of sizes"),
        ({"shape": [1.5]}, "its shape is [1.5], expected a list of sizes"),
        ({"layout": "song"}, "its layout is 'song', expected one of contiguous, "),
    ],
)
def test_a_pinned_recipe_that_makes_no_sense_is_an_error_of_the_waiver(pinned, change, said):
    recipes = {"x": {**pinned[CLAUSE]["counterexample"]["x"], **change}}
    found = checked(naive, {CLAUSE: {"reason": "why", "counterexample": recipes}})[CLAUSE]
    assert found.outcome == "error"
    assert found.message.startswith(f"mend the waiver: {CLAUSE}: its counterexample cannot be read: {said}")


def test_a_waived_feature_still_leaves_the_draws_of_the_other_clauses():
    """With its counterexample pinned too: the other clauses must not fail for what is waived."""
    operator = "scaled_dot_product_attention"

    def needs_a_mask(query, key, value, mask):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)

    clauses = [f"{operator}.works_without_a_mask", f"{operator}.agrees_with_the_oracle"]
    asked = {"implementation": {operator: needs_a_mask}, "clauses": clauses, "examples": 10}
    counterexample = spec_lm.check(**asked)[clauses[0]].counterexample or {}
    waive = {clauses[0]: {"reason": "always masked", "counterexample": counterexample["recipes"]}}
    assert [outcome.outcome for outcome in spec_lm.check(**asked, waive=waive)] == ["waived", "holds"]


def test_what_is_absent_stays_so(pinned):
    report = spec_lm.check({"silu": torch.nn.functional.silu}, clauses=[CLAUSE], waive=pinned)
    assert report[CLAUSE].outcome == "absent"


def test_an_isolated_check_takes_its_waivers_and_no_projects(write, monkeypatch, tmp_path, pinned):
    """Even a reason that is no plain text, and where the current folder declares others."""
    monkeypatch.chdir(tmp_path)
    write("adapters.py", NAIVE)
    write("pyproject.toml", f'[tool.spec-lm.waivers]\n"{FLAT}" = {{reason = "not asked for"}}\n')
    waive = {CLAUSE: {**pinned[CLAUSE], "reason": 'it\'s "small"\\ \x7f\x1b\n é'}}
    report = spec_lm.check("adapters.py", clauses=[CLAUSE, FLAT], examples=10, waive=waive, isolate=True)
    assert [outcome.outcome for outcome in report] == ["waived", "fails"]
    assert report[CLAUSE].message.startswith('it\'s "small"\\ \x7f\x1b\n é (seen: ')
    assert toml_of({}).strip() == ""


# ----------------------------------------------------------------------------------------------------------- their form


@pytest.mark.parametrize(
    ("waive", "said"),
    [
        ({"softmax.shift_invarianc": "why"}, "did you mean softmax.shift_invariance"),
        ({CLAUSE: ""}, "a waiver needs a reason"),
        ({CLAUSE: {"counterexample": {}}}, "a waiver needs a reason"),
        ({CLAUSE: {"reason": 3}}, "a waiver needs a reason"),
        ({CLAUSE: {"reson": "why"}}, "unknown key reson; did you mean reason"),
        ({CLAUSE: {"reason": "why", "counterexample": "{"}}, "its counterexample is no JSON"),
        ({CLAUSE: {"reason": "why", "counterexample": [1]}}, "expected a table of recipes"),
        ({"softmax.*": "why"}, r"this matches \d\d clauses; a wildcard may waive 10 at most"),
        ({"softmax.none*": "why"}, "no clause matches this wildcard"),
        ({"s*.large_*": {"reason": "why", "counterexample": {}}}, "a counterexample is one clause's"),
    ],
    ids=str,
)
def test_a_wrong_waiver_is_told_with_its_place(waive, said):
    with pytest.raises(UserError, match=rf"here, .*: .*{said}"):
        waivers_of(waive, "here")


def test_a_wildcard_waives_what_it_matches():
    assert set(waivers_of({"softmax.*finite": "why"})) == {
        c for c in CLAUSES if c.startswith("softmax.") and c[-6:] == "finite"
    }


# -------------------------------------------------------------------------------------------------------- in a project

PROJECT = """
# kept
[tool.spec-lm]
implementation = "adapters.py"  # kept too
examples = 6
conventions = {rope_pairing = "halves"}

[tool.other]
a = 1
"""
ONLY = ("--clause", CLAUSE)


def header(path=".spec-lm/last.jsonl") -> dict:
    return json.loads(Path(path).read_text().splitlines()[0])


def test_a_check_takes_what_the_nearest_pyproject_declares_and_options_win(spec_lm_command, write, monkeypatch):
    write("pyproject.toml", PROJECT)
    write("adapters.py", NAIVE)
    ran = spec_lm_command("check", *ONLY, "--in-process")
    assert ran.code == 1
    assert "| adapters.py | " in ran.out
    assert "seed 0, 6 examples, level must | rope_pairing=halves" in ran.out
    ran = spec_lm_command("check", *ONLY, "--in-process", "--examples", "4", "--level", "should")
    assert "seed 0, 4 examples, level should" in ran.out
    (Path.cwd() / "below").mkdir()
    monkeypatch.chdir("below")
    assert "| ../adapters.py | " in spec_lm_command("check", *ONLY, "--in-process").out


def test_what_is_declared_of_one_implementation_is_not_applied_to_another(spec_lm_command, write):
    write("adapters.py", RIGHT)
    text = f'{PROJECT}\n[tool.spec-lm.waivers]\n"{CLAUSE}" = {{reason = "why"}}\n'
    write("pyproject.toml", text)
    asked = ("check", "softmax=torch:softmax", *ONLY, "--in-process")
    assert "rope_pairing" not in (ran := spec_lm_command(*asked)).out
    assert "WARNS" not in ran.out
    assert "6 examples" in ran.out
    ran = spec_lm_command("check", "./adapters.py", *ONLY, "--in-process")
    assert f"WARNS  {CLAUSE}: waived, but it holds on 6 examples" in ran.out
    assert "WARNS" in spec_lm_command("report", ".spec-lm/last.jsonl").out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tool.spec-lm]\nlevl = 'must'", "pyproject.toml, tool.spec-lm: unknown key levl; did you mean level?"),
        ("[tool.spec-lm]\nlevel = 'may'", "pyproject.toml, tool.spec-lm.level: is 'may'"),
        ("[tool.spec-lm]\nexamples = 'many'", "tool.spec-lm.examples: is 'many', expected a number"),
        ("[tool.spec-lm]\nexamples = 0", "tool.spec-lm.examples: is 0; at least 1"),
        ("[tool.spec-lm.waivers]\n'softmax.x' = 'why'", "pyproject.toml, tool.spec-lm.waivers, softmax.x: no clause"),
        (
            "[tool.spec-lm.waivers]\n'softmax.any_dim' = {}",
            "waivers, softmax.any_dim: a waiver needs a reason",
        ),
        ("[tool.spec-lm", "pyproject.toml is no TOML"),
        ("tool = 3", "pyproject.toml, tool: is 3, expected a table"),
        ("[tool]\nspec-lm = 3", "pyproject.toml, tool.spec-lm: is 3, expected a table"),
        ("[tool.spec-lm]\nimplementation = [1, 2]", "tool.spec-lm.implementation: is [1, 2], expected a path"),
        ("[tool.spec-lm]\nimplementation = ''", "tool.spec-lm.implementation: is '', expected a path"),
        ("[tool.spec-lm]\nsupports = {n = 3}", "tool.spec-lm.supports: support n is 3, expected a list of sizes"),
        ("[tool.spec-lm]\nconventions = {all_masked = 0}", "tool.spec-lm.conventions: no convention is all_masked=0"),
    ],
)
def test_a_wrong_declaration_is_told_with_file_and_key(spec_lm_command, write, text, said):
    write("pyproject.toml", text)
    ran = spec_lm_command("check", *ONLY, "--in-process")
    assert ran.code == 2
    assert said in ran.err
    assert "Traceback" not in ran.err


def test_another_file_may_be_named_with_its_keys_at_the_top(spec_lm_command, write):
    write("adapters.py", RIGHT)
    write("other.toml", 'implementation = "adapters.py"\nexamples = 3\n')
    assert "| adapters.py |" in spec_lm_command("check", *ONLY, "--in-process", "--config", "other.toml").out
    assert "cannot read none.toml" in spec_lm_command("check", *ONLY, "--config", "none.toml").err
    write("pyproject.toml", "")
    assert "pyproject.toml has no [tool.spec-lm]" in spec_lm_command("check", "--config", "pyproject.toml").err


def test_waive_writes_the_list_keeps_the_file_and_refreshes_it(spec_lm_command, write):
    """From a failure to its waiver, and back when it is mended."""
    write("adapters.py", NAIVE)
    write("pyproject.toml", PROJECT)
    ran = spec_lm_command("waive", *ONLY, "--write")
    assert ran.code == 2
    assert f"a clause fails without a waiver: {CLAUSE}; say why that is accepted by --reason" in ran.err
    ran = spec_lm_command("waive", *ONLY, "--reason", "it's small", "--write")
    assert ran.code == 0
    assert f"1 waived; new: {CLAUSE}" in ran.err
    text = Path("pyproject.toml").read_text()
    assert all(line in text.splitlines() for line in PROJECT.splitlines())
    waiver = tomllib.loads(text)["tool"]["spec-lm"]["waivers"][CLAUSE]
    assert waiver["reason"] == "it's small"
    assert json.loads(waiver["counterexample"])["x"]["recipe"] == "TensorRecipe"

    ran = spec_lm_command("check", *ONLY, "--report", "out.jsonl")
    assert (ran.code, ran.last_line.split("; ")[0][-8:]) == (0, "1 waived")
    assert spec_lm_command("waive", *ONLY, "--reason", "another", "--write").code == 0
    assert Path("pyproject.toml").read_text() == text
    assert tomllib.loads(spec_lm_command("waive", *ONLY).out)["tool"]["spec-lm"]["waivers"] == {CLAUSE: waiver}

    write("adapters.py", RIGHT)
    ran = spec_lm_command("check", *ONLY)
    assert ran.code == 2
    assert "mend the waiver: it holds" in ran.out
    ran = spec_lm_command("waive", *ONLY, "--write")
    assert (ran.code, f"no longer needed: {CLAUSE}" in ran.err) == (0, True)
    assert "waivers" not in Path("pyproject.toml").read_text()
    assert spec_lm_command("check", *ONLY).code == 0


@pytest.mark.parametrize(
    "text",
    [
        '[tool]\nspec-lm = {implementation = "adapters.py"}\nother = 1\n',
        'tool = {spec-lm = {implementation = "adapters.py"}, other = 1}\n',
    ],
)
def test_waive_writes_into_an_inline_table_too(spec_lm_command, write, text):
    write("adapters.py", NAIVE)
    write("pyproject.toml", text)
    ran = spec_lm_command("waive", *ONLY, "--reason", "small", "--write")
    assert ran.code == 0, ran.err
    tool = tomllib.loads(Path("pyproject.toml").read_text())["tool"]
    assert list(tool["spec-lm"]["waivers"]) == [CLAUSE]
    assert (tool["spec-lm"]["implementation"], tool["other"]) == ("adapters.py", 1)


def test_waive_says_before_the_check_that_it_cannot_write_and_leaves_the_file_as_it_is(spec_lm_command, write):
    write("adapters.py", "raise AssertionError('it was loaded')")
    text = '[tool]\nspec-lm.implementation = "adapters.py"\nother = 1\n'
    path = write("pyproject.toml", text)
    ran = spec_lm_command("waive", *ONLY, "--reason", "small", "--write")
    assert (ran.code, "write that as a table, [tool.spec-lm]" in ran.err) == (2, True), ran.err
    assert path.read_text() == text


def test_waive_keeps_waivers_of_what_it_does_not_run_and_says_where_there_is_no_file(spec_lm_command, write):
    write("adapters.py", RIGHT)
    ran = spec_lm_command("waive", "adapters.py", *ONLY, "--write")
    assert ran.code == 2
    assert "there is no pyproject.toml, here or above" in ran.err
    write("own.toml", 'waivers = {"silu.keeps_its_signature" = {reason = "why"}}\n')
    assert spec_lm_command("waive", "adapters.py", *ONLY, "--write", "--config", "own.toml").code == 0
    kept = {"silu.keeps_its_signature": {"reason": "why"}}
    assert tomllib.loads(Path("own.toml").read_text()) == {"implementation": "adapters.py", "waivers": kept}
    assert "waive is about one implementation" in spec_lm_command("waive", "a.py", "b.py").err
