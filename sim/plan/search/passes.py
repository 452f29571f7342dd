"""Lower bounds of a pipeline's step: its passes of micro-batches, each as long as its kernels, in their order.

    program of one rank a stage ── kernels of each pass ── timetable of all micro-batches ── seconds

A stage's kernels run one after the other in the order of its passes. Those that need what another stage hands on wait
for the kernel that makes it, and what follows them waits, too. So a walk through the timetable takes no longer than the
step does, bubbles included. Of a step of many layers and micro-batches the passes are told by those of few, and the
timetable is that of all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from sim.engine.costs.cost import CostModel
from sim.plan.search.bounds import last_ranks
from sim.plan.search.few import PLAYED, Few, at_most, of_layers, stages_of
from sim.schedule.derive.kernels import kernel_uses
from sim.schedule.ir.ops import COMPUTE, Exchange, Op, StateKernel
from sim.schedule.ir.program import Program
from sim.schedule.model.pipeline.account import Parts, played_in_parts
from sim.schedule.model.pipeline.stages import LINKS, Stages
from sim.schedule.model.step import Item
from sim.setup.configuration import Configuration
from sim.setup.setup import Setup

TURNS = 3
"""Micro-batches whose passes are built: the first adds to no sum, the last ends in the update, another is as all."""

Key = tuple[str, int]
"""The kind of a pass, and its chunk of layers."""


class Work(NamedTuple):
    """What one rank of a stage does."""

    first: Mapping[Key, Parts]
    """Of the first micro-batch that passes."""
    later: Mapping[Key, Parts]
    """Of any other, at least."""
    after_s: float
    """Of kernels behind all passes, but those on weights and states."""
    states_s: float
    """Of these."""

    def with_more(self, last: Work, few: Few) -> Work:
        """Return the work of a stage with all its layers: this one has few of them, and ``last`` has more."""

        def told(first: Mapping[Key, Parts], second: Mapping[Key, Parts]) -> dict[Key, Parts]:
            pairs = {key: zip(one, second[key], strict=True) for key, one in first.items()}
            return {key: Parts(*(few.told(*pair) for pair in both)) for key, both in pairs.items()}

        after_s, states_s = few.told(self.after_s, last.after_s), few.told(self.states_s, last.states_s)
        return Work(told(self.first, last.first), told(self.later, last.later), after_s, states_s)


class Steps(NamedTuple):
    """Lower bounds of a step's seconds."""

    passes_s: float
    """Without kernels on weights and states."""
    all_s: float


def least_steps(setup: Setup) -> Steps:
    """Return lower bounds of a pipeline's step. Raises InputError where it cannot be built."""
    found = setup.resolved()
    few = of_layers(_of_few_turns(setup, found), PLAYED)
    *before, last = [_works(one.resolved()) for one in few.setups]
    pairs = zip(before[0], last, strict=True) if before else ()
    works = [one.with_more(other, few) for one, other in pairs] if before else last
    return walked(stages_of(found), works)


def _of_few_turns(setup: Setup, found: Configuration) -> Setup:
    """Return a setup with few micro-batches that has all kinds of passes: as many as fill both ways where there are
    two.
    """
    rounds = stages_of(found).rounds
    if rounds is None:
        return setup
    before, each = rounds
    fewest = TURNS if before == found.mesh.pp else before
    return at_most(setup, -(-fewest // each) * each)


def _works(found: Configuration) -> list[Work]:
    """Return what a rank of each stage does."""
    schedule, cost, stages = found.built(ranks=found.mesh.pp), CostModel(found.cluster, found.profile), stages_of(found)
    ranks = enumerate(last_ranks(found.mesh))
    return [_work(schedule.program(rank), cost, stages, stage) for stage, rank in ranks]


class _Ran(NamedTuple):
    """An op of a program."""

    op: Op
    seconds: float
    """Of its kernel on the compute stream; 0 for all others, and for those on weights and states."""
    numbers: Sequence[int]
    """Of the buffers of its fragment."""

    def writes(self, buffers: set[int]) -> bool:
        """Return whether it writes one of some buffers of the program."""
        return any(self.numbers[view.buffer] in buffers for view in self.op.writes)


def _work(program: Program, cost: CostModel, stages: Stages, stage: int) -> Work:
    """Return what a program does, by its passes."""
    ran, states_s = list[_Ran](), 0.0
    uses = iter(kernel_uses(program))
    for call in program.calls:
        for op in call.fragment.ops:
            use = next(uses)
            taken_s = cost.kernel_seconds(program.rank, use)[0] if use and op.stream == COMPUTE else 0.0
            states_s += taken_s if isinstance(op, StateKernel) else 0.0
            ran.append(_Ran(op, 0.0 if isinstance(op, StateKernel) else taken_s, call.numbers))
    came = set[int]()
    passes = [_pass(ran[begin:end], came) for begin, end in pairwise(program.begins)]
    by_key = defaultdict[Key, list[Parts]](list)
    for item, one in zip(stages.items(stage), passes, strict=True):
        by_key[item.kind, item.chunk].append(one)
    first = {key: found[0] for key, found in by_key.items()}
    later = {key: Parts(*map(min, zip(*(found[1:] or found), strict=True))) for key, found in by_key.items()}
    return Work(first, later, sum(one.seconds for one in ran[program.begins[-1] :]), states_s)


def _pass(ops: list[_Ran], came: set[int]) -> Parts:
    """Return the seconds of a pass. ``came`` has buffers from other stages that no pass has read yet: a pass may
    receive what a later one needs, and keeps what it has read once.
    """
    needs, made, read = len(ops), len(ops), set[int]()
    for at, one in enumerate(ops):
        if isinstance(one.op, Exchange) and one.op.communicator in LINKS:
            came.update(one.numbers[message.view.buffer] for message in one.op.recvs)
            gone = {one.numbers[message.view.buffer] for message in one.op.sends}
            before = (to for to in range(at, 0, -1) if ops[to - 1].seconds and ops[to - 1].writes(gone))
            made = next(before, at) if gone else made
        elif now := came.intersection([one.numbers[view.buffer] for view in one.op.reads]):
            read |= now
            needs = min(needs, at) if one.seconds else needs
    came -= read
    first = min(needs, made) if read else 0
    taken = [one.seconds for one in ops]
    return Parts(sum(taken[:first]), sum(taken[first:made]), sum(taken[made:]))


def walked(stages: Stages, works: Sequence[Work]) -> Steps:
    """Return the seconds of a walk through the timetables of all stages, by the work of each.

    Two stages whose passes take a second each have four micro-batches in ten (arXiv:1811.06965):

    >>> from sim.words.mesh import Mesh
    >>> from sim.words.options import LayerOptions
    >>> from sim.words.workload import Workload, load_model
    >>> options = LayerOptions(micro_batches=4)
    >>> model = Workload(model=load_model("tiny"), seq=64, batch=4, scope="step", layers=2)
    >>> passes = {(kind, chunk): Parts(0.0, 1.0, 0.0) for kind in ("F", "BW") for chunk in (0, 1)}
    >>> walked(Stages(Mesh(pp=2), model, options), [Work(passes, passes, 0.0, 0.5)] * 2)
    Steps(passes_s=10.0, all_s=10.5)
    """
    seen = set[tuple[int, Key]]()

    def parts(item: Item) -> Parts:
        key, stage = (item.kind, item.chunk), stages.stage_of(item.chunk, item.micro)
        took = (works[stage].later if (stage, key) in seen else works[stage].first)[key]
        seen.add((stage, key))
        return took

    spent = played_in_parts([stages.items(stage) for stage in range(len(works))], parts)
    ends = [(one.end + work.after_s, work.states_s) for one, work in zip(spent, works, strict=True)]
    return Steps(max(passes_s for passes_s, _ in ends), max(map(sum, ends)))
