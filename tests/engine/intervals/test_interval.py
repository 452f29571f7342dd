"""Intervals of a step, by hand: all points of a kernel at their bounds, and what overlap may cost above that."""

from __future__ import annotations

import math

import msgspec
import pytest

from sim.accounts.breakdown import critical_rank, overlapped_s
from sim.engine.intervals.interval import Interval, _by_points
from sim.engine.intervals.interval import interval as learned_interval
from sim.engine.intervals.learned import LEAST, NOTHING, Learned, StepErrors
from sim.engine.play.simulate import Engine, Jitter, Simulation, simulate
from sim.engine.results.report import report
from sim.schedule.derive.kernels import kernel_uses
from sim.schedule.proof.check import Checked
from sim.words.profile import Issue, Machine, Point, Profile, Spread, Sustained
from sim.words.workload import Workload
from tests.helpers import make_checked, make_cluster_spec, make_model
from topology.cluster import Cluster

CLUSTER = Cluster(make_cluster_spec(2))
WORK = Workload(model=make_model(8, 8), seq=256, dtype="fp32", mask="full", passes="forward")


def interval(simulation: Simulation) -> Interval | None:
    """Nothing was learned from steps: the points of the profile stand in."""
    return learned_interval(simulation, NOTHING)


def make_profile(checked: Checked, **changes: object) -> Profile:
    """Every attention block takes 1 s; nine of ten 0.9 to 1.2 s. Of nothing else there are points."""
    (use,) = {use for use in kernel_uses(checked.schedule.program(0)) if use and use.kernel == "attention_forward"}
    point = Point(
        kernel=use.kernel, variant=use.variant, dtype=use.dtype, shape=use.shape, condition="idle",
        median_s=1.0, mean_s=1.0, low_s=1.0, high_s=1.0, runs=1, flops=use.flops, nbytes=use.hbm_bytes,
    )  # fmt: skip
    profile = Profile(
        name="by hand",
        created="",
        command="",
        complete=True,
        machine=Machine(gpu="toy GPU", software={}),
        cluster=msgspec.to_builtins(CLUSTER.spec, str_keys=True),
        points=(point,),
        residuals={"attention_forward": Spread(low=0.9, high=1.2)},
    )
    return msgspec.structs.replace(profile, **changes)


def test_one_kernel_moves_by_its_own_spread() -> None:
    checked = make_checked("single", WORK, 1)
    profile = make_profile(checked, beside_communication=1.5)
    found = interval(simulate(checked, CLUSTER, profile))
    assert found is not None
    assert found == pytest.approx((0.9, 1.2))  # nothing communicates beside it


def test_it_reaches_from_the_rates_of_short_runs_to_those_under_load() -> None:
    """Under load it takes 1.1 s in the median, one shape of ten 1.25 s."""
    checked = make_checked("single", WORK, 1)
    load = Sustained(longer=1.1, low=1.05, high=1.25, falls_s=(2.0, 3.0))
    for rates, step_s in (("burst", 1.0), ("sustained", 1.1)):
        profile = make_profile(checked, sustained={"attention_forward": load}, rates=rates)
        simulation = simulate(checked, CLUSTER, profile)
        assert simulation.trace.step_time_s == pytest.approx(step_s)
        assert interval(simulation) == pytest.approx((0.9, 1.5))


def test_a_busy_host_takes_longer() -> None:
    """Beside the second of the block the host takes three to issue it: half of that to twice."""
    checked = make_checked("single", WORK, 1)
    issue = {"attention_forward": Issue(host_s=3.0, launches=0)}
    profile = make_profile(checked, issue=issue, host=Spread(low=0.5, high=2.0))
    assert interval(simulate(checked, CLUSTER, profile)) == pytest.approx((1.5 + 0.9, 6 + 1.2))


def test_what_a_busy_host_takes_longer_for_is_its_launches_too() -> None:
    """3 s and two launches of the toy GPU: twice as long is twice all of it, of which launches stay as they are."""
    checked = make_checked("single", WORK, 1)
    issue, launch_s = {"attention_forward": Issue(host_s=3.0, launches=2)}, CLUSTER.spec.gpu.launch_s
    profile = make_profile(checked, issue=issue, host=Spread(low=0.5, high=2.0))
    (found,) = {one.issue["attention_forward"].host_s for one in _by_points(profile) if one.bound == "high"}
    assert found + 2 * launch_s == pytest.approx(2 * (3 + 2 * launch_s))


def test_steps_that_were_measured_replace_what_points_say() -> None:
    """Sources lie 1.1 apart; of twenty steps one took more than 0.3, as logarithms, and all took longer."""
    checked = make_checked("single", WORK, 1)
    profile = make_profile(checked, disagreement={"attention_forward": 1.1}, beside_communication=9.0)
    simulation = simulate(checked, CLUSTER, profile)
    steps = StepErrors(title="toy", of={"kernels": [0.3] * (LEAST - 1) + [0.7]})
    learned = Learned(created="", command="", sets=[steps])
    assert learned_interval(simulation, learned) == pytest.approx((1 / 1.1, math.exp(0.3)))
    for nothing in (learned.without("toy"), msgspec.structs.replace(learned, sets=[StepErrors(title="", of={})])):
        assert learned_interval(simulation, nothing) == interval(simulation) == pytest.approx((0.9, 1.2))
    wider = simulate(checked, CLUSTER, make_profile(checked, disagreement={"attention_forward": 1.5}))
    assert learned_interval(wider, learned) == pytest.approx((1 / 1.5, 1.5))
    without = simulate(checked, CLUSTER, make_profile(checked, residuals={}))
    assert learned_interval(without, learned) == pytest.approx((1.0, math.exp(0.3)))


def test_it_widens_with_the_distance_from_the_longest_kernel_measured() -> None:
    """Attention of 256 tokens was measured; of twice as many it may be off by a factor of 1.1 more, and each doubling
    adds half as much as the one before.
    """
    profile = make_profile(make_checked("single", WORK, 1), beyond={"attention_forward": 1.1})
    for doublings, more in ((0, 0.0), (1, 1.0), (2, 1.5), (3, 1.75)):
        work = msgspec.structs.replace(WORK, seq=256 * 2**doublings)
        simulation = simulate(make_checked("single", work, 1), CLUSTER, profile)
        found, step_s = interval(simulation), simulation.trace.step_time_s
        assert found is not None
        assert found.low_s == pytest.approx(0.9 * step_s / 1.1**more)
        assert found.high_s == pytest.approx(1.2 * step_s * 1.1**more)


def test_kernels_beside_communication_may_take_longer_still() -> None:
    """Two blocks of a ring; the keys of the second travel beside the first, in far less than its time."""
    checked = make_checked("ring", WORK, 2)
    plain, wider = make_profile(checked), make_profile(checked, beside_communication=1.5)
    simulation = simulate(checked, CLUSTER, plain)
    without, found = interval(simulation), interval(simulate(checked, CLUSTER, wider))
    assert without is not None
    assert found is not None
    assert without == pytest.approx((1.8, 2.4), rel=1e-3)
    beside_s = overlapped_s(simulation.trace, critical_rank(simulation.trace))
    assert beside_s > 0
    assert found.low_s == without.low_s
    assert found.high_s - without.high_s == pytest.approx(0.5 * beside_s)


def test_there_is_none_without_residuals() -> None:
    checked = make_checked("single", WORK, 1)
    profile = make_profile(checked, residuals={})
    assert interval(simulate(checked, CLUSTER, profile)) is None
    assert interval(simulate(checked, CLUSTER, None)) is None


def test_only_who_asks_for_the_interval_simulates_more(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = make_checked("single", WORK, 1)
    simulation = simulate(checked, CLUSTER, make_profile(checked), Jitter(0.1, seed=7))
    asked: list[object] = []

    def counted(
        checked: Checked, cluster: Cluster, profile: Profile | None, jitter: Jitter, *, engine: Engine
    ) -> Simulation:
        asked.append((checked, cluster, jitter))
        return simulate(checked, cluster, profile, jitter, engine=engine)

    monkeypatch.setattr("sim.engine.intervals.interval.simulate", counted)
    plain = report(simulation)
    assert (plain.interval_s, asked) == (None, [])
    found = report(simulation, with_interval=True)
    assert asked == [(checked, CLUSTER, Jitter(0.1, seed=7))] * 2
    assert found.interval_s == learned_interval(simulation)
    assert msgspec.structs.replace(found, interval_s=None) == plain
