"""Programs as arrays: made once per fragment, put one after the other per program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sim.base.kept import kept
from sim.schedule.ir.forms import Form, Formed
from sim.schedule.ir.ops import HostSync

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


def columns_of(ops: Formed) -> Columns:
    """Return the columns of ops; raises OverflowError for boxes that have no place in an array."""
    streams: dict[str, int] = {}
    of_forms = np.array([streams.setdefault(form.op.stream, len(streams)) for form in ops.forms], INT)
    rows = [_accesses(form) for form in ops.forms]
    counts = np.array([len(own) for own in rows], INT)[ops.which]
    ends = np.cumsum(counts, dtype=INT)
    first = np.cumsum([0, *map(len, rows)])[ops.which]
    which = np.repeat(first - (ends - counts), counts) + np.arange(counts.sum())
    accesses = together(rows, ACCESS).take(which)  # which copies rows of several fields 10 times as fast as an index
    accesses["buffer"] = np.array(ops.buffers, INT)[accesses["buffer"] + np.repeat(ops.starts, counts)]
    syncs = {number: form.op.streams for number, form in enumerate(ops.forms) if isinstance(form.op, HostSync)}
    return Columns(
        streams=tuple(streams),
        stream=of_forms[ops.which],
        syncs=tuple((at, syncs[form]) for at, form in enumerate(ops.which.tolist()) if form in syncs),
        access_ends=ends,
        accesses=accesses,
    )


@kept
def _accesses(form: Form) -> Array:
    """Return what a form reads and writes, in place of buffers the places of its views."""
    rows = [(place, 0, edges(form.boxes[place])) for place in form.reads]
    rows += [(place, 1, edges(form.boxes[place])) for place in form.writes]
    found = np.zeros(len(rows), ACCESS)
    if rows:
        found["buffer"], found["writes"], found["box"] = (list(column) for column in zip(*rows, strict=True))
    return found


def edges(slices: Iterable[tuple[int, int]]) -> list[int]:
    """Return the starts and stops of a box, of as many dimensions as arrays have."""
    found = [edge for bounds in slices for edge in bounds]
    if len(found) > 2 * DIMS:
        raise OverflowError(f"{len(found) // 2} dimensions, more than {DIMS}")
    return found + [0, 1] * (DIMS - len(found) // 2)


def joined(parts: Sequence[tuple[Columns, Sequence[int]]]) -> Columns:
    """Return columns one after the other, each with the numbers that its buffers have there."""
    numbers: dict[str, int] = {}
    of_columns: dict[int, Array] = {}  # its ops' streams, by what they are called here
    syncs: list[tuple[int, tuple[str, ...]]] = []
    first = 0
    for columns, _ in parts:
        if id(columns) not in of_columns:
            own = np.array([numbers.setdefault(name, len(numbers)) for name in columns.streams], INT)
            of_columns[id(columns)] = own[columns.stream]
        syncs += [(first + at, names) for at, names in columns.syncs]
        first += len(columns.stream)
    counts = [len(columns.accesses) for columns, _ in parts]
    accesses = together([columns.accesses for columns, _ in parts], ACCESS)
    buffers = np.fromiter(chain.from_iterable(numbers for _, numbers in parts), INT)
    accesses["buffer"] = buffers[accesses["buffer"] + _each([len(numbers) for _, numbers in parts], counts)]
    ends = together([columns.access_ends for columns, _ in parts])
    return Columns(
        streams=tuple(numbers),
        stream=together([of_columns[id(columns)] for columns, _ in parts]),
        syncs=tuple(syncs),
        access_ends=ends + _each(counts, [len(columns.stream) for columns, _ in parts]),
        accesses=accesses,
    )


def _each(sizes: Sequence[int], counts: Sequence[int]) -> Array:
    """Return the sum of all sizes before each part, once for each of its rows."""
    return np.repeat(np.cumsum([0, *sizes], dtype=INT)[:-1], counts)


def together(parts: Iterable[Array], dtype: np.dtype[Any] | type[Any] = INT) -> Array:
    """Return one array of arrays of a type; of none an empty one. Rows of several fields are put together as bytes,
    since numpy compares their fields array by array.
    """
    kind = np.dtype(dtype)
    some = [part if part.dtype == kind else part.astype(kind) for part in parts if len(part)]
    if not some:
        return np.zeros(0, kind)
    if kind.fields is None:
        return np.concatenate(some)
    return np.concatenate([part.view(np.uint8) for part in some]).view(kind)
