"""Programs of a test, and all the processes that they start, wherever these hang."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Programs:
    """The programs of a test, each of which is to end with all that it has started."""

    def __init__(self) -> None:
        self._mark = f"LONGSTEP_TEST={os.getpid()}.{time.monotonic_ns()}"
        self._running: list[subprocess.Popen[str]] = []

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a program in a group of its own, as a shell does."""
        own = {"PYTHONPATH": str(ROOT), **dict([self._mark.split("=")])}
        program = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | own | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._running.append(program)
        return program

    def close(self) -> set[int]:
        """End what has not ended; return what that was."""
        left = self.alive()
        deadline = time.monotonic() + 5
        running = {program.pid for program in self._running}
        while left and time.monotonic() < deadline and not left & running:
            time.sleep(0.1)
            left = self.alive()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for program in self._running:
            program.communicate()
        return left

    def alive(self) -> set[int]:
        return {int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if self._marked(path)}

    def _marked(self, path: Path) -> bool:
        try:
            return self._mark.encode() in path.read_bytes().split(b"\0")
        except OSError:
            return False
