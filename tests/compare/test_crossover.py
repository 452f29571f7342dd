"""Crossovers: where the faster of two setups changes, against what single predictions say on both sides."""

from __future__ import annotations

import pytest

import longstep
from longstep import Setup
from sim.base.errors import InputError

ALONE = Setup("zigzag", model="llama3-8b", cluster="hgx-h100", scope="attention", passes="forward", gpus=4, seeds=1)
NVLINK = "cluster.nvlink.bytes_per_s"


@pytest.mark.sweep
def test_both_sides_of_a_crossing_are_what_is_predicted() -> None:
    """UPipe's many small messages cost more than a contiguous ring's idle ranks only where sequences are short."""
    ring, upipe = ALONE.replace(schedule="ring"), ALONE.replace(schedule="upipe")
    first, last = longstep.crossover(ring, upipe, "seq", "8K..64K")
    assert (first["below"], first["above"], last["value"], last["above"]) == ("a", "b", None, "b")
    assert first["low"] <= first["value"] <= first["high"]
    for seq, faster in ((first["value"] - 1024, "a"), (first["value"], "b")):
        times = [one.replace(seq=seq).predicted().step_time_s for one in (ring, upipe)]
        assert ("b" if times[0] > times[1] else "a") == faster
    swapped, _ = longstep.crossover(upipe, ring, "seq", "8K..64K")
    assert (swapped["value"], swapped["below"], swapped["above"]) == (first["value"], "b", "a")


@pytest.mark.sweep
@pytest.mark.slow
def test_steps_that_are_told_by_few_cross() -> None:
    step = Setup(model="tiny", cluster="hgx-h100", scope="step", gpus=2, layers=8, seq="16K", jitter=0.0)
    ring, ulysses = step.replace(schedule="ring"), step.replace(schedule="ulysses")
    found = longstep.crossover(ring, ulysses, NVLINK, "100e9..450e9", within=0.5, extend=True)
    for point in found.points:
        for key, one in (("a_s", ring), ("b_s", ulysses)):
            told = longstep.extended(one.replace(set={NVLINK: point["value"]}))
            assert point[key] == pytest.approx(told.step_time_s)


@pytest.mark.slow
def test_what_cannot_be_played_or_does_not_fit_has_lost() -> None:
    step = Setup(model="llama3-8b", cluster="hgx-h100", layers=2, seq="256K", seeds=1)
    step = step.replace(set={"cluster.hbm.capacity_bytes": 16e9}, schedule="ulysses")
    (only,) = longstep.crossover(step.replace(stack="fsdp"), step.replace(stack="alst"), NVLINK, "400e9..450e9")
    assert only["below"] == "b"
    with pytest.raises(InputError, match="neither can be played and fits"):
        never = ALONE.replace(schedule="ulysses")  # whose 32 heads no 3 or 5 ranks share
        longstep.crossover(never.replace(gpus=3), never.replace(gpus=5), "seq", "8K..64K")


@pytest.mark.slow
def test_beyond_the_last_length_that_fits_there_is_neither() -> None:
    """Both have room at 16K; at 4M one layer's buffers of either exceed the memory of 8 GiB."""
    small = ALONE.replace(set={"cluster.hbm.capacity_bytes": 2**33}, seeds=None, jitter=0)
    ring, ulysses = small.replace(schedule="ring"), small.replace(schedule="ulysses")
    found = longstep.crossover(ring, ulysses, "seq", "16K..4M")
    states = [row["below"] for row in found]
    assert states[0] != ""
    assert states[-1] == found[-1]["above"] == ""
    end = found[-2]["value"]
    assert not any(one.replace(seq=end).predicted().fits is not False for one in (ring, ulysses))
    assert any(one.replace(seq=int(end / 1.02) // 1024 * 1024).predicted().fits is not False for one in (ring, ulysses))
    with pytest.raises(InputError, match="neither can be played and fits"):
        longstep.crossover(ring, ulysses, "seq", "8M..16M")


@pytest.mark.parametrize("between", ["8K", "64K..8K", "x..8K", "0..8K"])
def test_what_is_no_range(between: str) -> None:
    with pytest.raises(InputError, match="seq=|is no number"):
        longstep.crossover(ALONE, ALONE, "seq", between)
