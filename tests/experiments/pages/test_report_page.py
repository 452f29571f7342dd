"""The report: what a file holds is told by its content, tables hold the numbers of rows, charts have alternatives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.evidence.results import Result, read_result
from experiments.pages.drawn.timeline import busy, memory_charts, of_chrome
from experiments.pages.report.report_page import chapter, page, plotly_js
from sim.base.errors import InputError
from tests.experiments.pages.reading import HOSTILE, Read
from tests.experiments.verbs.typed import H100, fails, run

RECORD = Path(__file__).parents[3] / "experiments/results/2026-11-21-epyc-2-cores/cells.json"
GIB = 2**30


def sweep_rows() -> list[dict[str, Any]]:
    return [
        {
            "seq": f"{seq}K", "schedule": schedule, "step_time_s": seq * factor, "low_s": None, "high_s": None,
            "tokens_per_s_per_gpu": 1024 / factor, "fits": "yes" if seq < 128 else "no", "bound_by": "compute",
            "compute_s": seq * factor, "attention_bytes": seq * GIB, "peak_hbm_bytes": seq * GIB, "error": "",
        }
        for seq in (64, 128)
        for schedule, factor in (("ring", 0.5), ("zigzag", 0.25))
    ]  # fmt: skip


def without_library(text: str) -> str:
    library = plotly_js()
    assert "</script" not in library.lower()
    assert text.count(library) == 1
    return text.replace(library, "")


def sorted_by(text: str) -> list[list[str | None]]:
    """The values that cells of each table sort by, in the order of the page."""
    return [[of["data-value"] for tag, of in Read(part).tags if tag == "td"] for part in text.split("<table")[1:]]


def test_a_sweep_is_drawn_and_tabled(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text(json.dumps(sweep_rows()))
    text = without_library(page(HOSTILE, [read_result(str(path))]))
    assert HOSTILE not in text
    assert "://" not in text
    read = Read(text)
    charts = [of for tag, of in read.tags if of.get("class") == "chart"]
    tables = {of.get("id") for tag, of in read.tags if tag == "table"}
    assert len(charts) == 5, "step, rate, peak, parts of the step, terms of the peak"
    assert all(of["aria-label"] and of["aria-details"] in tables for of in charts)
    assert not {"src", "srcset", "action"} & {name for _, of in read.tags for name in of}
    assert all(str(of["href"]).startswith("#") for _, of in read.tags if "href" in of)
    (policy,) = [str(of["content"]) for tag, of in read.tags if tag == "meta" and "http-equiv" in of]
    assert policy.startswith("default-src 'none'")
    steps, *_, rows = sorted_by(text)
    assert sorted(map(float, steps[2::3])) == sorted(row["step_time_s"] for row in sweep_rows())
    assert [value for value in rows if value in {"ring", "zigzag"}] == ["ring", "zigzag"] * 2
    for row in sweep_rows():
        assert str(row["peak_hbm_bytes"]) in rows
    drawn = read.data["charts"]["chart-0-0"]
    assert [trace["name"] for trace in drawn["traces"]] == ["ring", "zigzag"]
    assert drawn["traces"][0]["x"] == [65536, 131072]
    assert drawn["traces"][0]["y"] == [32.0, 64.0]
    assert drawn["traces"][0]["marker"]["symbol"] == ["circle", "circle-open"], "what does not fit is hollow"
    assert drawn["layout"]["xaxis"]["ticktext"] == ["64K", "128K"]


def test_what_users_name_is_no_markup_in_charts() -> None:
    rows = [row | {"schedule": "<a href='javascript:x'>"} for row in sweep_rows()]
    (first, *_) = chapter(Result("rows", "rows", rows)).charts
    assert "<a" not in json.dumps(first.traces)


@pytest.mark.sweep
def test_the_tables_of_sweeps_are_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("rows.csv", "rows.parquet"):
        run(
            capsys, "sweep", *H100, "--vary", "seq=32K,64K", "--step-only", "--jobs", "1", "--out", str(tmp_path / name)
        )
    csv, parquet = (read_result(str(tmp_path / name)) for name in ("rows.csv", "rows.parquet"))
    assert (csv.kind, parquet.kind) == ("rows", "rows")
    assert [row["step_time_s"] for row in csv.data] == [row["step_time_s"] for row in parquet.data]
    assert csv.command.startswith("longstep sweep")
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(map(json.dumps, sweep_rows())))
    assert read_result(str(lines)).data == sweep_rows()


@pytest.mark.sweep
def test_a_trace_and_a_prediction_and_a_record(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace, figures, out = (tmp_path / name for name in ("trace.json", "figures.json", "report.html"))
    figures.write_text(run(capsys, "simulate", *H100, "--trace", str(trace), "--json"))
    step_s = json.loads(figures.read_text())["step_time_s"]
    events = read_result(str(trace)).data["traceEvents"]
    timeline = of_chrome("trace", events)
    assert timeline["players"] == ["simulated"]
    assert timeline["end_s"] == pytest.approx(step_s)
    assert sum(count for _, count, _ in busy(timeline)) == sum(event["ph"] == "X" for event in events)
    (memory, *_) = memory_charts(events)
    counted = [sum(event["args"].values()) for event in events if event["ph"] == "C"]
    assert sum(row[1].value for row in memory.rows) == max(counted)
    printed = run(capsys, "report", str(trace), str(figures), str(RECORD), "--out", str(out))
    assert "3 results" in printed
    text = without_library(out.read_text())
    assert text.count("<article") == 3
    assert 'id="timeline-0"' in text
    assert "What these figures rest on" in text
    assert "cells met their target" in text


def test_both_players_are_on_one_timeline() -> None:
    op = {
        "rank": 0, "op": 0, "stream": "compute", "kind": "Attend", "part": "forward", "label": "<b>", "posted_s": 0.0
    }  # fmt: skip
    events = [
        {"ph": "X", "args": {**op, "player": player, "begin_s": 0.0, "end_s": end}}
        for player, end in (("simulated", 1.0), ("executed", 2.0))
    ]
    timeline = of_chrome("trace", events)
    assert timeline["players"] == ["simulated", "executed"]
    assert busy(timeline) == [("Attend forward", 1, [1.0, 2.0])]


PLAN = {
    "best": [{"schedule": "usp", "options": "a=b", "step_time_s": 2.0, "low_s": 1.0, "high_s": 3.0,
              "peak_hbm_bytes": GIB}],
    "lost": [{"schedule": "ring", "why": "slower"}], "slack": 0.0, "simulated": 3, "configurations": 9, "shortage": "",
}  # fmt: skip
DOCTOR = {
    "verdict": "too slow", "simulated_s": 1.0, "measured_s": 2.0, "findings": ["one"], "skipped": ["two"],
    "traced": None, "causes": [{"name": "slow rank", "step_time_s": 2.0}],
}  # fmt: skip
WINNERS = [
    {"seq": seq, "winner": winner, "step_time_s": 1.0, "behind": "usp", "ratio": 1.1, "tied": False, "why": "faster"}
    for seq, winner in ((8192, "ring"), (16384, "zigzag"))
]
CROSSOVER = {
    "along": "seq", "a": "ring", "b": "ulysses", "points": [{"value": 8192.0, "a_s": 1.0, "b_s": None}],
    "crossings": [{"value": 16384, "low": 12288, "high": 17408, "below": "a", "above": "b"},
                  {"value": None, "low": None, "high": None, "below": "b", "above": "b"}],
}  # fmt: skip
NEIGHBOURS = [
    {"change": change, "ratio": ratio, "step_time_s": ratio, "fits": None, "extrapolated": 0.5, "error": error}
    for change, ratio, error in (("layout zigzag", 0.5, ""), ("", 1.0, ""), ("overlap false", None, "refused"))
]
CASES = [{"cases": "our cluster", "case": "ring 8K", "measured_s": 1.0, "predicted_s": 1.5, "error": 0.5}]


@pytest.mark.parametrize(
    ("kind", "found", "said"),
    [
        ("plan", PLAN, "9 configurations, 3 simulated"),
        ("plan", PLAN | {"best": [], "shortage": "1 GiB"}, "the smallest shortage: 1 GiB"),
        ("answer", {"value": 65536, "sure": False, "tried": [{"seq": 65536, "why": "fits"}]}, "64K"),
        ("doctor", DOCTOR, "too slow: predicted 1 s, measured 2 s"),
        (
            "elasticities",
            [{"figure": "compute", "elasticity": -0.9}, {"figure": "GPU memory", "elasticity": None}],
            "",
        ),
        ("winners", WINNERS, "ring: 1 of 2 places"),
        ("crossover", CROSSOVER, "at 16K ulysses instead of ring, known to be in 12K to 17K"),
        ("neighbours", NEIGHBOURS, "fastest that fits: layout zigzag, 0.500 times as long for a token"),
        ("cases", CASES, "our cluster: 1 cases, mean error 50.0 %"),
        ("fit", [{"row": "ring", "helps": "", "step_time_s": 1.0, "fits": True, "seq": 1024}], ""),
    ],
)
def test_kinds_are_told_by_content(kind: str, found: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "result"
    path.write_text(json.dumps(found))
    result = read_result(str(path))
    assert result.kind == kind
    shown = chapter(result)
    assert said in " ".join(shown.says)
    assert all(chart.about and chart.rows for chart in shown.charts)


@pytest.mark.sweep
def test_the_answer_of_a_result_is_on_top(tmp_path: Path) -> None:
    """Of rows that stand beside it, and of an object; with its lines, and evidence below these."""
    path = tmp_path / "result"
    said = {"answer": "Ring <wins>", "rests_on": ["kernels: of a toy", "little"]}
    evidence = {"profile": "toy", "measured_on": "a toy", "created": "today", "complete": True, "notes": ["much more"]}
    for kind, found in (
        ("winners", {**said, "rows": WINNERS}),
        ("plan", {**said, **PLAN, "evidence": evidence}),
        ("doctor", {**said, **DOCTOR}),
    ):
        path.write_text(json.dumps(found))
        result = read_result(str(path))
        assert (result.kind, result.answer, result.rests_on) == (kind, "Ring <wins>", ("kernels: of a toy", "little"))
        shown = chapter(result)
        assert shown.says[0] == "Ring <wins>"
        text = without_library(page("results", [result]))
        assert text.count("Ring &lt;wins&gt;") == 1, "once on the page"
        assert '</h1>\n<p class="answer">Ring &lt;wins&gt;</p>' in text
        assert "<li>kernels: of a toy</li>" in text
    path.write_text(json.dumps({**said, **PLAN, "evidence": evidence, "rests_on": 5}))
    assert read_result(str(path)).rests_on == ()
    both = without_library(page("results", [result, result]))
    assert both.count("</a>: Ring &lt;wins&gt;") == 2, "where there are several, beside their names"


@pytest.mark.sweep
def test_verbs_print_what_reports_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "result"
    for kind, arguments in (
        ("roofline", ("roofline", "--seq", "8K")),
        ("balance", ("balance", "--seq", "16K", "--gpus", "2", "--planners", "zigzag", "--kernels-only")),
        ("rows", ("simulate", *H100, "--schedule", "ring,zigzag")),
        ("elasticities", ("simulate", *H100, "--sensitivity")),
    ):
        path.write_text(run(capsys, *arguments, "--json"))
        result = read_result(str(path))
        assert result.kind == kind
        assert chapter(result).charts, kind


def test_what_is_no_result_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, out = tmp_path / "result", ("--out", str(tmp_path / "report.html"))
    for content, said in (
        ("{}", "no result of Longstep"),
        ("[]", "no result of Longstep"),
        ("[1, 2]", "no result of Longstep"),
        ("nothing", "is neither Parquet, CSV of a sweep nor JSON"),
        ("PAR1 nothing", "cannot be read as Parquet"),
        ("PAR1" + "\0" * 100 + "PAR1", "cannot be read as Parquet"),
        ("# longstep sweep: any\n", "expected rows that have a cell for each name"),
        ("# longstep sweep: any\nseq,step_time_s\n1,2,3\n", "expected rows that have a cell for each name"),
        ('{"traceEvents": [{"ph": "X", "name": "aten::mm"}]}', "did not write"),
        ('{"best": [], "lost": []}', "it is of another version, or was edited"),
        ('{"comparisons": [], "profile": 1}', "longstep validate --out writes one"),
    ):
        path.write_text(content)
        assert said in fails(capsys, "report", str(path), *out), content
    assert "cannot be read" in fails(capsys, "report", str(tmp_path / "none"), *out)
    assert "name one file or more" in fails(capsys, "report", *out)


def test_without_plotly_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    with pytest.raises(InputError, match=r"pip install 'longstep\[report\]'"):
        plotly_js()
