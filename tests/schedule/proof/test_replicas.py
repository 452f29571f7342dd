"""One replica is proved for all that own rows of weights of their own: it says nothing that all ranks do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from random import Random

import pytest

from sim.base.errors import InputError
from sim.schedule.derive.replicas import folds
from sim.schedule.ir.masks import Span
from sim.schedule.ir.program import Program, Schedule
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
MESHES = [Mesh(dp=4, ulysses=2), Mesh(dp=2, ring=2), Mesh(dp=2, ulysses=2, order=REPLICAS_INSIDE)]


def of_first(schedule: Schedule, first: Schedule, rows: Mapping[str, int] | None = None) -> Schedule:
    """Return a schedule whose replicas all do what another one's first replica does, with rows of their own."""
    later = schedule.rows_later if rows is None else rows
    return Schedule(schedule.header, first.program, rows_later=later, kind=schedule.kind)


def flat(schedule: Schedule) -> Schedule:
    """Return the same schedule as one that says nothing of its replicas, so that all ranks are proved."""
    return Schedule(schedule.header, schedule.program)


def places(pieces: list[Piece]) -> list[Piece]:
    """Return contents without what they are sums over."""
    return sorted(coalesced([one._replace(content=one.content._replace(seen=())) for one in pieces]))


def by_first_replica(schedule: Schedule) -> bool:
    """Return whether a schedule whose programs are one call each is proved by the ops of its first replica."""
    if not folds(schedule):
        return False
    one = Checked(schedule.at({"dp": [0]}))
    try:
        for program in one.schedule.programs:
            check_program(program, one.schedule, set())
        proof._check_ports(one.schedule)
        AbstractPlayer(one.schedule, one.matching, one.dependencies).run()
        proof._check_claims(one, proof.wire_bytes(one.schedule, one.matching))
    except (Unclassed, InputError):
        return False
    return True


def by_calls_of_first(schedule: Schedule) -> bool:
    """Return whether a schedule is proved by the calls of its first replica, without a look at others."""
    return folds(schedule) and proof._is_proved_by_calls(Checked(schedule.at({"dp": [0]})))


@pytest.mark.parametrize("mesh", MESHES)
def test_the_first_replica_has_what_each_has_in_the_proof_of_all(mesh: Mesh) -> None:
    """But for sequences, which are others on each."""
    schedule = sharded("usp", mesh, layers=3)
    assert by_calls_of_first(schedule)
    one, every = Supersteps(schedule.at({"dp": [0]})), Supersteps(flat(schedule))
    for each in (one, every):
        each.play()
    roles = mesh.first_replica
    for rank in range(mesh.size):
        at, replica = roles.index(mesh.role(rank)), mesh.replica(rank)
        for number, buffer in enumerate(schedule.program(rank).buffers):
            if "b" not in buffer.dims:
                found, own = list(one.held(at, number).pieces), list(every.held(rank, number).pieces)
                assert places(of_member(found, replica)) == places(own)


@pytest.mark.parametrize("mesh", MESHES)
def test_rows_that_replicas_do_not_own_are_refused(mesh: Mesh) -> None:
    schedule = sharded("usp", mesh)
    for name, each in schedule.rows_later.items():
        for wrong in (each + 1, each - 1, 2 * each, 0):
            for names in ([name], list(schedule.rows_later)):
                changed = of_first(schedule, schedule, {**schedule.rows_later, **dict.fromkeys(names, wrong)})
                if changed.programs != schedule.programs:
                    assert not by_calls_of_first(changed)


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_rank_of_every_replica_does_otherwise_is_found(change: str) -> None:
    schedule = sharded("ulysses", Mesh(dp=4, ulysses=2), layers=2)

    def program(rank: int) -> Program:
        calls = schedule.program(rank).calls
        return Program.of_calls(
            rank, [call._replace(fragment=CHANGES[change](call.fragment)) if rank else call for call in calls]
        )

    changed = Schedule(schedule.header, program, rows_later=schedule.rows_later, kind=schedule.kind)
    assert folds(changed)
    assert not by_calls_of_first(changed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_no_mutant_is_accepted_that_all_ranks_are_not(seed: int) -> None:
    draw, verdicts = Random(seed), Counter[tuple[bool, bool]]()
    originals = [of_first(one, flattened(one)) for one in (sharded("usp", mesh) for mesh in MESHES[:2])]
    assert all(map(by_first_replica, originals))
    for operator in (OPERATORS | STEP_OPERATORS).values():
        for _ in range(2):
            original = draw.choice(originals)
            first = original.at({"dp": [0]})
            mutant = operator(draw, first)
            if mutant is None or mutant.header != first.header:
                continue
            one = of_first(original, mutant)
            verdicts[by_first_replica(one), by_all_ops(flat(one))] += 1
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
