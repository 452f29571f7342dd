"""A pipeline of many stages and micro-batches by the play of one with few: how long each pass takes there, in the order
of all.

    few stages, few micro-batches ── play ── seconds of each kind of pass ── timetable of all ── step

A pass through as many layers takes as long on any stage, so the play says all that the timetable of many has to know.
What else a step takes, as its update does, is what the play takes beyond its own timetable. A pass takes longer beside
messages, which are beside others in few stages: of 8 and 16 stages with chunks of 3 and 4 layers steps that were tried
are told within 0.35 %, in all orders with chunks of two within 1 % (``tests/plan/test_timed.py``).

The first member of a tensor-parallel group counts norms for all, where shards lie over replicas on the few that own
them. A rank that counts them is played for those that do not: these wait for it before the update.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from sim.accounts.trace import Trace
from sim.accounts.uneven import parts_of, passes_of
from sim.base.errors import ScheduleError
from sim.engine.play.fold import why_all
from sim.engine.play.simulate import Simulation
from sim.plan.search.few import at_most, of_played, of_turns, stages_of, turns_of
from sim.schedule.ir.ops import Exchange
from sim.schedule.ir.program import Schedule
from sim.schedule.model.pipeline.account import Parts, played_in_parts
from sim.schedule.model.pipeline.stages import LINKS, Stages
from sim.setup.configuration import Configuration
from sim.setup.setup import Setup

STAGES = 5
"""Stages that are played, and another one where orders need an even number: NCCL would give messages of four stages
more channels than those of many have (``sim/engine/channels.py``)."""
TURNS = 2
"""Micro-batches that are played for each of these, at least: those that fill the stages, and as many in which all are
busy."""
MOST_VISITS = 2**15
"""Layers that micro-batches pass on all ranks that are played, up to which few layers and micro-batches are played of
all stages. That is some 10 million ops of a zigzag ring of 16."""

_Chunk = tuple[bool, bool, int, int]
"""What passes through a chunk depend on: whether it is the first or the last one, how many layers it has, and which of
the model's kinds of layers the first of these is of."""


def few_stages(setup: Setup) -> Setup | None:
    """Return a setup with few stages and micro-batches, whose passes say what those of the whole take; None where they
    do not, or where what else would be played is not too large.
    """
    if setup.pp_degree <= STAGES or not _stages_are_alike(found := setup.resolved()):
        return None
    last = of_played(of_turns(setup).setups[-1]).setups[-1].resolved()
    if _visits(last) <= MOST_VISITS:
        return None
    stages, mesh = stages_of(found), found.mesh
    pp = _few(stages)
    own = len(stages.split) // mesh.pp * pp
    split = (stages.split[0], *[stages.split[1]] * (own - 2), stages.split[-1])
    layers = {"schedule.pipeline_layers": ",".join(map(str, split))} if found.options.pipeline_layers else {}
    few = at_most(setup, _turns(stages)).spelled_out()
    few = few.replace(pp_degree=pp, gpus=mesh.size // mesh.pp * pp, nodes=None, layers=sum(split), set=layers)
    return few if {*_chunks(found)} == {*_chunks(few.resolved())} else None


def _stages_are_alike(found: Configuration) -> bool:
    """Return whether chunks between the first and the last one have as many layers each, stages are on nodes of their
    own that are all alike, and there are more stages and micro-batches than are played.
    """
    stages, mesh, spec = stages_of(found), found.mesh, found.spec
    on_nodes = mesh.order[0] == "pp" and (mesh.size // mesh.pp) % spec.gpus_per_node == 0
    alike = not why_all(spec) and not spec.per_gpu and len({*stages.split[1:-1]}) == 1
    known = stages.rounds is not None and not found.workload.sequences
    return on_nodes and alike and known and mesh.pp > _few(stages) and turns_of(found) > _turns(stages)


def _few(stages: Stages) -> int:
    """Return how many stages are played."""
    return STAGES + STAGES % stages.copies


def _turns(stages: Stages) -> int:
    """Return how many micro-batches are played."""
    few = _few(stages)
    before, _ = stages.rounds_over(few) or (0, 0)
    return max(TURNS * few, before)


def _chunks(found: Configuration) -> list[_Chunk]:
    """Return what kind each chunk is of."""
    stages, kinds = stages_of(found), len(found.workload.model.kinds or (None,))
    return [
        (number == 0, stages.is_last(number), layers, stages.layers(number).start % kinds)
        for number, layers in enumerate(stages.split)
    ]


def _visits(found: Configuration) -> int:
    """Return how often micro-batches pass a layer on a rank of a replica, of one member of each group."""
    mesh = found.mesh
    return mesh.ring * mesh.ulysses * turns_of(found) * found.workload.layers


class Timed(NamedTuple):
    """How long passes take."""

    parts: Mapping[tuple[str, _Chunk], Parts]
    """By direction and chunk."""
    hand_over_s: float
    """Of a message between stages."""

    def walked_s(self, found: Configuration) -> float:
        """Return when the last pass of a configuration ends."""
        stages, chunks = stages_of(found), _chunks(found)
        tables = [stages.items(stage) for stage in range(found.mesh.pp)]
        spent = played_in_parts(tables, lambda item: self.parts[item.kind, chunks[item.chunk]], self.hand_over_s)
        return max(one.end for one in spent)


def timed(found: Configuration, play: Simulation) -> Timed:
    """Return how long the passes of a configuration took in its play, on the last rank of each stage: means over all
    micro-batches and stages.
    """
    schedule, chunks = play.fold.checked.schedule, _chunks(found)
    passes = passes_of(play.trace, schedule, of_last=True)
    if passes is None:
        raise ScheduleError(f"schedule {schedule.header.name!r} does not say where passes begin")
    by_kind = defaultdict[tuple[str, _Chunk], list[Parts]](list)
    for item, parts in parts_of(passes):
        by_kind[item.kind, chunks[item.chunk]].append(parts)
    means = {kind: Parts(*np.mean(some, axis=0).tolist()) for kind, some in by_kind.items()}
    return Timed(means, _hand_over_s(play.trace, schedule))


def _hand_over_s(trace: Trace, schedule: Schedule) -> float:
    """Return how long a message between stages takes to the last rank."""
    rank = schedule.num_ranks - 1
    starts, program = trace.ops.starts, schedule.program(rank)
    taken = [
        starts[rank] + number
        for number, op in program.communication
        if isinstance(op, Exchange) and op.communicator in LINKS and op.recvs
    ]
    return float(np.mean(trace.ended_s[taken] - trace.begun_s[taken]))


def told_by_passes(setup: Setup, few: Setup, play: Simulation) -> float:
    """Return the seconds of a step by the play of few of its stages and micro-batches."""
    whole, some = setup.resolved(), few.resolved()
    passes = timed(some, play)
    return play.trace.step_time_s + passes.walked_s(whole) - passes.walked_s(some)
