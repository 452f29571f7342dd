"""What a plan costs, exactly: pairs to attend, tokens, and bytes received by every rank in every division."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.batches.batch import Batch
from sim.batches.counting import Ints, pairs_kept
from sim.batches.planned import Planned, Transport
from sim.schedule.ir.pieces import Pieces
from sim.schedule.ir.plan import Plan, Task

Booleans = NDArray[np.bool_]


class TokenBytes(NamedTuple):
    """Bytes of one token of one layer that travel, over all heads."""

    kv: int
    """Key and value: 2 · H_kv · D · e."""
    query: int
    """H · D · e."""
    out: int
    """A partial output and its log-sum-exp in fp32: H · D · e + 4 · H."""


def token_bytes(num_heads: int, num_kv_heads: int, head_dim: int, element_bytes: int) -> TokenBytes:
    """Return the bytes of a token of attention with so many heads.

    >>> token_bytes(8, 2, 128, 2)
    TokenBytes(kv=1024, query=2048, out=2080)
    """
    query = num_heads * head_dim * element_bytes
    return TokenBytes(kv=2 * num_kv_heads * head_dim * element_bytes, query=query, out=query + 4 * num_heads)


class Statistics(NamedTuple):
    """P ranks, T divisions."""

    tokens: Ints
    """(P,): that live on each rank."""
    pairs: Ints
    """(P, T): (query, key) pairs that a rank attends in each division."""
    kv_bytes: Ints
    """(P, T): of keys and values that a rank receives for a division, each token once."""
    query_bytes: Ints
    """(P, T): of queries that a rank receives for a division, each once."""
    out_bytes: Ints
    """(P, T): of partial outputs that a rank receives back, by the division in which their last pair was attended."""
    sent_bytes: Ints
    """(P, P): of all these, from rank (row) to rank (column)."""

    @property
    def received_bytes(self) -> Ints:
        """(P,): all that a rank receives."""
        found: Ints = (self.kv_bytes + self.query_bytes + self.out_bytes).sum(axis=1)
        return found

    @property
    def skew(self) -> float:
        """Most pairs of a rank over the mean: what attention loses to imbalance (slowest over mean)."""
        return max_over_mean(self.pairs.sum(axis=1))

    @property
    def token_skew(self) -> float:
        """Most tokens of a rank over the mean: what memory loses."""
        return max_over_mean(self.tokens)


def max_over_mean(values: NDArray[np.generic] | Iterable[float]) -> float:
    """Return the largest value over the mean, 1 where all are zero. Of micro-batches' seconds this is the imbalance
    degree of WLB-LLM (arXiv:2503.17924, Table 2: largest latency · micro-batches / total).
    """
    found = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=np.float64)
    mean = float(found.mean())
    return float(found.max()) / mean if mean else 1.0


def statistics(planned: Planned, batch: Batch, per_token: TokenBytes) -> Statistics:
    """Return what a plan computes and moves under the mask of its batch.

    Only tasks that keep a pair ask for tokens; where keys and values go by all-gather or ring, all of them travel. A
    token that a rank has received stays. Tokens that the plan never takes apart are counted together, nothing is
    sampled.
    """
    plan = planned.plan
    ranks, divisions = len(plan.layout), num_divisions(plan)
    tasks_of_all = chain.from_iterable(plan.tasks)
    spans = chain.from_iterable([*plan.layout, *((task.queries, task.keys) for task in tasks_of_all)])
    pieces = Pieces(spans, batch.num_tokens)
    owner = np.full(pieces.tokens.shape, -1, dtype=np.int64)
    for rank, tokens in enumerate(plan.layout):
        for span in tokens:
            owner[pieces.of(span)] = rank
    pairs, kv, query, out = (np.zeros((ranks, divisions), dtype=np.int64) for _ in range(4))
    sent = np.zeros((ranks, ranks), dtype=np.int64)

    def by_owner(which: Booleans) -> Ints:
        """Return (P,): how many of some tokens live on each rank."""
        found = np.zeros(ranks, dtype=np.int64)
        np.add.at(found, owner[which], pieces.tokens[which])
        return found

    for rank in range(ranks):
        kept = pairs_kept([t.queries for t in plan.tasks[rank]], [t.keys for t in plan.tasks[rank]], batch.rectangles)
        has_kv, has_query, last = owner == rank, owner == rank, np.full(owner.shape, -1, dtype=np.int16)
        for division, tasks in _by_division(plan.tasks[rank], kept):
            new_kv, new_query = np.zeros_like(has_kv), np.zeros_like(has_kv)
            for task, count in tasks:
                pairs[rank, division] += count
                if count:
                    keys, queries = pieces.of(task.keys), pieces.of(task.queries)
                    new_kv[keys] = new_query[queries] = True
                    last[queries] = division
            of_kv, of_query = (new_kv, has_kv, per_token.kv, kv), (new_query, has_query, per_token.query, query)
            for new, has, per, received in (of_kv, of_query):
                moved = per * by_owner(new & ~has)
                received[rank, division] += moved.sum()
                sent[:, rank] += moved
                np.logical_or(has, new, out=has)
        remote = (last >= 0) & (owner != rank)
        np.add.at(out, (owner[remote], last[remote]), per_token.out * pieces.tokens[remote])
        sent[rank] += per_token.out * by_owner(remote)
        if planned.transport != "blocks":
            all_kv = per_token.kv * by_owner(owner != rank)
            sent[:, rank] += all_kv - per_token.kv * by_owner(has_kv & (owner != rank))
            kv[rank] = _shared_kv(planned.transport, rank, all_kv, divisions)
    return Statistics(by_owner(owner >= 0), pairs, kv, query, out, sent)


def num_divisions(plan: Plan) -> int:
    """Return in how many divisions the ranks attend."""
    return 1 + max((task.division for tasks in plan.tasks for task in tasks), default=0)


def _shared_kv(transport: Transport, rank: int, all_kv: Ints, divisions: int) -> Ints:
    """Return per division what a rank receives when all keys and values travel."""
    found = np.zeros(divisions, dtype=np.int64)
    if transport == "all-gather":
        found[0] = all_kv.sum()
    else:
        for source, size in enumerate(all_kv):
            found[min((rank - source) % len(all_kv), divisions - 1)] += size
    return found


def _by_division(tasks: tuple[Task, ...], kept: Ints) -> Iterator[tuple[int, list[tuple[Task, int]]]]:
    found: dict[int, list[tuple[Task, int]]] = {}
    for task, count in zip(tasks, kept.tolist(), strict=True):
        found.setdefault(task.division, []).append((task, count))
    yield from sorted(found.items())
