"""The proof of many ranks abreast: each begins an op at a time, and ops of one form are played as one.

    ranks whose next op can begin ── what each is given, and makes ──> values that are yet to be found
    values as far from inputs ── those of one form, given contents of one outline ──> its rule, once, on many numbers

Ranks of a ring do the same with tokens of their own, but each by itself: under a causal mask no two do as many ops. So
ops are put together by what they are and what they are given, with numbers that are those of all (``many``). What an
op makes depends on nothing but what it is given when it begins, so it is found later: all blocks that a ring attends
to are as far from its inputs, whenever their keys come by. The rules are those of the proof rank by rank, and so is
what begins when. It proves or declines: what is wrong with a schedule the proof rank by rank says.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

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
from sim.schedule.proof.many import Ints
from sim.schedule.proof.op_columns import MessageKind, messages_of, op_columns
from sim.schedule.proof.outlines import NOTHING
from sim.schedule.proof.owners import check_owners
from sim.schedule.proof.values import Rule, Values

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

    rule: Rule
    places: Ints
    """Of each of its buffers the place of its first view among those of an op."""


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
        self._values = Values()
        self._moves = [self._moved(kind) for kind in self._messages.kinds]
        self._held = np.full(int(self._columns.first_buffer[-1]), NOTHING, np.int64)
        """The value of each buffer."""
        for first, program in zip(self._columns.first_buffer.tolist(), self._ranks, strict=False):
            for number in {port.view.buffer for port in program.inputs}:
                self._held[first + number] = self._values.known(self._given(program, number))

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
        rule = Rule(AbstractMemory(program, self._rules), partial(self._run, op=op), sorted(written), np.array(lost))
        return _Played(rule, np.array(form.places))

    def _moved(self, kind: MessageKind) -> Rule:
        """Return what puts what is sent of a buffer in place of what another holds where it is received."""
        memory = AbstractMemory(Program(rank=0, buffers=[kind.source, kind.target], ops=[]), self._rules)
        sent, received = View(0, kind.sent), View(1, kind.received)
        return Rule(memory, lambda own: own.copy(received, own, sent), [1], np.zeros(2, bool))

    def _given(self, program: Program, number: int) -> Held:
        """Return what a buffer of a rank holds at first."""
        ports = [port.rebound({number: 0}) for port in program.inputs if port.view.buffer == number]
        own = Program(rank=program.rank, buffers=[program.buffers[number]], ops=[], inputs=ports)
        return AbstractMemory(own, self._rules).held()[0]

    def run(self) -> None:
        """Play to the end, then look at the outputs of every rank."""
        self.play()
        self._values.find()
        for program in self._ranks:
            for port in program.outputs:
                own = Program(rank=program.rank, buffers=[program.buffers[port.view.buffer]], ops=[])
                memory = AbstractMemory(own, self._rules)
                memory.hold(0, self.held(program.rank, port.view.buffer))
                check_output(port, program, memory.read(View(0, port.view.slices)), self._rules)
        check_owners(self._schedule)

    def held(self, rank: int, number: int) -> Held:
        """Return what a buffer of a rank holds."""
        return self._values.held(int(self._held[int(self._columns.first_buffer[rank]) + number]))

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
        """Ask for what the kernels among some ops make, one at most of each rank."""
        forms = self._columns.form[numbers]
        for form in np.unique(forms).tolist():
            played = self._forms[form]
            if played is not None:
                views = self._columns.views[numbers[forms == form]]
                buffers = self._columns.buffers[views[:, None] + played.places]
                self._held[buffers[:, played.rule.written]] = self._values.asked(played.rule, self._held[buffers])

    def _transfers(self, numbers: Ints) -> None:
        """Carry out transfers, all first messages before all second ones."""
        messages = self._messages
        for place in range(int(messages.counts[numbers].max())):
            some = messages.first[numbers[messages.counts[numbers] > place]] + place
            if len(np.unique(messages.into[some])) < len(some):
                raise Unclassed
            for kind in np.unique(messages.kind[some]).tolist():
                of_kind = some[messages.kind[some] == kind]
                source, target = messages.out[of_kind], messages.into[of_kind]
                if messages.kinds[kind].is_whole:
                    self._held[target] = self._held[source]
                    self._values.require_full(self._held[source])
                else:
                    both = np.stack([self._held[source], self._held[target]], axis=1)
                    self._held[target] = self._values.asked(self._moves[kind], both)[:, 0]
