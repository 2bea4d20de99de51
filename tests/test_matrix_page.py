"""The page of the matrix in a real browser, headless: filter, panels, links to cells, keys, a narrow window."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.ui import WebDriverWait

from harness.suite.coverage import State
from harness.suite.plan import load_plan
from reports import matrix
from tests import matrices
from tests.matrices import HTTP, LATEST, LEGACY, NEXT

pytestmark = pytest.mark.browser
FLAGS = (
    "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
    "disable-component-update", "disable-sync", "window-size=1280,900", "force-prefers-reduced-motion",
)  # fmt: skip
DEADLINE_S = 20.0
VISIBLE = """
return [...document.querySelectorAll(arguments[0])]
    .filter(e => e.checkVisibility({visibilityProperty: true, opacityProperty: true}) && e.offsetHeight)
    .map(e => e.id);
"""
CELL = f"stop-conditions@{HTTP}"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    found = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in found:
        pytest.fail(
            "no chromium with its driver on PATH\n"
            '  next: apt-get install -y chromium chromium-driver, or leave these tests out: -m "not browser"'
        )
    options = webdriver.ChromeOptions()
    options.binary_location = found[0]
    for flag in (*FLAGS, f"user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(f"--{flag}")
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(found[1]))
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = matrices.build(matrices.hostile())
    return matrix.write_all(made, tmp_path_factory.mktemp("page"))["matrix.html"].as_uri()


@pytest.fixture
def page(chromium: webdriver.Chrome, address: str) -> Iterator[Page]:
    shown = Page(chromium, address)
    shown.go()
    yield shown
    assert [line for line in chromium.get_log("browser") if "favicon" not in line["message"]] == []


class Page:
    def __init__(self, browser: webdriver.Chrome, address: str) -> None:
        self.browser, self.address = browser, address

    def go(self, fragment: str = "") -> None:
        self.browser.get("about:blank")
        self.browser.get(f"{self.address}#{fragment}" if fragment else self.address)
        # A busy machine's browser answers while it still reads the file: 74 of 105 rows.
        read = "return document.URL != 'about:blank' && document.readyState == 'complete'"
        self.until(lambda: self.browser.execute_script(read))

    def one(self, css: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, css)

    def cell(self, name: str) -> WebElement:
        return self.one(f'a.c[href="#{name}"]')

    def rows(self) -> list[str]:
        return self._visible(".row[data-state]")

    def panels(self) -> list[str]:
        return self._visible(".panel")

    def _visible(self, css: str) -> list[str]:
        """The ids of the visible elements. The page has hundreds, and the browser takes its time for each question."""
        return self.browser.execute_script(VISIBLE, css)

    def until(self, held) -> None:
        WebDriverWait(self.browser, DEADLINE_S, poll_frequency=0.05).until(lambda _: held())

    def keys(self, *keys: str) -> None:
        self.browser.switch_to.active_element.send_keys(*keys)

    def focused(self) -> str | None:
        return self.browser.switch_to.active_element.get_dom_attribute("href").removeprefix("#")


def test_the_filter_leaves_the_promises_that_fit_all_of_it(page: Page):
    everything = page.rows()
    assert len(everything) == len(load_plan().bullets)
    page.one("#text").send_keys("stop string")
    assert page.rows() == ["stop-conditions"], "a reason in the evidence is found too"
    assert page.one("#shown").text == f"1 of {len(load_plan().bullets)} promises"
    assert not page.one(".group:last-of-type h3").is_displayed(), "no heading without a promise"
    page.one("#text").send_keys(" and nothing that exists")
    assert page.rows() == []
    assert page.one("#nothing").is_displayed()
    page.one("#text").send_keys(Keys.ESCAPE)
    assert page.rows() == everything
    Select(page.one("#level")).select_by_visible_text("may")
    assert page.rows() == ["generate-takes-messages"]
    Select(page.one("#level")).select_by_visible_text("all levels")
    Select(page.one("#state")).select_by_visible_text("known")
    assert page.rows() == ["stop-conditions", "sessions-stick"]
    Select(page.one("#state")).select_by_visible_text("all states")
    page.one("#differs").click()
    made = matrices.build(matrices.hostile())
    assert page.rows() == [row.id for task in made.tasks for row in task.promises if row.differs]


def test_a_cell_opens_to_evidence_cause_and_command_and_closes(page: Page):
    assert page.panels() == []
    page.cell(CELL).click()
    page.until(lambda: page.panels() == [CELL])
    text = page.one(f'[id="{CELL}"]').text
    for said in (
        "known since this release",
        "http-stop-string",
        "remote_inference_client.py:512",
        "the response keeps the stop string",
        "sampling.test_stop_string",
        "parity run",
        f"--stack {HTTP}",
        "vLLM documentation, SamplingParams",
    ):
        assert said in text
    page.one(f'[id="{CELL}"] .close').click()
    page.until(lambda: page.panels() == [])
    assert page.focused() == CELL


def test_a_link_to_a_cell_opens_it(page: Page):
    page.go(CELL)
    page.until(lambda: page.panels() == [CELL])
    page.one(f'[id="{CELL}"] a[href="#stop-conditions@{LATEST}"]').click()
    page.until(lambda: page.panels() == [f"stop-conditions@{LATEST}"])
    page.browser.back()
    page.until(lambda: page.panels() == [CELL])


def test_the_way_from_one_release_to_the_next_leads_to_the_cells(page: Page):
    steps = page.browser.find_elements(By.CSS_SELECTOR, ".step")
    assert [step.find_element(By.CSS_SELECTOR, "summary").text for step in steps][1:] == [
        f"{HTTP} → {NEXT} ✓ 1 fixed – 0 broken",
        f"{NEXT} → {LATEST} ✓ 1 fixed ✕ 2 broken",
    ]
    broken = steps[2].find_elements(By.CSS_SELECTOR, ".both > div:first-child a")
    broken[1].click()
    page.until(lambda: len(page.panels()) == 1)
    assert page.panels()[0].endswith(f"@{LATEST}")
    assert "a chunk of the sync was lost" in page.one(".panel:target").text


def test_keys_move_open_go_on_and_close(page: Page):
    page.browser.execute_script("arguments[0].focus()", page.cell(CELL))
    page.keys(Keys.ARROW_LEFT)
    assert page.focused() == f"stop-conditions@{LEGACY}"
    page.keys(Keys.ARROW_LEFT)
    assert page.focused() == f"stop-conditions@{LEGACY}", "there is nothing further left"
    page.keys(Keys.ARROW_DOWN)
    assert page.focused() == f"tokens-and-text-agree@{LEGACY}"
    page.keys(Keys.ARROW_UP, Keys.END)
    assert page.focused() == f"stop-conditions@{LATEST}"
    page.keys(Keys.HOME, Keys.ENTER)
    page.until(lambda: page.panels() == [f"stop-conditions@{LEGACY}"])
    page.keys(Keys.ARROW_RIGHT)
    page.until(lambda: page.panels() == [CELL])
    page.keys(Keys.ESCAPE)
    page.until(lambda: page.panels() == [])
    assert page.focused() == CELL
    page.keys("/")
    assert page.browser.switch_to.active_element == page.one("#text")
    page.keys("stop", Keys.ARROW_LEFT)
    assert page.panels() == [], "keys in a field belong to the field"
    page.one("#text").clear()


def test_arrows_skip_what_the_filter_hides(page: Page):
    Select(page.one("#state")).select_by_visible_text("known")
    page.browser.execute_script("arguments[0].focus()", page.cell(CELL))
    page.keys(Keys.ARROW_DOWN)
    assert page.focused() == f"sessions-stick@{HTTP}"


def test_a_narrow_window_shows_every_column_and_needs_no_scrolling_sideways(page: Page):
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        page.go()
        assert page.browser.execute_script("return document.documentElement.scrollWidth") <= 390
        for target in (LEGACY, HTTP, NEXT, LATEST):
            cell = page.cell(f"stop-conditions@{target}")
            assert cell.rect["width"] >= 60
            assert cell.rect["height"] >= 24
            assert cell.rect["x"] + cell.rect["width"] <= 390
        page.go(CELL)
        page.until(lambda: page.panels() == [CELL])
        assert page.one(".panel:target").rect["width"] == 390
        assert page.browser.execute_script("return document.querySelector('.panel:target').scrollWidth") <= 390
        page.one(".panel:target .close").click()
        page.until(lambda: page.panels() == [])
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_without_its_script_the_page_shows_everything_and_opens_cells(page: Page, tmp_path: Path):
    page.browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        page.go()
        assert len(page.rows()) == len(load_plan().bullets)
        assert not page.one(".filter").is_displayed()
        page.cell(CELL).click()
        page.until(lambda: page.panels() == [CELL])
        page.one(".panel:target .close").click()
        page.until(lambda: page.panels() == [])
    finally:
        page.browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_what_a_stack_says_is_text(page: Page):
    red = f"results-in-order@{LATEST}"
    page.go(red)
    page.until(lambda: page.panels() == [red])
    assert "<script>alert(1)</script>" in page.one(".panel:target").text
    assert State.RED in page.cell(red).get_attribute("aria-label")
