"""A network of this machine's own, from its building to its end."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from typing import Self

import msgspec

from runtime.lab.keeper import Answer
from runtime.lab.network import Network, Wire
from runtime.processes.fork_server import deaf
from sim.base.errors import InputError

_GRACE_S = 5.0
_SMALLEST = Network(
    ranks=("one", "other"), switches=(), wires=(Wire(("one", "other"), (1e6, 1e6)),),
    ways=(("one", "other"), ("one", "other")),
)  # fmt: skip


class Lab:
    """A network that was built. A context manager: on leaving it nothing stays.

    Raises InputError where this machine cannot build it; what was begun is gone then, and nothing else was changed.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.namespaces: tuple[str, ...] = ()
        """Paths of those of the ranks, as ``Session`` takes them."""
        if why := _lacks():
            raise InputError(f"a lab of slow links {why}; nothing was changed")
        code = f"import sys; sys.path[:] = {sys.path!r}; from runtime.lab.keeper import main; main()"
        with deaf():
            self._keeper = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            self.namespaces = self._answer().namespaces
        except BaseException:
            self.close()
            raise

    def _answer(self) -> Answer:
        assert self._keeper.stdin
        assert self._keeper.stdout
        self._keeper.stdin.write(msgspec.json.encode(self.network) + b"\n")
        self._keeper.stdin.flush()
        line = self._keeper.stdout.readline()
        answer = (
            msgspec.json.decode(line, type=Answer) if line else Answer(error="the process that builds it has ended")
        )
        if answer.error:
            raise InputError(
                f"this machine cannot build a lab of slow links ({answer.error}): it takes network namespaces, veth, "
                f"bridges and tc's token bucket (kernel modules veth, bridge, sch_tbf); nothing was changed"
            )
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take it down. Processes in it keep what they are in, so they are to end before."""
        for stream in (self._keeper.stdin, self._keeper.stdout):
            assert stream
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        try:
            self._keeper.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()


def _lacks() -> str:
    """Return what this process would need and has not; empty if nothing."""
    if sys.platform != "linux":
        return f"takes Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "takes root, which makes network namespaces: run it as root, in a container of your own if you like"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    return f"takes the programs {' and '.join(missing)}: install iproute2" if missing else ""


def why_not() -> str:
    """Return why no lab can be built here, empty if one can: it builds the smallest."""
    try:
        Lab(_SMALLEST).close()
    except InputError as error:
        return str(error)
    return ""
