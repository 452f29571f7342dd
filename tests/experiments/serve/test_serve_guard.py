"""Who a page's server answers: its own page, by the address with its token; and what it refuses before any work."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from experiments.serve import files, guard
from experiments.serve.server import MOST_KEPT, Kept, application

TOKEN, PORT = "a-token", 8123
BASE = f"http://127.0.0.1:{PORT}"
JSON = {"content-type": "application/json"}


class Client:
    """Asks the application, without a socket."""

    def __init__(self) -> None:
        self._transport = httpx.ASGITransport(application(TOKEN, PORT))

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        async def asks() -> httpx.Response:
            async with httpx.AsyncClient(transport=self._transport, base_url=BASE) as client:
                return await client.request(method, path, **more)

        return asyncio.run(asks())

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.request("GET", path, **more)


@pytest.fixture
def client() -> Client:
    return Client()


def test_the_page_and_its_files_are_served_and_load_nothing_else(client: Client) -> None:
    page = client.get(f"/{TOKEN}/").text
    assert "<title>Longstep</title>" in page
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert {"page.js", "page.css"} <= {*loaded} <= {*files.FILES, "data:,"}
    for name, file in files.FILES.items():
        found = client.get(f"/{TOKEN}/{name}")
        assert found.status_code == 200
        assert found.headers["content-type"].startswith(file.kind)
        if name.endswith(".js") and name != "plotly.js":
            assert {*re.findall(r'from "\./([^"]+)"', found.text)} <= {*files.FILES}
            assert "http" not in found.text.replace("http://www.w3.org", "")
            assert "innerHTML" not in found.text, "names are texts, whatever they hold"


def test_every_answer_forbids_what_the_page_does_not_need(client: Client) -> None:
    for path in (f"/{TOKEN}/", "/", "/favicon.ico"):
        headers = client.get(path).headers
        for name, value in guard.HEADERS.items():
            assert headers[name] == value
    policy = guard.HEADERS["Content-Security-Policy"]
    assert "default-src 'none'; script-src 'self';" in policy
    assert "*" not in policy
    assert "http" not in policy


REFUSED: dict[str, tuple[str, str, dict[str, str], int]] = {
    "no token": ("GET", "/", {}, 403),
    "another token": ("GET", "/another/", {}, 403),
    "a part of the token": ("GET", f"/{TOKEN[:-1]}/", {}, 403),
    "another letter": ("POST", f"/{TOKEN.upper()}/do/ask", JSON, 403),
    "a path up": ("GET", f"/x/../{TOKEN}x/", {}, 403),
    "another host": ("GET", f"/{TOKEN}/", {"host": "evil.example"}, 403),
    "another port": ("GET", f"/{TOKEN}/", {"host": "127.0.0.1:80"}, 403),
    "another origin": ("POST", f"/{TOKEN}/do/ask", JSON | {"origin": "http://evil.example"}, 403),
    "no origin that is told": ("POST", f"/{TOKEN}/do/ask", JSON | {"origin": "null"}, 403),
    "from another site": ("GET", f"/{TOKEN}/", {"sec-fetch-site": "cross-site"}, 403),
    "from another port": ("GET", f"/{TOKEN}/", {"sec-fetch-site": "same-site"}, 403),
    "a form": ("POST", f"/{TOKEN}/do/ask", {"content-type": "text/plain"}, 415),
    "no job": ("POST", f"/{TOKEN}/do/run", JSON, 404),
    "no file": ("GET", f"/{TOKEN}/server.py", {}, 404),
    "a file above": ("GET", f"/{TOKEN}/%2e%2e/%2e%2e/pyproject.toml", {}, 404),
    "reading a job": ("GET", f"/{TOKEN}/do/ask", {}, 405),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_the_page_is_refused(what: str, client: Client) -> None:
    method, path, headers, status = REFUSED[what]
    found = client.request(method, path, headers=headers, content=b"{}" if method == "POST" else None)
    assert found.status_code == status
    assert len(found.text) < 200
    assert TOKEN not in found.text


def test_the_page_by_its_own_origin_and_by_localhost(client: Client) -> None:
    own = {"origin": BASE, "sec-fetch-site": "same-origin"}
    assert client.get(f"/{TOKEN}/page.js", headers=own).status_code == 200
    local = {"host": f"localhost:{PORT}", "origin": f"http://localhost:{PORT}"}
    assert client.get(f"/{TOKEN}/page.js", headers=local).status_code == 200


BODIES: dict[str, tuple[Any, int]] = {
    "10 MB": (b"x" * 10_000_000, 413),
    "10 MB in pieces": (None, 413),
    "no JSON": (b"{", 400),
    "no text": (b"\xff\xfe", 400),
    "deep": (b"[" * 500_000, 400),
    "a list": (b"[]", 400),
    "no payload": (b'{"client": "a", "order": 1}', 400),
    "a client by a path": (b'{"client": "../a", "order": 1, "payload": {}}', 400),
    "an order below 0": (b'{"client": "a", "order": -1, "payload": {}}', 400),
    "a payload of a text": (b'{"client": "a", "order": 1, "payload": "x"}', 400),
}


async def pieces() -> AsyncIterator[bytes]:
    for _ in range(100):
        yield b"x" * 100_000


@pytest.mark.parametrize("what", BODIES)
def test_a_body_that_is_no_question_is_refused(what: str, client: Client) -> None:
    body, status = BODIES[what]
    found = client.request("POST", f"/{TOKEN}/do/ask", headers=JSON, content=pieces() if body is None else body)
    assert found.status_code == status
    assert "Traceback" not in found.text


def test_answers_are_kept_as_far_as_they_fit() -> None:
    kept = Kept()
    for number in range(2 * MOST_KEPT):
        kept.keep(b"%d" % number, [b"x"])
    assert kept.get(b"0") is None
    assert kept.get(b"%d" % (2 * MOST_KEPT - 1)) == [b"x"]
    kept.keep(b"large", [b"y" * 2**23])
    kept.keep(b"larger", [b"z" * (2**23 + 1)])
    assert kept.get(b"large") is None
    assert kept.get(b"larger") is not None
