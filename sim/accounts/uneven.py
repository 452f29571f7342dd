"""What uneven micro-batches cost a pipeline: passes in the order of its stages, again as if all were equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from msgspec import UNSET, UnsetType

from sim.accounts.bubbles import waited_s
from sim.accounts.footprint import options_of
from sim.accounts.trace import Trace
from sim.schedule.ir.ops import Exchange
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.model.pipeline.account import Parts, played_in_parts
from sim.schedule.model.pipeline.stages import LINKS, Stages
from sim.schedule.model.step import Item


class Passes(NamedTuple):
    """What each stage of a pipeline did, in order, in seconds of one of its ranks without waiting for other stages."""

    items: list[list[Item]]
    needs_s: list[list[float]]
    """Of each until it takes what another stage has handed on."""
    leaves_s: list[list[float]]
    """Of each until what it hands on can leave the stage."""
    took_s: list[list[float]]
    """Of each until it has run its last kernel."""


def uneven(trace: Trace, schedule: Schedule) -> float | UnsetType:
    """Return the share of a step that a pipeline waits longer than it would if each kind of pass through a chunk took
    the same for all micro-batches, their mean: below 0 where their order spares more than it costs. Unset where there
    is no pipeline, where micro-batches are alike, or where the schedule does not know its passes.
    """
    found = passes_of(trace, schedule) if schedule.header.workload.sequences else None
    if found is None:
        return UNSET
    return (ends_s(found) - ends_s(equal(found))) / trace.step_time_s if trace.step_time_s else 0.0


def passes_of(trace: Trace, schedule: Schedule, *, of_last: bool = False) -> Passes | None:
    """Return what stages did by a trace of all ranks of a schedule, which may be those that are played for others: the
    first rank of each, or the last one, which has most work under a causal mask. None where there is no pipeline, or
    where the schedule does not know its passes.
    """
    header = schedule.header
    if header.mesh.pp == 1:
        return None
    beside = {axis: degree for axis, degree in header.mesh.degrees.items() if axis != "pp"}
    ranks = header.mesh.at({axis: [degree - 1 if of_last else 0] for axis, degree in beside.items()})
    programs = [schedule.program(rank) for rank in ranks]
    if not all(program.begins for program in programs):
        return None
    stages = Stages(header.mesh, header.workload, options_of(header))
    found = Passes([stages.items(stage) for stage in range(header.mesh.pp)], [], [], [])
    times = [_times(trace, at, program) for at, program in zip(ranks, programs, strict=True)]
    for at, of_stage in zip(ranks, times, strict=True):
        waited = waited_s(trace, header, at, np.array(of_stage))
        ends, needs, leaves = np.array(of_stage) - waited
        before = np.append(0.0, ends[:-1])
        for into, until in ((found.needs_s, needs), (found.leaves_s, leaves), (found.took_s, ends)):
            into.append(np.maximum(until - before, 0.0).tolist())
    return found


def _times(trace: Trace, at: int, program: Program) -> list[list[float]]:
    """Return of each pass of a rank, when it has run its last kernel, when it takes
    what another stage has handed on, and when what it hands on can leave; where it does not, 0.
    """
    first, ops, came = trace.ops.starts[at], program.ops, set[int]()
    ends, needs, leaves = [0.0], list[float](), list[float]()
    for begin, end in pairwise(program.begins):
        needed = left = 0.0
        last = ends[-1]
        for number in range(begin, end):
            op, row = ops[number], first + number
            if isinstance(op, Exchange) and op.communicator in LINKS:
                came.update([message.view.buffer for message in op.recvs])
                left = trace.posted_s[row] if op.sends else left
                continue
            taken = came.intersection([view.buffer for view in op.reads])
            if taken:
                came -= taken
                needed = trace.begun_s[row]
            if op.meta.activity == "compute":
                last = max(last, trace.ended_s[row])
        ends.append(last)
        needs.append(needed)
        leaves.append(left)
    return [ends[1:], needs, leaves]


def equal(passes: Passes) -> Passes:
    """Return the same with what each kind of pass through a chunk takes on average."""
    found = []
    for times in passes[1:]:
        alike: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        for items, of_stage in zip(passes.items, times, strict=True):
            for item, one in zip(items, of_stage, strict=True):
                alike[item.kind, item.chunk].append(one)
        means = {kind: float(np.mean(some)) for kind, some in alike.items()}
        found.append([[means[item.kind, item.chunk] for item in items] for items in passes.items])
    return Passes(passes.items, *found)


def ends_s(passes: Passes) -> float:
    """Return when the last pass ends: each begins behind the one before it on its stage, and behind what another chunk
    hands on to it.
    """
    parts = dict(parts_of(passes))
    return max(stage.end for stage in played_in_parts(passes.items, parts.__getitem__))


def parts_of(passes: Passes) -> Iterator[tuple[Item, Parts]]:
    """Yield the passes of all stages with their parts."""
    for items, *times in zip(*passes, strict=True):
        for item, needs, leaves, took in zip(items, *times, strict=True):
            through = max(leaves - needs, 0.0)
            yield item, Parts(needs, through, took - needs - through)
