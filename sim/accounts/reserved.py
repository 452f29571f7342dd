"""What torch's caching allocator reserves for a step: its tensors and workspaces in the order of issue, step by step.

    standing ──> step: take, give back, ... ──> moments, as the optimiser first updates ──> step: take, give back, ...

Weights, what gradients add up in, and what is held before anything is written there, as buffers of tensor-parallel
ranks, are there before the first step. Moments are not: torch.optim makes those of each weight when it first updates
it, in what the passes have left free. So the second step finds other blocks than the first, and its peak is what logs
have (torch.cuda.max_memory_reserved, beside max_memory_allocated). Further steps added nothing in what was tried.

A tensor that another stream has used is freed like all others where the stream of kernels waited for that (see
``memory``). Torch lets it be used anew only when an event of that stream has passed (``record_stream``), which it looks
for at each allocation. When that is depends on how far the host runs ahead: at once if it does not, at the earliest
where it waits if it is always ahead. Both are walked. Since torch 2.7, from memory, collectives keep a reference in its
place, and then the former is right.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec
import numpy as np

from sim.accounts.allocator import Block, CachingAllocator, OutOfMemoryError
from sim.accounts.memory import CATEGORIES, Held, alike
from sim.base.kept import kept
from sim.schedule.derive.dependencies import Dependencies
from sim.schedule.ir.fragments import Fragment
from sim.schedule.ir.ops import COMPUTE, HOST, AdamW, HostSync, Pack, Zero
from sim.schedule.ir.program import Program
from sim.schedule.proof.check import Checked
from sim.words.options import AllocatorName

STEPS = 2
_STATES = {"parameter", "gradient", "optimiser"}
_GIVE, _PASS, _MAKE, _TAKE, _WORK = range(5)
"""What happens at an op, in this order: tensors are given back, events have passed where the host waits, in the first
step moments are made, tensors are taken, and workspace is taken and given back."""


class Reserved(msgspec.Struct, frozen=True):
    """What is reserved, where events of other streams pass at once, and where they pass when the host waits."""

    least_bytes: int
    most_bytes: int


class _Marks(NamedTuple):
    """What matters of the ops of a fragment beside what the walk of memory knows."""

    waits: list[int]
    """Ops at which the host waits."""
    zeroed: list[int]
    """Buffers that begin as zeros."""
    packed: list[tuple[int, list[int]]]
    """Buffers that gradients are added up in, with the elements of each."""
    updated: list[tuple[int, tuple[int, int]]]
    """By buffers of gradients those of both moments."""


@kept
def _marks_of(fragment: Fragment) -> _Marks:
    waits: list[int] = []
    zeroed: list[int] = []
    packed: list[tuple[int, list[int]]] = []
    updated: list[tuple[int, tuple[int, int]]] = []
    for number, op in enumerate(fragment.ops):
        if isinstance(op, HostSync):
            waits.append(number)
        elif isinstance(op, Zero):
            zeroed.append(op.into.buffer)
        elif isinstance(op, Pack):
            packed.append((op.flat.buffer, [math.prod(view.shape) for view in op.gradients]))
        elif isinstance(op, AdamW):
            updated.append((op.gradient.buffer, (op.first.buffer, op.second.buffer)))
    return _Marks(waits, zeroed, packed, updated)


def _marks(program: Program) -> _Marks:
    found, first = _Marks([], [], [], []), 0
    for call in program.calls:
        own, numbers = _marks_of(call.fragment.shared), call.numbers
        found.waits.extend(first + number for number in own.waits)
        found.zeroed.extend(numbers[buffer] for buffer in own.zeroed)
        found.packed.extend((numbers[buffer], sizes) for buffer, sizes in own.packed)
        found.updated.extend((numbers[buffer], (numbers[one], numbers[two])) for buffer, (one, two) in own.updated)
        first += len(call.fragment.ops)
    return found


class Allocations:
    """What the steps of one rank take and give back."""

    def __init__(self, program: Program, dependencies: Dependencies) -> None:
        held, marks = Held(program, dependencies), _marks(program)
        columns, count, buffers = held.columns, len(held.workspace), len(held.nbytes)
        ops, touched = np.repeat(np.arange(count), columns.counts), columns.touched
        first, end = held.first.copy(), held.end.copy()
        given, left, zeroed = (np.zeros(buffers, bool) for _ in range(3))
        given[columns.inputs] = left[columns.outputs] = zeroed[marks.zeroed] = True
        moments = [moment for _, both in marks.updated for moment in both]
        states = np.array([category in _STATES for category in CATEGORIES], bool)[columns.category]
        begins, ends = np.full(buffers, count), np.zeros(buffers, np.int64)
        np.minimum.at(begins, touched, ops)
        np.maximum.at(ends, touched, ops + 1)
        held_first = np.append(columns.holds, False)[begins]
        stands = held.on_gpu & ((given & states) | (zeroed & (end == count)) | held_first)
        first[given], end[given & ~left] = begins[given], ends[given & ~left]
        elsewhere = columns.is_on(lambda name: name not in {COMPUTE, HOST})[ops]
        self._told = np.zeros(buffers, bool)
        self._told[touched[elsewhere]] = True
        self.nbytes = [int(nbytes) for nbytes in held.nbytes]
        made = [moment for moment in moments if stands[moment]]
        stands[made] = False
        self._standing = np.flatnonzero(stands).tolist()
        self._split = _split(marks, self.nbytes)
        taken = np.flatnonzero(held.on_gpu & held.alive & ~stands & (first < end))
        taken = taken[~np.isin(taken, made)]
        works = np.flatnonzero(held.workspace)
        self._works = [int(nbytes) for nbytes in held.workspace[works]]
        parts = [
            (end[taken], _GIVE, taken),
            (np.array(marks.waits, np.int64), _PASS, np.zeros(len(marks.waits), np.int64)),
            (begins[made], _MAKE, np.array(made, np.int64)),
            (first[taken], _TAKE, taken),
            (works, _WORK, np.arange(len(works))),
        ]
        at, kinds, numbers = (
            np.concatenate([one for one, _, _ in parts]),
            np.concatenate([np.full(len(one), kind) for one, kind, _ in parts]),
            np.concatenate([of for _, _, of in parts]),
        )
        order = np.lexsort((numbers, kinds, at))
        self._events = list(zip(kinds[order].tolist(), numbers[order].tolist(), strict=True))

    def peak(self, name: AllocatorName, *, ahead: bool, limit: int | None = None, steps: int = STEPS) -> int | None:
        """Return the most bytes that are reserved in the last of some steps, on a GPU that has ``limit`` for them; None
        where that is too little. ``ahead``: events of other streams pass only when the host waits for the GPU.
        """
        allocator, told = CachingAllocator(name, limit), self._told.tolist()
        take, give, nbytes = allocator.take, allocator.give, self.nbytes
        blocks: dict[int, Block] = {}
        try:
            for buffer in self._standing:
                take(nbytes[buffer])
            for step in range(steps):
                allocator.reset_peak()
                for kind, number in self._events:
                    if kind == _TAKE:
                        blocks[number] = take(nbytes[number])
                    elif kind == _GIVE:
                        give(blocks.pop(number), waits=ahead and told[number])
                    elif kind == _WORK:
                        give(take(self._works[number]))
                    elif kind == _PASS:
                        allocator.pass_events()
                    elif step == 0:
                        for part in self._split.get(number, [nbytes[number]]):
                            take(part)
                allocator.pass_events()
        except OutOfMemoryError:
            return None
        return allocator.peak


def _split(marks: _Marks, nbytes: list[int]) -> dict[int, list[int]]:
    """Return of which sizes moments are, each a part of that of a weight, where their gradients are packed at once."""
    sizes = dict(marks.packed)
    found: dict[int, list[int]] = {}
    for gradient, both in marks.updated:
        if gradient in sizes:
            whole = sum(sizes[gradient])
            found |= {moment: [nbytes[moment] * size // whole for size in sizes[gradient]] for moment in both}
    return found


@kept
def allocations(checked: Checked) -> dict[int, Allocations]:
    """Return a place for what ranks take and give back, which is filled as they are asked for."""
    del checked
    return {}


def allocations_of(checked: Checked, rank: int) -> Allocations:
    """Return what the steps of a rank take and give back; kept with the schedule."""
    known, first = allocations(checked), alike(checked)[rank]
    if first not in known:
        known[first] = Allocations(checked.schedule.programs[first], checked.dependencies[first])
    return known[first]
