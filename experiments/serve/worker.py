"""The process that computes for a page: takes jobs as lines of JSON, answers with lines of JSON, ends with its parent.

Lines it takes are ``{"id": 1, "job": "ask", "payload": {…}}`` and ``{"drop": 1}``, which a newer question of the same
page says of an older one: its further parts are then left out. It has a limit of memory of its own, so that what takes
more ends this process alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import queue
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from sim.base.garbage import collect_rarely

if TYPE_CHECKING:
    from experiments.serve.answering.jobs import Jobs

LEAST_LIMIT_BYTES = 6 * 10**9
"""A worker may have half of the machine's memory, and at least so much of the address space."""
TIDY_BYTES = 200 * 10**6
"""Of its memory, beyond which it gives back behind a job what it can."""


def main() -> None:
    """Do jobs until the input ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything else prints is no answer
    _limit()
    collect_rarely()
    from experiments.serve.answering.jobs import Jobs  # which takes most of a second to import

    jobs, waiting, dropped = Jobs(), queue.SimpleQueue[dict[str, Any]](), set[int]()
    for _ in jobs.parts("ask", {"question": {"model": "tiny", "seq": "8K", "layers": 2}}):
        pass  # what first answers load is there then
    threading.Thread(target=_hear, args=(sys.stdin.buffer, waiting, dropped), daemon=True).start()
    _say(out, {"ready": True})
    while True:
        asked = waiting.get()
        number = asked["id"]
        for part in jobs.parts(asked["job"], asked["payload"]):
            if number in dropped:
                _say(out, {"id": number, "part": "dropped"})
                break
            _say(out, {"id": number, **part})
        dropped.difference_update([one for one in list(dropped) if one <= number])  # also what was done before it came
        _say(out, {"id": number, "part": "end"})
        if waiting.empty() and _resident_bytes() > TIDY_BYTES:
            _tidy(jobs)


def _hear(lines: BinaryIO, waiting: queue.SimpleQueue[dict[str, Any]], dropped: set[int]) -> None:
    """Take what comes in; the end of it ends the process, whatever that is doing."""
    for line in lines:
        said = msgspec.json.decode(line)
        if "drop" in said:
            dropped.add(said["drop"])
        else:
            waiting.put(said)
    os._exit(0)


def _say(out: BinaryIO, part: dict[str, Any]) -> None:
    out.write(msgspec.json.encode(part) + b"\n")
    out.flush()


def _tidy(jobs: Jobs) -> None:
    """Give memory back to the system: what a large step took is else kept for the next one."""
    jobs.forget()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # of other systems' libraries
        ctypes.CDLL(None).malloc_trim(0)


def _resident_bytes() -> int:
    """Return the bytes of memory that this process has; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _limit() -> None:
    if sys.platform == "linux":
        import resource

        half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = max(LEAST_LIMIT_BYTES, half)
        resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))


if __name__ == "__main__":
    main()
