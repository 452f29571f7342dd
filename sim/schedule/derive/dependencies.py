"""Which op waits for which: derived from overlapping views, so that no builder can forget an edge."""

from __future__ import annotations

from typing import NamedTuple

from sim.schedule.ir.ops import HostSync
from sim.schedule.ir.program import Program

Slices = tuple[tuple[int, int], ...]


class Dependencies(NamedTuple):
    """Of one program, per op: what it depends on."""

    data: list[tuple[int, ...]]
    """Every op whose views conflict with this one's and that no later conflicting write stands for: read after write,
    write after read, write after write."""
    waits: list[tuple[int, ...]]
    """Of ``data`` only what stream order and other waits do not imply: the events that a runtime waits for. For a
    HostSync the last op of each stream that it names."""
    known: list[dict[str, int]]
    """Per stream the last op that has surely ended when this op begins."""


def derive(program: Program) -> Dependencies:
    """Return the dependencies of all ops of a program."""
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
    return Dependencies(data, *_reduced(program, data))


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
