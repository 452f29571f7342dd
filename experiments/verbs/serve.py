"""``longstep serve``: a page on this machine that answers questions as they change."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import socket
import urllib.parse
from types import FrameType

from rich.console import Console

from experiments.verbs.shared.kinds import OptionalText
from experiments.verbs.shared.terminal import Ticker
from sim.base.errors import InputError

NEEDS_STARLETTE = "serve needs the packages starlette and uvicorn: pip install 'longstep[serve]'"
HOST = "127.0.0.1"
_BYTES = 24
"""Of a token."""
_MOST_CONNECTIONS = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve:
    """Open a page on this machine to think with: a form is the question, and the answer follows as it changes. It is
    for this machine's browser alone, by an address with a token; Ctrl-C ends it.
    """

    port: int = 0
    """Port on 127.0.0.1; by default any that is free."""
    reopen: OptionalText = None
    """Address of a page that was kept: print the one that opens it now."""


def serve(command: Serve, console: Console) -> None:
    """Serve the page until it is interrupted; raises InputError without the packages, and for a port that is taken."""
    if not 0 <= command.port < 2**16:
        raise InputError(f"`port` {command.port}: expected 0 to 65535")
    try:
        import uvicorn

        from experiments.serve.server import application
    except ModuleNotFoundError as error:
        if error.name not in {"starlette", "uvicorn"}:
            raise
        raise InputError(NEEDS_STARLETTE) from None
    from experiments.pages.report.report_page import plotly_js

    plotly_js()
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, command.port))
            listening.listen(_MOST_CONNECTIONS)  # who opens the address at once is answered when all is there
        except OSError as error:
            raise InputError(f"`port` {command.port}: {error.strerror}; choose another `port`") from None
        port, token = listening.getsockname()[1], secrets.token_urlsafe(_BYTES)
        console.print(f"open http://{HOST}:{port}/{token}/{_state(command.reopen)}", markup=False)
        console.print("it answers this machine's browser alone; Ctrl-C ends it", markup=False)
        config = uvicorn.Config(
            application(token, port), log_level="error", access_log=False, ws="none", server_header=False,
            limit_concurrency=_MOST_CONNECTIONS, timeout_keep_alive=30, timeout_graceful_shutdown=2,
        )  # fmt: skip

        class Server(uvicorn.Server):
            def handle_exit(self, sig: int, frame: FrameType | None) -> None:
                logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what it cuts short is no error
                super().handle_exit(sig, frame)

        # Uvicorn raises the interrupt again when all is ended. For how long it has served nobody wants to be told.
        with Ticker.hushed(), contextlib.suppress(KeyboardInterrupt):
            Server(config).run([listening])
        console.print("ended")


def _state(address: str | None) -> str:
    """Return what an address holds behind its token."""
    fragment = urllib.parse.urldefrag(address or "").fragment
    if address is not None and not fragment:
        raise InputError(f"`reopen` {address}: it holds no question; copy the address that the page shows")
    return f"#{fragment}" if fragment else ""
