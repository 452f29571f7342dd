"""What the process of a rank does: join the others, then run what it is sent, until it is sent None."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, MutableSequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sim.errors import LongstepError

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""What carries communication, by the kind of device that ranks compute on."""


class RankContext:
    """What a function that runs on a rank knows of its surroundings."""

    def __init__(self, place: Place, device: torch.device, board: MutableSequence[float]) -> None:
        self.rank = place.rank
        self.ranks = place.ranks
        self.device = device
        self.attention = place.attention
        """Name of the attention kernel to run; empty: the best one here."""
        self.limit = timedelta(seconds=place.timeout_s + 60)
        """Longest time that communication may take: the session, which can name the op, is to notice first."""
        self._board = board
        self.state: dict[str, Any] = {}
        """What one call leaves for later ones."""

    def progress(self, op: int, waiting: bool) -> None:
        """Report which op the host is at, and whether it waits for others there; restarts the time limit."""
        self._board[:] = (float(op), time.monotonic(), float(waiting))


class Store(NamedTuple):
    """Where the ranks of a session find each other: a file, or the keys under a name in a store that listens."""

    name: str
    host: str = ""
    port: int = 0


class Place(NamedTuple):
    """Where a rank stands."""

    rank: int
    ranks: int
    kind: str
    """Of device that it computes on."""
    store: Store
    timeout_s: float
    threads: int
    one_host: bool
    """Whether all ranks run on one host."""
    attention: str
    """As in RankContext."""


class Job(NamedTuple):
    """A module-level function to be called with the rank's context and these arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Answer(NamedTuple):
    """What came of a job."""

    value: Any
    error: str


def serve(pipe: Connection, place: Place, number: int, parent: int, board: MutableSequence[float]) -> None:
    """Be a rank on the device of a number: join the others, then run what the parent sends until it sends None."""
    _die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see deaf
    torch.set_num_threads(place.threads)
    torch.set_num_interop_threads(1)
    device = torch.device("cpu") if place.kind == "cpu" else torch.device(place.kind, number)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        context = RankContext(place, device, board)
        _join(place, context)
        pipe.send(Answer(None, ""))
        while (job := pipe.recv()) is not None:
            pipe.send(_attempt(job, context))
        dist.destroy_process_group()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(1)


def _join(place: Place, context: RankContext) -> None:
    """Form the process group of all ranks."""
    if place.one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = _open_store(place)
    store.set_timeout(context.limit)
    dist.init_process_group(
        BACKENDS[place.kind],
        store=store,
        rank=place.rank,
        world_size=place.ranks,
        timeout=context.limit,
        # NCCL then forms its communicators at once: at a first exchange it would take all ranks of the group, of which
        # a schedule may have no more than two communicate.
        device_id=context.device if place.kind == "cuda" else None,
    )


def _open_store(place: Place) -> dist.Store:
    """Return the store that a place names."""
    name, host, port = place.store
    if not host:
        return dist.FileStore(name, place.ranks)
    return dist.PrefixStore(name, dist.TCPStore(host, port, is_master=False))


def _attempt(job: Job, context: RankContext) -> Answer:
    try:
        return Answer(job.function(context, *job.arguments), "")
    except LongstepError as error:
        return Answer(None, str(error))
    except Exception as error:  # noqa: BLE001 - carried to the session, which ends the run
        return Answer(None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def _die_with_parent(parent: int) -> None:
    """Ask Linux to end this process when its parent ends, even if that is killed."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before we asked
            os._exit(1)
