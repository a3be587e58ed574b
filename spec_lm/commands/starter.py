"""What `spec-lm init` writes: adapters to fill in, a test module, and a workflow for GitHub Actions."""

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import spec_lm

ADAPTERS, TESTS, WORKFLOW = "tests/adapters.py", "tests/test_conformance.py", ".github/workflows/spec-lm.yml"
_REFERENCE = Path(spec_lm.__file__).parent / "reference"
_WIDTH = 100

_HEAD = '''"""The operators that spec-lm checks: each calls your own code, with the weights it is given.

Fill them in one after another: one that raises NotImplementedError counts as not provided yet.

    spec-lm check {adapters}
    spec-lm clauses --operator softmax      what is checked

The weights of a block, by name: attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight, attn.output_proj.weight
(d_model, d_model); ln1.weight, ln2.weight (d_model,); ffn.w1.weight, ffn.w3.weight (d_ff, d_model); ffn.w2.weight
(d_model, d_ff). Of a model: token_embeddings.weight, lm_head.weight (vocab_size, d_model); ln_final.weight (d_model,);
and those of block N as layers.N.attn.q_proj.weight, ..
"""

from torch import Tensor
'''

_TESTS = '''"""One item a clause of spec-lm, on the adapters beside this file; what is not there yet is skipped."""

from pathlib import Path

from spec_lm.testing import parametrize_with_clauses


@parametrize_with_clauses(Path(__file__).with_name("adapters.py"))
def test_conforms(check):
    check()
'''

_WORKFLOW = """\
# Checks the adapters, keeps the report, and shows it on the page of the run.
name: spec-lm
on: [push, pull_request]
permissions:
  contents: read
jobs:
  conformance:
    runs-on: ubuntu-latest
    timeout-minutes: 30
    steps:
      - uses: actions/checkout@v5
      - uses: actions/setup-python@v6
        with:
          python-version: "3.11"
      - name: Install spec-lm (add what your code needs)
        run: pip install spec-lm
      - name: Check
        run: spec-lm check {adapters} --report spec-lm.jsonl
      - name: Show the report
        if: ${{{{ !cancelled() }}}}
        run: |
          spec-lm report spec-lm.jsonl --format markdown >> "$GITHUB_STEP_SUMMARY"
          spec-lm report spec-lm.jsonl --format html --output spec-lm.html
      - name: Keep the report
        if: ${{{{ !cancelled() }}}}
        uses: actions/upload-artifact@v4
        with:
          name: spec-lm
          path: spec-lm.*
"""


def starter_files() -> dict[str, str]:
    """The texts by their paths, seen from the project's root."""
    functions = "".join(f"\n\n{function}\n" for function in _functions())
    return {
        ADAPTERS: _HEAD.format(adapters=ADAPTERS) + functions,
        TESTS: _TESTS,
        WORKFLOW: _WORKFLOW.format(adapters=ADAPTERS),
    }


def _functions() -> Iterator[str]:
    """The adapters of the reference without their bodies, each with its equation's words."""
    equations = _definitions(_REFERENCE / "functional.py")
    for name, node in _definitions(_REFERENCE / "adapters.py").items():
        yield _function(node, ast.get_docstring(equations[name.removeprefix("run_")]) or "")


def _definitions(path: Path) -> dict[str, ast.FunctionDef]:
    """The functions of a file, read and not imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _function(node: ast.FunctionDef, doc: str) -> str:
    given = list(_parameters(node.args))
    line = f"def {node.name}({', '.join(given)}) -> Tensor:"
    if len(line) > _WIDTH:
        line = "\n".join([f"def {node.name}(", *(f"    {each}," for each in given), ") -> Tensor:"])
    body = f'"""{doc}\n"""\nraise NotImplementedError' if "\n" in doc else f'"""{doc}"""\nraise NotImplementedError'
    return f"{line}\n{textwrap.indent(body, '    ')}"


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    required = len(arguments.args) - len(arguments.defaults)
    for number, argument in enumerate(arguments.args):
        text = ast.unparse(argument).replace("functional.Weights", "dict[str, Tensor]")
        yield text if number < required else f"{text} = {ast.unparse(arguments.defaults[number - required])}"
