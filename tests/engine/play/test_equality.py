"""Random setups over all axes: equal ranks played once and all ranks, by both engines, to the last bit."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.engine.play.equality import Tally
from tests.engine.play.test_engines import requires_compiler

COVERED = {
    "dp": 0.6, "cp": 0.5, "noise": 0.35, "tp": 0.25, "pp": 0.25, "folded replicas": 0.25, "over 16 ranks": 0.2,
    "slow GPUs": 0.1, "documents": 0.06, "a fabric": 0.06, "shared NICs": 0.06, "shared PCIe": 0.05, "offload": 0.05,
    "noise by rank": 0.03, "a slow link": 0.03, "software": 0.03, "a CPU host": 0.03, "documents of each": 0.015,
    "folded members": 0.01,
}  # fmt: skip
"""Of many cells the share that has each at least."""


@requires_compiler
@pytest.mark.sweep
@pytest.mark.parametrize(("seed", "count", "ranks"), [(0, 8, 16), pytest.param(1, 400, 64, marks=pytest.mark.slow)])
def test_every_op_and_figure_is_the_same_folded_and_by_either_engine(seed: int, count: int, ranks: int) -> None:
    tally = Tally(Counter(), Counter())
    for number in range(count):
        tally.hold(seed, number, ranks)
    assert tally.refused.total() < 0.75 * count, tally
    assert tally.covers["folded replicas"] > count / 5, tally
    lacking = [what for what, share in COVERED.items() if tally.covers[what] < share * count]
    assert not lacking or count < 100, f"{lacking}\n{tally}"
