"""pytest's view of the specification: one item a clause, named by its id.

    pytest                                                              in the checkout: on the reference
    pytest --pyargs spec_lm.properties --spec-lm-impl tests/adapters.py on an implementation

It patches nothing, and imports nothing heavy until a file of the specification is collected. That is decided by where
the file lies, never by the name of its folder.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest

import spec_lm
from spec_lm import testing
from spec_lm.conformance.report import UserError
from spec_lm.testing import Checks, ClauseError, ClauseFailed

if TYPE_CHECKING:
    from spec_lm.conformance.clause import Clause
    from spec_lm.conformance.implementation import Implementation

_STATE = pytest.StashKey["_Subject"]()
_OPTIONS = ("impl", "examples", "level", "dtype")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("spec_lm", "spec_lm: the specification of a Transformer language model")
    group.addoption(
        "--spec-lm-impl",
        action="append",
        metavar="IMPL",
        help="check this implementation, not the reference: a path, a module, module:object, or "
        "operator=module:function (repeatable); as in "
        "pytest --pyargs spec_lm.properties --spec-lm-impl tests/adapters.py",
    )
    group.addoption("--spec-lm-examples", type=int, metavar="N", help="examples drawn for each clause (default: 50)")
    group.addoption(
        "--spec-lm-level",
        choices=("must", "should"),
        help="MUST clauses alone, or SHOULD clauses as well (default: should for the reference, else must)",
    )
    group.addoption("--spec-lm-dtype", metavar="T", help="dtype of the arguments (default: float32)")


# ---------------------------------------------------------------------------------------------------------- collection


@lru_cache
def _specification() -> Path:
    """The folder of spec_lm.properties, found without importing it."""
    folders = [Path(base, "properties") for base in spec_lm.__path__]
    return next(folder for folder in folders if (folder / "__init__.py").is_file()).resolve()


@lru_cache
def _is_specification(folder: Path) -> bool:
    return folder.resolve() == _specification()


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Tell at once of a wrong option, and of a checkout whose clauses would not run."""
    _refuse_another_checkout(session.config)
    if any(session.config.getoption(f"spec_lm_{name}") is not None for name in _OPTIONS):
        try:
            _subject(session.config)
        except UserError as error:
            raise pytest.UsageError(str(error)) from None


def _refuse_another_checkout(config: pytest.Config) -> None:
    """Run in a checkout while another spec_lm is installed, pytest would collect none of the checkout's clauses."""
    clauses = config.rootpath / "properties"
    if not ((clauses / "every_operator.py").is_file() and (config.rootpath / "spec_lm" / "__init__.py").is_file()):
        return
    places = [(config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args]
    asked = [place for place in places if place.is_relative_to(clauses) or clauses.is_relative_to(place)]
    if asked and clauses.resolve() != _specification():
        raise pytest.UsageError(
            f"{clauses} is not the specification of the installed spec_lm ({_specification()}), so that none of its "
            f"clauses would run; install the checkout (pip install -e .), or use pytest --pyargs spec_lm.properties"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """The specification's folder as a plain one: as a package pytest would import it under a second name."""
    if not _is_specification(path):
        return None
    folder = pytest.Dir.from_parent(parent, path=path)
    folder.name = "specification"  # "properties" contains "rope": -k rope would select every clause
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Iterator[Any]:
    found = yield
    if file_path.suffix != ".py" or file_path.name == "__init__.py" or not _is_specification(file_path.parent):
        return found
    others = [each for each in found if not isinstance(each, pytest.Module)]
    return [*others, SpecificationFile.from_parent(parent, path=file_path)]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Hypothesis writes what it read of local modules to its folder: for clauses alone, not to the caller's."""
    if any(isinstance(item, ClauseItem) for item in items):
        from spec_lm.conformance.runner import storage_elsewhere

        with storage_elsewhere():
            return (yield)
    return (yield)


class SpecificationFile(pytest.Module):
    """A file of the specification."""

    def _getobj(self) -> Any:
        return import_module(f"spec_lm.properties.{self.path.stem}")

    def collect(self) -> Iterator[pytest.Item]:
        """One item a clause, in the register's order."""
        try:
            subject = _subject(self.config)
        except UserError as error:
            raise self.CollectError(str(error)) from None
        for clause in subject.clauses:
            if clause.body.__module__ == self.obj.__name__:
                yield ClauseItem.from_parent(self, name=clause.id, callobj=subject.test(clause), clause=clause)


# ------------------------------------------------------------------------------------------------------------- running


class ClauseItem(pytest.Function):
    """A clause, on the session's implementation; `obj` is its Hypothesis test, for Hypothesis's own plugin."""

    def __init__(self, *args: Any, clause: "Clause", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clause = clause

    def runtest(self) -> None:
        """The required cases, then all sizes, as `spec-lm check` runs them."""
        _subject(self.config).checks.run(self.clause)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> Any:
        """What `spec-lm check` prints, instead of a traceback through the machine."""
        told = isinstance(excinfo.value, ClauseFailed | ClauseError)
        return str(excinfo.value) if told else super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Where the property stands."""
        return self.path, self.clause.body.__code__.co_firstlineno - 1, self.name


class _Subject:
    """The implementation under check, loaded once a session, and what its operators came to so far."""

    def __init__(self, config: pytest.Config) -> None:
        from spec_lm.conformance.implementation import BUILT_IN
        from spec_lm.conformance.runner import Settings, preserved, select

        given = {name: config.getoption(f"spec_lm_{name}") for name in _OPTIONS}
        level = given["level"] or ("must" if given["impl"] else "should")
        self.clauses = select(None, None, level)
        examples = 50 if given["examples"] is None else given["examples"]
        settings = Settings(examples, _seed(config), given["dtype"] or "float32")
        self.close = contextlib.ExitStack()
        with preserved(settings.seed):
            self.implementation = self._loaded(given["impl"] or [BUILT_IN])
            self.settings = settings.declared_by(self.implementation)
        self.checks = Checks(self.implementation, self.settings, self.clauses)

    def _loaded(self, specs: list[str]) -> "Implementation":
        from spec_lm.conformance.implementation import is_pair, loaded

        if len(specs) > 1 and not all(map(is_pair, specs)):
            raise UserError("--spec-lm-impl: give one implementation, or several operator=module:function pairs")
        return self.close.enter_context(loaded(tuple(specs) if len(specs) > 1 else specs[0]))

    def test(self, clause: "Clause") -> Callable[[], None]:
        """The clause's Hypothesis test over the whole domain, for whoever asks an item what it is."""
        from spec_lm.conformance.operators import OPERATORS, Checked
        from spec_lm.conformance.strategies import Domain, NotJudged

        function = self.implementation.functions.get(clause.operator, _not_provided)
        domain = Domain(clause.operator, self.settings.dtype, supports=self.settings.supports)
        checked = Checked(OPERATORS[clause.operator], function, self.settings.conventions)
        try:
            return clause.test(checked, domain=domain, examples=self.settings.examples)
        except NotJudged:
            return _not_provided


def _not_provided(*arguments: Any) -> None:
    """Stands in for an operator that is not there."""


def _seed(config: pytest.Config) -> int:
    """Hypothesis's own option; by default 0, as `spec-lm check` has it."""
    given = config.getoption("--hypothesis-seed", default=None)
    if given is None:
        return 0
    return int(given) if given.removeprefix("-").isdigit() else crc32(given.encode())


def _subject(config: pytest.Config) -> _Subject:
    if _STATE not in config.stash:
        config.stash[_STATE] = _Subject(config)
    return config.stash[_STATE]


# ----------------------------------------------------------------------------------------------------------- diagnosis


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of pytest-xdist tells the first one what its clauses came to."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None and testing.SEEN:
        from spec_lm.conformance.report import outcome_text

        seen = testing.SEEN.items()
        output["spec_lm"] = {name: list(map(outcome_text, outcomes.values())) for name, outcomes in seen}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what a process of pytest-xdist tells."""
    for name, texts in getattr(node, "workeroutput", {}).get("spec_lm", {}).items():
        from spec_lm.conformance.report import outcome_of_text

        testing.SEEN.setdefault(name, {}).update((each.clause, each) for each in map(outcome_of_text, texts))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What may be wrong with each operator that has failures, as `spec-lm check` tells it."""
    for name, seen in testing.SEEN.items():
        if not any(outcome.outcome == "fails" for outcome in seen.values()):
            continue
        from spec_lm.conformance.diagnosis import diagnose
        from spec_lm.conformance.report import printable

        if causes := diagnose(seen.values()):
            terminalreporter.section(f"what may be wrong with {printable(name)}", "-")
            for cause in causes:
                terminalreporter.write_line(f"{cause.operator}: {printable(cause.text)}")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave sys.path and the loaded modules as they were."""
    if _STATE in config.stash:
        config.stash[_STATE].close.close()
    testing.OPEN.close()
    testing.SEEN.clear()
