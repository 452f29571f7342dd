"""What a plan costs, exactly: pairs to attend, tokens, and bytes received by every rank in every division."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.batches.batch import Batch
from sim.batches.counting import Ints, pairs_kept
from sim.batches.planned import Planned, Transport
from sim.schedule.ir.masks import Span
from sim.schedule.ir.plan import Plan, Task


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
    token that a rank has received stays. Passes over a bitmap of the sequence, nothing is sampled.
    """
    plan = planned.plan
    seq, ranks = batch.num_tokens, len(plan.layout)
    divisions = num_divisions(plan)
    owner = owners(plan, seq)
    pairs, kv, query, out = (np.zeros((ranks, divisions), dtype=np.int64) for _ in range(4))
    sent = np.zeros((ranks, ranks), dtype=np.int64)
    for rank in range(ranks):
        kept = pairs_kept([t.queries for t in plan.tasks[rank]], [t.keys for t in plan.tasks[rank]], batch.rectangles)
        has_kv, has_query, last = owner == rank, owner == rank, np.full(seq, -1, dtype=np.int16)
        for division, tasks in _by_division(plan.tasks[rank], kept):
            for task, count in tasks:
                pairs[rank, division] += count
                if count:
                    moved = per_token.kv * _new(has_kv, task.keys, owner, ranks)
                    kv[rank, division] += moved.sum()
                    sent[:, rank] += moved
                    moved = per_token.query * _new(has_query, task.queries, owner, ranks)
                    query[rank, division] += moved.sum()
                    sent[:, rank] += moved
                    last[slice(*task.queries)] = division
        remote = (last >= 0) & (owner != rank)
        home, when = owner[remote], last[remote]
        np.add.at(out, (home, when), per_token.out)
        sent[rank] += per_token.out * np.bincount(home, minlength=ranks)
        if planned.transport != "blocks":
            all_kv = per_token.kv * np.bincount(owner[owner != rank], minlength=ranks)
            sent[:, rank] += all_kv - per_token.kv * np.bincount(owner[has_kv & (owner != rank)], minlength=ranks)
            kv[rank] = _shared_kv(planned.transport, rank, all_kv, divisions)
    tokens = np.bincount(owner, minlength=ranks)
    return Statistics(tokens, pairs, kv, query, out, sent)


def num_divisions(plan: Plan) -> int:
    """Return in how many divisions the ranks attend."""
    return 1 + max((task.division for tasks in plan.tasks for task in tasks), default=0)


def owners(plan: Plan, seq: int) -> NDArray[np.int32]:
    """Return (S,): the rank on which each token lives, -1 where it is on none."""
    owner = np.full(seq, -1, dtype=np.int32)
    for rank, tokens in enumerate(plan.layout):
        for span in tokens:
            owner[slice(*span)] = rank
    return owner


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


def _new(has: NDArray[np.bool_], span: Span, owner: NDArray[np.int32], ranks: int) -> Ints:
    """Return per owner how many positions of a span are not there yet, and mark them."""
    part = has[slice(*span)]
    if part.all():
        return np.zeros(ranks, dtype=np.int64)
    found = np.bincount(owner[slice(*span)][~part], minlength=ranks)
    part[:] = True
    return found
