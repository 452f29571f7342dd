"""Plays all ranks in one process: each begins its ops in list order, as soon as what they wait for has ended.

What an op does is the subclass's: the proof-reader plays on abstract contents, ``one_device`` writes down what happens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, assert_never

from sim.base.errors import ScheduleError
from sim.schedule.derive.dependencies import Dependencies
from sim.schedule.derive.matching import Key, Matching, Transfer, describe
from sim.schedule.derive.show import window
from sim.schedule.ir.ops import Collective, Exchange, HostAdamW, HostCopy, HostSync, Kernel, Op
from sim.schedule.ir.program import Program, Schedule


class Interpreter(ABC):
    """One run of a schedule, rank after rank as far as each gets."""

    def __init__(
        self,
        schedule: Schedule,
        matching: Matching,
        dependencies: list[Dependencies],
        programs: list[Program] | None = None,
    ) -> None:
        """Take what to play: the programs of all ranks, or others, numbered from 0, that matching and dependencies are
        of.
        """
        self._schedule = schedule
        self._matching = matching
        self._dependencies = dependencies
        self._programs = programs or schedule.programs
        self._begun = [0] * len(self._programs)
        self._under_way: list[dict[int, str]] = [{} for _ in self._programs]
        """Per rank the ops that have begun and not ended, which are communication, each with its stream."""
        self._missing: dict[Key, int] = {key: len(found) for key, found in matching.transfers_of.items()}
        self._begins: dict[type[Op], Callable[[Key, Any], set[int] | None]] = {}
        """What begins an op of each kind that was met: asking for it again takes longer than most ops do."""

    @abstractmethod
    def kernel(self, key: Key, op: Kernel | HostAdamW) -> None:
        """Carry out a kernel, of the GPU or of its host."""

    @abstractmethod
    def host_copy(self, key: Key, op: HostCopy) -> None:
        """Carry out a copy to the host's memory or back."""

    @abstractmethod
    def host_sync(self, key: Key, op: HostSync) -> None:
        """Let the host of a rank wait."""

    @abstractmethod
    def transfer(self, transfer: Transfer) -> None:
        """Carry out what one Exchange sends to another, both of which have begun."""

    @abstractmethod
    def collective(self, members: tuple[Key, ...], calls: list[Collective]) -> None:
        """Carry out a collective that all members have begun."""

    def play(self) -> None:
        """Play to the end; raises ScheduleError with who waits for whom where ranks stand still."""
        ready = deque(range(len(self._programs)))
        while ready:
            rank = ready.popleft()
            ready.extend(self._advance(rank))
        if any(self._begun[p.rank] < len(p.ops) for p in self._programs):
            stuck = {p.rank: self._begun[p.rank] for p in self._programs if self._begun[p.rank] < len(p.ops)}
            raise ScheduleError(f"deadlock: {self._standstill()}", window(self._programs, stuck))
        for program in self._programs:
            if self._under_way[program.rank]:
                index = min(self._under_way[program.rank])
                where = window(self._programs, {program.rank: index})
                raise ScheduleError(f"deadlock: {describe(self._schedule, (program.rank, index))} never ends", where)

    def _standstill(self) -> str:
        """Return what the first few ranks that stand still wait for."""
        parts = []
        for program in self._programs:
            index = self._begun[program.rank]
            if index == len(program.ops):
                continue
            blockers = self._blockers(program.rank, index)
            waits = " and ".join(describe(self._schedule, (program.rank, i)).split(" ", 2)[2] for i in blockers)
            parts.append(f"{describe(self._schedule, (program.rank, index))} waits for {waits}")
        return "; ".join(parts[:4]) + ("; …" if len(parts) > 4 else "")

    def _blockers(self, rank: int, index: int) -> list[int]:
        """Return what an op waits for that has not ended: ops that it depends on, and its predecessor on the stream."""
        under_way, stream = self._under_way[rank], self._programs[rank].ops[index].stream
        needed = [other for other in self._dependencies[rank].waits[index] if other in under_way]
        return needed + [other for other, on in under_way.items() if on == stream and other not in needed]

    def _advance(self, rank: int) -> set[int]:
        """Begin as many ops of a rank as can begin; return the ranks that may go on because of it."""
        woken: set[int] = set()
        ops, under_way, waits = self._programs[rank].ops, self._under_way[rank], self._dependencies[rank].waits
        for index in range(self._begun[rank], len(ops)):
            op = ops[index]
            if under_way and not (under_way.keys().isdisjoint(waits[index]) and op.stream not in under_way.values()):
                break  # see _blockers
            self._begun[rank] = index + 1
            begin = self._begins.get(type(op)) or self._begins.setdefault(type(op), self._begin(op))
            woken.update(begin((rank, index), op) or ())
        return woken - {rank}

    def _begin(self, op: Op) -> Callable[[Key, Any], set[int] | None]:
        """Return what begins ops of the kind of this one, and may return the ranks that can go on because of it."""
        if isinstance(op, Exchange):
            return self._exchange
        if isinstance(op, Kernel | HostAdamW):
            return self.kernel
        if isinstance(op, HostCopy):
            return self.host_copy
        if isinstance(op, HostSync):
            return self.host_sync
        if isinstance(op, Collective):
            return self._collective
        assert_never(op)

    def _exchange(self, key: Key, exchange: Exchange) -> set[int]:
        """Begin an Exchange; carry out the transfers whose other side has begun too."""
        missing = self._missing
        if missing.get(key):
            self._under_way[key[0]][key[1]] = exchange.stream
        woken = set()
        for number in self._matching.transfers_of.get(key, ()):
            transfer = self._matching.transfers[number]
            source, target, *_ = transfer
            peer, op = target if source == key else source
            if self._begun[peer] <= op:
                continue
            self.transfer(transfer)
            for side in (source, target):
                missing[side] -= 1
                if not missing[side]:
                    del self._under_way[side[0]][side[1]]
                    woken.add(side[0])
        return woken

    def _collective(self, key: Key, collective: Collective) -> set[int]:
        """Begin a collective; carry it out if this is its last member."""
        members = self._matching.groups[self._matching.group_of[key]].members
        if any(self._begun[member] <= op for member, op in members):
            self._under_way[key[0]][key[1]] = collective.stream
            return set()
        ops = []
        for member, at in members:
            op = self._programs[member].ops[at]
            assert isinstance(op, Collective)
            ops.append(op)
        self.collective(members, ops)
        for member, at in members:
            self._under_way[member].pop(at, None)
        return {member for member, _ in members}
