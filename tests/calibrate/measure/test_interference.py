"""What kernels and transfers do to each other: the schedules that show it, the figures that follow, what is left."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest

from calibrate.host import HostCalibration
from calibrate.measure.fit import Together, fitted_spec, together_of, traffic_of
from calibrate.measure.interference import Crowd, compared, crowded_cases, jitter_of, time_crowded, time_interference
from calibrate.measure.interference_schedules import AMONG_RANKS, Transfer, interference_schedules
from calibrate.measure.residuals import explained
from calibrate.plan import Plan
from runtime.processes.launch import Session
from sim.engine.costs.cost import CostModel
from sim.engine.costs.phases import Flow
from sim.engine.play.simulate import simulate
from sim.schedule.proof.check import check
from sim.words.profile import Machine, Point, Profile, Slowdown
from sim.words.workload import load_model
from tests.helpers import make_model
from topology.cluster import Cluster, load_cluster
from topology.host import HostFacts, with_facts
from topology.specs import HbmSpec

TINY = load_model("tiny")
NOMINAL = with_facts(load_cluster("host"), HostFacts("Test CPU", 2, 2**34))


def slowdown(kernel: str, bytes_per_s: float, times: float, low: float, **fields: Any) -> Slowdown:
    options: dict[str, Any] = {"slowed": "kernel", "dtype": "fp32", "beside": "ranks", "ranks": 2, "clock": "thread"}
    times_s: dict[str, Any] = {"alone_s": 1e-3, "median": times, "low": low, "high": times, "runs": 18}
    nbytes = round(bytes_per_s * 1e-3)
    return Slowdown(kernel=kernel, **{"shape": (nbytes // 4,), "nbytes": nbytes} | options | times_s | fields)


def profile(
    points: list[Point], interference: list[Slowdown], traffic: dict[str, float], memory: float = 40e9
) -> Profile:
    spec = msgspec.structs.replace(NOMINAL, hbm=HbmSpec(capacity_bytes=2**34, bytes_per_s=memory))
    return Profile(
        name="x",
        created="",
        command="",
        complete=True,
        machine=Machine(gpu=spec.gpu.name, cores=2, threads_per_rank=1, software={}),
        cluster=msgspec.to_builtins(spec, str_keys=True),
        points=tuple(points),
        interference=tuple(interference),
        traffic=traffic,
    )


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("transfer", "ranks"), [*product(AMONG_RANKS, (2, 3, 4)), ("offload", 1), ("fetch", 1), ("offload", 2)]
)
def test_each_kernel_meets_a_transfer_twice_and_nothing_else_differs(transfer: Transfer, ranks: int) -> None:
    schedules = interference_schedules(transfer, ranks, TINY, "fp32")
    sequential, overlapped = check(schedules.sequential), check(schedules.overlapped)
    assert {place.use.kernel for place in schedules.places} == {
        "attention_forward", "attention_backward", "gemm", "rms_norm", "rms_norm_backward", "rope", "swiglu",
        "swiglu_backward", "merge", "accumulate", "copy",
    }  # fmt: skip
    for place in schedules.places:
        later, early = place.kernel(overlapped=False), place.kernel(overlapped=True)
        assert sequential.kernels[0][later] == overlapped.kernels[0][early] == place.use
        assert place.transfer in sequential.dependencies[0].waits[place.transfer + 1]
        assert place.transfer not in overlapped.dependencies[0].waits[early]
    first, second = (sorted(map(repr, one.program(0).ops)) for one in (schedules.sequential, schedules.overlapped))
    assert first == second


def test_what_is_crowded_is_what_meets_transfers() -> None:
    uses = [place.use for place in interference_schedules("exchange", 2, TINY, "fp32").places]
    assert sorted(case.use for case in crowded_cases(TINY, "fp32")) == sorted(uses)


def test_traffic_follows_from_the_slowdowns_of_two_at_once() -> None:
    """By hand: two accumulates at 24 GB/s each take 1.2 times as long: 40 GB/s. Two copies of 16 GB/s take 1.25 times
    as long: each demands 25 of them, 25 / 16 of what it could not avoid. Norms do not slow each other for certain.
    """
    found = [
        slowdown("accumulate", 24e9, 1.2, 1.1),
        slowdown("copy", 16e9, 1.25, 1.2),
        slowdown("rms_norm", 6e9, 1.05, 0.99),
        slowdown("gemm", 1e9, 1.3, 1.2),
        slowdown("copy", 16e9, 2.0, 2.0, clock="wall"),
        slowdown("copy", 16e9, 2.0, 2.0, beside="exchange"),
    ]
    together = together_of([], found, 2)
    spec = fitted_spec(NOMINAL, [], [], together, 1e-6, 2, "now")
    assert spec.hbm.bytes_per_s == pytest.approx(40e9)
    assert traffic_of(together, spec.hbm.bytes_per_s) == pytest.approx({"accumulate": 1.0, "copy": 25 / 16})


def test_only_all_ranks_at_once_show_what_the_memory_gives() -> None:
    """Of two ranks and of four, the four count; at half of 40 GB/s for each of two there would be no slowdown."""
    together = [Together("copy", 2, 10e9, 1.1, 1.05), Together("copy", 4, 10e9, 2.0, 1.9)]
    assert traffic_of(together, 40e9) == pytest.approx({"copy": 2.0})


def test_traffic_is_what_kernels_demand_of_the_memory() -> None:
    """1 ms for 16 MB, a demand of 16 of 40 GB/s; with a traffic of 25/16, 25 of 40: two at once take 1.25 times as
    long, and the residual of a measured 1.25 is nothing.
    """
    (place,) = [p for p in interference_schedules("exchange", 2, TINY, "fp32").places if p.use.kernel == "copy"]
    use = place.use
    seconds = use.hbm_bytes / 16e9
    times = {"median_s": seconds, "mean_s": seconds, "low_s": seconds, "high_s": seconds, "runs": 5}
    point = Point(kernel="copy", dtype="fp32", shape=use.shape, condition="idle", nbytes=use.hbm_bytes, **times)  # type: ignore[arg-type]
    measured = slowdown("copy", 16e9, 1.25, 1.2, clock="wall")
    for traffic, demand, simulated in (({}, 16e9, 1.0), ({"copy": 25 / 16}, 25e9, 1.25)):
        made = profile([point], [measured], traffic)
        cluster = Cluster(msgspec.convert(made.cluster, type(NOMINAL), strict=False))
        (flow,) = CostModel(cluster, made).kernel(0, use)
        assert isinstance(flow, Flow)
        assert flow.seconds == pytest.approx(seconds)
        assert dict(flow.demands)[cluster.devices[0].hbm] == pytest.approx(demand)
        (one,) = explained(made, TINY)
        assert one.simulated == pytest.approx(simulated)


def test_slowdowns_during_a_transfer_are_explained_by_the_same_schedules() -> None:
    """With a core per rank, transfers that take none, and memory for all, kernels keep their time."""
    found = [slowdown("gemm", 1e9, 1.5, 1.4, variant="nn", beside="all_to_all", clock="wall")]
    (one,) = explained(profile([], found, {}, memory=1e12), TINY)
    assert one.measured == found[0]
    assert one.simulated == pytest.approx(1.0)
    schedules = interference_schedules("all_to_all", 2, TINY, "fp32")
    traces = [
        simulate(check(one), Cluster(NOMINAL), None).trace for one in (schedules.sequential, schedules.overlapped)
    ]
    pairs = compared(schedules.places[0], [(traces[0], traces[1])])
    assert [len(found) for found in pairs.values()] == [2, 2]
    assert all(alone > 0 and slowed > 0 for of_kind in pairs.values() for alone, slowed in of_kind)


def test_jitter_is_what_one_run_of_ten_exceeds() -> None:
    """Half-normal times of share 0.2 around 1; the same on both ranks, or each rank's own."""
    generator = np.random.default_rng(0)
    times = 1 + 0.2 * np.abs(generator.normal(size=(2, 4000)))
    own = jitter_of([Crowd([], [times.tolist()])])
    same = jitter_of([Crowd([], [[times[0].tolist(), times[0].tolist()]])])
    assert own is not None
    assert same is not None
    median = 1 + 0.2 * 0.6745
    assert own.share == pytest.approx(((1 + 0.2 * 1.645) / median - 1) / 1.645, rel=0.05)
    assert own.correlation == pytest.approx(0.0, abs=0.05)
    assert same.correlation == pytest.approx(1.0)
    assert own.runs == 8000
    assert jitter_of([Crowd([], [[[1.0], [1.0]]])]) is None


def test_a_profile_from_before_interference_was_measured_still_loads() -> None:
    old = msgspec.to_builtins(profile([], [], {}))
    for field in ("interference", "traffic", "jitter"):
        old.pop(field, None)
    assert msgspec.convert(old, Profile) == profile([], [], {})


@pytest.mark.sweep
def test_only_a_full_calibration_measures_interference() -> None:
    for quick in (True, False):
        with HostCalibration(Plan("host", TINY, ("fp32",), quick=quick, command="test")) as calibration:
            labels = [step.label for step in calibration.steps()]
        assert any("during all_reduce" in label and "every kernel" in label for label in labels) != quick


@pytest.mark.gloo
@pytest.mark.slow
def test_timing_interference_on_real_processes(ranks: Callable[[int], Session]) -> None:
    session, model = ranks(2), make_model(8, 4)
    case = next(case for case in crowded_cases(model, "fp32") if case.use.kernel == "swiglu")
    crowd = time_crowded(session, case)
    assert [(one.ranks, one.clock) for one in crowd.slowdowns] == [(2, "wall"), (2, "thread")]
    assert all(0 < one.low <= one.median <= one.high for one in crowd.slowdowns)
    assert {len(turn) for turn in crowd.together} == {2}
    found = time_interference(session, "all_to_all", model, "fp32")
    assert {one.slowed for one in found} == {"kernel", "transfer"}
    assert len(found) == 2 * len(crowded_cases(model, "fp32"))
    assert len(explained(profile([], [*crowd.slowdowns, *found], {}), model)) == len(found) + 1
