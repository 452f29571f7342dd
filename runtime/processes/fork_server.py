"""Starts processes by forking one that has loaded torch, so that all but the first start at once.

    this process  <-- socket pair -->  fork server  -- fork -->  processes of ranks, of every session in turn

The server belongs to the process that has started it. It is reached by nothing but an inherited socket, so by no other
user; it ends, and kills what it has forked, when the other end of that socket is closed, however that came about. If
the server is killed, Linux kills what it has forked.

It is not multiprocessing's: of those a process has one, which the program may have started before, without torch and
with other variables; in Python 3.11.0 anybody can reach its socket; and what it forks outlives a killed parent.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple

from sim.base.errors import RankError

_PRELOADED = ("runtime.run",)
"""What all ranks run. Loading it must neither start threads nor initialise CUDA, which no fork survives."""

_VARIABLES = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""What libraries read when they are loaded: so the server starts with them.

A rank computes with one thread. Its heap keeps what it once had, as the caching allocator of CUDA does: else every
large tensor is mapped anew, and page faults make the first touch of it several times slower. Huge pages where the
system grants them, so that a kernel's time depends less on where its tensors happen to lie.
"""

_NUMBER = struct.Struct("q")
_SIGNALS = 4096
"""More than come at a time."""


class _Task(NamedTuple):
    """What a forked process is to do, and where: all that may have changed since its server started."""

    function: Callable[..., None]
    arguments: tuple[Any, ...]
    environment: dict[str, str]
    path: list[str]
    folder: Path


class ForkedProcess:
    """A process that a fork server has forked; raises RankError if the server has ended."""

    def __init__(self, pipe: Connection, told: Connection) -> None:
        self.pipe = pipe
        """The other end of the connection that its function is given."""
        self._told = told
        self._code: int | None = None
        pid = self._hear()
        if pid is None:
            raise RankError("the process that starts ranks has ended; see what it has written to stderr")
        self.pid = pid

    def _hear(self) -> int | None:
        """Return the next number that the server tells of it, the pid and then the exit code; None if it has ended."""
        number = os.read(self._told.fileno(), _NUMBER.size)
        return _NUMBER.unpack(number)[0] if number else None

    @property
    def sentinel(self) -> Connection:
        """What is ready, for ``multiprocessing.connection.wait``, when the process has ended."""
        return self._told

    @property
    def exitcode(self) -> int | None:
        """None while it lives, below 0 for a signal. A server that was killed has taken it along."""
        if self._code is None and wait([self._told], timeout=0):
            code = self._hear()
            self._code = -signal.SIGKILL if code is None else code
        return self._code

    def kill(self) -> None:
        """Kill it, if it lives."""
        if self.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def join(self, timeout_s: float) -> None:
        """Wait until it has ended, no longer than a time."""
        if self._code is None:
            wait([self._told], timeout=timeout_s)


class ForkServer:
    """The server as the process sees it that has started it."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        start = f"main({theirs.fileno()}, {os.getpid()})"
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; {start}"
        with theirs, deaf():
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                env=os.environ | _VARIABLES,
                pass_fds=[theirs.fileno()],
            )

    def is_alive(self) -> bool:
        """Return whether it runs, and is this process's, not that of one of which this is a fork."""
        return self._process.poll() is None

    def await_ready(self) -> None:
        """Return when it has loaded what ranks need, which takes seconds."""
        with contextlib.suppress(OSError):  # it has ended, which whoever asks it for a process is told
            self._control.recv(1, socket.MSG_PEEK)

    def fork(self, shared: int, function: Callable[..., None], *arguments: Any) -> tuple[Connection, Connection]:
        """Start a process that calls ``function(connection, shared, *arguments)``, with the environment of this one;
        return what a ForkedProcess is made of.

        ``shared`` is the descriptor of a file that both are to have; ``function`` is a module-level function.
        """
        self.await_ready()
        (ours, theirs), (told, tells) = Pipe(), Pipe(duplex=False)
        with theirs, tells, contextlib.suppress(OSError):
            socket.send_fds(self._control, [b"."], [theirs.fileno(), shared, tells.fileno()])
        with contextlib.suppress(OSError):  # it has been killed, or its server, and says so itself
            ours.send(_Task(function, arguments, dict(os.environ), sys.path, Path.cwd()))
        return ours, told

    def close(self) -> None:
        """End it, and what it has forked."""
        self.disconnect()
        self._process.kill()
        self._process.wait()

    def disconnect(self) -> None:
        """Give back the end of the socket; the server ends when all have been."""
        self._control.close()


_lock = threading.Lock()
_servers: list[ForkServer] = []
"""The one of this process, if it has started one."""


def fork_server() -> ForkServer:
    """Return the fork server of this process, started if none is alive: it may not be ready yet."""
    with _lock:
        if not (_servers and _servers[0].is_alive()):
            _disconnect()
            _servers[:] = [ForkServer()]
        return _servers[0]


@atexit.register
def _close() -> None:
    for server in _servers:
        server.close()


def _disconnect() -> None:
    for server in _servers:
        server.disconnect()


os.register_at_fork(after_in_child=_disconnect)  # else a server would outlive its process with such a child


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """Let no Ctrl-C interrupt what starts processes, nor reach the server before it can ignore it: one that comes
    meanwhile reaches this process when this ends.
    """
    heard: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    # The mask is this thread's and its children's. Where the process has other threads, as in a notebook, the signal
    # reaches one of those, and Python would still interrupt this one.
    waits = callable(handler) and threading.current_thread() is threading.main_thread()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if waits:
        signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        if waits:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if heard:
            signal.raise_signal(signal.SIGINT)


# The server's side


def main(control: int, parent: int) -> None:
    """Be the server at the end of a socket; in what it forks, do the task and exit."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the process that started it hears them too, and is to end first
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _die_with(parent)  # while it loads it does not listen
    for module in _PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # collecting would write to, and so copy, pages that all share
    _set_death_signal(0)  # which comes when the thread ends that started it, though its process may live on
    pipe, shared = _forked(socket.socket(fileno=control))
    task: _Task = pipe.recv()
    os.environ.clear()
    os.environ.update(task.environment | _VARIABLES)
    os.chdir(task.folder)
    sys.path[:] = task.path
    task.function(pipe, shared, *task.arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # taking down an interpreter would copy most of what it shares


def _forked(control: socket.socket) -> tuple[Connection, int]:
    """Fork a process whenever one is asked for; return only there, with its connection and its shared file."""
    server = os.getpid()
    tells: dict[int, int] = {}
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)  # let it be heard
    control.send(b"!")
    while True:
        ready = wait([control, woken])
        if woken in ready:
            woken.recv(_SIGNALS)
            _reap(tells)
        if control not in ready:
            continue
        asked = _asked(control)
        if not asked:
            break
        pipe, shared, told = asked
        pid = os.fork()
        if not pid:
            _die_with(server)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (control, woken, wakes):
                end.close()
            for other in (told, *tells.values()):
                os.close(other)
            return Connection(pipe), shared
        tells[pid] = told
        _tell(told, pid)
        os.close(pipe)
        os.close(shared)
    for pid in tells:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _reap(tells: dict[int, int]) -> None:
    """Tell how those have ended that have."""
    while tells and (ended := os.waitpid(-1, os.WNOHANG))[0]:
        pid, status = ended
        _tell(tells[pid], os.waitstatus_to_exitcode(status))
        os.close(tells.pop(pid))


def _asked(control: socket.socket) -> list[int]:
    """Return the descriptors that come with the next request; none if there is nobody any more who could ask."""
    with contextlib.suppress(ConnectionResetError):
        return socket.recv_fds(control, 1, 3)[1]
    return []


def _tell(told: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody wants to know any more
        os.write(told, _NUMBER.pack(number))


def _die_with(parent: int) -> None:
    """Ask Linux to end this process when its parent ends, even if that is killed."""
    _set_death_signal(signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def _set_death_signal(number: int) -> None:
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, number)
