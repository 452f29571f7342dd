"""Steps of many stages take what passes of few stages say, and few stages are played only where that is so."""

from __future__ import annotations

from typing import Any

import pytest

from longstep import Setup
from sim.engine.play.simulate import simulate
from sim.plan.extended import extended
from sim.plan.search import timed
from sim.plan.search.room import room
from sim.plan.search.timed import few_stages
from sim.schedule.proof.check import Checked
from tests.helpers import slow_but

STEPS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "interleaved": {"layers": 32, "pipeline_schedule": "interleaved", "pipeline_chunks": 2},
    "unlike ends": {"layers": 14, "pipeline_layers": "1,2,2,2,2,2,2,1"},
    "zb-h1": {"pipeline_schedule": "zb-h1"},
    "a V": {"pipeline_schedule": "zb-v", "layers": 32, "global_batch": 32},
    "two copies": {"pipeline_schedule": "dualpipe", "global_batch": 32},
    "unequal ranks": {"schedule": "ring", "ring_degree": 4, "seq": "64K"},
    "a ring of equal ranks": {"schedule": "zigzag", "ring_degree": 2, "seq": "16K", "zero_stage": 1},
    "gathered keys": {
        "schedule": "allgather", "ring_degree": 2, "seq": "16K", "layers": 32, "pipeline_schedule": "interleaved",
        "pipeline_chunks": 2,
    },
}  # fmt: skip


def setup_of(**changes: Any) -> Setup:
    """Return a step of 8 stages of whole nodes; ``changes`` are fields of a setup, or options of its schedule."""
    given: dict[str, Any] = {"layers": 16, "seq": "32K", "global_batch": 16, "pp_degree": 8}
    own = {key: changes.pop(key) for key in [*changes] if key in Setup.__dataclass_fields__}
    given |= {"schedule": "single", "model": "llama3-8b", "cluster": "hgx-h100", "tp_degree": 8, "jitter": 0.0, **own}
    gpus = given["pp_degree"] * given["tp_degree"] * given.get("ring_degree", 1)
    options = {"schedule.zero_stage": 0} | {f"schedule.{key}": value for key, value in changes.items()}
    return Setup(**{"gpus": gpus, **given}, set=options, yes=True)


@pytest.fixture(autouse=True)
def _nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed, "MOST_VISITS", 0)


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but({"1f1b"}, STEPS))
def test_passes_of_few_stages_say_what_many_take(name: str) -> None:
    """Within 1 % where a chunk has two layers, and memory to the byte."""
    setup = setup_of(**STEPS[name])
    whole, told = setup.resolved(), extended(setup)
    play = simulate(Checked(whole.built()), whole.cluster, whole.profile)
    assert told.played.startswith("told by passes of ")
    assert told.step_time_s == pytest.approx(play.trace.step_time_s, rel=1e-2)
    assert told.room.limits == room(whole).limits


def test_all_that_is_said_is_of_the_whole() -> None:
    told = extended(setup_of(layers=8, seq="8K"))
    assert told.played == "told by passes of 5 of 8 stages, and 10 of 16 micro-batches, as if every rank counted norms"
    assert told.steps.told(lambda one: one.trace.step_time_s) == pytest.approx(told.step_time_s, rel=1e-12)
    assert sum(told.breakdown.values()) == pytest.approx(told.step_time_s, rel=1e-9)
    assert told.interval
    assert told.interval.low_s < told.step_time_s < told.interval.high_s
    assert "imbalance" not in told.saves
    assert told.steps.last.jitter.among == 64
    assert told.answer.startswith("Single takes ")
    slower = told.replace(set={"cluster.nvlink.bytes_per_s": "/2"})
    assert slower.step_time_s > told.step_time_s
    assert slower.steps.last.checked is told.steps.last.checked


def test_members_that_count_no_norms_are_played_by_the_one_that_does() -> None:
    last = extended(setup_of(layers=8, seq="8K", zero_stage=1, dp_degree=2, gpus=128, global_batch=32)).steps.last
    every = Checked(last.checked.schedule.like(last.checked.schedule.header, last.checked.schedule.program))
    alike = simulate(every, last.cluster, last.profile, last.jitter)
    assert last.fold.played == {"dp": {0: [0, 1]}, "tp": {0: list(range(8))}}
    assert not alike.fold.played
    assert last.trace.step_time_s == pytest.approx(alike.trace.step_time_s, rel=1e-6)


def test_stages_and_micro_batches_are_left_out_where_others_are_alike() -> None:
    """Else all stages are played."""
    few = few_stages(setup_of(layers=14, pipeline_layers="1,2,2,2,2,2,2,1"))
    assert few
    found = few.resolved()
    assert (found.mesh.pp, found.mesh.size, found.options.pipeline_layers) == (5, 40, "1,2,2,2,1")
    assert (found.workload.layers, found.options.micro_batches, found.workload.batch) == (8, 10, 10)
    both_ways = few_stages(setup_of(pipeline_schedule="dualpipe", global_batch=32))
    assert both_ways
    assert (both_ways.pp_degree, both_ways.batch) == (6, 18)
    others = [
        {"pp_degree": 4},
        {"global_batch": 10},
        {"layers": 15, "pipeline_layers": "2,2,2,1,2,2,2,2"},
        {"tp_degree": 4},
    ]
    for changes in others:
        assert few_stages(setup_of(**changes)) is None, changes


def test_what_is_small_is_played_with_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed, "MOST_VISITS", 2**15)
    assert few_stages(setup_of()) is None
