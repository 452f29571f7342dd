"""The intermediate representation: a Schedule is data that says what happens on every rank, never how long it takes.

    Schedule ── program(rank) ──> Program ── ops, each on a stream, reading and writing Views of Buffers

Dependencies are derived from overlapping views (``dependencies``), never typed, and not part of the JSON form. The list
order of a program's ops, over all streams, is the order in which the host issues them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np

from sim.base.errors import InputError, ScheduleError
from sim.base.garbage import garbage_collection_off
from sim.base.kept import kept
from sim.schedule.ir.columns import DIMS, INT, Array, Columns, joined
from sim.schedule.ir.forms import Form, Formed, formed
from sim.schedule.ir.fragments import Call, Fragment, Port
from sim.schedule.ir.ops import Op
from sim.schedule.ir.renaming import Renaming
from sim.schedule.ir.views import Buffer, Data, View
from sim.schedule.ir.written import Pieces
from sim.words.mesh import Axis, Mesh
from sim.words.workload import DTYPE_BYTES, Dtype, Workload


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
        self.begins: tuple[int, ...] = ()
        """Of a training step the first op of each pass of a micro-batch through a chunk, in the order of its stage's
        timetable, and the first one behind them; empty where that is not known, as of what is read."""
        self.calls: tuple[Call, ...] = (Call(Fragment((), tuple(buffers), tuple(ops), tuple(inputs), tuple(outputs))),)

    @staticmethod
    def of_calls(rank: int, calls: Iterable[Call], begins: tuple[int, ...] = ()) -> Program:
        """Return the program of a rank that makes these calls; ``begins`` as of programs."""
        program = Program.__new__(Program)
        program.rank, program.calls, program.begins = rank, tuple(calls), begins
        return program

    @staticmethod
    def of_fragment(fragment: Fragment, rank: int, layer: int = 0) -> Program:
        """Return the program of a rank that does nothing but a fragment, as of a layer; names leave out layers."""
        return Program.of_calls(rank, [Call(fragment.alone, layer=layer)])

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
        fragments, which = self.parts
        return joined([fragment.columns for fragment in fragments], which, *self.numbers)

    @cached_property
    def parts(self) -> tuple[list[Fragment], Array]:
        """The fragments that are called, of those that are alike one, and which of them each call is of."""
        called = [call.fragment.shared for call in self.calls]
        place = {fragment: number for number, fragment in enumerate(dict.fromkeys(called))}
        return list(place), np.array([place[fragment] for fragment in called], np.int64)

    @property
    def numbers(self) -> tuple[Array, Array]:
        """The numbers of the buffers of each call, one call after the other, and how many each has."""
        given = np.array([len(call.given) for call in self.calls], np.int64)
        sizes = given + np.array([len(call.fragment.own) for call in self.calls], np.int64)
        place = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        firsts = np.array([call.first for call in self.calls], np.int64)
        found = place + np.repeat(firsts - given, sizes)
        found[place < np.repeat(given, sizes)] = list(chain.from_iterable([call.given for call in self.calls]))
        return found, sizes

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
    def ops(self) -> Sequence[Op]:
        """All ops, in the order of their issue."""
        if len(self.calls) == 1 and self.calls[0].ops is self.calls[0].fragment.ops:
            return self.calls[0].fragment.ops
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

    def renamed(self, other: Renaming) -> Program:
        """Return what another rank does in a place like that of this one, whose number is ``other.ranks`` later. Raises
        LookupError for tokens that this rank does not have.
        """
        fragments = {call.fragment: call.fragment for call in self.calls}
        fragments = {one: one.renamed(other) for one in fragments}
        calls = (call._replace(fragment=fragments[call.fragment]) for call in self.calls)
        return Program.of_calls(self.rank + other.ranks, calls, self.begins)

    def numbered(self, place: Sequence[int], known: dict[Fragment, Fragment]) -> Program:
        """Return the program with other numbers of ranks, ``place[old]``; fragments are numbered once."""
        calls = [call._replace(fragment=call.fragment.numbered(place, known)) for call in self.calls]
        return Program.of_calls(place[self.rank], calls, self.begins)

    def to_json(self) -> bytes:
        """Return the program as JSON, by all of its ops."""
        return b"".join(Pieces().of(self.rank, self.calls))

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

    def among(self, ranks: Iterable[int]) -> Communicator:
        """Return what is left of it among some ranks."""
        some = set(ranks)
        cut = (tuple([rank for rank in group if rank in some]) for group in self.groups)
        return Communicator(name=self.name, groups=tuple(filter(None, cut)))

    def numbered(self, place: Sequence[int]) -> Communicator:
        """Return it with other numbers of its ranks, ``place[old]``."""
        groups = tuple([tuple([place[rank] for rank in group]) for group in self.groups])
        return Communicator(name=self.name, groups=groups)

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
    shares: int | msgspec.UnsetType = msgspec.UNSET
    """How many shares of weights there are where the mesh does not say it: of all ranks on one device."""

    @property
    def members(self) -> int:
        """How many ranks of each tensor-parallel group have shares of weights."""
        return self.shares or self.mesh.tp


class _Document(Data, frozen=True, kw_only=True):
    """A schedule as JSON; of one that is replicated the programs of its first replica."""

    header: Header
    programs: tuple[_Written, ...]


class Later(NamedTuple):
    """How shards of weights of data-parallel replicas follow each other."""

    rows: Mapping[str, int] = {}
    """By tensor how many rows of a weight behind those of the replica before it those are that a replica owns; none
    where all own the same, or where no two replicas differ in nothing else."""
    written_as: tuple[int, ...] = ()
    """By replica the one from which it differs in nothing else, or itself where it may differ in more from all: its
    shards are cut off where a tensor ends, or have what one member of a tensor-parallel group counts for all. Empty
    where all are like the first."""


class Schedule:
    """A header and, per rank, a program that is built when first asked for. Both players play this object.

    Where it is replicated, ``build`` makes the programs of the first data-parallel replica, and all others do the same
    as that one, each with ranks and sequences of its own; and where ``later`` names tensors with rows of weights of its
    own, too. Then that may say of which others it makes them as well. Otherwise it makes all.
    """

    def __init__(
        self,
        header: Header,
        build: Callable[[int], Program],
        *,
        replicated: bool = False,
        later: Callable[[], Later] = Later,
        kind: Callable[[int], Hashable] | None = None,
        outline: Callable[[int], Hashable] | None = None,
        whole: Schedule | None = None,
        order: Sequence[int] = (),
        place: Sequence[int] = (),
        finds_alike: bool = True,
    ) -> None:
        self.header = header
        self.replicated = replicated and header.mesh.dp > 1
        self._later = later
        self.kind = kind or (header.mesh.role if self.replicated else int)
        """Of what kind the program of a rank is: of ranks that differ in nothing but their replica, or their member of
        a tensor-parallel group, those of one kind do the same, each with tokens, peers and parts of weights of its own,
        whose numbers no time and no size depends on. Where nobody says it, replicas are equal if one is built for all.
        """
        self.outline = outline or self.kind
        """The same, but for which elements of a gradient a rank counts in norms: these take it a little time."""
        self.whole = whole or self
        """The schedule that this one has some ranks of; else itself."""
        self.order, self.place = order, place
        """The ranks of that, first those that this one has, and the number of each in that order."""
        self._build = build
        self._finds_alike = finds_alike and self.whole is self
        """Whether fragments of ranks that are alike are yet to be found; those of another schedule's are known."""
        self._programs: dict[int, Program] = {}
        self._fragments: dict[Hashable, list[Fragment]] = {}
        """Those of all programs, by what is soon told of them; of those that are alike the first."""
        self._alike: dict[Fragment, Fragment] = {}
        """By those that a builder made what calls have in their place."""

    def by_outline(self) -> Schedule:
        """Return the schedule as one whose ranks are of one kind where they are of one ``outline``: played, the first
        of them stands for all.
        """
        found = copy(self)
        found.whole, found.kind = found, self.outline
        return found

    def like(self, header: Header, build: Callable[[int], Program]) -> Schedule:
        """Return another schedule, of fragments of this one, of the same ranks, of which others may be left out as
        here.
        """
        whole = None if self.whole is self else self.whole
        return Schedule(header, build, whole=whole, order=self.order, place=self.place, finds_alike=False)

    def role(self, rank: int) -> int:
        """Return which rank of the whole schedule's first replica has the place of a rank."""
        return self.whole.header.mesh.role(self.order[rank] if self.order else rank)

    @cached_property
    def _own_later(self) -> Later:
        return self._later() if self.header.mesh.dp > 1 else Later()

    @property
    def rows_later(self) -> Mapping[str, int]:
        """As of ``Later``."""
        return self._own_later.rows

    @cached_property
    def written_as(self) -> tuple[int, ...]:
        """By replica the one whose programs it has, with ranks, sequences and rows of its own."""
        dp = self.header.mesh.dp
        if not (self.replicated or self.rows_later):
            return tuple(range(dp))
        return (self.rows_later and self._own_later.written_as) or (0,) * dp

    @property
    def written(self) -> Sequence[int]:
        """The replicas whose programs ``build`` makes."""
        return sorted(set(self.written_as))

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
        replica = mesh.replica(rank)
        later = replica - self.written_as[replica] if replica else 0  # how replicas follow the first need not be known
        if not later:
            return self._shared(self._build(rank))
        ranks, rows = later * mesh.replica_stride, {name: later * each for name, each in self.rows_later.items()}
        own = self.program(rank - ranks).renamed(Renaming(ranks, later * self.header.workload.batch, rows))
        return self._shared(own) if rows else own

    def _shared(self, program: Program) -> Program:
        """Return a program on the ops and buffers of other ranks' fragments, where its own are alike."""
        if not self._finds_alike:
            return program
        found = self._alike
        for call in program.calls:
            own = call.fragment
            if own in found:
                continue
            known = self._fragments.setdefault(_told_by(own), [])
            other = next((one for one in known if own.like(one)), None)
            if other is None:
                known.append(own)
            elif (own.inputs, own.outputs, own.ops) == (other.inputs, other.outputs, other.ops):
                own = other
            else:
                own = dataclasses.replace(
                    other,
                    ops=other.ops if own.ops == other.ops else own.ops,
                    inputs=own.inputs,
                    outputs=own.outputs,
                    alike=other.shared,
                    peers_later=other.shared.later(own),
                )
            found[call.fragment] = own
        calls = [Call(found[of], given, first, layer) for of, given, first, layer in program.calls]
        return Program.of_calls(program.rank, calls, program.begins)

    @property
    def programs(self) -> list[Program]:
        """The programs of all ranks, in their order."""
        if len(self._programs) == self.num_ranks:
            return [self._programs[rank] for rank in range(self.num_ranks)]
        with garbage_collection_off():
            return [self.program(rank) for rank in range(self.num_ranks)]

    def fragments(self, ranks: Iterable[int]) -> set[Fragment]:
        """Return the fragments that some ranks call, of those that are alike one."""
        return {call.fragment.shared for rank in ranks for call in self.program(rank).calls}

    def at(self, places: Mapping[Axis, Sequence[int]]) -> Schedule:
        """Return the schedule of the ranks at some places along some axes, rising, which communicate among themselves
        only. What they do has to stand for all, see ``sim.schedule.derive.roles``.
        """
        whole = self.header.mesh
        mesh = msgspec.structs.replace(whole, **{axis: len(some) for axis, some in places.items()})
        some = whole.at(places)
        left = set(some)
        order = [*some, *(rank for rank in range(whole.size) if rank not in left)]
        place = sorted(range(whole.size), key=order.__getitem__)
        communicators = [one.among(some).numbered(place) for one in self.header.communicators]
        shares = self.header.members if "tp" in places else self.header.shares
        header = msgspec.structs.replace(self.header, mesh=mesh, communicators=tuple(communicators), shares=shares)
        known: dict[Fragment, Fragment] = {}

        def program(number: int) -> Program:
            of_whole = self.program(order[number])
            return of_whole if some == list(range(mesh.size)) else of_whole.numbered(place, known)

        return Schedule(header, program, whole=self, order=order, place=place)

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
        ranks of a schedule have that of the whole.
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
            program = self.program(rank)
            yield from pieces.of(program.rank, program.calls)
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


def _told_by(fragment: Fragment) -> Hashable:
    """Return what fragments that are alike have in common, and most others do not: sizes, the first label, and peers,
    counted from the first.
    """
    given, own, ops, peers = fragment.given, fragment.own, fragment.ops, fragment.peers
    sizes = len(given), len(own), len(ops)
    return *sizes, *[op.label for op in ops[:1]], *[peer - peers[0] for peer in peers]


def require_checked(given: object) -> None:
    """Raise InputError for a schedule that was not checked: both players start from what ``check`` found.

    They do not call it themselves: a proof takes longer than a simulation, and one serves as many as are wanted.
    """
    if isinstance(given, Schedule):
        raise InputError(
            f"schedule {given.header.name!r} is not proved: give check(schedule), of sim.schedule.proof.check"
        )
