"""Communication between GPUs, played by processes on the CPU: what is timed, over which links, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from calibrate.gpu import GpuCalibration
from calibrate.measure.between_gpus import between_cases, exchanged_over, time_between
from calibrate.measure.links import LinkCase
from calibrate.plan import Plan
from calibrate.published.host import OVERLAP_SLOWDOWN
from calibrate.published.reading import transfer_point
from runtime.processes.launch import Session
from sim.engine.costs.cost import CostModel
from sim.engine.costs.measured import measured_cluster
from sim.engine.traffic.collectives import link_traffic
from sim.schedule.ir.ops import AllReduce, AllToAll
from sim.schedule.ir.views import Split, View
from sim.words.profile import Slowdown
from tests.helpers import make_model
from topology.cluster import Cluster, load_cluster
from topology.specs import ClusterSpec

SPEC = load_cluster("hgx-h200")


def calibration(gpus: int, *, quick: bool = False, spec: ClusterSpec = SPEC) -> GpuCalibration:
    return GpuCalibration(Plan("toy", make_model(4, 2), ("fp32",), quick=quick, command="by hand"), spec, gpus)


def test_every_kind_is_timed_among_every_number_of_gpus() -> None:
    assert not between_cases(1, quick=False)
    cases = between_cases(6, quick=False)
    assert sorted({case.ranks for case in cases if case.link.kernel == "all_to_all"}) == [2, 4, 6]
    assert {case.ranks for case in cases if case.link.kernel == "exchange"} == {6}
    assert {case.link.kernel for case in cases} == {
        "exchange", "all_to_all", "all_gather", "reduce_scatter", "all_reduce",
    }  # fmt: skip
    assert max(case.link.nbytes for case in cases) == 2**30
    assert len(between_cases(6, quick=True)) == len(cases) / 3


@pytest.mark.sweep
def test_its_steps_begin_with_it_where_there_are_several_gpus() -> None:
    labels = [step.label for step in calibration(8).steps()]
    first = labels.index("launch")
    assert labels[0] == "all_to_all of 4096 bytes, 2 GPUs"
    assert [label for label in labels[:first] if label.startswith("every kernel")] == [
        "every kernel during exchange", "every kernel during all_to_all", "every kernel during all_reduce",
    ]  # fmt: skip
    assert calibration(1).steps()[0].label == "launch"


def test_exchanges_are_told_apart_by_the_link_that_a_rank_waits_for() -> None:
    """Two nodes of four: the first and the last of each exchange with the other node."""
    two = msgspec.structs.replace(load_cluster("hgx-h100"), nodes=2, gpus_per_node=4)
    found = [exchanged_over(rank, 8, Cluster(two)) for rank in range(8)]
    assert found == ["nic", "nvlink", "nvlink", "nic"] * 2


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("exchange", 65536),
        ("all_to_all", 32768),
        ("all_gather", 32768),
        ("reduce_scatter", 32768),
        ("all_reduce", 65536),
    ],
)
def test_points_have_the_bytes_that_a_port_carries(kind: str, expected: int, session: Session) -> None:
    """64 KiB among two: an exchange sends all of it, an all-reduce half of it twice, others half."""
    nbytes, cluster = 2**16, Cluster(SPEC)
    (point,) = time_between(session, LinkCase(kind, nbytes, "idle"), make_model(), "fp32", cluster)  # type: ignore[arg-type]
    assert (point.kernel, point.variant, point.runs) == (kind, "nvlink", 12)
    assert point.shape == (2, expected)
    assert 0 < point.low_s <= point.median_s < 1


@pytest.fixture
def session(ranks: Callable[[int], Session]) -> Session:
    return ranks(2)


@pytest.mark.gloo
@pytest.mark.slow
def test_a_calibration_of_two_gpus_keeps_what_it_finds(session: Session) -> None:
    """Played on the CPU: points over NVLink, and how much longer kernels take beside communication."""
    one = calibration(2, quick=True)
    one._session = session
    steps = {step.label: step for step in one.steps()}
    steps["all_to_all of 4096 bytes, 2 GPUs"].run()
    one._time_interference("exchange")
    one._session = None
    profile = one.profile(complete=False)
    assert [(point.kernel, point.variant) for point in profile.points] == [("all_to_all", "nvlink")]
    assert {one.beside for one in profile.interference} == {"exchange"}
    assert profile.beside_communication != OVERLAP_SLOWDOWN
    assert calibration(1).profile(complete=False).beside_communication == OVERLAP_SLOWDOWN


def test_what_was_measured_is_what_collectives_take() -> None:
    """All-to-all of 64 MiB among 2 in 1 ms and all-reduce of it in 2 ms."""
    one = calibration(2)
    for kind, op_s in (("all_to_all", 1e-3), ("all_reduce", 2e-3)):
        part = 2**26 if kind == "all_reduce" else 2**25
        traffic = link_traffic(kind, (0, 1), part, Cluster(SPEC))  # type: ignore[arg-type]
        one._between.append(transfer_point(kind, "nvlink", 2, round(max(traffic.nbytes.values())), op_s))
    profile = one.profile(complete=True)
    cost = CostModel(Cluster(measured_cluster(profile)), profile)
    whole = View(0, ((0, 1), (0, 2**26), (0, 1), (0, 1)))
    fields = {"label": "", "communicator": "link"}
    moved = AllToAll(**fields, sends=Split(whole, 1, 2), recvs=Split(whole, 1, 2))
    summed = AllReduce(**fields, view=whole)
    for op, nbytes, seconds in ((moved, 2**25, 1e-3), (summed, 2**26, 2e-3)):
        activity = cost.collective(op, (0, 1), nbytes)
        assert sum(phase.seconds for phase in activity) == pytest.approx(seconds)


def slowed(median: float, high: float) -> Slowdown:
    return Slowdown(
        slowed="kernel", kernel="gemm", variant="nn", dtype="fp32", shape=(1024, 512, 512), nbytes=2**20,
        beside="exchange", ranks=2, clock="wall", alone_s=1e-3, median=median, low=1.0, high=high, runs=16,
    )  # fmt: skip


def test_kernels_that_no_communication_slows_leave_the_interval_alone() -> None:
    one = calibration(2)
    one._beside.append(slowed(0.9, 0.95))
    assert one.profile(complete=True).beside_communication == 1
    one._beside[:] = [slowed(1.5, 1.6)]
    assert 1.3 < one.profile(complete=True).beside_communication <= 1.6
