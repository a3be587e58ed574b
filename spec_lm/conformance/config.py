"""What a project declares once: `[tool.spec-lm]` in its pyproject.toml, or a TOML file of its own."""

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_lm.conformance.clause import nearest
from spec_lm.conformance.declarations import wrong_conventions, wrong_supports
from spec_lm.conformance.implementation import is_pair, looks_like_a_path
from spec_lm.conformance.report import UserError
from spec_lm.conformance.waivers import Waiver, waivers_of

PROJECT = "pyproject.toml"
TABLE = "tool.spec-lm"
_KINDS: dict[str, tuple[type, ...]] = {
    "implementation": (str, list),
    "level": (str,),
    "examples": (int,),
    "conventions": (dict,),
    "supports": (dict,),
    "waivers": (dict,),
}
_WORDS = {str: "text", int: "a number", list: "a list", dict: "a table"}


@dataclass(frozen=True)
class Config:
    """What a file declares; without a file, nothing.

    Args:
        path: of the file.
        implementation: what is checked where nothing is named: one, or operator=module:function pairs.
        level: "must" or "should".
        examples: drawn for each clause.
        conventions: of the implementation.
        supports: of the implementation.
        waivers: failures that are accepted, by clause id.
    """

    path: Path | None = None
    implementation: tuple[str, ...] = ()
    level: str | None = None
    examples: int | None = None
    conventions: Mapping[str, str] = field(default_factory=dict)
    supports: Mapping[str, Any] = field(default_factory=dict)
    waivers: Mapping[str, Waiver] = field(default_factory=dict)

    def asked(
        self,
        named: Sequence[str],
        level: str | None = None,
        examples: int | None = None,
        conventions: Mapping[str, str] | None = None,
        supports: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Arguments of a check of the named implementation, where the command line says no more; what is declared of
        another implementation is left out."""
        run = {"level": str(level or self.level or "must"), "examples": examples or self.examples or 50}
        if not named or (self.implementation and not _same(named, self.implementation)):
            return {**run, "conventions": conventions or {}, "supports": supports or {}, "waive": {}}
        declared = {"conventions": {**self.conventions, **(conventions or {})}}
        declared["supports"] = {**self.supports, **(supports or {})}
        return {**run, **declared, "waive": self.waivers}


def _same(some: Sequence[str], others: Sequence[str]) -> bool:
    """Whether they name the same, as paths too."""
    return [os.path.normpath(each) for each in some] == [os.path.normpath(each) for each in others]


def read_config(path: Path | None = None) -> Config:
    """The declarations of a file; by default of the nearest pyproject.toml, from the current folder upward.

    Raises:
        UserError: it cannot be read, or declares what is not known; the text names file and key.
    """
    file = path or nearest_project()
    if file is None:
        return Config()
    data = _table_of(file, required=path is not None)
    place = f"{file}, {TABLE}"
    for key, value in data.items():
        if key not in _KINDS:
            raise UserError(f"{place}: unknown key {key}{nearest(key, list(_KINDS))}; known are {', '.join(_KINDS)}")
        if not isinstance(value, _KINDS[key]) or isinstance(value, bool):
            expected = " or ".join(_WORDS[kind] for kind in _KINDS[key])
            raise UserError(f"{place}.{key}: is {value!r}, expected {expected}")
    for key, wrong in (("conventions", wrong_conventions), ("supports", wrong_supports)):
        if why := wrong(data.get(key, {})):
            raise UserError(f"{place}.{key}: {why}")
    named = data.pop("implementation", ())
    specs = (named,) if isinstance(named, str) else tuple(named)
    if not all(isinstance(spec, str) and spec.strip() for spec in specs):
        raise UserError(f"{place}.implementation: is {named!r}, expected a path, a module, or a list of pairs as text")
    waivers = waivers_of(data.pop("waivers", {}), f"{place}.waivers")
    if data.get("level", "must") not in ("must", "should"):
        raise UserError(f"{place}.level: is {data['level']!r}, expected 'must' or 'should'")
    if data.get("examples", 1) < 1:
        raise UserError(f"{place}.examples: is {data['examples']}; at least 1 must be drawn")
    return Config(file, tuple(_seen_from_here(spec, file) for spec in specs), waivers=waivers, **data)


def nearest_project() -> Path | None:
    """The nearest pyproject.toml, from the current folder upward."""
    here = Path.cwd()
    return next((_shown(folder / PROJECT) for folder in (here, *here.parents) if (folder / PROJECT).is_file()), None)


def _shown(path: Path) -> Path:
    return Path(PROJECT) if path.parent == Path.cwd() else path


def _table_of(file: Path, required: bool) -> dict[str, Any]:
    """Its [tool.spec-lm]; a file that is no pyproject.toml may have the keys at its top."""
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is no TOML: {error}") from error
    tools = _is_table(data.get("tool", {}), f"{file}, tool")
    if "spec-lm" in tools:
        return dict(_is_table(tools["spec-lm"], f"{file}, {TABLE}"))
    if file.name != PROJECT:
        return {key: value for key, value in data.items() if key != "tool"}
    if required:
        raise UserError(f"{file} has no [{TABLE}]")
    return {}


def _is_table(given: Any, place: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise UserError(f"{place}: is {given!r}, expected a table")
    return given


def _seen_from_here(spec: str, file: Path) -> str:
    """A path in a file is seen from the file's folder."""
    path = Path(spec).expanduser()
    if (is_pair(spec) and not (file.parent / path).exists()) or not looks_like_a_path(spec):
        return spec
    return spec if path.is_absolute() or file.parent == Path() else os.path.relpath(file.parent / path)
