"""When stages receive what others hand on: just before the pass that needs it, or before, as it comes."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from sim.base.errors import ScheduleError
from sim.schedule.model.pipeline.account import played
from sim.schedule.model.step import Item

_StageOf: TypeAlias = dict[tuple[int, int], int]
"""The stage on which a micro-batch passes a chunk."""
_UNITS = {"F": 1, "BW": 2, "B": 1, "W": 1}


class _Link(NamedTuple):
    """What goes one way between two stages, in the order in which it is sent."""

    source: int
    target: int
    step: int


def received_before(tables: Sequence[Sequence[Item]]) -> list[dict[int, list[Item]]]:
    """Return by stage, and by position in its timetable, passes whose input it receives before the pass there.

    There are none where stages can receive just before the pass that needs it, as pipelines of one chunk a stage do. If
    some would wait for each other so, each stage receives whatever comes as it does where passes take a unit each (as
    torch's ``_add_send_recv`` places it).
    """
    stages = {item[1:]: stage for stage, items in enumerate(tables) for item in items}
    found: list[dict[int, list[Item]]] = [defaultdict(list) for _ in tables]
    if _meet(tables, stages):
        return found
    try:
        begins = [stage.begins for stage in played(tables, lambda item: _UNITS[item.kind])]
    except ScheduleError:
        return found  # the proof says who waits for whom
    comes: list[tuple[float, int, Item]] = []
    for stage, items in enumerate(tables):
        for begin, item in zip(begins[stage], items, strict=True):
            if link := _sent(item, stages):
                comes.append((begin + _UNITS[item.kind], link.target, item._replace(chunk=item.chunk + link.step)))
    for arrival, target, item in sorted(comes):
        found[target][bisect_left(begins[target], arrival)].append(item)
    return found


def _meet(tables: Sequence[Sequence[Item]], stages: _StageOf) -> bool:
    """Return whether all stages end if each receives just before a pass, and waits with what it sends until the last
    thing that it sent there is received.
    """
    sent, received, at = Counter[_Link](), Counter[_Link](), [0] * len(tables)
    takes = [True] * len(tables)
    """Whether a stage's next pass has yet to receive; then it has to send."""
    moved = True
    while moved:
        moved = False
        for stage, items in enumerate(tables):
            while at[stage] < len(items):
                link = (_received if takes[stage] else _sent)(items[at[stage]], stages)
                if link and (sent[link] == received[link]) == takes[stage]:
                    break
                if link:
                    (received if takes[stage] else sent)[link] += 1
                at[stage] += not takes[stage]
                takes[stage] = not takes[stage]
                moved = True
    return at == [len(items) for items in tables]


def _sent(item: Item, stages: _StageOf) -> _Link | None:
    """Return where the result of a pass goes, if it is to another stage."""
    step = item.onward
    own, other = stages[item[1:]], stages.get((item.micro, item.chunk + step))
    return _Link(own, other, step) if other not in {None, own} else None


def _received(item: Item, stages: _StageOf) -> _Link | None:
    """Return where the input of a pass comes from, if it is from another stage."""
    step = item.onward
    own, other = stages[item[1:]], stages.get((item.micro, item.chunk - step))
    return _Link(other, own, step) if other not in {None, own} else None
