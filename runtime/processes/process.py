"""The process of a rank as whoever starts it sees it: it is given jobs, answers them, reports how far it is, and ends.

So it is watched in the same way wherever it runs: as a child of this process, or of another on another host.
"""

from __future__ import annotations

import contextlib
import signal
from multiprocessing.connection import Connection

from runtime.processes.fork_server import ForkedProcess, fork_server
from runtime.processes.rank import Answer, Board, Job, Seat, Seen, serve

GRACE_S = 5.0
"""Longest time for what should take none, such as ending."""


class LocalRank(ForkedProcess):
    """A rank whose process runs on this host; ``number`` is that of its device here."""

    def __init__(self, seat: Seat, number: int) -> None:
        self._board = Board()
        super().__init__(*fork_server().fork(self._board.file, serve, seat, number))

    def send(self, job: Job | None) -> None:
        """Let it run a job, or end; if it has gone, ``ended`` says so."""
        with contextlib.suppress(OSError):
            self.pipe.send(job)

    def signs(self) -> list[Connection | int]:
        """Return what ``multiprocessing.connection.wait`` can wait for: an answer, a report, or its end."""
        return [self.pipe, self.sentinel]

    def answer(self) -> Answer | None:
        """Return its next answer, None if there is none yet. One that has closed its connection is about to end, and is
        made to.
        """
        try:
            return self.pipe.recv() if self.pipe.poll() else None
        except (EOFError, ConnectionResetError):
            self.join(GRACE_S)
            self.kill()
            return None

    def seen(self) -> Seen:
        """Return how far it is."""
        return self._board.seen()

    def restart_clock(self) -> None:
        """Let it count as before its first op, reported now."""
        self._board.restart()

    def is_alive(self) -> bool:
        """Return whether it has not ended yet."""
        return self.exitcode is None

    def how_ended(self) -> str:
        """Return what to say of a process that has ended."""
        return how_ended(self.exitcode or 0)

    def close(self) -> None:
        """Give back what served to talk to it alone; it is told and asked nothing afterwards."""
        self.pipe.close()


def how_ended(code: int) -> str:
    """Return what to say of a process that ended with an exit code, below 0 for a signal."""
    return f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
