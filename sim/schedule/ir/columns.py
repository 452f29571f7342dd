"""Programs as arrays: made once per fragment, put one after the other per program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    parts = [_accesses(form) for form in ops.forms]
    at, counts = rows(list(map(len, parts)), ops.which)
    accesses = together(parts, ACCESS).take(at)  # which copies rows of several fields 10 times as fast as an index
    accesses["buffer"] = np.array(ops.buffers, INT)[accesses["buffer"] + np.repeat(ops.starts, counts)]
    syncs = {number: form.op.streams for number, form in enumerate(ops.forms) if isinstance(form.op, HostSync)}
    return Columns(
        streams=tuple(streams),
        stream=of_forms[ops.which],
        syncs=tuple((at, syncs[form]) for at, form in enumerate(ops.which.tolist()) if form in syncs),
        access_ends=np.cumsum(counts, dtype=INT),
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


def joined(parts: Sequence[Columns], which: Array, buffers: Array, sizes: Array) -> Columns:
    """Return the columns of calls, one after the other, ``which`` of the parts each has; ``buffers`` are the numbers of
    their buffers, of each call as many as ``sizes`` say.
    """
    numbers: dict[str, int] = {}
    of_parts = [np.array([numbers.setdefault(name, len(numbers)) for name in part.streams], INT) for part in parts]
    at_ops, ops = rows([len(part.stream) for part in parts], which)
    at_accesses, accesses_of = rows([len(part.accesses) for part in parts], which)
    accesses = together([part.accesses for part in parts], ACCESS).take(at_accesses)
    accesses["buffer"] = buffers[accesses["buffer"] + np.repeat(np.cumsum(sizes) - sizes, accesses_of)]
    ends, before = together([part.access_ends for part in parts])[at_ops], np.cumsum(accesses_of) - accesses_of
    first = np.cumsum(ops) - ops
    return Columns(
        streams=tuple(numbers),
        stream=together([own[part.stream] for own, part in zip(of_parts, parts, strict=True)])[at_ops],
        syncs=tuple(
            [
                (begin + at, names)
                for begin, of in zip(first.tolist(), which.tolist(), strict=True)
                for at, names in parts[of].syncs
            ]
        ),
        access_ends=ends + np.repeat(before, ops).astype(INT),
        accesses=accesses,
    )


def rows(lengths: Sequence[int], which: Array) -> tuple[Array, Array]:
    """Return where the rows of some parts are in an array that has all parts once, and how many each of some has:
    ``which`` parts are to follow each other, of parts of these lengths.
    """
    of_parts = np.array(lengths, np.int64)
    counts = of_parts[which]
    begins = (np.cumsum(of_parts) - of_parts)[which]
    return np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum()), counts


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
