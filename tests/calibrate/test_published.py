"""Profiles that ship: made from the tables beside them, and worth what their residuals say."""

from __future__ import annotations

import csv
import statistics
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import pytest

from calibrate.leave_one_out import leave_one_out
from calibrate.published import PUBLISHED, published
from calibrate.published.gpus import GPUS
from calibrate.published.reading import eager_issue, rows
from sim.engine.collectives import kind_of, link_traffic
from sim.engine.cost import CostModel, measured_cluster
from sim.engine.network import Flow
from sim.profile import TRANSFERS, Point, Profile, load_profile
from sim.schedule.kernels import ATTENTION_KERNELS, attention_use
from sim.schedule.masks import CAUSAL
from sim.schedule.ops import AllGather, AllReduce, AllToAll, Collective, ReduceScatter
from sim.schedule.views import Split, View
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
        many = kernel in {*TRANSFERS, *ATTENTION_KERNELS, "gemm"}
        assert points > (10 if many else 0), kernel
        most = 0.06 if (profile.name, kernel) == ("b200-sxm", "gemm") else 0.05 if many else 0.15
        assert median <= most, kernel
    for spread in profile.residuals.values():
        assert spread.low <= 1 <= spread.high
        assert spread.low < spread.high


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


ROOT = Path(__file__).parents[2]
COMMON: dict[str, Any] = {"stream": "s", "part": "forward", "label": "", "communicator": "c"}
PARTS = Split(View(0, ()), 0, 1)
COLLECTIVES: dict[str, Collective] = {
    "all_gather": AllGather(send=View(0, ()), recvs=PARTS, **COMMON),
    "reduce_scatter": ReduceScatter(sends=PARTS, recv=View(0, ()), **COMMON),
    "all_to_all": AllToAll(sends=PARTS, recvs=PARTS, **COMMON),
    "all_reduce": AllReduce(view=View(0, ()), **COMMON),
}


def collective_errors(measured: Profile, known: Profile | None, points: list[Point]) -> dict[str, list[float]]:
    """Return predicted over measured time, minus 1, of collectives inside a node, by kind."""
    assert all(point.variant == "nvlink" for point in points)
    cluster = Cluster(measured_cluster(measured))
    cost = CostModel(cluster, known)
    found: dict[str, list[float]] = {kind: [] for kind in COLLECTIVES}
    for point in points:
        ranks = tuple(range(point.shape[0]))
        op = COLLECTIVES[point.kernel]
        wire = max(link_traffic(kind_of(op), ranks, 10**6, cluster).nbytes.values()) / 10**6
        phases = cost.collective(op, ranks, round(point.nbytes / wire))
        found[point.kernel].append(sum(phase.seconds for phase in phases) / point.mean_s - 1)
    return found


def in_a_node(profile: Profile) -> list[Point]:
    return [point for point in profile.points if point.kernel in COLLECTIVES and point.variant == "nvlink"]


def across_nodes(profile: Profile) -> Iterator[tuple[int, int, float, Cluster]]:
    """Yield ranks, bytes and seconds of all-reduce on several A100 nodes, with their cluster."""
    for row in rows("nccl_multi_node"):
        if row["system"] == GPUS["a100-sxm"].fabric and int(row["nodes"]) > 1:
            cluster = Cluster(msgspec.structs.replace(measured_cluster(profile), nodes=int(row["nodes"])))
            yield int(row["gpus"]), int(row["bytes"]), float(row["time_us"]) / 1e6, cluster


def without(profile: Profile, ranks: int) -> Profile:
    """Return a profile that knows nothing of all-reduce over NICs on so many ranks."""
    points = [p for p in profile.points if (p.kernel, p.variant, p.shape[0]) != ("all_reduce", "nic", ranks)]
    return msgspec.structs.replace(profile, points=tuple(points))


def all_reduce_s(cluster: Cluster, profile: Profile | None, ranks: int, nbytes: int) -> float:
    phases = CostModel(cluster, profile).collective(COLLECTIVES["all_reduce"], tuple(range(ranks)), nbytes)
    return sum(phase.seconds for phase in phases)


def test_all_reduce_across_nodes() -> None:
    """Every size comes back; 64 MiB on each number of nodes is what the other numbers of nodes say, within 15 %."""
    profile = load_profile("a100-sxm")
    found = 0
    for ranks, nbytes, seconds, cluster in across_nodes(profile):
        if nbytes in {2**16, 2**20, 2**26, 2**30}:
            assert all_reduce_s(cluster, profile, ranks, nbytes) == pytest.approx(seconds, rel=0.01), (ranks, nbytes)
        if nbytes == 2**26:
            found += 1
            assert all_reduce_s(cluster, without(profile, ranks), ranks, nbytes) == pytest.approx(seconds, rel=0.15)
    assert found == 4


def test_what_was_not_measured_across_nodes_is_as_efficient_as_what_was() -> None:
    """All-to-all over the NICs of two nodes: the mean of exchanges and of all-reduce, and slower than the NICs are."""
    profile = load_profile("a100-sxm")
    cluster, op, part = Cluster(measured_cluster(profile)), COLLECTIVES["all_to_all"], 2**24
    cost = CostModel(cluster, profile)
    *_, flow = cost.collective(op, tuple(range(16)), part)
    *_, ideal = CostModel(cluster, None).collective(op, tuple(range(16)), part)
    assert cost.notes == {"all_to_all over nic: not in the profile, efficiency of all_reduce and exchange"}
    assert isinstance(flow, Flow)
    assert isinstance(ideal, Flow)
    assert 0.3 < ideal.seconds / flow.seconds < 0.64


@pytest.mark.parametrize("name", GPUS)
def test_half_of_the_sizes_predict_the_other_half(name: str) -> None:
    profile = load_profile(name)
    points = in_a_node(profile)
    points.sort(key=lambda point: (point.kernel, point.shape))
    known = msgspec.structs.replace(profile, points=tuple(points[::2]))
    for kind, errors in collective_errors(profile, known, points[1::2]).items():
        assert statistics.mean(map(abs, errors)) <= 0.1, kind


@pytest.mark.parametrize(
    ("name", "short"), [("a100-sxm", 0.35), ("h100-sxm", 0.25), ("h200-sxm", 0.25), ("b200-sxm", 0.4)]
)
def test_large_collectives_from_datasheet_and_algorithm_alone(name: str, short: float) -> None:
    """Short of the measured time, since nothing is faster than its links, and not by much more than README says."""
    profile = load_profile(name)
    points = [point for point in in_a_node(profile) if point.nbytes >= 2**26]
    for kind, errors in collective_errors(profile, None, points).items():
        assert -short <= statistics.median(errors) <= 0, kind


def test_profiles_carry_where_they_come_from(profile: Profile) -> None:
    stated = {"attention", "exchange", "memory_efficiency", *(f"traffic.{kernel}" for kernel in profile.traffic)}
    assert stated <= profile.sources.keys()
    assert msgspec.json.decode(msgspec.json.encode(profile), type=Profile) == profile


def test_what_the_host_takes_can_be_measured_again() -> None:
    """In a process of its own, as it needs a process group: the ops of the table that ships, each some microseconds."""
    code = "import calibrate.eager as eager; eager._RUNS, eager._TURNS = 20, 3; eager.main()"
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    measured = {row["op"]: float(row["host_us"]) for row in csv.DictReader(printed.splitlines())}
    assert measured.keys() == eager_issue().keys()
    assert all(0.1 < host_us < 1e5 for host_us in measured.values())
