"""The page of a report in a real Chromium: it logs and requests nothing, is accessible, and plays episodes."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from damage import flip
from made_datasets import write_shown
from waiting import HANG

import rbtool
from rbtool.core.testing.datasets import write_walks

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_chromium() -> str | None:
    """Where a Chromium is: `$CHROMIUM`, or one on the path."""
    return os.environ.get("CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)


class BrowserError(AssertionError):
    """The browser reports an error, or does not answer."""


class Page:
    """A tab. `messages` are what was logged and thrown, `requests` the addresses asked for, but for its own."""

    def __init__(self, browser: Browser, session: str, address: str) -> None:
        self._browser = browser
        self.session = session
        self.address = address
        self.messages: list[str] = []
        self.requests: list[str] = []

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command to this tab and return its result."""
        return self._browser.send(method, session=self.session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """Run JavaScript, outside the page's content security policy, and return its value; promises are awaited."""
        found = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise BrowserError(json.dumps(found["exceptionDetails"])[:2000])
        return found["result"].get("value")

    def wait_until(self, condition: str) -> None:
        """Wait until a condition holds, and take note of what happened before."""
        end = time.monotonic() + HANG
        while not self.evaluate(condition):
            if time.monotonic() > end:
                raise BrowserError(f"{condition} did not come true")
            self._browser.wait(0.05)
        self._browser.wait(0.1)

    def emulate(self, width: int, *, dark: bool = False, still: bool = True, media: str = "screen") -> None:
        """Set the width of the window in pixels, the colour scheme, whether motion is reduced, and the medium."""
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        self.send("Emulation.setEmulatedMedia", media=media, features=features)
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
        )

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        found = self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(found["data"]))

    def pdf(self) -> bytes:
        """Print the page on paper."""
        self.send("Emulation.setEmulatedMedia", media="", features=[])
        return base64.b64decode(self.send("Page.printToPDF", printBackground=True)["data"])

    def see(self, event: dict[str, Any]) -> None:
        """Take note of an event."""
        method, facts = event["method"], event["params"]
        if method == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(facts["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled":
            self.messages.append(json.dumps(facts["args"])[:500])
        elif method == "Log.entryAdded":
            self.messages.append(json.dumps(facts["entry"])[:500])
        elif method == "Network.requestWillBeSent":
            url = facts["request"]["url"]
            if url != self.address and not url.startswith("data:"):
                self.requests.append(url)


class Browser:
    """A running Chromium with a profile of its own in `folder`."""

    def __init__(self, program: str, folder: Path) -> None:
        self._pages: dict[str, Page] = {}
        self._numbers = itertools.count(1)
        self._rest = b""
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        command = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
            "--disable-background-networking", "--disable-dev-shm-usage", "--remote-debugging-pipe",
            "--hide-scrollbars", f"--user-data-dir={folder}", "about:blank",
        ]  # fmt: skip
        # Chromium reads commands from descriptor 3 and writes to 4.
        script = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "chromium", *command], pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"HOME": str(folder)},
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)

    def send(self, method: str, *, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; what happens meanwhile goes to the pages."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        data = json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while True:
            answer = self._receive(HANG)
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                return answer["result"]
            self._dispatch(answer)

    def _dispatch(self, event: dict[str, Any]) -> None:
        page = self._pages.get(event.get("sessionId", ""))
        if page is not None and "method" in event:
            page.see(event)

    def wait(self, seconds: float) -> None:
        """Take note of events for so long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                self._dispatch(self._receive(left))

    def _receive(self, seconds: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._read], [], [], seconds)[0]:
                raise TimeoutError("Chromium does not answer")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise BrowserError("Chromium has ended")
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    @contextlib.contextmanager
    def open(self, file: Path, width: int = 1600, *, dark: bool = False, still: bool = True) -> Iterator[Page]:
        """Open a file in a new tab and wait until it is loaded."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, file.as_uri())
        try:
            for domain in ("Page", "Runtime", "Log", "Network"):
                page.send(f"{domain}.enable")
            page.emulate(width, dark=dark, still=still)
            page.send("Page.navigate", url=page.address)
            page.wait_until("document.readyState === 'complete' && location.href !== 'about:blank'")
            yield page
        finally:
            self._pages.pop(session)
            self.send("Target.closeTarget", targetId=target)

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)


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
def test_nothing_is_logged_or_requested_and_nothing_is_wider_than_the_window(browser, pages, name, width) -> None:
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


def test_texts_of_a_dataset_stay_text(browser: Browser, pages: Path) -> None:
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
            said, *values = at(page, place)
            assert said == f"step {place} of 11, frame of step {place}"
            expected = [row["choice"], *row["observation", "state"], *row["action"], row["next", "reward"]]
            assert [*map(float, values)] == pytest.approx([*map(float, expected)], rel=1e-3, nan_ok=True)
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
