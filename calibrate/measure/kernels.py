"""Times kernels: one-op programs, run by the very function that plays schedules, on its streams; alone, and with all
cores at work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator
from contextlib import closing
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed import Work

from calibrate.measure.cases import KernelCase
from runtime.execution.execute import ISSUE_S
from runtime.execution.groups import start_together
from runtime.execution.ops.attention import AttentionKernel
from runtime.execution.ops.attention_choice import attention_kernel, runs
from runtime.execution.ops.kernels import run_kernel
from runtime.execution.streams import Event, open_streams
from runtime.execution.tensors import TORCH_DTYPE, Storage
from runtime.processes.launch import Session
from runtime.processes.rank import RankContext
from sim.schedule.ir.ops import (
    COMPUTE,
    Attend,
    AttendBackward,
    CrossEntropy,
    Embed,
    EmbedBackward,
    Kernel,
    ProductKernel,
)
from sim.schedule.ir.program import Program
from sim.words.profile import Condition, Point, Sustained

_MIN_RUNS = 5
_LONG_S = 0.2
_LONG_RUNS = 3
"""Kernels that take longer than this are timed that often only."""
_BATCH = {"cpu": 1, "cuda": 8}
"""Runs behind each other that are issued at once: on a GPU, so that the host's time is not in them."""
_COLD_BYTES = {"compute": 64 * 2**20, "memory": 256 * 2**20}
"""Operands are rotated over this much memory: in a step, too, what a kernel reads has left the caches. Kernels that
only move memory need more of it, since caches keep what was streamed last."""
_MAX_SETS = 64
_QUEUED = {"cpu": 1, "cuda": 32}
"""Runs that a device under load is given at once, while it does as many: it never waits for the host."""
_REPLAYED = 1000
"""Kernels in a graph."""
_SHORT_S = 0.2
"""What a point takes to measure."""


class Sample(NamedTuple):
    """Times in seconds: the fields of a Point that describe them."""

    mean_s: float
    low_s: float
    median_s: float
    high_s: float
    runs: int


class Timed(NamedTuple):
    """A measured kernel."""

    point: Point
    cpu_s: float
    """Median time that its thread was on a core; on a GPU, that issuing it takes."""


def time_kernel(session: Session, case: KernelCase, condition: Condition, budget_s: float) -> Timed:
    """Return the time of a kernel on rank 0 alone (idle), or on every rank of the session at once (busy)."""
    use = case.use
    active = 1 if condition == "idle" else session.ranks
    done = session.call(_time, case.program.to_json(), active, budget_s)
    laps: list[Lap] = [lap for of_rank in done for lap in of_rank]
    times = sample([lap.wall_s for lap in laps])
    point = Point(
        kernel=use.kernel,
        variant=use.variant,
        dtype=use.dtype,
        shape=use.shape,
        condition=condition,
        flops=use.flops,
        nbytes=use.hbm_bytes,
        **times._asdict(),
    )
    return Timed(point, statistics.median(lap.cpu_s for lap in laps))


def sample(seconds: list[float]) -> Sample:
    """Return what a profile keeps of a sample of times."""
    low, median, high = (float(x) for x in np.percentile(seconds, [25, 50, 75]))
    return Sample(float(np.mean(seconds)), low, median, high, len(seconds))


def _time(context: RankContext, program_json: bytes, active: int, budget_s: float) -> list[Lap]:
    """Time the op of a program on the first ``active`` ranks, all of them starting together."""
    if context.rank >= active:
        return []
    repeated = RepeatedKernel(Program.from_json(program_json), context)
    warm = repeated.once_each()
    long = warm[0].wall_s > _LONG_S
    laps = warm if long else []
    if active == context.ranks:
        start_together(context.ranks, context.device)
    deadline = time.perf_counter() + budget_s
    while len(laps) < (_LONG_RUNS if long else _MIN_RUNS) or (
        not long and time.perf_counter() < deadline and len(laps) < 40 * _MIN_RUNS
    ):
        laps += repeated.laps(1 if long else _BATCH[context.device.type])
    return laps


def time_sustained(session: Session, case: KernelCase, seconds: float) -> Sustained:
    """Return how many times as long a kernel takes after so many seconds of it as in the short run that points are of,
    on rank 0 alone: a GPU lowers its clock under load.
    """
    found: list[Sustained] = session.call(_sustained, case.program.to_json(), seconds)
    return found[0]


def _sustained(context: RankContext, program_json: bytes, seconds: float) -> Sustained:
    repeated = RepeatedKernel(Program.from_json(program_json), context)
    repeated.once_each()
    laps: list[float] = []
    short = _MIN_RUNS
    begin_s = time.perf_counter()
    with closing(repeated.without_pause(_QUEUED[context.device.type])) as runs:
        while len(laps) < 2 * _MIN_RUNS or time.perf_counter() < begin_s + seconds:
            laps += next(runs)
            if time.perf_counter() < begin_s + _SHORT_S:
                short = len(laps)
    settled = laps[-max(len(laps) // 4, _MIN_RUNS) :]
    in_short_runs = statistics.median(laps[:short])
    low, median, high = (max(float(x) / in_short_runs, 1.0) for x in np.percentile(settled, [10, 50, 90]))
    return Sustained(longer=round(median, 4), low=round(low, 4), high=round(high, 4))


def time_replayed(session: Session, case: KernelCase) -> float:
    """Return the seconds from one run of a kernel to the next where rank 0's GPU replays many of them as a graph."""
    found: list[float] = session.call(_replayed, case.program.to_json())
    return found[0]


def _replayed(context: RankContext, program_json: bytes) -> float:
    repeated = RepeatedKernel(Program.from_json(program_json), context)
    repeated.once_each()
    return repeated.replayed(_REPLAYED)


class Lap(NamedTuple):
    """One run of a kernel."""

    wall_s: float
    cpu_s: float
    """Time that its thread was on a core: whoever else took that core is not in it, waiting for memory is. On a GPU,
    whose kernels need no thread, the mean that issuing them took."""


class RepeatedKernel:
    """The op of a program on one rank, each time on operands that have left the caches."""

    def __init__(self, program: Program, context: RankContext) -> None:
        op = program.ops[0]
        assert isinstance(op, Kernel)
        self._op = op
        self._context = context
        self._streams = open_streams(context.device)
        self._streams.start()
        dtype = TORCH_DTYPE[program.dtype((*op.reads, *op.writes)[0])]
        named = context.attention if runs(context.attention, dtype) else ""  # others are of another data type's points
        self._attention = attention_kernel(context.device, dtype, named)
        first = _operands(program, op, context, self._attention)
        self._sets = [first, *(_copied(program, first, context) for _ in range(_num_sets(program, op) - 1))]
        self._next = 0

    def once(self) -> Lap:
        """Run it on the next operands."""
        return self.laps(1)[0]

    def laps(self, count: int) -> list[Lap]:
        """Run it on the next operands, and the next; all are issued before the first one is waited for."""
        self._streams.get_ahead(count * ISSUE_S)
        cpu_begin_s = time.thread_time()
        events = self._issued(count)
        cpu_s = (time.thread_time() - cpu_begin_s) / count
        return [Lap(wall_s, cpu_s) for wall_s in self._seconds(events)]

    def without_pause(self, count: int) -> Generator[list[float], None, None]:
        """Yield the seconds of so many runs, and so many more; the next are issued before these are waited for."""
        ahead = self._issued(count)
        try:
            while True:
                now, ahead = ahead, self._issued(count)
                yield self._seconds(now)
        finally:
            self._seconds(ahead)

    def _issued(self, count: int) -> list[Event]:
        return [self._streams.issue(COMPUTE, self._run, []) for _ in range(count)]

    def _seconds(self, events: list[Event]) -> list[float]:
        """Wait for runs; return the seconds of each."""
        for event in events:
            event.wait()
        self._context.progress(0, False)
        return [ended_s - posted_s for posted_s, ended_s in (event.times() for event in events)]

    def replayed(self, count: int) -> float:
        """Return the mean time in seconds of so many runs that the device gets at once."""
        return self._streams.replay(self._run, count)

    def _run(self) -> list[Work]:
        """Run it once."""
        storage = self._sets[self._next % len(self._sets)]
        self._next += 1
        run_kernel(self._op, storage, self._attention)
        return []

    def once_each(self) -> list[Lap]:
        """Run it on every set of operands; before that once without a clock, since libraries then choose and build what
        they run for a shape: cuDNN takes half a second for a graph.
        """
        self._run()
        return [self.once() for _ in self._sets]


def _num_sets(program: Program, op: Kernel) -> int:
    """Return how many sets of operands do not fit into the caches."""
    size = sum(buffer.nbytes for buffer in program.buffers)
    kind = "compute" if isinstance(op, Attend | AttendBackward | ProductKernel) else "memory"
    return min(max(_COLD_BYTES[kind] // size, 1), _MAX_SETS)


def _operands(program: Program, op: Kernel, context: RankContext, attention: AttentionKernel) -> Storage:
    """Return random operands; a backward pass gets the out and lse of its forward pass."""
    storage = Storage(program, context.device)
    generator = torch.Generator(context.device).manual_seed(context.rank)
    for view in {*op.reads, *op.writes}:
        operand = storage.write(view)
        if operand.is_floating_point():
            operand.normal_(generator=generator)
        else:
            operand.random_(0, _vocab(op), generator=generator)
    if isinstance(op, AttendBackward):
        run_kernel(_forward_of(op), storage, attention)
    return storage


def _vocab(op: Kernel) -> int:
    """Return how many tokens there are to choose from, for an op that takes token ids or labels."""
    if isinstance(op, CrossEntropy):
        return op.logits.shape[-1]
    assert isinstance(op, Embed | EmbedBackward), op
    return (op.table if isinstance(op, Embed) else op.dtable).shape[0]


def _copied(program: Program, storage: Storage, context: RankContext) -> Storage:
    """Return the same operands at another place in memory."""
    copy = Storage(program, context.device, rotations=storage.rotations)
    for view in {*program.ops[0].reads, *program.ops[0].writes}:
        copy.write(view).copy_(storage.read(view))
    return copy


def _forward_of(op: AttendBackward) -> Attend:
    """Return the forward pass that makes the out and lse of a backward one."""
    assert op.out is not None, op
    return Attend(label=op.label, q=op.q, k=op.k, v=op.v, out=op.out, lse=op.lse, band=op.band)
