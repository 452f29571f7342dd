"""Random setups over all axes: equal ranks played once and all ranks, by both engines, to the last bit."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.engine.play.equality import Tally
from tests.engine.play.test_engines import requires_compiler

SHARES: dict[str, float] = {}
"""Of how many of many cells each is at least."""


@requires_compiler
@pytest.mark.sweep
@pytest.mark.parametrize(("seed", "count", "ranks"), [(0, 8, 16), pytest.param(1, 400, 64, marks=pytest.mark.slow)])
def test_every_op_and_figure_is_the_same_folded_and_by_either_engine(seed: int, count: int, ranks: int) -> None:
    tally = Tally(Counter(), Counter())
    for number in range(count):
        tally.hold(seed, number, ranks)
    assert tally.refused.total() < count, tally
    assert all(tally.covers[what] >= int(share * count) for what, share in SHARES.items()), tally
    assert tally.covers["folded replicas"] > count / 10, tally
