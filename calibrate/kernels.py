"""Times kernels: one-op programs, run by the very function that plays schedules, alone and with all cores at work."""

from __future__ import annotations

import time
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from calibrate.cases import KernelCase
from runtime.attention import AttentionKernel, attention_kernel
from runtime.groups import start_together
from runtime.kernels import run_kernel
from runtime.launch import RankContext, Session
from runtime.tensors import Storage
from sim.profile import Condition, Point
from sim.schedule.ir import Program
from sim.schedule.ops import Attend, AttendBackward, Gemm, Kernel

_MIN_RUNS = 5
_LONG_S = 0.2
_LONG_RUNS = 3
"""Kernels that take longer than this are timed that often only, warming up included: it is a small part of it."""
_COLD_BYTES = {"compute": 64 * 2**20, "memory": 256 * 2**20}
"""Operands are rotated over this much memory: in a step, too, what a kernel reads has left the caches. Kernels that
only move memory need more of it, since caches keep what was streamed last."""
_MAX_SETS = 64


class Sample(NamedTuple):
    """Times in seconds: the fields of a Point that describe them."""

    mean_s: float
    low_s: float
    median_s: float
    high_s: float
    runs: int


def time_kernel(session: Session, case: KernelCase, condition: Condition, budget_s: float) -> Point:
    """Return the time of a kernel on rank 0 alone (idle), or on every rank of the session at once (busy)."""
    use = case.use
    active = 1 if condition == "idle" else session.ranks
    seconds = [
        s for of_rank in session.call(_time, msgspec.json.encode(case.program), active, budget_s) for s in of_rank
    ]
    times = sample(seconds)
    return Point(
        kernel=use.kernel,
        variant=use.variant,
        dtype=use.dtype,
        shape=use.shape,
        condition=condition,
        flops=use.flops,
        nbytes=use.hbm_bytes,
        **times._asdict(),
    )


def sample(seconds: list[float]) -> Sample:
    """Return what a profile keeps of a sample of times."""
    low, median, high = (float(x) for x in np.percentile(seconds, [25, 50, 75]))
    return Sample(float(np.mean(seconds)), low, median, high, len(seconds))


def _time(context: RankContext, program_json: bytes, active: int, budget_s: float) -> list[float]:
    """Time the op of a program on the first ``active`` ranks, all of them starting together."""
    if context.rank >= active:
        return []
    repeated = RepeatedKernel(msgspec.json.decode(program_json, type=Program), context)
    warm = [lap.wall_s for lap in repeated.once_each()]
    long = warm[0] > _LONG_S
    seconds = warm if long else []
    if active == context.ranks:
        start_together(context.ranks, context.device)
    deadline = time.perf_counter() + budget_s
    while len(seconds) < (_LONG_RUNS if long else _MIN_RUNS) or (
        not long and time.perf_counter() < deadline and len(seconds) < 40 * _MIN_RUNS
    ):
        seconds.append(repeated.once().wall_s)
    return seconds


class Lap(NamedTuple):
    """One run of a kernel."""

    wall_s: float
    cpu_s: float
    """Time that its thread was on a core: whoever else took that core is not in it, waiting for memory is."""


class RepeatedKernel:
    """The op of a program on one rank, each time on operands that have left the caches."""

    def __init__(self, program: Program, context: RankContext) -> None:
        op = program.ops[0]
        assert isinstance(op, Kernel)
        self._op = op
        self._context = context
        self._attention = attention_kernel(context.device)
        first = _operands(program, op, context, self._attention)
        self._sets = [first, *(_copied(program, first, context) for _ in range(_num_sets(program, op) - 1))]
        self._next = 0

    def once(self) -> Lap:
        """Run it on the next operands."""
        storage = self._sets[self._next % len(self._sets)]
        self._next += 1
        begin_s, cpu_begin_s = time.perf_counter(), time.thread_time()
        run_kernel(self._op, storage, self._attention)
        self._context.progress(0, False)
        return Lap(time.perf_counter() - begin_s, time.thread_time() - cpu_begin_s)

    def once_each(self) -> list[Lap]:
        """Run it on every set of operands."""
        return [self.once() for _ in self._sets]


def _num_sets(program: Program, op: Kernel) -> int:
    """Return how many sets of operands do not fit into the caches."""
    size = sum(buffer.nbytes for buffer in program.buffers)
    kind = "compute" if isinstance(op, Attend | AttendBackward | Gemm) else "memory"
    return min(max(_COLD_BYTES[kind] // size, 1), _MAX_SETS)


def _operands(program: Program, op: Kernel, context: RankContext, attention: AttentionKernel) -> Storage:
    """Return random operands; a backward pass gets the out and lse of its forward pass."""
    storage = Storage(program, context.device)
    generator = torch.Generator().manual_seed(context.rank)
    for view in {*op.reads, *op.writes}:
        storage.write(view).normal_(generator=generator)
    if isinstance(op, AttendBackward):
        run_kernel(_forward_of(op), storage, attention)
    return storage


def _copied(program: Program, storage: Storage, context: RankContext) -> Storage:
    """Return the same operands at another place in memory."""
    copy = Storage(program, context.device)
    for view in {*program.ops[0].reads, *program.ops[0].writes}:
        copy.write(view).copy_(storage.read(view))
    return copy


def _forward_of(op: AttendBackward) -> Attend:
    """Return the forward pass that makes the out and lse of a backward one."""
    return Attend(
        stream=op.stream, part="forward", label=op.label, q=op.q, k=op.k, v=op.v, out=op.out, lse=op.lse, band=op.band
    )
