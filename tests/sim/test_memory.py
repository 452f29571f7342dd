"""Memory by hand: who is alive when, in the order of issue."""

from __future__ import annotations

from sim.memory import lifetimes, walk
from sim.schedule.builder import ProgramBuilder
from sim.schedule.dependencies import derive
from sim.schedule.ir import Communicator
from sim.schedule.masks import Span
from sim.schedule.ops import Message
from sim.workload import Workload
from tests.helpers import make_checked, make_model

LINK = Communicator(name="link", groups=((0, 1),))


def test_a_buffer_that_another_stream_reads_lives_until_a_kernel_waits_for_that() -> None:
    """ops: 0 fill, 1 send (on its own stream), 2 kernel, 3 kernel that overwrites nothing, 4 kernel that uses what came
    with the exchange: only there is it known that the sent buffer is free.
    """
    b = ProgramBuilder(0, Workload(model=make_model(4, 4, head_dim=8), seq=8))
    q = b.input("q", (Span(0, 4),), Span(0, 4))
    sent, taken, other = (b.like(name, q, "other") for name in ("sent", "taken", "other"))
    b.copy(q, sent, "0")
    b.exchange(LINK, [Message(1, sent)], [Message(1, taken)], "1")
    b.copy(q, other, "2")
    b.accumulate(q, other, "3")
    b.accumulate(taken, other, "4")
    program = b.build()
    spans = lifetimes(program, derive(program))
    assert spans[q.buffer] == (0, 5)
    assert spans[sent.buffer] == (0, 4)
    assert spans[taken.buffer] == (1, 5)
    assert spans[other.buffer] == (2, 5)
    size = 4 * 4 * 8 * 4
    assert walk(program, derive(program)).in_use == [2 * size, 3 * size, 4 * size, 4 * size, 3 * size]


def test_categories_and_workspace_at_the_peak() -> None:
    """One backward kernel in bf16: q, k, v, out, lse saved; dout given; gradients; dq summed in fp32, delta, and
    dk, dv of every query head.
    """
    checked = make_checked("single", Workload(model=make_model(4, 2, head_dim=8), seq=16, dtype="bf16"), 1)
    found = walk(checked.schedule.program(0), checked.dependencies[0])
    query, key, lse = 16 * 4 * 8 * 2, 16 * 2 * 8 * 2, 16 * 4 * 4
    assert found.by_category == {
        "saved": 2 * query + 2 * key + lse,
        "other": query,
        "attention": query + 2 * key + 2 * query + lse + 2 * query,
    }
    assert found.peak_bytes == sum(found.by_category.values())


def test_the_ring_holds_two_slots_whatever_the_number_of_ranks() -> None:
    sizes = set()
    for ranks in (4, 8, 16):
        workload = Workload(model=make_model(4, 4), seq=8 * ranks, mask="full", passes="forward")
        checked = make_checked("ring", workload, ranks)
        sizes.add(walk(checked.schedule.program(0), checked.dependencies[0]).by_category["communication"])
    assert sizes == {2 * 2 * 8 * 4 * 16 * 4}
