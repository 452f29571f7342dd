"""How evenly ranks attend what planners gave them: executed one rank at a time, beside what is predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import longstep
from experiments.evidence.executed.executed_skew import executed_skews
from experiments.verbs.cli import main
from sim.balance.planners import PLANNERS

LENGTHS = (1900, 130, 700, 512, 340, 180, 160, 100, 74)
"""4,096 tokens, one document nearly half of them."""


def skews(planners: list[str], lengths: tuple[int, ...], gpus: int, profile: str, repeats: int) -> list[dict[str, Any]]:
    setup = longstep.Setup(model="tiny", cluster="host", gpus=gpus, profile=profile, scope="attention")
    return executed_skews(longstep.balance(setup, lengths, planners), repeats)


@pytest.mark.sweep
def test_the_last_rank_of_a_contiguous_ring_attends_most() -> None:
    """Of two ranks with one document the second has 3/4 of the pairs, and striped ones have as many each."""
    ring, striped = skews(["ring", "striped"], (768,), 2, "datasheet", 2)
    assert ring["simulated"] == pytest.approx(1.5, abs=0.01)
    assert ring["executed"] == pytest.approx(1.5, abs=0.2)
    assert ring["off"] == ring["simulated"] - ring["executed"]
    assert striped["simulated"] == pytest.approx(1.0, abs=0.01)
    assert striped["executed"] < ring["executed"]


@pytest.mark.gloo
@pytest.mark.slow
def test_executed_skew_is_the_predicted_one_for_every_planner(tmp_path: Path) -> None:
    """Within 0.1, by what this machine's kernels were measured to take."""
    pytest.importorskip("mtkahypar")
    profile = tmp_path / "host.json"
    main(["calibrate", "--quick", "--out", str(profile)])
    found = skews(list(PLANNERS), LENGTHS, 4, str(profile), 5)
    assert [row["planner"] for row in found] == list(PLANNERS)
    assert {row["planner"]: row["off"] for row in found if abs(row["off"]) > 0.1} == {}


def test_balance_executes_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    typed = ("balance", "--model", "tiny", "--cluster", "host", "--documents", "magi", "--seq", "256", "--gpus", "2",
             "--planners", "zigzag,wlb-llm", "--execute")  # fmt: skip
    main([*typed, "--json"])
    rows = json.loads(capsys.readouterr().out)["executed"]
    assert [row["planner"] for row in rows] == ["zigzag", "wlb-llm"]
    assert all(1 <= row["executed"] <= 2 and row["slowest_s"] > 0 for row in rows)
    main(list(typed))
    assert "of attention kernels, ranks one at a time" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*typed, "--kernels-only"])
    assert "plays what was simulated of one batch" in capsys.readouterr().err


def test_a_planner_is_compared_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    typed = ("simulate", "--model", "tiny", "--cluster", "host", "--gpus", "2", "--scope", "attention")
    main([*typed, "--schedule", "fcp-style", "--documents", "1500,548"])
    assert "fcp-style, attention of tiny" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*typed, "--schedule", "fcp-style"])
    assert "fcp-style plans documents: set --documents" in capsys.readouterr().err
