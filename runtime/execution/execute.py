"""Executes one rank of a checked schedule on torch.distributed, and stamps what happened when."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import NamedTuple, assert_never

import numpy as np
import torch

from runtime.execution.groups import Groups, start_together
from runtime.execution.inputs import fill_inputs
from runtime.execution.ops.attention_choice import attention_kernel, needs_windows
from runtime.execution.ops.kernels import host_copy, run_kernel
from runtime.execution.streams import Event, Streams, open_streams
from runtime.execution.tensors import (
    TORCH_DTYPE,
    Storage,
    ends_at,
    most_allocated,
    reserve,
    reserve_pinned,
    watch_allocations,
)
from runtime.execution.verify import Outputs
from sim.accounts.memory import lifetimes, walk
from sim.accounts.trace import Times
from sim.schedule.ir.ops import (
    Attend,
    AttendBackward,
    Collective,
    Exchange,
    HostAdamW,
    HostCopy,
    HostSync,
    Kernel,
    ProductKernel,
)
from sim.schedule.proof.check import RankSchedule

ISSUE_S = 200e-6
"""What issuing an op takes a slow host."""


class Executed(NamedTuple):
    """What one rank did in one step."""

    posted_s: Times
    """(ops,), since ``start_s``. When group ops begin is not known here, since one rank cannot see the others."""
    ended_s: Times
    ran: list[str]
    """Per op the implementation, empty where there is but one."""
    start_s: float
    """On the clock of the host."""
    peak_bytes: int
    """Largest sum of the rank's buffers."""
    allocated_bytes: int
    """Most that a GPU's allocator had given at a time, workspaces of kernels included, but without what outlives steps
    (tables of rotations, what libraries keep); 0 on a CPU."""


_SLOWED = (Attend, AttendBackward, ProductKernel)
"""Kernels that a slower clock makes slower; others wait for the memory."""


def _stretch(begin_s: float, speed: float) -> None:
    """Keep this thread on its core as long as a core of a slower clock would have taken for what it did since then."""
    until_s = begin_s + (time.thread_time() - begin_s) / speed
    while time.thread_time() < until_s:
        pass


class RankPlayer:
    """One rank of one schedule, ready to be played as often as wanted.

    ``attention`` names the kernel of a GPU, by default the fastest one. ``progress`` is told the number of the op that
    the host is at, and whether it waits there, so that a watcher can name it; ``limit`` is what its process groups may
    take for an op, by default torch's.
    """

    def __init__(
        self,
        schedule: RankSchedule,
        device: torch.device,
        attention: str = "",
        progress: Callable[[int, bool], None] = lambda *_: None,
        limit: timedelta | None = None,
        speed: float = 1.0,
    ) -> None:
        self._speed = speed
        self._ranks, workload, communicators, self._program, self._dependencies, members = schedule
        self._lifetimes = lifetimes(self._program, self._dependencies)
        self._ends = ends_at(self._lifetimes, len(self._program.ops))
        self._device = device
        self._groups = Groups(communicators, self._program.rank, limit)
        self._attention = attention_kernel(
            device, TORCH_DTYPE[workload.dtype], attention, windows=needs_windows(self._program)
        )
        self._streams = open_streams(device)
        self._progress = progress
        needed = walk(self._program, self._dependencies)
        reserve(needed.peak_bytes + needed.host_peak_bytes, self._ranks, device)
        reserve_pinned(self._program, self._ends, device, lambda: progress(-1, False))
        self._storage = Storage(self._program, device)
        updated = {port.view.buffer for port in self._program.outputs}
        self._given = [port for port in self._program.inputs if port.view.buffer not in updated]
        self._updated = [port for port in self._program.inputs if port.view.buffer in updated]
        self._fill = partial(fill_inputs, workload=workload, members=members, advance=lambda: progress(-1, False))
        self._fill(self._program.inputs, storage=self._storage)

    def play(self, *, ahead: bool = False) -> Executed:
        """Carry out one step and return what happened; its outputs stay until the next one. ``ahead``: a GPU begins
        when most of it has been issued, so that ops do not wait for the host.
        """
        self._storage = storage = self._fresh()
        given = watch_allocations(self._device)
        others = given - storage.in_use_bytes if given else 0
        events: list[Event] = []
        start_together(self._ranks, self._device)
        start_s = self._streams.start()
        if ahead:
            self._streams.get_ahead(len(self._program.ops) * ISSUE_S)
        ran = self._issue(self._streams, storage, events)
        for index, event in enumerate(events):  # in turn, so that a watcher sees which op does not end
            self._wait(index, [event])
        posted_s, ended_s = np.array([event.times() for event in events]).reshape(-1, 2).T - start_s
        return Executed(posted_s, ended_s, ran, start_s, storage.peak_bytes, most_allocated(self._device) - others)

    def _fresh(self) -> Storage:
        """Return a storage that holds the inputs and nothing else, as they were where the last step updated them."""
        fresh = Storage(self._program, self._device, rotations=self._storage.rotations)
        for port in self._given:
            fresh.put(port.view, self._storage.read(port.view))
        self._storage.drop([port.view.buffer for port in self._updated])
        self._fill(self._updated, storage=fresh)
        return fresh

    def outputs(self) -> Outputs:
        """Return what the output ports hold after the last step."""
        return [self._storage.read(port.view).cpu() for port in self._program.outputs]

    def close(self) -> None:
        """End the streams and the process groups."""
        self._streams.close()
        self._groups.close()

    def _wait(self, index: int, events: list[Event]) -> None:
        """Block until all of ``events`` have ended."""
        if events:
            self._progress(index, True)
            for event in events:
                event.wait()
            self._progress(index, False)

    def _issue(self, streams: Streams, storage: Storage, events: list[Event]) -> list[str]:
        """Issue all ops in order; return per op the name of the kernel that ran, there once the op has ended."""
        ran = [""] * len(self._program.ops)

        def kernel(index: int, op: Kernel | HostAdamW) -> list[torch.distributed.Work]:
            begin_s = time.thread_time()
            ran[index] = run_kernel(op, storage, self._attention)
            if self._speed < 1 and isinstance(op, _SLOWED):
                _stretch(begin_s, self._speed)
            return []

        def outlast(buffer: int, tensor: torch.Tensor) -> None:
            streams.outlast(tensor, self._lifetimes[buffer].unseen)

        for index, op in enumerate(self._program.ops):
            self._progress(index, False)
            storage.drop(self._ends[index], outlast)
            after = [events[other] for other in self._dependencies.waits[index]]
            if isinstance(op, Kernel):
                if streams.inline:
                    self._wait(index, after)
                    after = []
                events.append(streams.issue(op.stream, partial(kernel, index, op), after))
            elif isinstance(op, HostCopy):
                events.append(streams.issue(op.stream, host_copy(op, storage), after))
            elif isinstance(op, Exchange | Collective):
                events.append(streams.issue(op.stream, self._groups.bind(op, storage), after))
            elif isinstance(op, HostSync):
                events.append(streams.synchronize(after))
            elif isinstance(op, HostAdamW):
                events.append(streams.synchronize(after, partial(kernel, index, op)))
            else:
                assert_never(op)
        return ran
