"""A failure's code stands alone: it fails on the implementation, and passes once the right one is in its place."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import spec_lm
import spec_lm.faults
from spec_lm.conformance import runner
from spec_lm.conformance.clause import CLAUSES
from spec_lm.conformance.operators import OPERATORS, Checked
from spec_lm.conformance.report import Outcome
from spec_lm.conformance.runner import DTYPES, Settings, preserved, run_clause
from spec_lm.conformance.script import Origin
from spec_lm.conformance.strategies import Domain
from spec_lm.faults import Fault, catalogue

# Executes texts in a folder, each as if Python had just begun, and tells what each raised.
EXECUTE = """
import importlib, json, os, random, sys, numpy, torch
modules, path, environment = set(sys.modules), list(sys.path), dict(os.environ)
for line in sys.stdin:
    folder, texts = json.loads(line)
    results = []
    for text in texts:
        os.chdir(folder)
        importlib.invalidate_caches()
        sys.path[:] = [folder, *path[1:]]
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        os.environ.clear()
        os.environ.update(environment)
        try:
            exec(compile(text, "code", "exec"), {})
            results.append("")
        except BaseException as raised:
            results.append(type(raised).__name__ + ": " + str(raised))
        for name in set(sys.modules) - modules:
            if (getattr(sys.modules[name], "__file__", None) or folder).startswith(folder):
                del sys.modules[name]
    print(json.dumps(results), flush=True)
"""


@pytest.fixture(scope="module")
def executed() -> Iterator[Callable[[Iterable[str], Path], list[str]]]:
    """What each text raises in a Python process of its own, in a folder; empty where it ends well."""
    command = [sys.executable, "-c", EXECUTE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def execute(texts: Iterable[str], folder: Path) -> list[str]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps([str(folder), list(texts)]) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield execute
        process.communicate()


# ------------------------------------------------------------------------------------------------------- the catalogue

# Every so many faults of the catalogue, and those whose failures are of a kind of their own.
EVERY_SO_MANY = 17
OF_THEIR_OWN_KIND = (
    "softmax.cached_by_shape",
    "embedding.cached_by_shape",
    "rope.table_without_theta",
    "scaled_dot_product_attention.strides_ignored",
)


def slice_of_the_catalogue() -> list[Fault]:
    faults = catalogue()
    return [*list(faults.values())[::EVERY_SO_MANY], *(faults[name] for name in OF_THEIR_OWN_KIND if name in faults)]


def module_of(fault: Fault) -> str:
    return f"{fault.function.__module__.rpartition('.')[2]}_of_the_catalogue"


def name_of(fault: Fault) -> str:
    return f"{fault.operator}__{fault.name}"


def write_adapters(folder: Path, faults: list[Fault], line: Callable[[Fault], str], before: str = "") -> None:
    """For each file of the catalogue a module with its faults by `name_of`."""
    folder.mkdir()
    for module in {module_of(fault) for fault in faults}:
        inside = [line(fault) for fault in faults if module_of(fault) == module]
        source = Path(spec_lm.faults.__file__).parent / f"{module.removesuffix('_of_the_catalogue')}.py"
        (folder / f"{module}.py").write_text(before.format(source=str(source)) + "\n".join(inside))


# The catalogue's own file, read anew with each import, so that nothing is left in it of earlier calls.
CATALOGUE = """
import spec_lm.faults
def kept(operator, **about):
    return lambda function: globals().setdefault(operator + "__" + function.__name__, function)
registered, spec_lm.faults.fault = spec_lm.faults.fault, kept
try:
    exec(compile(open({source!r}).read(), {source!r}, "exec"))
finally:
    spec_lm.faults.fault = registered
"""


def outcome_on(function, fault: Fault, clause_name: str, origin: Origin) -> Outcome:
    supports = {"dtype": DTYPES}
    checked = Checked(OPERATORS[fault.operator], function, supports=supports)
    clause = CLAUSES[f"{fault.operator}.{clause_name}"]
    with preserved(0):
        domain = Domain(fault.operator, supports=supports)
        return run_clause(clause, checked, domain, Settings(supports=supports), origin)[0]


def test_code_fails_on_the_faults_of_the_catalogue_and_passes_on_the_reference(tmp_path, monkeypatch, executed):
    """Of what keeps something between calls there may be none: its counterexample may need all calls before it."""
    faults = slice_of_the_catalogue()
    write_adapters(tmp_path / "wrong", faults, lambda fault: "", CATALOGUE)
    reference = "from spec_lm.reference import functional\n"
    write_adapters(tmp_path / "right", faults, lambda f: f"{name_of(f)} = functional.{f.operator}", reference)
    monkeypatch.chdir(tmp_path / "wrong")
    codes: dict[str, str] = {}
    for fault in faults:
        pair = f"{fault.operator}={module_of(fault)}:{name_of(fault)}"
        with runner.loaded((pair,)) as subject:
            for name in fault.detected_by[:2]:
                origin = subject.origins[fault.operator]
                outcome = outcome_on(subject.functions[fault.operator], fault, name, origin)
                assert outcome.outcome == "fails", f"{fault.id} by {name}"
                if outcome.reproduction or fault.family != "memory" or fault.id in OF_THEIR_OWN_KIND:
                    codes[f"{fault.id} by {name}"] = outcome.reproduction
    assert [what for what, code in codes.items() if not code] == []
    failures = executed(codes.values(), tmp_path / "wrong")
    assert [what for what, failure in zip(codes, failures, strict=True) if not failure] == []
    failures = executed(codes.values(), tmp_path / "right")
    assert {what: failure for what, failure in zip(codes, failures, strict=True) if failure} == {}
    assert not any("spec_lm" in code for code in codes.values())


# -------------------------------------------------------------------------------------------------------- one at a time

HALF = "def softmax(x, dim):\n    return x.softmax(dim) * 0.5\n"


@pytest.fixture
def code_of(tmp_path, monkeypatch, write, executed) -> Callable[..., str]:
    """The code of a clause's failure on a file that is written for it; it fails in a process of its own."""
    monkeypatch.chdir(tmp_path)

    def code(clause: str, text: str, right: str = "", **options) -> str:
        write("mine.py", text)
        outcome = spec_lm.check("./mine.py", clauses=[clause], **{"examples": 20, **options})[clause]
        assert outcome.outcome == "fails", outcome.message
        (failure,) = executed([outcome.reproduction], tmp_path)
        assert failure != "", outcome.reproduction
        if right:
            write("mine.py", right)
            assert executed([outcome.reproduction], tmp_path) == [""], outcome.reproduction
        return outcome.reproduction

    return code


def test_a_wrong_value_takes_five_lines(code_of):
    code = code_of("softmax.agrees_with_the_oracle", HALF, HALF.replace(" * 0.5", ""))
    assert code.splitlines() == [
        'import sys, torch; sys.path.insert(0, ".")',
        "from mine import softmax",
        "got = softmax(torch.zeros(1), 0)",
        "expected = torch.ones(1)",
        "assert ((got - expected).abs() <= 2.4e-07).all(), got",
    ]


def test_an_exception_is_the_call_itself(code_of):
    text = "def run_softmax(x, dim):\n    raise TypeError('not \"now\"')\n"
    code = code_of("softmax.sums_to_one", text, "def run_softmax(x, dim):\n    return x.softmax(dim)\n")
    assert code.splitlines()[2:] == ["run_softmax(torch.zeros(1), dim=0)"]


@pytest.mark.parametrize(
    ("result", "asked"),
    [
        ("x[None]", "assert got.shape == (1,), got.shape"),
        ("x.double()", "assert got.dtype == torch.float32, got.dtype"),
        ("x.tolist()", "assert isinstance(got, torch.Tensor), type(got)"),
    ],
)
def test_a_wrong_signature_is_asserted(code_of, result, asked):
    code = code_of("softmax.keeps_its_signature", f"def softmax(x, dim):\n    return {result}\n", HALF)
    assert code.splitlines()[-1] == asked


def test_what_must_be_refused_passes_once_it_raises(code_of):
    accepts = "def embedding(ids, weight):\n    return weight[ids % len(weight)]\n"
    code = code_of("embedding.ids_outside_are_refused", accepts, accepts.replace(" % len(weight)", ""))
    assert "else:\n    raise AssertionError(" in code


def test_a_changed_argument_is_compared_with_a_copy(code_of):
    changes = "def silu(x):\n    y = x * x.sigmoid()\n    x += 1\n    return y\n"
    code = code_of("silu.does_not_change_its_arguments", changes, changes.replace("x += 1", "pass"))
    assert "before = x.clone()" in code
    assert 'assert torch.equal(x, before), "it changed its argument x"' in code


def test_a_changed_weight_dict_is_looked_into(code_of):
    block = """
        from spec_lm.reference import functional
        def transformer_block(x, weights, *rest):
            weights = {change}
            return functional.transformer_block(x, weights, *rest)
    """
    right = dedent(block.format(change="dict(weights)"))
    popped = block.format(change="{**weights, 'ln1.weight': weights.pop('ln1.weight')}")
    code = code_of("transformer_block.does_not_change_its_arguments", popped, right)
    assert 'assert list(weights) == before, "it changed the keys of its argument weights"' in code
    scaled = block.format(change="{**weights, 'ln1.weight': weights['ln1.weight'].mul_(2)}")
    code = code_of("transformer_block.does_not_change_its_arguments", scaled, right)
    assert 'before = weights["ln1.weight"].clone()' in code


def test_what_a_call_leaves_for_the_next_is_written_as_two_calls(code_of):
    remembers = """
        import torch
        first = {}
        def silu(x):
            return first.setdefault(x.shape, torch.nn.functional.silu(x)).clone()
    """
    code = code_of("silu.has_no_memory", remembers, "from torch.nn.functional import silu\n")
    assert code.count("silu(") == 2


def test_of_a_live_function_all_calls_are_written_since_it_may_remember_some():
    first = {}

    def remembers(x):
        return first.setdefault(x.shape, torch.nn.functional.silu(x)).clone()

    outcome = spec_lm.check({"silu": remembers}, clauses=["silu.has_no_memory"], examples=20)["silu.has_no_memory"]
    assert outcome.reproduction.count("f(") >= 2


def test_results_that_change_are_asked_for_again_and_again(code_of):
    changes = "import torch\ndef silu(x):\n    return torch.nn.functional.silu(x) + (torch.rand(()) > 0.5)\n"
    code = code_of("silu.agrees_with_the_oracle", changes, "from torch.nn.functional import silu\n")
    assert "for _ in range(100):" in code


def test_a_layout_that_matters_is_kept(code_of):
    ignores = """
        import torch
        def silu(x):
            y = torch.nn.functional.silu(x)
            return y if x.is_contiguous() else torch.full_like(y, 7.0)
    """
    code = code_of("silu.any_memory_layout", ignores, "from torch.nn.functional import silu\n")
    assert ".as_strided(" in code or ".mT" in code


def test_two_results_that_should_have_the_same_bits_are_compared(code_of):
    """No result is wrong by itself: each is within its bound."""
    leaks = """
        import torch
        def rmsnorm(x, gain, eps):
            y = torch.nn.functional.rms_norm(x, gain.shape, gain, eps)
            return y * (1 + 2.0**-23 * (x.sum() > 3)) if x.ndim > 1 else y
    """
    right = (
        "import torch\ndef rmsnorm(x, gain, eps):\n    return torch.nn.functional.rms_norm(x, gain.shape, gain, eps)\n"
    )
    code = code_of("rmsnorm.rows_of_a_batch_are_independent", leaks, right, examples=50)
    assert re.search(r"assert first\[[\d, ]+\] == second\[[\d, ]+\]", code)


def test_grad_mode_is_set_where_it_matters(code_of):
    text = "import torch\ndef silu(x):\n    y = torch.nn.functional.silu(x)\n"
    text += "    return y if torch.is_grad_enabled() else y + 1\n"
    code = code_of("silu.grad_mode_changes_nothing", text, "from torch.nn.functional import silu\n")
    assert "with torch.no_grad():\n    got = silu(" in code


def test_a_gradient_is_that_of_a_leaf(code_of):
    text = "import torch\ndef linear(x, weight):\n    return x @ weight.detach().T + 0 * (x @ weight.T)\n"
    code = code_of("linear.gradients_with_respect_to_weights", text, "from torch.nn.functional import linear\n")
    assert "weight = torch.zeros(1, 1).requires_grad_()" in code
    assert "weight.grad" in code


def test_the_seed_is_set_where_the_global_random_state_decides(code_of):
    text = "import torch\ndef silu(x):\n    return torch.nn.functional.silu(x) + 0.1 * torch.rand(())\n"
    code = code_of("silu.the_global_random_state_decides_nothing", text, "from torch.nn.functional import silu\n")
    assert "torch.manual_seed(0)" in code


def test_a_changed_setting_is_read_before_and_after_and_put_back(code_of):
    text = "import torch\ndef silu(x):\n    torch.set_default_dtype(torch.float64)\n"
    text += "    return torch.nn.functional.silu(x)\n"
    code = code_of("silu.leaves_global_settings_alone", text, "from torch.nn.functional import silu\n")
    assert "assert torch.get_default_dtype() == before" in code
    assert torch.get_default_dtype() == torch.float32


def test_a_result_that_a_later_call_overwrites_is_compared_with_a_copy(code_of):
    shares = """
        import torch
        buffers = {}
        def silu(x):
            return buffers.setdefault(x.shape, torch.empty_like(x)).copy_(torch.nn.functional.silu(x))
    """
    code = code_of("silu.has_no_memory", shares, "from torch.nn.functional import silu\n")
    assert code.splitlines()[-1] == 'assert torch.equal(first, kept), "a later call changed an earlier result"'


def test_a_seed_that_a_call_sets_is_seen_whatever_the_state_before(code_of):
    text = "import torch\ndef silu(x):\n    torch.manual_seed(0)\n    return torch.nn.functional.silu(x)\n"
    code = code_of("silu.leaves_the_global_random_state_alone", text, "from torch.nn.functional import silu\n")
    assert "torch.manual_seed(7919)\nbefore = torch.get_rng_state().tolist()" in code


def test_what_fails_in_no_call_by_itself_has_no_code(tmp_path, monkeypatch, write):
    """Wrong after hundreds of calls: what would be printed passes."""
    monkeypatch.chdir(tmp_path)
    write(
        "mine.py",
        """
        import torch
        calls = []
        def silu(x):
            calls.append(x)
            return torch.nn.functional.silu(x) + (len(calls) > 400)
        """,
    )
    outcome = spec_lm.check("./mine.py", clauses=["silu.agrees_with_the_oracle"], examples=500).outcomes[0]
    assert (outcome.outcome, outcome.reproduction) == ("fails", "")


def test_a_failure_that_cannot_be_written_down_is_one_all_the_same(monkeypatch):
    monkeypatch.setattr(runner, "reproduction", lambda *arguments: 1 / 0)
    outcome = spec_lm.check({"silu": lambda x: x}, clauses=["silu.agrees_with_the_oracle"], examples=5).outcomes[0]
    assert (outcome.outcome, outcome.reproduction) == ("fails", "")


# ------------------------------------------------------------------------------------------------ where a function is

PLACES = {
    "mine.py": "from mine import softmax",
    "folder/mine.py": "from mine import softmax",
    "folder": "from adapters import run_softmax",
    "folder/my-own.py": '").softmax',
    "package/inside.py": "from package.inside import softmax",
    "folder/relative.py": "from folder.relative import softmax",
    "mine": "from mine import softmax",
    "mine:TABLE": "from mine import TABLE",
    "mine:Space.inner": "from mine import Space",
    "softmax=mine:softmax": "from mine import softmax",
    "softmax=mine:x": "from mine import x as f",
    "softmax=package.inside:softmax": "from package.inside import softmax",
}


@pytest.fixture
def places(tmp_path, monkeypatch, write) -> Path:
    """A project with a wrong softmax wherever one may be."""
    more = "x = softmax\nTABLE = {'softmax': softmax}\nclass Space:\n    inner = type('', (), {'softmax': softmax})\n"
    write("project/pyproject.toml", "")
    for name in ("mine.py", "folder/mine.py", "folder/my-own.py", "package/inside.py", "package/__init__.py"):
        write(f"project/{name}", HALF + more)
    write("project/folder/relative.py", "from . import mine\nsoftmax = mine.softmax\n")
    write("project/src/inner/__init__.py", HALF)
    write(
        "project/folder/adapters.py",
        "import inner\ndef run_softmax(in_features, dim):\n    return inner.softmax(in_features, dim)\n",
    )
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


@pytest.mark.parametrize("spec", PLACES)
def test_a_function_is_imported_from_where_it_is(places, spec, executed):
    before = list(sys.path), {name for name in sys.modules if "torch" not in name}
    code = spec_lm.check(spec, clauses=["softmax.sums_to_one"], examples=3).outcomes[0].reproduction
    assert (sys.path, {name for name in sys.modules if "torch" not in name}) == before
    assert PLACES[spec] in code
    (failure,) = executed([code], places)
    assert failure.startswith("AssertionError: tensor"), failure


def test_a_live_function_is_left_to_the_reader(executed):
    code = (
        spec_lm.check({"softmax": lambda x, dim: x}, clauses=["softmax.sums_to_one"], examples=3)
        .outcomes[0]
        .reproduction
    )
    assert code.splitlines()[:2] == ["import torch", "f = ...  # put the function here that was checked as softmax"]
    right = code.replace("f = ...", "f = torch.softmax")
    wrong = code.replace("f = ...", "f = lambda x, dim: x")
    failures = executed([right, wrong], Path.cwd())
    assert (failures[0], failures[1][:14]) == ("", "AssertionError")


def test_a_module_that_cannot_be_imported_twice_is_tried_as_it_is(tmp_path, monkeypatch, write, executed):
    monkeypatch.chdir(tmp_path)
    write("mine.py", "import os\nassert 'IMPORTED' not in os.environ\nos.environ['IMPORTED'] = 'yes'\n" + HALF)
    code = spec_lm.check("mine.py", clauses=["softmax.sums_to_one"], examples=3).outcomes[0].reproduction
    assert executed([code], tmp_path)[0].startswith("AssertionError: tensor")
