"""The reference and the fused implementation once more, without their checks of shapes: what is timed is the work."""

import sys
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec
from types import ModuleType

from spec_lm.reference import shapes

_NAMES = ("spec_lm.reference.functional", "spec_lm.reference.modules", "spec_lm.fused")


@cache
def unchecked() -> dict[str, ModuleType]:
    """Copies of the modules, by their names, that import one another and not the originals."""
    originals = {name: import_module(name) for name in _NAMES}
    checker, shapes.shape_checked = shapes.shape_checked, lambda function: function
    try:
        return {name: _copied(original) for name, original in originals.items()}
    finally:
        shapes.shape_checked = checker
        for name, original in originals.items():
            _install(name, original)


def _copied(original: ModuleType) -> ModuleType:
    """Executed again, in the place of the original, where the next copy finds it."""
    spec = original.__spec__
    if spec is None or spec.loader is None:
        raise ImportError(f"{original.__name__} has no source to execute again")
    copy = module_from_spec(spec)
    _install(original.__name__, copy)
    spec.loader.exec_module(copy)
    return copy


def _install(name: str, module: ModuleType) -> None:
    sys.modules[name] = module
    package, _, attribute = name.rpartition(".")
    setattr(sys.modules[package], attribute, module)
