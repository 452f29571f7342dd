"""One replica is proved for all that own rows of weights of their own: it says nothing that all ranks do not."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from random import Random

import msgspec
import pytest

from sim.base.errors import InputError
from sim.schedule.derive.replicas import folds, stand_for
from sim.schedule.ir import ops
from sim.schedule.ir.fragments import Fragment, Port
from sim.schedule.ir.masks import Span
from sim.schedule.ir.program import Later, Program, Schedule
from sim.schedule.ir.renaming import Renaming
from sim.schedule.ir.views import Split
from sim.schedule.model.scope import kind_of
from sim.schedule.proof import check as proof
from sim.schedule.proof.abstract import AbstractPlayer
from sim.schedule.proof.check import Checked
from sim.schedule.proof.contents import Piece, Unclassed, coalesced
from sim.schedule.proof.members import of_member
from sim.schedule.proof.replicas import parts_of_all, shards_of_all
from sim.schedule.proof.supersteps import Supersteps
from sim.schedule.proof.wellformed import check_program
from sim.words.mesh import AXES, Mesh
from tests.schedule.proof.mutation_operators import OPERATORS
from tests.schedule.proof.mutation_steps import STEP_OPERATORS
from tests.schedule.proof.test_classes import CHANGES, piece, sharded
from tests.schedule.proof.test_supersteps import by_all_ops, flattened

REPLICAS_INSIDE = (*(axis for axis in AXES if axis != "dp"), "dp")
WHOLE = [Mesh(dp=4, ulysses=2), Mesh(dp=2, ring=2), Mesh(dp=2, ulysses=2, order=REPLICAS_INSIDE)]
PADDED = [Mesh(dp=3, ulysses=2), Mesh(dp=7, ring=2), Mesh(dp=7, ulysses=2, order=REPLICAS_INSIDE)]
"""Where the last rank owns fewer rows than others."""
SHARED = [Mesh(dp=8, tp=2), Mesh(dp=7, tp=2), Mesh(dp=4, tp=2, ring=2), Mesh(dp=8, tp=4, order=REPLICAS_INSIDE)]
"""Where one member of a tensor-parallel group counts norms, so that replicas that own them are apart."""
MESHES = [*WHOLE, *PADDED, *SHARED]
NUM_WRITTEN = {**dict.fromkeys(PADDED, 2), **dict.fromkeys(SHARED, 3), SHARED[1]: 4}
"""Of all replicas, one of those that are alike and those that are not; of others the first."""


def played(schedule: Schedule) -> Schedule:
    """Return the schedule of the replicas that are proved for all."""
    return schedule.at({"dp": schedule.written})


def of_played(schedule: Schedule, some: Schedule) -> Schedule:
    """Return a schedule whose replicas do what those of some do that are played for them, with rows of their own."""
    numbers = played(schedule)

    def program(rank: int) -> Program:
        return some.program(numbers.place[rank]).numbered(numbers.order, {})

    return written_by(schedule, program)


def written_by(
    schedule: Schedule, program: Callable[[int], Program], rows: Mapping[str, int] | None = None
) -> Schedule:
    """Return a schedule of other programs, whose replicas follow each other as those of one do, or by other rows."""
    later = Later(schedule.rows_later if rows is None else rows, schedule.written_as)
    return Schedule(schedule.header, program, later=lambda: later, kind=schedule.kind)


def flat(schedule: Schedule) -> Schedule:
    """Return the same schedule as one that says nothing of its replicas, so that all ranks are proved."""
    return Schedule(schedule.header, schedule.program)


def places(pieces: list[Piece]) -> list[Piece]:
    """Return contents without what they are sums over."""
    return sorted(coalesced([one._replace(content=one.content._replace(seen=())) for one in pieces]))


def by_some_replicas(schedule: Schedule) -> bool:
    """Return whether a schedule whose programs are one call each is proved by the ops of those that are played."""
    if not folds(schedule):
        return False
    one = Checked(played(schedule))
    try:
        for program in one.schedule.programs:
            check_program(program, one.schedule, set())
        proof._check_ports(one.schedule)
        AbstractPlayer(one.schedule, one.matching, one.dependencies).run()
        proof._check_claims(one, proof.wire_bytes(one.schedule, one.matching))
    except (Unclassed, InputError):
        return False
    return True


def by_calls_of_some(schedule: Schedule) -> bool:
    """Return whether a schedule is proved by the calls of replicas that are played, without a look at others."""
    return folds(schedule) and proof._is_proved_by_calls(Checked(played(schedule)))


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=pytest.mark.slow if mesh in SHARED[1:] else []) for mesh in MESHES]
)
def test_replicas_that_are_played_have_what_each_has_in_the_proof_of_all(mesh: Mesh) -> None:
    """But for sequences, which are others on each."""
    schedule = sharded("usp", mesh, layers=3)
    assert by_calls_of_some(schedule)
    assert len(schedule.written) == NUM_WRITTEN.get(mesh, 1)
    one = played(schedule)
    some, every = Supersteps(one), Supersteps(flat(schedule))
    for each in (some, every):
        each.play()
    for at, of_whole in enumerate(one.order[: one.num_ranks]):
        replicas = stand_for(one)[one.header.mesh.replica(at)]
        for member, rank in enumerate(mesh.along(of_whole, "dp", replicas)):
            for number, buffer in enumerate(schedule.program(rank).buffers):
                if "b" not in buffer.dims:
                    found, own = list(some.held(at, number).pieces), list(every.held(rank, number).pieces)
                    assert places(of_member(found, member)) == places(own)


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=[] if mesh in (WHOLE[0], PADDED[0]) else pytest.mark.slow) for mesh in MESHES]
)
def test_rows_that_replicas_do_not_own_are_refused(mesh: Mesh) -> None:
    schedule = sharded("usp", mesh)
    for name, each in schedule.rows_later.items():
        for wrong in (each + 1, each - 1, 2 * each, 0):
            for names in ([name], list(schedule.rows_later)):
                changed = written_by(schedule, schedule.program, {**schedule.rows_later, **dict.fromkeys(names, wrong)})
                if changed.programs != schedule.programs:
                    assert not by_calls_of_some(changed)


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_rank_of_every_replica_does_otherwise_is_found(change: str) -> None:
    schedule = sharded("ulysses", Mesh(dp=4, ulysses=2), layers=2)

    def program(rank: int) -> Program:
        calls = schedule.program(rank).calls
        return Program.of_calls(
            rank, [call._replace(fragment=CHANGES[change](call.fragment)) if rank else call for call in calls]
        )

    changed = written_by(schedule, program)
    assert folds(changed)
    assert not by_calls_of_some(changed)


def with_rows_of(change: Callable[[Span], Span]) -> Callable[[Fragment], Fragment]:
    """Return what gives all ports of shards other rows."""

    def of_ports(ports: tuple[Port, ...]) -> tuple[Port, ...]:
        return tuple(
            [
                msgspec.structs.replace(port, tokens=tuple(map(change, port.tokens)))
                if kind_of(port.tensor) in {"weight", "state", "updated"}
                else port
                for port in ports
            ]
        )

    return lambda one: dataclasses.replace(one, inputs=of_ports(one.inputs), outputs=of_ports(one.outputs), alike=None)


def with_padding_as(change: Callable[[ops.Zero], list[ops.Op]]) -> Callable[[Fragment], Fragment]:
    """Return what puts something else in place of zeros behind the last rows."""

    def of_ops(one: Fragment) -> list[ops.Op]:
        return [
            new
            for op in one.ops
            for new in (change(op) if isinstance(op, ops.Zero) and op.label == "padding" else [op])
        ]

    return lambda one: dataclasses.replace(one, ops=tuple(of_ops(one)), alike=None)


def rows_before(op: ops.Zero) -> list[ops.Op]:
    """Return a copy of the rows before padding into it."""
    ((start, stop),) = op.into.slices
    before = msgspec.structs.replace(op.into, slices=((2 * start - stop, start),))
    source, target = (Split(view, 0, 1) for view in (before, op.into))
    return [ops.Copy(label="padding", part=op.part, source=source, target=target)]


OF_LAST: dict[str, Callable[[Fragment], Fragment]] = {
    "one row later": with_rows_of(lambda rows: rows.moved(1)),
    "one row earlier, one twice": with_rows_of(lambda rows: rows.moved(-1)),
    "rows of the one before": with_rows_of(lambda rows: rows.moved(-rows.size)),
    "rows of the first replica": with_rows_of(lambda rows: rows.moved(-rows.start)),
    "one row too many": with_rows_of(lambda rows: Span(rows.start, rows.stop + 1)),
    "one row too few": with_rows_of(lambda rows: Span(rows.start, rows.stop - 1)),
    "no padding": with_padding_as(lambda _: []),
    "rows for padding": with_padding_as(rows_before),
    **CHANGES,
}


@pytest.mark.parametrize("change", OF_LAST)
@pytest.mark.parametrize("mesh", PADDED[:1])
def test_what_the_last_rank_does_otherwise_is_found(mesh: Mesh, change: str) -> None:
    schedule = sharded("ulysses", mesh)

    def program(rank: int) -> Program:
        calls = schedule.program(rank).calls
        if rank < mesh.size - 1:
            return schedule.program(rank)
        return Program.of_calls(rank, [call._replace(fragment=OF_LAST[change](call.fragment)) for call in calls])

    changed = written_by(schedule, program)
    assert changed.program(mesh.size - 1) != schedule.program(mesh.size - 1)
    assert folds(changed)
    assert not by_calls_of_some(changed)
    assert not by_all_ops(flat(changed))


@pytest.mark.parametrize("mesh", PADDED)
def test_a_last_replica_that_is_as_the_first_one_is_refused(mesh: Mesh) -> None:
    """With its own sequences, so that nothing but rows is wrong."""
    schedule = sharded("usp", mesh)

    def program(rank: int) -> Program:
        replica, role = mesh.replica(rank), mesh.role(rank)
        return schedule.program(role).renamed(Renaming(rank - role, replica)) if replica else schedule.program(rank)

    assert not by_calls_of_some(written_by(schedule, program))


# Tensor-parallel groups


def with_ops(change: Callable[[ops.Op], list[ops.Op]]) -> Callable[[Fragment], Fragment]:
    """Return what puts other ops in place of each."""
    return lambda one: dataclasses.replace(one, ops=tuple([new for op in one.ops for new in change(op)]), alike=None)


def over_members(op: ops.Op) -> list[ops.Op]:
    """Return a sum of squares over the group alone, in place of that over all ranks."""
    if isinstance(op, ops.AllReduce) and op.communicator == "norm":
        return [msgspec.structs.replace(op, communicator="tp")]
    return [op]


def counting_before(op: ops.Op) -> list[ops.Op]:
    """Return squares from the first row of a shard on, in place of those that are counted."""
    if not isinstance(op, ops.SquareSum):
        return [op]
    ((_, stop),) = op.gradient.slices
    return [msgspec.structs.replace(op, gradient=msgspec.structs.replace(op.gradient, slices=((0, stop),)))]


def of_other_member(port: Port) -> Port:
    """Return a port of a shard of the shares of the other one of two members."""
    if kind_of(port.tensor) not in {"weight", "moment", "updated"}:
        return port
    return msgspec.structs.replace(port, heads=Span(1 - port.heads.start, 2 - port.heads.start))


OF_GROUPS: dict[str, Callable[[Fragment], Fragment]] = {
    "rows of the replica before": with_rows_of(lambda rows: rows.moved(-rows.size)),
    "rows of the next replica": with_rows_of(lambda rows: rows.moved(rows.size)),
    "shares of the other member": lambda one: dataclasses.replace(
        one,
        inputs=tuple(map(of_other_member, one.inputs)),
        outputs=tuple(map(of_other_member, one.outputs)),
        alike=None,
    ),
    "no gather": with_ops(lambda op: [] if isinstance(op, ops.AllGather) and op.communicator == "weights" else [op]),
    "no scatter": with_ops(lambda op: [] if isinstance(op, ops.ReduceScatter) else [op]),
    "squares summed twice": with_ops(lambda op: [op, op] if isinstance(op, ops.AllReduce) else [op]),
    "squares of the group alone": with_ops(over_members),
    "squares of norms counted": with_ops(counting_before),
    "squares not counted": with_ops(
        lambda op: [ops.Zero(label=op.label, part=op.part, into=op.square)] if isinstance(op, ops.SquareSum) else [op]
    ),
}


@pytest.mark.parametrize("change", OF_GROUPS)
@pytest.mark.parametrize("replica", [1, *(pytest.param(apart, marks=pytest.mark.slow) for apart in (0, 4, 6))])
def test_what_members_of_a_group_do_otherwise_is_found(replica: int, change: str) -> None:
    """All members, and the second one alone: of replicas that are proved as one, and of those that are apart."""
    mesh = SHARED[1]
    schedule = sharded("single", mesh)
    assert replica in schedule.written
    for members in ([0, 1], [1]):
        ranks = mesh.at({"dp": [replica], "tp": members})

        def program(rank: int, ranks: list[int] = ranks) -> Program:
            own = schedule.program(rank)
            if rank not in ranks:
                return own
            changed = [call._replace(fragment=OF_GROUPS[change](call.fragment)) for call in own.calls]
            return Program.of_calls(rank, changed, own.begins)

        changed = written_by(schedule, program)
        if changed.programs == schedule.programs:
            continue
        assert not by_calls_of_some(changed)
        assert not by_all_ops(flat(changed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_no_mutant_is_accepted_that_all_ranks_are_not(seed: int) -> None:
    draw, verdicts = Random(seed), Counter[tuple[bool, bool]]()
    schedules = [sharded("usp", mesh) for mesh in (*WHOLE[:2], *PADDED[:1], *SHARED[:1])]
    originals = [of_played(one, flattened(played(one))) for one in schedules]
    assert all(map(by_some_replicas, originals))
    for operator in (OPERATORS | STEP_OPERATORS).values():
        for _ in range(2):
            original = draw.choice(originals)
            some = played(original)
            mutant = operator(draw, some)
            if mutant is None or mutant.header != some.header:
                continue
            one = of_played(original, mutant)
            verdicts[by_some_replicas(one), by_all_ops(flat(one))] += 1
    assert not verdicts[True, False], verdicts
    assert verdicts[True, True] > 0
    assert verdicts[False, False] > 20


# What is gathered and scattered


def test_nothing_but_weights_is_gathered_of_replicas_that_are_not_played() -> None:
    senders = [(0, 0), (1, 0)]
    for wrong in (piece(0), piece(0, ((Span(0, 4), Span(0, 1)),))):
        with pytest.raises(Unclassed):
            shards_of_all([[wrong]], senders)


def test_parts_that_differ_in_more_than_positions_are_not_scattered() -> None:
    senders = [(0, 0), (1, 0)]
    with pytest.raises(Unclassed):
        parts_of_all([[piece(0)], [piece(4, ((Span(0, 4), Span(0, 1)),))]], senders)
    (found,) = parts_of_all([[piece(0)], [piece(4)]], senders)
    assert [of_member(found, replica) for replica in (0, 1)] == [[piece(0)], [piece(4)]]
