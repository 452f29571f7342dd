"""Traces: breakdowns that sum to the step, and Chrome traces out and in."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.accounts.breakdown import PARTS, PartName, breakdown, critical_rank, overlapped_s, waiting_s
from sim.accounts.trace import Counter, Row, Trace, to_chrome
from sim.engine.play.simulate import Jitter, simulate
from sim.schedule.ir.ops import KINDS
from sim.words.workload import Workload
from tests.helpers import (
    OFFLOADED,
    VARIANTS,
    by_tier,
    checked_or_refused,
    make_checked,
    make_model,
    trace_of,
    traces_in,
)
from topology.cluster import Cluster, load_cluster

SOME_KINDS = ("Attend", "Merge", "Copy", "Exchange", "AllToAll", "Barrier", "HostSync")


def row(rank: int, op: int, kind: str, posted: float, begin: float, end: float) -> Row:
    stream = "compute" if kind in {"Attend", "Merge", "Copy"} else "link"
    return Row(rank, op, stream, kind, "forward", f"{kind} {op}", posted, begin, end)


def contents(trace: Trace) -> tuple[object, ...]:
    return trace.player, trace.schedule_hash, trace.num_ranks, trace.rows


def moments(trace: Trace, rank: int) -> Iterator[tuple[float, set[PartName]]]:
    """Yield how long what is going on, from the beginning of a trace to its end, by a walk from edge to edge."""
    edges: list[tuple[float, int, int]] = []
    for row in trace.of_rank(rank):
        part = KINDS[row.kind].meta.activity
        spans = [(row.posted_s, row.end_s, part)]
        if part != "synchronisation":
            spans = [(row.begin_s, row.end_s, part), (row.posted_s, row.begin_s, "synchronisation")]
        for begin, end, part in spans:
            if end > begin:
                edges += [(begin, PARTS.index(part), 1), (end, PARTS.index(part), -1)]
    active = [0] * len(PARTS)
    at = 0.0
    for time, number, change in sorted(edges):
        if time > at:
            yield time - at, {part for part, count in zip(PARTS, active, strict=True) if count}
        at = time
        active[number] += change
    yield trace.step_time_s - at, set()


def same_as_walked(trace: Trace) -> None:
    """Assert that breakdowns, critical rank and overlap are those of the walk, to the bit."""
    walked = []
    for rank in range(trace.num_ranks):
        parts, overlapped = dict.fromkeys(PARTS, 0.0), 0.0
        for seconds, going in moments(trace, rank):
            parts[next((part for part in PARTS if part in going), "idle")] += seconds
            overlapped += seconds if going >= {"compute", "communication"} else 0.0
        assert breakdown(trace, rank) == parts
        assert overlapped_s(trace, rank) == overlapped
        walked.append(waiting_s(parts))
    assert critical_rank(trace) == walked.index(min(walked))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Of any kinds at any times: also several at once on one stream, and such as take no time."""
    at = st.floats(0, 10, allow_subnormal=False) | st.integers(0, 3).map(float)
    rows = [
        row(rank, op, draw(st.sampled_from(SOME_KINDS)), *sorted(draw(st.tuples(at, at, at))))
        for rank in range(draw(st.integers(1, 3)))
        for op in range(draw(st.integers(1, 12)))
    ]
    return trace_of(rows)


@pytest.mark.sweep
@given(traces())
def test_the_parts_sum_to_the_step(found: Trace) -> None:
    for rank in range(found.num_ranks):
        parts = breakdown(found, rank)
        assert sum(parts.values()) == pytest.approx(found.step_time_s, abs=1e-12)
        assert all(parts[name] >= 0 for name in PARTS)


@pytest.mark.sweep
@given(traces())
def test_columns_say_what_a_walk_from_edge_to_edge_says(found: Trace) -> None:
    same_as_walked(found)


@pytest.mark.parametrize(
    "name", by_tier({"zigzag", "upipe, kept and offloaded"}, {"allgather", "ulysses", "fpdt"}, [*VARIANTS, *OFFLOADED])
)
def test_so_they_do_of_all_variants(name: str) -> None:
    workload = Workload(model=make_model(8, 4), seq=64, scope="layer", layers=2)
    for ranks in (1, 4):
        checked = checked_or_refused(name, workload, ranks)
        if checked:
            same_as_walked(simulate(checked, Cluster(load_cluster("hgx-h100")), None, Jitter(0.1)).trace)


def test_rows_and_columns_are_the_ops_of_the_schedule() -> None:
    checked = make_checked("zigzag", Workload(model=make_model(8, 4), seq=64), 4)
    found = simulate(checked, Cluster(load_cluster("hgx-h100")), None).trace
    assert found.num_ranks == 4
    assert found.ops is simulate(checked, Cluster(load_cluster("hgx-h100")), None).trace.ops
    assert found.rows == [row for rank in range(4) for row in found.of_rank(rank)]
    for program in checked.schedule.programs:
        rows = found.of_rank(program.rank)
        assert [(row.rank, row.op) for row in rows] == [(program.rank, index) for index in range(len(program.ops))]
        assert [(row.stream, row.kind, row.part, row.label) for row in rows] == [
            (op.stream, type(op).__name__, op.part, op.label) for op in program.ops
        ]
        for row, op in zip(rows, program.ops, strict=True):
            assert row.sent_bytes == (sum(program.nbytes(view) for _, view in getattr(op, "sends", ())))
    start = found.ops.starts[3]
    assert (found.posted_s[start], found.begun_s[start], found.ended_s[start]) == found.of_rank(3)[0][6:9]


def test_a_pickled_trace_is_the_same_without_its_schedule() -> None:
    checked = make_checked("ring", Workload(model=make_model(8, 4), seq=64), 2)
    found = simulate(checked, Cluster(load_cluster("hgx-h100")), None).trace
    again = pickle.loads(pickle.dumps(found))
    assert contents(again) == contents(found)
    assert breakdown(again, 1) == breakdown(found, 1)
    assert contents(pickle.loads(pickle.dumps(again))) == contents(found)


def test_a_breakdown_by_hand() -> None:
    """Attention 0-4, beside it an exchange posted at 1 that begins at 3 and ends at 6, then a copy 7-8; step 10."""
    rows = [
        row(0, 0, "Attend", 0, 0, 4),
        row(0, 1, "Exchange", 1, 3, 6),
        row(0, 2, "Copy", 7, 7, 8),
        row(1, 0, "Exchange", 0, 5, 10),
    ]
    found = trace_of(rows)
    assert breakdown(found, 0) == {"compute": 4, "copy": 1, "communication": 2, "synchronisation": 0, "idle": 3}
    assert breakdown(found, 1) == {"compute": 0, "copy": 0, "communication": 5, "synchronisation": 5, "idle": 0}
    assert waiting_s(breakdown(found, 1)) == 5
    assert [overlapped_s(found, rank) for rank in (0, 1)] == [1, 0]
    assert critical_rank(found) == 0


@pytest.mark.sweep
@given(traces(), traces())
def test_chrome_traces_come_back_as_they_were(simulated: Trace, executed: Trace) -> None:
    executed = trace_of(executed.rows, "executed", "1" * 16)
    data = to_chrome([simulated, executed], {"simulated": [Counter(0, 0.5, {"bytes": 1024})]})
    assert list(map(contents, traces_in(data))) == [contents(simulated), contents(executed)]


def test_chrome_traces_show_both_players_side_by_side() -> None:
    found = trace_of([row(0, 0, "Attend", 0, 0, 1), row(1, 0, "Exchange", 0, 1, 2)])
    document = json.loads(to_chrome([found, found], {"simulated": [Counter(1, 0.5, {"bytes": 7})]}))
    events = document["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0 simulated", "rank 1 simulated"] * 2
    spans = [event for event in events if event["ph"] == "X"]
    assert {(event["pid"], event["ts"], event["dur"]) for event in spans} == {
        (0, 0, 1e6), (2, 1e6, 1e6), (1, 0, 1e6), (3, 1e6, 1e6)
    }  # fmt: skip
    assert [event["args"] for event in events if event["ph"] == "C"] == [{"bytes": 7}, {"bytes": 7}]
