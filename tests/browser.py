"""Headless Chromium for tests of pages, driven by the W3C WebDriver protocol of chromedriver. It
reaches no host: no name resolves, so what a page asks for fails, and is among its `requests`."""

import base64
import contextlib
import json
import os
import signal
import subprocess
import tempfile
from http.client import HTTPConnection
from pathlib import Path

FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-smooth-scrolling",
         "--no-proxy-server", "--host-resolver-rules=MAP * ~NOTFOUND"]
WANTED = {"goog:chromeOptions": {"args": FLAGS},
          "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
KEYS = {"Tab": "\ue004", "Enter": "\ue006", "Escape": "\ue00c", "End": "\ue010", "Home": "\ue011",
        "ArrowLeft": "\ue012", "ArrowUp": "\ue013", "ArrowRight": "\ue014", "ArrowDown": "\ue015"}


class Browser(contextlib.ExitStack):
    def __enter__(self):
        with contextlib.ExitStack() as closing:
            folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="browser-"))
            process = subprocess.Popen(
                ["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True,
                env={**os.environ, "HOME": folder, "TMPDIR": folder}, start_new_session=True)
            closing.callback(process.communicate)  # all inherit stdout: until the last has ended
            closing.callback(os.killpg, process.pid, signal.SIGKILL)
            started = next(line for line in process.stdout if "successfully on port" in line)
            self._port, self._path = int(started.split()[-1].rstrip(".")), "/session"
            session = self._send("", capabilities={"alwaysMatch": WANTED})["sessionId"]
            self._path += f"/{session}/"
            self.push(closing.pop_all())
        return self

    def open(self, path: Path, width: int = 1200, height: int = 900, dark: bool = False):
        """In a viewport of exactly this size; a narrow one obeys <meta name="viewport">."""
        self._send("url", url="about:blank")  # so that the page before says no more
        self._send("se/log", type="browser")  # which tells each entry once
        self._send("se/log", type="performance")
        self._console, self._events = [], []
        self._devtools("Emulation.setDeviceMetricsOverride", width=width, height=height,
                       deviceScaleFactor=1, mobile=width < 600)
        self._devtools("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self._send("url", url=Path(path).resolve(strict=True).as_uri())

    def run(self, script: str, *arguments):
        return self._send("execute/sync", script=script, args=arguments)  # waits for a promise

    def _find(self, css: str):
        element = self._send("element", using="css selector", value=css)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        return element

    def hover(self, css: str):
        element = self._find(css)
        self._send("actions", actions=[{"type": "pointer", "id": "mouse", "actions": [
            {"type": "pointerMove", "origin": element, "x": 0, "y": 0}]}])

    def click(self, css: str):
        (identifier,) = self._find(css).values()
        self._send(f"element/{identifier}/click")  # fails if something else covers the element

    def key(self, name: str):
        self._send("actions", actions=[{"type": "key", "id": "keyboard", "actions": [
            {"type": kind, "value": KEYS.get(name, name)} for kind in ("keyDown", "keyUp")]}])

    def console(self) -> list[str]:
        self._console += self._send("se/log", type="browser")
        return [f"{entry['level']} {entry['message']}" for entry in self._console]

    def requests(self) -> list[str]:
        self._events += self._send("se/log", type="performance")
        events = [json.loads(entry["message"])["message"] for entry in self._events]
        return [event["params"].get("request", event["params"])["url"] for event in events
                if event["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated")]

    def screenshot(self, path: Path, whole: bool = False):
        image = self._devtools("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        Path(path).write_bytes(base64.b64decode(image))

    def _devtools(self, command: str, **parameters):
        return self._send("goog/cdp/execute", cmd=command, params=parameters)

    def _send(self, command: str, **body):
        connection = HTTPConnection("127.0.0.1", self._port, timeout=60)
        connection.request("POST", self._path + command, json.dumps(body), {"Connection": "close"})
        answer = json.load(response := connection.getresponse())["value"]
        if response.status != 200:
            raise RuntimeError(answer["message"])
        return answer
