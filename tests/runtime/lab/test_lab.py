"""Networks in namespaces: what they carry, how fast at most, and that nothing of them stays."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from longstep import build, workload
from runtime.execution.execute import _stretch
from runtime.execution.verify import BOUNDS
from runtime.lab import lab as lab_module
from runtime.lab.lab import Lab, why_not
from runtime.lab.network import BURST_S, WINDOW_S, Network, Wire, burst_bytes, window_bytes
from runtime.processes.launch import Session
from runtime.processes.rank import RankContext
from runtime.run import ScheduleRun
from sim.base.errors import InputError
from sim.schedule.ir.program import Schedule
from sim.schedule.proof.check import Checked, check
from tests.helpers import slow_but
from tests.runtime.programs import Programs

LIMIT_S = 60.0
RATE = 12.5e6


def flat(ranks: int, bytes_per_s: float | None = RATE) -> Network:
    """Return ranks on one switch."""
    names = tuple(f"rank{number}" for number in range(ranks))
    wires = tuple(Wire((name, "switch"), (bytes_per_s, bytes_per_s)) for name in names)
    ways = tuple(tuple(name if name == other else "switch" for other in names) for name in names)
    return Network(names, ("switch",), wires, ways)


def row(ranks: int, bytes_per_s: float = RATE) -> Network:
    """Return ranks next to each other, without a switch."""
    names = tuple(f"rank{number}" for number in range(ranks))
    wires = tuple(Wire(pair, (bytes_per_s, bytes_per_s)) for pair in pairwise(names))
    nearer = [[here + (target > here) - (target < here) for target in range(ranks)] for here in range(ranks)]
    return Network(names, (), wires, tuple(tuple(names[way] for way in ways) for ways in nearer))


def test_what_cannot_be_built_is_refused_before_anything_is() -> None:
    with pytest.raises(InputError, match="2 to 16; set `gpus`"):
        flat(17)
    with pytest.raises(InputError, match="a link of 10 B/s: this machine sets 125000 to"):
        flat(2, 10.0)
    with pytest.raises(InputError, match="a wire between rank0 and nowhere"):
        Network(("rank0", "rank1"), (), (Wire(("rank0", "nowhere"), (None, None)),), (("rank0",) * 2,) * 2)
    with pytest.raises(InputError, match="rank1 reaches rank0 by switch, which no wire joins it to"):
        Network(
            ("rank0", "rank1"),
            ("switch",),
            (Wire(("rank0", "switch"), (None, None)),),
            (("rank0", "switch"), ("switch", "rank1")),
        )


def test_ranks_forward_where_there_is_no_switch_between_them() -> None:
    assert row(3).forwards
    assert not row(2).forwards
    assert not flat(3).forwards


def test_a_bucket_takes_some_frames_at_any_rate() -> None:
    assert burst_bytes(125e6) == 125e6 * BURST_S
    assert burst_bytes(125e3) == 12 * 1514


def test_a_connection_has_so_much_on_the_way_as_the_slowest_link_takes_in_a_moment() -> None:
    assert window_bytes(flat(2, 125e6)) == 125e6 * WINDOW_S
    assert window_bytes(flat(2, 6.25e6)) == 2**16
    slow = Wire(("rank0", "rank1"), (125e6, 6.25e6))
    assert window_bytes(Network(("rank0", "rank1"), (), (slow,), (("rank0", "rank1"),) * 2)) == 2**16


def test_without_root_or_programs_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(InputError, match="takes root.*nothing was changed"):
        Lab(flat(2))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(lab_module.shutil, "which", lambda _: None)
    with pytest.raises(InputError, match="takes the programs ip and tc: install iproute2"):
        Lab(flat(2))


@pytest.fixture(scope="module")
def buildable() -> None:
    """Skip, with the reason, where no network can be built; it starts a process, so only what is marked may ask."""
    if why := why_not():
        pytest.skip(why)


def keeper_of(namespace: str) -> str:
    return re.findall(r"/proc/(\d+)/", namespace)[0]


def namespaces(process: str = "[0-9]*") -> set[str]:
    """Return the network namespaces that a process, by default any, is in or holds open."""
    found = set()
    for path in [*Path("/proc").glob(f"{process}/ns/net"), *Path("/proc").glob(f"{process}/fd/*")]:
        with contextlib.suppress(OSError):
            found.add(str(path.readlink()))
    return {name for name in found if name.startswith("net:")}


def own_links() -> str:
    return subprocess.run(["ip", "-o", "link"], check=True, capture_output=True, text=True).stdout


def gone(those: set[str]) -> bool:
    """Return whether namespaces have gone; Linux may take a moment."""
    deadline = time.monotonic() + LIMIT_S
    while those & namespaces() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not those & namespaces()


def send_and_time(context: RankContext, elements: int, repeats: int) -> float:
    """Pass a tensor from the first rank to the last; return the least time that it took on this rank, in seconds."""
    import torch
    import torch.distributed as dist

    tensor, taken = torch.ones(elements), []
    for _ in range(repeats):
        dist.barrier()
        begin_s = time.monotonic()
        if context.rank == 0:
            dist.send(tensor, context.ranks - 1)
        elif context.rank == context.ranks - 1:
            dist.recv(tensor, 0)
        taken.append(time.monotonic() - begin_s)
    return min(taken)


def verified(session: Session, schedule: Schedule) -> float:
    checked: Checked = check(schedule)
    run = ScheduleRun(session, checked)
    run.step()
    return max(run.errors().values())


@pytest.mark.gloo
def test_two_ranks_compute_over_a_link_of_a_set_rate_and_nothing_of_it_stays(buildable: None) -> None:
    """No transfer can be faster than the link but for its bucket, whatever else this machine does."""
    links = own_links()
    with Lab(flat(2)) as lab, Session(2, networks=lab.namespaces, timeout_s=LIMIT_S) as session:
        made = namespaces(keeper_of(lab.namespaces[0]))
        assert len(made) == 3, "one for each rank, one for the switch"
        assert not made & namespaces("self")
        assert own_links() == links
        assert verified(session, build("ring", workload("tiny", "256"), 2).schedule) < BOUNDS["fp32"]
        nbytes = 4 * 250_000
        least_s = (nbytes - 2 * burst_bytes(RATE)) / RATE
        assert session.call(send_and_time, nbytes // 4, 2)[1] > least_s
    assert gone(made)
    assert own_links() == links


@pytest.mark.gloo
@pytest.mark.slow
def test_ranks_in_a_row_reach_each_other_through_those_between(buildable: None) -> None:
    with Lab(row(4)) as lab, Session(4, networks=lab.namespaces, timeout_s=LIMIT_S) as session:
        assert verified(session, build("ulysses", workload("tiny", "256"), 4).schedule) < BOUNDS["fp32"]
        assert session.call(send_and_time, 25_000, 2)[3] > (100_000 - 4 * burst_bytes(RATE)) / RATE


HOLDS = """
from tests.runtime.lab.test_lab import flat
from runtime.lab.lab import Lab
with Lab(flat(2)) as lab:
    print(*lab.namespaces, flush=True)
    input()
"""


@pytest.mark.gloo
@pytest.mark.parametrize("ends", slow_but({"killed"}, ["killed", "interrupted", "by itself"]))
def test_nothing_stays_however_the_program_ends(buildable: None, programs: Programs, ends: str) -> None:
    """Nor does its keeper, which ``programs`` would find."""
    program = programs.start(sys.executable, "-c", HOLDS)
    assert program.stdout
    made = namespaces(keeper_of(program.stdout.readline()))
    assert len(made) == 3
    if ends == "by itself":
        assert program.communicate("end\n", timeout=LIMIT_S) == ("", "")
    else:
        os.killpg(program.pid, signal.SIGKILL if ends == "killed" else signal.SIGINT)
    program.wait(LIMIT_S)
    assert gone(made)


@pytest.mark.gloo
def test_what_tc_refuses_is_told_and_leaves_nothing(
    buildable: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kernel without a token bucket does."""
    (tmp_path / "tc").write_text("#!/bin/sh\necho 'Specified qdisc kind is unknown.' >&2\nexit 1\n")
    (tmp_path / "tc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    before = namespaces()
    with pytest.raises(InputError, match="Specified qdisc kind is unknown.*nothing was changed"):
        Lab(flat(2))
    assert gone(namespaces() - before)


@pytest.mark.gloo
def test_a_session_takes_a_network_for_each_rank() -> None:
    with pytest.raises(InputError, match="networks of 1 ranks: expected one for each of 2"):
        Session(2, networks=("/proc/self/ns/net",))


def test_a_slow_rank_keeps_its_core_as_long_as_a_slower_clock_would() -> None:
    """At a third of its speed three times what it took, on the clock of this thread, which no other work moves."""
    begin_s = time.thread_time()
    sum(range(200_000))
    took_s = time.thread_time() - begin_s
    _stretch(begin_s, 1 / 3)
    assert time.thread_time() - begin_s >= 3 * took_s


@pytest.mark.gloo
def test_slow_ranks_compute_the_same(ranks: Callable[[int], Session]) -> None:
    checked = build("ring", workload("tiny", "256"), 2)
    run = ScheduleRun(ranks(2), checked, speeds=(1.0, 0.5))
    run.step()
    assert max(run.errors().values()) < BOUNDS["fp32"]
    run.close()
    with pytest.raises(InputError, match="expected one above 0, at most 1, for each of 2 ranks"):
        ScheduleRun(ranks(2), checked, speeds=(2.0, 1.0))
