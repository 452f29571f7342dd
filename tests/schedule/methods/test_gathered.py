"""Plans over gathered keys: shards of any sizes are exact, alike in both engines, and move each key to every rank."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.execution.verify import output_errors
from runtime.execution.virtual import execute_virtual
from sim.balance.planners import playing
from sim.base.errors import ScheduleError
from sim.batches.batch import batch
from sim.batches.planned import Planned
from sim.batches.planners.static import permuted
from sim.batches.planners.wlb import wlb
from sim.engine.play.simulate import simulate
from sim.schedule.derive.matching import wire_bytes
from sim.schedule.ir.ops import AllGather, Attend, Copy, Exchange, ReduceScatter
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.ir.views import Split
from sim.schedule.methods.allgather import AllGatherOptions
from sim.schedule.methods.gathered import gathered
from sim.schedule.proof.check import Checked, check
from sim.words.mesh import Mesh
from sim.words.workload import Workload
from tests.helpers import make_cluster_spec, make_model
from topology.cluster import Cluster

CPU = torch.device("cpu")
MODEL = make_model(4, 2, 4)


def proved(made: Planned, documents: tuple[int, ...], **fields: Any) -> Checked:
    workload = Workload(
        **{"model": MODEL, "seq": sum(documents), "dtype": "fp64", "documents": documents} | fields  # type: ignore[arg-type]
    )
    options = AllGatherOptions(gradients="fp32")
    return check(gathered(made.plan, "gathered")(workload, Mesh(ring=len(made.plan.layout)), options))


@pytest.mark.sweep
@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(1, 13), min_size=1, max_size=6).map(tuple).filter(lambda lengths: sum(lengths) >= 4),
    st.integers(1, 4),
    st.sampled_from(["sequence", "document"]),
    st.integers(1, 2),
)
def test_any_documents(documents: tuple[int, ...], ranks: int, sharding: Any, sequences: int) -> None:
    made = wlb(batch(documents), ranks, sharding)
    if not all(made.plan.layout):  # a rank without tokens has nothing to give
        return
    checked = proved(made, documents, batch=sequences)
    assert max(output_errors(checked, execute_virtual(checked, CPU, 1)).values()) <= 1e-12
    cluster = Cluster(make_cluster_spec(ranks))
    native, reference = (simulate(checked, cluster, None, engine=one).trace.rows for one in ("auto", "simpy"))
    assert native == reference
    # Keys and values of 2 heads of 4 in fp64 to every other rank, again for the backward pass, and their sums back.
    moved = wire_bytes(checked.schedule, checked.matching)
    assert moved == 3 * (ranks - 1) * 2 * sequences * sum(documents) * 2 * 4 * 8
    claims = checked.schedule.header.claims
    assert claims is not None
    assert claims.wire_bytes == moved


def test_one_kernel_attends_to_all_documents() -> None:
    documents = (13, 2, 9, 7)
    checked = proved(wlb(batch(documents), 3, "document"), documents)
    for program in checked.schedule.programs:
        kinds = [type(op) for op in program.ops]
        assert [kinds.count(kind) for kind in (Attend, AllGather, ReduceScatter, Copy, Exchange)] == [1, 4, 2, 6, 0]


@pytest.mark.sweep
def test_layers_around_unequal_shards_are_exact() -> None:
    documents = (13, 2, 9, 7)
    checked = proved(wlb(batch(documents), 3, "document"), documents, scope="layer", layers=2, model=make_model(8, 4))
    assert max(output_errors(checked, execute_virtual(checked, CPU, 2)).values()) <= 1e-12


def test_planners_that_gather_are_played_so() -> None:
    packed = batch([5, 7])
    assert playing(wlb(packed, 3)).__qualname__ == "wlb-llm"
    workload = Workload(model=MODEL, seq=12, dtype="fp64", documents=(5, 7))
    for made, kinds in (
        (wlb(packed, 3), {AllGather, ReduceScatter}),
        (permuted(packed, [*range(0, 12, 2), *range(1, 12, 2)], 2), {Exchange}),  # every other token
    ):
        schedule = playing(made)(workload, Mesh(ring=len(made.plan.layout)))
        assert {type(op) for op in schedule.program(0).ops} & {AllGather, ReduceScatter, Exchange} == kinds


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda split: Split(split.view, split.dim, split.parts, split.sizes[1:]), "cuts .* into"),
        (lambda split: Split(split.view, split.dim, split.parts, split.sizes[::-1]), "takes parts .* for sizes"),
    ],
)
def test_copies_of_other_sizes_are_refused(change: Any, said: str) -> None:
    documents = (13, 2, 9, 7)
    schedule = proved(wlb(batch(documents), 3, "document"), documents).schedule

    def changed(rank: int) -> Any:
        program = schedule.program(rank)
        at = next(index for index, op in enumerate(program.ops) if isinstance(op, Copy) and op.source.sizes)
        op = program.ops[at]
        assert isinstance(op, Copy)
        broken = msgspec.structs.replace(op, source=change(op.source))
        return Program(
            rank=rank,
            buffers=program.buffers,
            ops=[*program.ops[:at], broken, *program.ops[at + 1 :]],
            inputs=program.inputs,
            outputs=program.outputs,
        )

    with pytest.raises(ScheduleError, match=said):
        check(Schedule(schedule.header, changed))
