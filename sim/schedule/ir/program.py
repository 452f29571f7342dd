"""The intermediate representation: a Schedule is data that says what happens on every rank, never how long it takes.

    Schedule ── program(rank) ──> Program ── ops, each on a stream, reading and writing Views of Buffers

Dependencies are derived from overlapping views (``dependencies``), never typed, and not part of the JSON form. The list
order of a program's ops, over all streams, is the order in which the host issues them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import msgspec

from sim.errors import InputError
from sim.mesh import Mesh
from sim.schedule.ir.masks import Span, Tokens
from sim.schedule.ir.ops import Op
from sim.schedule.ir.views import Buffer, Data, View
from sim.workload import DTYPE_BYTES, Dtype, Workload


class Port(Data, frozen=True, kw_only=True):
    """A tensor that comes from outside or is left for outside: which tokens and heads of which global tensor."""

    tensor: str
    """q, k, v, dout, out, lse, dq, dk or dv; of layers x, dx, and the weights and their gradients as in a block."""
    layer: int = 0
    view: View
    batch: Span
    """Which sequences of the global batch; of a weight or its gradient ONE."""
    tokens: Tokens
    """Of a weight or its gradient: all of its rows."""
    heads: Span
    features: Span | None = None
    """Which features, of a weight columns; None for all."""

    @property
    def name(self) -> str:
        """What people call it: the tensor, with the layer where there is more than the first."""
        return f"{self.tensor} {self.layer}" if self.layer else self.tensor


class Program(Data, frozen=True, kw_only=True):
    """All that one rank does."""

    rank: int
    buffers: tuple[Buffer, ...]
    ops: tuple[Op, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def nbytes(self, view: View) -> int:
        """Return the size of a view in bytes."""
        return math.prod(view.shape) * DTYPE_BYTES[self.buffers[view.buffer].dtype]

    def dtype(self, view: View) -> Dtype:
        """Return the data type of a view."""
        return self.buffers[view.buffer].dtype


class Communicator(Data, frozen=True, kw_only=True):
    """A named partition of (some) ranks into groups; the order within a group is the order of collectives."""

    name: str
    groups: tuple[tuple[int, ...], ...]

    def group_of(self, rank: int) -> tuple[int, ...]:
        """Return the group that ``rank`` belongs to; raises InputError if it belongs to none."""
        for group in self.groups:
            if rank in group:
                return group
        raise InputError(f"rank {rank} belongs to no group of communicator {self.name!r}: {self.groups}")

    def position(self, rank: int) -> int:
        """Return which member of its group ``rank`` is."""
        return self.group_of(rank).index(rank)


class Claims(Data, frozen=True, kw_only=True):
    """FLOPs and bytes by the paper, over all ranks; ``check`` compares the ops with them."""

    attention_flops: int
    gemm_flops: int = 0
    wire_bytes: int
    source: str


class Header(Data, frozen=True, kw_only=True):
    """What stands above the programs of all ranks."""

    name: str
    workload: Workload
    mesh: Mesh
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Of the method, by name."""
    communicators: tuple[Communicator, ...] = ()
    claims: Claims | None = None


class _Document(Data, frozen=True, kw_only=True):
    """A schedule as JSON."""

    header: Header
    programs: tuple[Program, ...]


class Schedule:
    """A header and, per rank, a program that is built when first asked for. Both players play this object."""

    def __init__(self, header: Header, build: Callable[[int], Program]) -> None:
        self.header = header
        self._build = build
        self._programs: dict[int, Program] = {}

    @property
    def num_ranks(self) -> int:
        """P, the number of ranks."""
        return self.header.mesh.size

    def program(self, rank: int) -> Program:
        """Return what ``rank`` does; built on the first call, the same object ever after."""
        if rank not in self._programs:
            self._programs[rank] = self._build(rank)
        return self._programs[rank]

    @property
    def programs(self) -> list[Program]:
        """The programs of all ranks, in their order."""
        return [self.program(rank) for rank in range(self.num_ranks)]

    def communicator(self, name: str) -> Communicator:
        """Return the communicator of that name; raises InputError with the names there are."""
        for communicator in self.header.communicators:
            if communicator.name == name:
                return communicator
        names = ", ".join(c.name for c in self.header.communicators) or "none"
        raise InputError(f"schedule {self.header.name!r} has no communicator {name!r}: it declares {names}")

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the JSON form, 16 hexadecimal digits: the same ops in the same order on the same views."""
        return hashlib.sha256(self.to_json()).hexdigest()[:16]

    def to_json(self) -> bytes:
        """Return the whole schedule as JSON; dependencies are left out, since reading derives them again."""
        return msgspec.json.encode(_Document(header=self.header, programs=tuple(self.programs)))

    @staticmethod
    def from_json(data: bytes) -> Schedule:
        """Return the schedule that ``to_json`` wrote; raises InputError if it is none."""
        try:
            document = msgspec.json.decode(data, type=_Document)
        except msgspec.DecodeError as error:
            raise InputError(f"not a schedule in JSON: {error}") from error
        if len(document.programs) != document.header.mesh.size:
            raise InputError(f"{len(document.programs)} programs for {document.header.mesh.size} ranks")
        return Schedule(document.header, document.programs.__getitem__)


def require_checked(given: object) -> None:
    """Raise InputError for a schedule that was not checked: both players start from what ``check`` found.

    They do not call it themselves: a proof takes longer than a simulation, and one serves as many as are wanted.
    """
    if isinstance(given, Schedule):
        raise InputError(
            f"schedule {given.header.name!r} is not proved: give check(schedule), of sim.schedule.proof.check"
        )
