"""The process from which ranks are forked: there once, loaded, private, and gone with the one that started it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from runtime.processes.fork_server import fork_server
from runtime.processes.launch import Session
from runtime.processes.rank import RankContext
from sim.base.errors import RankError
from tests.runtime.programs import Programs

pytestmark = [pytest.mark.gloo, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

LIMIT_S = 120
RUN = (
    "-c",
    "from experiments.verbs.cli import main; main()",
    "run",
    "--gpus",
    "2",
    "--seq",
    "2048",
    "--repeats",
    "1000000",
)


class Found(NamedTuple):
    """What a rank finds around itself."""

    server: int
    folder: Path
    variables: dict[str, str]
    threads: int


def look_around(context: RankContext) -> Found:
    return Found(os.getppid(), Path.cwd(), dict(os.environ), torch.get_num_threads())


def loaded(pid: int) -> str:
    """Return the names of the files that a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text()


def test_all_sessions_of_a_process_fork_one_server_that_has_loaded_torch() -> None:
    servers = []
    for ranks in (1, 2):
        with Session(ranks, timeout_s=30) as session:
            servers += [found.server for found in session.call(look_around)]
    (server,) = set(servers)
    assert "libtorch_cpu" in loaded(server)
    assert "libcuda.so" not in loaded(server)
    assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1
    assert parent(server) == os.getpid()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_ranks_see_what_has_changed_since_but_keep_their_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fork_server()
    monkeypatch.setenv("LONGSTEP_TEST", "changed")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.chdir(tmp_path)
    with Session(1, timeout_s=30) as session:
        (found,) = session.call(look_around)
    assert found.folder == tmp_path
    assert found.variables["LONGSTEP_TEST"] == "changed"
    assert found.variables["OMP_NUM_THREADS"] == "1"
    assert found.threads == 1


def test_a_server_that_is_killed_takes_its_ranks_along_and_is_replaced() -> None:
    with Session(2, timeout_s=30) as session:
        (found, _) = session.call(look_around)
        os.kill(found.server, signal.SIGKILL)
        wait_for(lambda: not any(alive(process.pid) for process in session.processes))
        with pytest.raises(RankError, match=r"rank 0 \(before its first op\) was killed by signal SIGKILL"):
            session.call(look_around)
    with Session(1, timeout_s=30) as session:
        assert session.call(look_around)[0].server != found.server


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def forked(pid: int) -> bool:
    """Return whether a process is a fork server, or forked from one."""
    try:
        return b"fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("sign", "processes"),
    [
        pytest.param(sign, processes, marks=() if kept else pytest.mark.slow, id=f"{sign.name} while {when}")
        for processes, when in ((1, "the server loads"), (3, "ranks run"))
        for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
        for kept in [(processes, sign) == (3, signal.SIGKILL)]
    ],
)
def test_no_process_outlives_a_command(programs: Programs, sign: signal.Signals, processes: int) -> None:
    """Ctrl-C reaches the whole group, as from a terminal; the fixture looks for what is left 5 s later."""
    code = 130 if sign == signal.SIGINT else -sign
    program = programs.start(sys.executable, *RUN)
    wait_for(lambda: sum(map(forked, programs.alive())) >= processes or program.poll() is not None)
    if sign == signal.SIGINT:
        os.killpg(program.pid, sign)
    else:
        program.send_signal(sign)
    _, err = program.communicate(timeout=LIMIT_S)
    assert program.returncode == code
    assert err == ("longstep: interrupted\n" if sign == signal.SIGINT else "")


@pytest.mark.slow
def test_a_script_needs_no_guard_and_may_leave_its_session_open_but_ranks_do_not_load_it(programs: Programs) -> None:
    script = """
from runtime.processes.launch import Session
from sim.base.errors import InputError
def number(context):
    return context.rank
session = Session(2, timeout_s=30)
try:
    session.call(number)
except InputError as error:
    print(error)
"""
    program = programs.start(sys.executable, "-c", script)
    out, err = program.communicate(timeout=LIMIT_S)
    assert out == "ranks do not load the program itself: move number to a module of its own\n"
    assert err == ""
    assert program.returncode == 0


@pytest.mark.slow
def test_a_fork_of_a_program_neither_uses_its_server_nor_keeps_it(programs: Programs) -> None:
    script = """
import os, signal
from runtime.processes.launch import Session
from tests.runtime.processes.test_fork_server import look_around
first = Session(1, timeout_s=30)
print(first.call(look_around)[0].server, first.processes[0].pid, flush=True)
fork = os.fork()
if not fork:
    with Session(1, timeout_s=30) as second:
        print(os.getpid(), second.call(look_around)[0].server, flush=True)
signal.pause()
"""
    program = programs.start(sys.executable, "-c", script)
    assert program.stdout
    server, rank = map(int, program.stdout.readline().split())
    fork, other_server = map(int, program.stdout.readline().split())
    assert other_server != server
    assert {program.pid, server, rank, fork, other_server} <= programs.alive()
    program.kill()
    wait_for(lambda: programs.alive() == {fork, other_server})
    os.kill(fork, signal.SIGKILL)
