"""The proof of many ranks abreast: each begins an op at a time, and ops of one form are played as one.

    ranks whose next op can begin ── those of one form, on contents of one outline ──> its rule, once, on many numbers

Ranks of a ring do the same with tokens of their own, but each by itself: under a causal mask no two do as many ops. So
ops are put together as they come, by what they are and what they are given, with numbers that are those of all
(``many``). The rules are those of the proof rank by rank, and so is what begins when. It proves or declines: what is
wrong with a schedule the proof rank by rank says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.base.errors import ScheduleError
from sim.schedule.derive.dependencies import Dependencies
from sim.schedule.derive.matching import Matching, Transfers
from sim.schedule.ir import ops
from sim.schedule.ir.forms import Form
from sim.schedule.ir.masks import Band
from sim.schedule.ir.program import Program, Schedule, alone
from sim.schedule.ir.views import View
from sim.schedule.proof.abstract import AbstractPlayer, check_output
from sim.schedule.proof.abstract_memory import AbstractMemory, Held
from sim.schedule.proof.contents import Unclassed
from sim.schedule.proof.many import Apart, Ints
from sim.schedule.proof.op_columns import MessageKind, messages_of, op_columns
from sim.schedule.proof.outlines import NOTHING, Contents
from sim.schedule.proof.owners import check_owners

FEW = 32
"""Ranks for which it is not worth its while."""
_KERNELS = (ops.Attend, ops.AttendBackward, ops.Delta, ops.Merge, ops.Copy, ops.Accumulate, ops.Zero, ops.Hold)
"""What is played abreast: rules that look at tokens by comparing them alone."""


def is_proved_abreast(schedule: Schedule, matching: Matching, dependencies: list[Dependencies]) -> bool:
    """Return whether a schedule is of many ranks that attend to each other's tokens, and is proved by playing them
    abreast.
    """
    if schedule.num_ranks < FEW:
        return False
    try:
        AbreastPlayer(schedule, matching, dependencies).run()
    except (Unclassed, ScheduleError, OverflowError):
        return False
    return True


class _Played(NamedTuple):
    """A form, ready to be played on contents of many ranks."""

    op: ops.Kernel
    memory: AbstractMemory
    places: Ints
    """Of each of its buffers the place of its first view among those of an op."""
    lost: NDArray[np.bool_]
    """Whether a buffer is written to as a whole before it is used: what it held does not matter."""
    written: list[int]
    """The buffers that it writes to."""


class AbreastPlayer(AbstractPlayer):
    """Plays a schedule's ranks abreast. Raises Unclassed, or what a rule refuses, where that proves nothing."""

    def __init__(self, schedule: Schedule, matching: Matching, dependencies: list[Dependencies]) -> None:
        super().__init__(schedule, Matching([], []), [], [Program.of_calls(0, [])])
        transfers = matching.transfers
        if matching.groups or not isinstance(self._rules.mask, Band) or self._rules.kinds or self._rules.sequences:
            raise Unclassed
        if not isinstance(transfers, Transfers):
            raise Unclassed
        self._ranks = schedule.programs
        self._columns = op_columns(self._ranks, dependencies)
        self._forms = [self._played(form) for form in self._columns.forms]
        self._messages = messages_of(transfers, self._columns)
        self._contents = Contents()
        count = int(self._columns.first_buffer[-1])
        self._outline, self._row = np.full(count, NOTHING, np.int64), np.zeros(count, np.int64)
        for first, program in zip(self._columns.first_buffer.tolist(), self._ranks, strict=False):
            for number in {port.view.buffer for port in program.inputs}:
                at = slice(first + number, first + number + 1)
                self._outline[at], self._row[at] = self._contents.put(self._given(program, number), 1)

    def _played(self, form: Form) -> _Played | None:
        """Return a form to be played; None where it does nothing to contents. Raises Unclassed for what is not played
        abreast.
        """
        op, program = form.op, alone(form)
        if isinstance(op, ops.Exchange | ops.HostSync):
            return None
        if not isinstance(op, _KERNELS):
            raise Unclassed
        read, written = {view.buffer for view in op.reads}, {view.buffer for view in op.writes}
        whole = {view.buffer for view in op.writes if view.shape == program.buffers[view.buffer].shape}
        lost = [number in whole - read for number in range(len(form.buffers))]
        return _Played(op, AbstractMemory(program, self._rules), np.array(form.places), np.array(lost), sorted(written))

    def _given(self, program: Program, number: int) -> Held:
        """Return what a buffer of a rank holds at first."""
        ports = [port.rebound({number: 0}) for port in program.inputs if port.view.buffer == number]
        own = Program(rank=program.rank, buffers=[program.buffers[number]], ops=[], inputs=ports)
        return AbstractMemory(own, self._rules).held()[0]

    def run(self) -> None:
        """Play to the end, then look at the outputs of every rank."""
        self.play()
        for program in self._ranks:
            for port in program.outputs:
                own = Program(rank=program.rank, buffers=[program.buffers[port.view.buffer]], ops=[])
                memory = AbstractMemory(own, self._rules)
                memory.hold(0, self.held(program.rank, port.view.buffer))
                check_output(port, program, memory.read(View(0, port.view.slices)), self._rules)
        check_owners(self._schedule)

    def held(self, rank: int, number: int) -> Held:
        """Return what a buffer of a rank holds."""
        at = int(self._columns.first_buffer[rank]) + number
        return self._contents.taken(int(self._outline[at]), self._row[at : at + 1])

    def play(self) -> None:
        """Play to the end; raises Unclassed where ranks stand still."""
        columns, messages = self._columns, self._messages
        following, ends = columns.first[:-1].copy(), columns.first[1:]
        begun, under_way = np.zeros(columns.first[-1], bool), np.zeros(columns.first[-1], bool)
        busy, missing = np.zeros(int(columns.stream.max(initial=0)) + 1, bool), messages.of_op.counts
        passed = np.zeros(len(self._ranks), np.int64)
        while True:
            ready = following[following < ends]
            ready = ready[~busy[columns.stream[ready]]]
            ready = ready[~columns.waits.any_of(under_way, ready)]
            if not len(ready):
                break
            hops = passed[columns.rank[ready]]
            ready = ready[hops == hops.min()]  # ranks that are ahead wait for others, to be with them later
            begun[ready] = True
            following[columns.rank[ready]] += 1
            self._kernels(ready)
            sending = ready[missing[ready] > 0]
            if not len(sending):
                continue
            passed[columns.rank[sending]] += 1
            under_way[sending] = busy[columns.stream[sending]] = True
            met = np.unique(messages.of_op.of(sending)[0])
            met = met[begun[messages.source[met]] & begun[messages.target[met]]]
            if not len(met):
                continue
            self._transfers(met)
            sides = np.concatenate([messages.source[met], messages.target[met]])
            np.subtract.at(missing, sides, 1)
            ended = sides[missing[sides] == 0]
            under_way[ended] = busy[columns.stream[ended]] = False
        if not begun.all() or under_way.any():
            raise Unclassed

    def _kernels(self, numbers: Ints) -> None:
        """Play the kernels among some ops, one at most of each rank."""
        forms = self._columns.form[numbers]
        for form in np.unique(forms).tolist():
            played = self._forms[form]
            if played is not None:
                views = self._columns.views[numbers[forms == form]]
                self._run_alike(played, self._columns.buffers[views[:, None] + played.places])

    def _run_alike(self, played: _Played, buffers: Ints) -> None:
        """Play ops of one form, whose buffers are given, once for each outline of what these hold."""
        outlines = np.where(played.lost, NOTHING, self._outline[buffers])
        for alike, some in _alike(outlines, buffers):
            self._run_on(played, alike, some)

    def _run_on(self, played: _Played, outlines: list[int], buffers: Ints) -> None:
        """Play ops of one form on buffers that hold contents of these outlines; in parts where ranks differ."""
        left, memory = [buffers], played.memory
        while left:
            some = left.pop()
            for number, (outline, rows) in enumerate(zip(outlines, self._row[some].T, strict=True)):
                memory.hold(number, self._contents.taken(outline, rows))
            try:
                self._run(memory, played.op)
            except Apart as apart:
                left += [some[apart.where], some[~apart.where]]
                continue
            held = memory.held()
            for number in played.written:
                self._put(some[:, number], held[number])

    def _put(self, buffers: Ints, held: Held) -> None:
        self._outline[buffers], self._row[buffers] = self._contents.put(held, len(buffers))

    def _transfers(self, numbers: Ints) -> None:
        """Carry out transfers, all first messages before all second ones."""
        messages = self._messages
        for place in range(int(messages.counts[numbers].max())):
            some = messages.first[numbers[messages.counts[numbers] > place]] + place
            if len(np.unique(messages.into[some])) < len(some):
                raise Unclassed
            for kind in np.unique(messages.kind[some]).tolist():
                of_kind = some[messages.kind[some] == kind]
                self._move(messages.kinds[kind], messages.out[of_kind], messages.into[of_kind])

    def _move(self, kind: MessageKind, source: Ints, target: Ints) -> None:
        """Put what is sent of some buffers in place of what others hold where it is received."""
        if kind.is_whole and self._contents.is_full(self._outline[source]):
            self._outline[target], self._row[target] = self._outline[source], self._row[source]
            return
        buffers = np.stack([source, target], axis=1)
        for outlines, some in _alike(self._outline[buffers], buffers):
            memory = AbstractMemory(Program(rank=0, buffers=[kind.source, kind.target], ops=[]), self._rules)
            for number, (outline, rows) in enumerate(zip(outlines, self._row[some].T, strict=True)):
                memory.hold(number, self._contents.taken(outline, rows))
            memory.copy(View(1, kind.received), memory, View(0, kind.sent))
            self._put(some[:, 1], memory.held()[1])


def _alike(outlines: Ints, buffers: Ints) -> Iterator[tuple[list[int], Ints]]:
    """Yield the rows that there are of outlines, each with those of buffers where it is."""
    left = np.arange(len(outlines))
    while len(left):
        first = outlines[left[0]]
        same = (outlines[left] == first).all(axis=1)
        yield first.tolist(), buffers[left[same]]
        left = left[~same]
