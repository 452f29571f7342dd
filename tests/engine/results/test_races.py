"""What the answer says where a step hangs on which kernel gets SMs first."""

from __future__ import annotations

import re
from typing import Any

import pytest

import longstep
from longstep import Prediction
from sim.engine.results.races import races


def ms_of(found: Prediction, what: str) -> float:
    """Return the milliseconds that the one note with some words in it names; it is part of the evidence."""
    (note,) = [note for note in found.figures.evidence.notes if what in note]
    (number,) = re.findall(r"([0-9.]+) ms", note)
    return float(number)


def test_what_a_slow_gpu_loses_to_sums_that_wait_on_its_sms_is_told() -> None:
    """The fast GPU is ahead, in a grid that its all-reduces wait behind; those of the slow one hold 24 of 132 SMs. So
    the step takes longer than if both GPUs were slow, by what the note says.
    """
    what: dict[str, Any] = {"gpus": 2, "seq": "128K", "scope": "layer", "cluster": "hgx-h200", "passes": "both"}
    found = longstep.predict("burst", model="llama3-8b", **what)
    one, both = ({f"cluster.gpu[{rank}].speed": "0.7" for rank in slow} for slow in ((1,), (0, 1)))
    uneven, slower = found.replace(set=one), found.replace(set=both)
    assert not races(found.simulation)
    assert not races(slower.simulation)
    lost_ms = ms_of(uneven, "GPU 1 loses")
    assert lost_ms == pytest.approx((uneven.step_time_s - slower.step_time_s) * 1e3, rel=0.05)
    assert lost_ms > 0.03 * uneven.step_time_s * 1e3
    alone = uneven.replace(set={"cluster.gpu.communication_sms": "1"})
    assert not races(alone.simulation)


@pytest.mark.sweep
def test_sms_that_are_missed_by_little_are_told() -> None:
    """The kernel for delta takes 4.2 us, a launch 2.5: gradients come before the grid. With twice the memory's rate it
    takes 2.1, all seeds come too late, and the step is longer; launches of half the time would be in time again.
    """
    what: dict[str, Any] = {
        "gpus": 16,
        "nodes": 2,
        "seq": "32K",
        "mask": "full",
        "cluster": "hgx-b200",
        "scope": "attention",
    }
    found = longstep.predict("ring", model="llama3-8b", passes="both", **what)
    late = found.replace(set={"cluster.hbm.bytes_per_s": "*2"})
    early = late.replace(set={"cluster.gpu.launch_s": "/2"})
    assert not races(found.simulation)
    assert not races(early.simulation)
    assert late.simulation.step_times_s[-1] < 1.02 * late.simulation.step_times_s[0]
    waits_s = ms_of(late, "miss by less than half a launch") / 1e3
    assert 0.1 * late.step_time_s < late.step_time_s - early.step_time_s < 1.1 * waits_s
