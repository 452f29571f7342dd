"""Profiles that ship: made from the tables beside them, and worth what their residuals say."""

from __future__ import annotations

from importlib import resources

import msgspec
import pytest

from calibrate.leave_one_out import leave_one_out
from calibrate.published import PUBLISHED, published
from sim.engine.cost import CostModel, measured_cluster
from sim.profile import Profile, load_profile
from sim.schedule.kernels import attention_use
from sim.schedule.masks import CAUSAL
from topology.cluster import Cluster


@pytest.fixture(scope="module", params=PUBLISHED)
def profile(request: pytest.FixtureRequest) -> Profile:
    made: Profile = published(request.param)
    return made


def test_what_ships_is_what_the_tables_give(profile: Profile) -> None:
    assert load_profile(profile.name) == profile
    assert resources.files("sim").joinpath("profiles", f"{profile.name}.json").is_file()


def test_points_predict_each_other(profile: Profile) -> None:
    for kernel, points, median, _ in leave_one_out(profile):
        assert points > 10, kernel
        assert median <= 0.06, kernel
    for spread in profile.residuals.values():
        assert spread.low < 1 < spread.high


def test_a_measured_point_comes_back(profile: Profile) -> None:
    """16K tokens, 32 heads: what the table says; on a GPU in two phases, the second one the last wave."""
    cost = CostModel(Cluster(measured_cluster(profile)), profile)
    use = attention_use(False, "bf16", (1, 16384, 32, 128), 16384, 32, CAUSAL)
    (point,) = (p for p in profile.points if (p.kernel, p.variant, p.shape) == (use.kernel, "causal", use.shape))
    phases = cost.kernel(0, use)
    assert len(phases) == 2
    assert sum(phase.seconds for phase in phases) == pytest.approx(point.median_s)
    assert not cost.notes


def test_transfers_over_nvlink_and_between_nodes_differ(profile: Profile) -> None:
    """Each takes what its link's own point says; where no table has any, what the link's figures say."""
    cost = CostModel(Cluster(measured_cluster(profile)), profile)
    times = {}
    for link, target in (("nvlink", 1), ("nic", 8)):
        points = [p for p in profile.points if (p.kernel, p.variant) == ("exchange", link) and p.nbytes >= 2**24]
        nbytes = points[0].nbytes if points else 2**26
        times[link] = sum(phase.seconds for phase in cost.transfer(0, target, nbytes, 2)) / nbytes
        if points:
            assert times[link] * nbytes == pytest.approx(points[0].mean_s)
    assert times["nic"] > 4 * times["nvlink"]


def test_profiles_carry_where_they_come_from(profile: Profile) -> None:
    stated = {"attention", "exchange", "memory_efficiency", *(f"traffic.{kernel}" for kernel in profile.traffic)}
    assert stated <= profile.sources.keys()
    assert msgspec.json.decode(msgspec.json.encode(profile), type=Profile) == profile
