"""Fragments: ops that are written once and called many times, and the ports through which a program meets the outside.

Program ── calls ──> Fragment ── ops over the buffers that a call gives, and over its own
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from sim.schedule.ir import stretch_columns
from sim.schedule.ir.columns import DIMS, INT, Array, Columns, columns_of, edges
from sim.schedule.ir.declare import rebound
from sim.schedule.ir.exchanges import Exchanges, exchanges_of
from sim.schedule.ir.forms import Formed, formed
from sim.schedule.ir.layout import num_tokens
from sim.schedule.ir.masks import Span, Tokens
from sim.schedule.ir.ops import AdamW, Communication, Exchange, HostAdamW, Message, Op, Rope
from sim.schedule.ir.renaming import Renaming
from sim.schedule.ir.stretches import Stretched
from sim.schedule.ir.views import Buffer, Data, View


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
    ops: Sequence[Op]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    buffer_layers: Mapping[int, int] = field(default_factory=dict)
    """By the number of a buffer the layer that follows its name, where one does."""
    op_layers: Mapping[int, int] = field(default_factory=dict)
    """By the number of an op the layer that follows its label, where one does."""
    alike: Fragment | None = None
    """Another rank's, on the same buffers, from which it differs in tokens only, those of ports and those by whose
    positions it turns, in heads of ports, and in the numbers of peers."""
    peers_later: int = 0
    """By how much later its peers are than those of ``alike``."""

    @property
    def shared(self) -> Fragment:
        """What stands for all fragments that are alike: what depends on neither tokens nor peers is found there."""
        return self.alike or self

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """The ranks that its messages come from and go to, one after the other."""
        if isinstance(self.ops, Stretched):
            return stretch_columns.peers_of(self.ops)
        return tuple([some.peer for op in self.ops if isinstance(op, Exchange) for some in (*op.sends, *op.recvs)])

    @cached_property
    def communicators(self) -> tuple[str, ...]:
        """Over which its ops communicate, each once."""
        some = (self.ops[at] for at in self.shared.communication)
        return tuple(dict.fromkeys(op.communicator for op in some if isinstance(op, Communication)))

    def as_of(self, rank: int) -> Hashable:
        """Return what it does, with peers counted from a rank: the same where others do the same."""
        turned = tuple([op.tokens for op in self.ops if isinstance(op, Rope)])
        peer = self.peers[0] - rank if self.peers else None
        return self.shared, peer, turned, self.inputs, self.outputs

    def later(self, other: Fragment) -> int:
        """Return by how much later the first peer of another rank's fragment is than that of this one."""
        return other.peers[0] - self.peers[0] if self.peers and other.peers else 0

    def like(self, other: Fragment) -> bool:
        """Return whether another rank's fragment does the same on the same buffers, whatever the tokens, and with peers
        that are all as much later.
        """
        return (
            [(port.tensor, port.layer, port.view) for port in (*self.inputs, *self.outputs)]
            == [(port.tensor, port.layer, port.view) for port in (*other.inputs, *other.outputs)]
            and len(self.inputs) == len(other.inputs)
            and (self.buffer_layers, self.op_layers) == (other.buffer_layers, other.op_layers)
            and (self.given, self.own) == (other.given, other.own)
            and (self.ops == other.ops or _alike(self.ops, other.ops, self.later(other)))
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
        known: dict[Buffer, int] = {}
        which = [known.setdefault(one, len(known)) for one in self.own]
        rows = np.array([edges((0, extent) for extent in one.shape) for one in known], INT).reshape(-1, 2 * DIMS)
        found: Array = rows[which] if which else rows
        return found

    @cached_property
    def communication(self) -> list[int]:
        """Which of its ops are communication."""
        forms, which, _ = self.formed
        return np.flatnonzero(np.array([isinstance(form.op, Communication) for form in forms], bool)[which]).tolist()

    @cached_property
    def exchanges(self) -> Exchanges:
        """Its Exchanges by their kinds."""
        if self.alike:
            return self.alike.exchanges
        if isinstance(self.ops, Stretched):
            return stretch_columns.exchanges_of(self.ops, self.formed)
        return exchanges_of(self.ops, self.formed)

    @cached_property
    def collectives(self) -> list[int]:
        """Which of its ops are collectives."""
        exchanges = set(self.exchanges.at.tolist())
        return [at for at in self.communication if at not in exchanges]

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
        if of is not self:
            return of.formed
        if isinstance(self.ops, Stretched):
            return stretch_columns.formed_of(self.ops, self.own, inputs)
        return formed(self.ops, self.own, inputs)

    @cached_property
    def alone(self) -> Fragment:
        """The same, given nothing: all buffers are its own. Names leave out layers."""
        if not (self.given or self.buffer_layers or self.op_layers):
            return self
        alike, buffers = self.alike.alone if self.alike else None, (*self.given, *self.own)
        return Fragment((), buffers, self.ops, self.inputs, self.outputs, alike=alike, peers_later=self.peers_later)

    @cached_property
    def written(self) -> frozenset[int]:
        """Which of the buffers that it is given it writes to."""
        if self.alike:
            return self.alike.written
        count = len(self.given)
        return frozenset(view.buffer for op in self.ops for view in op.writes if view.buffer < count)

    @cached_property
    def squares(self) -> tuple[int, ...]:
        """Which of the buffers that it is given it uses as the squares of an update's norm, and as nothing else."""
        if self.alike:
            return self.alike.squares
        found, others = set[int](), set[int]()
        for op in self.ops:
            used = [*op.reads, *op.writes]
            if isinstance(op, AdamW | HostAdamW):
                used.remove(op.squares)
                found.add(op.squares.buffer)
            others.update([view.buffer for view in used])
        return tuple(sorted(number for number in found - others if number < len(self.given)))

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

    def renamed(self, other: Renaming) -> Fragment:
        """Return what another rank does in a place like that of this one; itself where it names nothing that differs.
        Raises LookupError for tokens that this rank does not have.
        """
        buffers = (*self.given, *self.own)

        def port(one: Port) -> Port:
            if "b" not in buffers[one.view.buffer].dims:  # a weight, which is of no sequence
                later = other.rows.get(one.tensor, 0)
                tokens = tuple([span.moved(later) for span in one.tokens])
                return msgspec.structs.replace(one, tokens=tokens) if later else one
            batch, tokens = one.batch.moved(other.sequences), other.of_tokens(one.tokens)
            return msgspec.structs.replace(one, batch=batch, tokens=tokens)

        def op(one: Op) -> Op:
            if isinstance(one, Exchange) and other.ranks:
                return _moved(one, other.ranks)
            if isinstance(one, Rope) and other.tokens:
                return msgspec.structs.replace(one, tokens=other.of_tokens(one.tokens))
            return one

        inputs, outputs = (tuple(map(port, ports)) for ports in (self.inputs, self.outputs))
        ops = tuple(map(op, self.ops)) if self._names_places else self.ops
        if ops is self.ops and not (inputs or outputs):
            return self
        return dataclasses.replace(self, ops=ops, inputs=inputs, outputs=outputs, alike=None, peers_later=0)

    def numbered(self, place: Sequence[int], known: dict[Fragment, Fragment]) -> Fragment:
        """Return it with other numbers of peers, ``place[old]``; what has been numbered is kept in ``known``."""
        if not self.peers:
            return self
        if self not in known:
            alike = self.alike and self.alike.numbered(place, known)
            ops = tuple([_numbered(op, place) if isinstance(op, Exchange) else op for op in self.ops])
            found = dataclasses.replace(self, ops=ops, alike=alike)
            known[self] = dataclasses.replace(found, peers_later=alike.later(found)) if alike else found
        return known[self]

    @cached_property
    def _names_places(self) -> bool:
        """Whether an op names a peer, or positions."""
        return any(isinstance(one, Exchange | Rope) for one in self.ops)


def _alike(ops: Sequence[Op], others: Sequence[Op], later: int) -> bool:
    """Return whether ops differ in nothing but positions by which they turn as many tokens, and in peers, which are
    that much later.
    """
    return len(ops) == len(others) and all(
        one is other or one == other or _differ_in_places(one, other, later)
        for one, other in zip(ops, others, strict=True)
    )


def _differ_in_places(one: Op, other: Op, later: int) -> bool:
    if isinstance(one, Rope) and isinstance(other, Rope):
        as_many = num_tokens(one.tokens) == num_tokens(other.tokens)
        return as_many and msgspec.structs.replace(one, tokens=other.tokens) == other
    if isinstance(one, Exchange) and isinstance(other, Exchange):
        return _moved(one, later) == other
    return False


def _numbered(op: Exchange, place: Sequence[int]) -> Exchange:
    """Return an Exchange with other numbers of peers."""
    sends, recvs = (tuple([Message(place[peer], view) for peer, view in some]) for some in (op.sends, op.recvs))
    return msgspec.structs.replace(op, sends=sends, recvs=recvs)


def _moved(op: Exchange, ranks: int) -> Exchange:
    """Return an Exchange with peers that are so many later."""
    sends, recvs = (tuple([Message(peer + ranks, view) for peer, view in some]) for some in (op.sends, op.recvs))
    return msgspec.structs.replace(op, sends=sends, recvs=recvs)


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
