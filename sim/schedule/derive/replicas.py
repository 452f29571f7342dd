"""Whether one data-parallel replica stands for all of a schedule: it is then played once, and mostly proved once.

The replicas of a schedule that says so are equal by construction: each has the program of the first, with its own ranks
and sequences (``Schedule``). What one does and is given holds of the others, too, with these renamed, if a communicator
lies within replicas, in each the same, or sums over all of them in their order. So does any further axis whose members
are equal, once a schedule declares one. The ranks of a ring under a causal mask have programs of their own.

Where each replica owns rows of weights of its own, as many behind those of the one before for all, parts of one size
may be gathered from all and scattered to all, too (``sim.schedule.proof.replicas``). Replicas that differ in more are
proved by themselves beside the one that stands for all others: the last one, whose rows end where the tensor does, and
those that own rows of norms, which one member of a tensor-parallel group counts. What is played of them says ``roles``.
"""

from __future__ import annotations

from sim.base.kept import kept
from sim.schedule.derive.roles import is_alike_for_all, spans_over_replicas
from sim.schedule.ir.ops import AllReduce, Barrier, Collective, Exchange, Op
from sim.schedule.ir.program import Schedule


def folds(schedule: Schedule) -> bool:
    """Return whether some replicas are proved for all."""
    mesh = schedule.header.mesh
    if not (schedule.replicated or schedule.rows_later):
        return False
    spans: dict[str, bool] = {}
    for communicator in schedule.header.communicators:
        spanning = spans_over_replicas(communicator, mesh)
        if spanning is None:
            return False
        spans[communicator.name] = spanning
    return all(
        isinstance(op, AllReduce | Barrier) or (schedule.rows_later and is_alike_for_all(op))
        for fragment in schedule.fragments(mesh.at({"dp": schedule.written}))
        for op in fragment.ops
        if isinstance(op, Exchange | Collective) and spans.get(op.communicator, True)
    )


def whole_group(schedule: Schedule, communicator: str, members: tuple[int, ...]) -> tuple[int, ...]:
    """Return the group that some ranks are members of, in the order of the whole schedule, with those of it that the
    schedule leaves out: these count from its last rank on.
    """
    if schedule.whole is schedule:
        return members
    group = schedule.whole.communicator(communicator).group_of(schedule.order[members[0]])
    return tuple([schedule.place[rank] for rank in group])


def whole_size(schedule: Schedule, communicator: str, member: int) -> int:
    """Return how many ranks the group of a rank has, with those that the schedule leaves out."""
    rank = schedule.order[member] if schedule.order else member
    return len(schedule.whole.communicator(communicator).group_of(rank))


def among(schedule: Schedule, op: Op) -> int:
    """Return how many ranks a collective meets, with those that the schedule leaves out: of its largest group; 1 of
    other ops.
    """
    if not isinstance(op, Collective):
        return 1
    return max(map(len, schedule.whole.communicator(op.communicator).groups))


def have_shards(schedule: Schedule) -> bool:
    """Return whether some replicas stand for others with rows of weights of their own."""
    return bool(schedule.whole.rows_later) and schedule.header.mesh.dp < schedule.whole.header.mesh.dp


@kept
def stand_for(schedule: Schedule) -> list[tuple[int, ...]]:
    """Return by replica of the schedule for which of the whole one it stands in a proof: for those that are written as
    it is, the first of which it is itself.
    """
    mesh, whole = schedule.header.mesh, schedule.whole
    if mesh.dp == whole.header.mesh.dp:
        return [(replica,) for replica in range(mesh.dp)]
    written: dict[int, list[int]] = {}
    for replica, one in enumerate(whole.written_as):
        written.setdefault(one, []).append(replica)
    own = mesh.along(0, "dp", range(mesh.dp))
    return [tuple(written[whole.header.mesh.replica(schedule.order[rank])]) for rank in own]
