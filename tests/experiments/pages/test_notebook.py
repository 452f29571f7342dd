"""What a notebook shows: the charts of the page that is served, of the same data, without a script."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest

import longstep
from experiments.pages.drawn.charts import BYTES, NUMBER, SECONDS, Chart, Point, bars, lines
from experiments.pages.drawn.still import still
from experiments.pages.report.sweep_chapter import sweep_charts
from experiments.serve.answering.jobs import Jobs
from sim.setup.answers import charts as charts_shown

TINY: dict[str, Any] = {"model": "tiny", "cluster": "hgx-h100", "gpus": 2, "layers": 2, "seq": "8K"}
SCRIPT = "<script>alert('&')</script>"
ROW: dict[str, Any] = {"schedule": SCRIPT, "step_time_s": 1.5, "mfu": 0.5, "fits": "no"}


class Shown(HTMLParser):
    """Of charts their titles, what hovering says, and the cells of their tables."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.looks: list[str] = []
        self.feed(html)
        assert self.tags == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in {"path", "rect", "br"}:
            self.tags.append(tag)
            self.texts.setdefault(tag, []).append("")
        if tag == "g":
            self.looks.append(dict(attrs)["class"] or "")
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        if tag not in {"path", "rect", "br"}:
            assert self.tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.tags:
            self.texts[self.tags[-1]][-1] += data


def require_drawn(html: str, charts: list[dict[str, Any]]) -> None:
    """All charts, in their order: each bar and point says what it does on a page, and the table is the same."""
    shown = Shown(html)
    assert shown.texts["figcaption"] == [chart["title"] for chart in charts]
    tips = [
        tip.replace("<br>", "\n")
        for chart in charts
        for trace in chart["traces"]
        for tip, value in zip(trace["hovertext"], trace["x"], strict=True)
        if value
    ]
    assert shown.texts["title"] == tips
    cells = [cell[1] for chart in charts for row in chart["rows"] for cell in row]
    assert shown.texts["td"][-len(cells) :] == cells


@pytest.mark.sweep
def test_a_prediction_has_the_charts_of_the_page() -> None:
    asked = {**TINY, "schedule": "ring"}
    parts = {
        part["part"]: part for part in json.loads(msgspec.json.encode([*Jobs().parts("ask", {"question": asked})]))
    }
    charts = {**parts["figures"]["charts"], **parts["whole"]["charts"]}
    html = longstep.predict(**asked)._repr_html_()
    require_drawn(html, [charts[name] for name in ("memory", "parts", "saves")])
    assert "capacity" in Shown(html).texts["text"]
    assert len(html) < 20_000


@pytest.mark.parametrize("asked", [{"scope": "attention", "layers": None}, {"schedule": "single", "gpus": 1}])
def test_any_prediction_can_be_drawn(asked: dict[str, Any]) -> None:
    assert "where the step of" in longstep.predict(**{"schedule": "ring", **TINY, **asked})._repr_html_()


@pytest.mark.sweep
def test_a_sweep_has_the_charts_of_the_page() -> None:
    found = longstep.explore(longstep.Setup("ring", **TINY), {"seq": "8K,16K", "schedule": "ring,zigzag"}, jobs=1)
    html = found._repr_html_()
    require_drawn(html, [msgspec.to_builtins(chart) for chart in sweep_charts(found.rows)])
    shown = Shown(html)
    assert shown.texts["figcaption"][0] == "step time"
    assert {"8K", "16K", "ring", "zigzag"} <= {*shown.texts["text"]}
    assert Shown(longstep.Table([ROW, {**ROW, "schedule": "ring"}])._repr_html_()).texts["figcaption"] == ["step time"]


def test_other_tables_have_no_charts() -> None:
    assert "<svg" not in longstep.Table([{"winner": "ring", "step_time_s": 1.0}])._repr_html_()
    assert "<svg" not in longstep.Table([])._repr_html_()
    assert "<svg" not in longstep.Table([ROW])._repr_html_()
    assert "<svg" not in longstep.Table([{**ROW, "step_time_s": None, "error": "it breaks"}] * 2)._repr_html_()


def test_names_are_no_markup() -> None:
    model = msgspec.structs.replace(longstep.model("tiny"), name=SCRIPT)
    of_model = longstep.predict("ring", **{**TINY, "model": model})._repr_html_()
    of_rows = longstep.Table([ROW, {**ROW, "schedule": "ring", "step_time_s": 2.5}])._repr_html_()
    for html in (of_model, of_rows):
        assert "<script" not in html
        assert "<svg" in html
    assert SCRIPT in Shown(of_rows).texts["text"]
    assert f"{SCRIPT}\nstep 1.5 s" in Shown(of_rows).texts["title"]


def test_what_does_not_fit_is_hollow_and_what_spans_little_has_ticks() -> None:
    points = {"a": [Point(1024, 1.0, (0.9, 1.2)), Point(2048, 1.01, hollow=True)], "b": [Point(1024, 1.02)]}
    drawn = still(lines(points, title="step", about="", x=("seq", None), y=("step", SECONDS)))
    assert [mark.look for mark in drawn.plot.marks] == ["hue-0", "hue-0 hollow", "hue-1"]
    assert [bool(mark.whisker) for mark in drawn.plot.marks] == [True, False, False]
    assert [tick.label for tick in drawn.plot.x_ticks] == ["1K", "2K"]
    assert len(drawn.plot.y_ticks) > 1
    assert drawn.key is not None
    assert [entry.label for *_, entry in drawn.key.entries] == ["a", "b"]
    linear = still(lines({"a": [Point(0, 0), Point(10, 3)]}, title="", about="", x=("n", NUMBER), y=("n", NUMBER)))
    assert linear.plot.x_ticks[0].label == "0"
    assert linear.key is None


def test_bars_are_as_long_as_their_figures_and_a_limit_is_where_it_is() -> None:
    chart: Chart = bars(
        ["x", "y"], {"a": [2.0**30, 0], "b": [2.0**30, 2.0**32]}, title="", about="", unit=BYTES,
        limit=("all", 2.0**33),
    )  # fmt: skip
    plot = still(chart).plot
    long = {mark.tip: mark.ends[1] - mark.ends[0] for mark in plot.marks}
    first, second, third = long.values()
    assert (first, third) == (pytest.approx(second, abs=0.02), pytest.approx(4 * second, abs=0.05))
    assert [mark.row for mark in plot.marks] == [0, 0, 1]
    assert plot.marks[1].ends[0] == plot.marks[0].ends[1]
    (limit,) = plot.trends
    assert limit.points[0][0] - plot.frame.left == pytest.approx(8 * second, abs=0.1)


def test_tables_stand_alone_where_nothing_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    p = longstep.predict("ring", **TINY)
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert "<svg" in p._repr_html_()
    monkeypatch.setattr(charts_shown, "_loads", [])
    assert "<svg" not in p._repr_html_()
    assert "<th>step</th>" in p._repr_html_()
