"""Starts the processes of a run, watches over them, and ends them all: a rank that dies or hangs takes nobody along.

A ``Session`` keeps one process per rank, joined by gloo (or NCCL): on this host, or where torchrun has started workers.
``call`` runs a function on every rank. The session watches how processes end, exceptions, and the progress that ranks
report; processes end with their parent, however it ends.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

from runtime.processes.fork_server import deaf, fork_server
from runtime.processes.process import GRACE_S, LocalRank
from runtime.processes.rank import Job, Rendezvous, Seat
from runtime.processes.torchrun import RemoteRank, Workers
from sim.base.errors import InputError, RankError

TIMEOUT_S = 120.0
"""Longest time that a rank may take for one op, and at least allowed for joining, before the run is ended."""


class Session:
    """The processes of a run. A context manager: on leaving it no process stays.

    ``workers`` are those that torchrun has started, each for the rank of its number; without them all ranks run here.
    ``attention`` names the kernel that GPUs run; by default the fastest that is installed. Rank i computes on this
    host's device ``placement[i]``, by default i. With ``networks`` it is in the network namespace at the path
    ``networks[i]``, as a ``runtime.lab.lab.Lab`` has them.
    """

    def __init__(
        self,
        ranks: int,
        *,
        device: str = "cpu",
        timeout_s: float = TIMEOUT_S,
        workers: Workers | None = None,
        attention: str = "",
        placement: Sequence[int] | None = None,
        networks: Sequence[str] = (),
    ) -> None:
        if networks and (workers or len(networks) != ranks):
            raise InputError(
                f"networks of {len(networks)} ranks: expected one for each of {ranks} ranks, and no torchrun, whose "
                f"processes are in networks already; build a lab of {ranks} ranks"
            )
        if placement is not None and (workers or len(placement) != ranks):
            raise InputError(
                f"placement {tuple(placement)}: expected a device for each of {ranks} ranks; where torchrun starts "
                f"ranks, it is torchrun that places them"
            )
        self.ranks = ranks
        self.one_host = workers is None or ranks <= workers.world.local_size
        """Whether all ranks run on one host, and so read one clock."""
        self._timeout_s = timeout_s
        self._describe: Callable[[int, int], str] = lambda rank, op: f"rank {rank} op {op}"
        fork_server().await_ready()  # here, where Ctrl-C interrupts it
        self.processes: list[LocalRank | RemoteRank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="longstep-")
        try:
            here = Rendezvous(str(Path(self._folder.name) / "store"))
            rendezvous = workers.new_rendezvous() if workers else here
            seat = Seat(0, ranks, device, rendezvous, timeout_s, self.one_host, attention)
            start = workers.start if workers else partial(_start_here, placement or range(ranks))
            for rank in range(ranks):
                with deaf():
                    own = networks[rank] if networks else ""
                    self.processes.append(start(seat._replace(rank=rank, network=own)))
            self._restart_clocks()
            self._collect(max(timeout_s, TIMEOUT_S))  # loading torch from a cold disk is nobody's hanging
        except BaseException:
            self._kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._kill()

    def name_ops(self, describe: Callable[[int, int], str]) -> None:
        """Let errors describe an op by (rank, number)."""
        self._describe = describe

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run ``function(context, *arguments)`` on every rank; return the results by rank. See ``call_each``."""
        return self.call_each(function, [arguments] * self.ranks)

    def call_each(self, function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Run ``function(context, *arguments)`` on every rank, with arguments of its own; return the results by rank.

        ``function`` is a module-level function of a module that ranks can import: raises InputError for one of the
        program itself. Raises RankError, and ends the session, if a rank dies, raises, or makes no progress within the
        time limit.
        """
        if function.__module__ == "__main__":
            raise InputError(f"ranks do not load the program itself: move {function.__name__} to a module of its own")
        self._restart_clocks()
        for process, own in zip(self.processes, arguments, strict=True):
            process.send(Job(function, own))
        return self._collect(self._timeout_s)

    def _restart_clocks(self) -> None:
        for process in self.processes:
            process.restart_clock()

    def _collect(self, limit_s: float) -> list[Any]:
        """Await one answer of every rank; return their values by rank."""
        answers: dict[int, Any] = {}
        while len(answers) < self.ranks:
            waiting = [rank for rank in range(self.ranks) if rank not in answers]
            signs = {sign: rank for rank in waiting for sign in self.processes[rank].signs()}
            for rank in sorted({signs[sign] for sign in wait(signs, timeout=0.2)}):  # type: ignore[index]
                self._receive(rank, answers)
            self._look_after([rank for rank in waiting if rank not in answers], limit_s)
        return [answers[rank] for rank in range(self.ranks)]

    def close(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.send(None)
        deadline = time.monotonic() + GRACE_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _receive(self, rank: int, answers: dict[int, Any]) -> None:
        """Take the answer of a rank that gave a sign, if it is one."""
        alive = self.processes[rank].is_alive()  # asked before its last words are read
        answer = self.processes[rank].answer()
        if answer is None:
            if not alive:
                self._fail(self._first_dead())
            return
        if answer.error:
            deadline = time.monotonic() + GRACE_S / 5
            while time.monotonic() < deadline:  # a rank that died makes its peers fail: blame the dead one
                if not all(process.is_alive() for process in self.processes):
                    self._fail(self._first_dead())
                time.sleep(0.01)
            self._fail(f"{self._where(rank)} failed: {answer.error}")
        answers[rank] = answer.value

    def _look_after(self, waiting: list[int], limit_s: float) -> None:
        """Raise if those that have not answered yet have stood still for too long."""
        seen = {rank: self.processes[rank].seen() for rank in waiting}
        if waiting and time.monotonic() - max(found.at_s for found in seen.values()) > limit_s:
            stuck = min(waiting, key=lambda rank: (seen[rank].waiting, seen[rank].at_s))  # one that waits for nobody
            self._fail(f"no progress for {limit_s:g} s: {self._where(stuck)} hangs")

    def _first_dead(self) -> str:
        dead = next(rank for rank, process in enumerate(self.processes) if not process.is_alive())
        return f"{self._where(dead)} {self.processes[dead].how_ended()}"

    def _where(self, rank: int) -> str:
        op = self.processes[rank].seen().op
        return self._describe(rank, op) if op >= 0 else f"rank {rank} (before its first op)"

    def _fail(self, message: str) -> None:
        self._kill()
        raise RankError(message)

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(GRACE_S)
            process.close()
        self._folder.cleanup()


def _start_here(placement: Sequence[int], seat: Seat) -> LocalRank:
    """Start the process of a rank on its device of this host."""
    return LocalRank(seat, placement[seat.rank])
