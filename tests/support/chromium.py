"""A headless Chromium, told what to do through its debugging pipe, with no library in between.

Messages are JSON objects with a 0 byte behind each: https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_PATIENCE = 60.0
"""Seconds without a word after which it counts as hung."""
_KEYS = {"Enter": "\r", "Tab": "\t"}
"""Keys that stand for a character, beside those that are one."""


def find() -> str | None:
    """The program, if the machine has one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One open page. errors: what it has written to the console as errors and warnings, and exceptions of its script.
    requested: every address that it has asked for.
    """

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._read = send, receive, b""
        self._number, self._session = 0, ""
        self.errors: list[str] = []
        self.requested: list[str] = []
        self._loaded = False
        (target,) = (each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        self.call("Network.emulateNetworkConditions", **offline)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        """The next message; notes what it tells."""
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._receive], [], [], _PATIENCE)
            assert ready, f"Chromium has said nothing for {_PATIENCE:g} s"
            more = os.read(self._receive, 1 << 16)
            assert more, "Chromium is gone"
            self._read += more
        text, _, self._read = self._read.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        told = message.get("params", {})
        match message.get("method"):
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                self.errors.append(f"{told['type']}: {[each.get('value') for each in told['args']]}")
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(told["exceptionDetails"]))
            case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
                self.errors.append(told["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requested.append(told["request"]["url"])
            case "Page.loadEventFired":
                self._loaded = True
        return message

    def open(self, path: Path) -> None:
        """Loads a file."""
        self._loaded = False
        failure = self.call("Page.navigate", url=path.resolve().as_uri()).get("errorText")
        assert not failure, failure
        while not self._loaded:
            self._next()

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page, or of what it promises."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def drawn(self) -> None:
        """Returns when the page has drawn what it does now: what it draws in answer to that, too."""
        frame = "await new Promise(requestAnimationFrame);"
        self.evaluate(f"(async () => {{ {3 * frame} }})()")

    def press(self, *keys: str) -> None:
        """Presses and releases keys, by their names in `KeyboardEvent.key`."""
        for key in keys:
            text = key if len(key) == 1 else _KEYS.get(key, "")
            code = {"Tab": 9, "Enter": 13, " ": 32}.get(key, 0)
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text, windowsVirtualKeyCode=code)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def size(self, width: int, height: int, mobile: bool = False) -> None:
        """How large the window is, in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def prefer(self, scheme: str, media: str = "") -> None:
        """What the user's settings say: "light" or "dark". `media`: "print" to lay the page out as for paper."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", media=media, features=[feature])

    def click(self, x: float, y: float) -> None:
        """Presses and releases the mouse at a place of the window, in CSS pixels."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, selector: str) -> bytes:
        """A PNG of the first element that a CSS selector finds."""
        box = self.evaluate(
            f"""(() => {{ const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect();
            return {{x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height}}; }})()"""
        )
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip={**box, "scale": 1})
        return base64.b64decode(shot["data"])

    def printed(self) -> bytes:
        """A PDF on A4."""
        return base64.b64decode(self.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)["data"])


@contextmanager
def chromium(program: str) -> Iterator[Page]:
    """A browser without a network, for as long as the block lasts."""
    ours, theirs = zip(*(_pipe(reads) for reads in (True, False)), strict=True)
    quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
    with TemporaryDirectory(ignore_cleanup_errors=True) as home:
        actions: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_RDWR, 0) for n in range(3)]
        actions += [(os.POSIX_SPAWN_DUP2, end, number) for number, end in enumerate(theirs, 3)]
        arguments = [program, *options, *quiet, f"--user-data-dir={home}", "about:blank"]
        process = os.posix_spawn(program, arguments, os.environ, file_actions=actions)
        for end in theirs:
            os.close(end)
        try:
            yield Page(*ours)
        finally:
            for end in ours:
                os.close(end)
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def _pipe(reads: bool) -> tuple[int, int]:
    """Our end of a pipe and that of the browser, which reads from it or writes; its is not among the first ten."""
    read, write = os.pipe()
    ours, theirs = (write, read) if reads else (read, write)
    lifted = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(theirs)
    return ours, lifted
