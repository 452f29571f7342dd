"""Which replicas, and which members of tensor-parallel groups, do the same: one of each kind is played for all.

    kinds of programs, as their writer says (``Schedule.kind``) ── with whom they meet ── classes of places on an axis

A rank differs from its equals in places on ``AXES`` alone. Its messages go to ranks in the same places on these. So do
its collectives, or they are over all replicas, all members, or parts of the members. A rank that meets others than its
equals do is of another class, however equal its program is, so each begins and ends its collectives when its equals do.
Times then depend on neither tokens nor rows of weights, where what is gathered or scattered over those that stand for
others has parts of one size.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from sim.base.kept import kept
from sim.schedule.ir.ops import AllGather, AllReduce, Barrier, Collective, Exchange, Op, ReduceScatter
from sim.schedule.ir.program import Communicator, Schedule
from sim.schedule.ir.views import Split
from sim.words.mesh import Axis, Mesh

AXES: tuple[Axis, ...] = ("dp", "tp")
"""Along which ranks may stand for others, in the order in which these are looked for."""

Roles = Mapping[Axis, tuple[int, ...]]
"""By axis and place on it the first place whose ranks do the same."""


class Spans(NamedTuple):
    """Over which ranks that may be equal the groups of a communicator are."""

    replicas: bool
    """Whether over all replicas; else each is within one, and there are the same in every one."""
    members: tuple[tuple[int, ...], ...]
    """The parts into which it divides the members of tensor-parallel groups; none of a communicator of no ranks."""

    def over(self, axis: Axis) -> bool:
        """Return whether a group has ranks at several places on an axis."""
        return self.replicas if axis == "dp" else any(len(some) > 1 for some in self.members)


@kept
def roles(schedule: Schedule) -> Roles:
    """Return which places along each axis do the same, on machines on which these are alike."""
    mesh = schedule.header.mesh
    found: dict[Axis, tuple[int, ...]] = {axis: tuple(range(mesh.degrees[axis])) for axis in AXES}
    spans = {one.name: spans_of(one, mesh) for one in schedule.header.communicators}
    known = {name: one for name, one in spans.items() if one}
    if len(known) < len(spans):
        return found
    for axis in AXES:
        others = {other: firsts(places) for other, places in found.items() if other != axis}
        found[axis] = of_kinds(schedule, axis, others)
    found["tp"] = _refined(found["tp"], [one.members for one in known.values() if one.members])
    some = {axis: firsts(places) for axis, places in found.items()}
    unlike = _unlike(schedule, some)
    for axis in AXES:
        if any(known[name].over(axis) for name in unlike):
            found[axis] = tuple(range(mesh.degrees[axis]))
    return found


def of_kinds(schedule: Schedule, axis: Axis, some: Mapping[Axis, Sequence[int]] = {}) -> tuple[int, ...]:
    """Return of each place on an axis the first one whose ranks have programs of the same kinds, at ``some`` places on
    other axes.
    """
    mesh = schedule.header.mesh
    every = range(mesh.degrees[axis])
    return numbered([tuple(map(schedule.kind, mesh.at({**some, axis: [place]}))) for place in every])


def numbered(kinds: Sequence[Hashable]) -> tuple[int, ...]:
    """Return of each of some places the first one that is of its kind."""
    known: dict[Hashable, int] = {}
    return tuple([known.setdefault(kind, place) for place, kind in enumerate(kinds)])


def firsts(places: Sequence[int]) -> list[int]:
    """Return the places that stand for all."""
    return sorted(set(places))


def _refined(places: tuple[int, ...], parts: Sequence[tuple[tuple[int, ...], ...]]) -> tuple[int, ...]:
    """Return classes of members whose partners are of equal classes, in each way of dividing them into parts."""
    while True:
        met = [{one: tuple(sorted(places[other] for other in part)) for part in some for one in part} for some in parts]
        finer = numbered([(own, *(some[place] for some in met)) for place, own in enumerate(places)])
        if finer == places:
            return places
        places = finer


def spans_of(communicator: Communicator, mesh: Mesh) -> Spans | None:
    """Return over what the groups of a communicator are; None where they are none of these."""
    over_replicas = spans_over_replicas(communicator, mesh)
    if over_replicas is None:
        return None
    parts: dict[frozenset[int], set[tuple[int, ...]]] = {}
    for group in communicator.among(mesh.first_replica).groups:
        firsts_of = {mesh.first(rank, "tp") for rank in group}
        members = tuple(sorted({mesh.place(rank)["tp"] for rank in group}))
        if len(group) != len(firsts_of) * len(members):
            return None
        parts.setdefault(frozenset(firsts_of), set()).add(members)
    divided = set(map(frozenset, parts.values()))
    if len(divided) > 1:
        return None
    members_of = tuple(sorted(next(iter(divided), frozenset())))
    every = sorted(one for part in members_of for one in part)
    return Spans(over_replicas, members_of) if every in ([], list(range(mesh.tp))) else None


def spans_over_replicas(communicator: Communicator, mesh: Mesh) -> bool | None:
    """Return whether the groups of a communicator are over all replicas, with the same ranks of each; None where they
    are neither that nor those of one replica, again in each.
    """
    own = communicator.among(mesh.first_replica).groups
    starts = [replica * mesh.replica_stride for replica in range(mesh.dp)]
    over_all = {tuple(sorted([start + rank for start in starts for rank in group])) for group in own}
    if over_all == set(communicator.groups):
        return True
    within = {tuple([start + rank for rank in group]) for start in starts for group in own}
    return False if within == set(communicator.groups) else None


def _unlike(schedule: Schedule, places: Mapping[Axis, Sequence[int]]) -> set[str]:
    """Return the communicators by which ranks at some places do what depends on whom they meet: ranks that they do not
    stand for.
    """
    if all(len(some) == schedule.header.mesh.degrees[axis] for axis, some in places.items()):
        return set()
    fragments = schedule.fragments(schedule.header.mesh.at(places))
    ops = (op for fragment in fragments for op in fragment.ops if isinstance(op, Exchange | Collective))
    return {op.communicator for op in ops if not is_alike_for_all(op)}


def is_alike_for_all(op: Op) -> bool:
    """Return whether an op sums for all of a group, or gathers or scatters parts of one size."""
    if isinstance(op, AllReduce | Barrier):
        return True
    sides = (op.given, op.taken) if isinstance(op, AllGather | ReduceScatter) else None
    return sides is not None and not any(isinstance(side, Split) and side.sizes for side in sides)
