"""A plan of attention for one batch: which tokens live on which rank, and which rank attends what, and when.

Planners (``sim/batches``) emit plans, and one schedule plays them all. Tokens are positions in the global sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sim.base.errors import InputError
from sim.schedule.ir.masks import Span, Tokens
from sim.words.mesh import Mesh
from sim.words.workload import Workload


class Task(NamedTuple):
    """Attention of some queries to some keys, under the mask of the workload."""

    queries: Span
    keys: Span
    division: int
    """When: a rank computes one division after the other, and receives what the next one needs meanwhile."""


class Plan(NamedTuple):
    """What planners decide. A task may need queries and keys that live on other ranks."""

    layout: tuple[Tokens, ...]
    """Per rank the tokens that live there, in the order of memory. Ranks may have different numbers of them."""
    tasks: tuple[tuple[Task, ...], ...]
    """Per rank what it attends, by division."""


Plans = Plan | Mapping[tuple[int, ...], Plan]
"""A plan of all sequences, or one for each of their lists of documents."""


def plan_of(plans: Plans, workload: Workload) -> Plan:
    """Return the plan of sequences with the documents of a workload; raises InputError where there is none of them."""
    if isinstance(plans, Plan):
        return plans
    if workload.document_lengths not in plans:
        raise InputError(
            f"there is no plan for documents of {', '.join(map(str, workload.document_lengths))} tokens: plan those of "
            f"every micro-batch"
        )
    return plans[workload.document_lengths]


def require_ranks(plan: Plan, mesh: Mesh) -> None:
    """Raise InputError where the ring has other ranks than the plan."""
    if mesh.ring != len(plan.layout):
        raise InputError(
            f"the plan is for {len(plan.layout)} ranks, and the ring has {mesh.ring}: set `gpus`, or make a plan for "
            f"so many"
        )
