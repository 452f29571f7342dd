"""Workers of a server: a process each, one job at a time, of which newer questions of a page push out older ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

LINE_BYTES = 64 * 2**20
"""Of a part of an answer: report pages are the largest."""
ANSWER_S, MAP_S, ANYWAY_S = 60.0, 1200.0, 3600.0
"""What an answer may take, a map, and what was asked for anyway: then the process is ended."""
PATIENCE_S = 1.5
"""What a job may still take that nobody wants any more; ending the process costs the start of another one."""
IDLE_S = 60.0
"""After which a process without a job is ended."""
MOST_WAITING = 16
"""Jobs that wait for a worker; more are refused."""

Part = dict[str, Any]


class BusyError(Exception):
    """More jobs wait than are taken."""


class Job:
    """What a page has asked, and the parts that have come."""

    def __init__(self, number: int, name: str, payload: Any, client: str, order: int, seconds: float) -> None:
        self.number, self.name, self.payload = number, name, payload
        self.client, self.order, self.seconds = client, order, seconds
        self.dropped = False
        self.parts: asyncio.Queue[bytes] = asyncio.Queue()


class Worker:
    """A process that does jobs one after the other; started when the first comes, ended when none has come for long.
    Where it has to be ``ready`` it is there from the beginning, and again when it was ended.
    """

    def __init__(self, *, answer_s: float = ANSWER_S, ready: bool = False) -> None:
        self._answer_s, self._ready = answer_s, ready
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: list[Job] = []
        self._job: Job | None = None
        self._wakes = asyncio.Event()
        self._numbers = 0
        self._loop: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start what has to be ready."""
        if self._ready and self._loop is None:
            self._loop = asyncio.create_task(self._work())

    async def parts(self, name: str, payload: Any, client: str, order: int, *, anyway: bool) -> AsyncIterator[bytes]:
        """Yield the parts of an answer as lines; older questions of the same client and name end, and so does this one
        when nobody reads it on. Raises BusyError where too many wait.
        """
        for other in [*self._waiting, *([self._job] if self._job else [])]:
            if (other.client, other.name) == (client, name) and other.order < order:
                self._drop(other)
        if len(self._waiting) >= MOST_WAITING:
            raise BusyError
        self._numbers += 1
        job = Job(self._numbers, name, payload, client, order, ANYWAY_S if anyway else self._answer_s)
        self._waiting.append(job)
        self._wakes.set()
        self._loop = self._loop or asyncio.create_task(self._work())
        try:
            while (line := await job.parts.get()) != b"":
                yield line
        finally:
            self._drop(job)

    async def close(self) -> None:
        """End the process."""
        if self._loop:
            self._loop.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loop
        await self._end()

    def _drop(self, job: Job) -> None:
        """Let a job go. One that waits is not begun. One that is being done makes no further part, and ends with its
        process where that takes long.
        """
        if job.dropped:
            return
        job.dropped = True
        if job in self._waiting:
            self._waiting.remove(job)
            job.parts.put_nowait(_line({"part": "dropped"}))
            job.parts.put_nowait(b"")
        elif job is self._job:
            self._send({"drop": job.number})
            asyncio.get_running_loop().call_later(PATIENCE_S, self._kill_if_still, job)

    def _kill_if_still(self, job: Job) -> None:
        if job is self._job and self._process:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _work(self) -> None:
        while True:
            await self._until_asked()
            self._job = job = self._waiting.pop(0)
            try:
                async with asyncio.timeout(job.seconds):
                    await self._do(job)
            except TimeoutError:
                job.parts.put_nowait(_error(f"it took over {job.seconds:g} s, and was ended: ask for less"))
                await self._end()
            except (OSError, EOFError, ValueError):  # the latter for a line that is too long
                said = _error("its process ended, as for lack of memory: ask for less")
                job.parts.put_nowait(_line({"part": "dropped"}) if job.dropped else said)
                await self._end()
            finally:
                self._job = None
                job.parts.put_nowait(b"")

    async def _until_asked(self) -> None:
        """Wait for a job; ends the process where none comes for long."""
        if self._ready and not self._waiting:
            with contextlib.suppress(OSError, EOFError):  # the next job says what is wrong
                await self._reader()
        while not self._waiting:
            self._wakes.clear()
            try:
                async with asyncio.timeout(None if self._ready else IDLE_S):
                    await self._wakes.wait()
            except TimeoutError:
                await self._end()
                await self._wakes.wait()

    async def _do(self, job: Job) -> None:
        """Send a job, and take its parts."""
        reader = await self._reader()
        self._send({"id": job.number, "job": job.name, "payload": job.payload})
        end = _line({"id": job.number, "part": "end"})
        while (line := await reader.readline()) != end:
            if not line:
                raise EOFError
            job.parts.put_nowait(line)

    async def _reader(self) -> asyncio.StreamReader:
        """Return what the process says; starts it where there is none."""
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "experiments.serve.worker", env=_environment(),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=LINE_BYTES, start_new_session=True,
            )  # fmt: skip
            assert self._process.stdout
            if not await self._process.stdout.readline():
                raise EOFError
        assert self._process.stdout
        return self._process.stdout

    def _send(self, said: Part) -> None:
        if self._process and self._process.stdin:
            self._process.stdin.write(_line(said))

    async def _end(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        self._process = None


def _line(said: Part) -> bytes:
    return msgspec.json.encode(said) + b"\n"


def _error(text: str) -> bytes:
    return _line({"part": "error", "error": text, "fields": []})


def _environment() -> dict[str, str]:
    """Return the environment of a worker, which finds Longstep where this process has it."""
    own = str(Path(__file__).resolve().parents[2])
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([own, before] if before else [own])}
