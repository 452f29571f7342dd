"""Static context parallelism as plans: the same shards whatever the documents, as frameworks lay them out."""

from __future__ import annotations

from sim.batches.batch import Batch
from sim.batches.counting import pairs_kept
from sim.batches.planned import Planned, Transport, require_ranks, timed
from sim.options import LayoutName
from sim.schedule.ir.layout import LAYOUTS
from sim.schedule.ir.masks import Span
from sim.schedule.ir.plan import Plan, Task


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


def _shards(batch: Batch, num_ranks: int, layout: LayoutName, transport: Transport) -> Plan:
    shards = LAYOUTS[layout](batch.num_tokens, num_ranks)
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
