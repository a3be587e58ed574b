"""Reports as one HTML page that needs no network: a matrix of clauses, filters, and each failure to be opened.

The page reads without JavaScript; a small script of its own filters. Its policy allows that script and that style, by
their hashes, and nothing else.
"""

import hashlib
from base64 import b64encode
from collections.abc import Iterable
from importlib.resources import files

from markupsafe import Markup

from spec_lm import __version__
from spec_lm.conformance.pages import SIGNS, ReportPage, counts_of, templates
from spec_lm.conformance.report import Report


def html_text(reports: Iterable[Report], file: str = "") -> str:
    """Reports as one page, a section each.

    Args:
        reports: of a file.
        file: its name, for the commands that replay its failures; empty where that is not known.
    """
    pages = [ReportPage(report, file) for report in reports]
    style, script = (files("spec_lm.conformance").joinpath("templates", name).read_text("utf-8") for name in _INLINE)
    return _TEMPLATES.get_template("report.html.j2").render(
        pages=pages,
        operators=list(dict.fromkeys(operator for page in pages for operator in page.operators)),
        counts=counts_of(clause for page in pages for clause in page.clauses),
        counts_of=counts_of,
        signs=SIGNS,
        version=__version__,
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'",
    )


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_INLINE = ("report.css", "report.js")
_TEMPLATES = templates({})
