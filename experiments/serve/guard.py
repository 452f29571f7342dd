"""Who may ask a server: this machine's browser, by the address with its token, with bodies of bounded size."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BODY = 2**20
"""Bytes of a request."""
BODY_S = 10.0
"""Until when all of it has to be there."""
MOST_AT_ONCE = 64
"""Requests; more are refused, and may come again."""
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of every response. Styles of elements are allowed, since charts set them; scripts are the page's files alone."""


class Guard:
    """Refuses what does not come from the page: another host or origin, no token, a body that is too large."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._prefix = app, f"/{token}/"
        self._at_once = 0
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        refused = self._refused(scope) if scope["type"] == "http" else PlainTextResponse("no", 403)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *own]
            await send(message)

        if refused is None and self._at_once >= MOST_AT_ONCE:
            refused = PlainTextResponse("too many requests at once: ask again", 503, {"Retry-After": "1"})
        if refused is not None:
            await refused(scope, receive, with_headers)
            return
        self._at_once += 1
        try:
            await self._passed(scope, receive, with_headers)
        finally:
            self._at_once -= 1

    async def _passed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its body, which is read before."""
        body = await _body(receive)
        if body is None:
            await _too_much()(scope, receive, send)
            return
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def read() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, read, send)

    def _refused(self, scope: Scope) -> Response | None:
        """Return why a request is refused; None for one that is not."""
        headers = Headers(scope=scope)
        if headers.get("host", "") not in self._hosts:
            return PlainTextResponse("longstep serve answers at 127.0.0.1 only", 403)
        origin = headers.get("origin")
        if origin is not None and origin not in {f"http://{host}" for host in self._hosts}:
            return PlainTextResponse("longstep serve answers its own page only", 403)
        if headers.get("sec-fetch-site", "none") not in {"same-origin", "none"}:
            return PlainTextResponse("longstep serve answers its own page only", 403)
        path = scope["path"].encode()
        if not secrets.compare_digest(path[: len(self._prefix)], self._prefix.encode()):
            return PlainTextResponse("the token of the address is missing: open the address that was printed", 403)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 12 or int(length) > MOST_BODY:
            return _too_much()
        return None


async def _body(receive: Receive) -> bytes | None:
    """Return the body of a request; None for one that is too large, or does not come."""
    found = b""
    try:
        async with asyncio.timeout(BODY_S):
            while len(found) <= MOST_BODY:
                message = await receive()
                found += message.get("body", b"")
                if not message.get("more_body", False):
                    return found if len(found) <= MOST_BODY else None
    except TimeoutError:
        pass
    return None


def _too_much() -> Response:
    return PlainTextResponse(f"a request has at most {MOST_BODY} bytes", 413)
