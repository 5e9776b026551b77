"""The page in a browser: it says nothing to the console, sorts, goes by keyboard, and fits a phone.

They need Chromium and Playwright's Python package, which drives it, and are skipped where one is missing:
`apt-get install chromium` and `pip install 'fusegen[browser]'`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fusegen.reporting.pages import page, page_of_two
from fusegen.reporting.reading import read
from fusegen.reporting.state import State
from tests.reporting.states import COPY, JOINED, PROGRAM, ROWS, hostile, proven, state

try:
    from playwright.sync_api import sync_playwright
except ImportError:
    sync_playwright = None

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
WHY = (
    "a browser is missing here, in which the page would be tried: apt-get install chromium; "
    "pip install 'fusegen[browser]'"
)
pytestmark = pytest.mark.skipif(CHROMIUM is None or sync_playwright is None, reason=WHY)

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield found
        found.close()


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens a page; whatever it says to the console, or fetches, is wrong."""
    said: list[str] = []
    contexts: list[Any] = []

    def opened(text: str, width: int = 1280, scheme: str = "light", **options: Any) -> Any:
        file = tmp_path / f"page{len(contexts)}.html"
        file.write_text(text, encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, **options)
        contexts.append(context)
        shown = context.new_page()
        shown.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        shown.on("pageerror", lambda error: said.append(f"error: {error}"))
        shown.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
        shown.on(
            "request", lambda request: said.append(f"fetched: {request.url}") if request.url != file.as_uri() else 0
        )
        shown.goto(file.as_uri())
        return shown

    yield opened
    for context in contexts:
        context.close()
    assert not said


def several() -> str:
    return page(state(ROWS, PROGRAM, JOINED, COPY))


@pytest.mark.parametrize("width", [320, 360, 400, 768, 1280])
@pytest.mark.parametrize("kind", ["one", "several", "two"])
def test_nothing_is_wider_than_the_window(kind: str, width: int, show: Open) -> None:
    two = page_of_two(state(ROWS, PROGRAM), state(ROWS, PROGRAM, target="hip:mi300x"))
    shown = show({"one": page(proven(ROWS)), "several": several(), "two": two}[kind], width)
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    for details in shown.query_selector_all("details"):
        details.evaluate("found => { found.open = true; }")
    assert shown.evaluate("document.documentElement.scrollWidth") <= width


def column(shown: Any, table: str, place: int) -> list[str]:
    texts: list[str] = shown.evaluate(
        "([table, place]) => [...document.querySelector(table).tBodies[0].rows].map(row => row.cells[place].innerText)",
        [table, place],
    )
    return texts


def test_a_table_sorts_up_and_down(show: Open) -> None:
    shown = show(page(state(ROWS)))
    head = shown.locator("table.candidates th", has_text="regs")
    button = head.locator("button")
    before = [int(text) for text in column(shown, "table.candidates", 3)]
    assert before != sorted(before), "the planner's order is another"
    button.click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert [int(text) for text in column(shown, "table.candidates", 3)] == sorted(before)
    button.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert [int(text) for text in column(shown, "table.candidates", 3)] == sorted(before, reverse=True)
    shown.locator("table.candidates th", has_text="expected").locator("button").click()
    assert head.get_attribute("aria-sort") is None
    assert shown.locator("table.candidates tr.chosen").count() == 1


def test_bytes_sort_by_their_number_and_not_by_their_text(show: Open) -> None:
    shown = show(page(state(ROWS)))
    shown.locator("table.bytes th", has_text="ideal").locator("button").click()
    found = column(shown, "table.bytes", 4)
    assert found[:3] == ["8.2 kB"] * 3
    assert found[3:] == ["67.1 MB"] * 3


def test_a_step_leads_to_its_lines_by_keyboard_alone(show: Open) -> None:
    shown = show(page(state(ROWS)))
    shown.keyboard.press("Tab")
    assert shown.evaluate("document.activeElement.textContent") == "Skip to the report"
    shown.keyboard.press("Enter")
    box = shown.locator(".graph a", has_text="h = add")
    box.focus()
    shown.keyboard.press("Enter")
    shown.locator("#walk").wait_for()
    (chain,) = state(ROWS).chains
    h = next(place for place, item in enumerate(chain.items) if item.value == "h")
    wanted = [link.line for link in chain.kernels[0].links if h in link.makes]
    assert shown.locator("tr.on th").inner_text() == "h"
    assert shown.locator("#walk-text").inner_text() == f"h: {len(wanted)} lines make it"
    seen = []
    for _ in wanted:
        shown.keyboard.press("n")
        seen.append(shown.evaluate("document.querySelector('.line.here').id"))
        assert shown.evaluate("document.activeElement.id") == seen[-1]
    assert seen == [f"c0k0s{line}" for line in wanted]
    shown.keyboard.press("n")
    assert shown.evaluate("document.querySelector('.line.here').id") == seen[0]
    shown.keyboard.press("p")
    assert shown.evaluate("document.querySelector('.line.here').id") == seen[-1]
    shown.keyboard.press("Escape")
    assert not shown.locator("#walk").is_visible()
    assert shown.locator(".on, .by, .here").count() == 0


def test_a_line_leads_to_its_step(show: Open) -> None:
    shown = show(page(state(ROWS)))
    shown.locator(".line", has_text="const float gelu = gelu_by_tanh").locator(".of a").click()
    shown.locator("#walk").wait_for()
    assert shown.evaluate("location.hash") == "#c0i6"
    assert shown.locator("tr:target th").inner_text() == "gelu"
    assert shown.locator("#walk-text").inner_text() == "gelu: 1 line makes it"


def test_everything_that_scrolls_is_reached_by_keyboard(show: Open) -> None:
    shown = show(several(), 360)
    out_of_reach = shown.evaluate(
        """() => [...document.querySelectorAll("*")].filter(found => {
            const style = getComputedStyle(found);
            const scrolls = /auto|scroll/.test(style.overflowX + style.overflowY)
                && (found.scrollWidth > found.clientWidth + 1 || found.scrollHeight > found.clientHeight + 1);
            return scrolls && found.tabIndex < 0 && !found.querySelector("a, button");
        }).map(found => found.outerHTML.slice(0, 80))"""
    )
    assert not out_of_reach


CONTRAST = """() => {
    const light = (colour) => {
        const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map(v => v / 255)
            .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (found) => {
        for (; found; found = found.parentElement) {
            const colour = getComputedStyle(found).backgroundColor;
            if (!/, 0\\)$|transparent/.test(colour)) return colour;
        }
        return getComputedStyle(document.body).backgroundColor;
    };
    const poor = new Map();
    for (const found of document.querySelectorAll("body *:not(svg *, script)")) {
        if (![...found.childNodes].some(node => node.nodeType === 3 && node.textContent.trim())) continue;
        const [a, b] = [light(getComputedStyle(found).color), light(behind(found))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) poor.set(found.tagName + "." + found.className, ratio.toFixed(2));
    }
    return [...poor];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(scheme: str, show: Open) -> None:
    """WCAG 2.1, 1.4.3: a contrast of 4.5 at the least."""
    shown = show(page(state(ROWS, PROGRAM)), scheme=scheme)
    paper = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    assert not shown.evaluate(CONTRAST)


def test_hostile_texts_do_nothing(show: Open) -> None:
    wild: State = read(State, hostile(state(ROWS, PROGRAM).to_json()), "wild")
    shown = show(page(wild))
    assert shown.locator("img").count() == 0
    assert shown.locator("script").count() == 1
    shown.locator("table.candidates th button").first.click()
    assert shown.evaluate("document.documentElement.scrollWidth") <= 1280


def test_a_script_of_someone_elses_does_not_run(browser: Any, tmp_path: Path) -> None:
    """The page's policy, should escaping ever fail."""
    file = tmp_path / "spoilt.html"
    spoilt = "<script>document.title = 'spoilt'</script><img src=x onerror=\"document.title = 'spoilt'\">"
    file.write_text(page(state(ROWS)).replace("</main>", f"{spoilt}</main>"))
    shown = browser.new_page()
    said: list[str] = []
    shown.on("console", lambda message: said.append(message.text))
    shown.goto(file.as_uri())
    assert shown.title() == "bias_gelu_residual_ln for cuda:h200"
    assert any("Content Security Policy" in text for text in said)
    assert shown.locator("table.candidates th button").count(), "its own script ran"
    shown.close()


def test_the_page_works_without_scripts(show: Open) -> None:
    shown = show(page(state(ROWS)), java_script_enabled=False)
    shown.locator(".graph a", has_text="h = add").click()
    assert shown.locator("tr:target th").inner_text() == "h"
    assert not shown.locator("#walk").is_visible()


def test_a_report_in_a_notebook_runs_in_its_frame(show: Open) -> None:
    from fusegen.reporting.report import Page

    shown = show(f"<!doctype html><title>n</title>{Page(state(ROWS))._repr_html_()}")
    frame = shown.frame_locator("iframe")
    frame.locator("table.candidates th button").nth(3).click()
    assert frame.locator("table.candidates th[aria-sort]").count() == 1
