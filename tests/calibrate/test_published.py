"""Profiles that ship: made from the tables beside them, and worth what their residuals say."""

from __future__ import annotations

from importlib import resources

import msgspec
import pytest

from calibrate.leave_one_out import leave_one_out
from calibrate.published import PUBLISHED, published
from sim.engine.cost import CostModel, measured_cluster
from sim.profile import Point, Profile, load_profile
from sim.schedule.kernels import attention_use
from sim.schedule.masks import FULL
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
        assert median <= 0.05, kernel
    for spread in profile.residuals.values():
        assert spread.low < 1 < spread.high


def test_a_measured_point_comes_back(profile: Profile) -> None:
    """64K x 64K, 32 heads: what the table says; on a GPU in two phases, the second one the last wave."""
    cost = CostModel(Cluster(measured_cluster(profile)), profile)
    use = attention_use(False, "bf16", (1, 65536, 32, 128), 65536, 32, FULL)
    (point,) = (p for p in profile.points if (p.kernel, p.variant, p.shape) == (use.kernel, "full", use.shape))
    assert sum(phase.seconds for phase in cost.kernel(0, use)) == pytest.approx(point.median_s)
    assert not cost.notes


def test_transfers_over_nvlink_and_between_nodes_differ(profile: Profile) -> None:
    cost = CostModel(Cluster(measured_cluster(profile)), profile)
    inside, across = (sum(p.seconds for p in cost.transfer(0, target, 2**26, 2)) for target in (1, 8))

    def measured(link: str) -> Point:
        (found,) = (p for p in profile.points if (p.kernel, p.variant, p.nbytes) == ("exchange", link, 2**26))
        return found

    assert inside == pytest.approx(measured("nvlink").mean_s)
    assert across == pytest.approx(measured("nic").mean_s)
    assert across > 5 * inside


def test_profiles_carry_where_they_come_from(profile: Profile) -> None:
    assert {"attention", "exchange", *(f"traffic.{kernel}" for kernel in profile.traffic)} <= profile.sources.keys()
    assert msgspec.json.decode(msgspec.json.encode(profile), type=Profile) == profile
