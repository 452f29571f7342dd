"""The ops of all ranks as arrays: what each is, which it waits for, and the messages between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.schedule.derive.dependencies import Dependencies
from sim.schedule.derive.matching import SideKind, Transfers
from sim.schedule.ir.exchanges import of_each
from sim.schedule.ir.forms import Form
from sim.schedule.ir.ops import Exchange
from sim.schedule.ir.program import Program
from sim.schedule.ir.views import Buffer, Slices
from sim.schedule.proof.many import Ints


class Lists(NamedTuple):
    """Lists of numbers, one after the other."""

    ends: Ints
    items: Ints

    @property
    def counts(self) -> Ints:
        """How many each has."""
        return np.diff(self.ends, prepend=0)

    def of(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the items of some lists, and of each in which of these it is."""
        ends = self.ends[rows]
        counts = ends - np.where(rows > 0, self.ends[rows - 1], 0)
        which = np.repeat(np.arange(len(rows)), counts)
        return self.items[np.arange(len(which)) + np.repeat(ends - np.cumsum(counts), counts)], which

    def any_of(self, flags: NDArray[np.bool_], rows: Ints) -> NDArray[np.bool_]:
        """Return of some lists whether any of its items has a flag."""
        items, which = self.of(rows)
        return np.bincount(which[flags[items]], minlength=len(rows)) > 0


class OpColumns(NamedTuple):
    """The ops of all ranks, numbered through; buffers are, too."""

    first: Ints
    """(ranks + 1,): the number of each rank's first op, and that of all."""
    first_buffer: Ints
    rank: Ints
    """Of each op."""
    stream: Ints
    """Of each op, of those of all ranks."""
    form: Ints
    """Of each op."""
    forms: list[Form]
    views: Ints
    """Where the views of each op begin among those of all."""
    buffers: Ints
    """Of each view."""
    waits: Lists
    """The ops that each one waits for."""


def op_columns(programs: Sequence[Program], dependencies: Sequence[Dependencies]) -> OpColumns:
    """Return the ops of some programs, and what each depends on."""
    first, first_buffer, first_stream, views, waited = [0], [0], [0], [0], [0]
    numbers: dict[Form, int] = {}
    which, starts, buffers, streams, waits, wait_ends = ([np.zeros(0, np.int64)] for _ in range(6))
    for program, found in zip(programs, dependencies, strict=True):
        formed, columns = program.formed, program.columns
        own = np.array([numbers.setdefault(form, len(numbers)) for form in formed.forms], np.int64)
        which.append(own[formed.which])
        starts.append(formed.starts + views[-1])
        buffers.append(np.array(formed.buffers, np.int64) + first_buffer[-1])
        streams.append(columns.stream + first_stream[-1])
        waits.append(found.waits_array.items + first[-1])
        wait_ends.append(found.waits_array.ends + waited[-1])
        waited.append(waited[-1] + len(found.waits_array.items))
        first.append(first[-1] + len(formed.which))
        first_buffer.append(first_buffer[-1] + len(program.buffers))
        views.append(views[-1] + len(formed.buffers))
        first_stream.append(first_stream[-1] + len(columns.streams))
    return OpColumns(
        np.array(first),
        np.array(first_buffer),
        np.repeat(np.arange(len(programs)), np.diff(first)),
        np.concatenate(streams),
        np.concatenate(which),
        list(numbers),
        np.concatenate(starts),
        np.concatenate(buffers),
        Lists(np.concatenate(wait_ends), np.concatenate(waits)),
    )


class MessageKind(NamedTuple):
    """What is sent of a buffer, and where it is received."""

    sent: Slices
    received: Slices
    source: Buffer
    target: Buffer

    @property
    def is_whole(self) -> bool:
        """Whether all of one buffer goes to all of another like it."""
        every = tuple([(0, extent) for extent in self.source.shape])
        alike = (self.source.dims, self.source.shape) == (self.target.dims, self.target.shape)
        return alike and self.sent == self.received == every


class Messages(NamedTuple):
    """All transfers, and the messages of each, one transfer after the other."""

    source: Ints
    """Of each transfer the op that sends."""
    target: Ints
    first: Ints
    """Of each transfer its first message."""
    counts: Ints
    """Of each transfer how many it has."""
    of_op: Lists
    """Per op the transfers that it takes part in."""
    out: Ints
    """Of each message the buffer that it comes from."""
    into: Ints
    kind: Ints
    kinds: list[MessageKind]


def messages_of(transfers: Transfers, columns: OpColumns) -> Messages:
    """Return the messages of transfers."""
    sent, taken, sides = transfers.sent, transfers.taken, transfers.kinds
    source, target = columns.first[sent.rank] + sent.op, columns.first[taken.rank] + taken.op
    kinds: dict[MessageKind, int] = {}
    pairs, which = np.unique(sent.kind * len(sides) + taken.kind, return_inverse=True)
    rows = []
    for pair in pairs.tolist():
        one, other = sides[pair // len(sides)], sides[pair % len(sides)]
        between = zip(one.places, other.places, _views(one), _views(other), strict=True)
        rows.append(
            [
                (out, into, kinds.setdefault(MessageKind(box, other_box, buffer, other_buffer), len(kinds)))
                for out, into, (box, buffer), (other_box, other_buffer) in between
            ]
        )
    of_transfer, found = of_each(which, rows, 3)
    out, into, kind = found.T
    both = np.concatenate([source, target])
    order = np.argsort(both, kind="stable")
    ends = np.cumsum(np.bincount(both, minlength=columns.first[-1]))
    counts = np.bincount(of_transfer, minlength=len(source))
    return Messages(
        source,
        target,
        np.cumsum(counts) - counts,
        counts,
        Lists(ends, order % max(len(source), 1)),
        columns.buffers[columns.views[source][of_transfer] + out],
        columns.buffers[columns.views[target][of_transfer] + into],
        kind,
        list(kinds),
    )


def _views(side: SideKind) -> list[tuple[Slices, Buffer]]:
    """Return the box, and the buffer, of each message of a side."""
    op = side.form.op
    assert isinstance(op, Exchange)
    views = [message.view for message in (*op.sends, *op.recvs)]
    return [(views[place].slices, side.form.buffers[views[place].buffer]) for place in side.places]
