"""Context-parallel groups of several sizes, as FlexSP (arXiv:2412.01523) and ByteScale (arXiv:2502.21231) form them.

A document gets as many ranks as its work and its tokens need, and no more: short ones stay whole on one rank and move
nothing, long ones are cut in paired chunks over a group. FlexSP solves for the groups; here longest-first packing does.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.base.errors import InputError
from sim.batches.batch import Batch
from sim.batches.blocks import between, written
from sim.batches.counting import Ints, pairs_kept
from sim.batches.planned import Planned, require_ranks, timed
from sim.schedule.ir.plan import Plan

Floats = NDArray[np.float64]


class GroupOptions(NamedTuple):
    """Options of the planner of groups."""

    divisions: int = 4
    memory_imbalance: float = 0.2
    """By which a rank may exceed the mean number of tokens, where documents can be cut so."""
    powers_of_two: bool = False
    """Whether groups have 1, 2, 4, … ranks only, as systems with prepared communicators do."""


def groups(batch: Batch, num_ranks: int, options: GroupOptions = GroupOptions()) -> Planned:  # noqa: B008 - frozen
    """Return a plan with a group of ranks of its own size for each document.

    Any mask; chunks are paired for causal ones. Raises InputError for options out of range.
    """
    require_ranks(num_ranks)
    if options.memory_imbalance < 0:
        raise InputError(f"`memory_imbalance` {options.memory_imbalance}: expected 0 or more")
    return timed("groups", "blocks", lambda: _plan(batch, num_ranks, options))


def _plan(batch: Batch, num_ranks: int, options: GroupOptions) -> Plan:
    spans = batch.spans
    work = pairs_kept(spans, spans, batch.rectangles)
    room = np.full(num_ranks, (1 + options.memory_imbalance) * batch.num_tokens / num_ranks)
    load = np.zeros(num_ranks)
    edges: list[Ints] = [np.zeros(0, dtype=np.int64)] * len(spans)
    homes = list(edges)
    share = float(work.sum()) / num_ranks
    for document in np.argsort(-work, kind="stable").tolist():
        span = spans[document]
        ranks = _group(math.ceil(float(work[document]) / share), span.size, load, room, options.powers_of_two)
        chunks = np.linspace(0, span.size, 2 * len(ranks) + 1 if len(ranks) > 1 else 2).astype(np.int64)
        paired = np.concatenate([ranks, ranks[::-1]])[: len(chunks) - 1]
        filled = np.diff(chunks) > 0
        edges[document] = span.start + np.append(chunks[:-1][filled], span.size)
        homes[document] = paired[filled]
        load[ranks] += work[document] / len(ranks)
        room -= np.bincount(homes[document], weights=np.diff(edges[document]), minlength=num_ranks)
    begin, end = (np.concatenate([found[cut] for found in edges]) for cut in (slice(-1), slice(1, None)))
    home = np.concatenate(homes)
    blocks = between(batch, begin, end, np.repeat(np.arange(len(spans)), [len(found) for found in homes]))
    return written(blocks, home, home[blocks.queries], num_ranks, options.divisions)


def _group(wanted: int, tokens: int, load: Floats, room: Floats, powers_of_two: bool) -> Ints:
    """Return the ranks of a document: as few as its work asks for and as have room, those with the least work."""
    most = len(load)
    sizes = [1 << bit for bit in range(most.bit_length())] if powers_of_two else range(1, most + 1)
    order = np.argsort(load, kind="stable")
    for size in sizes:
        if size < min(wanted, sizes[-1]):
            continue
        fitting = order[room[order] >= tokens / size]
        if len(fitting) >= size:
            return np.sort(fitting[:size])
    return np.sort(np.argsort(-room, kind="stable")[: sizes[-1]])  # nowhere is room: most of what there is
