"""What the timetable of a pipeline comes to before any model is known: when stages do what, and what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from sim.base.errors import ScheduleError
from sim.schedule.model.step import Item

_NAMES = {"F": "forward", "BW": "backward", "B": "gradients of inputs", "W": "gradients of weights"}
_SHOWN = 4
"""Stages that a message names."""
_Pass = tuple[bool, int, int]
"""What others wait for: whether it is forward, or backward up to the gradients of inputs; micro-batch and chunk."""


class Spent(NamedTuple):
    """When a stage begins each of its passes, and ends the last one, in the unit of the costs."""

    begins: tuple[float, ...]
    end: float


class Held(NamedTuple):
    """How many visits of micro-batches to chunks a stage holds at its peaks (arXiv:2401.10241 app. G)."""

    activations: int
    """Whose backward pass has not come: all that they saved."""
    gradients: int
    """Whose gradients of weights have not come, where those of inputs have: what is left of it."""
    visits: int
    """Of both together."""


class Parts(NamedTuple):
    """How long a pass takes, in the unit of the costs."""

    before: float
    """Up to where it needs what another pass hands on, such as what checkpoints compute again first."""
    through: float
    """From there until what it hands on is made."""
    behind: float

    @property
    def whole(self) -> float:
        """All of it."""
        return sum(self)


def played(tables: Sequence[Sequence[Item]], cost: Callable[[Item], float], hand_over: float = 0) -> list[Spent]:
    """Return by stage when it does what its timetable says, where a pass takes ``cost`` from what it needs to what it
    hands on: see ``played_in_parts``.
    """
    return played_in_parts(tables, lambda item: Parts(0, cost(item), 0), hand_over)


def played_in_parts(
    tables: Sequence[Sequence[Item]], parts: Callable[[Item], Parts], hand_over: float = 0
) -> list[Spent]:
    """Return by stage when it does what its timetable says, each pass as soon as it can.

    What a pass hands on to another stage arrives ``hand_over`` later, and keeps none busy (arXiv:2401.10241 app. G).
    ``parts`` is asked once for each pass, those of a stage in their order. Whole numbers stay whole. Raises
    ScheduleError where stages wait for each other, or for what no stage does.
    """
    last = max(item.chunk for items in tables for item in items)
    done: dict[_Pass, tuple[float, int]] = {}
    awaited: dict[_Pass, list[int]] = {}
    begins, clock = [list[float]() for _ in tables], [0.0] * len(tables)
    ready = list(range(len(tables)))
    while ready:
        stage = ready.pop()
        items, now = tables[stage], clock[stage]
        while len(begins[stage]) < len(items):
            item = items[len(begins[stage])]
            need, there = _needed(item, last), 0.0
            if need is not None:
                if need not in done:
                    awaited.setdefault(need, []).append(stage)
                    break
                end, by = done[need]
                there = end if by == stage else end + hand_over
            before, through, behind = parts(item)
            needs = max(now + before, there)
            begins[stage].append(needs - before)
            now = needs + through + behind
            if item.kind != "W":
                made = (item.kind == "F", item.micro, item.chunk)
                done[made] = needs + through, stage
                ready += awaited.pop(made, ())
        clock[stage] = now
    if awaited:
        raise ScheduleError(f"stages wait for each other: {'; '.join(_stuck(tables, [len(each) for each in begins]))}")
    return [Spent(tuple(own), end) for own, end in zip(begins, clock, strict=True)]


def held(items: Iterable[Item], size: Callable[[int], int] = lambda _: 1) -> Held:
    """Return what a stage holds at its peaks; ``size`` says how much a visit to a chunk counts, such as its layers.

    >>> held([Item("F", 0, 0), Item("F", 1, 0), Item("B", 0, 0), Item("B", 1, 0), Item("W", 0, 0), Item("W", 1, 0)])
    Held(activations=2, gradients=2, visits=2)
    """
    activations = gradients = 0
    most = Held(0, 0, 0)
    for item in items:
        each = size(item.chunk)
        activations += {"F": each, "W": 0}.get(item.kind, -each)
        gradients += {"B": each, "W": -each}.get(item.kind, 0)
        most = Held(*map(max, most, (activations, gradients, activations + gradients)))
    return most


def _needed(item: Item, last: int) -> _Pass | None:
    """Return what a pass waits for; None for the first one of a micro-batch."""
    kind, micro, chunk = item
    if kind == "W":
        return False, micro, chunk
    if kind == "F":
        return (True, micro, chunk - 1) if chunk else None
    return (False, micro, chunk + 1) if chunk < last else (True, micro, chunk)


def _stuck(tables: Sequence[Sequence[Item]], at: Sequence[int]) -> Iterator[str]:
    """Yield what stages stand before, of the first few that stand."""
    standing = [stage for stage, items in enumerate(tables) if at[stage] < len(items)]
    for stage in standing[:_SHOWN]:
        kind, micro, chunk = tables[stage][at[stage]]
        yield f"stage {stage} before {_NAMES[kind]} of micro-batch {micro} in chunk {chunk}"
    if len(standing) > _SHOWN:
        yield f"{len(standing) - _SHOWN} more"
