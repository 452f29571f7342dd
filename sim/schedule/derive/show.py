"""Schedules for people: a grid of logical time x rank, a graph in DOT, and the window that errors point into."""

from __future__ import annotations

from collections.abc import Iterator

from sim.schedule.derive.matching import Key, Matching
from sim.schedule.ir.ops import KINDS, Op
from sim.schedule.ir.program import Program, Schedule

LEGEND = (
    ", ".join(f"{kind.meta.code} {kind.meta.meaning}" for kind in KINDS.values())
    + "; ops of one row can run at the same time"
)


def logical_times(schedule: Schedule, matching: Matching, waits: list[list[tuple[int, ...]]]) -> dict[Key, int]:
    """Return in which row of the grid every op stands: one below the lowest of all that it, or its peers, wait for."""
    before = {
        (program.rank, index): found
        for program in schedule.programs
        for index, found in enumerate(_predecessors(program, waits[program.rank]))
    }
    times: dict[Key, int] = {}
    for start in before:
        stack = [start]
        while stack:
            key = stack[-1]
            needed = [other for peer in (key, *_peers(key, matching)) for other in before[peer]]
            missing = [other for other in needed if other not in times]
            if missing:
                stack += missing
            else:
                times[key] = 1 + max((times[other] for other in needed), default=-1)
                stack.pop()
    return times


def _predecessors(program: Program, waits: list[tuple[int, ...]]) -> Iterator[list[Key]]:
    """Yield what each op waits for: data, and its predecessor on the stream."""
    last: dict[str, int] = {}
    for index, op in enumerate(program.ops):
        found = [*waits[index], *([last[op.stream]] if op.stream in last else [])]
        yield [(program.rank, other) for other in found]
        last[op.stream] = index


def _peers(key: Key, matching: Matching) -> list[Key]:
    """Return the ops of other ranks that an op meets."""
    if key in matching.group_of:
        return list(matching.groups[matching.group_of[key]].members)
    transfers = [matching.transfers[number] for number in matching.transfers_of.get(key, ())]
    return [transfer.target if transfer.source == key else transfer.source for transfer in transfers]


def grid(schedule: Schedule, times: dict[Key, int], ranks: list[int]) -> list[list[str]]:
    """Return rows of logical time, one cell per rank, each naming the ops that begin there."""
    height = 1 + max(times.values(), default=-1)
    cells = [[""] * len(ranks) for _ in range(height)]
    for column, rank in enumerate(ranks):
        for index, op in enumerate(schedule.program(rank).ops):
            row = times[rank, index]
            cells[row][column] = " ".join(filter(None, (cells[row][column], code(op))))
    return cells


def code(op: Op) -> str:
    """Return an op in a few letters: its kind, and the last word of its label, which says on what."""
    return f"{op.meta.code}:{op.label.rpartition(' ')[2]}"


def dot(schedule: Schedule, matching: Matching, waits: list[list[tuple[int, ...]]], ranks: list[int]) -> str:
    """Return the graph of ops and what they wait for, in the language of Graphviz."""
    lines = ["digraph schedule {", "  rankdir=LR; node [shape=box, fontname=monospace];"]
    for rank in ranks:
        program = schedule.program(rank)
        lines.append(f'  subgraph cluster_{rank} {{ label="rank {rank}";')
        lines += [f'    n{rank}_{i} [label="{op.label}\\n{op.stream}"];' for i, op in enumerate(program.ops)]
        for index, found in enumerate(_predecessors(program, waits[rank])):
            lines += [f"    n{rank}_{other} -> n{rank}_{index};" for _, other in found]
        lines.append("  }")
    for transfer in matching.transfers:
        (a, i), (b, j) = transfer.source, transfer.target
        if a in ranks and b in ranks:
            lines.append(f'  n{a}_{i} -> n{b}_{j} [style=dashed, constraint=false, label="{transfer.nbytes} B"];')
    return "\n".join([*lines, "}"])


def window(programs: list[Program], marks: dict[int, int], width: int = 2) -> str:
    """Return the ops around a mark of each marked rank, one line per rank; errors point into a schedule with it."""
    lines = []
    for rank, mark in sorted(marks.items()):
        ops = programs[rank].ops
        shown = range(max(mark - width, 0), min(mark + width + 1, len(ops)))
        cells = [f">>> {ops[i].label} <<<" if i == mark else ops[i].label for i in shown]
        lines.append(f"rank {rank} op {shown.start}: " + " | ".join(cells))
    return "\n".join(lines)
