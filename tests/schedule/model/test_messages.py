"""When stages of a pipeline receive: just before the pass that needs it, unless they would wait for each other so."""

from __future__ import annotations

from collections import defaultdict

import pytest

from sim.schedule.model.pipeline.messages import received_before
from sim.schedule.model.pipeline.timetables import PIPELINES
from sim.schedule.model.step import Item

ONE_CHUNK = [name for name, pipeline in PIPELINES.items() if pipeline.chunks == 1]


@pytest.mark.parametrize("name", [*ONE_CHUNK, "zb-v", "dualpipe-v"])
def test_just_before(name: str) -> None:
    for stages in (1, 2, 4) if name != "dualpipe" else (2, 4):
        chunks = PIPELINES[name].chunks or 1
        tables = [PIPELINES[name].timetable(stage, stages, 2 * stages, chunks) for stage in range(stages)]
        assert received_before(tables) == [{}] * stages


def test_as_it_comes() -> None:
    """Breadth first, two stages, two chunks, four micro-batches. The second stage ends the first chunk's forward passes
    at 2, 3, 4, 5; the first one begins its own at 0, 1, 2, 3, and those of its second chunk at 4, 5, 6, 7.
    """
    first, second = received_before([PIPELINES["looped-bfs"].timetable(stage, 2, 4, 2) for stage in (0, 1)])
    assert first[2] == [Item("F", 0, 2)]
    assert first[3] == [Item("F", 1, 2)]
    assert first[5] == [Item("F", 3, 2)]
    assert [second[position][0] for position in range(4)] == [Item("F", micro, 1) for micro in range(4)]


@pytest.mark.parametrize(
    ("name", "size"), [("looped-bfs", (3, 9, 3)), ("interleaved", (3, 8, 2)), ("interleaved-zb", (4, 8, 3))]
)
def test_each_once_in_order_and_in_time(name: str, size: tuple[int, int, int]) -> None:
    tables = [PIPELINES[name].timetable(stage, *size) for stage in range(size[0])]
    found, handed = received_before(tables), defaultdict(list)
    for items in tables:
        for kind, micro, chunk in items:
            if kind != "W":
                handed[kind == "F", chunk].append(micro)
    for items, positions in zip(tables, found, strict=True):
        places = {(item.kind == "F", *item[1:]): at for at, item in enumerate(items) if item.kind != "W"}
        got = defaultdict(list)
        for position in sorted(positions):
            for kind, micro, chunk in positions[position]:
                assert position <= places[kind == "F", micro, chunk]
                got[kind == "F", chunk].append(micro)
        last = size[0] * size[2] - 1
        needed = {(item.kind == "F", item.chunk) for item in items if item.kind != "W"} - {(True, 0), (False, last)}
        assert got == {way: handed[way] for way in needed}
