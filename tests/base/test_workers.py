"""Processes that compute for another one: none outlives it, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = ("--model", "llama3-8b", "--cluster", "hgx-h100")
MANY = "cluster.nvlink.bytes_per_s=" + ",".join(f"*{number}" for number in range(1, 200))
STARTS = {
    "plan": ("plan", *MODEL, "--nodes", "4", "--seq", "1M", "--jobs", "2"),
    "sweep": ("sweep", *MODEL, "--seq", "1M", "--vary", MANY, "--jobs", "2"),
    "winners": ("winners", *MODEL, "--schedule", "ring,upipe", "--seq", "1M", "--across", MANY, "--jobs", "2"),
    "simulate": ("simulate", *MODEL, "--seq", "1M", "--layers", "4", "--vary", MANY, "--processes", "2"),
}
CASES = [
    ("plan", signal.SIGKILL),
    pytest.param("sweep", signal.SIGTERM, marks=pytest.mark.slow),
    pytest.param("winners", signal.SIGHUP, marks=pytest.mark.slow),
    pytest.param("simulate", signal.SIGKILL, marks=pytest.mark.slow),
]


def working_in(session: int) -> set[int]:
    """Return the processes of a session that live, but for its first."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended since
            state, _, _, of_session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(of_session) == session and state != "Z":
                found.add(int(stat.parent.name))
    return found - {session}


def within(limit_s: float, holds: Callable[[], bool]) -> bool:
    ends = time.monotonic() + limit_s
    while not holds() and time.monotonic() < ends:
        time.sleep(0.05)
    return holds()


@pytest.mark.gloo
@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize(("verb", "number"), CASES)
def test_no_worker_outlives_the_process_that_started_it(verb: str, number: int) -> None:
    program, out = [sys.executable, "-m", "longstep", *STARTS[verb]], subprocess.DEVNULL
    was = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which tests begun by nohup would hand on ignored
    process = subprocess.Popen(program, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)
    signal.signal(signal.SIGHUP, was)
    try:
        assert within(60, lambda: len(working_in(process.pid)) == 2)
        process.send_signal(number)
        process.wait(10)
        assert within(10, lambda: not working_in(process.pid))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
