"""Who waits for all-to-alls, and that ring hops inside them overlap with attention all the same."""

from typing import Literal

import pytest

from sim.engine.play.simulate import simulate
from sim.schedule.ir.ops import COMPUTE, HOST, AllToAll, Exchange, HostSync
from sim.schedule.methods.ulysses import build as ulysses
from sim.schedule.methods.upipe import UPipeOptions
from sim.schedule.methods.upipe import build as upipe
from sim.schedule.methods.usp import UspOptions
from sim.schedule.methods.usp import build as usp
from sim.schedule.proof.check import Checked, check
from sim.words.mesh import Mesh
from sim.words.workload import Workload
from tests.helpers import make_model
from topology.cluster import Cluster, load_cluster

Waits = Literal["blocking", "host-sync", "async"]
WAITS: tuple[Waits, ...] = ("blocking", "host-sync", "async")
MESH = Mesh(ring=2, ulysses=2)
WORK = Workload(model=make_model(8, 8, head_dim=64), seq=16384, dtype="bf16")


def checked(schedule: str, waits: Waits, *, overlap: bool = True) -> Checked:
    if schedule == "usp":
        return check(usp(WORK, MESH, UspOptions(all_to_alls=waits, overlap=overlap)))
    return check(upipe(WORK, MESH, UPipeOptions(all_to_alls=waits, overlap=overlap)))


def test_all_to_alls_block_and_hops_overlap_as_published() -> None:
    for options in (UspOptions(), UPipeOptions()):
        assert (options.all_to_alls, options.overlap) == ("blocking", True)
    assert ulysses(WORK, Mesh(ulysses=4)).header.options["all_to_alls"] == "blocking"


@pytest.mark.parametrize("schedule", ["usp", "upipe"])
@pytest.mark.sweep
@pytest.mark.parametrize("waits", WAITS)
def test_the_host_waits_for_what_it_is_told(schedule: str, waits: Waits) -> None:
    for overlap in (True, False):
        (ops,) = {program.ops for program in checked(schedule, waits, overlap=overlap).schedule.programs[:1]}
        waited = [stream for op in ops if isinstance(op, HostSync) for stream in op.streams]
        trades, hops = (sum(isinstance(op, kind) for op in ops) for kind in (AllToAll, Exchange))
        assert waited.count("ulysses") == (trades if waits == "host-sync" else 0)
        assert waited.count("ring") == (0 if overlap else hops)
        assert len(waited) == waited.count("ulysses") + waited.count("ring")


@pytest.mark.parametrize("schedule", ["usp", "upipe"])
def test_kernels_run_beside_hops_but_not_beside_trades_that_block(schedule: str) -> None:
    beside: dict[Waits, tuple[float, float]] = {}
    steps_s: dict[Waits, float] = {}
    for waits in WAITS:
        trace = simulate(checked(schedule, waits), Cluster(load_cluster("hgx-h100")), None).trace
        rows = [row for row in trace.rows if row.rank == 0]
        kernels = [row for row in rows if row.stream == COMPUTE]
        there = {
            stream: sum(
                max(0.0, min(one.end_s, row.end_s) - max(one.begin_s, row.begin_s))
                for row in rows
                if row.stream == stream
                for one in kernels
            )
            for stream in ("ulysses", "ring")
        }
        beside[waits], steps_s[waits] = (there["ulysses"], there["ring"]), trace.step_time_s
        assert {row.stream for row in rows} <= {COMPUTE, HOST, "ulysses", "ring"}
    assert beside["blocking"][0] == beside["host-sync"][0] == 0 < beside["async"][0]
    assert all(hops > 0 for _, hops in beside.values())
    assert steps_s["async"] < steps_s["blocking"] < steps_s["host-sync"]
