"""Data-parallel replicas: each with sequences of its own, and one sum of all weights' gradients."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from runtime.execution.verify import BOUNDS, output_errors
from runtime.execution.virtual import execute_virtual
from sim.base.errors import ScheduleError
from sim.engine.play.simulate import simulate
from sim.engine.results.report import report
from sim.schedule.ir.masks import Span
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.methods import ring
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.methods.one_device import on_one_device
from sim.schedule.proof.check import check
from sim.words.mesh import Mesh
from sim.words.workload import Workload
from tests.helpers import make_cluster_spec, make_model, slow_but
from topology.cluster import Cluster


def of_two(name: str, **fields: Any) -> Schedule:
    """Two replicas with two sequences each, of two ranks each where that may be."""
    entry = SCHEDULES[name]
    workload = Workload(model=make_model(4, 2), seq=48, batch=2, dtype="fp64", **fields)
    inner = entry.mesh(1 if name == "single" else 2, workload.model)
    return entry.schedule(workload, msgspec.structs.replace(inner, dp=2))


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="attention"),
        pytest.param({"scope": "layer", "layers": 2}, id="layers", marks=pytest.mark.sweep),
    ],
)
@pytest.mark.parametrize("name", slow_but({"single", "zigzag", "allgather", "ulysses", "fpdt"}, SCHEDULES))
def test_replicas_compute_their_own_sequences(name: str, fields: dict[str, Any]) -> None:
    checked = check(of_two(name, **fields))
    assert {port.batch for port in checked.schedule.program(0).inputs} <= {Span(0, 2), Span(0, 1)}
    outputs = execute_virtual(checked, torch.device("cpu"), 1)
    assert max(output_errors(checked, outputs).values()) <= BOUNDS["fp64"]


@pytest.mark.parametrize("name", ["ring", "usp"])
def test_one_pass_alone_is_given_what_its_own_sequences_need(name: str) -> None:
    checked = check(of_two(name, passes="backward"))
    outputs = execute_virtual(checked, torch.device("cpu"), 1)
    assert max(output_errors(checked, outputs).values()) <= BOUNDS["fp64"]


def test_replicas_on_one_device() -> None:
    checked = check(on_one_device(check(of_two("zigzag", scope="layer"))))
    outputs = execute_virtual(checked, torch.device("cpu"), 1)
    assert max(output_errors(checked, outputs).values()) <= BOUNDS["fp64"]


def test_replicas_take_as_long_as_one_where_nothing_is_shared() -> None:
    workload = Workload(model=make_model(4, 4), seq=48)
    cluster = Cluster(make_cluster_spec(4))
    one, two = (check(ring.build(workload, Mesh(dp=dp, ring=2))) for dp in (1, 2))
    alone, beside = simulate(one, cluster, None), simulate(two, cluster, None)
    assert beside.trace.step_time_s == alone.trace.step_time_s
    figures = [report(played) for played in (alone, beside)]
    assert figures[0].tokens_per_s_per_gpu == figures[1].tokens_per_s_per_gpu
    assert figures[0].mfu == figures[1].mfu


def test_whose_sequences_a_rank_has_is_proved() -> None:
    whole = of_two("ring")

    def moved(first: int) -> Schedule:
        batch = Span(first, first + 2)

        def program(rank: int) -> Program:
            program = whole.program(rank)
            if rank < 2:
                return program
            ports = {
                which: tuple(msgspec.structs.replace(port, batch=batch) for port in getattr(program, which))
                for which in ("inputs", "outputs")
            }
            return program.replace(**ports)

        return Schedule(whole.header, program)

    check(moved(2))
    with pytest.raises(ScheduleError, match="would count tokens 0..24 twice"):
        check(moved(0))
    with pytest.raises(ScheduleError, match="of sequences 0..2 and 1..3: some belong to two"):
        check(moved(1))


def test_a_ring_through_two_replicas_is_caught() -> None:
    """Ranks 1 and 2 take each other's place in their rings, with the sequences and tokens that they had."""
    whole = of_two("ring")
    swapped = {0: 0, 1: 2, 2: 1, 3: 3}
    header = msgspec.structs.replace(
        whole.header,
        communicators=tuple(
            msgspec.structs.replace(one, groups=((0, 2), (1, 3))) for one in whole.header.communicators
        ),
    )

    def program(rank: int) -> Program:
        source = whole.program(swapped[rank])
        ports = {
            which: tuple(
                msgspec.structs.replace(port, batch=own.batch, tokens=own.tokens)
                for port, own in zip(getattr(source, which), getattr(whole.program(rank), which), strict=True)
            )
            for which in ("inputs", "outputs")
        }
        ops = tuple(
            msgspec.structs.replace(
                op,
                sends=tuple(one._replace(peer=swapped[one.peer]) for one in op.sends),
                recvs=tuple(one._replace(peer=swapped[one.peer]) for one in op.recvs),
            )
            if hasattr(op, "recvs")
            else op
            for op in source.ops
        )
        return source.replace(rank=rank, ops=ops, **ports)

    with pytest.raises(ScheduleError, match="attends to another sequence or layer"):
        check(Schedule(header, program))
