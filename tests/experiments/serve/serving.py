"""A page that is served, in a process of its own, as a user has it."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.reading_code import ROOT


class Served(NamedTuple):
    """A server."""

    url: str
    """With its token, and a slash behind it."""
    pid: int


@contextlib.contextmanager
def served(*options: str) -> Iterator[Served]:
    """A page, until it is interrupted; then nothing of it is left."""
    command = [sys.executable, "-m", "experiments.verbs", "serve", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        try:
            found = re.search(r"http://127\.0\.0\.1:\d+/[\w-]+/", first)
            assert found, first
            yield Served(found[0], process.pid)
            family = tree(process.pid)
        finally:
            process.send_signal(signal.SIGINT)
            out, complaints = process.communicate(timeout=20)
        assert (process.returncode, complaints) == (0, "")
        assert out.splitlines()[-1] == "ended"
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family))


def tree(pid: int) -> list[int]:
    """A process and all that it has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return [pid, *(one for child in children.read_text().split() for one in tree(int(child)))]


def memory_mb(pid: int) -> float:
    """What a process and all that it has started have of the memory, shared pages by halves."""
    lines = (line for one in tree(pid) for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines())
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1e3


def until(holds: Any) -> None:
    """Wait until something holds."""
    for _ in range(200):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it never came to that")


def asked(
    client: httpx.Client, url: str, job: str, order: int, **payload: Any
) -> Iterator[tuple[float, dict[str, Any]]]:
    """The parts of an answer, each with the seconds until it came."""
    begin = time.perf_counter()
    data = {"client": "test", "order": order, "payload": payload}
    with client.stream("POST", f"{url}do/{job}", json=data) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            yield time.perf_counter() - begin, json.loads(line)
