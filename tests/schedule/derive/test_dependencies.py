"""Derived dependencies against brute force: random programs, every conflicting pair of ops ordered."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.native.library import UnavailableError, load
from sim.schedule.derive import dependencies as derived
from sim.schedule.derive.dependencies import Dependencies, derive, derive_compiled, derive_plainly
from sim.schedule.ir.ops import Exchange, HostSync, Message, Op
from sim.schedule.ir.program import Program
from sim.schedule.ir.views import View
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.write.builder import ProgramBuilder
from sim.words.workload import Workload
from tests.helpers import OFFLOADED, VARIANTS, by_tier, make_model
from tests.schedule.ir.test_fragments import layered


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Copies between random boxes of a few buffers, on three streams, with host synchronisations between them."""
    b = ProgramBuilder(0, Workload(model=make_model(4, 4), seq=8))
    buffers = [b.tensor(f"buffer {i}", 4, 4, "other") for i in range(3)]
    for number in range(draw(st.integers(1, 14))):
        stream = draw(st.sampled_from(("compute", "a", "b")))
        if draw(st.integers(0, 6)) == 0:
            b.add(HostSync(streams=(*draw(st.sets(st.sampled_from(("compute", "a", "b")), min_size=1)),)))
            continue
        source, target = (draw(boxes(draw(st.sampled_from(buffers)))) for _ in range(2))
        if stream == "compute":
            b.copy(source, target, str(number))
        else:
            sends, recvs = (Message(1, source),), (Message(1, target),)
            b.add(Exchange(label=str(number), communicator=stream, sends=sends, recvs=recvs))
    return b.build()


def boxes(whole: View) -> st.SearchStrategy[View]:
    def cut(a: int, b: int, c: int, d: int) -> View:
        return whole[:, min(a, b) : max(a, b) + 1, min(c, d) : max(c, d) + 1]

    numbers = st.integers(0, 3)
    return st.builds(cut, numbers, numbers, numbers, numbers)


def conflict(a: Op, b: Op) -> bool:
    def meet(xs: tuple[View, ...], ys: tuple[View, ...]) -> bool:
        return any(
            x.buffer == y.buffer and all(s < f and e < t for (s, t), (e, f) in zip(x.slices, y.slices, strict=True))
            for x in xs
            for y in ys
        )

    return meet(a.writes, b.writes) or meet(a.reads, b.writes) or meet(a.writes, b.reads)


def closure(edges: list[set[int]]) -> list[set[int]]:
    """Return all that comes before each op."""
    before: list[set[int]] = []
    for found in edges:
        before.append(found.union(*(before[other] for other in found)))
    return before


@pytest.mark.sweep
@given(programs())
def test_data_dependencies_alone_order_every_conflict(program: Program) -> None:
    dependencies = derive(program)
    before = closure([set(found) for found in dependencies.data])
    for j, late in enumerate(program.ops):
        for i, early in enumerate(program.ops[:j]):
            assert (i in before[j]) or not conflict(early, late), (i, j)


@pytest.mark.sweep
@given(programs())
def test_waits_and_stream_order_imply_all_dependencies(program: Program) -> None:
    dependencies = derive(program)
    edges: list[set[int]] = []
    last: dict[str, int] = {}
    synced: set[int] = set()
    for index, op in enumerate(program.ops):
        edges.append({*dependencies.waits[index], *([last[op.stream]] if op.stream in last else []), *synced})
        last[op.stream] = index
        if isinstance(op, HostSync):
            synced = {index}
    before = closure(edges)
    for index, found in enumerate(dependencies.data):
        assert set(found) <= before[index]
        for stream, known in dependencies.known[index].items():
            assert known in before[index]
            assert program.ops[known].stream == stream
        for other in dependencies.waits[index]:
            if not isinstance(program.ops[index], HostSync):
                assert other not in closure([*edges[:index], edges[index] - {other}])[index], "a wait too many"


def test_slots_are_reused_only_after_they_were_read() -> None:
    """A pool of two buffers throttles by itself: the third use waits for the reader of the first."""
    b = ProgramBuilder(0, Workload(model=make_model(4, 4), seq=8))
    source, sink = b.tensor("source", 2, 4, "other"), b.tensor("sink", 2, 4, "other")
    slots = [b.tensor(f"slot {i}", 2, 4, "communication") for i in range(2)]
    for step in range(3):
        b.copy(source, slots[step % 2], f"fill {step}")
        b.copy(slots[step % 2], sink, f"use {step}")
    dependencies = derive(b.build())
    assert 1 in dependencies.data[4]


def compiled(program: Program) -> Dependencies:
    found = derive_compiled(program)
    if found is None:
        with pytest.raises(UnavailableError):
            load("derive")
        pytest.skip("no compiler")
    return found


def assert_equal(a: Dependencies, b: Dependencies) -> None:
    """As lists, and as arrays."""
    assert (a.streams, a.data, a.waits, a.known) == (b.streams, b.data, b.waits, b.known)
    for name in ("data_array", "waits_array", "known_array"):
        assert all(np.array_equal(x, y) for x, y in zip(getattr(a, name), getattr(b, name), strict=True))


@pytest.mark.sweep
@given(programs())
def test_compiled_and_plain_dependencies_are_the_same(program: Program) -> None:
    assert_equal(compiled(program), derive_plainly(program))


@pytest.mark.parametrize("name", by_tier({"usp of 2", "zigzag, offloaded"}, SCHEDULES, [*VARIANTS, *OFFLOADED]))
def test_compiled_and_plain_dependencies_of_layers_are_the_same(name: str) -> None:
    for program in layered(name).programs:
        assert_equal(compiled(program), derive_plainly(program.replace()))


def test_programs_that_are_left_to_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    program = layered("ring").program(0)
    buffers = [msgspec.structs.replace(buffer, shape=(*buffer.shape, 1, 1, 1)) for buffer in program.buffers]
    assert derive_compiled(program.replace(buffers=buffers)) is None
    assert derive_compiled(program.replace(buffers=program.buffers[:5])) is None
    large = [msgspec.structs.replace(buffer, shape=(2**40,)) for buffer in program.buffers]
    assert derive_compiled(program.replace(buffers=large)) is None

    def missing(_: str) -> None:
        raise UnavailableError("no C compiler")

    monkeypatch.setattr(derived, "load", missing)
    assert derive_compiled(program) is None
    assert derive(program).waits == derive_plainly(program).waits


def test_more_dependencies_than_there_was_room_for() -> None:
    """Every op reads what every one before it wrote."""
    b = ProgramBuilder(0, Workload(model=make_model(4, 4), seq=64))
    source, target = b.tensor("source", 64, 4, "other"), b.tensor("target", 64, 4, "other")
    for at in range(63):
        sends, recvs = (Message(1, target),), (Message(1, source[:, at : at + 1]),)
        b.add(Exchange(label="x", communicator=f"stream {at}", sends=sends, recvs=recvs))
        b.copy(source, target[:, at : at + 1], "y")
    program = b.build()
    found = compiled(program)
    assert len(found.data_array.items) > 4 * len(program.ops)
    assert_equal(found, derive_plainly(program))
