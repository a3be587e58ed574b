"""Imports point one way: from a higher rank to a lower one, never between equals but in their listed order."""

import ast
from pathlib import Path

import pytest

import spec_lm

PACKAGE = Path(spec_lm.__file__).parent
# Top to bottom: a file may import files above it of a lower rank, or of its own rank where the list says so.
RANKS = {
    "spec_lm": 0,
    "spec_lm.reference": 0,
    "spec_lm.reference.shapes": 0,
    "spec_lm.reference.functional": 1,
    "spec_lm.reference.modules": 2,
    "spec_lm.reference.adapters": 3,
    "spec_lm.fused": 4,
    "spec_lm.conformance": 0,
    "spec_lm.conformance.oracle": 0,
    "spec_lm.conformance.bounds": 1,
    "spec_lm.conformance.vjp": 1,
    "spec_lm.conformance.tolerance": 1,
    "spec_lm.conformance.surroundings": 1,
    "spec_lm.conformance.operators": 1,
    "spec_lm.conformance.strategies": 2,
    "spec_lm.conformance.clause": 2,
    "spec_lm.conformance.lines": 3,
    "spec_lm.conformance.report": 3,
    "spec_lm.conformance.declarations": 3,
    "spec_lm.conformance.changes": 3,
    "spec_lm.conformance.diagnosis": 3,
    "spec_lm.conformance.display": 3,
    "spec_lm.conformance.literals": 3,
    "spec_lm.conformance.script": 3,
    "spec_lm.conformance.reproduction": 3,
    "spec_lm.conformance.junit": 3,
    "spec_lm.conformance.terminal": 3,
    "spec_lm.conformance.pages": 3,
    "spec_lm.conformance.markdown": 3,
    "spec_lm.conformance.html": 3,
    "spec_lm.conformance.implementation": 4,
    "spec_lm.conformance.shards": 4,
    "spec_lm.conformance.waivers": 4,
    "spec_lm.conformance.config": 4,
    "spec_lm.conformance.isolated": 5,
    "spec_lm.conformance.plainer": 5,
    "spec_lm.conformance.runner": 5,
    "spec_lm.conformance.job": 5,
    "spec_lm.conformance.workers": 5,
    "spec_lm.conformance.preload": 5,
    "spec_lm.matrix": 6,
    "spec_lm.bench": 6,
    "spec_lm.bench.cases": 6,
    "spec_lm.bench.built": 6,
    "spec_lm.bench.llama": 6,
    "spec_lm.bench.unchecked": 6,
    "spec_lm.bench.variants": 6,
    "spec_lm.bench.devices": 6,
    "spec_lm.bench.row": 6,
    "spec_lm.bench.rows": 6,
    "spec_lm.bench.preload": 6,
    "spec_lm.bench.session": 6,
    "spec_lm.bench.results": 6,
    "spec_lm.bench.run": 6,
    "spec_lm.bench.plots": 6,
    "spec_lm.bench.display": 6,
    "spec_lm.properties": 3,
    "spec_lm.faults": 4,
    "spec_lm.commands": 7,
    "spec_lm.commands.console": 7,
    "spec_lm.commands.reports": 7,
    "spec_lm.commands.bench": 7,
    "spec_lm.commands.starter": 7,
    "spec_lm.commands.projects": 7,
    "spec_lm.testing": 7,
    "spec_lm.pytest_plugin": 7,
    "spec_lm.cli": 8,
    "spec_lm.__main__": 8,
}
ORDER = list(RANKS)
# The package's own name is a home of lazy names; what loads them is no arrow.
ALLOWED = {("spec_lm.__main__", "spec_lm.cli")}
FOLDERS_OF_ONE_RANK = ("spec_lm.properties", "spec_lm.faults")


def listed(module: str) -> str:
    """The entry of RANKS that a module belongs to."""
    folder = next((each for each in FOLDERS_OF_ONE_RANK if module.startswith(f"{each}.")), None)
    return folder or module


def modules() -> dict[str, Path]:
    """Every module of the package, and of the specification beside it, by its name."""
    found = {"spec_lm": PACKAGE / "__init__.py"}
    properties = next(Path(base, "properties") for base in spec_lm.__path__ if Path(base, "properties").is_dir())
    for root, prefix in ((PACKAGE, "spec_lm"), (properties, "spec_lm.properties")):
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join([prefix, *(part for part in parts if part != "__init__")])] = path
    return found


def imports(tree: ast.Module) -> list[str]:
    """What a file imports of ours, wherever it does, but not what only a type checker sees."""
    hidden = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name if listed(name) in RANKS and name != "spec_lm" else node.module for name in inside]
    return [name for name in found if name.split(".")[0] == "spec_lm"]


def is_upward(importer: str, imported: str) -> bool:
    """Whether an import is an arrow to an equal or higher rank that no rule allows."""
    above, below = listed(importer), listed(imported)
    if (above, below) in ALLOWED or below == "spec_lm":
        return False
    if above == below:
        return above in FOLDERS_OF_ONE_RANK and importer == above
    if RANKS[below] != RANKS[above]:
        return RANKS[below] > RANKS[above]
    same_folder = above.rpartition(".")[0] == below.rpartition(".")[0]
    return not same_folder or ORDER.index(below) > ORDER.index(above)


MODULES = modules()


@pytest.mark.parametrize("module", MODULES)
def test_no_import_points_to_an_equal_or_higher_rank(module):
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    wrong = [imported for imported in imports(tree) if is_upward(module, imported)]
    assert wrong == []


def test_every_module_has_a_rank():
    assert [module for module in MODULES if listed(module) not in RANKS] == []


def test_the_reference_imports_nothing_of_ours_outside_its_folder():
    for module, path in MODULES.items():
        if module.startswith("spec_lm.reference"):
            ours = imports(ast.parse(path.read_text(encoding="utf-8")))
            assert [name for name in ours if not name.startswith("spec_lm.reference")] == []


def test_the_oracle_is_independent_of_torch_and_of_the_reference():
    path = MODULES["spec_lm.conformance.oracle"]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tops = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [getattr(node, "module", "") or ""]
        )
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert tops.isdisjoint({"torch", "spec_lm", "einops"})


def test_only_the_registers_loader_reaches_the_specification():
    """By name, since static checkers cannot resolve it in a checkout."""
    reaching = [
        module
        for module, path in MODULES.items()
        if not module.startswith("spec_lm.properties")
        and any(name.startswith("spec_lm.properties") for name in imports(ast.parse(path.read_text(encoding="utf-8"))))
    ]
    assert reaching == []


def test_only_the_matrix_reads_the_catalogue_of_faults():
    reading = [
        module
        for module, path in MODULES.items()
        if not module.startswith("spec_lm.faults")
        and any(name.startswith("spec_lm.faults") for name in imports(ast.parse(path.read_text(encoding="utf-8"))))
    ]
    assert reading == ["spec_lm.matrix"]


def test_no_file_hides_its_annotations_from_the_shape_checker():
    for path in MODULES.values():
        assert "from __future__ import annotations" not in path.read_text(encoding="utf-8")


def test_the_test_of_ranks_can_fail():
    tree = ast.parse("def late():\n    from spec_lm.conformance import runner\n    import spec_lm.cli\n")
    assert imports(tree) == ["spec_lm.conformance.runner", "spec_lm.cli"]
    assert is_upward("spec_lm.conformance.clause", "spec_lm.conformance.runner")
    assert is_upward("spec_lm.conformance.strategies", "spec_lm.conformance.clause")
    assert not is_upward("spec_lm.conformance.clause", "spec_lm.conformance.strategies")
    assert is_upward("spec_lm.properties.softmax", "spec_lm.conformance.report")
    assert not is_upward("spec_lm.cli", "spec_lm.conformance.runner")
