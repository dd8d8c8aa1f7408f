"""A real Chromium, driven over its DevTools protocol: pages as people see them, from a folder or a server."""

import itertools
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import websocket

from tests.validation.browser import CHROMIUM, QUIET


@dataclass
class Tab:
    """The one tab. events: those of the protocol so far."""

    socket: websocket.WebSocket
    events: list[dict[str, Any]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])
            self.events.append(message)

    def evaluate(self, script: str) -> Any:
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def resize(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Open a page, and wait until it is loaded and drawn."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")
        self.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 30)))")

    def wait(self, condition: str) -> None:
        """Wait until a condition of the page is true; at most a minute, since a machine may be busy."""
        end = time.monotonic() + 60
        while not self.evaluate(condition):
            assert time.monotonic() < end, condition
            time.sleep(0.02)

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def requests(self) -> list[str]:
        """The addresses that the page asked for since it was opened."""
        return [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        """Errors on the console, violations of the content security policy among them."""
        entries = [event["params"]["entry"] for event in self.events if event["method"] == "Log.entryAdded"]
        texts = [str(event["params"]) for event in self.events if event["method"] == "Runtime.exceptionThrown"]
        return texts + [entry["text"] for entry in entries if entry["level"] in ("error", "warning")]


@contextmanager
def chromium(folder: Path) -> Iterator[Tab]:
    """A browser with one tab, with its profile in `folder`."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0", *QUIET]
    command = [str(CHROMIUM), *options, "--remote-allow-origins=*", f"--user-data-dir={folder}/profile", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        socket = websocket.create_connection(_address(folder), timeout=60)
        tab = Tab(socket)
        for domain in ("Page", "Runtime", "Network", "Log", "Performance"):
            tab.call(f"{domain}.enable")
        yield tab
        socket.close()
    finally:
        process.terminate()
        process.wait(20)


def _address(folder: Path) -> str:
    from urllib.request import urlopen

    port = folder / "profile" / "DevToolsActivePort"
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if port.exists() and (text := port.read_text().split("\n"))[0]:
            with urlopen(f"http://127.0.0.1:{text[0]}/json/list", timeout=20) as answer:
                tabs = json.load(answer)
            if tabs := [tab for tab in tabs if tab["type"] == "page"]:
                return str(tabs[0]["webSocketDebuggerUrl"])
        time.sleep(0.05)
    raise AssertionError("Chromium did not start")
