"""The process of a rank as whoever starts it sees it: it is given jobs, answers them, reports how far it is, and ends.

So it is watched in the same way wherever it runs: as a child of this process, or of another on another host.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Protocol

import torch.multiprocessing as mp

from runtime.processes.rank import Answer, Board, Job, Seat, Seen, serve

GRACE_S = 5.0
"""Longest time for what should take none, such as ending."""


class RankProcess(Protocol):
    """The process of a rank, as whoever watches it sees it."""

    def send(self, job: Job | None) -> None:
        """Let it run a job, or end; if it has gone, ``ended`` says so."""
        ...

    def signs(self) -> list[Connection | int]:
        """Return what ``multiprocessing.connection.wait`` can wait for: an answer, a report, or its end."""
        ...

    def answer(self) -> Answer | None:
        """Return its next answer, None if there is none yet."""
        ...

    def seen(self) -> Seen:
        """Return how far it is."""
        ...

    def restart_clock(self) -> None:
        """Let it count as before its first op, reported now."""
        ...

    def is_alive(self) -> bool:
        """Return whether it has not ended yet."""
        ...

    def how_ended(self) -> str:
        """Return what to say of a process that has ended."""
        ...

    def kill(self) -> None:
        """Begin to end it, whatever it does."""
        ...

    def join(self, timeout_s: float) -> None:
        """Wait until it has ended, no longer than a time."""
        ...

    def close(self) -> None:
        """Give back what served to talk to it alone; it is told and asked nothing afterwards."""
        ...


class LocalRank:
    """A rank whose process is a child of this one; ``number`` is that of its device on this host."""

    def __init__(self, seat: Seat, number: int) -> None:
        context = mp.get_context("spawn")
        self._board = Board()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve,
            args=(theirs, seat, number, os.getpid(), self._board),
            name=f"longstep rank {seat.rank}",
            daemon=True,
        )
        with _environment(seat.threads):
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        """The number of the process."""
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        """As processes have it: None while it lives, below 0 for a signal."""
        return self._process.exitcode

    def send(self, job: Job | None) -> None:
        """See RankProcess."""
        with contextlib.suppress(OSError):
            self._pipe.send(job)

    def signs(self) -> list[Connection | int]:
        """See RankProcess."""
        return [self._pipe, self._process.sentinel]

    def answer(self) -> Answer | None:
        """See RankProcess. One that has closed its connection is about to end, and is made to."""
        try:
            return self._pipe.recv() if self._pipe.poll() else None
        except (EOFError, ConnectionResetError):
            self._process.join(GRACE_S)
            self.kill()
            return None

    def seen(self) -> Seen:
        """See RankProcess."""
        return self._board.seen()

    def restart_clock(self) -> None:
        """See RankProcess."""
        self._board.restart()

    def is_alive(self) -> bool:
        """See RankProcess."""
        return self._process.is_alive()

    def how_ended(self) -> str:
        """See RankProcess."""
        return how_ended(self.exitcode or 0)

    def kill(self) -> None:
        """See RankProcess."""
        if self._process.is_alive():
            self._process.kill()

    def join(self, timeout_s: float) -> None:
        """See RankProcess."""
        self._process.join(timeout_s)

    def close(self) -> None:
        """See RankProcess."""
        self._pipe.close()


def how_ended(code: int) -> str:
    """Return what to say of a process that ended with an exit code, below 0 for a signal."""
    return f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """Let children that are started here ignore Ctrl-C from their first moment: the parent handles it.

    A Ctrl-C that comes meanwhile reaches the parent when this ends.
    """
    resource_tracker.ensure_running()  # which multiprocessing would start now, and then let signals through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _environment(threads: int) -> Iterator[None]:
    """Let a child start with the variables that libraries read when they are loaded.

    A fixed number of threads; and a heap that keeps what it once had, as the caching allocator of CUDA does: else
    every large tensor is mapped anew, and page faults make the first touch of it several times slower. Huge pages
    where the system grants them, so that a kernel's time depends less on where its tensors happen to lie.
    """
    wanted = {
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads)),
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
