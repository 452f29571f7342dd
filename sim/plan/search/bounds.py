"""Lower bounds of a configuration's step, in seconds and in bytes of memory, from the program of one of its ranks.

A rank's kernels run one after the other on its compute stream, each at least for its solo time; what communicates
beside them only takes SMs and bandwidth away. What it sends and copies passes links that carry no more than their rate.
So the step takes at least as long as any rank's kernels, and any rank's transfers. Of the GPUs' memory the fullest
decides, which holds at least what this one does; of a host's the sum over its ranks, whose buffers have equal shapes.
Building one program of 64 takes a sixty-fourth of the time of all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sim.accounts.memory import MemoryWalk, walk
from sim.accounts.reserved import Allocations
from sim.base.garbage import garbage_collection_off
from sim.engine.costs.cost import CostModel
from sim.engine.play.facts import largest_part
from sim.engine.play.work import Work
from sim.engine.results.floors import link_floors
from sim.engine.results.room import Allocated, Room, allocated_for, fullest_of, room_of
from sim.plan.search.few import Few
from sim.schedule.derive.dependencies import derive
from sim.schedule.derive.kernels import kernel_uses
from sim.schedule.ir.ops import COMPUTE, OFFLOAD, Collective, Exchange, HostCopy, StateKernel
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.methods.catalog import SCHEDULES
from sim.setup.configuration import Configuration
from sim.words.mesh import Mesh


class Least(NamedTuple):
    """Seconds of one rank, without noise of kernels."""

    kernels_s: float
    """Of its compute stream, without those on weights and states, which may move to the host."""
    states_s: float
    """Of the latter."""
    links_s: float
    """Of the link that carries most for this rank, at its rate."""
    ops: int
    """How many its program has."""
    layers_s: float = 0.0
    """Of ``kernels_s`` those of layers, where few of them have told."""

    @property
    def step_s(self) -> float:
        """Lower bound of the step of this configuration."""
        return max(self.kernels_s + self.states_s, self.links_s)

    @property
    def branch_s(self) -> float:
        """Lower bound of the step of this configuration, and of those that recompute and copy more."""
        return max(self.kernels_s, self.links_s)

    def with_more(self, last: Least, few: Few) -> Least:
        """Return the bounds of a step with all its layers or micro-batches: this one has few of them, and ``last`` has
        more.
        """
        kernels_s, states_s, links_s, ops, layers_s = (few.told(*pair) for pair in zip(self, last, strict=True))
        return Least(kernels_s, states_s, links_s, round(ops), layers_s)

    def with_layers(self, last: Least, few: Few) -> Least:
        """Return the bounds of a step with all its layers, and the seconds of these apart."""
        return self.with_more(last, few)._replace(layers_s=(last.kernels_s - self.kernels_s) / few.between * few.layers)


def least_of_any(found: Sequence[Least]) -> Least:
    """Return bounds that hold for all of some configurations."""
    kernels_s, states_s, links_s, ops, layers_s = (min(values) for values in zip(*found, strict=True))
    return Least(kernels_s, states_s, links_s, ops, layers_s)


@garbage_collection_off()
def least_seconds(found: Configuration) -> Least:
    """Return the lower bounds of a configuration's seconds. Raises InputError where it cannot be built."""
    schedule, program = _built(found)
    cost = CostModel(found.cluster, found.profile)
    ops = (op for call in program.calls for op in call.fragment.ops)
    runs = Counter(
        (use, isinstance(op, StateKernel))
        for use, op in zip(kernel_uses(program), ops, strict=True)
        if use and op.stream == COMPUTE
    )
    taken = [(of_states, count * cost.kernel_seconds(program.rank, use)[0]) for (use, of_states), count in runs.items()]
    links = link_floors(_work_of(schedule, program), found.cluster, of=range(program.rank, program.rank + 1))
    return Least(
        kernels_s=math.fsum(taken_s for of_states, taken_s in taken if not of_states),
        states_s=math.fsum(taken_s for of_states, taken_s in taken if of_states),
        links_s=max(links.values(), default=0.0),
        ops=sum(len(call.fragment.ops) for call in program.calls),
    )


@garbage_collection_off()
def least_room(found: Configuration, ranks: Sequence[int] | None = None, *, reserved: bool = False) -> Room:
    """Return the least that a configuration takes of each memory, by some ranks of each stage of a pipeline: the last
    one, or all where the schedule is none of the catalog, since their parts may be unequal. With ``reserved`` the GPU's
    memory is what the software's allocator reserves, if that is known, which takes longer to compute. Raises InputError
    where it cannot be built.
    """
    ranks = _some_ranks(found) if ranks is None else ranks
    schedule = found.built(ranks=len(ranks))
    programs = {rank: schedule.program(rank) for rank in ranks}
    derived = {rank: derive(one) for rank, one in programs.items()}
    walked = {rank: walk(one, derived[rank]) for rank, one in programs.items()}
    stages = (Allocations(programs[rank], derived[rank]) for rank in fullest_of(found.mesh, walked))
    allocator = allocated_for(stages, found.cluster, found.allocator) if reserved else None
    return _room_of(found, schedule, walked, allocator)


@garbage_collection_off()
def room_by_few(whole: Configuration, few: Few, ranks: Sequence[int] | None = None) -> Room:
    """Return the least that a configuration takes of each memory, by few micro-batches of which stages hold as much. A
    rank holds more for each further one only where it keeps token ids, labels or losses of all.
    """
    ranks = _some_ranks(whole) if ranks is None else ranks
    walked = _walked(few.setups[-1].resolved(), ranks)
    if growing := [rank for rank in ranks if few.further and walked[rank].by_term["other"]]:
        for rank, first in _walked(few.setups[0].resolved(), growing).items():
            walked[rank] = _with_more(first, walked[rank], few)
    return _room_of(whole, whole.built(ranks=0), walked)


def _some_ranks(found: Configuration) -> Sequence[int]:
    return last_ranks(found.mesh) if found.entry in SCHEDULES.values() else found.mesh.first_replica


def _walked(found: Configuration, ranks: Sequence[int]) -> dict[int, MemoryWalk]:
    schedule = found.built(ranks=len(ranks))
    programs = {rank: schedule.program(rank) for rank in ranks}
    return {rank: walk(one, derive(one)) for rank, one in programs.items()}


def _with_more(first: MemoryWalk, last: MemoryWalk, few: Few) -> MemoryWalk:
    """Return a walk whose peaks are those with all micro-batches; what else it has is of few."""
    kept = round(few.told(first.by_term["other"], last.by_term["other"]))
    further = kept - last.by_term["other"]
    return last._replace(peak_bytes=last.peak_bytes + further, by_term={**last.by_term, "other": kept})


def _room_of(
    found: Configuration, schedule: Schedule, walked: Mapping[int, MemoryWalk], allocator: Allocated | None = None
) -> Room:
    """Return the memory of all ranks, by walks of some of each stage."""
    mesh = found.mesh
    alike = {mesh.place(rank)["pp"]: walked[rank] for rank in fullest_of(mesh, walked)}
    of_roles = {role: walked.get(role) or alike[mesh.place(role)["pp"]] for role in mesh.first_replica}
    return room_of(schedule.header, [of_roles[role] for role in mesh.roles], found.cluster, allocator)


def _built(found: Configuration) -> tuple[Schedule, Program]:
    """Return the schedule, and the program of the last rank of its first replica, in the last stage of a pipeline."""
    schedule = found.built(ranks=1)
    return schedule, schedule.program(last_ranks(found.mesh)[-1])


def last_ranks(mesh: Mesh) -> list[int]:
    """Return the last rank of each stage of the first replica: under a causal mask, contiguous parts give it
    most work.
    """
    return list({mesh.place(rank)["pp"]: rank for rank in mesh.first_replica}.values())


def _work_of(schedule: Schedule, program: Program) -> Work:
    """Return what one rank asks of links, and what a collective that it takes part in asks of those of its group."""
    rank, header = program.rank, schedule.header
    groups = {one.name: one.group_of(rank) for one in header.communicators if any(rank in some for some in one.groups)}
    found = Work([Counter() for _ in range(header.mesh.size)], Counter(), Counter(), Counter(), Counter())
    for fragment, calls in Counter(call.fragment.shared for call in program.calls).items():
        alone = Program.of_fragment(fragment, rank)
        for op in fragment.ops:
            if isinstance(op, Exchange):
                for peer, view in op.sends:
                    found.sent_bytes[rank, peer] += calls * alone.nbytes(view)
            elif isinstance(op, Collective):
                found.collectives[op.name, groups[op.communicator], largest_part(op, alone)] += calls
            elif isinstance(op, HostCopy):
                found.host_bytes[rank, op.stream == OFFLOAD] += calls * alone.nbytes(op.source)
    return found
