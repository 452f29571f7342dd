"""Static context parallelism as plans: the same shards whatever the documents, as frameworks lay them out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim.base.errors import InputError, LengthError, unknown
from sim.batches.batch import Batch
from sim.batches.counting import Ints, pairs_kept
from sim.batches.planned import Planned, Transport, require_ranks, timed
from sim.schedule.ir.layout import LAYOUTS
from sim.schedule.ir.masks import Span, Tokens
from sim.schedule.ir.plan import Plan, Task
from sim.words.options import LayoutName


def ring(batch: Batch, num_ranks: int, layout: LayoutName = "contiguous") -> Planned:
    """Return ring attention (arXiv:2310.01889): division t attends to the keys of rank r - t.

    Layouts: contiguous, zigzag, striped. Raises LengthError where the layout does not divide the sequence.
    """
    require_ranks(num_ranks)
    name = "ring" if layout == "contiguous" else layout
    return timed(name, "ring", lambda: _shards(batch, num_ranks, layout, "ring"))


def all_gather(batch: Batch, num_ranks: int, layout: LayoutName = "zigzag") -> Planned:
    """Return context parallelism by all-gather of keys and values (Llama 3, arXiv:2407.21783 §3.3.2): one division.

    Raises LengthError where the layout does not divide the sequence.
    """
    require_ranks(num_ranks)
    return timed("all-gather", "all-gather", lambda: _shards(batch, num_ranks, layout, "all-gather"))


def permuted(batch: Batch, order: Sequence[int], num_ranks: int, transport: Transport = "all-gather") -> Planned:
    """Return a layout of your own: ``order`` lists all positions as a framework shards them, rank r has the r-th of P
    equal parts. Keys and values travel by all-gather or ring.

    Raises InputError for what is no permutation, LengthError where P does not divide the sequence.
    """
    require_ranks(num_ranks)
    if transport not in ("all-gather", "ring"):
        raise unknown("transport", transport, ("all-gather", "ring"), "`transport`")
    return timed("permuted", transport, lambda: _sharded(batch, _parts(batch.num_tokens, order, num_ranks), transport))


def _parts(seq: int, order: Sequence[int], num_ranks: int) -> tuple[Tokens, ...]:
    if len(order) != seq:
        raise InputError(f"`order` has {len(order)} positions, the batch {seq} tokens: expected each token once")
    positions = np.asarray(order)
    if positions.dtype.kind not in "iu":
        raise InputError(f"`order` has what is no position: expected whole numbers of 0 to {seq - 1}, each once")
    outside = positions[(positions < 0) | (positions >= seq)]
    if len(outside):
        raise InputError(f"`order` has position {outside[0]}: expected 0 to {seq - 1}")
    times = np.bincount(positions, minlength=seq)
    if times.max() > 1:
        doubled, missing = int(times.argmax()), int(times.argmin())
        raise InputError(f"`order` has token {doubled} {times[doubled]} times, token {missing} not at all")
    if seq % num_ranks:
        raise LengthError(seq, num_ranks)
    return tuple(_spans(part) for part in np.split(positions, num_ranks))


def _spans(positions: Ints) -> Tokens:
    """Return positions as one span where they step alike, else as runs of neighbours."""
    steps = np.diff(positions)
    if len(steps) and steps[0] > 1 and (steps == steps[0]).all():
        step = int(steps[0])
        return (Span(int(positions[0]), int(positions[-1]) + step, step),)
    cuts = np.flatnonzero(steps != 1) + 1
    first, last = positions[np.append(0, cuts)].tolist(), positions[np.append(cuts, len(positions)) - 1].tolist()
    return tuple(Span(start, stop + 1) for start, stop in zip(first, last, strict=True))


def _shards(batch: Batch, num_ranks: int, layout: LayoutName, transport: Transport) -> Plan:
    return _sharded(batch, LAYOUTS[layout](batch.num_tokens, num_ranks), transport)


def _sharded(batch: Batch, shards: tuple[Tokens, ...], transport: Transport) -> Plan:
    num_ranks = len(shards)
    everything = (Span(0, batch.num_tokens),)
    tasks = []
    for rank in range(num_ranks):
        if transport == "ring":
            sources = [(shards[(rank - step) % num_ranks], step) for step in range(num_ranks)]
        else:
            sources = [(everything, 0)]
        tasks.append([Task(q, k, step) for keys, step in sources for q in shards[rank] for k in keys])
    return Plan(shards, without_empty(tasks, batch))


def without_empty(tasks: list[list[Task]], batch: Batch) -> tuple[tuple[Task, ...], ...]:
    """Return per rank the tasks of which the mask keeps a pair."""
    flat = [task for one in tasks for task in one]
    kept = pairs_kept([t.queries for t in flat], [t.keys for t in flat], batch.rectangles).tolist()
    counts = iter(kept)
    return tuple(tuple(task for task in one if next(counts)) for one in tasks)
