"""Chromium without a window, through its driver: enough to load a page, press keys and read the console."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
ABSENT = CHROMIUM is None or DRIVER is None
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@dataclass(frozen=True)
class Browser:
    address: str

    def call(self, path: str, **content: Any) -> Any:
        data = json.dumps(content).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, path: Path) -> None:
        self.call("/url", url=path.as_uri())

    def run(self, code: str) -> Any:
        """The value of a JavaScript expression."""
        return self.call("/execute/sync", script=f"return {code}", args=[])

    def press(self, *keys: str) -> None:
        steps = [{"type": kind, "value": k} for k in keys for kind in ("keyDown", "keyUp")]
        self.call("/actions", actions=[{"type": "key", "id": "keyboard", "actions": steps}])

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def console(self) -> list[str]:
        """What the page complained about."""
        return [str(entry["message"]) for entry in self.call("/se/log", type="browser")]


@contextmanager
def browser(folder: Path, width: int = 1100, height: int = 900, dark: bool = False) -> Iterator[Browser]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([str(DRIVER), f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    base = f"http://127.0.0.1:{port}/session"
    try:
        scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
        options = {
            "binary": CHROMIUM,
            "args": [*FLAGS, *scheme, f"--window-size={width},{height}", f"--user-data-dir={folder / 'profile'}"],
        }
        wish = {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}
        session = _started(base, wish)
        yield Browser(f"{base}/{session}")
        urllib.request.urlopen(urllib.request.Request(f"{base}/{session}", method="DELETE"), timeout=30).close()
    finally:
        process.terminate()
        process.wait(10)


def _started(base: str, wish: dict[str, Any]) -> str:
    deadline = time.monotonic() + 30
    while True:
        try:
            found: str = Browser(base).call("", capabilities=wish)["sessionId"]
            return found
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()) from error
        except urllib.error.URLError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
