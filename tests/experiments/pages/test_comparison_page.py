"""The HTML page: what its data say, that it loads nothing, and that no label breaks out of it."""

from __future__ import annotations

import re

import msgspec
import pytest

from experiments.evidence.executed.comparison import Comparison, laid_side_by_side, measured
from experiments.pages.comparison_page import page
from runtime.run import Step
from sim.accounts.breakdown import PARTS, breakdown
from sim.accounts.trace import Player, Trace
from sim.engine.play.simulate import simulate
from sim.engine.results.report import report
from sim.words.workload import Workload
from tests.experiments.pages.reading import HOSTILE, Read, loads_nothing
from tests.helpers import make_checked, make_cluster_spec, make_model, trace_of
from topology.cluster import Cluster
from topology.specs import HbmSpec


def scaled(trace: Trace, factor: float, player: Player = "executed") -> Trace:
    rows = [
        row._replace(posted_s=factor * row.posted_s, begin_s=factor * row.begin_s, end_s=factor * row.end_s)
        for row in trace.rows
    ]
    return trace_of(rows, player, trace.schedule_hash)


def make_comparison(name: str = "ring", ranks: int = 2) -> tuple[Comparison, Trace, Trace]:
    """A simulated step, and executed ones that take 1.25 times as long, more or less."""
    checked = make_checked(name, Workload(model=make_model(), seq=96, dtype="fp32"), ranks)
    spec = make_cluster_spec(ranks, hbm=HbmSpec(capacity_bytes=2**40, bytes_per_s=1e11))
    simulation = simulate(checked, Cluster(spec), None)
    executed = [scaled(simulation.trace, factor) for factor in (1.0, 1.25, 1.5)]
    steps = [Step(trace, [1024] * ranks, [0] * ranks) for trace in executed]
    found = laid_side_by_side(checked, simulation.trace, report(simulation), steps, [0.01, -0.02])
    return found, simulation.trace, executed[1]


@pytest.mark.parametrize(("name", "ranks"), [("ring", 4), ("ulysses", 2), ("single", 1)])
def test_the_data_are_the_comparison(name: str, ranks: int) -> None:
    found, simulated, executed = make_comparison(name, ranks)
    data = Read(page("a title", found, simulated, executed)).data
    assert data["schedule_hash"] == found.schedule_hash
    assert data["end_s"] == executed.step_time_s
    names = [f"{row.kind} {row.part}" for row in found.kinds]
    assert [kind["name"] for kind in data["kinds"]] == names
    assert [kind["times"] for kind in data["kinds"]] == [msgspec.to_builtins(row.times) for row in found.kinds]
    for kind in [*data["kinds"], data["step"]]:
        if kind["times"]["median_s"]:  # a Hold takes none
            assert kind["times"]["error"] == pytest.approx(1 / 1.25 - 1)
    assert data["step"]["of_step"] == pytest.approx(data["step"]["times"]["error"])
    assert sum(kind["count"] for kind in data["kinds"]) == len(simulated.rows)
    assert "other" not in {kind["family"] for kind in data["kinds"] if kind["times"]["median_s"]}
    for trace in (simulated, executed):
        shown = {
            (lane["rank"], op, lane["stream"], names[kind], data["labels"][label]): tuple(span)
            for lane in data["lanes"]
            for op, kind, label, span in zip(
                lane["ops"], lane["kinds"], lane["labels"], lane[trace.player], strict=True
            )
        }
        rows = {(row.rank, row.op, row.stream, f"{row.kind} {row.part}", row.label): row[6:9] for row in trace.rows}
        assert shown.keys() == rows.keys()
        for key, span in shown.items():
            assert span == pytest.approx(rows[key], abs=1e-10)


def test_streams_come_by_rank_with_compute_first() -> None:
    lanes = Read(page("", *make_comparison("ring", 3))).data["lanes"]
    order = [(lane["rank"], lane["stream"] != "compute", lane["stream"]) for lane in lanes]
    assert order == sorted(order)
    assert {lane["rank"] for lane in lanes if lane["stream"] == "compute"} == {0, 1, 2}


def test_the_parts_of_every_rank_sum_to_the_step() -> None:
    found, simulated, executed = make_comparison("ring", 4)
    shown = Read(page("", found, simulated, executed)).data["breakdown"]
    assert [parts["rank"] for parts in shown] == [0, 1, 2, 3]
    for parts in shown:
        for trace in (simulated, executed):
            assert list(parts[trace.player]) == list(PARTS)
            assert parts[trace.player] == breakdown(trace, parts["rank"])
            assert sum(parts[trace.player].values()) == pytest.approx(trace.step_time_s)


def test_the_page_says_what_was_found() -> None:
    found, simulated, executed = make_comparison()
    read = Read(page("ring of two", found, simulated, executed))
    text = re.sub(r"\s+", " ", " ".join(read.texts))
    assert ("h1", {}) in read.tags
    assert "ring of two" in text
    assert "Simulated 101 us is 20 % less than the measured 126 us (101 to 152 us in 3 steps)" in text
    assert "kernels take +1.0 % before these steps and -2.0 % after them" in text
    assert "every kernel and link runs at the datasheet rates of 'toy'" in text
    assert found.schedule_hash in text
    assert read.rows("tr") == list(range(len(found.kinds)))
    assert sorted(read.rows("g")) == sorted([*range(len(found.kinds) + 1)] * 2), (
        "all kinds and the step, wide and narrow"
    )
    bars = [attributes for tag, attributes in read.tags if tag == "i" and "title" in attributes]
    assert len(bars) == 2 * 2 * len(PARTS)


def test_the_page_loads_nothing() -> None:
    loads_nothing(page("a title", *make_comparison()))


def test_no_text_breaks_out() -> None:
    found, simulated, executed = make_comparison()
    evil = [
        trace_of([row._replace(label=HOSTILE) for row in trace.rows], trace.player, trace.schedule_hash)
        for trace in (simulated, executed)
    ]
    evidence = msgspec.structs.replace(found.report.evidence, notes=[HOSTILE])
    found = msgspec.structs.replace(found, report=msgspec.structs.replace(found.report, evidence=evidence))
    plain, read = Read(page("", *make_comparison())), Read(page(HOSTILE, found, evil[0], evil[1]))
    assert read.data["labels"] == [HOSTILE]
    assert [tag for tag, _ in read.tags] == [tag for tag, _ in plain.tags]
    assert read.scripts[1:] == plain.scripts[1:]
    assert f"evidence: {HOSTILE}" in read.texts


def test_traces_of_different_schedules_are_refused() -> None:
    found, simulated, executed = make_comparison()
    with pytest.raises(AssertionError, match="different schedules"):
        page("", found, simulated, trace_of(executed.rows, "executed", "another"))


def test_a_kind_that_takes_no_time() -> None:
    """Division by nothing, a logarithm of nothing: shown in the table, left out of the plot."""
    found, simulated, executed = make_comparison()
    nothing = measured(0.0, [0.0])
    found = msgspec.structs.replace(
        found, step=nothing, kinds=[msgspec.structs.replace(row, times=nothing) for row in found.kinds]
    )
    read = Read(page("", found, scaled(simulated, 0.0, "simulated"), scaled(executed, 0.0)))
    assert read.data["end_s"] == 0.0
    assert {kind["of_step"] for kind in read.data["kinds"]} == {0.0}
    assert read.rows("g") == []
