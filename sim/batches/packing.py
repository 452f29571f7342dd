"""Packing a global batch of documents into micro-batches: by tokens, as most trainers do, or by work, as WLB-LLM.

Work is a callable: predicted seconds (or FLOPs) of a document of so many tokens, attention and linear layers together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sim.base.errors import InputError
from sim.batches.batch import require_lengths
from sim.batches.statistics import max_over_mean

Work = Callable[[int], float]
"""Of one document of so many tokens."""


class Document(NamedTuple):
    """One document of a stream of global batches."""

    tokens: int
    arrived: int = 0
    """Number of the global batch that it came with."""


MicroBatch = tuple[Document, ...]


def transformer_work(embed_dim: int, ffn_dim: int, kv_dim: int) -> Work:
    """Return forward FLOPs of a layer of Llama's block on one document: 2 per weight and token, and causal attention.

    ``kv_dim`` is kv heads x head dim.
    """
    weights = 2 * embed_dim**2 + 2 * embed_dim * kv_dim + 3 * embed_dim * ffn_dim
    return lambda tokens: 2.0 * weights * tokens + 2.0 * embed_dim * tokens * (tokens + 1)


def concatenated(documents: Sequence[int], num_micro_batches: int, seq: int) -> tuple[MicroBatch, ...]:
    """Return sequences of ``seq`` tokens cut from all documents one after the other: the field's default. A document
    that a cut goes through becomes two, which do not attend to each other. The last sequence may be shorter.

    Raises InputError for documents of more tokens than the micro-batches hold.
    """
    _require(documents, num_micro_batches, seq)
    if sum(documents) > num_micro_batches * seq:
        raise InputError(
            f"{sum(documents)} tokens do not fit into {num_micro_batches} micro-batches of {seq}: set `seq` or "
            f"`num_micro_batches`"
        )
    stops = np.cumsum(documents).tolist()
    edges = sorted({0, *stops, *range(seq, stops[-1], seq)})
    found: list[list[Document]] = [[] for _ in range(num_micro_batches)]
    for begin, end in pairwise(edges):
        found[begin // seq].append(Document(end - begin))
    return tuple(map(tuple, found))


class Packed(NamedTuple):
    """Micro-batches of one global batch, and what waits for a later one."""

    micro_batches: tuple[MicroBatch, ...]
    waiting: Waiting


class Waiting(NamedTuple):
    """Documents that wait, with the thresholds of WLB-LLM's queues of outliers."""

    thresholds: tuple[int, ...] = ()
    """L1 < L2 < …, in tokens: a document of more than L1 waits in the last queue whose threshold it exceeds."""
    queues: tuple[tuple[Document, ...], ...] = ()
    left: tuple[Document, ...] = ()
    """For which there was no room."""

    @property
    def documents(self) -> tuple[Document, ...]:
        """All that wait."""
        return (*self.left, *(one for queue in self.queues for one in queue))


def fixed_length(documents: Sequence[int], num_micro_batches: int, seq: int) -> Packed:
    """Return whole documents, longest first, each in the sequence of least attention (squared lengths) that has room
    among ``seq`` tokens: the fixed-length greedy packing that WLB-LLM compares with (Table 2). What fits nowhere waits.

    Raises InputError for a document longer than ``seq``.
    """
    return by_work(documents, num_micro_batches, seq, lambda tokens: float(tokens) ** 2, balance_tokens=False)


def by_work(
    documents: Sequence[int],
    num_micro_batches: int,
    longest: int,
    work: Work,
    *,
    waiting: Waiting = Waiting(),  # noqa: B008 - frozen
    arrived: int = 0,
    balance_tokens: bool = True,
) -> Packed:
    """Return WLB-LLM's packing of one global batch (arXiv:2503.17924 §4.2, Algorithm 1).

    Outliers wait until their queue holds one for each micro-batch. The others, longest first, go to the micro-batch of
    least work if it stays within ``longest`` tokens, else to the one of fewest tokens, else to the next global batch.
    Micro-batches get different lengths. Pure: pass the returned ``waiting`` on. Without ``balance_tokens`` a document
    goes to the micro-batch of least work among those with room. Raises InputError for a document longer than
    ``longest``, which would wait for ever.
    """
    _require(documents, num_micro_batches, longest)
    _require_fit(documents, longest)
    thresholds = waiting.thresholds
    if any(high <= low for low, high in pairwise((0, *thresholds))):
        raise InputError(f"`thresholds` {thresholds}: expected rising numbers of tokens above 0")
    queues = [list(queue) for queue in waiting.queues] or [[] for _ in thresholds]
    ready = list(waiting.left)
    for tokens in documents:
        queue = int(np.searchsorted(thresholds, tokens)) - 1
        (ready if queue < 0 else queues[queue]).append(Document(tokens, arrived))
    for queue_ in queues:
        if len(queue_) >= num_micro_batches:
            ready += queue_[:num_micro_batches]
            del queue_[:num_micro_batches]
    placed, left = _placed(ready, num_micro_batches, longest, work, balance_tokens)
    return Packed(placed, Waiting(thresholds, tuple(map(tuple, queues)), left))


def _placed(
    ready: list[Document], number: int, longest: int, work: Work, balance_tokens: bool
) -> tuple[tuple[MicroBatch, ...], MicroBatch]:
    found: list[list[Document]] = [[] for _ in range(number)]
    works, tokens = [0.0] * number, [0] * number
    left = []
    for one in sorted(ready, key=lambda one: -one.tokens):  # stable: the earlier document first
        if balance_tokens:
            choices = [min(range(number), key=works.__getitem__), min(range(number), key=tokens.__getitem__)]
        else:
            choices = sorted(range(number), key=works.__getitem__)
        at = next((at for at in choices if tokens[at] + one.tokens <= longest), None)
        if at is None:
            left.append(one)
            continue
        found[at].append(one)
        works[at] += work(one.tokens)
        tokens[at] += one.tokens
    return tuple(map(tuple, found)), tuple(left)


def imbalance(micro_batches: Sequence[MicroBatch], work: Work) -> float:
    """Return the imbalance degree of micro-batches: largest work over the mean (WLB-LLM, Table 2)."""
    return max_over_mean([sum(work(one.tokens) for one in documents) for documents in micro_batches])


def token_delay(packed: Sequence[Packed]) -> float:
    """Return by how many global batches a token is late on average, of tokens that were packed; ``packed[i]`` is the
    global batch number i (WLB-LLM, Fig. 16).
    """
    late = total = 0
    for index, one in enumerate(packed):
        for document in (document for documents in one.micro_batches for document in documents):
            late += document.tokens * (index - document.arrived)
            total += document.tokens
    return late / total if total else 0.0


def _require(documents: Sequence[int], num_micro_batches: int, longest: int) -> None:
    require_lengths(list(documents))
    if num_micro_batches < 1:
        raise InputError(f"`num_micro_batches` {num_micro_batches}: expected a whole number of 1 or more")
    if longest < 1:
        raise InputError(f"{longest} tokens of a micro-batch: expected a whole number of 1 or more")


def _require_fit(documents: Sequence[int], longest: int) -> None:
    if max(documents) > longest:
        raise InputError(
            f"a document of {max(documents)} tokens is longer than a micro-batch, {longest}: cut it, or set `longest`"
        )
