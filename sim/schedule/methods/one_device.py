"""All ranks of a schedule on one device: a schedule of one rank that does in turn what they do, transfers as copies.

Where there is one GPU, this is how every schedule can be executed on it: with the kernels of all ranks, the memory of
all ranks, and what they send each other as traffic of its own memory. Both players play it like any other schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import msgspec

from sim.schedule.derive.interpreter import Interpreter
from sim.schedule.derive.matching import Key, Transfer
from sim.schedule.ir import ops
from sim.schedule.ir.declare import rebound
from sim.schedule.ir.fragments import Port
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.ir.views import Buffer, Split, View, part_of
from sim.schedule.proof.check import Checked
from sim.words.mesh import Mesh


def on_one_device(checked: Checked) -> Schedule:
    """Return the schedule of one rank that does what all ranks do, in an order that their dependencies allow."""
    schedule = checked.schedule
    played = _Recorder(checked).record()
    given, asked = _ports(schedule, "inputs"), _ports(schedule, "outputs")
    program = Program(rank=0, buffers=_buffers(schedule), ops=played, inputs=given, outputs=asked)
    claims, workload = schedule.header.claims, schedule.header.workload
    header = msgspec.structs.replace(
        schedule.header,
        name=f"{schedule.header.name}, {schedule.num_ranks} ranks on one device",
        workload=msgspec.structs.replace(workload, batch=workload.batch * schedule.header.mesh.dp),
        mesh=Mesh(),
        communicators=(),
        claims=claims and msgspec.structs.replace(claims, wire_bytes=0),
        shares=schedule.header.members if schedule.header.members > 1 else msgspec.UNSET,
    )
    return Schedule(header, [program].__getitem__)


def _buffers(schedule: Schedule) -> tuple[Buffer, ...]:
    return tuple(
        msgspec.structs.replace(buffer, name=f"{buffer.name} of rank {program.rank}")
        for program in schedule.programs
        for buffer in program.buffers
    )


def _ports(schedule: Schedule, which: str) -> tuple[Port, ...]:
    numbers = _numbers(schedule)
    return tuple(
        port.rebound(numbers[program.rank]) for program in schedule.programs for port in getattr(program, which)
    )


def _numbers(schedule: Schedule) -> list[Sequence[int]]:
    """Return per rank the numbers that its buffers have among those of all."""
    counts = [len(program.buffers) for program in schedule.programs]
    starts = [0, *accumulate(counts)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=False)]


class _Recorder(Interpreter):
    """Writes down what happens, on the buffers of all ranks."""

    def __init__(self, checked: Checked) -> None:
        super().__init__(checked.schedule, checked.matching, checked.dependencies)
        self._numbers = _numbers(checked.schedule)
        self._ops: list[ops.Op] = []

    def record(self) -> tuple[ops.Op, ...]:
        """Return the ops of all ranks, in the order in which they happen."""
        self.play()
        return tuple(self._ops)

    def kernel(self, key: Key, op: ops.Kernel | ops.HostAdamW) -> None:
        """See Interpreter."""
        self._own(key, op)

    def host_copy(self, key: Key, op: ops.HostCopy) -> None:
        """See Interpreter."""
        self._own(key, op)

    def host_sync(self, key: Key, op: ops.HostSync) -> None:
        """See Interpreter; communicators are gone, kernels and copies to the host and back are not."""
        streams = tuple(stream for stream in op.streams if stream in ops.STREAMS)
        if streams:
            self._own(key, msgspec.structs.replace(op, streams=streams))

    def _own(self, key: Key, op: ops.Kernel | ops.HostAdamW | ops.HostCopy | ops.HostSync) -> None:
        """Write down what concerns one rank alone."""
        own = rebound(op, self._numbers[key[0]])
        self._ops.append(msgspec.structs.replace(own, label=f"{key[0]}: {op.label}"))

    def transfer(self, transfer: Transfer) -> None:
        """See Interpreter."""
        (source, index), (target, _) = transfer.source, transfer.target
        op = self._programs[source].ops[index]
        for sent, received in transfer.pairs:
            self._copy(self._moved(source, sent), self._moved(target, received), op.part, f"{source} to {target}")

    def collective(self, members: tuple[Key, ...], calls: list[ops.Collective]) -> None:
        """See Interpreter. A sum in place is made on the first member, the others get copies of it."""
        ranks = [rank for rank, _ in members]
        for place, (rank, op) in enumerate(zip(ranks, calls, strict=True)):
            parts = [
                self._moved(sender, part_of(of_sender.given, place))
                for sender, of_sender in zip(ranks, calls, strict=True)
                if of_sender.given
            ]
            label = f"all to {rank}"
            if isinstance(op.taken, Split):
                for number, source in enumerate(parts):
                    self._copy(source, self._moved(rank, op.taken.part(number)), op.part, label)
            elif isinstance(op, ops.AllReduce):
                if place == 0:
                    self._add(parts[1:], parts[0], op.part, label, op.largest)
                else:
                    self._copy(parts[0], parts[place], op.part, label)
            elif op.taken is not None:
                self._copy(parts[0], self._moved(rank, op.taken), op.part, label)
                self._add(parts[1:], self._moved(rank, op.taken), op.part, label)

    def _moved(self, rank: int, view: View) -> View:
        return View(self._numbers[rank][view.buffer], view.slices)

    def _copy(self, source: View, target: View, part: ops.Part, label: str) -> None:
        whole = (Split(source, 0, 1), Split(target, 0, 1))
        self._ops.append(ops.Copy(part=part, label=label, source=whole[0], target=whole[1]))

    def _add(
        self,
        sources: list[View],
        into: View,
        part: ops.Part,
        label: str,
        largest: Literal[True] | msgspec.UnsetType = msgspec.UNSET,
    ) -> None:
        for source in sources:
            self._ops.append(ops.Accumulate(part=part, label=label, source=source, into=into, largest=largest))
