"""Calls of fragments: they say what their functions would have written, and nothing that was not given."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from sim.errors import InputError, ScheduleError
from sim.schedule.ir.masks import Span
from sim.schedule.ir.ops import Accumulate, Copy
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.ir.views import Split, View
from sim.schedule.write.builder import ProgramBuilder
from sim.workload import Workload
from tests.helpers import OFFLOADED, VARIANTS, make_model, sweep_but


def layered(name: str, ranks: int = 4, layers: int = 3) -> Schedule:
    """Return a variant with several layers, not proved."""
    workload = Workload(model=make_model(8, 4, 4), seq=48, mask="causal", scope="layer", layers=layers)
    variant = (VARIANTS | OFFLOADED)[name]
    return variant.build(workload, variant.mesh(1 if variant.schedule == "single" else ranks, workload.model))


@pytest.mark.parametrize("name", sweep_but({"ring", "zigzag, offloaded"}, [*VARIANTS, *OFFLOADED]))
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
        lambda b, _, other: b.output("q", other, (), Span(0, 8)),
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
