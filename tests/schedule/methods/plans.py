"""Random plans: any layout of spans of any sizes, and any rank and division for any block of any cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import strategies as st

from sim.schedule.ir.masks import Span
from sim.schedule.ir.plan import Plan, Task
from sim.schedule.methods.planned import PlannedOptions, planned
from sim.schedule.proof.check import Checked, check
from sim.words.mesh import Mesh
from sim.words.workload import Workload

SEQ = 24


def cuts(seq: int) -> st.SearchStrategy[list[Span]]:
    """Spans that make up a sequence."""
    inner = st.lists(st.integers(1, seq - 1), max_size=4, unique=True)
    return inner.map(lambda found: [Span(*edges) for edges in pairwise(sorted({0, seq, *found}))])


@st.composite
def plans(draw: st.DrawFn, seq: int = SEQ) -> Plan:
    """Queries are cut once, and each cut's keys anew, so that every pair is in one task."""
    ranks = draw(st.integers(1, 4))
    rank, division = st.integers(0, ranks - 1), st.integers(0, 2)
    layout: list[list[Span]] = [[] for _ in range(ranks)]
    for span in draw(cuts(seq).flatmap(st.permutations)):
        layout[draw(rank)].append(span)
    tasks: list[list[Task]] = [[] for _ in range(ranks)]
    for queries in draw(cuts(seq)):
        for keys in draw(cuts(seq)):
            tasks[draw(rank)].append(Task(queries, keys, draw(division)))
    return written(layout, tasks)


def written(layout: Sequence[Sequence[Span]], tasks: Sequence[Sequence[Task]]) -> Plan:
    return Plan(tuple(map(tuple, layout)), tuple(map(tuple, tasks)))


def proved(plan: Plan, workload: Workload, options: PlannedOptions = PlannedOptions(), dp: int = 1) -> Checked:
    return check(planned(plan)(workload, Mesh(ring=len(plan.layout), dp=dp), options))


def task(queries: tuple[int, int], keys: tuple[int, int], division: int = 0) -> Task:
    return Task(Span(*queries), Span(*keys), division)


LAYOUT = ((Span(0, 4), Span(12, 16)), (Span(4, 12),), ())
TASKS = (
    (task((0, 4), (0, 4)), task((12, 16), (0, 8), 1)),
    (task((4, 12), (0, 12)),),
    (task((12, 16), (8, 16), 1),),
)
HELPED = Plan(LAYOUT, TASKS)
"""Rank 2 has no tokens, and attends for rank 0."""
