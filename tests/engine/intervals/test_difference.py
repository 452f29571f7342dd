"""The interval of a ratio of two steps: what is off for both alike cancels."""

from __future__ import annotations

import math

import pytest

from sim.engine.intervals.difference import Ratio, difference
from sim.engine.intervals.learned import LEAST, NOTHING, Learned, StepErrors
from sim.engine.play.simulate import simulate
from tests.engine.intervals.test_interval import CLUSTER, WORK, make_profile
from tests.helpers import make_checked


def learned(apart: float) -> Learned:
    return Learned(created="", command="", sets=[StepErrors(title="a", of={}, apart={"kernels": [apart] * LEAST})])


def test_what_is_off_for_both_cancels() -> None:
    """Sources of attention lie 1.5 apart, which says nothing of the ratio of a step to itself."""
    checked = make_checked("single", WORK, 1)
    one = simulate(checked, CLUSTER, make_profile(checked, disagreement={"attention_forward": 1.5}))
    assert difference(one, one, learned(0.0)) == pytest.approx((1.0, 1.0, 1.0))


def test_it_reaches_as_far_as_measured_ratios_were_off() -> None:
    checked = make_checked("single", WORK, 1)
    profile = make_profile(checked)
    one = simulate(checked, CLUSTER, profile)
    found = difference(one, one, learned(0.1))
    assert found == pytest.approx((1.0, math.exp(-0.1), math.exp(0.1)))
    assert found is not None
    assert found.tied


def test_nothing_is_known_without_a_profile_or_measured_ratios() -> None:
    checked = make_checked("single", WORK, 1)
    blind, known = simulate(checked, CLUSTER, None), simulate(checked, CLUSTER, make_profile(checked))
    assert difference(blind, known, learned(0.1)) is None
    assert difference(known, blind, learned(0.1)) is None
    assert difference(known, known, NOTHING) is None


def test_a_ratio_beyond_one_is_no_tie() -> None:
    assert Ratio(1.1, 1.0, 1.2).tied
    assert not Ratio(1.1, 1.01, 1.2).tied
    assert not Ratio(0.9, 0.8, 0.99).tied
