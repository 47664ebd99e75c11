"""The page of a report in a real Chromium: nothing is logged or requested, axe finds nothing, and it plays."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Browser, Page, find_chromium
from damage import flip
from report_data import write_shown

import rbtool
from rbtool.core.testing.datasets import write_walks

CHROMIUM = find_chromium()
AXE = Path(os.environ.get("AXE_CORE", Path(__file__).parents[3] / "build/npm/node_modules/axe-core/axe.min.js"))
WIDTHS = (360, 1600)
PAGES = ("plain", "hostile", "two", "damaged", "lost", "empty")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: name one in $CHROMIUM"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    running = Browser(str(CHROMIUM), tmp_path_factory.mktemp("chromium"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a page of each kind."""
    folder = tmp_path_factory.mktemp("pages")
    plain, hostile = write_shown(folder / "plain"), write_shown(folder / "hostile", hostile=True)
    write_walks(folder / "walks", [(5, "terminated"), (1, "open")])
    write_walks(folder / "empty", [])
    damaged = Path(shutil.copytree(folder / "walks", folder / "damaged"))
    (damaged / "action.memmap").write_bytes((damaged / "action.memmap").read_bytes()[:-3])
    lost = Path(shutil.copytree(folder / "walks", folder / "lost"))
    flip(lost / ".rbtool" / "episodes" / "length.memmap", 0)
    shown = {"plain": [plain], "hostile": [hostile], "two": [plain, folder / "walks"], "damaged": [damaged],
             "lost": [lost], "empty": [folder / "empty"]}  # fmt: skip
    for name, datasets in shown.items():
        rbtool.report(datasets, folder / f"{name}.html")
    return folder


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_logged_or_requested_and_nothing_is_wider_than_the_window(
    browser: Browser, pages: Path, name: str, width: int
) -> None:
    with browser.open(pages / f"{name}.html", width) as page:
        assert (page.messages, page.requests) == ([], [])
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate("document.querySelectorAll('main section').length") >= 7
        assert page.evaluate("document.querySelectorAll('[style], [onerror], [onload], link, iframe').length") == 0


@pytest.mark.skipif(
    not AXE.is_file(), reason="axe-core is not there: make test-browser fetches it, or name it in $AXE_CORE"
)
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing(browser: Browser, pages: Path, name: str, width: int, dark: bool) -> None:
    with browser.open(pages / f"{name}.html", width, dark=dark) as page:
        page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        page.evaluate(AXE.read_text(encoding="utf-8") + ";0")
        found = page.evaluate(
            "axe.run(document, {resultTypes: ['violations']}).then(all => all.violations.map("
            "one => [one.id, one.nodes.length, one.nodes[0].html, one.nodes[0].failureSummary]))"
        )
        assert found == []


def test_text_of_a_dataset_stays_text(browser: Browser, pages: Path) -> None:
    with browser.open(pages / "hostile.html") as page:
        assert page.evaluate("document.title") == f"{pages / 'hostile'} – dataset report"
        assert page.evaluate("document.querySelectorAll('main script:not([type]), a[href^=javascript]').length") == 0
        assert page.evaluate("document.body.innerText.includes('<script>document.title')")
        assert page.evaluate("[...document.images].every(one => one.src.startsWith('data:image/'))")


def at(page: Page, place: int) -> list[str]:
    """Move to a step of the first episode; return what is shown of it."""
    page.evaluate(
        "{const slider = document.querySelector('.episode input'); "
        f"slider.value = {place}; slider.dispatchEvent(new Event('input'))}}"
    )
    values = "[...document.querySelectorAll('.episode:not([hidden]) .now')].map(one => one.textContent)"
    return page.evaluate(f"[document.querySelector('.episode output').textContent, ...{values}]")


def test_the_slider_moves_through_an_episode(browser: Browser, pages: Path) -> None:
    with browser.open(pages / "plain.html") as page:
        number = int(page.evaluate("document.querySelector('.episode h4').textContent.match(/\\d+/)[0]"))
        dataset = rbtool.load_dataset(pages / "plain")
        rows = [row for row in range(36) if int(dataset[row]["episode"]) == number]
        for place in (0, 5, 11):
            row = dataset[rows[place]]
            said, reward, first, second = at(page, place)
            assert said == f"step {place} of 11, frame of step {place}"
            expected = [float(row["next", "reward"]), *row["action"].tolist()]
            assert [float(reward), float(first), float(second)] == pytest.approx(expected, rel=1e-3)
        assert page.evaluate("document.querySelector('.episode .frame image').getAttribute('x')") == str(-11 * 24)


def test_an_episode_is_chosen_and_played(browser: Browser, pages: Path) -> None:
    with browser.open(pages / "plain.html") as page:
        page.evaluate(
            "{const c = document.querySelector('.player select'); c.selectedIndex = 1; "
            "c.dispatchEvent(new Event('change')); document.querySelectorAll('.episode button')[1].click()}"
        )
        assert page.evaluate("[...document.querySelectorAll('.episode')].map(one => one.hidden)") == [True, False, True]
        page.wait_until("document.querySelectorAll('.episode input')[1].value === '11'")
        page.wait_until("document.querySelectorAll('.episode button')[1].textContent === 'Play'")


@pytest.mark.parametrize("still", [False, True])
def test_strips_move_unless_motion_is_unwanted(browser: Browser, pages: Path, still: bool) -> None:
    with browser.open(pages / "plain.html", still=still) as page:
        assert page.evaluate("document.querySelector('.strip button').textContent") == ("Play" if still else "Pause")
        if not still:
            page.wait_until("document.querySelector('.strip image').getAttribute('x') !== '0'")


def test_everything_is_open_on_paper(browser: Browser, pages: Path) -> None:
    with browser.open(pages / "plain.html") as page:
        assert page.pdf().startswith(b"%PDF-")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.evaluate("document.querySelectorAll('details:not([open])').length") == 0
        page.emulate(800, media="print")
        assert page.evaluate("[...document.querySelectorAll('.episode')].every(one => one.offsetHeight > 0)")
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.evaluate("document.querySelectorAll('details[open]').length") == 0


def test_the_page_reads_without_scripts(browser: Browser, pages: Path) -> None:
    with browser.open(pages / "plain.html") as page:
        page.send("Emulation.setScriptExecutionDisabled", value=True)
        page.send("Page.reload")
        page.wait_until("document.readyState === 'complete'")
        assert page.evaluate("[...document.querySelectorAll('.controls, .choice')].every(one => one.hidden)")
        assert page.evaluate("[...document.querySelectorAll('.episode')].every(one => one.offsetHeight > 0)")
