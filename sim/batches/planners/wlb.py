"""WLB-LLM's sharding of one micro-batch over context-parallel ranks (arXiv:2503.17924 §5): the cheaper of two.

Per sequence: the packed sequence in 2P chunks, rank r has r and 2P-1-r. Per document: every document in 2P chunks,
paired alike, so that work is equal whatever the lengths, at the price of short chunks. Keys and values come by
all-gather.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from sim.base.errors import InputError
from sim.batches.batch import Batch
from sim.batches.counting import Ints, pairs_in_band
from sim.batches.planned import Planned, require_ranks, timed
from sim.batches.seconds import KernelSeconds
from sim.schedule.ir.masks import Band, Span
from sim.schedule.ir.plan import Plan, Task

Sharding = Literal["sequence", "document"]
Choice = Literal["sequence", "document", "adaptive"]

TILE = 128
"""Query rows of a tile of FlashAttention (arXiv:2407.08608 §3.1): fewer take as long (arXiv:2503.17924, Fig. 10)."""


def padded_pairs(queries: Ints, keys: Ints, pairs: Ints) -> float:
    """Return pairs to attend with queries filled up to whole tiles: predicted latency in a unit of its own, for choices
    without a cost model.
    """
    del keys  # a full tile of keys costs in proportion
    tiles = -(-queries // TILE) * TILE
    return float((pairs * tiles / queries).sum())


class _Shards(NamedTuple):
    """Pieces of queries, each with the keys that it may attend, ordered by rank and position."""

    rank: Ints
    begin: Ints
    end: Ints
    first_key: Ints
    last_key: Ints


def wlb(
    batch: Batch, num_ranks: int, sharding: Choice = "adaptive", kernel_seconds: KernelSeconds = padded_pairs
) -> Planned:
    """Return WLB-LLM's plan: per-sequence or per-document sharding, or the one whose slowest rank is predicted faster.

    Raises InputError for masks other than one band for all documents: its shards are of causal documents.
    """
    require_ranks(num_ranks)
    band = _band(batch)
    planner = "wlb-llm" if sharding == "adaptive" else f"wlb-llm per {sharding}"
    return timed(planner, "all-gather", lambda: _plan(batch, band, num_ranks, sharding, kernel_seconds))


def predicted_seconds(
    batch: Batch, num_ranks: int, sharding: Sharding, kernel_seconds: KernelSeconds = padded_pairs
) -> float:
    """Return the predicted kernel latency of the slowest rank under one of the shardings."""
    band = _band(batch)
    return _slowest(_SHARDINGS[sharding](batch, band, num_ranks), band, num_ranks, kernel_seconds)


def _plan(batch: Batch, band: Band, ranks: int, sharding: Choice, kernel_seconds: KernelSeconds) -> Plan:
    if sharding != "adaptive":
        return _written(_SHARDINGS[sharding](batch, band, ranks), ranks)
    both = [shards(batch, band, ranks) for shards in _SHARDINGS.values()]
    return _written(min(both, key=lambda shards: _slowest(shards, band, ranks, kernel_seconds)), ranks)


def _band(batch: Batch) -> Band:
    bands = {one.band for one in batch.rectangles}
    if len(bands) != 1 or len(batch.rectangles) != len(batch.documents):
        raise InputError("WLB-LLM shards documents under one band each: use planner dcp for other masks")
    return bands.pop()


def _per_sequence(batch: Batch, band: Band, ranks: int) -> _Shards:
    edges = np.linspace(0, batch.num_tokens, 2 * ranks + 1).astype(np.int64)
    return _cut(batch, band, edges, np.minimum(np.arange(2 * ranks), 2 * ranks - 1 - np.arange(2 * ranks)))


def _per_document(batch: Batch, band: Band, ranks: int) -> _Shards:
    """2P equal chunks of each document; the tokens that remain go to the ranks in turn, one by one."""
    lengths = np.array(batch.documents, dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    chunk, chunks = lengths // (2 * ranks), 2 * ranks
    whole = np.flatnonzero(chunk)
    edges = starts[whole, None] + chunk[whole, None] * np.arange(chunks)
    paired = np.broadcast_to(np.minimum(np.arange(chunks), chunks - 1 - np.arange(chunks)), edges.shape)
    rest = lengths - chunk * chunks
    tail = np.repeat(starts + chunk * chunks - (np.cumsum(rest) - rest), rest) + np.arange(rest.sum())
    begins = np.concatenate([edges.ravel(), tail])
    order = np.argsort(begins, kind="stable")
    owner = np.concatenate([paired.ravel(), np.arange(len(tail)) % ranks])[order]
    return _cut(batch, band, np.append(begins[order], batch.num_tokens), owner)


_SHARDINGS: dict[Sharding, Callable[[Batch, Band, int], _Shards]] = {
    "sequence": _per_sequence,
    "document": _per_document,
}


def _cut(batch: Batch, band: Band, edges: Ints, owner: Ints) -> _Shards:
    """Return the pieces between neighbouring edges, cut where a document begins as well."""
    stops = np.cumsum(batch.documents)
    every = np.sort(np.concatenate([edges, stops]), kind="stable")  # timsort: two runs that are sorted
    every = every[np.append(True, every[1:] > every[:-1])]
    begin, end = every[:-1], every[1:]
    # Empty chunks, of more ranks than tokens, have the edges of their neighbours: the last that begins here counts.
    rank = owner[np.searchsorted(edges, begin, side="right") - 1]
    document = np.searchsorted(stops, begin, side="right")
    first, last = stops[document] - np.array(batch.documents)[document], stops[document]
    if band.left is not None:
        first = np.maximum(first, begin - band.left)
    if band.right is not None:
        last = np.minimum(last, end + band.right)
    order = np.argsort(rank, kind="stable")
    return _Shards(*(column[order] for column in (rank, begin, end, first, last)))


def _slowest(shards: _Shards, band: Band, ranks: int, kernel_seconds: KernelSeconds) -> float:
    pairs = pairs_in_band(shards.begin, shards.end, shards.first_key, shards.last_key, band)
    edges = np.searchsorted(shards.rank, np.arange(ranks + 1))
    queries, keys = shards.end - shards.begin, shards.last_key - shards.first_key
    return max(
        kernel_seconds(queries[low:high], keys[low:high], pairs[low:high]) if high > low else 0.0
        for low, high in pairwise(edges.tolist())
    )


def _written(shards: _Shards, ranks: int) -> Plan:
    edges = np.searchsorted(shards.rank, np.arange(ranks + 1)).tolist()
    queries = list(map(Span, shards.begin.tolist(), shards.end.tolist()))
    keys = map(Span, shards.first_key.tolist(), shards.last_key.tolist())
    tasks = [Task(q, k, 0) for q, k in zip(queries, keys, strict=True)]
    cuts = [slice(low, high) for low, high in pairwise(edges)]
    return Plan(tuple(tuple(queries[cut]) for cut in cuts), tuple(tuple(tasks[cut]) for cut in cuts))
