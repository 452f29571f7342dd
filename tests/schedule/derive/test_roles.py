"""Ranks that are played for others: their programs are those of the others, but for what no time depends on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sim.base.errors import InputError
from sim.schedule.derive.roles import Spans, firsts, roles, spans_of
from sim.schedule.ir.ops import AllGather, Exchange, Message, Op, Rope
from sim.schedule.ir.program import Communicator, Program, Schedule
from sim.schedule.ir.views import Split
from sim.schedule.methods.hints import Hints
from sim.schedule.model import layer
from sim.setup import names
from sim.words.mesh import Mesh
from sim.words.workload import Workload
from tests.helpers import make_model, slow_but

OUTSIDE = ("pp", "ring", "ulysses", "tp", "dp")
MESHES = {
    "a group": ("single", Mesh(tp=4)),
    "a group of shards": ("single", Mesh(tp=4, dp=8)),
    "groups in replicas": ("single", Mesh(tp=2, dp=16, order=OUTSIDE)),
    "stages": ("single", Mesh(pp=2, tp=4)),
    "rings": ("zigzag", Mesh(tp=4, ring=2, dp=2)),
    "heads": ("usp", Mesh(tp=4, ring=2, ulysses=2)),
}
OPTIONS: dict[str, dict[str, str]] = {
    "sharded": {"zero_stage": "3"},
    "whole": {"zero_stage": "0"},
    "owners of moments": {"zero_stage": "1", "micro_batches": "2"},
    "in replicas": {"zero_stage": "3", "shards": "replica"},
    "sums on all": {"zero_stage": "1", "reduce_to": "all"},
    "all tokens": {"zero_stage": "2", "tp_sequence": "false"},
    "own tokens first": {"zero_stage": "0", "tp_overlap": "shards"},
    "beside gradients": {"zero_stage": "0", "tp_overlap": "gradients", "checkpoint": "full"},
    "products in chunks": {"zero_stage": "0", "tp_overlap": "chunks"},
    "joined": {"zero_stage": "1", "products": "joined", "memory_order": "sbh"},
    "on the host": {"zero_stage": "2", "optimiser": "host"},
    "nanotron": {"zero_stage": "1", "accumulate": "in-place", "gather": "all", "loss": "chunked"},
}


def schedule_of(name: str, mesh: Mesh, options: dict[str, str], kv_heads: int = 8, **more: Any) -> Schedule:
    entry = names.entry(name)
    given: dict[str, Any] = {"seq": 96, "batch": 2, "scope": "step", "layers": 2, **more}
    workload = Workload(model=make_model(8, kv_heads), **given)
    return entry.schedule(workload, mesh, names.options(entry, name, list(options.items()), ""), Hints())


def plain(op: Op, later: int) -> Op:
    """Return an op without what no time depends on, its peers as of a rank with a number so much lower."""
    if isinstance(op, Exchange):
        sends, recvs = (tuple([Message(peer - later, view) for peer, view in some]) for some in (op.sends, op.recvs))
        return msgspec.structs.replace(op, sends=sends, recvs=recvs)
    if isinstance(op, Rope):
        return msgspec.structs.replace(op, tokens=())
    if isinstance(getattr(op, "first", None), int):
        return msgspec.structs.replace(op, first=0)  # type: ignore[call-arg]
    return op


def seen(program: Program, one: int) -> list[Any]:
    """Return all that a player sees of a program, as of the rank that is played for it."""
    ports = [
        (port.tensor, port.layer, port.view.buffer, port.view.shape) for port in (*program.inputs, *program.outputs)
    ]
    return [program.buffers, [plain(op, program.rank - one) for op in program.ops], ports, program.begins]


@pytest.mark.sweep
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("options", slow_but({"sharded", "own tokens first"}, OPTIONS))
@pytest.mark.parametrize("mesh", slow_but({"a group of shards", "stages"}, MESHES))
def test_ranks_of_one_role_do_the_same(mesh: str, options: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All programs are written: none is made of another one's."""
    monkeypatch.setattr(layer, "tokens_later", lambda *_: None)
    try:
        schedule = schedule_of(*MESHES[mesh], OPTIONS[options], kv_heads)
    except InputError:
        return
    whole, found, stood_for = schedule.header.mesh, roles(schedule), 0
    for rank in range(whole.size):
        place = whole.place(rank)
        (one,) = whole.at({axis: [found[axis][at] if axis in found else at] for axis, at in place.items()})
        assert seen(schedule.program(rank), one) == seen(schedule.program(one), one)
        stood_for += one != rank
    assert stood_for or options in {"own tokens first", "products in chunks", "sums on all"} or kv_heads < whole.tp


@pytest.mark.parametrize(
    ("mesh", "options", "kv_heads", "replicas", "members"),
    [
        pytest.param(Mesh(tp=4), {}, 8, [0], [0, 1], id="the first member counts squares of norms"),
        pytest.param(Mesh(tp=8), {}, 4, [0], [0, 1, 2, 3], id="two members that have the same head, and their pairs"),
        pytest.param(Mesh(tp=4), {"tp_overlap": "shards"}, 8, [0], [0, 1, 2, 3], id="own tokens first"),
        pytest.param(Mesh(tp=2, dp=8), {"zero_stage": "0"}, 8, [0], [0, 1], id="whole weights"),
        pytest.param(Mesh(dp=8), {"zero_stage": "3"}, 8, [0], [0], id="equal shards"),
        pytest.param(Mesh(dp=7), {"zero_stage": "3"}, 8, [0, 6], [0], id="the last shard is padded"),
        pytest.param(Mesh(tp=2, dp=16), {"zero_stage": "3"}, 8, [0, 1, 11], [0, 1], id="owners of norms"),
    ],
)
def test_unlike_ranks_are_told_apart(
    mesh: Mesh, options: dict[str, str], kv_heads: int, replicas: list[int], members: list[int]
) -> None:
    found = roles(schedule_of("single", mesh, options, kv_heads))
    assert {axis: firsts(places) for axis, places in found.items()} == {"dp": replicas, "tp": members}


@pytest.mark.parametrize(
    ("mesh", "replicas"),
    [
        pytest.param(Mesh(tp=2, dp=16), [0], id="owners of norms"),
        pytest.param(Mesh(tp=2, dp=7), [0, 6], id="the last shard is padded"),
    ],
)
def test_by_outline_ranks_that_count_norms_are_like_others(mesh: Mesh, replicas: list[int]) -> None:
    schedule = schedule_of("single", mesh, {"zero_stage": "3"})
    found = roles(schedule.by_outline())
    assert {axis: firsts(places) for axis, places in found.items()} == {"dp": replicas, "tp": [0]}
    assert len(firsts(roles(schedule)["dp"])) > len(replicas)


def test_a_schedule_that_says_nothing_of_its_ranks_has_them_all_unlike() -> None:
    schedule = schedule_of("single", Mesh(tp=2, dp=2), {"zero_stage": "3"})
    assert roles(Schedule(schedule.header, schedule.program)) == {"dp": (0, 1), "tp": (0, 1)}


def test_a_communicator_of_no_ranks_tells_none_apart() -> None:
    schedule = schedule_of("single", Mesh(tp=2, dp=2), {"zero_stage": "0"})
    header = schedule.header
    nobodys = (*header.communicators, Communicator(name="nobody's", groups=()))
    changed = Schedule(msgspec.structs.replace(header, communicators=nobodys), schedule.program, kind=schedule.kind)
    assert roles(changed) == roles(schedule)


def test_what_is_gathered_of_unlike_parts_over_members_is_played_by_all() -> None:
    schedule = schedule_of("single", Mesh(tp=4), {})

    def uneven(op: Op) -> Op:
        if not isinstance(op, AllGather) or not isinstance(op.recvs, Split):
            return op
        parts, extent = op.recvs.parts, op.recvs.extent
        each = extent // parts
        sizes = (*[each] * (parts - 2), each + 1, each - 1)
        return msgspec.structs.replace(op, recvs=Split(op.recvs.view, op.recvs.dim, parts, sizes))

    def program(rank: int) -> Program:
        own = schedule.program(rank)
        return own.replace(ops=tuple(map(uneven, own.ops)))

    assert firsts(roles(Schedule(schedule.header, program, kind=schedule.kind))["tp"]) == [0, 1, 2, 3]


def test_over_which_ranks_a_communicator_is() -> None:
    mesh = Mesh(dp=2, ring=2, tp=4)
    found = [spans_of(Communicator(name="some", groups=mesh.groups(*axes)), mesh) for axes in (("tp",), ("dp", "ring"))]
    assert found == [Spans(False, ((0, 1, 2, 3),)), Spans(True, ((0,), (1,), (2,), (3,)))]
    pairs = tuple([group[at : at + 2] for group in mesh.groups("tp") for at in (0, 2)])
    assert spans_of(Communicator(name="pairs", groups=pairs), mesh) == Spans(False, ((0, 1), (2, 3)))


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param(((0, 1), (2, 3, 4, 5, 6, 7)), id="of one replica only"),
        pytest.param(((0, 3), (1, 2), (4, 7), (5, 6)), id="across members and rings"),
        pytest.param(((0, 1), (4, 5)), id="pairs of one ring alone, whose others have none"),
        pytest.param(((0, 1), (2,), (3,), (4, 5), (6,), (7,)), id="pairs in one ring, and none in the other"),
        pytest.param(((0,), (4,)), id="of one member alone"),
    ],
)
def test_groups_that_no_rank_can_stand_for(groups: tuple[tuple[int, ...], ...]) -> None:
    mesh = Mesh(dp=2, ring=2, tp=2)
    found = spans_of(Communicator(name="some", groups=groups), mesh)
    assert found is None or len(groups[0]) == 2  # a ring may have no group, as stages between the ends have none
