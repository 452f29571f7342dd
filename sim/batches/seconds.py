"""Predicted seconds of a plan: of attention kernels by rank and division, and of the slowest rank with its messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.batches.batch import Batch
from sim.batches.counting import Ints, meetings, table
from sim.batches.planned import Planned
from sim.batches.statistics import TokenBytes, num_divisions, statistics
from sim.schedule.ir.plan import Task

Floats = NDArray[np.float64]
KernelSeconds = Callable[[Ints, Ints, Ints], float]
"""Predicted seconds of one kernel launch on several blocks; arrays (n,): queries, keys and pairs kept of each."""


class PlanCosts(NamedTuple):
    """What the time of a plan is predicted by."""

    kernel_seconds: KernelSeconds
    """Of a forward launch."""
    within_bytes_per_s: float
    """What a GPU sends or receives at once inside its node, per direction."""
    between_bytes_per_s: float
    """Likewise from node to node."""


def attention_seconds(planned: Planned, batch: Batch, kernel_seconds: KernelSeconds) -> Floats:
    """Return (P, T): predicted seconds of what every rank attends in each division, one launch each."""
    found = np.zeros((len(planned.plan.layout), num_divisions(planned.plan)))
    for rank, split in enumerate(planned.plan.tasks):
        tasks = _joined(_joined(split, "queries", "keys"), "keys", "queries")
        parts = list(
            meetings(table([one.queries for one in tasks]), table([one.keys for one in tasks]), batch.rectangles)
        )
        if not parts:
            continue
        block, pairs = (np.concatenate([getattr(part, name) for part in parts]) for name in ("block", "pairs"))
        queries, keys = (np.concatenate(sizes) for sizes in zip(*(part.sizes for part in parts), strict=True))
        division = np.array([one.division for one in tasks], dtype=np.int64)[block]
        for when in np.unique(division).tolist():
            mine = division == when
            found[rank, when] = kernel_seconds(queries[mine], keys[mine], pairs[mine])
    return found


def _joined(tasks: Sequence[Task], alike: str, along: str) -> list[Task]:
    """Return tasks with those as one that attend the same ``alike``, and whose spans ``along`` follow each other."""
    found: list[Task] = []
    for task in sorted(tasks, key=lambda one: (one.division, getattr(one, alike), getattr(one, along))):
        last, mine = found[-1] if found else task, getattr(task, along)
        before = getattr(last, along)
        together = (last.division, getattr(last, alike)) == (task.division, getattr(task, alike))
        if found and together and before.stop == mine.start and before.step == mine.step == 1:
            found[-1] = last._replace(**{along: before._replace(stop=mine.stop)})
        else:
            found.append(task)
    return found


def plan_seconds(planned: Planned, batch: Batch, per_token: TokenBytes, costs: PlanCosts, gpus_per_node: int) -> float:
    """Return the forward seconds of the slowest rank of a plan of blocks. While a division is attended, the inputs of
    the next one arrive. After the last one, partial outputs travel home. Latencies and other traffic are left out.
    """
    kernels, found = attention_seconds(planned, batch, costs.kernel_seconds), statistics(planned, batch, per_token)
    node = np.arange(len(found.tokens)) // gpus_per_node
    far = node[:, None] != node[None, :]
    links_s = np.maximum(
        _most(found.sent_bytes * far) / costs.between_bytes_per_s,
        _most(found.sent_bytes * ~far) / costs.within_bytes_per_s,
    )
    needed = np.column_stack([found.kv_bytes + found.query_bytes, found.out_bytes.sum(axis=1)])
    moving_s = links_s[:, None] * needed / np.maximum(found.received_bytes, 1)[:, None]
    hidden_s = moving_s[:, 0] + np.maximum(kernels, moving_s[:, 1:]).sum(axis=1)
    return float(np.maximum(hidden_s, links_s).max())


def _most(sent: Ints) -> Ints:
    """Return (P,): what a rank sends or receives, whichever is more."""
    found: Ints = np.maximum(sent.sum(axis=0), sent.sum(axis=1))
    return found
