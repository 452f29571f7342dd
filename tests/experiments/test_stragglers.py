"""What one slow rank costs: nothing where it has little to do, all of its slowness where everybody waits for it."""

from __future__ import annotations

import pytest

from experiments.selection import Selection, choose
from experiments.stragglers import SPEED, straggler_costs
from sim.schedule.methods.catalog import SCHEDULES


def test_who_waits_for_a_slow_rank() -> None:
    """At a million tokens attention is all: the causal ring's first rank has an eighth of the last one's work.

    Without SMs for communication, whose kernels hold them the longer the earlier they begin to wait.
    """
    alone = ("cluster.gpu.communication_sms=0",)
    chosen = choose(Selection(model="llama3-8b", cluster="hgx-h100", seq="1M", gpus=4, profile="datasheet", set=alone))
    found = {straggler.schedule: straggler for straggler in straggler_costs(chosen)}
    assert found.keys() == SCHEDULES.keys() - {"single"}
    ring, ulysses = found["ring"], found["ulysses"]
    assert ring.slow_s[0] == pytest.approx(ring.step_s, rel=1e-2)
    assert ring.worst == (3, pytest.approx(1 / SPEED - 1, rel=0.02))
    assert all(slow_s / ulysses.step_s == pytest.approx(1 / SPEED, rel=0.02) for slow_s in ulysses.slow_s.values())


def test_a_rank_that_is_slow_already_gets_slower() -> None:
    options = {"model": "llama3-8b", "cluster": "hgx-h100", "seq": "1M", "gpus": 2, "profile": "datasheet"}
    chosen = choose(Selection(**options, set=("cluster.gpu[1].speed=0.5",)))  # type: ignore[arg-type]
    found = {straggler.schedule: straggler for straggler in straggler_costs(chosen)}
    assert found["ulysses"].worst == (1, pytest.approx(1 / SPEED - 1, rel=0.02))
    assert found["ulysses"].slow_s[0] == pytest.approx(found["ulysses"].step_s, rel=1e-3)
