"""What the process of a rank does: join the others, then run what it is sent, until it is sent None."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.heap import Arena
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from runtime.lab.keeper import LINK
from runtime.lab.namespaces import enter
from sim.base.errors import LongstepError

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""What carries communication, by the kind of device that ranks compute on."""

CONNECTIONS = "32"
"""Hardware queues of a GPU: streams that share one wait for each other. The default is 8, and layers over two levels of
rings with offload use up to 11 streams (own ones and NCCL's). A value that the user has set stands.
"""


class Seen(NamedTuple):
    """How far a rank is."""

    op: int
    """Number of the op that its host is at, or -1 before the first."""
    at_s: float
    """When it reported that, on the monotonic clock of this host."""
    waiting: bool
    """Whether it waits for others there."""


_FLOAT_BYTES = 8


class Board:
    """What a rank has last reported, in memory that its process shares with the one that started it.

    It holds three floats: the number of the op, seconds of the monotonic clock, which both read as they are on one
    host, and 1 where the rank waits for others, else 0. The memory is a new one, or that of an open ``file``.
    """

    def __init__(self, file: int = -1) -> None:
        arena = Arena(3 * _FLOAT_BYTES, file)
        self.file = arena.fd
        self._arena = arena  # which closes its file when it is dropped
        self._shared = memoryview(arena.buffer).cast("d")
        self.restart()

    def report(self, op: int, waiting: bool) -> None:
        """Say which op the host is at, and whether it waits for others there."""
        self._shared[0], self._shared[1], self._shared[2] = op, time.monotonic(), waiting

    def restart(self) -> None:
        """Count the rank as before its first op, reported now."""
        self.report(-1, False)

    def seen(self) -> Seen:
        """Return the last report."""
        op, at_s, waiting = self._shared
        return Seen(int(op), at_s, bool(waiting))


class RankContext:
    """What a function that runs on a rank knows of its surroundings."""

    def __init__(self, seat: Seat, device: torch.device, board: Board) -> None:
        self.rank = seat.rank
        self.ranks = seat.ranks
        self.device = device
        self.attention = seat.attention
        """Name of the attention kernel to run; empty: the fastest one here."""
        self.limit = timedelta(seconds=seat.timeout_s + 60)
        """Longest time that communication may take: the session, which can name the op, is to notice first."""
        self.progress = board.report
        """Report which op the host is at, and whether it waits for others there; restarts the time limit."""
        self.state: dict[str, Any] = {}
        """What one call leaves for later ones."""


class Rendezvous(NamedTuple):
    """Where the ranks of a session find each other: a file, or the keys under a name in a store that listens."""

    name: str
    host: str = ""
    port: int = 0


class Seat(NamedTuple):
    """Where a rank sits: its number and that of all ranks, its device, and what it is given."""

    rank: int
    ranks: int
    kind: str
    """Of device that it computes on."""
    rendezvous: Rendezvous
    timeout_s: float
    one_host: bool
    """Whether all ranks run on one host."""
    attention: str
    """As in RankContext."""
    network: str = ""
    """Path of the network namespace that it is in; empty: that of its host."""


class Job(NamedTuple):
    """A module-level function to be called with the rank's context and these arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Answer(NamedTuple):
    """What came of a job."""

    value: Any
    error: str


def serve(pipe: Connection, board: int, seat: Seat, number: int) -> None:
    """Be a rank on the device of a number, reporting on the board in a file: join the others, then run what is sent
    until that is None.
    """
    torch.set_num_interop_threads(1)
    if seat.network:
        enter(seat.network)
    device = torch.device("cpu") if seat.kind == "cpu" else torch.device(seat.kind, number)
    if device.type == "cpu" and seat.one_host and hasattr(os, "sched_setaffinity"):  # which macOS lacks
        here = sorted(os.sched_getaffinity(0))
        if seat.ranks <= len(here) or seat.network:
            os.sched_setaffinity(0, cores_of(seat.rank, seat.ranks, here))
    if device.type == "cuda":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", CONNECTIONS)  # which CUDA reads when it starts
        torch.cuda.set_device(device)
        torch.set_num_threads(threads_beside(torch.cuda.device_count()))
    try:
        context = RankContext(seat, device, Board(board))
        _join(seat, context)
        pipe.send(Answer(None, ""))
        while (job := pipe.recv()) is not None:
            pipe.send(_attempt(job, context))
        if dist.is_initialized():
            dist.destroy_process_group()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(1)


def cores_of(rank: int, ranks: int, cores: Sequence[int]) -> list[int]:
    """Return the cores that a rank is bound to, as launchers do (Open MPI, ``--bind-to core``): a share of its own, or
    one core that it always has in common with the same ranks.

    Left to itself, Linux lets threads of transfers push kernels about, and now and then keeps three of four ranks of a
    lab on one of two cores. Outside of a lab more ranks than cores stay free: they are to take turns on all of them.

    >>> [cores_of(rank, 2, range(5)) for rank in range(2)]
    [[0, 1, 2], [3, 4]]
    >>> [cores_of(rank, 4, range(2)) for rank in range(4)]
    [[0], [1], [0], [1]]
    """
    if ranks > len(cores):
        return [cores[rank % len(cores)]]
    return [core for place, core in enumerate(cores) if place * ranks // len(cores) == rank]


def threads_beside(gpus: int) -> int:
    """Return the threads of a rank that drives one of the GPUs of its host: its share of the cores, for an optimiser on
    the host. Ranks that compute on a CPU have one each.
    """
    return max(1, len(os.sched_getaffinity(0)) // gpus)


def _join(seat: Seat, context: RankContext) -> None:
    """Form the process group of all ranks; one alone needs none, and no network either."""
    if seat.ranks == 1:
        return
    if seat.network:
        os.environ["GLOO_SOCKET_IFNAME"] = LINK
    elif seat.one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = _open_store(seat)
    store.set_timeout(context.limit)
    dist.init_process_group(
        BACKENDS[seat.kind],
        store=store,
        rank=seat.rank,
        world_size=seat.ranks,
        timeout=context.limit,
        # NCCL then forms its communicators at once: at a first exchange it would take all ranks of the group, of which
        # a schedule may have no more than two communicate.
        device_id=context.device if seat.kind == "cuda" else None,
    )


def _open_store(seat: Seat) -> dist.Store:
    """Return the store by which the ranks find each other."""
    name, host, port = seat.rendezvous
    if not host:
        return dist.FileStore(name, seat.ranks)
    return dist.PrefixStore(name, dist.TCPStore(host, port, is_master=False))


def _attempt(job: Job, context: RankContext) -> Answer:
    try:
        return Answer(job.function(context, *job.arguments), "")
    except LongstepError as error:
        return Answer(None, str(error))
    except Exception as error:  # noqa: BLE001 - carried to the session, which ends the run
        return Answer(None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
