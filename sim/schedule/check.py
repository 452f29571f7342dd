"""The proof-reader: plays a schedule on abstract contents and proves that it computes attention, before anything runs.

It proves that ops of different ranks match and cannot deadlock, that nothing is read before it is written, that every
unmasked (query, key) pair of every head is attended exactly once in each pass, that every gradient arrives once at its
owner, and that FLOPs and bytes equal what the builder claims. Races are excluded by construction: dependencies are
derived from the same views that are played here.
"""

from __future__ import annotations

from sim.errors import ScheduleError
from sim.schedule.abstract import AbstractPlayer
from sim.schedule.dependencies import Dependencies, derive
from sim.schedule.ir import Program, Schedule
from sim.schedule.kernels import ATTENTION_KERNELS, KernelUse, kernel_uses
from sim.schedule.matching import Matching, match, wire_bytes
from sim.schedule.ops import (
    AllGather,
    AllToAll,
    Collective,
    Exchange,
    ReduceScatter,
    Split,
    View,
    is_contiguous,
    parts_are_contiguous,
)


class Checked:
    """A schedule that ``check`` has proved, with what it derived on the way; both players start from it."""

    def __init__(
        self,
        schedule: Schedule,
        matching: Matching,
        dependencies: list[Dependencies],
        kernels: list[list[KernelUse | None]],
    ) -> None:
        self.schedule = schedule
        self.matching = matching
        self.dependencies = dependencies
        self.kernels = kernels
        """Per rank and op the kernel that it runs, None for communication and synchronisation."""


def check(schedule: Schedule) -> Checked:
    """Return the schedule with its matching and dependencies; raises ScheduleError that names the op at fault."""
    matching = match(schedule)
    dependencies = [derive(program) for program in schedule.programs]
    for program in schedule.programs:
        _check_program(program)
    kernels = [kernel_uses(program) for program in schedule.programs]
    AbstractPlayer(schedule, matching, dependencies).run()
    _check_claims(schedule, matching, kernels)
    return Checked(schedule, matching, dependencies, kernels)


def _check_program(program: Program) -> None:
    """Raise where an op writes to an input, which belongs to the caller; where ops of one communicator are not issued
    in one order; or where a message does not lie in one piece.
    """
    inputs = {port.view.buffer: port.tensor for port in program.inputs}
    streams: dict[str, str] = {}
    contiguous: set[View] = set()
    for index, op in enumerate(program.ops):
        problem = ""
        for view in op.writes:
            if view.buffer in inputs:
                problem = f"writes to the input {inputs[view.buffer]!r}; copy it first"
        if isinstance(op, Exchange | Collective):
            if streams.setdefault(op.communicator, op.stream) != op.stream:
                problem = f"uses communicator {op.communicator!r} on a second stream; use one stream for each"
            for view in (*op.reads, *op.writes):
                if view not in contiguous:
                    contiguous.add(view)
                    if not is_contiguous(view, program.buffers[view.buffer]):
                        problem = "sends or receives a view with gaps; copy it into a buffer first"
            for split in _splits(op):
                if not parts_are_contiguous(split, program.buffers[split.view.buffer]):
                    problem = f"cuts its view along dimension {split.dim}, which leaves gaps; copy first"
            if isinstance(op, Exchange) and any(peer == program.rank for peer, _ in (*op.sends, *op.recvs)):
                problem = "exchanges with its own rank; use a Copy"
        if problem:
            raise ScheduleError(f"rank {program.rank} op {index} ({op.label!r}) {problem}")


def _splits(op: Exchange | Collective) -> list[Split]:
    """Return the splits that an op sends or receives."""
    if isinstance(op, AllToAll):
        return [op.sends, op.recvs]
    if isinstance(op, AllGather):
        return [op.recvs]
    if isinstance(op, ReduceScatter):
        return [op.sends]
    return []


def _check_claims(schedule: Schedule, matching: Matching, kernels: list[list[KernelUse | None]]) -> None:
    """Raise where FLOPs or bytes differ from what the builder claims by its paper's formula."""
    claims = schedule.header.claims
    if claims is None:
        return
    flops = sum(use.flops for uses in kernels for use in uses if use and use.kernel in ATTENTION_KERNELS)
    if flops != claims.attention_flops:
        raise ScheduleError(f"attention takes {flops} FLOPs, but {claims.source} says {claims.attention_flops}")
    sent = wire_bytes(schedule, matching)
    if sent != claims.wire_bytes:
        raise ScheduleError(f"{sent} bytes are sent, but {claims.source} says {claims.wire_bytes}")
