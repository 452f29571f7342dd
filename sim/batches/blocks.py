"""Documents cut into blocks of tokens, the pairs of blocks that the mask keeps, and plans written from who has which.

Token block i holds queries, keys and values of its tokens; computation block c attends queries of block ``queries[c]``
to keys of block ``keys[c]``. This is the data of DCP (arXiv:2510.10620 §4.1), and of other planners of blocks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sim.base.errors import InputError
from sim.batches.batch import Batch
from sim.batches.counting import Ints, counts
from sim.schedule.ir.masks import Span, Tokens
from sim.schedule.ir.plan import Plan, Task

SIZES = (512, 1024, 2048, 4096)
"""Tokens of a block, as DCP searches them (arXiv:2510.10620 §7.1)."""


class Blocks(NamedTuple):
    """n blocks of tokens and m of computation, as arrays."""

    begin: Ints
    """(n,): first token."""
    end: Ints
    """(n,): last token + 1."""
    queries: Ints
    """(m,): token block of the queries."""
    keys: Ints
    """(m,): token block of the keys."""
    pairs: Ints
    """(m,): that the mask keeps, above 0."""

    @property
    def tokens(self) -> Ints:
        """(n,): of each token block."""
        return self.end - self.begin


def cut(batch: Batch, size: int) -> Blocks:
    """Return the documents in blocks of ``size`` tokens, the last of each shorter; raises InputError for a size below
    1.
    """
    if size < 1:
        raise InputError(f"`block_size` {size}: expected a whole number of 1 or more")
    lengths = np.array(batch.documents, dtype=np.int64)
    number = -(-lengths // size)
    starts, first = np.cumsum(lengths) - lengths, np.cumsum(number) - number
    document = np.repeat(np.arange(len(lengths)), number)
    begin = starts[document] + (np.arange(len(document)) - first[document]) * size
    end = np.minimum(begin + size, (starts + lengths)[document])
    return between(batch, begin, end, document)


def between(batch: Batch, begin: Ints, end: Ints, document: Ints) -> Blocks:
    """Return blocks of these tokens, (n,) each, in the order of the sequence; none is empty or crosses a document."""
    number = np.bincount(document, minlength=len(batch.documents))
    first, width = np.cumsum(number) - number, number[document]
    # Every block of a document with every other one; the mask says which of them matter.
    queries = np.repeat(np.arange(len(document)), width)
    keys = first[document[queries]] + np.arange(len(queries)) - np.repeat(np.cumsum(width) - width, width)
    tokens = np.stack([begin, end, np.ones_like(begin)], axis=1)
    pairs, _ = counts(tokens[queries], tokens[keys], batch.rectangles)
    kept = pairs > 0
    return Blocks(begin, end, queries[kept], keys[kept], pairs[kept])


def fitting_size(batch: Batch, most: int) -> int:
    """Return the smallest of ``SIZES`` (then 8192, …) that leaves at most ``most`` pairs of blocks, kept or not; of one
    block per document where even that is more.
    """
    lengths = np.array(batch.documents, dtype=np.int64)
    size = SIZES[0]
    while int(((-(-lengths // size)) ** 2).sum()) > max(most, len(lengths)):
        size *= 2
    return size


def searched_sizes(batch: Batch, most: int) -> tuple[int, ...]:
    """Return those of ``SIZES`` that leave at most ``most`` pairs of blocks; where none does, the one that fits."""
    least = fitting_size(batch, most)
    return tuple(size for size in SIZES if size >= least) or (least,)


def written(blocks: Blocks, home: Ints, rank: Ints, num_ranks: int, divisions: int) -> Plan:
    """Return the plan in which token block i lives on rank ``home[i]`` and computation block c runs on ``rank[c]``.

    A rank attends first what needs nothing from others, then the rest ordered by what it fetches, in divisions of about
    equal work: while one is computed, the next one's blocks arrive. Raises InputError for less than one division.
    """
    if divisions < 1:
        raise InputError(f"`divisions` {divisions}: expected a whole number of 1 or more")
    begin, end = blocks.begin.tolist(), blocks.end.tolist()
    order = np.argsort(rank, kind="stable")
    edges = np.searchsorted(rank[order], np.arange(num_ranks + 1)).tolist()
    tasks = []
    for one, (low, high) in enumerate(pairwise(edges)):
        mine = order[low:high]
        tasks.append(_tasks(blocks, home, one, mine, divisions, begin, end))
    living: list[list[int]] = [[] for _ in range(num_ranks)]
    for block, where in enumerate(home.tolist()):
        living[where].append(block)
    return Plan(tuple(_joined([Span(begin[b], end[b]) for b in found]) for found in living), tuple(tasks))


def _tasks(
    blocks: Blocks, home: Ints, rank: int, mine: Ints, divisions: int, begin: list[int], end: list[int]
) -> tuple[Task, ...]:
    queries, keys, pairs = blocks.queries[mine], blocks.keys[mine], blocks.pairs[mine]
    far_key, far_query = home[keys] != rank, home[queries] != rank
    remote = far_key | far_query
    fetched = np.where(far_key, keys, queries)
    order = np.lexsort((queries, np.where(remote, fetched, 0), remote))
    done = np.cumsum(pairs[order])
    when = (done - pairs[order]) * divisions // max(int(done[-1]) if len(done) else 1, 1)
    when = np.where(remote[order], np.maximum(when, min(1, divisions - 1)), when)  # nothing has arrived at first
    found: list[Task] = []
    columns = (when, queries[order], keys[order])
    for at in np.lexsort((columns[2], columns[1], columns[0])).tolist():
        division, q, k = (int(column[at]) for column in columns)
        task = Task(Span(begin[q], end[q]), Span(begin[k], end[k]), division)
        last = found[-1] if found else None
        if last and last[::2] == task[::2] and last.keys.stop == task.keys.start and home[k] == home[k - 1]:
            found[-1] = last._replace(keys=Span(last.keys.start, task.keys.stop))
        else:
            found.append(task)
    return tuple(found)


def _joined(spans: list[Span]) -> Tokens:
    found: list[Span] = []
    for span in spans:
        if found and found[-1].stop == span.start:
            found[-1] = Span(found[-1].start, span.stop)
        else:
            found.append(span)
    return tuple(found)
