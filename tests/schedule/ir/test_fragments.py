"""Calls of fragments: they say what their functions would have written, and nothing that was not given."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from sim.accounts.memory import walk, walks
from sim.base.errors import InputError, ScheduleError
from sim.schedule.derive.dependencies import derive_plainly
from sim.schedule.derive.kernels import kernel_use, use_of
from sim.schedule.derive.workspace import adopted, workspace_bytes
from sim.schedule.ir.masks import Span
from sim.schedule.ir.ops import Accumulate, Copy, Kernel
from sim.schedule.ir.program import Program, Schedule, alone
from sim.schedule.ir.views import Split, View
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.model.block import norm1
from sim.schedule.proof.check import check
from sim.schedule.write.builder import ProgramBuilder
from sim.words.workload import Workload
from tests.helpers import OFFLOADED, VARIANTS, by_tier, make_model


def layered(name: str, ranks: int = 4, layers: int = 3) -> Schedule:
    """Return a variant with several layers, not proved."""
    workload = Workload(model=make_model(8, 4, 4), seq=48, mask="causal", scope="layer", layers=layers)
    variant = (VARIANTS | OFFLOADED)[name]
    return variant.build(workload, variant.mesh(1 if variant.schedule == "single" else ranks, workload.model))


@pytest.mark.parametrize("name", by_tier({"ring", "zigzag, offloaded"}, SCHEDULES, [*VARIANTS, *OFFLOADED]))
def test_calls_say_what_their_functions_write(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, labels and ports of every layer as well: the whole schedule as JSON."""
    try:
        called = layered(name).to_json()
    except InputError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(ProgramBuilder, "call", lambda _b, _key, _layer, function, *views: function(*views))
    flat = layered(name)
    assert {len(program.calls) for program in flat.programs} == {1}
    assert flat.to_json() == called


@pytest.mark.parametrize("name", ["ring", "ulysses", "zigzag, offloaded"])
def test_a_layer_is_traced_once(name: str) -> None:
    few, many = (layered(name, layers=layers).program(1) for layers in (5, 9))
    assert len({call.fragment for call in few.calls}) == len({call.fragment for call in many.calls}) < len(few.calls)
    assert len(few.calls) < len(many.calls)


def attention(name: str) -> Schedule:
    workload = Workload(model=make_model(8, 4), seq=48, mask="causal")
    variant = VARIANTS[name]
    return variant.build(workload, variant.mesh(4, workload.model))


def test_ranks_that_do_the_same_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of Ulysses have the same ops on tokens of their own. Sharing changes no rank's program."""
    checked = check(attention("ulysses"))
    first, *others = [program.calls[0].fragment for program in checked.schedule.programs]
    for other in others:
        assert other.shared is first
        assert other.ops is first.ops
        assert other.inputs != first.inputs
    assert len({id(found) for found in checked.dependencies}) == len({id(walk) for walk in walks(checked)}) == 1
    shared = checked.schedule.to_json()
    monkeypatch.setattr(Schedule, "_shared", lambda _, program: program)
    assert attention("ulysses").to_json() == shared


def test_ranks_of_a_ring_share_nothing() -> None:
    """They have other peers and, under a causal mask, other blocks; lifetimes of what a rank does not use differ."""
    checked = check(attention("ring"))
    fragments = {call.fragment.shared for program in checked.schedule.programs for call in program.calls}
    assert len(fragments) == checked.schedule.num_ranks
    for program, shared in zip(checked.schedule.programs, walks(checked), strict=True):
        assert shared == walk(program, derive_plainly(program))


@pytest.mark.parametrize("changed", ["op", "buffer", "port"])
def test_a_rank_that_differs_in_anything_else_shares_nothing(changed: str) -> None:
    schedule = attention("ulysses")
    program = schedule.program(1)
    (op, *ops), (buffer, *buffers), (port, *ports) = program.ops, program.buffers, program.inputs
    other = {
        "op": {"ops": (msgspec.structs.replace(op, label="another"), *ops)},
        "buffer": {"buffers": (msgspec.structs.replace(buffer, name="another"), *buffers)},
        "port": {"inputs": (msgspec.structs.replace(port, tensor="another"), *ports)},
    }[changed]
    mixed = Schedule(schedule.header, lambda rank: program.replace(**other) if rank == 1 else schedule.program(rank))
    found = [mixed.program(rank).calls[0].fragment for rank in range(3)]
    assert found[1].shared is found[1]
    assert found[2].shared is found[0].shared


def test_programs_as_they_are_read_and_sent() -> None:
    schedule = layered("zigzag, offloaded")
    read = Schedule.from_json(schedule.to_json())
    assert read.programs == schedule.programs
    assert read.hash == schedule.hash
    program = schedule.program(2)
    assert pickle.loads(pickle.dumps(program)) == Program.from_json(program.to_json()) == program
    assert program.replace(ops=program.ops[1:]) != program


@pytest.fixture
def b() -> ProgramBuilder:
    return ProgramBuilder(0, Workload(model=make_model(), seq=8))


def scratch(b: ProgramBuilder, name: str = "x") -> View:
    return b.tensor(name, 8, 8, "other")


Use = Callable[[ProgramBuilder, View, View], Any]


@pytest.mark.parametrize(
    "use",
    [
        lambda b, _, other: b.copy(other, scratch(b), "copy"),
        lambda b, given, other: b.copy(given, other, "copy"),
        lambda b, _, other: b.like("like", other, "other"),
        lambda b, _, other: b.dtype(other),
        lambda b, _, other: b.is_input(other),
        lambda b, _, other: b.whole(other),
        lambda b, _, other: b.elsewhere(other, "host"),
        lambda b, _, other: b.parts_are_contiguous(Split(other, 0, 1)),
        lambda _, given, other: [given, {"more": (other,)}],
        lambda b, _, other: b.output("q", other, (Span(0, 8),), Span(0, 8)),
    ],
)
def test_a_view_that_a_call_was_not_given(b: ProgramBuilder, use: Use) -> None:
    given, other = scratch(b), scratch(b, "y")
    with pytest.raises(ScheduleError, match="call 'of x' uses buffer 'y', which it was not given: it takes a view"):
        b.call("of x", 0, lambda x: use(b, x, other), given)


def test_views_that_alias_are_another_call(b: ProgramBuilder) -> None:
    def add(source: View, into: View) -> View:
        b.add(Accumulate(label="add", source=source, into=into))
        return b.like("z", into, "other")

    x, y = scratch(b), scratch(b)
    first = b.call("add", 0, add, x[:, :4], y[:, :4])
    again = b.call("add", 0, add, y[:, :4], x[:, :4])
    aliased = b.call("add", 0, add, x[:, :4], x[:, 4:])
    elsewhere = b.call("add", 0, add, x[:, 4:], y[:, 4:])
    program = b.build()
    fragments = [call.fragment for call in program.calls[1:]]
    assert fragments[0] is fragments[1]
    assert len(set(fragments)) == 3
    assert [view.buffer for view in (first, again, aliased, elsewhere)] == [2, 3, 4, 5]
    assert [op.reads for op in program.ops] == [
        (x[:, :4], y[:, :4]),
        (y[:, :4], x[:, :4]),
        (x[:, :4], x[:, 4:]),
        (x[:, 4:], y[:, 4:]),
    ]
    assert [buffer.name for buffer in program.buffers] == ["x", "x", "z", "z", "z", "z"]


def test_what_a_function_asks_of_a_view_tells_calls_apart(b: ProgramBuilder) -> None:
    """Inputs are like other buffers but for one thing, which matters only where a function asks for it."""

    def ask(view: View) -> View:
        return view if b.is_input(view) else b.like("copy", view, "saved")

    mine = b.input("q", (Span(0, 8),), Span(0, 8))
    other = b.tensor("q", 8, 8, "saved")
    assert b.call("ask", 0, ask, mine) == mine
    assert b.call("ask", 0, ask, other) != other
    assert b.call("ask", 0, ask, mine) == mine
    assert len({call.fragment for call in b.build().calls}) == 3


def test_layers_in_names_and_labels(b: ProgramBuilder) -> None:
    def fetch(layer: int, view: View) -> View:
        copy = b.buffer("copy", "bshd", view.shape, "fp32", "other", layer=layer + 1)
        b.add(Copy(label="to layer", source=Split(view, 0, 1), target=Split(copy, 0, 1)), layer)
        return b.elsewhere(copy, "host")

    x = scratch(b)
    for layer in (3, 7):
        b.call("fetch", layer, lambda view, layer=layer: fetch(layer, view), x)
    program = b.build()
    assert [op.label for op in program.ops] == ["to layer 3", "to layer 7"]
    assert [buffer.name for buffer in program.buffers] == ["x", "copy 4", "copy 4", "copy 8", "copy 8"]
    assert program.calls[1].fragment is program.calls[2].fragment


@pytest.mark.parametrize("name", by_tier({"ring", "zigzag, offloaded"}, SCHEDULES, [*VARIANTS, *OFFLOADED]))
def test_what_a_form_says_holds_of_each_of_its_ops(name: str) -> None:
    """Kernels, workspace and what results become, of the op in its own program, whichever rank's op was seen first."""
    try:
        programs = layered(name, layers=2).programs
    except InputError as error:
        pytest.skip(str(error))
    for program in programs:
        (forms, which, buffers), starts = program.formed, program.formed.starts.tolist()
        for op, form, start in zip(program.ops, [forms[number] for number in which], starts, strict=True):
            kernel = kernel_use(op, program) if isinstance(op, Kernel) else None
            assert use_of(form) == kernel
            if isinstance(op, Kernel) and isinstance(form.op, Kernel):
                assert workspace_bytes(form.op, alone(form)) == workspace_bytes(op, program)
            places = [form.places[number] for number in adopted(form.op, alone(form))]
            assert [buffers[start + place] for place in places] == adopted(op, program)


@pytest.mark.parametrize("before", [False, True])
def test_a_call_of_a_later_layer_may_come_first(before: bool) -> None:
    """Ports of a fragment count layers from that of its call, also where it gives no buffer another number."""
    workload = Workload(model=make_model(8, 4), seq=8, scope="layer", layers=8)
    b = ProgramBuilder(0, workload)
    if before:
        b.buffer("something", "n", (1,), "fp32", "other")
    b.call("weights", 3, lambda: b.input_of(norm1.later(3), norm1.rows(workload.model)))
    program = b.build()
    assert [port.layer for port in program.inputs] == [3]
    assert [port.layer for port in Program.of_calls(0, program.calls).inputs] == [3]
