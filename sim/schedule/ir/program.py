"""The intermediate representation: a Schedule is data that says what happens on every rank, never how long it takes.

    Schedule ── program(rank) ──> Program ── ops, each on a stream, reading and writing Views of Buffers

Dependencies are derived from overlapping views (``dependencies``), never typed, and not part of the JSON form. The list
order of a program's ops, over all streams, is the order in which the host issues them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np

from sim.base.errors import InputError, ScheduleError
from sim.base.garbage import garbage_collection_off
from sim.base.kept import kept
from sim.schedule.ir.columns import DIMS, INT, Array, Columns, columns_of, edges, joined
from sim.schedule.ir.declare import rebound
from sim.schedule.ir.forms import Form, Formed, formed
from sim.schedule.ir.masks import Span, Tokens
from sim.schedule.ir.ops import Communication, Exchange, Message, Op
from sim.schedule.ir.views import Buffer, Data, View
from sim.schedule.ir.written import Pieces
from sim.words.mesh import Mesh
from sim.words.workload import DTYPE_BYTES, Dtype, Workload


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

    def rebound(self, number: Mapping[int, int] | Sequence[int], layers: int = 0) -> Port:
        """Return the port on another buffer, ``number[old]``, so many layers later."""
        view = View(number[self.view.buffer], self.view.slices)
        return msgspec.structs.replace(self, view=view, layer=self.layer + layers)


@dataclass(frozen=True, eq=False)
class Fragment:
    """Ops that are written once and called many times, over buffers that a call gives and buffers of the call's own.

    Buffers are numbered from 0, those that are given first. Layers count from that of the call.
    """

    given: tuple[Buffer, ...]
    """What the call has to give, each another buffer."""
    own: tuple[Buffer, ...]
    ops: tuple[Op, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    buffer_layers: Mapping[int, int] = field(default_factory=dict)
    """By the number of a buffer the layer that follows its name, where one does."""
    op_layers: Mapping[int, int] = field(default_factory=dict)
    """By the number of an op the layer that follows its label, where one does."""
    alike: Fragment | None = None
    """Another rank's, on the same ops and buffers, from which it differs in the tokens and heads of ports only."""

    @property
    def shared(self) -> Fragment:
        """What stands for all fragments that are alike: what does not depend on the tokens of ports is found there."""
        return self.alike or self

    @property
    def peers(self) -> list[int]:
        """The ranks that its messages come from and go to, one after the other."""
        return [some.peer for op in self.ops if isinstance(op, Exchange) for some in (*op.sends, *op.recvs)]

    def like(self, other: Fragment) -> bool:
        """Return whether another rank's fragment does the same on the same buffers, whatever the tokens of ports."""
        return (
            [(port.tensor, port.layer, port.view) for port in (*self.inputs, *self.outputs)]
            == [(port.tensor, port.layer, port.view) for port in (*other.inputs, *other.outputs)]
            and len(self.inputs) == len(other.inputs)
            and (self.buffer_layers, self.op_layers) == (other.buffer_layers, other.op_layers)
            and (self.given, self.own, self.ops) == (other.given, other.own, other.ops)
        )

    @cached_property
    def columns(self) -> Columns:
        """Its ops as arrays; raises OverflowError for boxes that have no place in one."""
        of = self.shared.alone
        return columns_of(self.formed) if of is self else of.columns

    @cached_property
    def boxes(self) -> Array:
        """(buffers, 2 * DIMS): the edges of its own buffers; raises OverflowError where one has more dimensions."""
        if self.alike:
            return self.alike.boxes
        return np.array([edges((0, extent) for extent in one.shape) for one in self.own], INT).reshape(-1, 2 * DIMS)

    @cached_property
    def communication(self) -> list[int]:
        """Which of its ops are communication."""
        forms, which, _ = self.formed
        return np.flatnonzero(np.array([isinstance(form.op, Communication) for form in forms], bool)[which]).tolist()

    @cached_property
    def digest(self) -> bytes:
        """A digest of ``columns`` and ``boxes``; raises OverflowError where there are none."""
        if self.alike:
            return self.alike.digest
        arrays = (self.columns.stream, self.columns.access_ends, self.columns.accesses, self.boxes)
        found = hashlib.blake2b(repr((self.columns.streams, self.columns.syncs, list(map(len, arrays)))).encode())
        for array in arrays:
            found.update(np.ascontiguousarray(array).data)
        return found.digest()

    @cached_property
    def formed(self) -> Formed:
        """Its ops by their forms."""
        of, inputs = self.shared.alone, {port.view.buffer: port.tensor for port in self.inputs}
        return formed(self.ops, self.own, inputs) if of is self else of.formed

    @cached_property
    def alone(self) -> Fragment:
        """The same, given nothing: all buffers are its own. Names leave out layers."""
        if not (self.given or self.buffer_layers or self.op_layers):
            return self
        return Fragment((), (*self.given, *self.own), self.ops, self.inputs, self.outputs)

    @cached_property
    def written(self) -> frozenset[int]:
        """Which of the buffers that it is given it writes to."""
        if self.alike:
            return self.alike.written
        count = len(self.given)
        return frozenset(view.buffer for op in self.ops for view in op.writes if view.buffer < count)

    @cached_property
    def overwritten(self) -> frozenset[int]:
        """Which of the buffers that it is given it writes to as a whole before it uses any of them: what they held
        does not matter.
        """
        if self.alike:
            return self.alike.overwritten
        found, used = set(), set(range(len(self.given), len(self.given) + len(self.own)))
        for op in self.ops:
            used.update([view.buffer for view in op.reads])
            for view in op.writes:
                if view.buffer not in used and view.shape == self.given[view.buffer].shape:
                    found.add(view.buffer)
                used.add(view.buffer)
        return frozenset(found)

    def of_replica(self, ranks: int, sequences: int, rows: Mapping[str, int]) -> Fragment:
        """Return what a replica does in its place whose ranks and sequences are numbered so many later; itself where it
        names none. ``rows`` says by tensor how many later those of weights are, 0 where it does not.
        """
        buffers = (*self.given, *self.own)

        def port(one: Port) -> Port:
            if "b" not in buffers[one.view.buffer].dims:  # a weight, which is of no sequence
                later = rows.get(one.tensor, 0)
                tokens = tuple([span.moved(later) for span in one.tokens])
                return msgspec.structs.replace(one, tokens=tokens) if later else one
            return msgspec.structs.replace(one, batch=one.batch.moved(sequences))

        def messages(some: tuple[Message, ...]) -> tuple[Message, ...]:
            return tuple(Message(message.peer + ranks, message.view) for message in some)

        def op(one: Op) -> Op:
            if not isinstance(one, Exchange):
                return one
            return msgspec.structs.replace(one, sends=messages(one.sends), recvs=messages(one.recvs))

        if not (self.inputs or self.outputs or any(isinstance(one, Exchange) for one in self.ops)):
            return self
        inputs, outputs = (tuple(map(port, ports)) for ports in (self.inputs, self.outputs))
        return dataclasses.replace(self, ops=tuple(map(op, self.ops)), inputs=inputs, outputs=outputs, alike=None)

    def program(self, rank: int, layer: int = 0) -> Program:
        """Return a program that does nothing else, of a rank, as of a layer; names leave out layers."""
        return Program.of_calls(rank, [Call(self.alone, layer=layer)])


class Call(NamedTuple):
    """A fragment on some buffers of a program."""

    fragment: Fragment
    given: tuple[int, ...] = ()
    """The numbers of what it is given, in the program."""
    first: int = 0
    """The number of the first of its own buffers; the others follow."""
    layer: int = 0

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers, in the program, of all buffers of the fragment."""
        own = range(self.first, self.first + len(self.fragment.own))
        return (*self.given, *own) if self.given else own

    @property
    def buffers(self) -> Iterable[Buffer]:
        """Its own buffers, as they are called in the program."""
        of_layer, before = self.fragment.buffer_layers, len(self.fragment.given)
        if not of_layer:
            return self.fragment.own
        buffers = list(self.fragment.own)
        for number, layer in of_layer.items():
            if number >= before:
                named = f"{buffers[number - before].name} {layer + self.layer}"
                buffers[number - before] = msgspec.structs.replace(buffers[number - before], name=named)
        return buffers

    @property
    def ops(self) -> Iterable[Op]:
        """Its ops, on buffers of the program."""
        ops, numbers = self.fragment.ops, self.numbers
        if self._is_as_written and not self.fragment.op_layers:
            return ops
        return [rebound(op, numbers, label=label) for op, label in zip(ops, self.labels, strict=True)]

    @property
    def labels(self) -> list[str]:
        """What its ops are called in the program."""
        labels = [op.label for op in self.fragment.ops]
        for number, layer in self.fragment.op_layers.items():
            labels[number] += f" {layer + self.layer}"
        return labels

    def ports(self, ports: Iterable[Port]) -> Iterable[Port]:
        """Return inputs or outputs of its fragment, on buffers of the program."""
        if self._is_as_written:
            return ports
        numbers = self.numbers
        return [port.rebound(numbers, self.layer) for port in ports]

    @property
    def _is_as_written(self) -> bool:
        """Whether its buffers have the numbers that they have in the fragment, and its layers, too."""
        return not (self.given or self.first or self.layer)


class Program:
    """All that one rank does: calls of fragments, one after the other. What is written without any is one call.

    Buffers, ops and ports of all calls, by their numbers in the program, are made when they are asked for.
    """

    def __init__(
        self,
        *,
        rank: int,
        buffers: Iterable[Buffer],
        ops: Iterable[Op],
        inputs: Iterable[Port] = (),
        outputs: Iterable[Port] = (),
    ) -> None:
        self.rank = rank
        self.calls: tuple[Call, ...] = (Call(Fragment((), tuple(buffers), tuple(ops), tuple(inputs), tuple(outputs))),)

    @staticmethod
    def of_calls(rank: int, calls: Iterable[Call]) -> Program:
        """Return the program of a rank that makes these calls."""
        program = Program(rank=rank, buffers=(), ops=())
        program.calls = tuple(calls)
        return program

    @property
    def num_ops(self) -> int:
        """How many ops all calls have."""
        return sum(len(call.fragment.ops) for call in self.calls)

    @property
    def communication(self) -> Iterator[tuple[int, Op]]:
        """Ops that are communication, with their numbers."""
        first = 0
        for call in self.calls:
            yield from ((first + at, self.ops[first + at]) for at in call.fragment.shared.communication)
            first += len(call.fragment.ops)

    @property
    def boxes(self) -> Array:
        """(buffers, 2 * DIMS): the edges of all buffers; raises OverflowError where one has more dimensions."""
        return np.concatenate([call.fragment.boxes for call in self.calls] or [np.zeros((0, 2 * DIMS), INT)])

    @property
    def columns(self) -> Columns:
        """All ops as arrays, put together when asked for, since they are large; raises OverflowError for boxes that
        have no place in one.
        """
        if len(self.calls) == 1:
            return self.calls[0].fragment.columns
        return joined([(call.fragment.columns, call.numbers) for call in self.calls])

    @cached_property
    def formed(self) -> Formed:
        """All ops by their forms, as of all that the program does with its buffers."""
        if len(self.calls) == 1:
            return self.calls[0].fragment.formed
        return formed(self.ops, self.buffers, {port.view.buffer: port.tensor for port in self.inputs})

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """All buffers; views name them by their place here."""
        return tuple(chain.from_iterable(call.buffers for call in self.calls))

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """All ops, in the order of their issue."""
        return tuple(chain.from_iterable(call.ops for call in self.calls))

    @cached_property
    def inputs(self) -> tuple[Port, ...]:
        """What comes from outside."""
        return tuple(port for call in self.calls for port in call.ports(call.fragment.inputs))

    @cached_property
    def outputs(self) -> tuple[Port, ...]:
        """What is left for outside."""
        return tuple(port for call in self.calls for port in call.ports(call.fragment.outputs))

    def replace(self, **changes: Any) -> Program:
        """Return a program with other buffers, ops or ports, or of another rank, in one call."""
        return Program(**{**_fields(self), **changes})

    def of_replica(self, ranks: int, sequences: int, rows: Mapping[str, int] = {}) -> Program:
        """Return what the rank does that has its place in a replica whose ranks and sequences come so many later, and
        the rows of weights of some tensors, too.
        """
        fragments = {call.fragment: call.fragment for call in self.calls}
        fragments = {one: one.of_replica(ranks, sequences, rows) for one in fragments}
        calls = (call._replace(fragment=fragments[call.fragment]) for call in self.calls)
        return Program.of_calls(self.rank + ranks, calls)

    def to_json(self) -> bytes:
        """Return the program as JSON, by all of its ops."""
        return b"".join(Pieces().of(self))

    @staticmethod
    def from_json(data: bytes) -> Program:
        """Return the program that ``to_json`` wrote."""
        return _read(msgspec.json.decode(data, type=_Written))

    def nbytes(self, view: View) -> int:
        """Return the size of a view in bytes."""
        return math.prod(view.shape) * DTYPE_BYTES[self.buffers[view.buffer].dtype]

    def dtype(self, view: View) -> Dtype:
        """Return the data type of a view."""
        return self.buffers[view.buffer].dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and _fields(self) == _fields(other)

    __hash__ = None  # type: ignore[assignment]


@kept
def alone(form: Form) -> Program:
    """Return a program that does nothing but the op of a form, on buffers of its own: what holds of that op in it holds
    of all ops of this form.
    """
    return Program(rank=0, buffers=form.buffers, ops=[form.op])


class _Written(Data, frozen=True, kw_only=True):
    """A program as JSON, in the order of ``Pieces``."""

    rank: int
    buffers: tuple[Buffer, ...]
    ops: tuple[Op, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


def _fields(program: Program) -> dict[str, Any]:
    return {name: getattr(program, name) for name in _Written.__struct_fields__}


def _read(written: _Written) -> Program:
    return Program(**msgspec.structs.asdict(written))


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

    def within(self, ranks: int) -> Communicator:
        """Return what is left of it among the first so many ranks."""
        cut = (tuple([rank for rank in group if rank < ranks]) for group in self.groups)
        return Communicator(name=self.name, groups=tuple(filter(None, cut)))

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
    """A schedule as JSON; of one that is replicated the programs of its first replica."""

    header: Header
    programs: tuple[_Written, ...]


class Schedule:
    """A header and, per rank, a program that is built when first asked for. Both players play this object.

    Where it is replicated, ``build`` makes the programs of the first data-parallel replica, and all others do the same
    as that one, each with ranks and sequences of its own.
    """

    def __init__(
        self,
        header: Header,
        build: Callable[[int], Program],
        *,
        replicated: bool = False,
        whole: Schedule | None = None,
    ) -> None:
        self.header = header
        self.replicated = replicated and header.mesh.dp > 1
        self.whole = whole or self
        """The schedule that this one is the first replicas of; else itself."""
        self._build = build
        self._programs: dict[int, Program] = {}
        self._fragments: dict[tuple[int, ...], list[Fragment]] = {}
        """Those of all programs, by their sizes and peers; of those that are alike the first."""

    @property
    def num_ranks(self) -> int:
        """P, the number of ranks."""
        return self.header.mesh.size

    def program(self, rank: int) -> Program:
        """Return what ``rank`` does; built on the first call, the same object ever after. Raises ScheduleError for a
        rank that the mesh, or the builder, does not have.
        """
        if rank not in self._programs:
            if not 0 <= rank < self.num_ranks:
                raise ScheduleError(f"schedule {self.header.name!r} has no rank {rank}: its mesh has {self.num_ranks}")
            self._programs[rank] = self._built(rank)
        return self._programs[rank]

    def _built(self, rank: int) -> Program:
        mesh = self.header.mesh
        replica, role = mesh.replica(rank), mesh.role(rank)
        if not (self.replicated and replica):
            return self._shared(self._build(rank))
        return self.program(role).of_replica(rank - role, replica * self.header.workload.batch)

    def _shared(self, program: Program) -> Program:
        """Return a program on the ops and buffers of other ranks' fragments, where its own are alike."""
        found: dict[Fragment, Fragment] = {}
        for call in program.calls:
            own = call.fragment
            if own in found:
                continue
            known = self._fragments.setdefault((len(own.given), len(own.own), len(own.ops), *own.peers), [])
            other = next((one for one in known if own.like(one)), None)
            if other is None:
                known.append(own)
            elif (own.inputs, own.outputs) == (other.inputs, other.outputs):
                own = other
            else:
                own = dataclasses.replace(other, inputs=own.inputs, outputs=own.outputs, alike=other.shared)
            found[call.fragment] = own
        calls = [Call(found[of], given, first, layer) for of, given, first, layer in program.calls]
        return Program.of_calls(program.rank, calls)

    @property
    def programs(self) -> list[Program]:
        """The programs of all ranks, in their order."""
        if len(self._programs) == self.num_ranks:
            return [self._programs[rank] for rank in range(self.num_ranks)]
        with garbage_collection_off():
            return [self.program(rank) for rank in range(self.num_ranks)]

    def first(self, replicas: int) -> Schedule:
        """Return the schedule of the first so many replicas, which communicate among themselves only.

        Replicas have to lie outside all that is within one, see ``sim.schedule.derive.replicas``.
        """
        mesh = msgspec.structs.replace(self.header.mesh, dp=replicas)
        communicators = [communicator.within(mesh.size) for communicator in self.header.communicators]
        header = msgspec.structs.replace(self.header, mesh=mesh, communicators=tuple(communicators))
        return Schedule(header, self.program, whole=self)

    def communicator(self, name: str) -> Communicator:
        """Return the communicator of that name; raises InputError with the names there are."""
        for communicator in self.header.communicators:
            if communicator.name == name:
                return communicator
        names = ", ".join(c.name for c in self.header.communicators) or "none"
        raise InputError(f"schedule {self.header.name!r} has no communicator {name!r}: it declares {names}")

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the JSON form, 16 hexadecimal digits: the same ops in the same order on the same views. The first
        replicas of a schedule have that of the whole.
        """
        if self.whole is not self:
            return self.whole.hash
        digest = hashlib.sha256()
        for piece in self._pieces():
            digest.update(piece)
        return digest.hexdigest()[:16]

    def to_json(self) -> bytes:
        """Return the schedule as JSON, with the programs of one replica where the others do the same; dependencies are
        left out, since reading derives them again.
        """
        return b"".join(self._pieces())

    def _pieces(self) -> Iterator[bytes]:
        yield b'{"header":%b,"programs":[' % msgspec.json.encode(self.header)
        pieces = Pieces()
        for place, rank in enumerate(self.header.mesh.first_replica if self.replicated else range(self.num_ranks)):
            yield b"," if place else b""
            yield from pieces.of(self.program(rank))
        yield b"]}"

    @staticmethod
    def from_json(data: bytes) -> Schedule:
        """Return the schedule that ``to_json`` wrote; raises InputError if it is none."""
        try:
            document = msgspec.json.decode(data, type=_Document)
        except msgspec.DecodeError as error:
            raise InputError(f"not a schedule in JSON: {error}") from error
        mesh, count = document.header.mesh, len(document.programs)
        replicated = count == mesh.size // mesh.dp
        if count != mesh.size and not replicated:
            raise InputError(f"{count} programs for {mesh.size} ranks")
        programs = dict(zip(mesh.first_replica if replicated else range(count), document.programs, strict=True))
        return Schedule(document.header, lambda rank: _read(programs[rank]), replicated=replicated)


def require_checked(given: object) -> None:
    """Raise InputError for a schedule that was not checked: both players start from what ``check`` found.

    They do not call it themselves: a proof takes longer than a simulation, and one serves as many as are wanted.
    """
    if isinstance(given, Schedule):
        raise InputError(
            f"schedule {given.header.name!r} is not proved: give check(schedule), of sim.schedule.proof.check"
        )
