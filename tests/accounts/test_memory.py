"""Memory by hand: who is alive when, in the order of issue."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.accounts.memory import Lifetime, lifetimes, walk, walks
from sim.schedule.derive.dependencies import Dependencies, derive
from sim.schedule.derive.workspace import adopted, workspace_bytes
from sim.schedule.ir.masks import Span
from sim.schedule.ir.ops import COMPUTE, STREAMS, Accumulate, Exchange, Hold, HostSync, Kernel, Message
from sim.schedule.ir.program import Communicator, Program
from sim.schedule.proof.check import check
from sim.schedule.write.builder import ProgramBuilder
from sim.words.mesh import Mesh
from sim.words.workload import Workload
from tests.helpers import OFFLOADED, VARIANTS, Variant, by_tier, checked_or_refused, make_checked, make_model, slow_but

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
    "name",
    by_tier(
        {"zigzag", "ulysses", "upipe", "zigzag, offloaded"},
        {"balanced-ring", "fpdt", "double ring of single ranks"},
        [*VARIANTS, *OFFLOADED],
    ),
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
    if name == "double ring of single ranks":  # keys hop on to which a rank does not attend, beside gradients' hops
        assert 0 < told < uses


@pytest.mark.parametrize(("rank", "most"), [(0, 4), (2, 6)])
def test_keys_that_are_only_passed_on_do_not_outlive_their_layer(rank: int, most: int) -> None:
    """Rank 0 of a causal ring of slices attends to none that it receives, rank 2 of 4 not to the last ones: these are
    freed at the next layer's first hop, however many layers there are. Rank 2 has keys in a buffer that it attended to,
    too, which lives until the next layer's first kernel that is ordered behind it.
    """
    held = []
    for layers in (2, 6):
        checked = make_checked("ring", Workload(model=make_model(8, 4), seq=32, scope="layer", layers=layers), 4)
        program = checked.schedule.program(rank)
        spans = lifetimes(program, checked.dependencies[rank])
        slots = [spans[at] for at, buffer in enumerate(program.buffers) if buffer.name.startswith("kv slot")]
        held.append(max(sum(span.first <= op < span.end for span in slots) for op in range(len(program.ops))))
    assert held == [most, most]


def lifetimes_by_the_op(program: Program, dependencies: Dependencies) -> list[Lifetime]:
    """The lifetimes, by a pass over the ops."""
    count = len(program.ops)
    behind = [(count, False)] * count
    waiting: dict[str, list[int]] = {}
    for index, op in enumerate(program.ops):
        if op.stream != COMPUTE:
            waiting.setdefault(op.stream, []).append(index)
            continue
        for stream, ended in dependencies.known[index].items():
            of_stream = waiting.get(stream, [])
            while of_stream and of_stream[0] <= ended:
                behind[of_stream.pop(0)] = index, True
    for of_stream in waiting.values():
        for index, following in pairwise(of_stream):
            behind[index] = following, False
    in_turn: dict[str, list[int]] = {}
    for index, op in enumerate(program.ops):
        in_turn.setdefault(op.stream, []).append(index)
    next_of = {one: two for of_stream in in_turn.values() for one, two in pairwise([*of_stream, count])}
    passed_on: set[int] = set()
    for op in program.ops:
        passed_on -= set() if op.stream not in STREAMS else {view.buffer for view in (*op.reads, *op.writes)}
        passed_on |= {view.buffer for view in op.writes} if op.stream not in STREAMS else set()
    first, end = [count] * len(program.buffers), [0] * len(program.buffers)
    unseen: list[set[str]] = [set() for _ in program.buffers]
    behind = [(at + 1, True) if op.stream == COMPUTE else behind[at] for at, op in enumerate(program.ops)]
    touches = [(index, op, view.buffer) for index, op in enumerate(program.ops) for view in (*op.reads, *op.writes)]
    for index, _, buffer in touches:
        safe = min(behind[index][0], next_of[index]) if buffer in passed_on else behind[index][0]
        first[buffer], end[buffer] = min(first[buffer], index), max(end[buffer], safe)
    for index, op, buffer in touches:
        safe, seen = behind[index]
        if not seen or safe > end[buffer]:
            unseen[buffer].add(op.stream)
    for port in (*program.inputs, *program.outputs):
        end[port.view.buffer] = count
    for port in program.inputs:
        first[port.view.buffer] = 0
    return [Lifetime(begin, over, frozenset(of)) for begin, over, of in zip(first, end, unseen, strict=True)]


def same_as_by_the_op(program: Program, dependencies: Dependencies) -> None:
    """Assert that lifetimes and walk are those of a pass over the ops."""
    spans = lifetimes_by_the_op(program, dependencies)
    assert lifetimes(program, dependencies) == spans
    found, host, buffers = walk(program, dependencies), [0], [0]
    for index, op in enumerate(program.ops):
        alive = [b for b, span in zip(program.buffers, spans, strict=True) if span.first <= index < span.end]
        buffers.append(sum(buffer.nbytes for buffer in alive if buffer.place == "hbm"))
        host.append(sum(buffer.nbytes for buffer in alive if buffer.place != "hbm"))
        own = workspace_bytes(op, program) if isinstance(op, Kernel) else 0
        own += sum(program.buffers[buffer].nbytes for buffer in adopted(op, program) if spans[buffer].first < index)
        assert found.in_use[index] == buffers[-1] + own
    assert found.buffer_peak_bytes == max(buffers)
    assert found.host_peak_bytes == max(host)
    assert found.peak_bytes == max(found.in_use, default=0) == sum(found.by_category.values())


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but({"zigzag", "ulysses", "upipe", "zigzag, offloaded"}, [*VARIANTS, *OFFLOADED]))
def test_columns_say_what_a_pass_over_the_ops_says(name: str) -> None:
    for ranks in (1, 4):
        checked = checked_or_refused(name, Workload(model=make_model(8, 4), seq=32, scope="layer", layers=2), ranks)
        if checked:
            for program, dependencies in zip(checked.schedule.programs, checked.dependencies, strict=True):
                same_as_by_the_op(program, dependencies)


@pytest.mark.sweep
@given(st.lists(st.tuples(st.sampled_from(("copy", "a", "b", "sync")), st.integers(0, 5), st.integers(0, 5))))
def test_so_they_do_of_random_programs(steps: list[tuple[str, int, int]]) -> None:
    b = ProgramBuilder(0, Workload(model=make_model(4, 4, head_dim=8), seq=8))
    q = b.input("q", (Span(0, 4),), Span(0, 4))
    views = [q, *(b.like(f"buffer {number}", q, "other") for number in range(5))]
    for what, source, target in steps:
        if what == "copy":
            b.add(Accumulate(label="add", source=views[source], into=views[target]))
        elif what == "sync":
            b.add(HostSync(streams=("a", "b")[: source % 3]))
        else:
            sends, recvs = (Message(1, views[source]),), (Message(1, views[target]),) if target != source else ()
            b.add(Exchange(label="pass on", communicator=what, sends=sends, recvs=recvs))
    program = b.build()
    same_as_by_the_op(program, derive(program))


def test_more_bytes_than_a_machine_word_counts() -> None:
    """Scores of 2^32 tokens in one piece, four types of 2^31 heads: 2^69 bytes and more."""
    b = ProgramBuilder(0, Workload(model=make_model(4, 4, head_dim=8), seq=8))
    q = b.input("q", (Span(0, 4),), Span(0, 4))
    huge = b.buffer("huge", "bshd", (1, 2**32, 2**31, 16), "fp32", "other")
    b.copy(q, huge[:, :4, :4, :8], "copy")
    program = b.build()
    assert walk(program, derive(program)).peak_bytes == 2**69 + 4 * 4 * 8 * 4


def test_a_schedule_is_walked_once() -> None:
    checked = make_checked("ring", Workload(model=make_model(8, 4), seq=32), 2)
    assert walks(checked) is walks(checked)
    assert walks(checked) == [walk(p, d) for p, d in zip(checked.schedule.programs, checked.dependencies, strict=True)]


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


@pytest.mark.parametrize("ring", [1, 2])
def test_a_published_backward_function_holds_what_it_made_until_it_returns(ring: int) -> None:
    """In bf16, of a tensor of query heads A bytes, of key heads A/2: q, k, v, out and dout 4 A, the kernel's dq, dk, dv
    2 A, dq in fp32 2 A, dk and dv in fp32 twice 2 A, which a ring of one sends to itself. All of it is alive when the
    last result is cast.
    """
    workload = Workload(model=make_model(8, 4), seq=64, dtype="bf16", scope="layer")
    checked = check(Variant("usp", {"sums": "published"}).build(workload, Mesh(ring=ring, ulysses=2)))
    program, dependencies = checked.schedule.program(0), checked.dependencies[0]
    (at,) = [number for number, op in enumerate(program.ops) if isinstance(op, Hold) and op.label == "return"]
    held, lives = program.ops[at].reads, lifetimes(program, dependencies)
    query, lse = 64 // ring * 4 * 16 * 2, 64 // ring * 4 * 4
    assert sum(map(program.nbytes, held)) == 12 * query + lse
    assert all(lives[view.buffer].first < at - 1 < at < lives[view.buffer].end for view in held)


def test_the_ring_holds_two_slots_whatever_the_number_of_ranks() -> None:
    sizes = set()
    for ranks in (4, 8, 16):
        workload = Workload(model=make_model(4, 4), seq=8 * ranks, mask="full", passes="forward")
        checked = make_checked("ring", workload, ranks)
        sizes.add(walk(checked.schedule.program(0), checked.dependencies[0]).by_category["communication"])
    assert sizes == {2 * 2 * 8 * 4 * 16 * 4}
