"""``longstep recheck``: points of a profile that were measured on another CPU, timed again here."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from experiments.evidence.executed.record import read_record
from experiments.verbs.cli import main
from sim.words.profile import save_profile

RECORD = Path(__file__).parents[3] / "experiments" / "results" / "2026-11-21-epyc-2-cores" / "cells.json"


@pytest.mark.gloo
def test_points_are_timed_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    profile = read_record(str(RECORD)).profile
    path = tmp_path / "epyc.json"
    short = tuple(point for point in profile.points if point.median_s < 1e-3)
    save_profile(msgspec.structs.replace(profile, points=short), path)
    main(["recheck", str(path)])
    printed = capsys.readouterr().out
    assert f"profile {profile.name!r} of {profile.created}, repeated" in printed
    drifts = [float(drift) for drift in re.findall(r"([+-][\d.]+) % *│$", printed, re.MULTILINE)]
    assert len(drifts) > 1
    low, high = (f"{end:+.1f} %" for end in (min(drifts), max(drifts)))
    assert f"from {low} to {high}" in printed
