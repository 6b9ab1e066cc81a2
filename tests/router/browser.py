"""A headless Chromium over its DevTools protocol: as much of it as a page's test needs."""

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WITHIN_S = 30


def browser_path() -> str | None:
    """The browser of this machine; None if there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """One page in the browser. Calls raise AssertionError with the page's own error."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._count = socket, 0
        self.events: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; events that come meanwhile are kept."""
        self._count += 1
        self._socket.send(json.dumps({"id": self._count, "method": method, "params": params}))
        while True:
            data = json.loads(self._socket.recv(timeout=WITHIN_S))
            if data.get("id") == self._count:
                assert "error" not in data, data
                return dict(data["result"])
            self.events.append(data)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until a JavaScript expression holds."""
        deadline = time.monotonic() + WITHIN_S
        while not self.run(condition):
            assert time.monotonic() < deadline, f"{condition} never held"
            time.sleep(0.05)

    def open(self, url: str) -> None:
        """Loads a page and waits for it."""
        self.call("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href.startsWith({url!r})")

    def press(self, key: str, modifiers: int = 0) -> None:
        """One key as a user presses it; modifiers: 2 is Ctrl, 8 is Shift."""
        codes = {"Tab": 9, "Enter": 13, " ": 32, "End": 35, "Home": 36, "ArrowDown": 40}
        text = {"Enter": "\r", " ": " "}.get(key, "")
        same = {"key": key, "windowsVirtualKeyCode": codes[key], "modifiers": modifiers}
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self.call("Input.dispatchKeyEvent", **down, **same)
        self.call("Input.dispatchKeyEvent", type="keyUp", **same)

    def write(self, text: str) -> None:
        """Text into what has the focus."""
        self.call("Input.insertText", text=text)

    def look(self, width: int, height: int, scheme: str) -> None:
        """Size of the window in pixels, and "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def screenshot(self, path: Path) -> None:
        """A PNG of the whole page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def tab(profile: Path) -> Iterator[Tab]:
    """A tab of a browser of its own, with this folder as its profile."""
    path = browser_path()
    assert path, "no browser here"
    # its sandbox needs rights that containers do not give; it loads our own page only
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
    process = subprocess.Popen(
        [path, *flags, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        told = profile / "DevToolsActivePort"
        deadline = time.monotonic() + WITHIN_S
        while not (told.is_file() and told.read_text().count("\n")):
            assert time.monotonic() < deadline, "the browser did not start"
            time.sleep(0.05)
        port, path = told.read_text().splitlines()[:2]
        with connect(f"ws://127.0.0.1:{port}{path}", max_size=None) as control:
            control.send(
                json.dumps(
                    {"id": 1, "method": "Target.createTarget", "params": {"url": "about:blank"}}
                )
            )
            target = json.loads(control.recv(timeout=WITHIN_S))["result"]["targetId"]
            at = f"ws://127.0.0.1:{port}/devtools/page/{target}"
            with connect(at, max_size=None) as socket:
                yield Tab(socket)
    finally:
        process.terminate()
        process.wait(WITHIN_S)
