"""The server of a page on this machine: it serves the page's files, and passes questions on to workers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from experiments.serve.files import FILES, File
from experiments.serve.guard import Guard
from experiments.serve.pool import MAP_S, BusyError, Worker

MOST_KEPT, MOST_KEPT_BYTES = 256, 16 * 2**20
"""Answers that are kept."""
_WORKERS = {
    "ask": "ahead", "compare": "ahead", "timeline": "ahead", "read": "ahead", "drawn": "ahead",
    "longest": "behind", "export": "behind", "atlas": "maps",
}  # fmt: skip
"""Which worker does a job: that of questions, which answers at once, or one that may be busy for longer."""
_KEPT = ("ask", "longest", "timeline")


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a page sends: who it is, the number of its question, and what the job takes."""

    client: Annotated[
        str, Meta(min_length=1, max_length=64, pattern=r"\A[\w-]+\Z", description="letters, digits, _ and -")
    ]
    order: Annotated[int, Meta(ge=0, le=2**53)]
    payload: dict[str, Any]


class Kept:
    """The last answers, as many as fit."""

    def __init__(self) -> None:
        self._found: OrderedDict[bytes, list[bytes]] = OrderedDict()
        self._nbytes = 0

    def get(self, key: bytes) -> list[bytes] | None:
        """Return the lines of an answer, if they are kept."""
        if key in self._found:
            self._found.move_to_end(key)
        return self._found.get(key)

    def keep(self, key: bytes, lines: list[bytes]) -> None:
        """Keep an answer; the oldest go."""
        if key in self._found:
            return
        self._found[key] = lines
        self._nbytes += sum(map(len, lines))
        while len(self._found) > MOST_KEPT or self._nbytes > MOST_KEPT_BYTES:
            _, old = self._found.popitem(last=False)
            self._nbytes -= sum(map(len, old))


class Server:
    """Workers, each begun when it is needed, and what they have answered."""

    def __init__(self) -> None:
        self._workers = {"ahead": Worker(ready=True), "behind": Worker(), "maps": Worker(answer_s=MAP_S)}
        self._kept = Kept()

    def begin(self) -> None:
        """Start the worker that answers at once."""
        for worker in self._workers.values():
            worker.begin()

    async def close(self) -> None:
        """End the workers."""
        for worker in self._workers.values():
            await worker.close()

    async def do(self, request: Request) -> Response:
        """Answer a job with its parts, a line of JSON each."""
        name = request.path_params["job"]
        if name not in _WORKERS:
            return PlainTextResponse("there is no such job", 404)
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            return PlainTextResponse("expected application/json", 415)
        try:
            asked = msgspec.json.decode(await request.body(), type=Envelope)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            return PlainTextResponse(f"the request: {error}", 400)
        key = name.encode() + msgspec.json.encode(asked.payload, order="deterministic")
        if (lines := self._kept.get(key)) is not None:
            return _streamed(_again(lines))
        anyway = asked.payload.get("anyway") is True
        worker = self._workers["behind" if anyway else _WORKERS[name]]
        parts = worker.parts(name, asked.payload, asked.client, asked.order, anyway=anyway)
        try:
            first = await anext(parts, b"")
        except BusyError:
            return PlainTextResponse("too many questions at once: ask again", 503, {"Retry-After": "1"})
        return _streamed(self._passed(key if name in _KEPT else None, first, parts))

    async def _passed(self, key: bytes | None, first: bytes, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield parts as they come, and keep them where all have come."""
        lines = [first]
        yield first
        async for line in parts:
            lines.append(line)
            yield line
        if key is not None and b'"part":"dropped"' not in lines[-1] and b'"part":"error"' not in lines[-1]:
            self._kept.keep(key, lines)


def application(token: str, port: int) -> ASGIApp:
    """Return the server of a page, behind its guard."""
    server = Server()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        del app
        server.begin()
        yield
        await server.close()

    routes = [Route(f"/{token}/{name}", _sends(file), methods=["GET"]) for name, file in FILES.items()]
    routes.append(Route(f"/{token}/do/{{job:str}}", server.do, methods=["POST"]))
    return Guard(Starlette(routes=routes, lifespan=lifespan), token, port)


def _sends(file: File) -> Callable[[Request], Any]:
    async def sends(request: Request) -> Response:
        del request
        return Response(file.content(), media_type=file.kind)

    return sends


def _streamed(lines: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(lines, media_type="application/x-ndjson")


async def _again(lines: list[bytes]) -> AsyncIterator[bytes]:
    for line in lines:
        yield line
