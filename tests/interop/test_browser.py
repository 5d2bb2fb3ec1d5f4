"""The page of `report` in a real browser: it loads nothing, runs no code of a document, and works by keyboard.

    make test-browser

Needs Debian's chromium and chromium-driver, and selenium; skipped where they are not, unless REQUIRE_BROWSER is set.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import make_texts, write_jsonl
from tests.support.running import tokenize_here
from tests.tools.test_report import EVIL
from tokenmill.store.store import TokenStore
from tokenmill.tools.report import report

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
IS_REQUIRED = "REQUIRE_BROWSER" in os.environ
if not IS_REQUIRED:
    pytest.importorskip("selenium")
    if not (CHROMIUM and DRIVER):
        pytest.skip("chromium and chromedriver are not here", allow_module_level=True)

from selenium import webdriver  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--window-size=1200,900",
)
CONTRAST = """
const number = (colour) => colour.match(/[\\d.]+/g).map(Number);
const channel = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const plain = (layers) => {
  for (const layer of layers) { canvas.fillStyle = layer; canvas.fillRect(0, 0, 1, 1); }
  return [...canvas.getImageData(0, 0, 1, 1).data];
};
const behind = (element) => {
  const layers = [];
  for (let here = element; here; here = here.parentElement) layers.unshift(getComputedStyle(here).backgroundColor);
  return layers;
};
const found = {};
for (const element of document.querySelectorAll("h1, h2, h3, p, th, td, dt, dd, li, a, button, code, summary, .token, .snippet, .dim, #found")) {
  if (!element.textContent.trim() || !element.getClientRects().length) continue;
  const below = behind(element);
  const [ink, paper] = [plain([...below, getComputedStyle(element).color]), plain(below)].map(light);
  const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  const name = element.tagName + "." + element.className;
  found[name] = Math.min(found[name] || 99, ratio);
}
return found;
"""


class Browser:
    """A headless browser with a log of its console and of what it loads."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM and DRIVER, "needs chromium and chromedriver: apt-get install chromium-driver"
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in (*FLAGS, f"--user-data-dir={folder}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        self.prefer("light")

    def prefer(self, theme: str, media: str = "") -> None:
        """The preferences of the system; smooth scrolling would delay every click."""
        wishes = {"prefers-color-scheme": theme, "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wishes.items()]
        self.command("Emulation.setEmulatedMedia", media=media, features=features)

    def command(self, name: str, **parameters: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, parameters)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def open(self, page: Path, place: str = "") -> None:
        self.driver.get("about:blank")
        self.driver.get(page.as_uri() + place)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def find_all(self, selector: str) -> list[Any]:
        found: list[Any] = self.driver.find_elements("css selector", selector)
        return found

    def press(self, *keys: str) -> None:
        ActionChains(self.driver).send_keys(*keys).perform()

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    @property
    def title(self) -> str:
        """Which document is shown."""
        return self.text("#document-title")

    @property
    def focus(self) -> str:
        return str(self.run("const one = document.activeElement; return one.id || one.className || one.tagName"))

    def requests(self) -> list[str]:
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.driver.quit()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    folder = tmp_path_factory.mktemp("evil")
    texts = [*EVIL, "x" * 400, "", "漢字 😀\tnaïve\nline", *make_texts(60, seed=3)]
    path = write_jsonl(folder / "in <i>put.jsonl", texts, source=[f"{EVIL[0]}{n % 2}" for n in range(len(texts))])
    flags: dict[str, Any] = {"keep_keys": ["source"], "val_fraction": 0.2}
    return tokenize_here(path, folder / "store <img src=x onerror=hacked=4>", tokenizer="bytes", **flags)


@pytest.fixture(scope="module")
def page(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    report(store, path, seq_len=64)
    return path


@pytest.fixture(scope="module")
def supervised_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("supervised")
    (folder / "in.jsonl").write_text('{"prompt": "ask", "response": "yes"}\n' * 3)
    store = tokenize_here(
        folder / "in.jsonl", folder / "store", tokenizer="bytes", prompt_key="prompt", response_key="response"
    )
    report(store, folder / "report.html")
    return folder / "report.html"


def test_the_page_loads_nothing_and_complains_of_nothing(browser: Browser, page: Path) -> None:
    browser.requests()
    browser.driver.get_log("browser")
    browser.open(page)
    browser.find("#next").click()
    assert {url for url in browser.requests() if not url.startswith("data:")} == {page.as_uri()}
    assert browser.driver.get_log("browser") == []


def test_no_document_runs_anything(browser: Browser, page: Path) -> None:
    browser.open(page)
    shown = set()
    for _ in browser.find_all("#list li"):
        shown.add(browser.text("#text").replace("<eos>", ""))
        browser.find("#next").click()
    assert set(EVIL[:4]) <= shown
    assert browser.run("return [typeof hacked, document.querySelectorAll('img, main b, main i').length]") == [
        "undefined",
        0,
    ]
    assert browser.run("return document.querySelectorAll('#text svg, #text script').length") == 0
    assert browser.text("h1") == "store <img src=x onerror=hacked=4>"
    assert browser.driver.get_log("browser") == []


def test_control_characters_are_shown_as_symbols(browser: Browser, page: Path, store: TokenStore) -> None:
    browser.open(page)
    browser.find("#find").send_keys("bold")
    text = browser.text("#text")
    assert "␛" in text
    assert "<202E>" in text
    assert not set("\x1b\x07\u202e\u2028") & set(text)


def test_pointing_at_a_token_shows_its_id(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.find("#find").send_keys("漢字")
    tokens = browser.find_all("#text .token")
    browser.run("document.querySelector('#text').scrollIntoView({block: 'center', behavior: 'instant'})")
    ActionChains(browser.driver).move_to_element(tokens[0]).perform()
    assert browser.find("#tip").is_displayed()
    assert browser.text("#tip") == "ids 230 188 162 · token 0 · “漢”"
    ActionChains(browser.driver).move_to_element(tokens[2]).perform()
    assert browser.text("#tip") == "id 32 · token 6 · “ ”"
    tip, token = browser.find("#tip").rect, tokens[2].rect
    assert abs(tip["y"] - token["y"]) < 60
    ActionChains(browser.driver).move_to_element(browser.find("#find")).perform()
    assert not browser.find("#tip").is_displayed()


def test_everything_can_be_reached_and_used_by_keyboard(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.run("document.querySelector('#find').focus()")
    order = [browser.focus]
    for _ in range(4):
        browser.press(Keys.TAB)
        order.append(browser.focus)
    assert order[:4] == ["find", "previous", "next", "list"]
    assert order[4].startswith("token")
    assert browser.text("#tip").startswith("id")
    browser.run("scrollBy(0, 40)")
    assert browser.run(
        "return new Promise((done) => setTimeout(() => done(!document.querySelector('#tip').hidden), 100))"
    )
    first = browser.text("#tip")
    browser.press(Keys.ARROW_RIGHT)
    second = browser.text("#tip")
    assert "token 1 " in second
    assert second != first
    browser.press(Keys.ARROW_LEFT)
    assert browser.text("#tip") == first
    browser.press(Keys.END)
    assert "<eos>" in browser.text("#tip")
    outline = browser.run("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_keys_go_from_document_to_document(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.run("document.querySelector('#list').focus()")
    assert browser.title == "train, document 0"
    browser.press(Keys.ARROW_DOWN)
    assert browser.title == "train, document 1"
    browser.press("j")
    assert browser.title == "train, document 2"
    browser.press("k", "k")
    assert browser.title == "train, document 0"
    browser.press("k")
    assert browser.title == "train, document 0"
    browser.press(Keys.END)
    assert browser.title.startswith("val, document ")
    selected = browser.find_all("#list [aria-selected=true]")
    assert [item.get_attribute("id") for item in selected] == [
        browser.find("#list").get_attribute("aria-activedescendant")
    ]
    browser.press("/")
    assert browser.focus == "find"
    browser.press("j")
    assert browser.find("#find").get_attribute("value") == "j"


def test_arrows_up_and_down_move_between_lines(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.find("#find").send_keys("x" * 50)
    tokens = browser.find_all("#text .token")
    browser.run("arguments[0].focus()", tokens[3])
    browser.press(Keys.ARROW_DOWN)
    place = browser.run("return document.activeElement.group.start")
    assert place > 20
    left, below = tokens[3].rect, tokens[place].rect
    assert below["y"] > left["y"]
    assert abs(below["x"] - left["x"]) < 10
    browser.press(Keys.ARROW_UP)
    assert browser.run("return document.activeElement.group.start") == 3


def test_finding_text_and_ids_filters_and_marks(browser: Browser, page: Path, store: TokenStore) -> None:
    browser.open(page)
    total = len(browser.find_all("#list li"))
    find = browser.find("#find")
    find.send_keys("ONERROR")
    assert browser.text("#found") == f"1 of {total} documents"
    assert "".join(token.text for token in browser.find_all("#text .hit")) == "onerror"
    assert len([item for item in browser.find_all("#list li") if item.is_displayed()]) == 1
    find.clear()
    find.send_keys("#120")
    hits = browser.find_all("#text .hit")
    assert hits and {hit.text for hit in hits} == {"x"}
    find.send_keys("9999")
    assert browser.text("#found") == f"0 of {total} documents"
    find.send_keys(Keys.ESCAPE)
    assert browser.text("#found") == f"{total} documents"


def test_links_open_the_document_they_name(browser: Browser, page: Path) -> None:
    browser.open(page)
    for link in browser.find_all("#odd table a"):
        split, number = link.text.split(" ")
        browser.run("arguments[0].click()", link)
        assert browser.title == f"{split}, document {number}"
        assert browser.focus == "list"
    browser.open(page, "#val-1")
    assert browser.title == "val, document 1"


def test_the_theme_follows_the_system_until_it_is_chosen(browser: Browser, page: Path) -> None:
    def paper() -> str:
        return str(browser.run("return getComputedStyle(document.body).backgroundColor"))

    browser.open(page)
    light = paper()
    browser.prefer("dark")
    dark = paper()
    assert dark != light
    button = browser.find("#theme")
    assert button.get_attribute("aria-label") == "Switch to the light theme"
    button.send_keys(Keys.ENTER)
    assert paper() == light
    browser.open(page)
    assert paper() == light
    browser.find("#theme").click()
    assert paper() == dark
    browser.prefer("light")
    assert paper() == dark
    browser.run("localStorage.clear()")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_contrast_enough(browser: Browser, page: Path, supervised_page: Path, theme: str) -> None:
    for path in (page, supervised_page):
        browser.open(path)
        browser.run("document.documentElement.dataset.theme = arguments[0]", theme)
        found = browser.run(CONTRAST)
        assert len(found) > 20
        assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}


def test_a_narrow_window_is_not_scrolled_sideways(browser: Browser, page: Path) -> None:
    browser.command("Emulation.setDeviceMetricsOverride", width=375, height=700, deviceScaleFactor=1, mobile=True)
    try:
        browser.open(page)
        assert browser.run("return document.documentElement.scrollWidth") == 375
        sizes = browser.run(
            "return [...document.querySelectorAll('.plot text')].map((text) => text.getBoundingClientRect().height)"
        )
        assert min(size for size in sizes if size) > 8
    finally:
        browser.command("Emulation.clearDeviceMetricsOverride")


def test_on_paper_it_is_light_and_has_no_controls(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.run("document.documentElement.dataset.theme = 'dark'")
    browser.prefer("light", media="print")
    try:
        shown = browser.run(
            "return ['nav', '#theme', '#list', '.finder', '#text', '#lengths'].map("
            "(name) => getComputedStyle(document.querySelector(name)).display !== 'none')"
        )
        assert shown == [False, False, False, False, True, True]
        assert browser.run("return getComputedStyle(document.documentElement).colorScheme") == "light"
    finally:
        browser.prefer("light")
    assert len(browser.command("Page.printToPDF")["data"]) > 10_000


def test_trained_tokens_are_marked_and_announced(browser: Browser, supervised_page: Path) -> None:
    browser.open(supervised_page)
    trained = [token.text for token in browser.find_all("#text .trained")]
    assert trained == ["y", "e", "s", "<eos>"]
    first = browser.find_all("#text .token")[0]
    browser.run("arguments[0].focus()", first)
    assert browser.text("#tip").endswith(" · not trained")
    browser.press(Keys.END)
    assert browser.text("#tip").endswith(" · trained")


def test_without_scripts_all_figures_are_there(browser: Browser, page: Path) -> None:
    browser.command("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(page)
        assert browser.find("noscript p").is_displayed()
        assert not browser.find("#panes").is_displayed()
        assert not browser.find("#theme").is_displayed()
        assert browser.find("#lengths svg").is_displayed()
    finally:
        browser.command("Emulation.setScriptExecutionDisabled", value=False)


def test_a_table_that_goes_on_has_a_shadow_at_that_edge(browser: Browser, page: Path) -> None:
    browser.command("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
    try:
        browser.open(page)
        wide = "[...document.querySelectorAll('.scroll')].find((one) => one.scrollWidth > one.clientWidth + 60)"
        place = f"const one = {wide}; one.scrollIntoView({{block: 'center'}}); one.scrollLeft = arguments[0];"
        place += "const box = one.getBoundingClientRect(); return [box.left, box.right, box.top + scrollY];"

        def edges(scrolled: int) -> list[bytes]:
            """Pixels at the left edge and at the right edge, above the text of the first row."""
            left, right, top = browser.run(place, scrolled)
            clips = [{"x": x, "y": top, "width": 4, "height": 3, "scale": 1} for x in (left + 1, right - 5)]
            return [browser.command("Page.captureScreenshot", clip=clip)["data"] for clip in clips]

        start, end = edges(0), edges(10_000)
        assert start[0] != start[1], "there is a shadow at the right"
        assert end[0] != start[0], "there is a shadow at the left"
        assert start[0] == end[1], "there is none where the table ends"
    finally:
        browser.command("Emulation.clearDeviceMetricsOverride")
