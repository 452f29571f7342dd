"""The buffers of one rank as tensors."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterable

import torch

from sim.accounts.memory import Lifetime
from sim.base.errors import InputError
from sim.schedule.ir.masks import Tokens
from sim.schedule.ir.program import Program
from sim.schedule.ir.views import Buffer, View
from sim.words.workload import Dtype

TORCH_DTYPE: dict[Dtype, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int64": torch.int64,
}

Rotation = tuple[Tokens, int, float, torch.dtype, torch.device]
"""Tokens, head dimension, theta, and the data type and the device of its tables."""
Rotations = dict[Rotation, tuple[torch.Tensor, torch.Tensor]]
"""Cosine and sine, each (S, 1, D/2), of what is being played."""

_HEAP = 3
"""Heap over peak of the buffers: it was seen to come to 2.0 to 2.2 (glibc 2.36), perhaps by fragmentation."""


class Storage:
    """The buffers of one rank, taken when first written and dropped when their lifetime ends.

    With ``poison`` a new buffer is full of NaN, so that whatever is read before it is written shows. ``rotations`` are
    the tables of rotary embeddings of an earlier storage of the same program.
    """

    def __init__(
        self, program: Program, device: torch.device, *, poison: bool = False, rotations: Rotations | None = None
    ) -> None:
        self.program = program
        self.device = device
        self._buffers = program.buffers
        self._whole = [tuple((0, extent) for extent in buffer.shape) for buffer in program.buffers]
        self._poison = poison
        self._tensors: dict[int, torch.Tensor] = {}
        self.rotations: Rotations = {} if rotations is None else rotations
        self.in_use_bytes = 0
        self.peak_bytes = 0

    def within(self, program: Program, given: Iterable[torch.Tensor]) -> Storage:
        """Return the buffers of what a kernel consists of; the first are tensors that are there."""
        inner = Storage(program, self.device, poison=self._poison)
        for buffer, tensor in enumerate(given):
            inner._take(buffer, tensor)
        return inner

    def read(self, view: View) -> torch.Tensor:
        """Return a view as a tensor that shares memory with its buffer; the buffer must have been written."""
        return self._slice(self._tensors[view.buffer], view)

    def write(self, view: View) -> torch.Tensor:
        """Return a view to be written to; takes the buffer if this is its first use."""
        if view.buffer not in self._tensors:
            buffer = self._buffers[view.buffer]
            new = self._new(buffer)
            if self._poison:
                new.fill_(float("nan") if new.is_floating_point() else torch.iinfo(new.dtype).min)
            self._take(view.buffer, new)
        return self._slice(self._tensors[view.buffer], view)

    def _new(self, buffer: Buffer) -> torch.Tensor:
        """Return memory for a buffer; that of a GPU's host is pinned, so that a copy engine can reach it."""
        if buffer.place == "host" and self.device.type == "cuda":
            return pinned(buffer)
        device = self.device if buffer.place == "hbm" else torch.device("cpu")
        return in_order(buffer, torch.empty(shape_in_memory(buffer), dtype=TORCH_DTYPE[buffer.dtype], device=device))

    def put(self, view: View, value: torch.Tensor) -> None:
        """Store a kernel's result: adopted where it can be the buffer itself, else copied (and cast)."""
        buffer = self._buffers[view.buffer]
        fits = (
            value.dtype == TORCH_DTYPE[buffer.dtype]
            and in_order(buffer, value).is_contiguous()
            and value.device == self.device
        )
        if fits and view.slices == self._whole[view.buffer]:
            self.drop([view.buffer])
            self._take(view.buffer, value)
        else:
            self.write(view).copy_(value)

    def flat(self, view: View, tensor: torch.Tensor) -> torch.Tensor:
        """Return what ``read`` or ``write`` has of a view, which lies in one piece, as the elements of that piece."""
        return in_order(self._buffers[view.buffer], tensor).view(-1)

    def drop(self, buffers: Iterable[int], last: Callable[[int, torch.Tensor], None] = lambda *_: None) -> None:
        """Give buffers back; ``last`` is given each, and what it was."""
        for buffer in buffers:
            tensor = self._tensors.pop(buffer, None)
            if tensor is not None:
                self._count(buffer, -1)
                last(buffer, tensor)

    def _take(self, buffer: int, tensor: torch.Tensor) -> None:
        self._tensors[buffer] = tensor
        self._count(buffer, 1)

    def _count(self, buffer: int, sign: int) -> None:
        if self._buffers[buffer].place == "hbm":
            self.in_use_bytes += sign * self._buffers[buffer].nbytes
            self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)

    def _slice(self, tensor: torch.Tensor, view: View) -> torch.Tensor:
        if view.slices == self._whole[view.buffer]:
            return tensor
        return tensor[tuple(slice(start, stop) for start, stop in view.slices)]


def in_order(buffer: Buffer, tensor: torch.Tensor) -> torch.Tensor:
    """Return (B, S, ...) as (S, B, ...), or the other way, where a buffer has tokens first in memory."""
    return tensor.transpose(0, 1) if buffer.token_major else tensor


def shape_in_memory(buffer: Buffer) -> list[int]:
    """Return the extents of a buffer in the order of memory."""
    return [buffer.shape[dim] for dim in buffer.in_memory]


def reserve(peak_bytes: int, ranks: int, device: torch.device) -> None:
    """Touch as much heap as a CPU process will come to need, which it then keeps (``launch``), so that no step pays.

    Else the heap was seen to grow for ten steps, by other amounts each time, and the kernel at the peak to pay for the
    first touch of its pages: on a virtual machine 8 ms per 2 MiB, and 0.2 ms where the pages had been used before,
    presumably since its host had to find that memory first.
    """
    if device.type == "cpu" and sys.platform == "linux":
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        torch.empty(min(_HEAP * peak_bytes, free // (2 * ranks)), dtype=torch.uint8).fill_(0)


def pinned(buffer: Buffer) -> torch.Tensor:
    """Return pinned memory of the host for a buffer; raises InputError where the system gives none."""
    try:
        made = torch.empty(shape_in_memory(buffer), dtype=TORCH_DTYPE[buffer.dtype], pin_memory=True)
        return in_order(buffer, made)
    except RuntimeError as error:
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "no limit" if locked == resource.RLIM_INFINITY else f"a limit of {locked} bytes"
        why = str(error).partition("\n")[0]
        raise InputError(
            f"pinning {buffer.nbytes} bytes of the host's memory for {buffer.name!r} failed ({why}; locked memory has "
            f"{limit} here): raise ulimit -l or take a shorter `seq`, or `set` schedule.activations=pageable or "
            f"schedule.optimiser=gpu"
        ) from error


def reserve_pinned(program: Program, ends: list[list[int]], device: torch.device, advance: Callable[[], None]) -> None:
    """Pin as much of a GPU's host as a program holds at a time, which torch then keeps for its steps: the system takes
    tens of seconds for tens of GB. ``ends`` as of ``ends_at``; ``advance`` is called after each buffer.
    """
    held: dict[int, torch.Tensor] = {}

    def take(view: View) -> None:
        if view.buffer not in held and program.buffers[view.buffer].place == "host":
            held[view.buffer] = pinned(program.buffers[view.buffer])
            advance()

    for port in program.inputs if device.type == "cuda" else ():  # an optimiser's state is there from the beginning
        take(port.view)
    for op, ended in zip(program.ops if device.type == "cuda" else (), ends, strict=False):
        for buffer in ended:
            held.pop(buffer, None)
        for view in op.writes:
            take(view)


def watch_allocations(device: torch.device) -> int:
    """Begin to watch what the allocator of a GPU gives; return what it has given until now, 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def most_allocated(device: torch.device) -> int:
    """Return the most that it had given at a time since then, in bytes; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def ends_at(lifetimes: list[Lifetime], count: int) -> list[list[int]]:
    """Return, per op, the buffers to give back before it; buffers that live to the end are in none."""
    ends: list[list[int]] = [[] for _ in range(count)]
    for buffer, lifetime in enumerate(lifetimes):
        if lifetime.end < count:
            ends[lifetime.end].append(buffer)
    return ends
