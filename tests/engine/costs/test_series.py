"""Measured times over size: what comes back, what grows, and what is kept beyond the measured sizes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.engine.costs.series import Curve, Figures, Series, Work, grown

ON = Figures(1e12, 1e10, 5e-6)
POINTS = st.lists(
    st.tuples(st.integers(1, 2**34), st.floats(1e-6, 10.0)), min_size=1, max_size=12, unique_by=lambda point: point[0]
)


@given(POINTS)
def test_what_grows_stays_and_what_falls_is_pooled(points: list[tuple[int, float]]) -> None:
    """Times never fall; what no larger transfer undercuts, and is undercut by none, is kept."""
    found = grown(points)
    assert [nbytes for nbytes, _ in found] == sorted(nbytes for nbytes, _ in points)
    assert all(one[1] <= next_one[1] for one, next_one in pairwise(found))
    measured = dict(points)
    for nbytes, seconds in found:
        before = [time for size, time in points if size < nbytes]
        after = [time for size, time in points if size > nbytes]
        if max(before, default=0.0) <= measured[nbytes] <= min(after, default=measured[nbytes]):
            assert seconds == measured[nbytes]


@pytest.mark.parametrize(
    ("times", "pooled"),
    [
        ([1.0, 3.0, 2.0, 4.0], [1.0, 2.5, 2.5, 4.0]),
        ([9.0, 1.0, 1.0, 1.5], [1.0, 1.0, 1.0, 1.5]),  # one outlier: the median of three
        ([4.0, 3.0, 2.0], [3.0, 3.0, 3.0]),
    ],
)
def test_pools_by_hand(times: list[float], pooled: list[float]) -> None:
    assert [seconds for _, seconds in grown(list(enumerate(times, 1)))] == pooled


@given(POINTS, st.lists(st.integers(1, 2**36), min_size=2, max_size=20))
def test_transfers_grow_with_bytes_and_keep_their_points(points: list[tuple[int, float]], sizes: list[int]) -> None:
    curve = Curve(points, ON, ON.latency_s)
    for nbytes, seconds in grown(points):
        assert curve.seconds(nbytes, ON) == pytest.approx(seconds)
    times = [curve.seconds(nbytes, ON) for nbytes in sorted(sizes)]
    assert all(one <= later * (1 + 1e-9) for one, later in pairwise(times))
    least = min(seconds for _, seconds in points)
    assert times[0] >= min(ON.latency_s, 0.9 * least)


def test_below_the_least_size_the_latency_is_kept() -> None:
    """20 us and 1 GB/s: of 1 byte still 20 us; where the intercept is none, one hop."""
    curve = Curve([(10_000, 30e-6), (20_000, 40e-6)], ON, ON.latency_s)
    assert curve.seconds(1, ON) == pytest.approx(20e-6, rel=1e-3)
    steep = Curve([(10_000, 10e-6), (20_000, 40e-6)], ON, ON.latency_s)
    assert steep.seconds(1, ON) == pytest.approx(5e-6, rel=1e-3)
    assert Curve([(10_000, 3e-6), (20_000, 9e-6)], ON, ON.latency_s).seconds(1, ON) == pytest.approx(2.7e-6, rel=1e-3)


def test_a_second_kernel_that_takes_less_says_nothing_of_a_fixed_time() -> None:
    """GEMMs of 128 and 256 tokens on H100 whose weights bound them: 71.0 and 69.9 us, 43 us of it at full rate."""
    works = [Work(2 * tokens * 16384 * 5120, 2 * 16384 * 5120, tokens) for tokens in (128, 256, 512)]
    on = Figures(989.4e12, 3.35e12)
    series = Series(list(zip(works, (71.0e-6, 69.9e-6, 120e-6), strict=True)), on)
    assert series.fixed_s == 0
    for work, seconds in zip(works, (71.0e-6, 69.9e-6, 120e-6), strict=True):
        assert series.seconds(work, on) == pytest.approx(seconds)


@given(
    st.lists(st.tuples(st.floats(0.01, 1.0), st.integers(1, 10**9)), min_size=1, max_size=6),
)
def test_a_fixed_time_leaves_every_point_its_work_at_full_rate(found: list[tuple[float, int]]) -> None:
    """FLOPs and bytes of any sizes, at any share of what bounds them: each point comes back."""
    on = Figures(1e12, 1e11)
    works = [Work(10**6 * size, nbytes, size) for size, (_, nbytes) in enumerate(found, 1)]
    points = [
        (work, max(work.flops / on.flops_per_s, work.nbytes / on.bytes_per_s) / share)
        for work, (share, _) in zip(works, found, strict=True)
    ]
    series = Series(points, on)
    for work, seconds in points:
        assert series.seconds(work, on) == pytest.approx(seconds)
