"""The page of a report in a real browser: it draws its lanes, works by keyboard and on a phone, and asks for nothing.

Skipped where no Chromium is installed (`apt-get install chromium`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.report.runs import about, measured
from tests.support.chromium import Page, chromium, find
from tests.support.marks import daily
from tests.support.png import colours
from zeroweave.report.course import Courses
from zeroweave.report.page import page

PROGRAM = find()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine")
PHONE = 390, 844


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    measured(6, 1, about(6)).save(folder / "run.json")
    path = folder / "report.html"
    path.write_text(page(Courses.load(folder / "run.json"), "train.py", datetime(2030, 1, 2, tzinfo=UTC)))
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    assert PROGRAM is not None
    with chromium(PROGRAM) as opened:
        yield opened


@pytest.fixture
def opened(browser: Page, written: Path) -> Iterator[Page]:
    """The page, in a wide and light window; nothing may be said in the console, and nothing else be asked for."""
    browser.size(1280, 900)
    browser.prefer("light")
    browser.requested.clear()
    browser.open(written)
    yield browser
    assert browser.errors == []
    assert browser.requested == [written.as_uri()]


def colour(shown: Page, variable: str) -> bytes:
    """The three bytes of one of the page's colours."""
    value = shown.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--{variable}').trim()")
    return bytes.fromhex(value.removeprefix("#"))


def readout(shown: Page) -> str:
    return shown.evaluate("document.getElementById('readout').textContent")


def overflow(shown: Page) -> int:
    """CSS pixels by which the page is wider than the window."""
    return shown.evaluate("document.documentElement.scrollWidth - innerWidth")


@daily("scheme", ["light"], ["dark"])
def test_a_screenshot_shows_the_lanes_and_the_curve(opened: Page, scheme: str) -> None:
    opened.size(420, 600)
    opened.prefer(scheme)
    seen = colours(opened.screenshot("#chart"))
    assert seen.most_common(1)[0][0] == colour(opened, "paper")
    for kind in ("forward", "backward", "update", "gather", "reduce", "copy", "wait"):
        assert seen[colour(opened, kind)] > 50, kind
    assert seen[colour(opened, "area")] > 5000, "the curves of memory"
    curves = colours(opened.screenshot("#steps figure:last-of-type"))
    assert curves[colour(opened, "forward")] > 300, "the curve of the loss"


def test_light_and_dark_are_different_pages(opened: Page) -> None:
    light = colour(opened, "paper")
    opened.prefer("dark")
    assert sum(colour(opened, "paper")) < 200 < 700 < sum(light)


def test_the_lanes_are_read_by_keyboard(opened: Page) -> None:
    reached = "document.activeElement.id"
    for _ in range(40):
        opened.press("Tab")
        if opened.evaluate(reached) == "chart":
            break
    assert opened.evaluate(reached) == "chart", "by Tab"
    opened.press("ArrowRight")
    assert readout(opened).startswith("measured, computation: ")
    first = readout(opened)
    opened.press("ArrowRight", "ArrowRight", "ArrowLeft")
    assert readout(opened) != first
    opened.press("ArrowDown")
    assert re.fullmatch(r"measured, gathers: Unshard layers\.\d: \d+\.\d{3} ms from \d+\.\d{3} ms", readout(opened))
    opened.press("End", "ArrowRight")
    assert "Unshard layers" in readout(opened), "at the end it stays"
    for _ in range(12):
        opened.press("ArrowDown")
    assert readout(opened).startswith("predicted, copies: ")
    before = opened.evaluate("document.getElementById('chart').scrollWidth")
    opened.press("+", "+", "+")
    assert opened.evaluate("document.getElementById('chart').scrollWidth") >= 7.9 * before
    assert opened.evaluate("document.getElementById('chart').scrollLeft") > 0, "what was chosen is in sight"
    assert opened.evaluate("document.getElementById('zoom').textContent") == "× 8"
    opened.press("Home")
    opened.drawn()
    assert opened.evaluate("document.querySelectorAll('.lane text').length") > 5, "long bars have names"
    opened.press("Enter")
    row = opened.evaluate("document.activeElement.innerText")
    assert opened.evaluate("document.getElementById('instructions').open")
    assert "Offload layers.0" in row
    opened.evaluate("document.getElementById('chart').focus()")
    opened.press("0")
    assert opened.evaluate("document.getElementById('chart').scrollWidth") == before


def test_another_measured_step_is_chosen(opened: Page) -> None:
    visible = """[...document.querySelectorAll('.picture')].filter(each => each.offsetHeight)
        .map(each => each.dataset.course).join()"""
    columns = "[...document.querySelectorAll('#instructions thead th')].filter(each => each.offsetWidth).length"
    opened.evaluate("document.getElementById('instructions').open = true")
    assert opened.evaluate(visible) == "measured,predicted" and opened.evaluate(columns) == 10
    opened.evaluate("document.getElementById('pick-measured').focus()")
    opened.press("ArrowRight", "ArrowRight")
    assert opened.evaluate(visible) == "slowest,predicted" and opened.evaluate(columns) == 10
    assert "slowest: start" in opened.evaluate("document.querySelector('#instructions thead').innerText")


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844), (320, 568)])
def test_it_fits_the_window_and_the_phone(opened: Page, width: int, height: int) -> None:
    opened.size(width, height, mobile=width < 400)
    assert overflow(opened) <= 0
    small = """[...document.querySelectorAll('button, nav a, summary, .picks label')]
        .filter(each => each.offsetHeight && each.offsetHeight < 24).length"""
    assert opened.evaluate(small) == 0, "what is tapped is large enough"


def test_a_tap_tells_of_a_bar(opened: Page) -> None:
    opened.size(*PHONE, mobile=True)
    at = opened.evaluate(
        """(() => { const bar = document.querySelector('[data-lane=reductions] rect');
        bar.scrollIntoView({block: 'center', behavior: 'instant'}); const box = bar.getBoundingClientRect();
        return [box.x + box.width / 2, box.y + box.height / 2]; })()"""
    )
    opened.click(*at)
    assert readout(opened).startswith("measured, reductions: Reduce layers.")


def test_it_prints(opened: Page) -> None:
    opened.evaluate("document.getElementById('chart').focus()")
    opened.press("ArrowRight", "+", "+", "+")
    opened.prefer("dark", media="print")
    assert colour(opened, "paper") == b"\xff\xff\xff"
    assert opened.evaluate("document.getElementById('wide').clientWidth <= document.body.clientWidth"), "all of it"
    shown = "[...document.querySelectorAll('.axis text')].filter(each => each.getClientRects().length).length"
    assert opened.evaluate(shown) < 12, "the time axis as it is without zooming"
    assert opened.evaluate("document.querySelector('nav').offsetHeight") == 0
    printed = opened.printed()
    assert printed.startswith(b"%PDF") and 1 < printed.count(b"/Type /Page\n") < 12


def test_without_scripts_everything_is_there(browser: Page, written: Path) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(written)
        assert browser.evaluate("document.querySelector('.lane rect').getBoundingClientRect().width") > 0
        assert browser.evaluate("document.querySelector('.controls').offsetHeight") == 0, (
            "what would not work is hidden"
        )
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


def test_no_text_is_faint(opened: Page) -> None:
    """The contrast of text, WCAG's 4.5, on paper and on cards; and of bars, 3."""
    for scheme in ("light", "dark"):
        opened.prefer(scheme)
        grounds = [luminance(colour(opened, ground)) for ground in ("paper", "card")]
        for variable, least in {
            "ink": 4.5,
            "soft": 4.5,
            "link": 4.5,
            **dict.fromkeys(("forward", "other"), 3.0),
        }.items():
            own = luminance(colour(opened, variable))
            for ground in grounds:
                low, high = sorted((own, ground))
                assert (high + 0.05) / (low + 0.05) >= least, (scheme, variable)


def luminance(rgb: bytes) -> float:
    """WCAG's relative luminance of a colour."""
    parts = (value / 255 for value in rgb)
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
