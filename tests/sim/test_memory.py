"""Memory by hand: who is alive when, in the order of issue."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import pytest

from sim.memory import lifetimes, walk
from sim.schedule.derive.dependencies import derive
from sim.schedule.ir.masks import Span
from sim.schedule.ir.ops import COMPUTE, Accumulate, Exchange, Message
from sim.schedule.ir.program import Communicator
from sim.schedule.write.builder import ProgramBuilder
from sim.workload import Workload
from tests.helpers import OFFLOADED, VARIANTS, checked_or_refused, make_checked, make_model, sweep_but

LINK = Communicator(name="link", groups=((0, 1),))


def test_a_buffer_that_another_stream_reads_lives_until_a_kernel_waits_for_that() -> None:
    """ops: 0 fill, 1 send (on its own stream), 2 kernel, 3 kernel that overwrites nothing, 4 kernel that uses what came
    with the exchange: only there is it known that the sent buffer is free.
    """
    b = ProgramBuilder(0, Workload(model=make_model(4, 4, head_dim=8), seq=8))
    q = b.input("q", (Span(0, 4),), Span(0, 4))
    sent, taken, other = (b.like(name, q, "other") for name in ("sent", "taken", "other"))
    b.copy(q, sent, "0")
    b.add(Exchange(label="1", communicator=LINK.name, sends=(Message(1, sent),), recvs=(Message(1, taken),)))
    b.copy(q, other, "2")
    b.add(Accumulate(label="3", source=q, into=other))
    b.add(Accumulate(label="4", source=taken, into=other))
    program = b.build()
    spans = lifetimes(program, derive(program))
    assert [spans[view.buffer][:2] for view in (q, sent, taken, other)] == [(0, 5), (0, 4), (1, 5), (2, 5)]
    assert not any(span.unseen for span in spans)
    size = 4 * 4 * 8 * 4
    assert walk(program, derive(program)).in_use == [2 * size, 3 * size, 4 * size, 4 * size, 3 * size]


@pytest.mark.parametrize(
    "name", sweep_but({"zigzag", "ulysses", "upipe", "zigzag, offloaded"}, [*VARIANTS, *OFFLOADED])
)
def test_memory_is_only_used_anew_when_it_is_free_or_its_user_is_named(name: str) -> None:
    """Whoever takes it next comes behind the last kernel that has been issued by then, on every stream; so that kernel
    has to be ordered behind each use on another stream, or the allocator has to be told of that stream.
    """
    workload = Workload(model=make_model(8, 4), seq=32, scope="layer", layers=3)
    uses = told = 0
    for ranks in (1, 4):
        checked = checked_or_refused(name, workload, ranks)
        for program in checked.schedule.programs if checked else ():
            assert checked is not None
            dependencies = checked.dependencies[program.rank]
            kernels = [index for index, op in enumerate(program.ops) if op.stream == COMPUTE]
            spans = lifetimes(program, dependencies)
            for index, op in enumerate(program.ops):
                for view in (*op.reads, *op.writes) if op.stream != COMPUTE else ():
                    span = spans[view.buffer]
                    if span.end < len(program.ops):
                        last = kernels[bisect_right(kernels, span.end) - 1]
                        seen = dependencies.known[last].get(op.stream, -1) >= index
                        assert seen or op.stream in span.unseen, (op.label, program.buffers[view.buffer].name)
                        uses, told = uses + 1, told + (op.stream in span.unseen)
    assert uses or (VARIANTS | OFFLOADED)[name].schedule == "single"
    if name == "ring":  # causal: the first ranks pass keys on to which they do not attend
        assert 0 < told < uses


def test_categories_and_workspace_at_the_peak() -> None:
    """One backward kernel in bf16: q, k, v, out, lse saved; dout given; gradients; dq summed in fp32, delta, dk
    and dv of every query head, and the lse in flash-attention's own form.
    """
    checked = make_checked("single", Workload(model=make_model(4, 2, head_dim=8), seq=16, dtype="bf16"), 1)
    found = walk(checked.schedule.program(0), checked.dependencies[0])
    query, key, lse = 16 * 4 * 8 * 2, 16 * 2 * 8 * 2, 16 * 4 * 4
    assert found.by_category == {
        "saved": 2 * query + 2 * key + lse,
        "other": query,
        "attention": query + 2 * key + 2 * query + lse + 2 * query + lse,
    }
    assert found.peak_bytes == sum(found.by_category.values())


def test_the_ring_holds_two_slots_whatever_the_number_of_ranks() -> None:
    sizes = set()
    for ranks in (4, 8, 16):
        workload = Workload(model=make_model(4, 4), seq=8 * ranks, mask="full", passes="forward")
        checked = make_checked("ring", workload, ranks)
        sizes.add(walk(checked.schedule.program(0), checked.dependencies[0]).by_category["communication"])
    assert sizes == {2 * 2 * 8 * 4 * 16 * 4}


class Counted(list[dict[str, int]]):
    """What is known, and how often it is asked for."""

    times = 0

    def __getitem__(self, index: Any) -> Any:
        self.times += 1
        return super().__getitem__(index)


def test_ops_that_no_kernel_waits_for_do_not_look_through_the_whole_program() -> None:
    b, count = ProgramBuilder(0, Workload(model=make_model(4, 4, head_dim=8), seq=8)), 50
    q = b.input("q", (Span(0, 4),), Span(0, 4))
    into = b.like("into", q, "other")
    b.copy(q, into, "copy")
    for number in range(count):
        b.add(Exchange(label=f"send {number}", communicator=LINK.name, sends=(Message(1, q),), recvs=()))
        b.add(Accumulate(label=f"add {number}", source=q, into=into))
    program = b.build()
    dependencies = derive(program)
    known = Counted(dependencies.known)
    spans = lifetimes(program, dependencies._replace(known=known))
    assert spans[q.buffer] == (0, len(program.ops), {"link"})
    assert known.times < 3 * len(program.ops)
