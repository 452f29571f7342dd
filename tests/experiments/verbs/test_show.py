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
