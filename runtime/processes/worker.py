"""What a process that torchrun has started for a rank above 0 does: serve the command that rank 0's process runs.

For each session that the command opens it starts the process of its rank, with what such a process needs from its
first moment; passes on what that is told and answers; and says how far it is, and how it ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from datetime import timedelta
from multiprocessing.connection import Client, Connection, wait
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist

from runtime.processes.fork_server import fork_server
from runtime.processes.process import LocalRank
from runtime.processes.rank import Job, Seat
from sim.base.errors import RankError

_REPORT_S = 0.05
"""How often a worker says how far its rank is."""

KEY = "longstep/controller"
"""The key under which torchrun's store holds the address of rank 0's process."""

_JOIN = timedelta(minutes=5)
"""How long a process waits for one that starts later than itself."""


class World(NamedTuple):
    """Where torchrun has put this process."""

    rank: int
    size: int
    """Processes on all hosts."""
    local_rank: int
    local_size: int
    """Processes on this host."""

    @classmethod
    def here(cls) -> World:
        """Return what torchrun has told this process."""
        return cls(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))


class Kill(NamedTuple):
    """Tells a worker to end the process of its rank, whatever that does."""


class Farewell(NamedTuple):
    """Tells a worker that the command has ended."""

    well: bool


class Ended(NamedTuple):
    """Tells that the process of a rank has ended."""

    code: int


def serve_command(world: World) -> NoReturn:
    """Be a worker until the command ends; exits with 0 if that ends well, else with 1."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # to end without a word
    try:
        fork_server()  # which loads meanwhile
        controller = _connected(world)
        for number in (signal.SIGINT, signal.SIGTERM):  # the command hears them too, and is to end first
            signal.signal(number, signal.SIG_IGN)
        while not isinstance(message := controller.recv(), Farewell):
            if isinstance(message, Seat):
                _play(controller, message, world.local_rank)
        with contextlib.suppress(EOFError, OSError):
            controller.recv()  # ends when the command's process does: torchrun blames whichever fails first
    except (EOFError, OSError, dist.DistError):
        sys.exit(1)
    sys.exit(int(not message.well))


def _connected(world: World) -> Connection:
    """Return a connection to the controller; raises RankError if there is no way to it, else an OSError, EOFError or
    DistError if it has ended.
    """
    host, port, key = torchruns_store().get(KEY).decode().split()
    try:
        connection = Client((host, int(port)), authkey=bytes.fromhex(key))
    except ConnectionError:
        raise
    except OSError as error:
        raise RankError(f"rank {world.rank} cannot reach rank 0 at {host}, port {port}: {error}") from error
    connection.send(world.rank)
    return connection


def _play(controller: Connection, seat: Seat, number: int) -> None:
    """Be the go-between of the controller and the process of a rank, from its start to its end."""
    process = LocalRank(seat, number)
    try:
        code, told = None, process.seen()
        while code is None:
            wait([controller, *process.signs()], timeout=_REPORT_S)
            code = process.exitcode  # asked before its last words are read
            answers = list(iter(process.answer, None))
            if (seen := process.seen()) != told:
                controller.send(told := seen)
            for answer in answers:  # last, since what follows an answer is of the next job
                controller.send(answer)
            if controller.poll():
                _obey(controller.recv(), process)
        controller.send(Ended(code))
    finally:
        process.kill()
        process.close()


def _obey(message: Any, process: LocalRank) -> None:
    """Pass on what is for the rank; all else means that it is to end."""
    if message is None or isinstance(message, Job):
        process.restart_clock()
        process.send(message)
    else:
        process.kill()


def torchruns_store() -> dist.Store:
    """Return the store by which the processes of torchrun find each other."""
    store, *_ = next(dist.rendezvous("env://", timeout=_JOIN))
    return store
