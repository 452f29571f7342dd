"""What bounds a step, or may: by costs that can be added up by hand."""

from __future__ import annotations

import msgspec
import pytest

from sim.engine.intervals.regime import Regime, _host_s, _kernels_s, regime
from sim.engine.play.simulate import simulate
from sim.words.profile import Issue, Spread
from tests.engine.intervals.test_interval import CLUSTER, WORK, make_profile
from tests.helpers import make_checked, make_cluster_spec
from topology.cluster import Cluster


@pytest.mark.parametrize(
    ("host_s", "high", "expected"),
    [(0.1, 1.0, "kernels"), (0.9, 1.0, "kernels"), (0.9, 1.2, "host"), (1.1, 1.0, "host")],
)
def test_the_host_at_its_upper_bound_or_one_block_of_a_second(host_s: float, high: float, expected: Regime) -> None:
    checked = make_checked("single", WORK, 1)
    issue = {"attention_forward": Issue(host_s=host_s, launches=0)}
    simulation = simulate(checked, CLUSTER, make_profile(checked, issue=issue, host=Spread(low=0.5, high=high)))
    assert _kernels_s(simulation) == pytest.approx(1.0)
    assert _host_s(simulation) == pytest.approx(host_s)
    assert regime(simulation) == expected


def test_links_that_take_longer_than_both_blocks() -> None:
    """Two blocks of 1 s on each rank; keys and values go once, over a link so slow that this takes 3 s."""
    checked = make_checked("ring", WORK, 2)
    profile = make_profile(checked)
    assert regime(simulate(checked, CLUSTER, profile)) == "kernels"
    spec = make_cluster_spec(2)
    nbytes = 2 * 128 * 8 * WORK.model.head_dim * 4
    assert spec.nvlink is not None
    for seconds, expected in ((1.9, "kernels"), (3.0, "links")):
        nvlink = msgspec.structs.replace(spec.nvlink, bytes_per_s=nbytes / seconds)
        slow = Cluster(msgspec.structs.replace(spec, nvlink=nvlink))
        assert regime(simulate(checked, slow, profile)) == expected


def test_at_the_rates_of_datasheets() -> None:
    checked = make_checked("single", WORK, 1)
    assert regime(simulate(checked, CLUSTER, None)) in {"kernels", "host"}
