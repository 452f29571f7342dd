"""What no step of a pipeline can be below: the passes of micro-batches, each as long as its kernels, in their order.

    program of one rank a stage ── kernels of each pass ── timetable of all micro-batches ── seconds

A stage's kernels run one after the other in the order of its passes. Those that need what another stage hands on wait
for the kernel that makes it, and what follows them waits, too. So a walk through the timetable takes no longer than the
step does, bubbles included. Of a step of many layers and micro-batches the passes are told by those of few, and the
timetable is that of all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from sim.engine.costs.cost import CostModel
from sim.plan.search.bounds import last_ranks
from sim.plan.search.few import PLAYED, Few, at_most, of_layers, round_of, stages_of
from sim.schedule.derive.kernels import kernel_uses
from sim.schedule.ir.ops import COMPUTE, Exchange, Op, StateKernel
from sim.schedule.ir.program import Program
from sim.schedule.model.pipeline.stages import LINKS, Stages
from sim.schedule.model.step import Item
from sim.setup.configuration import Configuration
from sim.setup.setup import Setup

TURNS = 3
"""Micro-batches whose passes are built: the first adds to no sum, the last ends in the update, another is as all."""

Key = tuple[str, int]
"""The kind of a pass, and its chunk of layers."""


class Pass(NamedTuple):
    """Seconds of the kernels of one pass of a micro-batch."""

    before_s: float
    """Of those that need nothing of other stages, such as what checkpoints compute again first."""
    through_s: float
    """From the first that needs what was handed on to the one that makes what is handed on."""
    behind_s: float

    @property
    def all_s(self) -> float:
        """Of all."""
        return sum(self)


class Work(NamedTuple):
    """What one rank of a stage does."""

    first: Mapping[Key, Pass]
    """Of the first micro-batch that passes."""
    later: Mapping[Key, Pass]
    """Of any other, at least."""
    after_s: float
    """Of kernels behind all passes, but those on weights and states."""
    states_s: float
    """Of these."""

    def with_more(self, last: Work, few: Few) -> Work:
        """Return the work of a stage that has more layers than this one and ``last``."""

        def told(first: Mapping[Key, Pass], second: Mapping[Key, Pass]) -> dict[Key, Pass]:
            pairs = {key: zip(one, second[key], strict=True) for key, one in first.items()}
            return {key: Pass(*(few.told(*pair) for pair in both)) for key, both in pairs.items()}

        after_s, states_s = few.told(self.after_s, last.after_s), few.told(self.states_s, last.states_s)
        return Work(told(self.first, last.first), told(self.later, last.later), after_s, states_s)


class Steps(NamedTuple):
    """Seconds that no step is below."""

    passes_s: float
    """Without kernels on weights and states."""
    all_s: float


def least_steps(setup: Setup) -> Steps:
    """Return what no step of a pipeline is below. Raises InputError where it cannot be built."""
    found = setup.resolved()
    each = round_of(found)
    few = of_layers(setup if each is None else at_most(setup, -(-TURNS // each) * each), PLAYED)
    *before, last = [_works(one.resolved()) for one in few.setups]
    pairs = zip(before[0], last, strict=True) if before else ()
    works = [one.with_more(other, few) for one, other in pairs] if before else last
    return walked(stages_of(found), works)


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

    def reads(self, buffer: int) -> bool:
        """Return whether it reads a buffer of the program."""
        return any(self.numbers[view.buffer] == buffer for view in self.op.reads)

    def writes(self, buffer: int) -> bool:
        """Return whether it writes one."""
        return any(self.numbers[view.buffer] == buffer for view in self.op.writes)


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
    items = stages.items(stage)
    passes = [_pass(*parts) for parts in _cut(ran, items, stages, stage)]
    by_key = defaultdict[Key, list[Pass]](list)
    for item, one in zip(items[:-1], passes, strict=False):
        by_key[item.kind, item.chunk].append(one)
    last, *_ = items[-1:]
    by_key.setdefault((last.kind, last.chunk), [passes[-1]])
    first = {key: found[0] for key, found in by_key.items()}
    later = {key: Pass(*map(min, zip(*(found[1:] or found), strict=True))) for key, found in by_key.items()}
    usual = (later if len(by_key[last.kind, last.chunk]) > 1 else first)[last.kind, last.chunk]
    return Work(first, later, max(0.0, passes[-1].all_s - usual.all_s), states_s)


def _cut(ran: list[_Ran], items: list[Item], stages: Stages, stage: int) -> Iterator[tuple[list[_Ran], bool, bool]]:
    """Yield the ops of each pass, and whether it begins with a receipt and ends with what is sent. A pass that nothing
    separates from the one before it has none: they are all of that one.
    """
    links = iter([at for at, one in enumerate(ran) if isinstance(one.op, Exchange) and one.op.communicator in LINKS])
    begins, cursor, ends = list[int](), 0, False
    given = [_hands(item, stages, stage) for item in items]
    for number, (item, (receives, sends)) in enumerate(zip(items, given, strict=True)):
        if receives:
            cursor = next(links)
        elif number and not ends:
            part = "forward" if item.kind == "F" else "backward"
            same = part == ("forward" if items[number - 1].kind == "F" else "backward")
            others = (at for at in range(cursor, len(ran)) if ran[at].op.part == part)
            cursor = -1 if same else next(others, len(ran))
        begins.append(cursor)
        cursor = next(links) + 1 if sends else max(cursor, *begins)
        ends = sends
    begins.append(len(ran))
    for number, (receives, sends) in enumerate(given):
        begin = begins[number]
        end = next(one for one in begins[number + 1 :] if one >= 0)
        yield (ran[begin:end] if begin >= 0 else []), receives, sends


def _hands(item: Item, stages: Stages, stage: int) -> tuple[bool, bool]:
    """Return whether another stage hands a pass what it needs, and whether it hands that on to another one."""
    if item.kind == "W":
        return False, False
    sides = (item.chunk - 1, item.chunk + 1)
    before, behind = (0 <= side < len(stages.split) and stages.stage_of(side) != stage for side in sides)
    return (before, behind) if item.kind == "F" else (behind, before)


def _pass(ops: list[_Ran], receives: bool, sends: bool) -> Pass:
    """Return the seconds of a pass."""
    first, last = 0, len(ops)
    if receives:
        (got,) = {ops[0].numbers[view.buffer] for view in ops[0].op.writes}
        first = next((at for at, one in enumerate(ops) if one.seconds and one.reads(got)), last)
    if sends:
        at = max(at for at, one in enumerate(ops) if isinstance(one.op, Exchange) and one.op.communicator in LINKS)
        (gone,) = {ops[at].numbers[view.buffer] for view in ops[at].op.reads}
        last = next((to for to in range(at, first, -1) if ops[to - 1].seconds and ops[to - 1].writes(gone)), first)
    taken = [one.seconds for one in ops]
    return Pass(sum(taken[:first]), sum(taken[first:last]), sum(taken[last:]))


def walked(stages: Stages, works: Sequence[Work]) -> Steps:
    """Return what a walk through the timetables of all stages takes, by the work of each.

    Two stages whose passes take a second each have four micro-batches in ten (arXiv:1811.06965):

    >>> from sim.words.mesh import Mesh
    >>> from sim.words.options import LayerOptions
    >>> from sim.words.workload import Workload, load_model
    >>> options = LayerOptions(micro_batches=4)
    >>> model = Workload(model=load_model("tiny"), seq=64, batch=4, scope="step", layers=2)
    >>> passes = {(kind, chunk): Pass(0.0, 1.0, 0.0) for kind in ("F", "BW") for chunk in (0, 1)}
    >>> walked(Stages(Mesh(pp=2), model, options), [Work(passes, passes, 0.0, 0.5)] * 2)
    Steps(passes_s=10.0, all_s=10.5)
    """
    arrived = dict[tuple[bool, int, int], float]()
    waiting = [list(reversed(stages.items(stage))) for stage in range(len(works))]
    free_s, seen = [0.0] * len(works), [set[Key]() for _ in works]
    last, moved = len(stages.split) - 1, True
    while moved:
        moved = False
        for stage, (items, work) in enumerate(zip(waiting, works, strict=True)):
            while items:
                kind, micro, chunk = items[-1]
                ahead = kind == "F"
                given = kind == "W" or chunk == (0 if ahead else last)
                if not given and (ahead, micro, chunk) not in arrived:
                    break
                items.pop()
                key = (kind, chunk)
                took = (work.later if key in seen[stage] else work.first)[key]
                seen[stage].add(key)
                made_s = max(free_s[stage] + took.before_s, arrived.get((ahead, micro, chunk), 0.0)) + took.through_s
                if kind != "W":
                    arrived[ahead, micro, chunk + (1 if ahead else -1)] = made_s
                free_s[stage], moved = made_s + took.behind_s, True
    ends = [(taken_s + work.after_s, work.states_s) for taken_s, work in zip(free_s, works, strict=True)]
    return Steps(max(passes_s for passes_s, _ in ends), max(map(sum, ends)))
