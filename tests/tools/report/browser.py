"""A headless Chromium for tests, driven over pipes with nothing but the standard library."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_PATIENCE = 60.0


def find_browser() -> str | None:
    """Where a Chromium is, if there is one."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


needs_browser = pytest.mark.skipif(
    find_browser() is None, reason=f"no browser is installed: one of {', '.join(_NAMES)}"
)


class Page:
    """One tab. What the page logs as an error, or throws, is kept in `errors`."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._buffer, self._id, self._session = b"", 0, ""
        self._events: list[str] = []
        self.errors: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, path: Path) -> None:
        """Loads a file, and waits until it has been drawn."""
        self._events.clear()
        self._call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + _PATIENCE
        while "Page.loadEventFired" not in self._events:
            self._read(deadline)
        self.settle()

    def settle(self) -> None:
        """Waits for two frames: what was asked to be drawn has been."""
        frames = "new Promise(f => requestAnimationFrame(() => requestAnimationFrame(f)))"
        self.run(frames)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        found = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        """What a person reads in an element."""
        return str(self.run(f"document.querySelector({selector!r}).innerText"))

    def resize(self, width: int, height: int, *, phone: bool = False, scale: float = 1) -> None:
        """Another window."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=phone,
        )
        self._call("Emulation.setTouchEmulationEnabled", enabled=phone)
        self.settle()

    def prefer(self, scheme: str) -> None:
        """Light or dark, as the system says."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._call("Emulation.setEmulatedMedia", features=[feature])
        self.settle()

    def point(
        self, selector: str, x: float, y: float, kind: str = "mouseMoved", **more: Any
    ) -> None:
        """The mouse at a place in an element, in shares of its width and height."""
        self.run(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        self.settle()
        box = self.run(
            f"(b => [b.left, b.top, b.width, b.height])"
            f"(document.querySelector({selector!r}).getBoundingClientRect())"
        )
        place = {"x": box[0] + x * box[2], "y": box[1] + y * box[3]}
        self._call("Input.dispatchMouseEvent", type=kind, **place, **more)
        self.settle()

    def click(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """A click."""
        self.point(selector, x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.point(selector, x, y, kind, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """A key."""
        text = {"text": key} if len(key) == 1 else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def screenshot(self, path: Path, *, whole: bool = False) -> Path:
        """A PNG of what is visible, or of the whole page."""
        data = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(data["data"]))
        return path

    def pdf(self, path: Path) -> Path:
        """The page as it is printed."""
        data = self._call(
            "Page.printToPDF", printBackground=True, paperWidth=8.27, paperHeight=11.69
        )
        path.write_bytes(base64.b64decode(data["data"]))
        return path

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._id += 1
        number = self._id
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _PATIENCE
        while True:
            answer = self._read(deadline)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select(
                [self._receive], [], [], max(0, deadline - time.monotonic())
            )
            assert ready, "the browser does not answer"
            data = os.read(self._receive, 1 << 20)
            assert data, "the browser ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        self._events.append(method)
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:600])
        if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(json.dumps(params["args"])[:600])
        if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        if method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "data:", "about:")):
                self.errors.append(f"asked the network for {url}")


@contextmanager
def browser() -> Iterator[Page]:
    """A browser with one empty page."""
    program = find_browser()
    assert program is not None
    to_browser, send = os.pipe()
    receive, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        ]

        def as_three_and_four() -> None:  # where Chromium reads commands, and writes answers
            ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser)]
            for place, end in zip((3, 4), ends, strict=True):
                os.dup2(end, place)
                os.close(end)

        process = subprocess.Popen(
            command,
            close_fds=False,
            preexec_fn=as_three_and_four,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Page(send, receive)
        finally:
            os.close(send)
            process.terminate()
            process.wait(_PATIENCE)
            os.close(receive)
