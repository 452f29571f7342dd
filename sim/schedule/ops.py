"""The ops of the intermediate representation, and the buffers and views that they read and write.

The op set is a closed union: every reader ends in ``assert_never``, so that the type checker names the reader that
forgot a kind. ``reads`` and ``writes`` of an op are all that dependencies are derived from. Dims: ``sim.workload``.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from sim.schedule.masks import Band
from sim.workload import DTYPE_BYTES, Dtype

COMPUTE = "compute"
"""The stream of all kernels; every communicator has a stream of its own name."""

Category = Literal[
    "parameter", "gradient", "optimiser", "saved", "attention", "communication", "repartition", "other"
]  # fmt: skip
Part = Literal["forward", "backward"]


class Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Base of what is described: immutable, keyword-only, strict about its keys when decoded."""


class Buffer(Data, frozen=True, kw_only=True):
    """A tensor of one rank."""

    name: str
    dims: str
    """One letter a dimension: b batch (or peer x batch), s sequence, h heads, d head dim."""
    shape: tuple[int, ...]
    dtype: Dtype
    category: Category
    place: Literal["hbm", "host"] = "hbm"

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class View(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box of a buffer: one (start, stop) per dimension. Slicing a view gives a smaller one, as in numpy."""

    buffer: int
    slices: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent per dimension."""
        return tuple([stop - start for start, stop in self.slices])

    def __getitem__(self, key: slice | tuple[slice, ...]) -> View:
        keys = key if isinstance(key, tuple) else (key,)
        boxes = []
        for (start, stop), part in zip(self.slices, keys, strict=False):
            begin, end, _ = part.indices(stop - start)
            boxes.append((start + begin, start + end))
        return View(self.buffer, (*boxes, *self.slices[len(keys) :]))


class Split(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A view cut along one dimension into equal parts: what goes to, or comes from, each member of a group."""

    view: View
    dim: int
    parts: int

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Extent of one part per dimension."""
        shape = self.view.shape
        return (*shape[: self.dim], shape[self.dim] // self.parts, *shape[self.dim + 1 :])


def is_contiguous(view: View, buffer: Buffer) -> bool:
    """Return whether a view lies in memory in one piece, as whatever is sent or received must."""
    shape = view.shape
    if shape == buffer.shape:
        return True
    inner = max((dim for dim, extent in enumerate(shape) if extent != buffer.shape[dim]), default=0)
    return all(extent == 1 for extent in shape[:inner])


def parts_are_contiguous(split: Split, buffer: Buffer) -> bool:
    """Return whether the parts follow each other in memory, each in one piece."""
    return is_contiguous(split.view, buffer) and all(extent == 1 for extent in split.view.shape[: split.dim])


class Message(NamedTuple):
    """One tensor that an Exchange sends to, or receives from, ``peer``."""

    peer: int
    view: View


class _Op(Data, frozen=True, kw_only=True, tag=True):
    """What every op has: its stream, the pass that it belongs to, and a short name for people."""

    stream: str
    part: Part
    label: str


class Attend(_Op, frozen=True, kw_only=True):
    """out, lse = attention of one block with its log-sum-exp. q, out: bshd; k, v: bshd; lse: bhs."""

    q: View
    k: View
    v: View
    out: View
    lse: View
    band: Band

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.q, self.k, self.v)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.out, self.lse)


class AttendBackward(_Op, frozen=True, kw_only=True):
    """dq, dk, dv of one block, from the global out and lse. Shapes as in Attend; dout, dq: bshd; dk, dv: bshd."""

    q: View
    k: View
    v: View
    out: View
    lse: View
    dout: View
    dq: View
    dk: View
    dv: View
    band: Band

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.q, self.k, self.v, self.out, self.lse, self.dout)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.dq, self.dk, self.dv)


class Merge(_Op, frozen=True, kw_only=True):
    """Fold the partial (out, lse) of more keys into an accumulated one of the same queries."""

    out: View
    lse: View
    into_out: View
    into_lse: View

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.out, self.lse, self.into_out, self.into_lse)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.into_out, self.into_lse)


class Accumulate(_Op, frozen=True, kw_only=True):
    """into += source; data types may differ."""

    source: View
    into: View

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.source, self.into)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.into,)


class Copy(_Op, frozen=True, kw_only=True):
    """Part i of target = part i of source, in one kernel: layout copies, packing, casts."""

    source: Split
    target: Split

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.source.view,)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.target.view,)


class Exchange(_Op, frozen=True, kw_only=True):
    """Grouped point to point: all sends and receives begin together, as in ncclGroup and batch_isend_irecv."""

    communicator: str
    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]

    @property
    def reads(self) -> tuple[View, ...]:
        return tuple([message.view for message in self.sends])

    @property
    def writes(self) -> tuple[View, ...]:
        return tuple([message.view for message in self.recvs])


class AllToAll(_Op, frozen=True, kw_only=True):
    """Part i of ``sends`` goes to member i of the group, part i of ``recvs`` comes from it; the own one is copied."""

    communicator: str
    sends: Split
    recvs: Split

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.sends.view,)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.recvs.view,)


class AllGather(_Op, frozen=True, kw_only=True):
    """Part i of ``recvs`` = what member i sends."""

    communicator: str
    send: View
    recvs: Split

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.send,)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.recvs.view,)


class ReduceScatter(_Op, frozen=True, kw_only=True):
    """recv = sum over the members of what each sends to this one; part i of ``sends`` is meant for member i."""

    communicator: str
    sends: Split
    recv: View

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.sends.view,)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.recv,)


class AllReduce(_Op, frozen=True, kw_only=True):
    """view = sum of the members' views, in place."""

    communicator: str
    view: View

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.view,)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.view,)


class HostSync(_Op, frozen=True, kw_only=True):
    """The host issues nothing more before all that it issued to ``streams`` has ended."""

    streams: tuple[str, ...]

    @property
    def reads(self) -> tuple[View, ...]:
        return ()

    @property
    def writes(self) -> tuple[View, ...]:
        return ()


class Barrier(_Op, frozen=True, kw_only=True):
    """Ends on no member before it has begun on all."""

    communicator: str

    @property
    def reads(self) -> tuple[View, ...]:
        return ()

    @property
    def writes(self) -> tuple[View, ...]:
        return ()


Collective: TypeAlias = AllToAll | AllGather | ReduceScatter | AllReduce | Barrier
Kernel: TypeAlias = Attend | AttendBackward | Merge | Accumulate | Copy
Op: TypeAlias = Kernel | Exchange | Collective | HostSync
