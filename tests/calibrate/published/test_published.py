"""Profiles that ship: made from the tables beside them, and worth what their residuals say."""

from __future__ import annotations

import csv
import math
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from calibrate.held.leave_one_out import leave_one_out
from calibrate.held.points import Predictor
from calibrate.published import ATTENTION, PUBLISHED, elementwise, published, queued
from calibrate.published.curves import apart, work
from calibrate.published.gpus import GPUS
from calibrate.published.host import eager_host, eager_issue
from calibrate.published.reading import kernel_point, rows
from sim.engine.costs.cost import CostModel
from sim.engine.costs.measured import measured_cluster
from sim.engine.costs.phases import Flow
from sim.engine.costs.tiles import use_of
from sim.engine.traffic.collectives import link_traffic
from sim.schedule.derive.kernels import ATTENTION_KERNELS, SCATTERED, attention_use
from sim.schedule.ir.masks import CAUSAL, FULL, Band
from sim.schedule.ir.ops import AllGather, AllReduce, AllToAll, Collective, ReduceScatter
from sim.schedule.ir.views import Split, View
from sim.words.profile import TRANSFERS, Issue, Point, Profile, Spread, load_profile, shipped_profile
from tests.helpers import slow_but
from topology.cluster import Cluster, load_cluster

FEW_POINTS = {
    ("b200-sxm", "attention_backward"),
    ("h200-sxm-cudnn", "attention_backward"),
    ("h200-sxm-cudnn", "attention_forward"),
}


@pytest.fixture(scope="module", params=PUBLISHED)
def profile(request: pytest.FixtureRequest) -> Profile:
    """As it ships."""
    return load_profile(request.param)


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but({"a800-ultraattn"}, PUBLISHED))
def test_what_ships_is_what_the_tables_give(name: str) -> None:
    assert load_profile(name) == published(name)
    assert resources.files("sim").joinpath("profiles", f"{name}.json").is_file()


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but({"h100-cudnn", "gb300-flash-attention-4"}, ATTENTION))
def test_attention_that_ships_is_what_the_tables_give(name: str) -> None:
    """Of full and causal masks, both passes, and each work once."""
    found = shipped_profile(f"attention/{name}")
    assert found == published(name)
    works = Counter(work(use_of(point)) for point in found.points)
    assert max(works.values()) == 1
    assert {(kernel, variant) for kernel, variant, *_ in works} == {*product(ATTENTION_KERNELS, ("causal", "full"))}


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but({"h800-ultraattn"}, PUBLISHED))
def test_points_predict_each_other(name: str) -> None:
    profile = load_profile(name)
    for kernel, points, median, _ in leave_one_out(profile):
        many = kernel in {*TRANSFERS, *ATTENTION_KERNELS, "gemm"}
        few = (profile.name, kernel) in FEW_POINTS
        assert points > (5 if few else 10 if many else 0), kernel
        blackwell = profile.name in {"b200-sxm", "gb200-nvl72", "gb300-nvl72"}
        most = 0.06 if kernel == "gemm" and blackwell else 0.05 if many else 0.15
        assert median <= most, kernel
    for spread in profile.residuals.values():
        assert spread.low <= 1 <= spread.high
        assert spread.low < spread.high


def test_a_measured_point_comes_back(profile: Profile) -> None:
    """16K tokens, 32 heads or more: what the table says; on a GPU in two phases, the second one the last wave."""
    cost = CostModel(Cluster(measured_cluster(profile)), profile)
    of_16k = [
        point
        for point in profile.points
        if (point.kernel, point.variant) == ("attention_forward", "causal")
        and point.shape[1] == point.shape[2] == 16384
        and point.shape[3] >= 32
    ]
    point = min(of_16k, key=lambda point: (-point.shape[-1], point.shape))
    phases = cost.kernel(0, use_of(point))
    assert len(phases) == 2
    assert sum(phase.seconds for phase in phases) == pytest.approx(point.median_s)
    assert not cost.notes


def test_no_attention_is_there_twice(profile: Profile) -> None:
    """To the tile model batches are more heads, and of two points of the same work it would take the last."""
    works = Counter(
        (point.kernel, point.variant, point.shape[0] * point.shape[3], *point.shape[1:3], point.shape[5])
        for point in profile.points
        if point.kernel in ATTENTION_KERNELS
    )
    assert max(works.values()) == 1


def seconds_at(tflops: float, backward: bool, band: Band, tokens: int) -> float:
    """Return how long 64 heads of dimension 128 take at a rate."""
    return attention_use(backward, "bf16", (1, tokens, 64, 128), tokens, 64, band).flops / (tflops * 1e12)


@pytest.mark.parametrize(
    ("name", "backward", "band", "tokens", "rates"),
    [
        ("b200-sxm", True, CAUSAL, 32768, (1090.7, 737.8)),  # fa4 and cudnn
        ("b200-sxm", True, FULL, 8192, (1042.5, 859.9)),
        ("b200-sxm", False, FULL, 16384, (1301.2, 1319.8)),
        ("h100-sxm", True, CAUSAL, 32768, (585.8, 585.8)),
        ("h100-sxm", True, FULL, 4096, (542.0, 516.8)),  # the paper's 4 sequences of 16 heads, and 1 of 64 in the chart
        ("h200-sxm", False, FULL, 4096, (638.0, 678.0)),
    ],
)
def test_attention_is_the_mean_of_what_its_curves_say(
    name: str, backward: bool, band: Band, tokens: int, rates: tuple[float, float]
) -> None:
    profile = load_profile(name)
    cost = CostModel(Cluster(measured_cluster(profile)), profile)
    use = attention_use(backward, "bf16", (1, tokens, 64, 128), tokens, 64, band)
    mean = seconds_at(math.sqrt(rates[0] * rates[1]), backward, band, tokens)
    assert sum(phase.seconds for phase in cost.kernel(0, use)) == pytest.approx(mean, rel=1e-3)
    assert not cost.notes


@pytest.mark.parametrize(("name", "least"), [("h100-sxm", 4096), ("b200-sxm", 8192)])
def test_what_the_host_bounds_is_no_point(name: str, least: int) -> None:
    found = {
        point.shape[1]
        for point in load_profile(name).points
        if point.kernel == "attention_backward" and (point.shape[0], point.shape[3]) == (1, 64)
    }
    assert found == {tokens for tokens in (4096, 8192, 16384, 32768) if tokens >= least}


def test_sources_that_disagree_widen_the_interval(profile: Profile) -> None:
    for kernel, factor in profile.disagreement.items():
        assert factor > 1
        assert profile.residuals[kernel].low <= 1 / factor
        assert profile.residuals[kernel].high >= factor


def test_eager_kernels_take_what_hugging_faces_do() -> None:
    """519.04 us for a norm of 2048 tokens of 8192, and nothing that the host may have launched too slowly."""
    fused, eager = (
        {(point.kernel, point.shape): point.median_s for point in load_profile(name).points if "norm" in point.kernel}
        for name in ("a100-sxm", "a100-sxm-eager")
    )
    assert eager["rms_norm", (2048 * 8192,)] == pytest.approx(519.04e-6)
    assert min(eager.values()) > 100e-6
    both = fused.keys() & eager.keys()
    assert both
    assert all(eager[work] > 5 * fused[work] for work in both)


def test_causal_forward_passes_of_others_say_how_far_points_may_be_off() -> None:
    """Half and an eighth of what points say: a quarter on average. Other masks and other work do not count."""
    uses = [attention_use(False, "bf16", (1, tokens, 8, 128), tokens, 8, CAUSAL) for tokens in (2048, 4096, 8192)]
    points = [kernel_point(use, 1.0) for use in uses[:2]]
    full = attention_use(False, "bf16", (1, 2048, 8, 128), 2048, 8, FULL)
    assert apart([(uses[0], 0.5), (uses[1], 0.125), (uses[2], 9.0), (full, 9.0)], points) == pytest.approx(4)
    assert apart([(uses[2], 9.0)], points) == 1
    assert load_profile("h100-sxm").disagreement["attention_forward"] == pytest.approx(1.066, abs=1e-3)


def test_how_far_two_kernels_of_b200_are_apart() -> None:
    """The sixth root of 1.2123, 1.2743, 1.3084 (full), 1.4575, 1.4550, 1.4783 (causal) is 1.360; its root 1.166."""
    assert load_profile("b200-sxm").disagreement["attention_backward"] == pytest.approx(1.166, abs=1e-3)


def test_transfers_over_nvlink_and_between_nodes_differ(profile: Profile) -> None:
    """Each takes what its link's own point says; where no table has any, what the link's figures say."""
    cost = CostModel(Cluster(measured_cluster(profile)), profile)
    times = {}
    for link, target in (("nvlink", 1), ("nic", measured_cluster(profile).gpus_per_node)):
        points = [p for p in profile.points if (p.kernel, p.variant) == ("exchange", link) and p.nbytes >= 2**24]
        nbytes = points[0].nbytes if points else 2**26
        times[link] = sum(phase.seconds for phase in cost.transfer(0, target, nbytes, (0, target))) / nbytes
        if points:
            assert times[link] * nbytes == pytest.approx(points[0].mean_s)
    assert times["nic"] > 4 * times["nvlink"]


ROOT = Path(__file__).parents[3]
COMMON: dict[str, Any] = {"label": "", "communicator": "c"}
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
        wire = max(link_traffic(op.name, ranks, 10**6, cluster).nbytes.values()) / 10**6
        phases = cost.collective(op, ranks, round(point.nbytes / wire))
        found[point.kernel].append(sum(phase.seconds for phase in phases) / point.mean_s - 1)
    return found


def in_a_node(profile: Profile) -> list[Point]:
    return [point for point in profile.points if point.kernel in COLLECTIVES and point.variant == "nvlink"]


def across_nodes(profile: Profile) -> Iterator[tuple[int, int, float, Cluster]]:
    """Yield ranks, bytes and seconds of all-reduce on several A100 nodes, with their cluster."""
    cluster_of = cache(lambda nodes: Cluster(msgspec.structs.replace(measured_cluster(profile), nodes=nodes)))
    for row in rows("nccl_multi_node"):
        if row["system"] == GPUS["a100-sxm"].fabric and int(row["nodes"]) > 1:
            yield int(row["gpus"]), int(row["bytes"]), float(row["time_us"]) / 1e6, cluster_of(int(row["nodes"]))


def without(profile: Profile, ranks: int) -> Profile:
    """Return a profile that knows nothing of all-reduce over NICs on so many ranks."""
    points = [p for p in profile.points if (p.kernel, p.variant, p.shape[0]) != ("all_reduce", "nic", ranks)]
    return msgspec.structs.replace(profile, points=tuple(points))


def all_reduce_s(cluster: Cluster, profile: Profile | None, ranks: int, nbytes: int) -> float:
    phases = CostModel(cluster, profile).collective(COLLECTIVES["all_reduce"], tuple(range(ranks)), nbytes)
    return sum(phase.seconds for phase in phases)


@pytest.mark.sweep
def test_all_reduce_across_nodes() -> None:
    """Large sizes come back; 64 MiB on each number of nodes is what the other numbers of nodes say, within 15 %."""
    profile = load_profile("a100-sxm")
    found = 0
    for ranks, nbytes, seconds, cluster in across_nodes(profile):
        if nbytes in {2**20, 2**26, 2**30}:  # of 64 KiB, times stand in each other's way
            assert all_reduce_s(cluster, profile, ranks, nbytes) == pytest.approx(seconds, rel=0.01), (ranks, nbytes)
        if nbytes == 2**26:
            found += 1
            assert all_reduce_s(cluster, without(profile, ranks), ranks, nbytes) == pytest.approx(seconds, rel=0.15)
    assert found == 4


def test_what_was_not_measured_across_nodes_is_as_efficient_as_what_was() -> None:
    """All-gather over the NICs of two nodes: the mean of all other kinds, and slower than the NICs are."""
    profile = load_profile("a100-sxm")
    cluster, op, part = Cluster(measured_cluster(profile)), COLLECTIVES["all_gather"], 2**24
    cost = CostModel(cluster, profile)
    *_, flow = cost.collective(op, tuple(range(16)), part)
    *_, ideal = CostModel(cluster, None).collective(op, tuple(range(16)), part)
    assert cost.notes == {
        "all_gather over nic: not in the profile, efficiency of all_reduce and all_to_all and exchange"
    }
    assert isinstance(flow, Flow)
    assert isinstance(ideal, Flow)
    assert 0.64 < ideal.seconds / flow.seconds < 0.9


@pytest.mark.parametrize("name", ["a100-sxm", "h100-sxm"])
def test_half_of_the_sizes_across_nodes_predict_the_other_half(name: str) -> None:
    """From 64 KiB on a NIC: below, A100's times over nodes scatter by up to four times."""
    profile = load_profile(name)
    points = [point for point in profile.points if point.variant == "nic"]
    points.sort(key=lambda point: (point.kernel, point.shape[::2], point.nbytes))
    half = Predictor(msgspec.structs.replace(profile, points=tuple(points[::2])))
    errors: dict[str, list[float]] = {}
    for point in (point for point in points[1::2] if point.nbytes >= 2**16):
        errors.setdefault(point.kernel, []).append(half.seconds(point) / point.mean_s - 1)  # type: ignore[operator]
    for kind, found in errors.items():
        assert statistics.median(map(abs, found)) <= 0.12, kind
        assert max(map(abs, found)) <= 0.3, kind


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


@pytest.mark.gloo
@pytest.mark.slow
def test_what_the_host_takes_can_be_measured_again() -> None:
    """In a process of its own, as it needs a process group: the ops of the table that ships, each some microseconds."""
    code = "import calibrate.eager as eager; eager._RUNS, eager._TURNS = 20, 3; eager.main()"
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    measured = {row["op"]: float(row["host_us"]) for row in csv.DictReader(printed.splitlines())}
    assert measured.keys() == {row["op"] for row in rows("eager_host")}
    assert all(0.1 < host_us < 1e5 for host_us in measured.values())


def test_calls_and_kernels_cost_the_host_what_their_sources_say() -> None:
    """By hand. A kernel: 2.7 us and a launch of 2.5 by one source, 14.5 by the other. Of a collective's 13.84 us Python
    takes 4.8; a send or receive takes it 3.7 on average, each message of a group 5.75 and the group 4.9; waits 4.5.
    """
    found = eager_issue(load_cluster("hgx-h200"))
    assert found["kernel"].host_s + 2.5e-6 == pytest.approx(math.sqrt(5.2 * 14.5) * 1e-6)
    through_us = 13.84 - 4.8 + 4.5
    assert found["call"].host_s == pytest.approx((3.7 + through_us) * 1e-6, rel=1e-3)
    assert found["exchange"].host_s == pytest.approx((4.9 + through_us) * 1e-6, rel=1e-3)
    assert found["message"] == Issue(host_s=pytest.approx(5.75e-6), launches=0)
    bounds = eager_host(load_cluster("hgx-h200"))
    assert bounds == Spread(low=pytest.approx(apart := math.sqrt(5.2 / 14.5)), high=pytest.approx(2 / apart))


def test_what_torch_takes_longer_for_a_collective_than_nccl() -> None:
    """By hand from the tables, 64 KiB and 64 MiB on 8 x H200: 39.1 - 19.6 and 338.9 - 320.3 us; two launches less."""
    found = eager_issue(load_cluster("hgx-h200"))
    assert {found[kind].host_s for kind in COLLECTIVES} == {found["all_reduce"].host_s}
    assert found["all_reduce"].host_s + 2 * 2.5e-6 == pytest.approx(19e-6, rel=0.05)


def test_how_far_sources_of_a_small_kernel_lie_apart() -> None:
    """By hand: sums of 128 and 512 tokens take 4 and 13 us on A100, so 1 without tokens; 3 and 7 on H100, so 1.67."""
    assert queued.OF_A100.apart == Spread(low=pytest.approx(1 / 1.4, rel=1e-4), high=pytest.approx(2.7 / 1.4, rel=1e-4))
    assert queued.OF_HOPPER.apart == Spread(low=1.0, high=pytest.approx(2.5 / 1.3, rel=1e-4))
    assert queued.Queued(1e-6, 1.2e-6, "h100").apart.high == pytest.approx(5 / 3, rel=1e-4)


def test_what_keeps_elementwise_kernels_from_the_rate_of_memory() -> None:
    """A cross-entropy of rows that no SM holds reads them three times: 16 bytes a logit for 8. Passes of modules agree
    to a factor of two; at twice the rate what is left for these kernels is more than twice as much.
    """
    a100 = 0.77 * load_cluster("dgx-a100").hbm.bytes_per_s
    assert elementwise.log_softmax(a100)["_log_softmax"] == pytest.approx(16 / 8, rel=0.05)
    each = [elementwise._longer(a100, [one])[SCATTERED] for one in elementwise._modules(elementwise.A100)]
    assert len(each) == 4
    assert elementwise.scattered(a100, elementwise.A100)[SCATTERED] == pytest.approx(
        statistics.geometric_mean(each), rel=0.01
    )
    assert max(each) < 2 * min(each)
    twice = elementwise.scattered(2 * a100, elementwise.A100)[SCATTERED]
    assert twice > 2 * statistics.geometric_mean(each)
