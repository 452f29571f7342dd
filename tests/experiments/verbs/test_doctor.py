"""The doctor on the command line: what a run points to, and what is no measurement."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sim.diagnose.hypotheses import PROGRAMS
from tests.experiments.verbs.typed import H100, fails, run


@pytest.mark.sweep
def test_doctor_says_what_a_run_points_to_and_how_to_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """128K on 8 H100 with zigzag take 119 ms: 10 ms is less than attention alone, twice as much a full mask;
    what cannot be told apart is said.
    """
    few = ("full-mask", "contiguous", "cp-off")
    monkeypatch.setattr("sim.diagnose.doctor.PROGRAMS", [one for one in PROGRAMS if one.name in few])
    run_of = ("doctor", *H100, "--schedule", "zigzag")
    printed = run(capsys, *run_of, "--step-time", "10ms")
    assert printed.startswith("Impossible: 10 ms a step is below 62.2 ms, the floor by FLOPs at the peak; ")
    assert "attention kernels alone 107 ms" in printed
    slow = run(capsys, *run_of, "--step-time", "0.22", "--memory", "2GiB")
    assert re.match(r"Too slow: 220 ms a step is 1\.8\d times the predicted 1\d\d ms \(.*; .* would explain it\n", slow)
    assert "cannot be told apart" in slow
    assert "- full-mask: " in slow
    assert "to check: print what attention is called with" in slow
    found = json.loads(run(capsys, *run_of, "--step-time", "220ms", "--json"))
    assert found["verdict"] == "too slow"
    assert found["answer"].startswith("Too slow: ")
    assert len(found["rests_on"]) == 3
    assert {"slow-rank", "full-mask"} <= {row["name"] for row in found["causes"] if row["consistent"]}
    same = run(capsys, *run_of, "--memory", "1.7GiB", "--also", "gpus=4,memory=1.7GiB")
    assert "did not move as it should" in same


@pytest.mark.sweep
def test_the_doctor_lays_a_trace_beside_the_simulated_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A trace of the same simulation differs nowhere; that of a full mask names the kind of kernels that is off."""
    run_of = (*H100, "--schedule", "zigzag", "--gpus", "2")
    for name, more in (("same", ()), ("full", ("--mask", "full"))):
        run(capsys, "simulate", *run_of, *more, "--trace", str(tmp_path / f"{name}.json"))
    same = run(capsys, "doctor", *run_of, "--trace", str(tmp_path / "same.json"))
    assert re.search(r"attention forward +│ ([\d.]+ m?s) +│ \1 +│", same)
    assert "Healthy: " in same
    assert " times as long" not in same
    full = run(capsys, "doctor", *run_of, "--trace", str(tmp_path / "full.json"))
    assert re.search(r"- attention backward: .* 1\.9\d times|- attention backward: .* 2 times", full)
    assert "- full-mask: " in full
    found = json.loads(run(capsys, "doctor", *run_of, "--trace", str(tmp_path / "full.json"), "--json"))
    assert [row["rank"] for row in found["traced"]["ranks"]] == [0, 1]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ((), "nothing was measured: give --step-time, --tokens-per-s, --memory, --mfu or --trace"),
        (("--trace", "none.json"), "'none.json' cannot be read (No such file or directory); set it with --trace"),
        (("--step-time", "fast"), "--step-time fast: expected a time above 0 such as 41s or 350ms"),
        (("--step-time", "0"), "--step-time 0: expected a time"),
        (("--memory", "61 parsecs"), "--memory 61 parsecs: expected a size"),
        (("--mfu", "41", "--step-time", "1"), "--mfu 41: expected a share such as 0.41, or 41%"),
        (("--step-time", "1", "--rank-times", "1,,2"), "--rank-times : expected a time"),
        (("--tokens-per-s", "nan"), "--tokens-per-s nan: expected a number above 0"),
        (("--memory", "2GiB", "--also", "gpu=4"), "'gpu' (did you mean 'gpus'?)"),
        (("--memory", "2GiB", "--also", "gpus=four"), "--also gpus=four: gpus 'four': expected a whole number"),
    ],
)
def test_the_doctor_refuses_what_is_no_measurement(
    capsys: pytest.CaptureFixture[str], typed: tuple[str, ...], message: str
) -> None:
    assert message in fails(capsys, "doctor", *H100, *typed)
