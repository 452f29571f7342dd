"""One data-parallel replica is proved for all: it says what the proof of all ranks does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from sim.base.errors import InputError, ScheduleError
from sim.schedule.derive.replicas import folds
from sim.schedule.derive.roles import firsts, roles
from sim.schedule.ir.ops import AllGather, AllReduce, Exchange, Op
from sim.schedule.ir.program import Communicator, Later, Program, Schedule
from sim.schedule.ir.views import Split
from sim.schedule.methods import ring, single, ulysses
from sim.schedule.methods.hints import Hints
from sim.schedule.model import layer
from sim.schedule.model.layer import GRADIENTS
from sim.schedule.proof.abstract import AbstractPlayer
from sim.schedule.proof.check import Checked, check
from sim.schedule.write.builder import ProgramBuilder
from sim.setup import names
from sim.words.mesh import AXES, Mesh
from sim.words.workload import Workload
from tests.helpers import OFFLOADED, VARIANTS, is_refused, make_model, slow_but

REPLICAS = 3
ALL = VARIANTS | OFFLOADED


def layers(batch: int = 1) -> Workload:
    return Workload(model=make_model(8, 4), seq=64, batch=batch, scope="layer", layers=2)


def flat(schedule: Schedule) -> Schedule:
    """Return the same schedule as one that says nothing of its replicas, so that all ranks are proved."""
    return Schedule(schedule.header, schedule.program)


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but({"ring", "ulysses", "usp of 2"}, ALL))
@pytest.mark.parametrize("batch", slow_but({1}, [1, 2]))
def test_a_replica_has_in_its_proof_what_it_has_in_that_of_all(name: str, batch: int) -> None:
    """What every buffer of every rank of the first replica holds at the end."""
    workload, ranks = layers(batch), 1 if ALL[name].schedule == "single" else 4
    if is_refused(name, workload, ranks):
        return
    mesh = msgspec.structs.replace(ALL[name].mesh(ranks, workload.model), dp=REPLICAS)
    schedule = ALL[name].build(workload, mesh)
    assert folds(schedule)
    check(schedule)
    check(flat(schedule))
    one, every = (Checked(which) for which in (schedule.at({"dp": [0]}), flat(schedule)))
    players = [AbstractPlayer(which.schedule, which.matching, which.dependencies) for which in (one, every)]
    for player in players:
        player.run()
    for found, meant in zip(*(player.memory[:ranks] for player in players), strict=True):
        assert [*found.held()] == [*meant.held()]


@pytest.mark.parametrize("replicas", [2, 512])
def test_only_one_replica_is_built(replicas: int) -> None:
    built: list[int] = []
    schedule = ulysses.build(layers(), Mesh(dp=replicas, ulysses=2))

    def program(rank: int) -> Program:
        built.append(rank)
        return schedule.program(rank)

    check(Schedule(schedule.header, program, replicated=True))
    assert sorted(built) == [0, 1]


def test_replicas_name_their_own_ranks_and_sequences() -> None:
    schedule = ring.build(layers(batch=2), Mesh(dp=3, ring=2))
    first, last = schedule.program(1), schedule.program(5)
    assert last.rank == 5
    for ours, theirs in zip(first.ops, last.ops, strict=True):
        if isinstance(ours, Exchange):
            assert isinstance(theirs, Exchange)
            assert [m.peer + 4 for m in (*ours.sends, *ours.recvs)] == [m.peer for m in (*theirs.sends, *theirs.recvs)]
        else:
            assert ours == theirs
    for ours, theirs in zip((*first.inputs, *first.outputs), (*last.inputs, *last.outputs), strict=True):
        of_tokens = ours.tensor in {"x", "dx"}
        assert theirs == (msgspec.structs.replace(ours, batch=ours.batch.moved(4)) if of_tokens else ours)


@pytest.mark.sweep
def test_json_keeps_one_replica_and_gives_all_back() -> None:
    schedule = ring.build(layers(), Mesh(dp=3, ring=2))
    read = Schedule.from_json(schedule.to_json())
    assert read.hash == schedule.hash == schedule.at({"dp": [0]}).hash
    assert read.programs == schedule.programs
    assert folds(read)
    check(read)
    with pytest.raises(InputError, match="4 programs for 6 ranks"):
        short = msgspec.json.decode(flat(schedule).to_json())
        Schedule.from_json(msgspec.json.encode(short | {"programs": short["programs"][:4]}))


def test_a_replica_within_which_others_lie_stands_for_them_too() -> None:
    order = (*(axis for axis in AXES if axis != "dp"), "dp")
    schedule = ulysses.build(layers(), Mesh(dp=2, ulysses=2, order=order))
    assert folds(schedule)
    first = check(schedule).at({"dp": [0]}).schedule
    assert [(program.rank, program.num_ops) for program in first.programs] == [
        (number, schedule.program(rank).num_ops) for number, rank in enumerate((0, 2))
    ]
    assert first.communicator("ulysses").groups == ((0, 1),)


def test_communicators_that_differ_between_replicas_are_proved_for_all_ranks() -> None:
    schedule = single.build(layers(), Mesh(dp=4))
    pairs = Communicator(name=GRADIENTS, groups=((0, 1), (2, 3)))
    header = msgspec.structs.replace(schedule.header, communicators=(pairs,))
    changed = Schedule(header, schedule.program, replicated=True)
    assert not folds(changed)
    with pytest.raises(ScheduleError, match="lacks contributions"):
        check(changed)


def changed(schedule: Schedule, change: Callable[[Op], list[Op]]) -> Schedule:
    """Return a schedule whose replicas all do something else for some ops."""

    def program(rank: int) -> Program:
        own = schedule.program(rank)
        return own.replace(ops=tuple(new for op in own.ops for new in change(op)))

    return Schedule(schedule.header, program, replicated=True)


def test_a_gradient_that_is_not_summed_over_replicas_is_caught() -> None:
    schedule = single.build(layers(), Mesh(dp=4))
    lost = changed(schedule, lambda op: [] if isinstance(op, AllReduce) and op.label == "reduce dwq" else [op])
    assert folds(lost)
    for one in (lost, flat(lost)):
        with pytest.raises(ScheduleError, match="dwq.*lacks contributions"):
            check(one)


def test_a_gradient_that_is_summed_twice_is_caught() -> None:
    schedule = ulysses.build(layers(), Mesh(dp=4, ulysses=2))
    twice = changed(schedule, lambda op: [op, op] if isinstance(op, AllReduce) else [op])
    for one in (twice, flat(twice)):
        with pytest.raises(ScheduleError, match="would count tokens"):
            check(one)


def test_tokens_are_not_summed_over_replicas() -> None:
    """Gradients of tokens are of other sequences in each."""
    schedule = single.build(layers(), Mesh(dp=4))
    of_tokens = {port.view for port in schedule.program(0).outputs if port.tensor == "dx"}

    def sums(op: Op) -> list[Op]:
        more = [AllReduce(label="sum", communicator=GRADIENTS, view=view) for view in op.writes if view in of_tokens]
        return [op, *more]

    for one in (changed(schedule, sums), flat(changed(schedule, sums))):
        with pytest.raises(ScheduleError, match="over replicas, which have different sequences|different parts"):
            check(one)


def test_what_is_gathered_over_replicas_is_proved_for_all_ranks() -> None:
    schedule = single.build(layers(), Mesh(dp=4))

    def gathers(op: Op) -> list[Op]:
        if not isinstance(op, AllReduce):
            return [op]
        (whole,) = op.writes
        return [op, AllGather(label="again", communicator=GRADIENTS, send=whole, recvs=Split(whole, 0, 4))]

    assert not folds(changed(schedule, gathers))


def test_shards_of_unlike_sizes_are_played_on_all_ranks() -> None:
    """A builder that says that shards are alike does not fold a gather whose last part is shorter."""
    workload, entry = msgspec.structs.replace(layers(batch=2), scope="step"), names.entry("usp")
    schedule = entry.schedule(workload, Mesh(dp=2, ring=2), names.options(entry, "usp", [], ""), Hints())
    assert roles(schedule)["dp"] == (0, 0)

    def shorter(op: Op) -> Op:
        if not isinstance(op, AllGather):
            return op
        split = op.recvs
        assert isinstance(split, Split)
        (extent, *_), count = split.view.shape, split.parts
        each = -(-extent // count)
        return msgspec.structs.replace(
            op, recvs=Split(split.view, 0, count, (each,) * (count - 1) + (extent - each * (count - 1),))
        )

    def program(rank: int) -> Program:
        own = schedule.program(rank)
        return own.replace(ops=tuple(map(shorter, own.ops)))

    assert roles(Schedule(schedule.header, program, kind=schedule.kind))["dp"] == (0, 1)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "mesh",
    slow_but(
        [Mesh(dp=4, ulysses=2), Mesh(dp=3, ring=2), Mesh(dp=8, tp=2)],
        [Mesh(dp=2, ring=2), Mesh(dp=4, ulysses=2), Mesh(dp=3, ring=2), Mesh(dp=7), Mesh(dp=8, tp=2)],
    ),
)
@pytest.mark.parametrize(
    "options",
    [
        {"zero_stage": "3"}, {"zero_stage": "1", "micro_batches": "2"}, {"zero_stage": "2", "optimiser": "host"},
        {"zero_stage": "3", "optimiser": "host", "weights": "host"}, {"zero_stage": "1", "reduce_to": "all"},
    ],
)  # fmt: skip
def test_shards_of_later_replicas_are_those_that_each_writes(
    mesh: Mesh, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank whose shards are as large as those of its role has the program of that, with rows of its own."""
    entry, workload = names.entry("usp"), msgspec.structs.replace(layers(batch=2), scope="step")
    chosen = names.options(entry, "usp", list(options.items()), "")
    built: list[int] = []

    def schedule() -> Schedule:
        return entry.schedule(workload, mesh, chosen, Hints())

    def noted(rank: int, *given: Any, **named: Any) -> ProgramBuilder:
        built.append(rank)
        return ProgramBuilder(rank, *given, **named)

    monkeypatch.setattr(layer, "ProgramBuilder", noted)
    found, written = schedule().to_json(), len(built)
    apart = 2 if mesh.tp > 1 else mesh.dp in {3, 7}  # owners of norms, on one member; or the last shard alone
    alike = mesh.dp * mesh.ulysses  # ranks that trade heads do the same, too
    assert written == (mesh.size if "reduce_to" in options else mesh.size // alike + apart)
    assert len(firsts(roles(schedule())["dp"])) == (mesh.dp if "reduce_to" in options else 1 + apart)
    built.clear()
    monkeypatch.setattr(layer._Ranks, "_renaming", lambda *_: None)
    monkeypatch.setattr(layer._Ranks, "later", lambda _: Later())
    assert schedule().to_json() == found
    assert len(built) == mesh.size
