"""Programs as arrays: made once per fragment, put one after the other per program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sim.schedule.ir.ops import HostSync, Op
from sim.schedule.ir.views import Slices, View

Array: TypeAlias = NDArray[Any]

DIMS = 4
"""Dimensions of a box in an array."""
INT = np.int32
ACCESS = np.dtype([("buffer", INT), ("writes", INT), ("box", INT, 2 * DIMS)])
"""A view that an op reads or writes; of a box the start and stop of each dimension, of dimensions that there are not
0 and 1."""


class Columns(NamedTuple):
    """What ops read, write and wait for, one row per op but where it says otherwise."""

    streams: tuple[str, ...]
    """Those of the ops, in the order of their first op."""
    stream: Array
    """Number of its stream."""
    syncs: tuple[tuple[int, tuple[str, ...]], ...]
    """The ops that are host syncs, each with the streams that it names."""
    access_ends: Array
    """Up to which access it goes."""
    accesses: Array
    """Of all ops, each op's reads before its writes, in the order of its fields."""


def columns_of(ops: Sequence[Op]) -> Columns:
    """Return the columns of ops; raises OverflowError for boxes that have no place in an array."""
    streams: dict[str, int] = {}
    views: list[View] = []
    counts: list[int] = []
    for op in ops:
        reads, writes = op.reads, op.writes
        views += reads
        views += writes
        counts += (len(reads), len(writes))
    stream = [streams.setdefault(op.stream, len(streams)) for op in ops]
    numbers: dict[Slices, int] = {}
    box = [numbers.setdefault(view.slices, len(numbers)) for view in views]
    accesses = np.zeros(len(views), ACCESS)
    if views:
        accesses["buffer"] = [view.buffer for view in views]
        accesses["writes"] = np.repeat(np.tile([0, 1], len(ops)), counts)
        accesses["box"] = np.array([edges(slices) for slices in numbers], INT)[box]
    return Columns(
        streams=tuple(streams),
        stream=np.array(stream, INT),
        syncs=tuple((at, op.streams) for at, op in enumerate(ops) if isinstance(op, HostSync)),
        access_ends=np.cumsum(counts, dtype=INT)[1::2].copy(),
        accesses=accesses,
    )


def edges(slices: Iterable[tuple[int, int]]) -> list[int]:
    """Return the starts and stops of a box, of as many dimensions as arrays have."""
    found = [edge for bounds in slices for edge in bounds]
    if len(found) > 2 * DIMS:
        raise OverflowError(f"{len(found) // 2} dimensions, more than {DIMS}")
    return found + [0, 1] * (DIMS - len(found) // 2)


def joined(parts: Sequence[tuple[Columns, Sequence[int]]]) -> Columns:
    """Return columns one after the other, each with the numbers that its buffers have there."""
    streams: dict[str, int] = {}
    stream, syncs, accesses = [], [], []
    first = 0
    for columns, numbers in parts:
        own = np.array([streams.setdefault(name, len(streams)) for name in columns.streams], INT)
        stream.append(own[columns.stream])
        syncs += [(first + at, names) for at, names in columns.syncs]
        moved = columns.accesses.copy()
        moved["buffer"] = np.asarray(numbers, INT)[moved["buffer"]]
        accesses.append(moved)
        first += len(columns.stream)
    counts = np.concatenate([np.diff(columns.access_ends, prepend=0) for columns, _ in parts])
    return Columns(
        streams=tuple(streams),
        stream=np.concatenate(stream),
        syncs=tuple(syncs),
        access_ends=np.cumsum(counts, dtype=INT),
        accesses=np.concatenate(accesses),
    )
