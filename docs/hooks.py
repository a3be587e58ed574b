"""Builds one page an operator from the specification itself: words, code, clauses, the faults they detect; and puts the
matrix of clauses and faults, and how good the diagnosis is, into their pages."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator

from mkdocs.structure.files import File, Files

from spec_lm import matrix
from spec_lm.conformance import diagnosis
from spec_lm.conformance.clause import CLAUSES, Clause
from spec_lm.conformance.operators import OPERATORS
from spec_lm.faults import FAMILIES
from spec_lm.reference import functional

MATRIX = matrix.read()
MOST_SHOWN = 1e9  # where a bound is next to nothing, the number says no more


def on_config(config):
    pages = [{name: f"operators/{name}.md"} for name in OPERATORS]
    config.nav.insert(3, {"Specification": pages})
    return config


def on_files(files: Files, config) -> Files:
    for name in OPERATORS:
        files.append(File.generated(config, f"operators/{name}.md", content="\n".join(page(name))))
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    """The text of a page with each generated part, `<!-- families -->`, in the place of its marker."""
    for name, part in PARTS.items():
        marker = f"<!-- {name} -->"
        if marker in markdown:
            markdown = markdown.replace(marker, "\n".join(part()))
    return markdown


# ------------------------------------------------------------------------------------------------------- operator pages


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
    for name, row in MATRIX.detected_by(clause.id).items():
        report = f" (as in {row.report})" if row.report else ""
        yield f"- detects `{name}`: {row.does}{report}"


# ----------------------------------------------------------------------------------------------------------- the matrix


def families() -> Iterator[str]:
    """What each family of faults says is to be mended."""
    counts = Counter(row.family for row in MATRIX.faults.values())
    yield "| family | faults | to be mended |\n|---|---|---|"
    for family, mend in FAMILIES.items():
        yield f"| {family} | {counts[family]} | {_cell(mend)} |"


def rows() -> Iterator[str]:
    """A table for each operator: fault, family, what detects it, where it shows."""
    yield f"The numbers below: {MATRIX.examples} examples a clause, seed {MATRIX.seed}, {MATRIX.dtype}."
    for operator in OPERATORS:
        part = MATRIX.of([operator])
        yield f"\n## {operator}\n\n{matrix.counts_text(part)}.\n"
        yield "| fault | family | detected by | shows in |\n|---|---|---|---|"
        for name, row in part.faults.items():
            report = f" ({row.report})" if row.report else ""
            about = f"`{name.partition('.')[2]}`: {_cell(row.does)}{report}"
            yield f"| {about} | {row.family} | {_detections(row)} | {', '.join(row.shows_in)} |"


def _detections(row: matrix.Row) -> str:
    """The clauses by how far they are exceeded, those that are not of values last."""
    ordered = sorted(row.detected_by.items(), key=lambda item: (item[1] is None, -(item[1] or 0), item[0]))
    return ", ".join(f"[{name}](operators/{row.operator}.md#{name}){_ratio(ratio)}" for name, ratio in ordered)


def _ratio(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f" {ratio:.3g}" if ratio < MOST_SHOWN else f" > {MOST_SHOWN:.0e}"


# ------------------------------------------------------------------------------------------------------- the diagnosis


def accuracies() -> Iterator[str]:
    """How often the catalogue's faults are guessed rightly."""
    yield "| clauses run | faults | right family first | among two | most frequent family | known fault recognized |"
    yield "|---|---|---|---|---|---|"
    measured = {"MUST": diagnosis.accuracy("must"), "MUST and SHOULD": diagnosis.accuracy("should")}
    for level, found in measured.items():
        counts = (found.first, found.among_two, found.most_frequent, found.recognized)
        shares = " | ".join(f"{count / found.faults:.0%}" for count in counts)
        yield f"| {level} | {found.faults} | {shares} |"
    yield "\nHow often a guess is right, by how sure it is:\n"
    yield "| clauses run | " + " | ".join(diagnosis.WORDS) + " |\n|---" + "|---" * len(diagnosis.WORDS) + "|"
    for level, found in measured.items():
        right = (f"{right} of {said}" for right, said in found.by_word.values())
        yield f"| {level} | {' | '.join(right)} |"


PARTS: dict[str, Callable[[], Iterator[str]]] = {"families": families, "matrix": rows, "accuracy": accuracies}


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
