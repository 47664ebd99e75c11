"""A real headless Chromium, spoken to over a pipe by the Chrome DevTools Protocol."""

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

from waiting import HANG

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
