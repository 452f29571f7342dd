"""Bin packing of blocks, in the manner of FCP: each block of queries goes where there is least to do.

Queries stay where their tokens live and are attended there; keys and values come by irregular point-to-point messages,
only those that the mask keeps.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from sim.base.errors import InputError
from sim.batches.batch import Batch
from sim.batches.blocks import Blocks, cut, fitting_size, written
from sim.batches.counting import Ints
from sim.batches.planned import Planned, require_ranks, timed
from sim.schedule.ir.plan import Plan


class FcpOptions(NamedTuple):
    """Options of the planner of bins."""

    block_size: int | None = None
    """Tokens; None is the smallest of 512, 1024, … with at most ``most_blocks`` pairs of blocks."""
    most_blocks: int = 1 << 16
    divisions: int = 4
    memory_imbalance: float = 0.2
    """By which a rank may exceed the mean number of tokens, unless blocks are too large."""


def fcp(batch: Batch, num_ranks: int, options: FcpOptions = FcpOptions()) -> Planned:  # noqa: B008 - frozen
    """Return a plan in which blocks, those with most pairs first, go to the rank with the fewest pairs that has room.

    Any mask. Raises InputError for options out of range.
    """
    require_ranks(num_ranks)
    if options.memory_imbalance < 0:
        raise InputError(f"`memory_imbalance` {options.memory_imbalance}: expected 0 or more")
    return timed("fcp-style", "blocks", lambda: _plan(batch, num_ranks, options))


def _plan(batch: Batch, num_ranks: int, options: FcpOptions) -> Plan:
    blocks = cut(batch, options.block_size or fitting_size(batch, options.most_blocks))
    home = _packed(blocks, num_ranks, (1 + options.memory_imbalance) * batch.num_tokens / num_ranks)
    return written(blocks, home, home[blocks.queries], num_ranks, options.divisions)


def _packed(blocks: Blocks, num_ranks: int, room: float) -> Ints:
    """Return (n,): the rank of each token block."""
    work = np.bincount(blocks.queries, weights=blocks.pairs, minlength=len(blocks.begin))
    home = np.zeros(len(work), dtype=np.int64)
    free = [room] * num_ranks
    least = [(0.0, rank) for rank in range(num_ranks)]
    sizes = blocks.tokens.tolist()
    for block in np.argsort(-work, kind="stable").tolist():
        full = []
        while least and free[least[0][1]] < sizes[block]:
            full.append(heapq.heappop(least))
        if least:
            load, rank = heapq.heappop(least)
        else:  # no rank has room for so large a block: the one with most room takes it
            load, rank = full.pop(max(range(len(full)), key=lambda index: free[full[index][1]]))
        home[block] = rank
        free[rank] -= sizes[block]
        for entry in (*full, (load + float(work[block]), rank)):
            heapq.heappush(least, entry)
    return home
