"""What single changes of a training step cost and win: seconds, memory, and the longest context.

Each is played by a few of its layers and walked by one of its ranks, as ``plan`` does it
(``sim.plan.search.branches``), so that all of them together take little longer than one prediction.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from sim.base.cpu_time import CpuTime
from sim.base.errors import LongstepError
from sim.base.garbage import garbage_collection_off
from sim.engine.play.simulate import Simulation
from sim.explain.changes import Change
from sim.plan.longest import lengths_tried
from sim.plan.search.bounds import last_ranks, least_room
from sim.plan.search.few import Few, at_most, of_turns, turns_of
from sim.plan.search.steps import fullest, step_of
from sim.setup.configuration import Configuration
from sim.setup.setup import Setup

MOST = 2**24
"""Tokens up to which the longest context is looked for."""
_SAME = 0.01
"""What saves less, as a share, is no help."""
_LENGTHS = 5
"""Lengths whose memory is walked to find the longest: memory grows with the length nearly as a line, so fewer do."""
_ONLY_MEMORY = ("activations", "offloaded", "mlp", "loss", "optimiser")
"""Options that take time to save memory: where one saves none it is not played."""
_LAYERS = (2, 8)
"""Layers that are played of a step that has more: what the others add is a mean of six, since ranks of a ring drift
apart and back over several. Within 0.2 % (``tests/explain/test_explain.py``); offloading takes one layer to begin.
"""
_TURNS = (1, 2)
"""Micro-batches that are played of a step that has more, but of a pipeline: every further one takes what the last of
these adds."""


@dataclasses.dataclass(frozen=True)
class Weighed:
    """A change, beside the step that it is one of. Times in seconds, sizes in bytes."""

    change: Change
    step_time_s: float | None
    """For as many tokens as the step had; None where it was not played, since it does not fit or helps less."""
    peak_bytes: int
    """Allocated of the GPU that holds most."""
    free_bytes: int
    """What is left of the memory with least to spare; below 0 what is missing."""
    fits: bool | None
    tokens: float
    """Of a step, as a share of those that it had."""
    ranks: Sequence[int] | None = None
    """Those whose memory that is; None: the last one of each stage, or all."""
    longest: int | None = None
    """The longest context that fits, in tokens; None where it was not asked."""
    helps: bool = False
    """Whether it is one of those that help most."""


def turns(setup: Setup) -> int:
    """Return the micro-batches of a step."""
    return turns_of(setup.resolved())


def shortened(setup: Setup) -> Few:
    """Return the steps with few micro-batches by which that of all is told, each as large as before; of a pipeline
    with more than its stages.
    """
    if setup.resolved().mesh.pp > 1:
        return of_turns(setup)
    fewer, few = _TURNS
    has = turns(setup)
    if has <= few or setup.resolved().workload.batch % has:
        return Few([setup])
    return Few([at_most(setup, fewer), at_most(setup, few)], few - fewer, has - few)


@dataclasses.dataclass(frozen=True)
class Scale:
    """The step that changes are weighed beside, as it was predicted."""

    found: Configuration
    step_time_s: float
    peak_bytes: int
    longest: int | None
    """The longest context that fits, near which those of changes are looked for."""
    turn_s: float = 0.0
    """What the second micro-batch adds to one, where there are more than two; 0 of a pipeline."""
    one_s: float = 0.0
    """What a step of one takes, then."""

    def weigh(self, changes: Iterable[Change], shown: int, limit_s: float) -> list[Weighed]:
        """Return what becomes of the step by each change, those that help most first, as many as are ``shown`` with
        their longest context. What cannot be built is left out; after so many seconds of CPU time no more are played.
        """
        time, found = CpuTime(limit_s), list[Weighed]()
        for change in changes:
            if time.left_s() <= 0:
                break
            try:
                found.append(self._walked(change))
            except LongstepError:
                continue
        for number, one in enumerate(found):
            if one.fits is not False and not self._only_memory(one) and time.left_s() > 0:
                found[number] = self._played(one)
        fitting = [one for one in found if one.fits is not False]
        few = shown - min(shown // 2, sum(map(self._saves_time, fitting)))
        lean = sorted(filter(self._saves_memory, fitting), key=lambda one: one.peak_bytes)[:few]
        for number, one in enumerate(found):
            if one in lean and one.step_time_s is None and time.left_s() > 0:
                found[number] = self._played(one)
        helping = self._helping(found)[:shown]
        with_longest = [
            dataclasses.replace(
                one,
                longest=longest_by_few(one.change.setup, one.free_bytes, self.longest, one.ranks),
                helps=True,
            )
            for one in helping
        ]
        return [*with_longest, *(one for one in found if one not in helping)]

    def _walked(self, change: Change, ranks: Sequence[int] | None = None) -> Weighed:
        """Return a change with its memory, by some ranks."""
        room = least_room(shortened(change.setup).setups[-1].resolved(), ranks, reserved=True)
        return Weighed(
            change,
            step_time_s=None,
            peak_bytes=room.limits[0].held_bytes,
            free_bytes=room.free_bytes,
            fits=room.fits,
            tokens=_tokens(change.found) / _tokens(self.found),
            ranks=ranks,
        )

    def _played(self, one: Weighed) -> Weighed:
        """Return a change with its seconds, and with the memory of the ranks that its play says hold most; as it is
        where it cannot be played.
        """
        mesh = one.change.found.mesh
        try:
            step_s, play = self._step(one.change)
            ranks = fullest(play, mesh)
            told = self._walked(one.change, ranks) if ranks not in ([], last_ranks(mesh)) else one
        except LongstepError:
            return one
        return dataclasses.replace(told, step_time_s=step_s / one.tokens)

    @garbage_collection_off()
    def _step(self, change: Change) -> tuple[float, Simulation]:
        """Return the seconds of a step, and a play of it. Of many micro-batches one is played, and two where what comes
        once a step is another; of a pipeline as many as say what all take.
        """
        few = shortened(change.setup)
        if len(few.setups) == 1 or change.found.mesh.pp > 1:
            return step_of(change.setup, _LAYERS)
        first, last = few.setups
        one_s, play = step_of(first, _LAYERS)
        if self.turn_s and _at_the_end(self.found) == _at_the_end(change.found):
            return one_s + (turns(change.setup) - 1) * (one_s - self.one_s + self.turn_s), play
        two_s, play = step_of(last, _LAYERS)
        return few.told(one_s, two_s), play

    def _saves_memory(self, one: Weighed) -> bool:
        return one.peak_bytes < (1 - _SAME) * self.peak_bytes

    def _only_memory(self, one: Weighed) -> bool:
        """Return whether a change can do nothing but save memory."""
        before, after = self.found, one.change.found
        has, gets = (msgspec.to_builtins(found.options or {}) for found in (before, after))
        differ = {name for name in {*has, *gets} if has.get(name) != gets.get(name)}
        is_alike = (before.schedule, before.mesh, before.workload) == (after.schedule, after.mesh, after.workload)
        return is_alike and differ <= {*_ONLY_MEMORY}

    def _saves_time(self, one: Weighed) -> bool:
        return one.step_time_s is not None and one.step_time_s < (1 - _SAME) * self.step_time_s

    def _helping(self, found: Sequence[Weighed]) -> list[Weighed]:
        """Return those that help: of those that fit by turns the one that saves most time and the one that holds least;
        then those that come nearest to it.
        """
        fitting = [one for one in found if one.fits is not False]
        fast = sorted(filter(self._saves_time, fitting), key=lambda one: one.step_time_s or 0.0)
        lean = sorted(filter(self._saves_memory, fitting), key=lambda one: one.peak_bytes)
        by_turns = [one for pair in zip(_filled(fast, lean), _filled(lean, fast), strict=True) for one in pair if one]
        rest = sorted(
            (one for one in found if one.fits is False and self._saves_memory(one)), key=lambda one: one.peak_bytes
        )
        unique = list[Weighed]()
        for one in (*by_turns, *rest):
            if one not in unique and (one.step_time_s is not None or one.fits is False):
                unique.append(one)
        return unique


def _at_the_end(found: Configuration) -> tuple[object, ...]:
    """Return what decides what a step does once, whatever its micro-batches: the optimiser, sums of gradients that are
    not sharded, and which part of the weights a rank has.
    """
    options: Any = found.options
    stage = getattr(options, "zero_stage", 0)
    return getattr(options, "optimiser", None), getattr(options, "shards", None), min(stage, 2), found.mesh.tp


def _filled(some: Sequence[Weighed], other: Sequence[Weighed]) -> list[Weighed | None]:
    return [*some, *[None] * (max(len(some), len(other)) - len(some))]


def _tokens(found: Configuration) -> int:
    return found.mesh.dp * found.workload.num_real_tokens


def longest_by_few(
    setup: Setup, free_bytes: int, near: int | None = None, ranks: Sequence[int] | None = None
) -> int | None:
    """Return the longest context of ``plan.longest.lengths_tried`` whose training step fits, by what is left at its own
    length, at a few others, the first of them ``near`` where that is said, and by the lines between them; 0 where none
    does, None where documents or a mask say how long a sequence is, or padding cannot fill it up. Those ``ranks`` are
    walked, as by ``least_room``.
    """
    if setup.documents is not None or setup.block_mask is not None:
        return None
    few = shortened(setup).setups[-1]
    free = {few.resolved().workload.seq: free_bytes}
    try:
        lengths = lengths_tried(few, MOST)
        tokens = _below(lengths, near) if near else 0
        for _ in range(_LENGTHS):
            if tokens in free or tokens not in lengths:
                tokens = _crossing(free, lengths)
            if tokens in free:
                break
            free[tokens] = least_room(few.replace(seq=tokens, pad=True).resolved(), ranks, reserved=True).free_bytes
            tokens = _crossing(free, lengths)
    except LongstepError:
        return None
    return tokens if free.get(tokens, 0) >= 0 else 0


def _below(lengths: Sequence[int], tokens: float) -> int:
    """Return the largest length up to so many tokens; the least one where there is none."""
    return lengths[max(0, bisect.bisect_right(lengths, tokens) - 1)]


def _crossing(free: Mapping[int, int], lengths: Sequence[int]) -> int:
    """Return the longest length at which a line through what is left at two lengths is not below 0: of those around
    that if there are such, else of the nearest; of one alone twice it, or half.
    """
    enough, missing = ([one for one, left in free.items() if (left >= 0) is fits] for fits in (True, False))
    if len(free) == 1:
        return _below(lengths, 2 * enough[0] if enough else missing[0] / 2)
    first, second = (
        (max(enough), min(missing)) if enough and missing else sorted(free, key=lambda one: abs(free[one]))[:2]
    )
    each = (free[second] - free[first]) / (second - first)
    if each >= 0:
        return lengths[-1] if enough else lengths[0]
    return _below(lengths, first - free[first] / each)
