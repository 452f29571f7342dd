"""Bubbles of pipelines: what a stage waits for others, against what is known of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.accounts.breakdown import PARTS, breakdown
from sim.accounts.bubbles import bubbles_s
from sim.accounts.memory import walks
from sim.setup.predict import predict
from sim.setup.prediction import Prediction


def played(pp: int, micros: int, pipeline: str = "1f1b", **fields: Any) -> Prediction:
    """Return a step of four layers in stages, without noise."""
    options = {"schedule.pipeline_schedule": pipeline, "schedule.micro_batches": micros, "schedule.zero_stage": 0}
    options |= fields.pop("set", {})
    return predict("single", model="llama3-8b", cluster="hgx-h100", layers=4, seq="4K", pp_degree=pp, batch=micros,
                   jitter=0, set=options, **fields)  # fmt: skip


def test_stages_wait_in_turn_for_one_micro_batch() -> None:
    """The second one for the forward pass of the first one, which waits for the backward pass of the second."""
    p = played(2, 1)
    rows = {(row.rank, row.label): row for row in p.trace.rows if row.label.startswith("receive")}
    x, dx = rows[1, "receive x"], rows[0, "receive dx"]
    first, second = bubbles_s(p.trace)
    assert second == pytest.approx(x.begin_s - x.posted_s, rel=1e-6)
    ended = max(row.end_s for row in p.trace.rows if row.rank == 0 and row.end_s <= dx.begin_s)
    assert first == pytest.approx(dx.begin_s - ended, rel=1e-6)
    assert first > 2 * second > 0


@pytest.mark.parametrize("pipeline", ["1f1b", "gpipe", "zb-h1"])
def test_bubbles_are_part_of_what_a_rank_waits(pipeline: str) -> None:
    trace = played(4, 6, pipeline).trace
    waits = [breakdown(trace, rank)["synchronisation"] for rank in range(4)]
    assert np.all(bubbles_s(trace) <= np.array(waits) * (1 + 1e-9))
    assert np.all(bubbles_s(trace) > 0)
    assert {"synchronisation"} <= {*PARTS}


def test_more_micro_batches_have_less_of_them_and_zero_bubble_less_than_1f1b() -> None:
    """(p - 1) / (m + p - 1) of equal stages (arXiv:2104.04473 §2.2); here the last one has the head, too."""

    def share(pipeline: str, micros: int) -> float:
        stages = played(4, micros, pipeline, set={"schedule.checkpoint": "none"}).report.stages
        return float(np.mean([stage.bubbles for stage in stages]))

    assert share("1f1b", 16) < share("1f1b", 8) < share("1f1b", 4)
    assert share("zb-h1", 8) < share("1f1b", 8)


def test_one_stage_has_none() -> None:
    assert played(1, 2).report.stages == ()


def test_peaks_by_stage_are_those_of_the_walk() -> None:
    p = played(4, 8)
    peaks = [walk.peak_bytes for walk in walks(p.checked)]
    assert [stage.peak_hbm_bytes for stage in p.report.stages] == peaks
    assert p.peak_hbm_bytes == max(peaks)
