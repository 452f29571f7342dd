"""Shards of weights in the host's memory: fetched before each gather, exact, and as many bytes as by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sim.accounts.footprint import footprint
from sim.accounts.memory import terms_in_use, walks
from sim.base.errors import InputError
from sim.engine.play.simulate import STEADY, simulate
from sim.schedule.ir.ops import FETCH, AllGather, HostAdamW, HostCopy
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.model.scope import units
from sim.schedule.proof.check import Checked
from sim.words.options import WeightsPlace
from sim.words.workload import DTYPE_BYTES
from tests.engine.play.equality import Cell, require_equal_engines
from tests.engine.play.test_engines import requires_compiler
from tests.helpers import make_cluster_spec, slow_but, sweep_but
from tests.schedule.model.test_lora import of
from tests.schedule.model.test_step import STACKS, errors_of, make_step, odd, step
from tests.schedule.proof.test_check_catches import refuses
from topology.cluster import Cluster
from topology.specs import DramSpec, PcieSpec, SocketSpec

PLACES: tuple[WeightsPlace, ...] = ("host", "host-states")


def made(name: str, ranks: int, place: WeightsPlace, **options: Any) -> Checked:
    workload = options.pop("workload", step())
    return make_step(name, ranks, workload, options.pop("dp", 1), optimiser="host", weights=place, **options)


def machine(gpus: int, bytes_per_s: float) -> Cluster:
    """GPUs with PCIe of a rate, and host memory that bounds nothing."""
    pcie, dram = PcieSpec(bytes_per_s=bytes_per_s, latency_s=0.0), DramSpec(capacity_bytes=2**40, bytes_per_s=1e13)
    return Cluster(make_cluster_spec(gpus, pcie=pcie, socket=SocketSpec(dram=dram)))


def fetches(program: Program) -> list[HostCopy]:
    return [op for op in program.ops if isinstance(op, HostCopy) and op.label.startswith("fetch weights")]


@pytest.mark.parametrize("place", sweep_but({"host"}, PLACES))
def test_a_step_is_exact(place: WeightsPlace) -> None:
    errors_of(made("ring", 2, place))


@pytest.mark.sweep
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", slow_but({"fpdt"}, SCHEDULES))
def test_every_schedule(name: str, place: WeightsPlace) -> None:
    errors_of(made(name, 1 if name == "single" else 4, place))


SHARDED = [name for name, options in STACKS.items() if options.get("zero_stage", 3) == 3]


@pytest.mark.sweep
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stack", slow_but({"micro-batches, one sum"}, SHARDED))
def test_every_technique(stack: str, place: WeightsPlace) -> None:
    options = {"optimiser": "host", **STACKS[stack], "weights": place}
    errors_of(make_step("zigzag", 2, step(batch=options.get("micro_batches", 1), dtype="bf16", layers=3), **options))


@pytest.mark.sweep
@pytest.mark.parametrize("place", slow_but({"host-states"}, PLACES))
def test_replicas_and_shards_with_padding(place: WeightsPlace) -> None:
    for shards in ("replica", "all"):
        errors_of(made("ulysses", 4, place, dp=2, shards=shards))
    errors_of(made("ring", 4, place, workload=odd(seq=32)))


@pytest.mark.sweep
@pytest.mark.parametrize(("place", "size"), [("host", 2), ("host-states", 4)])
def test_memory_and_bytes_by_hand(place: WeightsPlace, size: int) -> None:
    """Of W weights in bf16 on 4 ranks: 2 W / 4 bytes less on the GPU between passes; each layer is fetched for both
    passes, each end once, 2 bytes a weight, or 4 of the optimiser's own. The host has 12 or 14 bytes of each.
    """
    workload = step(dtype="bf16")
    here, there = make_step("ring", 4, workload, optimiser="host"), made("ring", 4, place, workload=workload)
    weights = {unit: math.prod(unit.flat.shape(workload.model)) for unit in units(workload)}
    program = there.schedule.program(0)
    moved = sum(program.nbytes(op.source) for op in fetches(program))
    passes = {unit: 2 if unit.name == "weights" else 1 for unit in weights}
    assert moved == sum(size * passes[unit] * count for unit, count in weights.items()) // 4
    first = [terms_in_use(one.schedule.program(0), one.dependencies[0])["parameters"][0] for one in (here, there)]
    assert first[0] - first[1] == 2 * sum(weights.values()) // 4
    states = (12 if place == "host-states" else 14) * sum(weights.values()) // 4
    gradients = 4 * sum(weights.values()) // 4
    assert footprint(there.schedule.header).states_bytes == states + gradients
    assert walks(there)[0].host_peak_bytes == states + gradients + DTYPE_BYTES["fp32"] * len(weights)


def test_each_gather_waits_for_its_fetch_alone() -> None:
    """A layer's is behind that of the layer before, and beside the kernels of that one."""
    program = made("ring", 2, "host", workload=step(layers=4)).schedule.program(0)
    labels = [op.label for op in program.ops if op.stream == FETCH or isinstance(op, AllGather)]
    fetched = [label for label in labels if label.startswith("fetch weights")]
    gathered = [label for label in labels if label.startswith("gather")]
    assert len(fetched) == len(gathered) == 2 * 4 + 2
    assert labels == [one for pair in zip(fetched, gathered, strict=True) for one in pair]
    places = {program.buffers[op.source.buffer].place for op in fetches(program)}
    assert places == {"host"}
    copies = [op for op in program.ops if isinstance(op, HostCopy) and op.stream == FETCH]
    assert len(copies) == len(fetched), "new weights stay on the host"
    assert all(op.cast for op in program.ops if isinstance(op, HostAdamW))


@pytest.mark.sweep
def test_fetches_overlap_where_there_is_time_and_bound_the_step_where_there_is_none() -> None:
    workload = step(dtype="bf16", layers=4, seq=4096)
    here, there = make_step("ring", 4, workload, optimiser="host"), made("ring", 4, "host", workload=workload)
    seconds = {}
    for rate in (64e9, 1e6):
        cluster = machine(4, rate)
        seconds[rate] = [simulate(checked, cluster, None).trace.step_time_s for checked in (here, there)]
    program = there.schedule.program(0)
    moved = sum(program.nbytes(op.source) for op in fetches(program))
    assert seconds[64e9][1] == pytest.approx(seconds[64e9][0], rel=0.02)
    assert seconds[1e6][1] >= moved / 1e6


@requires_compiler
@pytest.mark.parametrize("place", sweep_but({"host"}, PLACES))
def test_both_engines_play_alike(place: WeightsPlace) -> None:
    require_equal_engines(Cell(made("ulysses", 4, place, workload=step(dtype="bf16")), machine(4, 1e9), None, STEADY))


@pytest.mark.parametrize("place", PLACES)
def test_a_fetch_that_is_left_out_or_of_another_layer_is_caught(place: WeightsPlace) -> None:
    schedule = made("ring", 2, place, workload=step(layers=3)).schedule
    program = schedule.program(0)
    one, other = [at for at, op in enumerate(program.ops) if op.label.startswith("fetch weights")][1:3]
    left_out = program.replace(ops=tuple([op for at, op in enumerate(program.ops) if at != one]))
    ops = list(program.ops)
    ops[one] = HostCopy(
        label="fetch weights", stream=FETCH, source=fetches(program)[2].source, target=fetches(program)[1].target
    )
    assert other > one
    for changed in (left_out, program.replace(ops=tuple(ops))):
        wrong = Schedule(schedule.header, lambda rank, of=changed: of if rank == 0 else schedule.program(rank))
        refuses(wrong, "before all of it is written|unpacks|gather|where")


@pytest.mark.parametrize("place", PLACES)
def test_frozen_weights_lie_there_beside_an_optimiser_on_the_gpu(place: WeightsPlace) -> None:
    checked = make_step("ring", 2, of(), weights=place)
    errors_of(checked)
    program = checked.schedule.program(0)
    fetched = {program.buffers[op.source.buffer].name[:-2] for op in fetches(program)}
    assert fetched == {f"working {unit} parameters" for unit in ("weights", "embedding", "head")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "host"}, "with schedule.optimiser=gpu.*set schedule.optimiser=host"),
        ({"weights": "host", "optimiser": "host", "zero_stage": 2}, "set schedule.zero_stage=3"),
        ({"weights": "host-states", "zero_stage": 0}, "set schedule.zero_stage=3"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_step("ring", 2, step(), **options)
