"""Portions of a sweep on an existing Dask cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sim.base.errors import InputError
from sim.compare.portions import Portion, Row, play

_TIMEOUT_S = 10
_RETRIES = 3
"""How often a portion is played again that fails on a worker; one whose worker is lost Dask gives to another."""


def on_dask(left: list[Portion], address: str) -> Iterator[tuple[Portion, list[Row]]]:
    """Yield portions as workers finish them; raises InputError where no scheduler answers at the address, or Dask is
    not installed.
    """
    try:
        from distributed import Client, as_completed  # noqa: PLC0415 - optional
    except ModuleNotFoundError:
        raise InputError("`dask` needs the package distributed: pip install 'longstep[dask]'") from None
    client = _client(Client, address)
    try:
        waiting = {client.submit(play, portion, retries=_RETRIES, pure=False): portion for portion in left}
        for future, rows in as_completed(waiting, with_results=True):  # type: ignore[no-untyped-call]
            yield waiting[future], rows
    finally:
        client.close()


def _client(kind: Any, address: str) -> Any:
    try:
        return kind(address, timeout=_TIMEOUT_S)
    except (OSError, ValueError, TimeoutError) as error:
        raise InputError(f"`dask` {address}: no scheduler answers ({error}); start one with dask scheduler") from None
