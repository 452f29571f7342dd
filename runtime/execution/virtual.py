"""The virtual cluster: all ranks of a schedule in one process, in any order that the dependencies allow.

Random orders detect races by execution: kernels see only the views that their op declares, new buffers are full of NaN,
and a kernel that changes what it only reads is caught by the tensor's version.
"""

from __future__ import annotations

import random
import time
from typing import assert_never

import torch

from runtime.execution.inputs import fill_inputs
from runtime.execution.ops.attention_choice import attention_kernel, needs_windows
from runtime.execution.ops.kernels import host_copy, run_kernel
from runtime.execution.tensors import TORCH_DTYPE, Storage
from runtime.execution.verify import Outputs
from sim.base.errors import InputError, ScheduleError
from sim.schedule.derive.matching import Key, describe
from sim.schedule.ir.ops import (
    AllReduce,
    Attend,
    AttendBackward,
    Collective,
    Exchange,
    Hold,
    HostAdamW,
    HostCopy,
    HostSync,
    Kernel,
    Op,
)
from sim.schedule.ir.program import require_checked
from sim.schedule.ir.views import Split
from sim.schedule.proof.check import Checked


def execute_virtual(checked: Checked, device: torch.device, order_seed: int | None = None) -> list[Outputs]:
    """Return the outputs of every rank. ``order_seed`` draws a topological order; None plays ranks round robin.

    Raises ScheduleError if a kernel changes a tensor that its op only reads, InputError for a schedule that was not
    checked.
    """
    require_checked(checked)
    return _VirtualCluster(checked, device, order_seed).run()


def attention_seconds(checked: Checked, device: torch.device, repeats: int = 5) -> list[float]:
    """Return per rank the seconds of its attention kernels. Ranks are played alone, so that they do not slow each
    other, and each kernel counts with its fastest play, because disturbances only make it slower. On a CPU each rank
    has one thread, and seconds are CPU time, which leaves out other processes.

    Raises InputError for a schedule that was not checked, or for less than one play.
    """
    require_checked(checked)
    if repeats < 1:
        raise InputError(f"`repeats` {repeats}: expected 1 or more")
    found: list[dict[Key, float]] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(repeats):
            cluster = _VirtualCluster(checked, device, order_seed=None)
            cluster.run()
            found.append(cluster.attention_s)
    finally:
        torch.set_num_threads(threads)
    seconds = [0.0] * checked.schedule.num_ranks
    for key in found[0]:
        seconds[key[0]] += min(of_play[key] for of_play in found)
    return seconds


class _VirtualCluster:
    """One run."""

    def __init__(self, checked: Checked, device: torch.device, order_seed: int | None) -> None:
        self._checked = checked
        self._programs = checked.schedule.programs
        self._attention = attention_kernel(
            device,
            TORCH_DTYPE[checked.schedule.header.workload.dtype],
            windows=any(map(needs_windows, self._programs)),
        )
        self._storage = [Storage(program, device, poison=True) for program in self._programs]
        self._random = None if order_seed is None else random.Random(order_seed)
        self._left: dict[Key, int] = {}
        self._after: dict[Key, list[Key]] = {}
        self._ready: list[Key] = []
        self._begun: set[Key] = set()
        self.attention_s: dict[Key, float] = {}
        """Of each attention kernel that has run how long it took."""
        self._device = device
        self._missing = {key: len(found) for key, found in checked.matching.transfers_of.items()}
        for program, storage in zip(self._programs, self._storage, strict=True):
            header = checked.schedule.header
            fill_inputs(program.inputs, header.workload, storage, members=header.members)
            last: dict[str, int] = {}
            for index, op in enumerate(program.ops):
                before = set(checked.dependencies[program.rank].data[index])
                if not isinstance(op, Kernel):  # messages of one communicator keep their order
                    before |= {last[op.stream]} if op.stream in last else set()
                    last[op.stream] = index
                self._left[program.rank, index] = len(before)
                for other in before:
                    self._after.setdefault((program.rank, other), []).append((program.rank, index))
                if not before:
                    self._ready.append((program.rank, index))

    def run(self) -> list[Outputs]:
        """Play until nothing is ready."""
        while self._ready:
            at = self._random.randrange(len(self._ready)) if self._random else 0
            self._ready[at], self._ready[-1] = self._ready[-1], self._ready[at]
            self._begin(self._ready.pop())
        assert not any(self._left.values()), "a checked schedule came to a standstill"
        return [
            [storage.read(port.view) for port in program.outputs]
            for program, storage in zip(self._programs, self._storage, strict=True)
        ]

    def _begin(self, key: Key) -> None:
        rank, index = key
        op = self._programs[rank].ops[index]
        self._begun.add(key)
        if isinstance(op, Kernel | HostAdamW):
            self._kernel(key, op)
            self._end(key)
        elif isinstance(op, HostCopy):
            host_copy(op, self._storage[rank])()
            self._end(key)
        elif isinstance(op, HostSync):
            self._end(key)
        elif isinstance(op, Exchange):
            self._exchange(key)
        elif isinstance(op, Collective):
            self._collective(key)
        else:
            assert_never(op)

    def _kernel(self, key: Key, op: Kernel | HostAdamW) -> None:
        """Run a kernel, and see that it left alone what it only reads."""
        storage = self._storage[key[0]]
        written = {view.buffer for view in op.writes}
        looked_at = () if isinstance(op, Hold) else op.reads
        only_read = [(view, storage.read(view)) for view in looked_at if view.buffer not in written]
        versions = [tensor._version for _, tensor in only_read]  # noqa: SLF001 - torch has no public name for it
        if isinstance(op, Attend | AttendBackward):
            self.attention_s[key] = self._seconds(op, storage)
        else:
            run_kernel(op, storage, self._attention)
        for (view, tensor), version in zip(only_read, versions, strict=True):
            if tensor._version != version:  # noqa: SLF001
                name = self._programs[key[0]].buffers[view.buffer].name
                raise ScheduleError(f"{describe(self._checked.schedule, key)} changed {name!r}, which it only reads")

    def _seconds(self, op: Kernel, storage: Storage) -> float:
        """Run a kernel; return how long it took, alone on the device."""
        clock = time.perf_counter if self._device.type == "cuda" else time.process_time
        self._wait()
        begin_s = clock()
        run_kernel(op, storage, self._attention)
        self._wait()
        return clock() - begin_s

    def _wait(self) -> None:
        """Wait for what a GPU has been given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _end(self, key: Key) -> None:
        for after in self._after.get(key, ()):
            self._left[after] -= 1
            if self._left[after] == 0:
                self._ready.append(after)

    def _exchange(self, key: Key) -> None:
        """Move what has both sides begun."""
        matching = self._checked.matching
        for number in matching.transfers_of.get(key, ()):
            transfer = matching.transfers[number]
            if transfer.source in self._begun and transfer.target in self._begun:
                for view, target in transfer.pairs:
                    sent = self._storage[transfer.source[0]].read(view)
                    self._storage[transfer.target[0]].write(target).copy_(sent)
                for side in (transfer.source, transfer.target):
                    self._missing[side] -= 1
                    if self._missing[side] == 0:
                        self._end(side)
        if key not in self._missing:
            self._end(key)

    def _collective(self, key: Key) -> None:
        """Carry out a collective when its last member begins."""
        members = self._checked.matching.groups[self._checked.matching.group_of[key]].members
        if not all(member in self._begun for member in members):
            return
        ops = [(self._storage[rank], self._programs[rank].ops[index]) for rank, index in members]
        sent = [self._sent(storage, op, len(ops)) for storage, op in ops]
        for place, (storage, op) in enumerate(ops):
            assert isinstance(op, Collective)
            parts = [of_member[place] for of_member in sent if of_member]
            if isinstance(op.taken, Split):
                storage.write(op.taken.view).copy_(torch.cat(parts, dim=op.taken.dim))
            elif op.taken is not None:
                largest, stacked = isinstance(op, AllReduce) and op.largest, torch.stack(parts)
                storage.write(op.taken).copy_(stacked.amax(dim=0) if largest else stacked.sum(dim=0))
        for member in members:
            self._end(member)

    def _sent(self, storage: Storage, op: Op, size: int) -> list[torch.Tensor]:
        """Return what a member of a collective sends to each; nothing of a barrier."""
        assert isinstance(op, Collective)
        if isinstance(op.given, Split):
            return [storage.read(op.given.part(member)).clone() for member in range(size)]
        return [storage.read(op.given).clone()] * size if op.given else []
