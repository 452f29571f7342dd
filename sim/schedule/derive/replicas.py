"""Whether one data-parallel replica stands for all of a schedule: it is then played once, and mostly proved once.

The replicas of a schedule that says so are equal by construction: each has the program of the first, with its own ranks
and sequences (``Schedule``). What one does and is given holds of the others, too, with these renamed, if a communicator
lies within replicas, in each the same, or sums over all of them in their order. So does any further axis whose members
are equal, once a schedule declares one. The ranks of a ring under a causal mask have programs of their own.

Where ranks of all replicas own other rows of weights each, these are renamed as well. Times depend on none of them, so
that one replica is played for all if what is gathered or scattered over replicas has parts of one size. Which rows meet
where is proved of all ranks.
"""

from __future__ import annotations

from sim.schedule.ir.ops import AllGather, AllReduce, Barrier, Collective, Exchange, Op, ReduceScatter
from sim.schedule.ir.program import Communicator, Schedule
from sim.schedule.ir.views import Split
from sim.words.mesh import Mesh


def folds(schedule: Schedule) -> bool:
    """Return whether the first replica is played for all; where the schedule is replicated it is proved for all too."""
    mesh = schedule.header.mesh
    if not (schedule.replicated or schedule.shards_alike):
        return False
    spans: dict[str, bool] = {}
    for communicator in schedule.header.communicators:
        spanning = _spans(communicator, mesh)
        if spanning is None:
            return False
        spans[communicator.name] = spanning
    fragments = {call.fragment.shared for rank in mesh.first_replica for call in schedule.program(rank).calls}
    return all(
        isinstance(op, AllReduce | Barrier) or (schedule.shards_alike and _has_equal_parts(op))
        for fragment in fragments
        for op in fragment.ops
        if isinstance(op, Exchange | Collective) and spans.get(op.communicator, True)
    )


def _has_equal_parts(op: Exchange | Collective) -> bool:
    """Return whether an op gathers or scatters parts of one size."""
    if not isinstance(op, AllGather | ReduceScatter):
        return False
    return not any(isinstance(side, Split) and side.sizes for side in (op.given, op.taken))


def _spans(communicator: Communicator, mesh: Mesh) -> bool | None:
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


def whole_group(schedule: Schedule, communicator: str, members: tuple[int, ...]) -> tuple[int, ...]:
    """Return the group that some ranks are members of, with those of it in replicas that the schedule leaves out: these
    count from its last rank on.
    """
    if schedule.whole is schedule:
        return members
    group = schedule.whole.communicator(communicator).group_of(schedule.order[members[0]])
    return tuple(sorted([schedule.place[rank] for rank in group]))


def among(schedule: Schedule, op: Op) -> int:
    """Return how many ranks a collective meets, with those in replicas that the schedule leaves out: of its largest
    group; 1 of other ops.
    """
    if not isinstance(op, Collective):
        return 1
    return max(map(len, schedule.whole.communicator(op.communicator).groups))


def num_alike(schedule: Schedule) -> int:
    """Return how many replicas there are for each that the schedule has."""
    return schedule.whole.header.mesh.dp // schedule.header.mesh.dp
