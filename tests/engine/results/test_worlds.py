"""Other machines that one play carries along: where they are alike they take the same, but for rounding."""

from __future__ import annotations

import pytest

import longstep
from sim.engine.play.simulate import simulate
from sim.engine.results.figures import COMPUTE, HBM, HOST, LAUNCHES, figures_of, scaled
from sim.engine.results.worlds import FEW, MOST, Change, worlds
from tests.engine.play.equality import cells
from tests.engine.play.test_engines import requires_compiler


@pytest.mark.sweep
@requires_compiler
@pytest.mark.parametrize(
    ("seed", "count"), [pytest.param(5, 12, id="few"), pytest.param(6, 400, id="many", marks=pytest.mark.slow)]
)
def test_a_world_like_the_first_one_takes_the_same(seed: int, count: int) -> None:
    """Of all schedules, on GPUs and hosts, with noise: sharing, holds, waits and issue are those of the play."""
    alike = [Change((COMPUTE,), 1.0), Change((HBM,), 1.0), Change((LAUNCHES,), 1.0)]
    for checked, cluster, profile, jitter in cells(seed, count, 8):
        found = simulate(checked, cluster, profile, jitter)
        for one in worlds(found, alike):
            assert one.step_time_s == pytest.approx(found.trace.step_time_s, rel=1e-12), str(checked.schedule.header)
            assert not one.turned, str(checked.schedule.header)


@pytest.mark.sweep
@requires_compiler
def test_a_machine_twice_as_good_in_all_takes_half_as_long() -> None:
    """At the rates of datasheets, whatever shares what; and more worlds than one play carries are two plays."""
    found = longstep.predict(
        "zigzag",
        model="llama3-8b",
        cluster="hgx-h100",
        gpus=16,
        nodes=2,
        seq="64K",
        profile="datasheet",
        scope="attention",
    )
    every = tuple(figures_of(found.cluster.spec, found.profile))
    halves = worlds(found.simulation, [Change(every, 2.0)] * (MOST + 1))
    assert len(halves) == MOST + 1
    for half in halves:
        assert half.step_time_s == pytest.approx(found.step_time_s / 2, rel=1e-9)


@requires_compiler
def test_many_ops_carry_few_worlds_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = longstep.predict("usp", model="llama3-8b", cluster="hgx-h100", seq="32K", scope="attention").simulation
    changes = [Change((figure,), 2.0) for figure in figures_of(found.cluster.spec, found.profile)]
    meant = worlds(found, changes)
    monkeypatch.setattr("sim.engine.results.worlds._MANY", 0)
    assert len(changes) > FEW
    assert worlds(found, changes) == meant


@pytest.mark.sweep
@requires_compiler
@pytest.mark.parametrize("count", [1, FEW, FEW + 1, 12, 13])
def test_worlds_are_the_same_however_many_a_player_can_carry(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = longstep.predict("usp", model="tiny", cluster="hgx-h100", gpus=8, seq="8K", layers=1).simulation
    figures = figures_of(found.cluster.spec, found.profile)
    changes = [Change((figures[number % len(figures)],), 2.0 + number) for number in range(count)]
    carried = worlds(found, changes)
    monkeypatch.setattr("sim.engine.results.worlds.SIZES", (MOST,))
    assert worlds(found, changes) == carried


def test_a_figure_is_scaled_wherever_a_machine_has_it() -> None:
    """The rates of a table fit each other: both ways of PCIe together are never less than one."""
    spec = longstep.cluster("hgx-h100").spec
    by_name = {figure.name: figure for figure in figures_of(spec, None)}
    assert "host calls" not in by_name
    assert [figure.name for figure in HOST if figure.name in by_name] == ["launches"]
    twice = scaled(spec, by_name["pcie"], 2.0)
    assert spec.pcie
    assert spec.pcie.uplink
    assert spec.pcie.uplink.both_ways_bytes_per_s
    assert twice.pcie
    assert twice.pcie.uplink
    assert twice.pcie.bytes_per_s == 2 * spec.pcie.bytes_per_s
    assert twice.pcie.uplink.both_ways_bytes_per_s == 2 * spec.pcie.uplink.both_ways_bytes_per_s
    peaks = scaled(spec, by_name["compute"], 0.5).gpu.peak_flops_per_s
    assert peaks == {dtype: peak / 2 for dtype, peak in spec.gpu.peak_flops_per_s.items()}
