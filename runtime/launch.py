"""Starts the processes of a run, watches over them, and ends them all: a rank that dies or hangs takes nobody along.

A ``Session`` keeps one process per rank, joined by gloo (or NCCL). ``call`` runs a function on every rank. The parent
watches exit codes, exceptions and the progress that ranks report; processes end with their parent, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, MutableSequence
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sim.errors import LongstepError, RankError

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""What carries communication, by the kind of device that ranks compute on."""

TIMEOUT_S = 120.0
"""Longest time that a rank may take for one op, and at least allowed for joining, before the run is ended."""

_GRACE_S = 5.0


class RankContext:
    """What a function that runs on a rank knows of its surroundings."""

    def __init__(self, rank: int, ranks: int, device: torch.device, board: MutableSequence[float]) -> None:
        self.rank = rank
        self.ranks = ranks
        self.device = device
        self._board = board
        self.state: dict[str, Any] = {}
        """What one call leaves for later ones."""

    def progress(self, op: int, waiting: bool) -> None:
        """Report which op the host is at, and whether it waits for others there; restarts the time limit."""
        self._board[_COLUMNS * self.rank : _COLUMNS * (self.rank + 1)] = (float(op), time.monotonic(), float(waiting))


_COLUMNS = 3
"""Per rank, what a session sees of it: number of the op, time of the last progress, whether it waits for others."""


class _Answer(NamedTuple):
    value: Any
    error: str


class Session:
    """The processes of a run. A context manager: on leaving it no process stays."""

    def __init__(
        self, ranks: int, *, device: str = "cpu", timeout_s: float = TIMEOUT_S, threads_per_rank: int = 1
    ) -> None:
        self.ranks = ranks
        self._timeout_s = timeout_s
        self._describe: Callable[[int, int], str] = lambda rank, op: f"rank {rank} op {op}"
        context = mp.get_context("spawn")
        self._board = context.Array("d", _COLUMNS * ranks, lock=False)
        self._folder = tempfile.TemporaryDirectory(prefix="longstep-")
        store = str(Path(self._folder.name) / "store")
        self._pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        place = _Place(os.getpid(), 0, ranks, device, store, timeout_s, threads_per_rank)
        try:
            for rank in range(ranks):
                self._start(context, place._replace(rank=rank))
            self._restart_clocks()
            self._collect(max(timeout_s, TIMEOUT_S))  # loading torch from a cold disk is nobody's hanging
        except KeyboardInterrupt:
            self._kill()
            raise

    def _start(self, context: SpawnContext, place: _Place) -> None:
        """Start the process of one rank."""
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(theirs, place, self._board), name=f"longstep rank {place.rank}", daemon=True
        )
        with _environment(place.threads), _deaf():
            process.start()
            self._pipes.append(ours)
            self.processes.append(process)
        theirs.close()

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
        """Run ``function(context, *arguments)`` on every rank; return the results by rank.

        ``function`` is a module-level function. Raises RankError, and ends the session, if a rank dies, raises, or
        makes no progress within the time limit.
        """
        self._restart_clocks()
        try:
            for pipe in self._pipes:
                pipe.send((function, arguments))
        except (BrokenPipeError, ConnectionResetError):
            self._fail(self._first_dead())
        return self._collect(self._timeout_s)

    def _restart_clocks(self) -> None:
        now = time.monotonic()
        for rank in range(self.ranks):
            self._board[_COLUMNS * rank : _COLUMNS * (rank + 1)] = (-1.0, now, 0.0)

    def _collect(self, limit_s: float) -> list[Any]:
        """Await one answer of every rank; return their values by rank."""
        answers: dict[int, Any] = {}
        while len(answers) < self.ranks:
            waiting = {self._pipes[rank]: rank for rank in range(self.ranks) if rank not in answers}
            sentinels = {self.processes[rank].sentinel: rank for rank in waiting.values()}
            for ready in wait([*waiting, *sentinels], timeout=0.2):
                if ready in waiting:
                    self._receive(waiting[ready], answers)
            self._look_after(answers, limit_s)
        return [answers[rank] for rank in range(self.ranks)]

    def close(self) -> None:
        """End all processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError, ValueError):
                pipe.send(None)
        deadline = time.monotonic() + _GRACE_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _receive(self, rank: int, answers: dict[int, Any]) -> None:
        try:
            answer: _Answer = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(_GRACE_S)
            self._fail(self._first_dead())
        if answer.error:
            deadline = time.monotonic() + _GRACE_S / 5
            while time.monotonic() < deadline:  # a rank that died makes its peers fail: blame the dead one
                if not all(process.is_alive() for process in self.processes):
                    self._fail(self._first_dead())
                time.sleep(0.01)
            self._fail(f"{self._where(rank)} failed: {answer.error}")
        answers[rank] = answer.value

    def _look_after(self, answers: dict[int, Any], limit_s: float) -> None:
        """Raise if a rank has died or stands still for too long."""
        if any(not process.is_alive() for rank, process in enumerate(self.processes) if rank not in answers):
            ready = [rank for rank in range(self.ranks) if rank not in answers and self._pipes[rank].poll()]
            if not ready:
                self._fail(self._first_dead())
        waiting = [rank for rank in range(self.ranks) if rank not in answers]
        seen = {rank: self._board[_COLUMNS * rank : _COLUMNS * (rank + 1)] for rank in waiting}
        if waiting and time.monotonic() - max(last_s for _, last_s, _ in seen.values()) > limit_s:
            stuck = min(waiting, key=lambda rank: (seen[rank][2], seen[rank][1]))  # one that waits for nobody
            self._fail(f"no progress for {limit_s:g} s: {self._where(stuck)} hangs")

    def _first_dead(self) -> str:
        dead = [rank for rank, process in enumerate(self.processes) if not process.is_alive()]
        if not dead:
            return "a rank closed its connection"
        code = self.processes[dead[0]].exitcode or 0
        how = f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"{self._where(dead[0])} {how}"

    def _where(self, rank: int) -> str:
        op = int(self._board[_COLUMNS * rank])
        return self._describe(rank, op) if op >= 0 else f"rank {rank} (before its first op)"

    def _fail(self, message: str) -> None:
        self._kill()
        raise RankError(message)

    def _kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Let a child not hear Ctrl-C from its first moment, since that is the parent's to handle; which, if it comes
    meanwhile, hears it afterwards.
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


class _Place(NamedTuple):
    """Where a process stands."""

    parent: int
    rank: int
    ranks: int
    device: str
    store: str
    timeout_s: float
    threads: int


def _serve(pipe: Connection, place: _Place, board: MutableSequence[float]) -> None:
    """Be one rank: join the others, then run what the parent sends until it sends None."""
    _die_with_parent(place.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see _deaf
    torch.set_num_threads(place.threads)
    torch.set_num_interop_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device("cpu") if place.device == "cpu" else torch.device(place.device, place.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            BACKENDS[place.device],
            init_method=f"file://{place.store}",
            rank=place.rank,
            world_size=place.ranks,
            timeout=timedelta(seconds=place.timeout_s + 60),  # the parent, which can name the op, is to notice first
        )
        context = RankContext(place.rank, place.ranks, device, board)
        pipe.send(_Answer(None, ""))
        while (job := pipe.recv()) is not None:
            function, arguments = job
            pipe.send(_attempt(function, context, arguments))
        dist.destroy_process_group()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(1)


def _attempt(function: Callable[..., Any], context: RankContext, arguments: tuple[Any, ...]) -> _Answer:
    try:
        return _Answer(function(context, *arguments), "")
    except LongstepError as error:
        return _Answer(None, str(error))
    except Exception as error:  # noqa: BLE001 - carried to the parent, which ends the run
        return _Answer(None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def _die_with_parent(parent: int) -> None:
    """Ask Linux to end this process when its parent ends, even if that is killed."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before we asked
            os._exit(1)
