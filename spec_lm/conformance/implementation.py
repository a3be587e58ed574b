"""From "path/to/adapters.py", "package.module", "package.module:thing" or "softmax=torch:softmax" to operators."""

import ast
import contextlib
import importlib
import importlib.util
import os
import re
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from spec_lm.conformance.clause import nearest
from spec_lm.conformance.declarations import wrong_conventions, wrong_supports
from spec_lm.conformance.operators import OPERATORS, Operator
from spec_lm.conformance.report import UserError
from spec_lm.conformance.script import Origin, is_taken, quoted
from spec_lm.conformance.surroundings import current_folder, folder_to

BUILT_IN = "spec_lm.reference.adapters"
# What the checker itself runs on; a module that takes the place of one of these would break it.
_NEEDED = {*sys.stdlib_module_names, "spec_lm", "torch", "torchgen", "typing_extensions", "numpy", "hypothesis"}
_NEEDED |= {"sortedcontainers", "tqdm", "sympy", "mpmath", "jaxtyping", "beartype", "einops", "rich", "typer", "click"}
_NEEDED |= {"pebble", "jinja2", "markupsafe", "tomlkit", "pytest", "pluggy"}
_PROJECT_MARKS = ("pyproject.toml", "setup.py", "setup.cfg", ".git")


class ImplementationError(UserError):
    """An implementation cannot be loaded; the text says why and what to try."""


@dataclass(frozen=True)
class Implementation:
    """What is checked: functions of the plain signatures, by operator.

    Args:
        name: as the user wrote it.
        functions: those that are provided.
        origins: how each of them is reached from plain Python.
        conventions: legitimate choices it declares.
        supports: the part of the domain it declares.
    """

    name: str
    functions: Mapping[str, Callable[..., Any]]
    origins: Mapping[str, Origin] = field(default_factory=dict)
    conventions: Mapping[str, str] = field(default_factory=dict)
    supports: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def loaded(spec: Any) -> Iterator[Implementation]:
    """The implementation that a path, a module name, `operator=module:function` pairs or a live object stand for.

    Its folder and its project's root are importable inside the block; afterwards sys.path and the modules that came
    from them are as they were, so that two files of one name can be checked in one process.

    Args:
        spec: text as on the command line, a sequence of pairs, a path, a module, a mapping or an object with functions.

    Raises:
        ImplementationError: it cannot be imported, or provides no operator.
    """
    if isinstance(spec, str) and spec == BUILT_IN:
        yield from_object(importlib.import_module(BUILT_IN), BUILT_IN, _Place(BUILT_IN))
    elif isinstance(spec, tuple | list):
        with _folders_on_path([Path.cwd()]):
            yield _from_pairs([str(pair) for pair in spec])
    elif isinstance(spec, Path) or (isinstance(spec, str) and is_path(spec)):
        path = _existing(spec)
        with _importable(path) as module:
            yield from_object(module, str(spec), _place_of_file(path))
    elif isinstance(spec, str) and is_pair(spec):
        with _folders_on_path([Path.cwd()]):
            yield _from_pairs(spec.split())
    elif isinstance(spec, str):
        with _folders_on_path([Path.cwd()]):
            thing = _resolve(spec)
            yield from_object(thing, spec, _place_of(spec, isinstance(thing, Mapping)))
    else:
        yield spec if isinstance(spec, Implementation) else from_object(spec, _name_of(spec))


def from_object(thing: Any, name: str, place: "_Place | None" = None) -> Implementation:
    """The operators of a module, a mapping or an object: run_* of the adapter interface, or the plain names.

    Args:
        thing: that has the functions.
        name: as the user wrote it.
        place: where plain Python finds the thing, unless it lives in this process alone.

    Raises:
        ImplementationError: there is none, or what it declares is not understood.
    """
    get = thing.get if isinstance(thing, Mapping) else lambda key, default=None: getattr(thing, key, default)
    functions, origins = {}, {}
    for operator in OPERATORS.values():
        if callable(function := get(operator.run_name)):
            functions[operator.name] = through_adapter(operator, function)
        elif callable(function := get(operator.name)):
            functions[operator.name] = function
        else:
            continue
        is_adapter = functions[operator.name] is not function
        key = operator.run_name if is_adapter else operator.name
        origins[operator.name] = (
            place.origin(function, key, is_adapter) if place else Origin(function, adapter=is_adapter)
        )
    if not functions:
        raise ImplementationError(
            f"{name} provides no operator: expected functions named {', '.join(list(OPERATORS)[:3])}, .. or "
            f"run_softmax, run_silu, ..; `spec-lm clauses` lists the operators"
        )
    conventions = _declared(name, "spec_lm_conventions", get, wrong_conventions)
    return Implementation(
        name, functions, origins, conventions, _declared(name, "spec_lm_supports", get, wrong_supports)
    )


def _declared(name: str, key: str, get: Callable[[str], Any], wrong: Callable[[Any], str]) -> Mapping[str, Any]:
    """What an implementation declares under a name of its own; nothing where it does not."""
    declared = get(key)
    declared = {} if declared is None else declared
    if why := wrong(declared):
        raise ImplementationError(f"{name}, {key}: {why}")
    return declared


def through_adapter(operator: Operator, run: Callable[..., Any]) -> Callable[..., Any]:
    """A run_* function of the adapter interface as one of the plain signature."""

    def plain(*arguments: Any) -> Any:
        positional, named = operator.adapter(*arguments)
        try:
            return run(*positional, **named)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            given = ", ".join([*("_" for _ in positional), *(f"{name}=_" for name in named)])
            raise TypeError(f"{error}; it is called as {operator.run_name}({given})") from None

    plain.__name__ = operator.run_name
    return plain


def _name_of(thing: Any) -> str:
    if isinstance(thing, ModuleType):
        return thing.__name__
    return ", ".join(map(str, thing)) if isinstance(thing, Mapping) else type(thing).__qualname__


def is_pair(spec: str) -> bool:
    """Whether text is operator=module:function; what is there as a file or a folder is its path."""
    return "=" in spec and not os.path.exists(os.path.expanduser(spec))


def grouped(arguments: Sequence[str]) -> list[str]:
    """What to load, in turn: all pairs as one text, where the first stood; every other argument by itself, once."""
    pairs = " ".join(filter(is_pair, arguments))
    return list(dict.fromkeys(pairs if is_pair(each) else each for each in arguments))


def looks_like_a_path(spec: str) -> bool:
    """Whether text has what a path has and a module's name has not."""
    return spec.endswith(".py") or "/" in spec or "\\" in spec


def is_path(spec: str) -> bool:
    """Whether text is the path of a file or a folder, there or not."""
    return not is_pair(spec) and (looks_like_a_path(spec) or Path(spec).is_dir())


def _existing(spec: str | Path) -> Path:
    path = Path(spec).expanduser()
    if path.is_dir():
        path = path / "adapters.py"
        if not path.is_file():
            raise ImplementationError(f"the folder {spec} has no adapters.py; give the path of the file to check")
    if not path.is_file():
        raise ImplementationError(f"there is no file {spec}; give the path of a Python file, seen from {Path.cwd()}")
    return path.resolve()


def _from_pairs(pairs: list[str]) -> Implementation:
    functions, origins = {}, {}
    for pair in pairs:
        name, _, target = pair.partition("=")
        name = name.strip().removeprefix("run_")
        if name not in OPERATORS:
            raise ImplementationError(f"{pair}: no operator is named {name}{nearest(name, list(OPERATORS))}")
        function = _resolve(target)
        if not callable(function):
            raise ImplementationError(f"{pair}: {target} is a {type(function).__name__}, expected a function")
        is_adapter = target.rpartition(":")[2].rpartition(".")[2] == OPERATORS[name].run_name
        functions[name] = through_adapter(OPERATORS[name], function) if is_adapter else function
        origins[name] = _place_of(target).origin(function, "", is_adapter)
    return Implementation(" ".join(pairs), functions, origins)


def _resolve(target: str) -> Any:
    """The module, or "module:attribute", that text names."""
    if not target.strip(": "):
        raise ImplementationError("an implementation has no name; give a path, a module or operator=module:function")
    module_name, _, attribute = target.partition(":")
    thing = _import(lambda: importlib.import_module(module_name), target)
    for part in filter(None, attribute.split(".")):
        if not hasattr(thing, part):
            known = [name for name in dir(thing) if not name.startswith("_")]
            raise ImplementationError(f"{target}: {module_name} has no attribute {part}{nearest(part, known)}")
        thing = getattr(thing, part)
    return thing


def _import(load: Callable[[], Any], what: str) -> Any:
    """Load it; whatever it raises becomes an error that says why and what to try."""
    folder = current_folder()
    try:
        # What it prints while it is imported must not get between the lines that others read from stdout.
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        raise ImplementationError(f"{what} cannot be imported: {reason}; {_mend(error, what)}") from error
    finally:
        if not current_folder():  # it has deleted the one it went to
            folder_to(folder)


def _mend(error: BaseException, what: str) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        top = error.name.split(".")[0]
        if what.split(":")[0].split(".")[0] == top:
            module, _, attribute = what.rpartition(".")
            if importlib.util.find_spec(top) and ":" not in what:
                return f"write {module}:{attribute} for {attribute} in the module {module}"
            return f"is {top} installed in {sys.prefix}, or a path to a file meant (path/to/adapters.py)?"
        return f"install {top} into {sys.prefix}, or run spec-lm in the project's own environment"
    if isinstance(error, SyntaxError):
        line = f"the line is `{error.text.strip()}`; " if error.text else ""
        return f"{line}this is Python {sys.version_info.major}.{sys.version_info.minor}"
    return f"try `python -c 'import runpy; runpy.run_path({what!r})'` for the whole traceback"


# -------------------------------------------------------------------------------------- how plain Python finds it again


@dataclass(frozen=True)
class _Place:
    """Where a thing with functions, or a function, is found by plain Python.

    Args:
        module: that holds it.
        attribute: its dotted name there; empty for the module itself.
        is_mapping: whether it holds functions by key.
        folders: that sys.path begins with while it is checked.
        needed: those of them without which it cannot be imported.
    """

    module: str
    attribute: str = ""
    is_mapping: bool = False
    folders: tuple[Path, ...] = ()
    needed: tuple[Path, ...] = ()

    def origin(self, function: Callable[..., Any], key: str, is_adapter: bool) -> Origin:
        """Of a function that the thing holds by this name; an empty one stands for the thing itself."""
        name = self.attribute + (f"[{quoted(key)}]" if self.is_mapping else f".{key}" if key else "")
        first, rest = re.fullmatch(r"\.?(\w+)(.*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
        own = "f" if is_taken(first) else first
        if all(part.isidentifier() for part in self.module.split(".")):
            statement = f"from {self.module} import {first}" + (f" as {own}" if own != first else "")
        else:
            statement = f'{own} = __import__("importlib").import_module({quoted(self.module)}).{first}'
        folders = tuple(_seen_from_here(folder) for folder in self.needed)
        return Origin(function, own + rest, statement, folders, is_adapter, lambda: _imported_anew(self.folders))


def _place_of(target: str, is_mapping: bool = False) -> _Place:
    """Of "module" or "module:attribute", which has been imported."""
    module, _, attribute = target.strip().partition(":")
    here = (Path.cwd(),)
    is_here = _lies_in(sys.modules[module.split(".")[0]], [str(here[0])])
    return _Place(module, attribute, is_mapping, here, here if is_here else ())


def _place_of_file(path: Path) -> _Place | None:
    """Of a file that has been imported; none where plain Python has no name for it."""
    package = _package_of(path)
    if not _is_importable(path, package):
        return None
    folders = _folders_of(path)
    imported = {name.partition(".")[0] for name in _imports_of(path)} - {""}  # a relative import's
    needed = [f for f in folders[1:] if any((f / name).is_dir() or (f / f"{name}.py").is_file() for name in imported)]
    return _Place(package[1] if package else path.stem, "", False, folders, (folders[0], *needed))


def _seen_from_here(folder: Path) -> str:
    relative = os.path.relpath(folder)
    return str(folder) if relative.startswith("..") else relative


@contextmanager
def _imported_anew(folders: tuple[Path, ...]) -> Iterator[None]:
    """Inside, no module from these folders has been imported yet; afterwards sys.path and sys.modules are as before."""
    inside = [str(folder) for folder in folders]
    path_before, modules_before = list(sys.path), dict(sys.modules)
    for name in [name for name, module in modules_before.items() if _lies_in(module, inside)]:
        del sys.modules[name]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = path_before
        for name in [n for n, m in sys.modules.items() if n not in modules_before and _lies_in(m, inside)]:
            del sys.modules[name]
        sys.modules.update(modules_before)


# ---------------------------------------------------------------------------------------------- files and their project


@contextmanager
def _importable(path: Path) -> Iterator[ModuleType]:
    """The module of a file, with its folder and its project's root on sys.path inside the block."""
    _refuse_a_needed_name(path)
    with _folders_on_path(list(_folders_of(path))), _own_metadata(_project_root(path)):
        yield _import(lambda: _module_of(path, _package_of(path)), str(path))


def _refuse_a_needed_name(path: Path) -> None:
    """Where the file, or the package it is part of, would take the place of what this process has imported and needs.

    Raises:
        ImplementationError: it would.
    """
    package = _package_of(path)
    name = package[1].partition(".")[0] if package else path.stem
    if name not in _NEEDED or name not in sys.modules or not _is_importable(path, package):
        return
    module, own = sys.modules[name], package[0] / name if package else path
    places = [getattr(module, "__file__", None), *(getattr(module, "__path__", None) or [])]
    if own not in [Path(place).resolve() for place in places if isinstance(place, str)]:
        what = f"folder {own}" if package else "file"
        raise ImplementationError(f"{path} would hide the module {name}, on which spec_lm runs; rename the {what}")


def _folders_of(path: Path) -> tuple[Path, ...]:
    """What a file may import from: the folder of its outermost package, its own, its project's root and src."""
    root, package = _project_root(path), _package_of(path)
    folders = dict.fromkeys((package[0] if package else path.parent, path.parent, root, root / "src"))
    return tuple(folder for folder in folders if folder.is_dir())


def _project_root(path: Path) -> Path:
    """The nearest enclosing folder that looks like a project's; else the file's own."""
    for folder in path.parents:
        if any((folder / mark).exists() for mark in _PROJECT_MARKS):
            return folder
    return path.parent


def _package_of(path: Path) -> tuple[Path, str] | None:
    """The folder above the file's outermost package and its dotted name, where the file is part of one.

    A file with relative imports is part of its folder, with or without an `__init__.py`.
    """
    folder, names = path.parent, [path.stem]
    is_relative = any(name.startswith(".") for name in _imports_of(path))
    if is_relative and ("." in folder.name or not (folder / "__init__.py").exists()):
        return folder.parent, f"{folder.name}.{path.stem}"
    while (folder / "__init__.py").exists() and folder.parent != folder and "." not in folder.name:
        names.insert(0, folder.name)
        folder = folder.parent
    return (folder, ".".join(names)) if len(names) > 1 else None


def _is_importable(path: Path, package: tuple[Path, str] | None) -> bool:
    """Whether an import statement can name it: a dot in a name would stand between a package and its module."""
    return "." not in path.stem and not (package and "." in path.parent.name)


def _imports_of(path: Path) -> list[str]:
    """The modules that a file imports, relative ones with their dots; none where it is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # to import it says why
        return []
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return names + ["." * n.level + (n.module or "") for n in nodes if isinstance(n, ast.ImportFrom)]


def _module_of(path: Path, package: tuple[Path, str] | None) -> ModuleType:
    if not package:
        return _executed(path.stem, path)
    if _is_importable(path, package):
        return importlib.import_module(package[1])
    folder, name = path.parent, re.sub(r"\W", "_", path.parent.name)
    if (folder / "__init__.py").is_file():
        _executed(name, folder / "__init__.py")
    else:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(folder)]
    return _executed(f"{name}.{path.stem.replace('.', '_')}", path)


def _executed(name: str, path: Path) -> ModuleType:
    """The module of a file, under a name of our choice."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def _folders_on_path(folders: list[Path]) -> Iterator[None]:
    """sys.path begins with the folders inside the block; afterwards it, and their modules, are as they were.

    Modules of the same names that came from elsewhere (another project's `tests`) are out of the way meanwhile.
    """
    inside = [str(folder) for folder in dict.fromkeys(folders)]
    path_before, modules_before = list(sys.path), dict(sys.modules)
    for name in _shadowing(folders):
        del sys.modules[name]
    sys.path[:0] = inside
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = path_before
        for name in [n for n, m in sys.modules.items() if n not in modules_before and _lies_in(m, inside)]:
            del sys.modules[name]
        sys.modules.update(modules_before)


def _shadowing(folders: list[Path]) -> list[str]:
    """Loaded modules, not from these folders, that bear the name of a module or package lying in them."""
    inside = [str(folder) for folder in folders]
    own = {
        entry.stem
        for folder in folders
        for entry in folder.iterdir()
        if entry.suffix == ".py" or (entry / "__init__.py").is_file()
    }
    own -= _NEEDED
    return [name for name, module in sys.modules.items() if name.split(".")[0] in own and not _lies_in(module, inside)]


def _lies_in(module: Any, folders: list[str]) -> bool:
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", None) or []), None)
    if not isinstance(file, str) or "site-packages" in file or module.__name__.split(".")[0] == "spec_lm":
        return False
    return any(Path(file).is_relative_to(folder) for folder in folders)


class _OwnDistribution(Distribution):
    """Stands in for the metadata of a project that is checked without being installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.1\nName: {self._name}\nVersion: 0\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path(path)


class _OwnDistributionFinder(DistributionFinder):
    """Answers for the project's own names after every installed distribution was asked."""

    def __init__(self, names: set[str]) -> None:
        self._names = {_normalized(name) for name in names}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        return None

    def find_distributions(self, context: DistributionFinder.Context = DistributionFinder.Context()) -> Any:  # noqa: B008
        if context.name and _normalized(context.name) in self._names:
            yield _OwnDistribution(context.name)


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@contextmanager
def _own_metadata(root: Path) -> Iterator[None]:
    """`importlib.metadata.version` of the project's own packages answers inside the block, installed or not."""
    bases = [base for base in (root, root / "src") if base.is_dir()]
    names = {folder.name for base in bases for folder in base.iterdir() if folder.is_dir()}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # no project table: its folders' names must do
        names.add(tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"])
    finder = _OwnDistributionFinder(names)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
