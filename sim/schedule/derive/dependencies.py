"""Which op waits for which: derived from overlapping views, so that no builder can forget an edge."""

from __future__ import annotations

import ctypes
import hashlib
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from sim.native.library import UnavailableError, load
from sim.schedule.ir.columns import INT, Array, Columns
from sim.schedule.ir.ops import HostSync
from sim.schedule.ir.program import Program
from sim.schedule.ir.views import Slices


class Dependencies:
    """Of one program, per op: what it depends on. As lists, and as arrays, each made of the other when asked for."""

    def __init__(self, streams: tuple[str, ...], **found: Any) -> None:
        """Take the streams of a program and all lists, or all arrays."""
        self.streams = streams
        """The streams in the order of the columns of ``known_array``."""
        self.__dict__.update(found)

    @cached_property
    def data(self) -> list[tuple[int, ...]]:
        """Every op whose views conflict with this one's and that no later conflicting write stands for: read after
        write, write after read, write after write.
        """
        return _lists(self.data_array)

    @cached_property
    def waits(self) -> list[tuple[int, ...]]:
        """Of ``data`` only what stream order and other waits do not imply: the events that a runtime waits for. For a
        HostSync the last op of each stream that it names.
        """
        return _lists(self.waits_array)

    @cached_property
    def known(self) -> list[dict[str, int]]:
        """Per stream the last op that has surely ended when this op begins."""
        rows = self.known_array.tolist()
        return [{name: ended for name, ended in zip(self.streams, row, strict=True) if ended >= 0} for row in rows]

    @cached_property
    def data_array(self) -> Ragged:
        """``data`` as an array."""
        return _ragged(self.data)

    @cached_property
    def waits_array(self) -> Ragged:
        """``waits`` as an array."""
        return _ragged(self.waits)

    @cached_property
    def known_array(self) -> Array:
        """``known`` as an array (ops, streams); -1 where none is known to have ended."""
        rows = [[ended.get(name, -1) for name in self.streams] for ended in self.known]
        return np.array(rows, INT).reshape(-1, len(self.streams))


class Ragged(NamedTuple):
    """Lists of numbers, one after the other."""

    ends: Array
    items: Array


def _lists(found: Ragged) -> list[tuple[int, ...]]:
    items, ends = found.items.tolist(), found.ends.tolist()
    return [tuple(items[begin:end]) for begin, end in pairwise([0, *ends])]


def _ragged(lists: list[tuple[int, ...]]) -> Ragged:
    ends = np.cumsum([len(found) for found in lists], dtype=INT)
    return Ragged(ends, np.fromiter(chain.from_iterable(lists), INT, int(ends[-1]) if lists else 0))


def derive(program: Program) -> Dependencies:
    """Return the dependencies of all ops of a program: by the compiled library where there is one."""
    return derive_compiled(program) or derive_plainly(program)


class _Program(ctypes.Structure):
    """See derive.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_ops", "num_streams", "num_buffers")),
        *((name, ctypes.c_void_p) for name in ("stream", "is_sync", "sync_ends", "sync_streams", "access_ends")),
        *((name, ctypes.c_void_p) for name in ("accesses", "whole")),
    ]


class _Found(ctypes.Structure):
    """See derive.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("data_room", "waits_room", "num_data", "num_waits")),
        *((name, ctypes.c_void_p) for name in ("data_ends", "data", "waits_ends", "waits", "known")),
    ]


def derive_compiled(program: Program) -> Dependencies | None:
    """Return the dependencies by ``sim/native/derive.c``; None where there is no compiler, or sizes are beyond it."""
    try:
        library = load("derive")
        key = _key(program)
        if found := _DERIVED.get(key):
            return found
        columns, whole = program.columns, program.boxes
    except (UnavailableError, OverflowError):
        return None
    if np.any((columns.accesses["buffer"] < 0) | (columns.accesses["buffer"] >= len(whole))):
        return None  # what is no program is not for C
    found = _derive(library, columns, whole)
    if found is not None:
        _DERIVED[key] = found
    return found


def _key(program: Program) -> bytes:
    """Return a digest of all that dependencies are derived from; raises OverflowError where there are no arrays."""
    digest = hashlib.blake2b()
    for fragment, given, first, _ in program.calls:
        digest.update(fragment.digest)
        digest.update(repr((given, first)).encode())
    return digest.digest()


_DERIVED: WeakValueDictionary[bytes, Dependencies] = WeakValueDictionary()
"""All that are in use, by a digest of what they were derived from: ranks that do the same share them."""


def _derive(library: ctypes.CDLL, columns: Columns, whole: Array) -> Dependencies | None:
    """Return dependencies by the compiled library; None where sizes are beyond it."""
    number = {name: at for at, name in enumerate(columns.streams)}
    count, width = len(columns.stream), len(columns.streams)
    is_sync, sync_counts = np.zeros(count, np.uint8), np.zeros(count, INT)
    named: list[int] = []
    for at, names in columns.syncs:
        used = [number[name] for name in names if name in number]
        is_sync[at], sync_counts[at] = 1, len(used)
        named += used
    given = [columns.stream, is_sync, np.cumsum(sync_counts, dtype=INT), np.array(named, INT)]
    given += [columns.access_ends, columns.accesses, whole]
    asked = _Program(count, width, len(whole), *(array.ctypes.data for array in given))
    ends, known = np.empty((2, count), INT), np.empty((count, width), INT)
    data, waits = np.empty(4 * count, INT), np.empty(2 * count, INT)
    while True:
        room = (len(data), len(waits), 0, 0)
        pointers = (array.ctypes.data for array in (ends[0], data, ends[1], waits, known))
        found = _Found(*room, *pointers)
        if library.derive(ctypes.byref(asked), ctypes.byref(found)):
            raise MemoryError(f"no memory for the dependencies of {count} ops")
        if found.num_data <= len(data) and found.num_waits <= len(waits):
            break
        if max(found.num_data, found.num_waits) > np.iinfo(INT).max:
            return None
        data, waits = np.empty(found.num_data, INT), np.empty(found.num_waits, INT)
    return Dependencies(
        columns.streams,
        data_array=Ragged(ends[0], data[: found.num_data].copy()),
        waits_array=Ragged(ends[1], waits[: found.num_waits].copy()),
        known_array=known,
    )


def derive_plainly(program: Program) -> Dependencies:
    """Return the dependencies without any library; what the compiled one is held against."""
    # Per buffer: the writes that are still visible, and the reads of what they wrote.
    writers: list[dict[Slices, int]] = [{} for _ in program.buffers]
    readers: list[list[tuple[Slices, int]]] = [[] for _ in program.buffers]
    whole = [tuple([(0, extent) for extent in buffer.shape]) for buffer in program.buffers]
    data: list[tuple[int, ...]] = []
    for index, op in enumerate(program.ops):
        found: set[int] = set()
        reads, writes = op.reads, op.writes
        for view in reads:
            slices = view.slices
            for box, other in writers[view.buffer].items():
                if box == slices or overlap(box, slices):
                    found.add(other)
        for view in writes:
            slices = view.slices
            for box, other in writers[view.buffer].items():
                if box == slices or overlap(box, slices):
                    found.add(other)
            for box, other in readers[view.buffer]:
                if box == slices or overlap(box, slices):
                    found.add(other)
        for view in reads:
            readers[view.buffer].append((view.slices, index))
        for view in writes:
            slices, number = view.slices, view.buffer
            if slices == whole[number]:  # most writes, and a write of all covers all
                writers[number], readers[number] = {slices: index}, []
                continue
            writers[number] = {box: i for box, i in writers[number].items() if not _covers(slices, box)}
            readers[number] = [read for read in readers[number] if not _covers(slices, read[0])]
            writers[number][slices] = index
        data.append(tuple(sorted(found)))
    waits, known = _reduced(program, data)
    return Dependencies(tuple(dict.fromkeys([op.stream for op in program.ops])), data=data, waits=waits, known=known)


def _reduced(program: Program, data: list[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], list[dict[str, int]]]:
    """Return ``waits`` and ``known`` (see Dependencies), by vector clocks over the streams."""
    streams = [op.stream for op in program.ops]
    waits: list[tuple[int, ...]] = []
    known: list[dict[str, int]] = []
    last: dict[str, int] = {}
    host: dict[str, int] = {}  # what the host knows to have ended, by its last synchronisation

    def learn(clock: dict[str, int], ended: int) -> None:
        for stream, index in known[ended].items():
            if clock.get(stream, -1) < index:
                clock[stream] = index
        stream = streams[ended]
        if clock.get(stream, -1) < ended:
            clock[stream] = ended

    for index, op in enumerate(program.ops):
        if not host and op.stream in last:  # nothing but its predecessor tells it anything yet
            before = last[op.stream]
            clock = {**known[before], op.stream: before}
        else:
            clock = dict(host)
            if op.stream in last:
                learn(clock, last[op.stream])
        if isinstance(op, HostSync):
            needed = [last[stream] for stream in op.streams if stream in last]
            for other in needed:
                learn(clock, other)
            host = dict(clock)
        else:
            needed = []
            for other in reversed(data[index]):
                if clock.get(streams[other], -1) < other:
                    needed.append(other)
                    learn(clock, other)
        waits.append(tuple(needed))
        known.append(clock)
        last[op.stream] = index
    return waits, known


def overlap(a: Slices, b: Slices) -> bool:
    """Return whether two boxes of one buffer share an element."""
    if a == b:
        return True
    for (start, stop), (other_start, other_stop) in zip(a, b, strict=True):
        if start >= other_stop or other_start >= stop:
            return False
    return True


def _covers(outer: Slices, inner: Slices) -> bool:
    if outer == inner:
        return True
    return all(start <= s and e <= stop for (start, stop), (s, e) in zip(outer, inner, strict=True))
