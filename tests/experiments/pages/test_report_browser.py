"""A report in a real browser, found on PATH: no error, all charts drawn, and hovering shows a value."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.evidence.results import Result, read_result
from experiments.pages.report.report_page import page
from tests.experiments.pages.test_report_page import sweep_rows
from tests.experiments.verbs.typed import H100, run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "headless_shell"))), "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gloo,  # it starts a process, the browser
    pytest.mark.skipif(not BROWSER, reason="no chromium, google-chrome or headless_shell on PATH"),
]
SMALLEST = """Math.min(...[...document.querySelectorAll("svg text")]
  .filter((text) => text.getBoundingClientRect().width)
  .map((text) => [parseFloat(getComputedStyle(text).fontSize), text.getScreenCTM()])
  .map(([size, { a, b }]) => size * Math.hypot(a, b)))"""
"""Pixels of the smallest text of any drawing, as it is shown."""
Call = Callable[..., Awaitable[dict[str, Any]]]


class Tab:
    """A page in the browser, spoken to by the DevTools protocol."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._number = socket, 0
        self.events: list[dict[str, Any]] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.write_message(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            said = json.loads(await self._socket.read_message())
            if said.get("id") == self._number:
                assert "error" not in said, said
                return dict(said["result"])
            self.events.append(said)

    async def value(self, script: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, script: str) -> Any:
        """The value of a script once it is true."""
        for _ in range(300):
            if found := await self.value(script):
                return found
            await asyncio.sleep(0.1)
        raise AssertionError(f"never: {script}")

    async def hover(self, x: float, y: float) -> None:
        for shift in (8, 4, 0):
            await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + shift, y=y)

    async def tap(self, x: float, y: float) -> None:
        await self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        await self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    @property
    def complaints(self) -> list[str]:
        """Errors of scripts, of the console and of the policy, and all that was asked of a network."""
        wrong = ("Runtime.exceptionThrown", "Network.requestWillBeSent")
        return [
            json.dumps(said)
            for said in self.events
            if (said["method"] == "Runtime.consoleAPICalled" and said["params"]["type"] in {"error", "warning"})
            or (said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error")
            or (said["method"] in wrong and not _of_the_page(said))
        ]


def _of_the_page(said: dict[str, Any]) -> bool:
    return str(said["params"].get("request", {}).get("url", "")).startswith(("file:", "data:", "blob:"))


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[str]:
    """The address of a browser's DevTools."""
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            yield next(found[1] for line in process.stderr if (found := re.search(r"ws://([\d.:]+)/", line)))
        finally:
            process.kill()


async def with_tab(address: str, path: Path, look: Callable[[Tab], Awaitable[None]], width: int, dark: bool) -> None:
    from tornado.httpclient import AsyncHTTPClient
    from tornado.websocket import websocket_connect

    targets = json.loads((await AsyncHTTPClient().fetch(f"http://{address}/json")).body)
    (target, *_) = [one for one in targets if one["type"] == "page"]
    socket = await websocket_connect(target["webSocketDebuggerUrl"], max_message_size=2**27)
    tab = Tab(socket)
    for domain in ("Page", "Runtime", "Log", "Network"):
        await tab.call(f"{domain}.enable")
    await tab.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
    )
    await tab.call("Emulation.setTouchEmulationEnabled", enabled=width < 600)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    await tab.call("Emulation.setEmulatedMedia", features=[scheme])
    await tab.call("Page.navigate", url=path.as_uri())
    await tab.until("document.documentElement?.dataset.drawn")
    await look(tab)
    assert tab.complaints == []
    socket.close()


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_browser_draws_a_report(width: int, dark: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.json", tmp_path / "report.html"
    run(capsys, "simulate", *H100, "--trace", str(trace))
    out.write_text(page("a report", [Result("rows", "rows", sweep_rows()), read_result(str(trace))]))

    async def look(tab: Tab) -> None:
        drawn = await tab.value("document.querySelectorAll('.chart .main-svg').length > 0")
        charts = await tab.value("document.querySelectorAll('.chart').length")
        assert drawn
        assert await tab.value("[...document.querySelectorAll('.chart')].filter(c => c.data).length") == charts
        assert await tab.value("document.documentElement.scrollWidth") <= width, "nothing sticks out"
        assert await tab.value(SMALLEST) >= 12
        paper = await tab.value("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(20, 23, 26)" if dark else "rgb(255, 255, 255)")
        ticks = await tab.value("[...document.querySelectorAll('#chart-0-0 .ytick')].map(t => t.textContent)")
        assert {"20 s", "30 s", "40 s"} <= {*ticks}, "figures lie within a decade"
        place = "document.querySelector('#chart-0-0 .points path')"
        await tab.value(f"{place}.scrollIntoView({{block: 'center'}})")
        x, y = await tab.value(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({place}.getBoundingClientRect())")
        await tab.hover(x, y)
        said = await tab.until("document.querySelector('#chart-0-0 .hoverlayer')?.textContent")
        assert "step time 32 s" in said, "what the row of 64K says"
        before = await tab.value("document.querySelector('#chart-0-0').layout.yaxis.type")
        await tab.value("document.querySelector('[data-chart=chart-0-0][data-axis=yaxis]').click()")
        after = await tab.value("document.querySelector('#chart-0-0').layout.yaxis.type")
        assert (before, after) == ("log", "linear")
        canvas = "document.querySelector('#timeline-1 canvas')"
        await tab.value(f"{canvas}.scrollIntoView({{block: 'center'}})")
        left, top = await tab.value(f"(b => [b.x, b.y])({canvas}.getBoundingClientRect())")
        beside, above = (0, 17) if width < 500 else (178, 0)
        await tab.hover(left + beside + 4, top + 24 + 22 + above + 8)
        assert "rank 0, compute" in await tab.until("document.getElementById('tip').textContent")
        if width < 500:
            await tab.tap(left + 4, top + 24)
            assert not await tab.value("document.getElementById('tip').checkVisibility()"), "nothing is there"
            await tab.tap(left + 4, top + 24 + 22 + above + 8)
            assert await tab.value("document.getElementById('tip').checkVisibility()")
        sort = "document.querySelector('#chapter-0 > .scroll table')"
        await tab.value(f"{sort}.tHead.rows[0].cells[2].firstElementChild.click()")
        assert await tab.value(f"{sort}.tBodies[0].rows[0].cells[2].dataset.value") == "64.0"

    with browser(tmp_path / "profile") as address:
        asyncio.run(with_tab(address, out, look, width, dark))
