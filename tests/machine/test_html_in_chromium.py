"""A person's view of the HTML report: in headless Chromium, over the WebDriver protocol."""

import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spec_lm.conformance.html import html_text
from spec_lm.conformance.report import Outcome, Report

pytestmark = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="no Chromium here: apt-get install chromium chromium-driver",
)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic", "--disable-sync")
FLAGS += ("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage")
FAILING = ("softmax.any_dim", "silu.agrees_with_the_oracle")


class Browser:
    """One tab of a Chromium."""

    def __init__(self, driver: str, profile: Path) -> None:
        self.driver, self.session = driver, ""
        options = {"args": [*FLAGS, f"--user-data-dir={profile}"]}
        asked = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.session = "/" + self.call("POST", "/session", capabilities={"alwaysMatch": asked})["sessionId"]

    def call(self, method: str, path: str, **parameters: Any) -> Any:
        """A command of the protocol."""
        path = path if path == "/session" else f"/session{self.session}{path}"
        data = json.dumps(parameters).encode() if method == "POST" else None
        with urllib.request.urlopen(urllib.request.Request(self.driver + path, data, method=method)) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path) -> None:
        self.call("POST", "/url", url=page.as_uri())

    def read(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        return self.call("POST", "/execute/sync", script=f"return {expression}", args=[])

    def click(self, selector: str) -> None:
        self.call("POST", f"/element/{self._element(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        self.call("POST", f"/element/{self._element(selector)}/value", text=text)

    def _element(self, selector: str) -> str:
        (value,) = self.call("POST", "/element", using="css selector", value=selector).values()
        return value

    @property
    def shown(self) -> list[str]:
        """The ids of the clauses that can be seen."""
        clauses = "[...document.querySelectorAll('details.clause')]"
        return self.read(f"{clauses}.filter(c => c.checkVisibility()).map(c => c.querySelector('code').textContent)")

    @property
    def messages(self) -> list[str]:
        """What the console got since it was asked last."""
        return [entry["message"] for entry in self.call("POST", "/se/log", type="browser")]


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    with subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout
            said = next(line for line in driver.stdout if "started successfully on port" in line)
            port = said.rstrip(".\n").rpartition(" ")[2]
            opened = Browser(f"http://localhost:{port}", tmp_path_factory.mktemp("profile"))
            yield opened
            opened.call("DELETE", "")
        finally:
            driver.terminate()


@pytest.fixture
def page(browser, tmp_path) -> Browser:
    """The browser on a report of two implementations: of five clauses each two fail."""
    came_to: list[tuple[str, Any]] = [*((clause, "fails") for clause in FAILING), ("softmax.sums_to_one", "holds")]
    came_to += [("silu.two", "holds"), ("rope.three", "holds")]
    levels = {"softmax": "must", "silu": "should", "rope": "should"}
    operators = {clause: clause.partition(".")[0] for clause, _ in came_to}
    outcomes = [Outcome(c, operators[c], levels[operators[c]], status) for c, status in came_to]
    header = {"spec": 1, "versions": {}, "level": "should", "seed": 0}
    reports = [Report({"implementation": name, **header}, tuple(outcomes)) for name in ("a.py", "b.py")]
    (tmp_path / "report.html").write_text(html_text(reports), encoding="utf-8")
    browser.open(tmp_path / "report.html")
    return browser


def test_a_failure_can_be_opened_from_its_line_and_from_the_matrix(page):
    body = "document.getElementById('1-softmax.any_dim').checkVisibility()"
    assert page.read(body) is False
    page.click("details.fails summary")
    assert page.read(body) is True
    page.click("#report-2 .cells a.fails")
    assert page.read("document.getElementById('2-softmax.any_dim').checkVisibility()") is True
    assert page.messages == []


def test_filters_of_outcome_level_operator_and_text_narrow_what_is_shown(page):
    assert len(page.shown) == 10
    page.click("input[value=holds]")
    assert page.shown == [*FAILING] * 2
    assert page.read("document.querySelectorAll('.cells a.off').length") == 6
    page.type("select[name=operator]", "silu")
    assert page.shown == ["silu.agrees_with_the_oracle"] * 2
    assert page.read("document.getElementById('shown').textContent") == "2 of 10 shown"
    page.click("input[value=holds]")
    assert page.shown == ["silu.agrees_with_the_oracle", "silu.two"] * 2
    page.type("input[name=text]", "TWO")
    assert page.shown == ["silu.two"] * 2
    page.type("select[name=level]", "MUST")
    assert page.shown == []
    assert page.messages == []


def test_a_cell_of_the_matrix_leads_to_a_clause_that_filters_hide(page):
    """At once, and again: the second time the address does not change."""
    for _ in range(2):
        page.click("input[value=holds]")
        page.read("document.querySelector('#report-1 .cells a.holds').click()")
        assert len(page.shown) == 10
    assert page.read("document.querySelectorAll('details[open]').length") == 1


def test_all_that_are_shown_open_and_close_together(page):
    page.click("input[value=holds]")
    for number in (4, 0):
        page.click("#toggle")
        assert page.read("document.querySelectorAll('details[open]').length") == number


def test_hostile_text_stays_text_and_runs_nothing(browser, tmp_path, hostile_report):
    (tmp_path / "report.html").write_text(html_text([hostile_report], "x"), encoding="utf-8")
    browser.open(tmp_path / "report.html")
    assert browser.read("document.images.length") == 0
    assert browser.read("document.scripts.length") == 1
    browser.click("details.fails summary")
    said = browser.read("document.querySelector('details.fails pre').innerText")
    assert said.startswith("raised TypeError: <img src=x onerror=alert(1)></pre></details><script>alert(2)</script>")
    assert len(browser.shown) == 3
    assert browser.messages == []


def test_the_policy_refuses_every_other_script(browser, tmp_path, hostile_report):
    """The test of hostile text can fail: an image that got through would not be loaded, and its error not be run."""
    text = html_text([hostile_report]).replace("</main>", "<img src=x onerror='document.title=1'></main>")
    (tmp_path / "report.html").write_text(text, encoding="utf-8")
    browser.open(tmp_path / "report.html")
    assert browser.read("document.title") != "1"
    assert "Content Security Policy" in " ".join(browser.messages)
