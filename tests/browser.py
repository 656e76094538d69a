"""Pages of examples/: the data in them, and headless Chromium, which chromedriver drives by the
protocol of W3C WebDriver. It reaches no host: what a page asks for fails, and is in `requests`."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from http.client import HTTPConnection
from pathlib import Path

FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-proxy-server",
         "--host-resolver-rules=MAP * ~NOTFOUND"]
WANTED = {"goog:chromeOptions": {"args": FLAGS},
          "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
# Words that would do something in a page that took them for HTML or for a part of its script.
HOSTILE = ("</script><script>document.title='taken'</script><!--<script><img src=x "
           "onerror=\"document.title='taken'\">'`&amp;\u2028\\ DATA")


def data_of(html: str) -> dict:
    """What a page holds, as a browser reads it: up to the first thing that ends the script."""
    rest = html.split('<script id="data" type="application/json">')[1]
    return json.loads(rest.split("</script")[0])


class Browser(contextlib.ExitStack):
    def __enter__(self):
        folder = self.enter_context(tempfile.TemporaryDirectory(prefix="browser-"))
        # chromedriver takes a port that is free in IPv4, and ends if it is not free in IPv6.
        # Then it is started again.
        for _ in range(10):
            process = subprocess.Popen(
                ["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True,
                env={**os.environ, "HOME": folder, "TMPDIR": folder}, start_new_session=True)
            started = next((line for line in process.stdout if "successfully on port" in line), "")
            if started:
                break
            process.communicate()
        self.callback(process.communicate)  # All of its processes write to stdout until they end.
        self.callback(os.killpg, process.pid, signal.SIGKILL)
        self.port, self.path = int(started.split()[-1].rstrip(".")), "/session"
        session = self.send("", capabilities={"alwaysMatch": WANTED})["sessionId"]
        self.path += f"/{session}/"
        return self

    def open(self, path: Path) -> None:
        self.send("url", url=path.resolve(strict=True).as_uri())

    def run(self, script: str, *arguments):
        return self.send("execute/sync", script=script, args=arguments)

    def texts(self, css: str) -> list[str]:
        return self.run("return [...document.querySelectorAll(arguments[0])].map("
                        "each => each.textContent)", css)

    def messages(self) -> list[str]:
        return [entry["message"] for entry in self.send("se/log", type="browser")]

    def requests(self) -> list[str]:
        """The addresses that the page has asked for, itself included."""
        entries = self.send("se/log", type="performance")
        events = [json.loads(entry["message"])["message"] for entry in entries]
        return [event["params"]["request"]["url"] for event in events
                if event["method"] == "Network.requestWillBeSent"]

    def send(self, command: str, **body):
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", self.path + command, json.dumps(body), {"Connection": "close"})
        response = connection.getresponse()
        answer = json.load(response)["value"]
        if response.status != 200:
            raise RuntimeError(answer["message"])
        return answer
