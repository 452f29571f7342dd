"""Processes that call functions, one call each at a time, and can be ended in the midst of one.

No process outlives the one that started it: see ``end_with_parent``, which pools of processes take, too.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, NamedTuple, Self

from sim.base.errors import InputError


class _Call(NamedTuple):
    number: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Workers:
    """``jobs`` processes that call functions. With 1 there is no other process: this one calls the function when it
    waits, and nothing can end it in between.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._numbers = 0
        self._own: list[_Call] = []
        self._idle: list[Connection] = []
        self._busy: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._told_s: dict[Connection, float] = {}

    def __enter__(self) -> Self:
        """Start the processes."""
        context = ForkContext() if sys.platform == "linux" else SpawnContext()
        with warnings.catch_warnings():
            # Children of a process with threads compute alone, and take no lock that a thread may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            for _ in range(self._jobs if self._jobs > 1 else 0):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs,), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._idle.append(ours)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End them, whatever they do."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        for connection in (*self._idle, *self._busy):
            connection.close()

    @property
    def cpu_s(self) -> float:
        """What the processes took of a processor, in seconds: on Linux until now, elsewhere until their last result."""
        if sys.platform != "linux":
            return sum(self._told_s.values())
        return sum(_cpu_s(process) for process in self._processes)

    @property
    def idle(self) -> bool:
        """Whether a call can be taken."""
        return bool(self._idle) if self._jobs > 1 else not self._own

    def submit(self, function: Callable[..., Any], *arguments: Any) -> int:
        """Have a function called by an idle process; return the number by which ``wait`` says its result."""
        self._numbers += 1
        call = _Call(self._numbers, function, arguments)
        if self._jobs > 1:
            connection = self._idle.pop()
            connection.send(call)
            self._busy.append(connection)
        else:
            self._own.append(call)
        return call.number

    def wait(self, timeout_s: float | None) -> tuple[int, Any] | None:
        """Return the number and the result of a call that is finished, or None after so many seconds. Raises what the
        function raised, and InputError where its process was killed.
        """
        if self._own:
            call = self._own.pop()
            return call.number, call.function(*call.arguments)
        ready = wait(self._busy, None if timeout_s is None else max(0.0, timeout_s))
        if not ready:
            return None
        connection = ready[0]
        assert isinstance(connection, Connection)
        try:
            number, result, error, self._told_s[connection] = connection.recv()
        except EOFError:
            raise InputError("a process was killed, as for lack of memory: choose fewer `jobs`") from None
        self._busy.remove(connection)
        self._idle.append(connection)
        if error is not None:
            raise error
        return number, result


def follow_parent() -> None:
    """Leave Ctrl-C to the process that started this one, and end when that does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


def end_with_parent() -> None:
    """Let this process end when the one that started it does, which a signal may end before it can say so."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait_for_it() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_for_it, daemon=True).start()


def _serve(connection: Connection) -> None:
    """Call what is asked for until the other end is closed."""
    follow_parent()
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        try:
            connection.send((call.number, call.function(*call.arguments), None, time.process_time()))
        except Exception as error:  # noqa: BLE001 - told to the caller, who raises it
            connection.send((call.number, None, error, time.process_time()))


def _cpu_s(process: BaseProcess) -> float:
    """Return what a process took of a processor, as Linux counts it; nothing where it was killed."""
    clock = (~(process.pid or 0) << 3) | 2  # clock_getcpuclockid of the C library
    try:
        return time.clock_gettime(clock)
    except OSError:
        return 0.0
