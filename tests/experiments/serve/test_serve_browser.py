"""The page of a server in a real browser, found on PATH: it asks, pins, maps, reopens and reads files, and no error."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from experiments.serve.answering.question import Question, setup_of
from tests.experiments.pages.test_report_browser import BROWSER, SMALLEST, Tab, browser
from tests.experiments.serve.serving import served
from tests.reading_code import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gloo,  # it starts processes
    pytest.mark.skipif(not BROWSER, reason="no chromium, google-chrome or headless_shell on PATH"),
]
CONFIG = ROOT / "tests" / "words" / "hugging_face" / "llama-3-8b.json"
SENTENCE = "document.getElementById('sentence').textContent"


@contextlib.asynccontextmanager
async def tab_of(address: str, width: int, dark: bool) -> AsyncIterator[Tab]:
    from tornado.httpclient import AsyncHTTPClient
    from tornado.websocket import websocket_connect

    targets = json.loads((await AsyncHTTPClient().fetch(f"http://{address}/json")).body)
    (target, *_) = [one for one in targets if one["type"] == "page"]
    socket = await websocket_connect(target["webSocketDebuggerUrl"], max_message_size=2**27)
    tab = Tab(socket)
    for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
        await tab.call(f"{domain}.enable")
    phone = width < 600
    await tab.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=phone)
    await tab.call("Emulation.setTouchEmulationEnabled", enabled=phone)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    await tab.call("Emulation.setEmulatedMedia", features=[scheme])
    try:
        yield tab
    finally:
        socket.close()
        while await socket.read_message() is not None:
            pass


def wrong(tab: Tab, url: str) -> list[str]:
    """Errors, and what was asked of anyone but the server."""
    return [one for one in tab.complaints if "Network.requestWillBeSent" not in one or url not in one]


def typed(name: str, value: str) -> str:
    at = f"document.getElementById({name!r})"
    return f"{at}.value = {value!r}; {at}.dispatchEvent(new Event('change'))"


def dropping(name: str, text: str) -> str:
    return f"""(() => {{ const moved = new DataTransfer();
        moved.items.add(new File([{json.dumps(text)}], {name!r}));
        dispatchEvent(new DragEvent("drop", {{ dataTransfer: moved, cancelable: true }})); }})()"""


async def said(tab: Tab, part: str) -> str:
    """The sentence, once it has a part."""
    await tab.until(f"{SENTENCE}.includes({part!r})")
    return str(await tab.value(SENTENCE))


async def asks(tab: Tab, url: str) -> None:
    await tab.call("Page.navigate", url=url)
    answer = setup_of(Question(schedule="ulysses", seq="128K")).predicted().answer
    assert await said(tab, "Ulysses takes") == answer
    assert await tab.value("document.getElementById('command').textContent") == (
        "longstep simulate --schedule ulysses --model llama3-8b --cluster hgx-h100 --seq 128K"
    )
    await tab.until("document.querySelectorAll('#charts .main-svg').length > 0")
    await tab.until("document.getElementById('figures').textContent.includes('longest context')")
    # a slider is moved by its key
    await tab.value("document.getElementById('slide').focus()")
    for _ in range(8):
        await tab.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight", code="ArrowRight",
                       windowsVirtualKeyCode=39)  # fmt: skip
        await tab.call("Input.dispatchKeyEvent", type="keyUp", key="ArrowRight", code="ArrowRight")
    doubled = setup_of(Question(schedule="ulysses", seq="256K")).predicted().answer
    await tab.until(f"{SENTENCE} === {doubled!r}")


async def pins(tab: Tab) -> None:
    """Two, that stand beside each other; then a rate is multiplied, and set back."""
    await tab.value("document.getElementById('pin').click()")
    await tab.value(typed("schedule", "zigzag"))
    await said(tab, "Zigzag takes")
    await tab.value("document.getElementById('pin').click()")
    await tab.until("document.documentElement.dataset.compared === '2'")
    compared = await tab.value("document.querySelector('#compared table').textContent")
    assert "fastest" in compared
    assert "zigzag, 256K" in compared
    await tab.until("document.querySelectorAll('#compared .chart .main-svg').length > 0")
    # a rate is multiplied, and set back
    await tab.value("document.getElementById('export').click()")
    await tab.until("document.getElementById('progress').textContent.startsWith('saved as ')")
    rate = "document.getElementById('slide-nvlink')"
    await tab.until(f"{rate} !== null")
    await tab.value(f"{rate}.value = -2; {rate}.dispatchEvent(new Event('input'))")
    slower = setup_of(Question(schedule="zigzag", seq="256K", set={"cluster.nvlink.bytes_per_s": "*0.25"})).predicted()
    await tab.until(f"{SENTENCE} === {slower.answer!r}")
    await tab.value("document.getElementById('unslide').click()")
    # what takes long is refused, with what one rank says
    await tab.value(typed("gpus", "64"))
    assert "beyond the 10 s" in await said(tab, "At least ")
    await tab.value(typed("gpus", ""))
    await said(tab, "Zigzag takes")


async def maps(tab: Tab) -> str:
    """Of both, of which a cell is asked; then its ops over time."""
    await tab.value("document.getElementById('across-values').value = '64K,128K'")
    await tab.value("document.getElementById('down-values').value = '4,8'")
    await tab.value("document.getElementById('draw-map').click()")
    await tab.until("document.getElementById('said-map').textContent.startsWith('Of 4 cells')")
    assert await tab.value("document.querySelectorAll('#map td button').length") == 4
    await tab.value("document.querySelector('#map tbody tr td button').click()")
    there = setup_of(Question(schedule="ulysses", seq="64K", gpus=4)).predicted().answer
    await tab.until(f"{SENTENCE} === {there!r}")
    # over time
    await tab.value("document.getElementById('draw-time').click()")
    await tab.until("document.querySelector('#time canvas') !== null && document.querySelector('#time table') !== null")
    await tab.value("document.querySelector('#time canvas').dataset.first = 'yes'")
    await tab.value("document.getElementById('ranks').dispatchEvent(new Event('change'))")
    await tab.until("document.querySelector('#time canvas:not([data-first])') !== null")  # drawn anew
    return there


async def reopens(tab: Tab, there: str) -> None:
    """The address holds it all."""
    held = await tab.value("location.href")
    await tab.call("Page.navigate", url="about:blank")
    await tab.call("Page.navigate", url=held)
    await tab.until(f"document.getElementById('sentence') && {SENTENCE} === {there!r}")
    assert await tab.value("document.querySelectorAll('.pin').length") == 2


async def drops(tab: Tab) -> None:
    """A file that is whole, and one that is not."""
    await tab.value(
        dropping("config.json", CONFIG.read_text().replace('"num_hidden_layers": 32', '"num_hidden_layers": 4'))
    )
    await tab.until("document.getElementById('told').textContent.startsWith('taken for a model')")
    await tab.until("document.getElementById('command').textContent.includes('--model config.json')")
    await tab.until("document.getElementById('title').textContent.includes('step of 4 layers')")
    before = await said(tab, "a step (")
    await tab.value(dropping("config.json", '{"model_type": "<img src=x onerror=alert(1)>", "hidden_size": 1}'))
    await tab.until("document.getElementById('told').classList.contains('wrong')")
    assert "<img src=x" in await tab.value("document.getElementById('told').textContent")
    assert await tab.value("document.querySelectorAll('main img').length") == 0
    assert await tab.value(SENTENCE) == before


async def errs(tab: Tab) -> None:
    """What is wrong is said, and can be set right."""
    await tab.value(typed("gpus", "7"))
    await tab.until("document.getElementById('sentence').classList.contains('wrong')")
    assert "7" in await tab.value(SENTENCE)
    assert await tab.value("document.getElementById('degrees').getAttribute('aria-invalid')") == "true"
    await tab.value(typed("gpus", "8"))
    await tab.until("!document.getElementById('sentence').classList.contains('wrong')")


async def visit(tab: Tab, url: str, width: int, dark: bool) -> None:
    await asks(tab, url)
    await pins(tab)
    await reopens(tab, await maps(tab))
    await drops(tab)
    await errs(tab)
    assert await tab.value("document.documentElement.scrollWidth") <= width
    assert await tab.value(SMALLEST) >= 12
    paper = await tab.value("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 23, 26)" if dark else "rgb(255, 255, 255)")
    assert await tab.value(UNNAMED) == []
    assert wrong(tab, url) == []


UNNAMED = """[...document.querySelectorAll("input, select, button")]
  .filter((one) => !one.labels?.length && !one.getAttribute("aria-label") && !one.textContent.trim())
  .map((one) => one.outerHTML)"""
"""Controls that a screen reader cannot name."""


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_browser_thinks_with_the_page(width: int, dark: bool, tmp_path: Path) -> None:
    async def goes(address: str, url: str) -> None:
        async with tab_of(address, width, dark) as tab:
            await visit(tab, url, width, dark)

    with served() as (url, _), browser(tmp_path / "profile") as address:
        asyncio.run(goes(address, url))
