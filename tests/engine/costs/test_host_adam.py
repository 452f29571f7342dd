"""AdamW on the host of GPUs: the table that its figures are of comes back, and ranks share sockets and cores."""

from __future__ import annotations

from statistics import geometric_mean
from typing import get_args

import msgspec
import pytest

import longstep
from sim.base.errors import InputError
from sim.engine.costs.cost import CostModel
from sim.engine.costs.on_host import host_passes
from sim.engine.costs.phases import Flow
from sim.engine.play.jitter import STEADY
from sim.schedule.ir.ops import HostAdamW
from sim.schedule.ir.program import Program
from sim.schedule.write.builder import ProgramBuilder
from sim.software.host import host_adam, one_pass, updating
from sim.words.options import HostOptimiserName
from sim.words.profile import Profile, load_profile
from sim.words.workload import Workload
from tests.engine.play.equality import Cell, require_equal_engines
from tests.engine.play.test_engines import requires_compiler
from tests.helpers import make_model
from tests.schedule.model.test_step import make_step, step
from topology.cluster import Cluster, load_cluster
from topology.specs import DramSpec, HostSpec, SocketSpec

BILLION = 10**9
TABLE = {"deepspeed": {1: 0.22, 4: 1.03, 10: 2.57}, "torch": {1: 1.39, 4: 5.71, 10: 14.76}}
"""Seconds of a step by billions of parameters: arXiv:2101.06840 Table 4, one process with both sockets of a DGX-2."""
DGX_2 = 128e9
"""Bytes/s of a socket: 6 channels of DDR4-2666."""


def profile(name: HostOptimiserName) -> Profile:
    found = updating(load_profile("h100-sxm"), name, "cuda")
    assert found is not None
    return found


def program(parameters: int) -> tuple[Program, HostAdamW]:
    """One update of fp32 states, with new weights in bf16."""
    b = ProgramBuilder(0, Workload(model=make_model(4, 4), seq=64, dtype="bf16"))
    states = [b.buffer(f"s{i}", "i", (parameters,), "fp32", "optimiser", "host") for i in range(4)]
    squares = b.buffer("squares", "n", (1,), "fp32", "optimiser", "host")
    cast = b.buffer("cast", "i", (parameters,), "bf16", "parameter", "host")
    weights, gradient, first, second = states
    op = HostAdamW(label="", weights=weights, gradient=gradient, first=first, second=second, squares=squares, cast=cast)
    b.add(op)
    return b.build(), op


def cluster(dram_bytes_per_s: float, **changes: HostSpec) -> Cluster:
    """8 GPUs on two sockets."""
    dram = DramSpec(capacity_bytes=2**40, bytes_per_s=dram_bytes_per_s)
    spec = msgspec.structs.replace(load_cluster("hgx-h100"), socket=SocketSpec(per_node=2, dram=dram), **changes)
    return Cluster(spec)


def flow(name: HostOptimiserName, parameters: int, on: Cluster) -> Flow:
    (found,) = CostModel(on, profile(name)).on_host(0, *program(parameters))
    assert isinstance(found, Flow)
    return found


@pytest.mark.parametrize(("name", "within"), [("deepspeed", 0.12), ("torch", 0.04)])
@pytest.mark.parametrize("billions", [1, 4, 10])
def test_the_table_comes_back(name: HostOptimiserName, within: float, billions: int) -> None:
    """Each socket updates half of it. What scales gradients and casts weights, 14 bytes, is not in the table."""
    half = billions * BILLION // 2
    beside_s = 14 * half / (one_pass().share * DGX_2)
    assert flow(name, half, cluster(DGX_2)).seconds - beside_s == pytest.approx(TABLE[name][billions], rel=within)


@pytest.mark.parametrize(("name", "moved"), [("deepspeed", 28), ("torch", 80)])
def test_shares_are_the_mean_of_the_table(name: HostOptimiserName, moved: int) -> None:
    adam = host_adam(profile(name))
    assert 4 * sum(adam.update) == moved
    each_s = geometric_mean(seconds / billions for billions, seconds in TABLE[name].items())
    assert adam.share == pytest.approx(moved * BILLION / each_s / (2 * 6 * 2666e6 * 8), rel=1e-3)


def test_passes_of_each_by_hand() -> None:
    """Four fp32 tensors read and three written; then the gradient is scaled, and weights are cast."""
    for name, update in (("deepspeed", (16, 12)), ("torch-fused", (16, 12)), ("torch", (48, 32))):
        graph, op = program(1000)
        passes = [moved for _, moved in host_passes(op, graph, host_adam(profile(name)))]
        assert passes == [tuple(1000 * each for each in update), (8000, 6000)]


@pytest.mark.parametrize("name", get_args(HostOptimiserName))
def test_a_socket_is_all_taken_by_one_rank(name: HostOptimiserName) -> None:
    """So four that share it take four times as long."""
    on = cluster(1e11)
    (demand,) = flow(name, BILLION, on).demands
    assert demand[1] == pytest.approx(on.resources[demand[0]].capacity) == 1e11


@pytest.mark.parametrize(("cores", "seconds"), [(8, 42 / 14.2), (16, 21 / 14.2), (800, 42 / 44.8)])
def test_cores_bound_where_they_are_few(cores: int, seconds: float) -> None:
    """Each of 8 ranks has an eighth of them: one moves 14.2 GB/s, and a socket of 100 GB/s gives 44.8."""
    on = cluster(1e11, host=HostSpec(cores=cores))
    assert flow("deepspeed", BILLION, on).seconds == pytest.approx(seconds, rel=1e-9)


@requires_compiler
@pytest.mark.parametrize("name", ["torch", "torch-fused"])
def test_both_engines_play_alike(name: HostOptimiserName) -> None:
    checked = make_step("ulysses", 4, step(dtype="bf16"), optimiser="host")
    for on in (cluster(1e11), cluster(1e11, host=HostSpec(cores=8))):
        require_equal_engines(Cell(checked, on, profile(name), STEADY))


STEP = longstep.Setup(
    "ulysses", model="tiny", cluster="hgx-h100", gpus=2, seq="4K", seeds=1, set={"schedule.optimiser": "host"}
)


@pytest.mark.sweep
def test_who_names_none_has_that_of_zero_offload_and_is_told() -> None:
    unnamed = STEP.predicted()
    named = {
        name: STEP.replace(set={"software.host_optimiser": name}).predicted() for name in get_args(HostOptimiserName)
    }
    torch = named["torch"]
    assert unnamed.step_time_s == named["deepspeed"].step_time_s == named["torch-fused"].step_time_s < torch.step_time_s
    assert unnamed.peak_hbm_bytes == torch.peak_hbm_bytes
    told = [next(note for note in one.report.evidence.notes if "CPU Adam" in note) for one in (unnamed, torch)]
    assert ["software.host_optimiser" in note for note in told] == [True, False]
    assert "DeepSpeed's CPU Adam" in told[0]
    assert "torch's CPU Adam, a pass for each operation: at 0.22 of the rate" in told[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"set": {"software.host_optimiser": "apex"}}, "allowed are deepspeed, torch, torch-fused"),
        ({"profile": "datasheet"}, "host_optimiser=torch: at datasheet rates it is deepspeed; set `profile` to"),
        ({"cluster": "host", "profile": "datasheet"}, "host_optimiser=torch: it is of the CPUs of a node of GPUs"),
    ],
)
def test_what_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        STEP.replace(**({"set": {"software.host_optimiser": "torch"}} | fields)).resolved()


def test_its_own_is_said_without_a_profile() -> None:
    named = STEP.replace(profile="datasheet", set={"software.host_optimiser": "deepspeed"})
    assert named.predicted().step_time_s == STEP.replace(profile="datasheet").predicted().step_time_s
