"""The proof of classes of ranks, held against that rank by rank: it finds the same, and accepts nothing more."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from random import Random

import msgspec
import pytest

from sim.base.errors import InputError, ScheduleError
from sim.schedule.ir import ops
from sim.schedule.ir.fragments import Fragment, Port
from sim.schedule.ir.masks import ONE, Span
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.proof import check as proof
from sim.schedule.proof.abstract import AbstractPlayer
from sim.schedule.proof.check import Checked, check
from sim.schedule.proof.classes import ClassPlayer, axes_of, classes_of
from sim.schedule.proof.contents import Content, Piece, Seen, Unclassed, coalesced, union
from sim.schedule.proof.members import of_all, of_member
from sim.schedule.proof.supersteps import Supersteps
from sim.words.mesh import Mesh
from sim.words.workload import Workload
from tests.helpers import VARIANTS, by_tier, make_model
from tests.schedule.ir.test_fragments import layered
from tests.schedule.proof.mutation_operators import OPERATORS
from tests.schedule.proof.test_supersteps import by_all_ops, flattened

TRADING = ["ulysses", "usp of 2", "usp, rings inside", "upipe over rings", "fpdt in chunks", "fpdt as published"]
"""Ranks of them that trade heads do the same."""


@pytest.mark.sweep
@pytest.mark.parametrize("name", by_tier({"usp of 2", "fpdt in chunks"}, {"ulysses", "upipe over rings"}, TRADING))
def test_members_end_with_what_each_rank_by_itself_leaves(name: str) -> None:
    checked = Checked(flattened(layered(name, layers=2)))
    everything = checked.schedule, checked.matching, checked.dependencies
    classes = classes_of(checked.schedule)
    assert classes
    alone, together = AbstractPlayer(*everything), ClassPlayer(*everything, classes)
    alone.run()
    together.run()
    for memory, ranks in zip(together.memory, classes, strict=True):
        for member, rank in enumerate(ranks):
            for own, held in zip(alone.memory[rank].held(), memory.held(), strict=True):
                found = of_member(list(held.pieces), member)
                assert sorted(coalesced(found)) == sorted(coalesced(list(own.pieces)))


@pytest.mark.parametrize("name", by_tier({"upipe over rings"}, {"ulysses"}, TRADING))
def test_supersteps_of_classes_end_with_the_same(name: str) -> None:
    schedule = layered(name, layers=4)
    together, alone = Supersteps(schedule, ("ulysses",)), Supersteps(schedule)
    for one in (together, alone):
        one.play()
    assert len(together.classes) < len(alone.classes) == schedule.num_ranks
    assert together.num_played <= alone.num_played
    for rank, program in enumerate(schedule.programs):
        for number in range(len(program.buffers)):
            found, own = (list(one.held(rank, number).pieces) for one in (together, alone))
            assert sorted(coalesced(found)) == sorted(coalesced(own))


@pytest.mark.parametrize("name", ["ring", "zigzag"])
def test_ranks_of_a_ring_are_in_no_class(name: str) -> None:
    assert not classes_of(layered(name))
    with pytest.raises(Unclassed):
        Supersteps(layered(name), ("ulysses",))


def by_classes(schedule: Schedule) -> bool:
    """Return whether a schedule is proved, and by classes."""

    def run(_: AbstractPlayer) -> None:
        raise ScheduleError("declined")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AbstractPlayer, "run", run)
        try:
            proof._prove(Checked(schedule))
        except InputError:
            return False
    return True


def in_whole_groups(mutant: Schedule, original: Schedule) -> Schedule:
    """Return a mutant whose change is made on all ranks that trade heads with the one that it was made on."""
    programs = mutant.programs
    (changed,) = [rank for rank, program in enumerate(programs) if program != original.program(rank)]
    for group in original.header.mesh.groups("dp", "ulysses"):
        for rank in group if changed in group else ():
            programs[rank] = _changed(original.program(rank), original.program(changed), programs[changed])
    return Schedule(original.header, programs.__getitem__)


def _changed(own: Program, before: Program, after: Program) -> Program:
    """Return a program with what another one was changed by, where that was as this one."""
    changes = {}
    for name in ("buffers", "ops", "inputs", "outputs"):
        mine, old, new = (getattr(program, name) for program in (own, before, after))
        kept = [a if a != b or c == b else c for a, b, c in zip(mine, old, new, strict=False)]
        same = next((at for at, (b, c) in enumerate(zip(old, new, strict=False)) if b != c), min(len(old), len(new)))
        changes[name] = kept if len(old) == len(new) else [*mine[:same], *new[same:]]
    return own.replace(**changes)


def sharded(name: str, mesh: Mesh, layers: int = 1) -> Schedule:
    """Return a training step whose weights are sharded over all ranks, those of replicas, too."""
    workload = Workload(model=make_model(8, 4), seq=64, scope="step", layers=layers)
    return VARIANTS[name].build(workload, mesh)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "mesh", "members"),
    [
        ("ulysses", Mesh(dp=4, ulysses=2), 8),
        pytest.param("usp", Mesh(dp=2, ring=2, ulysses=2), 4, marks=pytest.mark.slow),
        ("zigzag", Mesh(dp=4, ring=2), 4), pytest.param("ulysses", Mesh(ulysses=8), 8, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_replicas_with_shards_of_their_own_are_members_of_one_class(name: str, mesh: Mesh, members: int) -> None:
    schedule = sharded(name, mesh, layers=3)
    together, alone = Supersteps(schedule, axes_of(schedule)[0]), Supersteps(schedule)
    for one in (together, alone):
        one.play()
    assert {len(ranks) for ranks in together.classes} == {members}
    for rank, program in enumerate(schedule.programs):
        for number in range(len(program.buffers)):
            found, own = (list(one.held(rank, number).pieces) for one in (together, alone))
            assert sorted(coalesced(found)) == sorted(coalesced(own))


def turned(op: ops.Op) -> ops.Op:
    """Return a rotary embedding by the next positions."""
    return msgspec.structs.replace(op, tokens=(op.tokens[0].moved(1),)) if isinstance(op, ops.Rope) else op


def in_other_order(op: ops.Op) -> ops.Op:
    """Return a copy whose parts are in another order."""
    if not isinstance(op, ops.Copy) or op.source.parts < 2:
        return op
    order = op.order or tuple(range(op.source.parts))
    return msgspec.structs.replace(op, order=(*order[1:], order[0]))


def zeroed(op: ops.Op) -> ops.Op:
    """Return what forgets the gradients that are to be scattered."""
    return ops.Zero(label=op.label, part=op.part, into=op.writes[0]) if isinstance(op, ops.Pack) else op


def unlike(op: ops.Op) -> ops.Op:
    """Return a norm by another epsilon."""
    return msgspec.structs.replace(op, epsilon=2 * op.epsilon) if isinstance(op, ops.RmsNorm) else op


def later(ports: tuple[Port, ...], *names: str) -> tuple[Port, ...]:
    """Return ports of which those of some tensors have the next tokens, or rows."""
    return tuple(
        msgspec.structs.replace(port, tokens=(port.tokens[0].moved(1),)) if port.tensor in names else port
        for port in ports
    )


CHANGES: dict[str, Callable[[Fragment], Fragment]] = {
    **{
        change.__name__: lambda one, change=change: dataclasses.replace(
            one, ops=tuple(map(change, one.ops)), alike=None
        )
        for change in (turned, in_other_order, zeroed, unlike)
    },
    "labels": lambda one: dataclasses.replace(one, inputs=later(one.inputs, "labels"), alike=None),
    "rows": lambda one: dataclasses.replace(one, inputs=later(one.inputs, "weights parameters"), alike=None),
    "result": lambda one: dataclasses.replace(one, outputs=later(one.outputs, "new weights parameters"), alike=None),
    "sequence": lambda one: dataclasses.replace(
        one,
        alike=None,
        inputs=tuple(
            [msgspec.structs.replace(p, batch=p.batch.moved(1)) if p.tensor == "ids" else p for p in one.inputs]
        ),
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("change", "mesh"),
    [
        *((change, Mesh(ulysses=8)) for change in CHANGES),
        *(
            pytest.param(change, Mesh(dp=4, ulysses=2), marks=[] if change == "rows" else pytest.mark.slow)
            for change in sorted(CHANGES)  # of replicas and their shards
        ),
    ],
)
def test_what_one_member_in_the_middle_of_a_class_does_otherwise_is_found(change: str, mesh: Mesh) -> None:
    schedule = sharded("ulysses", mesh, layers=2)
    check(schedule)

    def program(rank: int) -> Program:
        own = schedule.program(rank)
        if rank != 5:
            return own
        return Program.of_calls(rank, [call._replace(fragment=CHANGES[change](call.fragment)) for call in own.calls])

    changed = Schedule(schedule.header, program)
    assert changed.to_json() != schedule.to_json()
    with pytest.raises(ScheduleError):
        check(changed)


@pytest.mark.sweep
def test_a_padded_last_shard_is_in_no_class() -> None:
    schedule = sharded("ulysses", Mesh(dp=3, ulysses=2))
    for axes in axes_of(schedule):
        with pytest.raises(Unclassed):
            Supersteps(schedule, axes)
    check(schedule)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_no_mutant_is_accepted_that_rank_by_rank_is_not(seed: int) -> None:
    draw, verdicts = Random(seed), Counter[tuple[bool, bool]]()
    originals = [flattened(layered(name, layers=1)) for name in ("usp of 2", "upipe over rings", "fpdt in chunks")]
    originals += [
        flattened(sharded(*one)) for one in (("ulysses", Mesh(dp=4, ulysses=2)), ("zigzag", Mesh(dp=2, ring=2)))
    ]
    assert all(by_classes(original) for original in originals)
    for operator in OPERATORS.values():
        original = draw.choice(originals)
        mutant = operator(draw, original)
        if mutant is None or mutant.header != original.header:
            continue
        both = [mutant]
        if sum(a != b for a, b in zip(mutant.programs, original.programs, strict=True)) == 1:
            both.append(in_whole_groups(mutant, original))
        for one in both:
            verdicts[by_classes(one), by_all_ops(one)] += 1
    assert not verdicts[True, False], verdicts
    assert verdicts[True, True] > 0
    assert verdicts[False, False] > 20


# Contents of all members


def piece(start: int, seen: Seen = (), size: int = 4) -> Piece:
    return Piece(
        ((0, 1), (0, size), (0, 1), (0, 1)), Content("out", 0, (ONE, Span(start, start + size), ONE, ONE), seen)
    )


def test_contents_of_all_members_are_those_of_each() -> None:
    keys = [((Span(0, 4), ONE),), ((Span(0, 8), ONE),), ((Span(0, 4), ONE), (Span(8, 12), ONE))]
    each = [[piece(start, seen)] for start, seen in zip((0, 4, 20), keys, strict=True)]
    whole = of_all(each)
    assert [of_member(whole, member) for member in range(3)] == each
    assert of_all([[piece(8)]] * 3) == [piece(8)]
    with pytest.raises(Unclassed):
        of_all([[piece(0)], [piece(4, size=8)]])


def test_sums_over_what_depends_on_the_member_are_refused() -> None:
    here, there = (of_all([[piece(0, ((Span(at, at + 4), ONE),))] for at in both])[0] for both in ((0, 4), (4, 0)))
    with pytest.raises(Unclassed):
        union(here.content, there.content)
    with pytest.raises(ScheduleError, match="twice"):
        union(here.content, here.content)
