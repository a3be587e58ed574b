"""README and docs say what is so: their Python runs, their generated parts are up to date."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PYTHON = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
    if "import" in code
]


@pytest.mark.parametrize("code", PYTHON)
def test_python_on_a_page_runs(code):
    exec(compile(code, "page", "exec"), {})


def test_readme_holds_what_its_generator_writes():
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert generate["generated"](text) == text, "run `python docs/generate.py`"


def test_each_page_is_reachable_and_links_to_pages_that_exist():
    for page in PAGES:
        for link in re.findall(r"\]\(([\w/-]+\.md)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).is_file() or link.startswith("operators/"), f"{page.name}: {link}"
