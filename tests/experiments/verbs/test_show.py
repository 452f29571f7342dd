"""Schedules shown in all forms."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.schedule.ir.program import Schedule
from tests.experiments.verbs.typed import run


def test_show_in_all_forms(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("show", "--cluster", "hgx-h100", "--gpus", "4", "--seq", "1K", "--dtype", "bf16")
    grid = run(capsys, *options)
    assert "rank 3" in grid
    assert "A:kv3" in grid
    schedule = Schedule.from_json(run(capsys, *options, "--format", "json").encode())
    assert schedule.num_ranks == 4
    graph = run(capsys, *options, "--format", "dot", "--ranks", "0,2")
    assert graph.startswith("digraph")
    assert "cluster_1" not in graph
    target = tmp_path / "schedule.json"
    run(capsys, *options, "--format", "json", "--out", str(target))
    assert Schedule.from_json(target.read_bytes()).hash == schedule.hash


@pytest.mark.sweep
def test_a_pipeline_is_written_and_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("show", "--model", "tiny", "--cluster", "hgx-h100", "--gpus", "2", "--seq", "1K", "--scope", "step")
    options += ("--schedule", "single", "--layers", "4", "--pp-degree", "2", "--accumulate", "3")
    printed = run(capsys, *options, "--pipeline", "zb-v", "--format", "pipeline")
    first, second = printed.split()
    assert first.startswith("0F0,0F1,0F2,3F0,3I0,3W0,")
    assert second.startswith("1F0,2F0,")
    target = tmp_path / "mine.csv"
    run(capsys, *options, "--pipeline", "zb-v", "--format", "pipeline", "--out", str(target))
    assert run(capsys, *options, "--pipeline", str(target), "--format", "pipeline") == printed
    with pytest.raises(SystemExit):
        run(capsys, "show", "--gpus", "2", "--seq", "1K", "--format", "pipeline")
    assert "the schedule has one stage; set --pp-degree 2 or more" in capsys.readouterr().err
