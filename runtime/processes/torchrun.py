"""A run over the processes that torchrun has started, on one host or several.

    torchrun -> rank 0's process: the command and its sessions  <-- socket -->  every other process: a worker
                  `- process of rank 0                                            `- process of its rank

The command runs in rank 0's process alone; its sessions watch the ranks of workers as they do their own, so that one
that dies or hangs is named wherever it runs. Hosts share nothing but the network and torchrun's own store.

What comes over the socket is unpickled, and so trusted. It is open at the one address that workers use, and heeds only
who proves (by an HMAC) that it knows a key that is drawn for the run. The key lies in torchrun's store: whoever reaches
that could be a rank of the run, so it is trusted as torchrun is, and only hosts of the run may be able to reach it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, wait
from typing import Any, Self

from runtime.processes.process import GRACE_S, LocalRank, how_ended
from runtime.processes.rank import Answer, Job, Rendezvous, Seat, Seen
from runtime.processes.worker import KEY, Ended, Farewell, Kill, World, serve_command, torchruns_store
from sim.base.errors import InputError, RankError


def under_torchrun(command: Callable[[Workers], None]) -> None:
    """Run a command in rank 0's process, over all others, which serve it and exit."""
    world = World.here()
    if world.rank:
        serve_command(world)
    with Workers(world) as workers:
        command(workers)


class Workers:
    """The processes besides this one, rank 0's, that torchrun has started. A context manager: on leaving it they end.

    A worker's death makes torchrun end all others. This process outlives that for long enough to say what happened: its
    handlers of signals stay if an error has still to be said on leaving, and are as they were before if not.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._sessions = 0
        self._connections: dict[int, Connection] = {}
        self._started: dict[int, RemoteRank] = {}
        key = secrets.token_bytes(32)
        listens, told = _own_address(world)
        self._listener = Listener((listens, 0), backlog=world.size, authkey=key)
        self._store = torchruns_store()
        self._store.set(KEY, f"{told} {self._listener.address[1]} {key.hex()}")
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        handlers = {signal.SIGTERM: _outlive, signal.SIGALRM: _interrupt, signal.SIGINT: _interrupt}
        self._handlers = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        well = error is None or (isinstance(error, SystemExit) and not error.code)
        if well:
            self._connect()
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.send(Farewell(well))
        self._listener.close()
        if well:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def new_rendezvous(self) -> Rendezvous:
        """Return where the ranks of a session are to find each other, once all workers are there to start them."""
        self._connect()
        self._sessions += 1
        return Rendezvous(f"longstep/{self._sessions}", os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

    def start(self, seat: Seat) -> LocalRank | RemoteRank:
        """Start the process of a rank: of rank 0 beside this one, of others by the worker of that number."""
        if seat.rank == 0:
            return LocalRank(seat, self.world.local_rank)
        earlier = self._started.get(seat.rank)
        if earlier and earlier.is_alive():
            raise RankError(f"rank {seat.rank} still hangs in an earlier session")
        self._started[seat.rank] = RemoteRank(self._connections[seat.rank], seat)
        return self._started[seat.rank]

    def _connect(self) -> None:
        """Await the connections of all workers; if one dies before, torchrun ends this process."""
        while len(self._connections) < self.world.size - 1:
            with contextlib.suppress(AuthenticationError, EOFError, OSError):
                connection = self._listener.accept()
                self._connections[connection.recv()] = connection


class RemoteRank:
    """A rank whose process is a child of a worker."""

    def __init__(self, connection: Connection, seat: Seat) -> None:
        self._connection = connection
        self._answers: deque[Answer] = deque()
        self._ended = ""
        self.restart_clock()
        self._tell(seat)

    def send(self, job: Job | None) -> None:
        """See LocalRank."""
        self._tell(job)

    def signs(self) -> list[Connection | int]:
        """See LocalRank."""
        return [self._connection]

    def answer(self) -> Answer | None:
        """See LocalRank."""
        self._listen()
        return self._answers.popleft() if self._answers else None

    def seen(self) -> Seen:
        """See LocalRank."""
        return self._seen

    def restart_clock(self) -> None:
        """See LocalRank."""
        self._seen = Seen(-1, time.monotonic(), False)

    def is_alive(self) -> bool:
        """See LocalRank."""
        self._listen()
        return not self._ended

    def how_ended(self) -> str:
        """See LocalRank."""
        return self._ended

    def kill(self) -> None:
        """See LocalRank."""
        if self.is_alive():
            self._tell(Kill())

    def join(self, timeout_s: float) -> None:
        """See LocalRank."""
        deadline = time.monotonic() + timeout_s
        while self.is_alive() and time.monotonic() < deadline:
            wait([self._connection], timeout=deadline - time.monotonic())

    def close(self) -> None:
        """See LocalRank. The connection is the worker's, which serves later sessions over it."""

    def _tell(self, message: Seat | Job | Kill | None) -> None:
        try:
            self._connection.send(message)
        except OSError:
            self._lose()

    def _listen(self) -> None:
        """Take what has come."""
        try:
            while not self._ended and self._connection.poll():
                self._take(self._connection.recv())
        except (EOFError, OSError):
            self._lose()

    def _take(self, message: Answer | Seen | Ended) -> None:
        if isinstance(message, Answer):
            self._answers.append(message)
        elif isinstance(message, Seen):
            self._seen = message._replace(at_s=time.monotonic())  # other hosts have other clocks
        else:
            self._ended = how_ended(message.code)

    def _lose(self) -> None:
        self._ended = self._ended or "was lost: the process that torchrun started for it has ended, or its host has"


def _own_address(world: World) -> tuple[str, str]:
    """Return the address at which to listen, and the one at which the workers reach that.

    It is the address from which this host reaches torchrun's store. A host may know its own name as a loopback address,
    which others know as another one: then they are told the name, and it listens at all of its addresses.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            way.connect((host, port))  # sends nothing
        except OSError as error:
            raise InputError(
                f"torchrun's MASTER_ADDR {host}: no way over IPv4 ({error}); set its --master-addr or --rdzv-endpoint"
            ) from error
        own = str(way.getsockname()[0])
    return ("", host) if own.startswith("127.") and world.local_size < world.size else (own, own)


def _outlive(*_: object) -> None:
    """End the command a while after torchrun has told it to end, unless it does so itself."""
    signal.setitimer(signal.ITIMER_REAL, GRACE_S)


def _interrupt(*_: object) -> None:
    """End the command as Ctrl-C does; once, since torchrun passes on what the terminal has told all."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt
