"""Builds one page an operator from the specification itself: words, code, clauses, what goes wrong in practice."""

import inspect
from collections.abc import Iterator

from mkdocs.structure.files import File, Files

from spec_lm.conformance.clause import CLAUSES, Clause
from spec_lm.conformance.operators import OPERATORS
from spec_lm.faults import catalogue, clauses_detecting
from spec_lm.reference import functional


def on_config(config):
    pages = [{name: f"operators/{name}.md"} for name in OPERATORS]
    config.nav.insert(3, {"Specification": pages})
    return config


def on_files(files: Files, config) -> Files:
    for name in OPERATORS:
        files.append(File.generated(config, f"operators/{name}.md", content="\n".join(page(name))))
    return files


def page(operator: str) -> Iterator[str]:
    """The page of one operator, in Markdown."""
    function = inspect.unwrap(getattr(functional, operator))
    yield f"# {operator}\n\n{inspect.getdoc(function)}\n"
    yield f"```python\n{inspect.getsource(function).rstrip()}\n```\n\n## Clauses\n"
    clauses = [clause for clause in CLAUSES.values() if clause.operator == operator]
    yield "| clause | level | sentence |\n|---|---|---|"
    for clause in clauses:
        yield f"| [`{clause.name}`](#{clause.name}) | {clause.level.upper()} | {_cell(clause.sentence)} |"
    for clause in clauses:
        yield from section(clause)


def section(clause: Clause) -> Iterator[str]:
    """What a clause says, what it is for, and the faults it detects."""
    yield f"\n### {clause.name} {{ #{clause.name} }}\n"
    yield f"**{clause.level.upper()}.** {clause.sentence}\n\nSource: {clause.source}. It catches: {clause.catches}.\n"
    for fault in catalogue().values():
        if clause.id in clauses_detecting(fault):
            report = f" (as in {fault.report})" if fault.report else ""
            yield f"- detects `{fault.id}`: {fault.does}{report}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
