"""Traces: breakdowns that sum to the step, and Chrome traces out and in."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.breakdown import PARTS, breakdown, critical_rank, overlapped_s, waiting_s
from sim.trace import Counter, Row, Trace, to_chrome
from tests.helpers import traces_in

KINDS = ("Attend", "Merge", "Copy", "Exchange", "AllToAll", "Barrier", "HostSync")


def row(rank: int, op: int, kind: str, posted: float, begin: float, end: float) -> Row:
    stream = "compute" if kind in {"Attend", "Merge", "Copy"} else "link"
    return Row(rank, op, stream, kind, "forward", f"{kind} {op}", posted, begin, end)


def trace(*rows: Row) -> Trace:
    return Trace(player="simulated", schedule_hash="0" * 16, num_ranks=1 + max(r.rank for r in rows), rows=list(rows))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    rows = []
    for number in range(draw(st.integers(1, 12))):
        times = sorted(draw(st.tuples(*[st.floats(0, 10, allow_subnormal=False)] * 3)))
        rows.append(row(draw(st.integers(0, 2)), number, draw(st.sampled_from(KINDS)), *times))
    return trace(*rows)


@given(traces())
def test_the_parts_sum_to_the_step(found: Trace) -> None:
    for rank in range(found.num_ranks):
        parts = breakdown(found, rank)
        assert sum(parts.values()) == pytest.approx(found.step_time_s, abs=1e-12)
        assert all(parts[name] >= 0 for name in PARTS)


def test_a_breakdown_by_hand() -> None:
    """Attention 0-4, beside it an exchange posted at 1 that begins at 3 and ends at 6, then a copy 7-8; step 10."""
    found = trace(
        row(0, 0, "Attend", 0, 0, 4),
        row(0, 1, "Exchange", 1, 3, 6),
        row(0, 2, "Copy", 7, 7, 8),
        row(1, 0, "Exchange", 0, 5, 10),
    )
    assert breakdown(found, 0) == {"compute": 4, "copy": 1, "communication": 2, "synchronisation": 0, "idle": 3}
    assert breakdown(found, 1) == {"compute": 0, "copy": 0, "communication": 5, "synchronisation": 5, "idle": 0}
    assert waiting_s(breakdown(found, 1)) == 5
    assert [overlapped_s(found, rank) for rank in (0, 1)] == [1, 0]
    assert critical_rank(found) == 0


@given(traces(), traces())
def test_chrome_traces_come_back_as_they_were(simulated: Trace, executed: Trace) -> None:
    import msgspec

    executed = msgspec.structs.replace(executed, player="executed")
    data = to_chrome([simulated, executed], {"simulated": [Counter(0, 0.5, 1024)]})
    assert traces_in(data) == [simulated, executed]


def test_chrome_traces_show_both_players_side_by_side() -> None:
    found = trace(row(0, 0, "Attend", 0, 0, 1), row(1, 0, "Exchange", 0, 1, 2))
    document = json.loads(to_chrome([found, found], {"simulated": [Counter(1, 0.5, 7)]}))
    events = document["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0 simulated", "rank 1 simulated"] * 2
    spans = [event for event in events if event["ph"] == "X"]
    assert {(event["pid"], event["ts"], event["dur"]) for event in spans} == {
        (0, 0, 1e6), (2, 1e6, 1e6), (1, 0, 1e6), (3, 1e6, 1e6)
    }  # fmt: skip
    assert [event["args"] for event in events if event["ph"] == "C"] == [{"bytes": 7}, {"bytes": 7}]


class Counted(list[Row]):
    """Rows that count how often somebody goes through all of them."""

    times = 0

    def __iter__(self) -> Iterator[Row]:
        self.times += 1
        return super().__iter__()


def test_ranks_are_not_looked_for_among_all_rows_each() -> None:
    rows = Counted(row(rank, 0, "Attend", 0, 0, 64 - rank) for rank in range(64))
    found = Trace(player="simulated", schedule_hash="0" * 16, num_ranks=64, rows=rows)
    assert [found.of_rank(rank) for rank in range(64)] == [[one] for one in list(rows)]
    assert critical_rank(found) == 0
    assert rows.times < 64 + 8
