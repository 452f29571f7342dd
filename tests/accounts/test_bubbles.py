"""Bubbles of pipelines: what a stage waits for others, against what is known of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.accounts.breakdown import breakdown
from sim.accounts.bubbles import bubbles_s
from sim.accounts.memory import walks
from sim.setup.predict import predict
from sim.setup.prediction import Prediction


def played(pp: int, micros: int, pipeline: str = "1f1b", **fields: Any) -> Prediction:
    """Return a step of four layers in stages, without noise."""
    options = {"schedule.pipeline_schedule": pipeline, "schedule.micro_batches": micros, "schedule.zero_stage": 0}
    options |= fields.pop("set", {})
    schedule = fields.pop("schedule", "single")
    return predict(schedule, model="llama3-8b", cluster="hgx-h100", layers=4, seq="4K", pp_degree=pp, batch=micros,
                   jitter=0, set=options, **fields)  # fmt: skip


def waits(p: Prediction) -> list[float]:
    """Return the seconds that the ranks wait for others, whatever for."""
    return [breakdown(p.trace, rank)["synchronisation"] for rank in range(p.trace.num_ranks)]


def test_stages_wait_in_turn_for_one_micro_batch() -> None:
    """The second one for the forward pass of the first one; the first one for the backward pass of the second, and that
    for the one of the first, at the norm of all gradients.
    """
    p = played(2, 1)
    rows = {(row.rank, row.label): row for row in p.trace.rows}
    x, dx, norm = rows[1, "receive x"], rows[0, "receive dx"], rows[1, "norm of gradients"]
    first, second = bubbles_s(p.trace, p.checked.schedule.header)
    assert second == pytest.approx(x.begin_s - x.posted_s + norm.begin_s - norm.posted_s, rel=1e-6)
    ended = max(row.end_s for row in p.trace.rows if row.rank == 0 and row.end_s <= dx.begin_s)
    assert first == pytest.approx(dx.begin_s - ended, rel=1e-6)
    assert norm.begin_s - norm.posted_s > x.begin_s - x.posted_s > 0


@pytest.mark.parametrize("pipeline", ["1f1b", "gpipe", "zb-h1"])
def test_ranks_without_other_peers_wait_for_stages_alone(pipeline: str) -> None:
    p = played(4, 6, pipeline)
    assert bubbles_s(p.trace, p.checked.schedule.header) == pytest.approx(waits(p), rel=1e-9)
    assert min(waits(p)) > 0


def test_of_waits_for_a_ring_none_are_bubbles() -> None:
    """Under a causal mask ranks of a ring with less work wait for the last one, too."""
    p = played(2, 4, schedule="ring", gpus=4)
    bubbles, all_s = bubbles_s(p.trace, p.checked.schedule.header), np.array(waits(p))
    assert np.all((bubbles > 0) & (bubbles <= all_s * (1 + 1e-9)))
    assert np.all(bubbles[[0, 2]] < 0.99 * all_s[[0, 2]])


@pytest.mark.sweep
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
