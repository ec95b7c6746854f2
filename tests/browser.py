"""A headless Chromium that tests can ask about a page: over two pipes, without a library, a port or a network."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest

FOUND = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(
    FOUND is None, reason="no Chromium on this machine (Debian: apt-get install chromium)"
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
PATIENCE = 120.0
SMALL = 720  # pixels that a picture in docs is wide
# The browser reads commands from descriptor 3 and answers on 4.
STARTED = """
import os, sys
a, b = (os.dup2(int(end), 20 + i) for i, end in enumerate(sys.argv[1:3]))
os.dup2(a, 3), os.dup2(b, 4), os.close(a), os.close(b)
os.execv(sys.argv[3], sys.argv[3:])
"""
# The contrast of every text with what lies behind it, by the formula of WCAG 2.
CONTRAST = """(() => {
  const numbers = c => (c.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const light = c => numbers(c).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = e => {
    for (; e; e = e.parentElement) {
      const c = getComputedStyle(e).backgroundColor;
      if ((numbers(c)[3] ?? 1) > 0.99) return c;
    }
    return "rgb(255, 255, 255)";
  };
  const low = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let t = texts.nextNode(); t; t = texts.nextNode()) {
    const e = t.parentElement, style = getComputedStyle(e);
    if (!t.textContent.trim() || style.visibility == "hidden" || !e.getClientRects().length) continue;
    const drawn = e.namespaceURI.endsWith("svg") ? style.fill : style.color;
    const [a, b] = [light(drawn), light(behind(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) low.push(t.textContent.trim().slice(0, 40) + " " + ratio.toFixed(2));
  }
  return low;
})()"""


class Browser:
    """One page at a time. What the page complains about is kept in `complaints`."""

    def __init__(self, profile: Path):
        assert FOUND is not None
        to_read, self._send = os.pipe()
        self._receive, to_write = os.pipe()
        command = [sys.executable, "-SEc", STARTED, str(to_read), str(to_write), FOUND]
        command += [*FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        log = subprocess.DEVNULL
        self._process = subprocess.Popen(command, pass_fds=(to_read, to_write), stdout=log, stderr=log)
        os.close(to_read)
        os.close(to_write)
        self._rest, self._count, self._session = b"", 0, None
        self.complaints: list[str] = []
        self.fetched: list[str] = []
        pages = [each for each in self.ask("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        told = self.ask("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self._session = told["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.ask("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for end in (self._send, self._receive):
            os.close(end)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session is not None and not method.startswith(("Browser.", "Target.")):
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while (told := self._next()).get("id") != self._count:
            self._heard(told)
        assert "error" not in told, told["error"]
        return told["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._receive, 1 << 20)
            if not more:
                raise OSError("the browser has ended")
            self._rest += more
        first, self._rest = self._rest.split(b"\0", 1)
        return json.loads(first)

    def _heard(self, event: dict[str, Any]) -> None:
        name, told = event.get("method", ""), event.get("params", {})
        if name == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([each.get("value") for each in told["args"]]))
        elif name == "Runtime.exceptionThrown":
            self.complaints.append(str(told["exceptionDetails"]))
        elif name == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(told["entry"]["text"])
        elif name == "Network.requestWillBeSent":
            self.fetched.append(told["request"]["url"])

    def open(self, url: str, width: int = 1280, height: int = 900) -> None:
        self.complaints.clear()
        self.fetched.clear()
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.ask("Page.navigate", url=url)
        until = time.monotonic() + PATIENCE
        while self.run("location.href != 'about:blank' && document.readyState") != "complete":
            assert time.monotonic() < until, f"{url}: not loaded"
            time.sleep(0.02)
        self.run("new Promise(done => setTimeout(done, 100))")  # what it still wants to say

    def run(self, program: str) -> Any:
        told = self.ask("Runtime.evaluate", expression=program, returnByValue=True, awaitPromise=True)
        return told["result"].get("value")

    def low_contrast(self) -> list[str]:
        return self.run(CONTRAST)

    def wider_than_the_window(self) -> bool:
        return self.run("document.documentElement.scrollWidth > window.innerWidth")

    def spoken(self, role: str) -> list[str]:
        """The names that a screen reader has for the elements of a role."""
        nodes = self.ask("Accessibility.getFullAXTree")["nodes"]
        return [n.get("name", {}).get("value", "") for n in nodes if n.get("role", {}).get("value") == role]

    def picture(self, path: Path, *, whole: bool = True, **clip: float) -> Path:
        area = {"clip": {"x": 0, "y": 0, "scale": 1, **clip}} if clip else {}
        told = self.ask("Page.captureScreenshot", captureBeyondViewport=whole, **area)
        path.write_bytes(base64.b64decode(told["data"]))
        return path

    def printed(self) -> bytes:
        return base64.b64decode(self.ask("Page.printToPDF", printBackground=True)["data"])


def small_picture(page: Path, out: Path, height: int) -> None:
    """The top of a page, small enough to be kept in docs."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder) / "profile") as browser:
        browser.open(page.resolve().as_uri(), width=1000)
        shot = Image.open(browser.picture(out, width=1000, height=height)).convert("RGB")
    shot = shot.resize((SMALL, round(height * SMALL / 1000)), Image.Resampling.LANCZOS)
    shot.quantize(32, dither=Image.Dither.NONE).save(out, optimize=True)


if __name__ == "__main__":  # python -m tests.browser report.html docs/report.png 1300
    small_picture(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
