"""What an allocator reserves for a step: by hand, and beside what is allocated."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sim.accounts.memory import walk, walks
from sim.accounts.reserved import Allocations, Reserved, allocations_of
from sim.engine.results.report import Report
from sim.plan.search.room import room
from sim.schedule.derive.dependencies import derive
from sim.schedule.ir.masks import Span
from sim.schedule.ir.ops import Accumulate, Exchange, HostSync, Message
from sim.schedule.write.builder import ProgramBuilder
from sim.setup.setup import Setup
from sim.words.options import AllocatorName
from sim.words.workload import Workload
from tests.helpers import make_model
from topology.reserved import OF_CUDA_BESIDE_ALLOCATOR

MIB = 2**20


@pytest.mark.parametrize("waits", [False, True])
def test_what_another_stream_has_used_is_free_when_its_event_has_passed(waits: bool) -> None:
    """Tensors of 16 MiB: q and x are there, x is sent, a kernel waits for that, and x is free. y takes its place if the
    event has passed, as it has if the host waited; else a segment of its own. That holds in the second step, too.
    """
    b = ProgramBuilder(0, Workload(model=make_model(4, 4, head_dim=1024), seq=1024))
    q = b.input("q", (Span(0, 1024),), Span(0, 4))
    x, taken, y = (b.like(name, q, "other") for name in ("x", "taken", "y"))
    b.copy(q, x, "0")
    b.add(Exchange(label="1", communicator="link", sends=(Message(1, x),), recvs=(Message(1, taken),)))
    b.add(Accumulate(label="2", source=taken, into=q))
    if waits:
        b.add(HostSync(streams=("link",)))
    b.copy(q, y, "3")
    program = b.build()
    found = Allocations(program, derive(program))
    assert walk(program, derive(program)).peak_bytes == 48 * MIB
    assert [found.peak("caching", ahead=ahead) for ahead in (False, True)] == [48 * MIB, (48 if waits else 64) * MIB]
    assert found.peak("caching", ahead=True, limit=48 * MIB) == 48 * MIB, "CUDA is asked for no more than there is"
    assert found.peak("caching", ahead=False, limit=47 * MIB) is None


def step(*overrides: str, **fields: Any) -> Setup:
    """A small step of nanotron's."""
    given: dict[str, Any] = {"model": "llama3.2-1b", "seq": "2K", "cluster": "hgx-h100", "scope": "step", "seeds": 1}
    given |= {"schedule": "single", "software": "nanotron-ddp", "layers": 4, "set": overrides}
    return Setup(**(given | fields))


@pytest.mark.parametrize(
    "fields", [{"gpus": 1}, {"gpus": 2, "tp_degree": 2}, {"gpus": 2, "dp_degree": 2, "software": "nanotron"}]
)
def test_no_less_is_reserved_than_is_allocated(fields: dict[str, Any]) -> None:
    """And of one stream no more where its tensors wait for nothing; expandable segments have less between them."""
    checked = step("schedule.checkpoint=none", **fields).resolved().checked()
    found = allocations_of(checked, 0)
    peaks = {}
    names: tuple[AllocatorName, ...] = ("caching", "expandable")
    for name in names:
        for ahead in (False, True):
            peaks[name, ahead] = peak = found.peak(name, ahead=ahead)
            assert peak is not None
            assert peak >= walks(checked)[0].peak_bytes
            assert found.peak(name, ahead=ahead, limit=peak) == peak
            assert found.peak(name, ahead=ahead, limit=walks(checked)[0].peak_bytes - 20 * MIB) is None
    assert peaks["expandable", False] < 1.06 * walks(checked)[0].peak_bytes
    assert (peaks["caching", True] > peaks["caching", False]) is ("tp_degree" in fields)


def test_moments_are_made_in_what_the_first_passes_leave_free() -> None:
    """So that the second step reserves more than weights, gradients and what the passes take."""
    checked = step(gpus=1).resolved().checked()
    program, dependencies = checked.schedule.program(0), checked.dependencies[0]
    moments = sum(buffer.nbytes for buffer in program.buffers if "moments" in buffer.name)
    one, two = (Allocations(program, dependencies).peak("caching", ahead=False, steps=steps) for steps in (1, 2))
    assert one is not None
    assert two is not None
    assert one < two <= one + moments + 64 * MIB


@pytest.mark.sweep
def test_it_is_told_by_stage_and_decides_what_fits() -> None:
    """By capacity: surely, not sure, and surely not."""
    setup = step(gpus=4, tp_degree=2, pp_degree=2, batch=4, set=("schedule.micro_batches=4",))
    predicted = setup.predicted()
    found = predicted.report
    assert isinstance(found.peak_reserved, Reserved)
    assert [stage.peak_reserved for stage in found.stages].count(found.peak_reserved) == 1
    assert all(
        stage.peak_hbm_bytes <= stage.peak_reserved.least_bytes < stage.peak_reserved.most_bytes
        for stage in found.stages
        if stage.peak_reserved
    )
    assert msgspec.json.decode(msgspec.json.encode(found), type=Report) == found
    assert found.room is not None
    assert found.room == room(setup.resolved())
    (limit,) = found.room.limits
    assert (limit.held_bytes, limit.allocator) == (found.peak_reserved.most_bytes, "caching")
    beside, within = OF_CUDA_BESIDE_ALLOCATOR
    assert (limit.reserved_bytes, limit.within_bytes) == (beside, within)
    least = max(stage.peak_hbm_bytes for stage in found.stages)
    for capacity, fits in (
        (limit.held_bytes + beside + within, True),
        (limit.held_bytes + beside + within - 1, None),
        (least + beside - within - 64 * MIB, False),
    ):
        assert predicted.replace(set={"cluster.hbm.capacity_bytes": capacity}).fits is fits
    others = step(gpus=4, tp_degree=2, pp_degree=2, software=None).predicted().report
    assert (others.peak_reserved, others.stages[0].peak_reserved) == (None, None)


@pytest.mark.sweep
def test_it_can_be_named_and_is_of_gpus() -> None:
    for name in ("caching", "expandable"):
        report = step(gpus=1, software=None, set={"software.allocator": name}).predicted().report
        assert report.room
        assert report.room.limits[0].allocator == name
    shown = msgspec.to_builtins(report)
    assert list(shown["peak_reserved"]) == ["least_bytes", "most_bytes"]
