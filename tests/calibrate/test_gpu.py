"""A GPU's calibration, played on the CPU: its steps, and what becomes of what they find."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import msgspec
import pytest

from calibrate.gpu import GENERATIONS, GpuCalibration, power_limit_w
from calibrate.measure.cases import FULL_GPU, QUICK_GPU, kernel_cases
from calibrate.measure.host_copies import HostCopyTimes, time_host_copies
from calibrate.measure.kernels import Timed
from calibrate.measure.residuals import explained
from calibrate.plan import Plan
from calibrate.published.reading import kernel_point, transfer_point
from runtime.execution.ops.attention_choice import NAMES
from runtime.processes.launch import Session
from sim.engine.costs.cost import CostModel
from sim.engine.costs.measured import measured_cluster
from sim.schedule.derive.kernels import KernelUse, attention_use
from sim.schedule.ir.masks import CAUSAL
from sim.schedule.ir.ops import HostCopy
from sim.schedule.write.builder import ProgramBuilder
from sim.setup.setup import Setup
from sim.words.options import Place
from sim.words.profile import HOST_COPIES, PAGEABLE_COPIES, Profile, save_profile
from sim.words.workload import Workload, load_model
from tests.helpers import make_cluster_spec, make_model
from topology.cluster import Cluster, load_cluster

LAUNCH_S = 4e-6


def by_hand(timed: list[Timed]) -> Profile:
    """Return the profile that a GPU's calibration makes of some times."""
    plan = Plan("toy", load_model("llama3-8b"), ("bf16",), quick=True, command="by hand")
    calibration = GpuCalibration(plan, make_cluster_spec())
    calibration._timed, calibration._launch_s = timed, LAUNCH_S
    return calibration.profile(complete=True)


def attention(tokens: int, seconds: float, cpu_s: float) -> Timed:
    use = attention_use(False, "bf16", (1, tokens, 8, 128), tokens, 2, CAUSAL)
    return Timed(kernel_point(use, seconds), cpu_s)


def streaming(kernel: str, elements: int, seconds: float, cpu_s: float) -> Timed:
    return Timed(kernel_point(KernelUse(kernel, "", "bf16", (elements,), 0, 6 * elements), seconds), cpu_s)


@pytest.mark.gloo
def test_its_steps_time_launches_and_kernels() -> None:
    plan = Plan("here", make_model(8, 4), ("fp32",), quick=True, command="test")
    with GpuCalibration(plan, load_cluster("host")) as calibration:
        steps = calibration.steps()
        assert steps[0].label == "launch"
        for step in [*steps[:2], *(step for step in steps if "256x" in step.label)]:
            step.run()
        profile = calibration.profile(complete=False)
    assert steps[1].label == "launch in a graph"
    assert 0 < (profile.replayed_s or 0) < 1
    assert not profile.complete
    assert 0 < profile.cluster["gpu"]["launch_s"] < 1
    assert {"attention_forward", "attention_backward"} <= {point.kernel for point in profile.points}
    assert all(point.condition == "idle" for point in profile.points)
    assert msgspec.json.decode(msgspec.json.encode(profile), type=Profile) == profile


@pytest.mark.gloo
def test_load_is_timed_on_the_heaviest_kernels_that_end_soon(ranks: Callable[[int], Session]) -> None:
    plan = Plan("here", make_model(8, 4), ("fp32",), quick=True, command="test")
    calibration = GpuCalibration(plan, load_cluster("host"))
    labels = [step.label for step in calibration.steps() if step.label.endswith(", 1 s")]
    assert len(labels) == 3
    case = next(case for case in kernel_cases(plan.model, "fp32", QUICK_GPU) if case.use.kernel == "gemm")
    calibration._session, calibration._sustained_s = ranks(1), 0.3
    calibration._time_sustained(case)
    sustained = calibration.profile(complete=False).sustained
    assert sustained.keys() == {"gemm"}
    assert 1 <= sustained["gemm"].low <= sustained["gemm"].longer <= sustained["gemm"].high < 100


def test_the_power_limit_is_the_drivers() -> None:
    state = "NVIDIA H200, 570.86.15, 1980 MHz, 3201 MHz, 1980 MHz, 38, 119.95 W, 650.00 W"
    assert power_limit_w(state) == 650
    assert power_limit_w("") is None


@pytest.mark.gloo
def test_what_copies_do_to_kernels_is_timed_and_explained(ranks: Callable[[int], Session]) -> None:
    """Timed on the CPU; explained for a GPU, where a copy takes but little of the memory and no SMs."""
    model = make_model(4, 2)
    calibration = GpuCalibration(Plan("toy", model, ("fp32",), quick=False, command=""), load_cluster("hgx-h200"))
    assert {"every kernel during offload", "every kernel during fetch"} <= {step.label for step in calibration.steps()}
    calibration._session = ranks(1)
    calibration._time_interference("offload")
    profile = calibration.profile(complete=False)
    assert {(one.slowed, one.kernel) for one in profile.interference} >= {("kernel", "gemm"), ("transfer", "gemm")}
    assert all(one.beside == "offload" and one.alone_s > 0 for one in profile.interference)
    assert all(1 - 1e-9 <= one.simulated < 1.2 for one in explained(profile, model) if one.measured.slowed == "kernel")


@pytest.mark.gloo
def test_host_copies_are_timed_alone_and_together(ranks: Callable[[int], Session]) -> None:
    """On a CPU all are copies of threads."""
    kinds: dict[Place, tuple[str, str]] = {"host": HOST_COPIES, "pageable": PAGEABLE_COPIES}
    for place, names in kinds.items():
        times = time_host_copies(ranks(1), 2**20, make_model(8, 4), "fp32", place)
        assert [(point.kernel, point.shape) for point in times.points] == [(name, (1, 2**20)) for name in names]
        assert all(point.runs == 12 and 0 < point.low_s <= point.median_s <= point.high_s for point in times.points)
        assert times.both_bytes_per_s is None if place == "pageable" else 0 < (times.both_bytes_per_s or 0) < 1e13


def test_measured_host_copies_are_what_copies_take() -> None:
    """Two sizes: 1 GiB at 50 GB/s, a half, a fifth and a tenth of it, by way and memory; and both ways together
    80 GB/s, where the preset has no such limit.
    """
    plan = Plan("toy", load_model("llama3-8b"), ("bf16",), quick=True, command="by hand")
    calibration = GpuCalibration(plan, load_cluster("hgx-h200"))
    assert [step.label for step in calibration.steps()][2:4] == [
        "host copies of 4194304 bytes, pinned", "host copies of 268435456 bytes, pinned",
    ]  # fmt: skip
    for nbytes, seconds in ((2**20, 30e-6), (2**30, 2**30 / 50e9)):
        points = [
            transfer_point(kind, "dram", 1, nbytes, seconds * factor)
            for kind, factor in zip((*HOST_COPIES, *PAGEABLE_COPIES), (1, 2, 5, 10), strict=True)
        ]
        calibration._copied.append(HostCopyTimes(tuple(points), 80e9 if nbytes == 2**30 else None))
    profile = calibration.profile(complete=True)
    assert profile.cluster["pcie"]["both_ways_bytes_per_s"] == 80e9
    cluster = Cluster(measured_cluster(profile))
    b = ProgramBuilder(0, Workload(model=load_model("llama3-8b"), seq=2**17, dtype="bf16"))
    here = b.tensor("here", 2**17, 32, "saved")
    for there in (b.elsewhere(here, "host"), b.elsewhere(here, "pageable")):
        b.host_copy(here, there, "out")
        b.host_copy(there, here, "back")
    program = b.build()
    cost = CostModel(cluster, profile)
    for op, factor in zip([op for op in program.ops if isinstance(op, HostCopy)], (1, 2, 5, 10), strict=True):
        activity = cost.on_host(0, program, op)
        assert sum(phase.seconds for phase in activity) == pytest.approx(factor * 2**30 / 50e9)


@pytest.mark.sweep
def test_blocks_of_rings_are_timed_too() -> None:
    """Half as many keys as queries, and the other way about, forward and backward, up to 16K and 32K."""
    uses = {case.use for case in kernel_cases(load_model("llama3-8b"), "bf16", FULL_GPU)}
    for kernel in ("attention_forward", "attention_backward"):
        shapes = {use.shape[1:3] for use in uses if use.kernel == kernel and use.shape[1] != use.shape[2]}
        assert {(tokens, tokens // 2) for tokens, _ in shapes if tokens > _} | {
            (keys // 2, keys) for queries, keys in shapes if keys > queries
        } == shapes
        assert max(shapes) == (32768, 16384)
        assert (16384, 32768) in shapes


def test_what_issuing_costs_is_told_from_the_kernel_itself() -> None:
    """A sum is one launch; attention takes the host 30 us more, and nothing takes less than a launch."""
    profile = by_hand(
        [
            streaming("accumulate", 2**20, 1e-5, 20e-6),
            attention(1024, 1e-4, 50e-6),
            streaming("copy", 2**20, 1e-5, 9e-6),
        ]
    )
    host = {kernel: issue.host_s for kernel, issue in profile.issue.items()}
    assert host == pytest.approx({"accumulate": 0.0, "attention_forward": 30e-6, "copy": 0.0})
    assert all(issue.launches == 1 for issue in profile.issue.values())
    assert profile.cluster["gpu"]["launch_s"] == LAUNCH_S


def test_memory_is_what_the_largest_copies_and_sums_get() -> None:
    spec = make_cluster_spec()
    ideal_s = 6 * 2**24 / spec.hbm.bytes_per_s
    found = [streaming("copy", 2**10, 1.0, 0.0), streaming("copy", 2**24, ideal_s / 0.8, 0.0)]
    assert by_hand(found).memory_efficiency == pytest.approx(0.8)
    assert by_hand([*found, streaming("accumulate", 2**24, ideal_s / 0.6, 0.0)]).memory_efficiency == pytest.approx(0.7)
    assert by_hand([]).memory_efficiency == 1


def test_each_kernel_that_can_be_timed_is_one_that_software_names() -> None:
    assert GENERATIONS.keys() == {*NAMES}


def test_its_attention_follows_a_tile_model() -> None:
    """Between and beyond what was timed; a measured point comes back."""
    profile = by_hand([attention(2**n, 5e-3 + 1e-3 * 4 ** (n - 9), 0.0) for n in range(9, 15)])
    (model,) = profile.tiles
    assert model.pair_s > 0
    cost = CostModel(Cluster(measured_cluster(profile)), profile)

    def predicted(tokens: int) -> float:
        use = attention_use(False, "bf16", (1, tokens, 8, 128), tokens, 2, CAUSAL)
        return sum(phase.seconds for phase in cost.kernel(0, use))

    assert predicted(2**12) == pytest.approx(5e-3 + 1e-3 * 4**3)
    assert predicted(2**16) == pytest.approx(4 * predicted(2**15), rel=0.05)


@pytest.mark.sweep
def test_it_covers_what_layers_of_llama_run() -> None:
    """Attention of all heads and of those of two, four and eight ranks; what fits into a GPU's memory."""
    model = load_model("llama3-8b")
    cases = kernel_cases(model, "bf16", FULL_GPU)
    heads = {case.use.shape[3] for case in cases if case.use.fused_attention}
    assert heads == {4, 8, 16, 32}
    tokens = {"attention_forward": 1, "attention_backward": 1, "gemm": 0}  # where their shapes have them
    longest = {
        name: max(case.use.shape[at] for case in cases if case.use.kernel == name) for name, at in tokens.items()
    }
    assert longest == {"attention_forward": 2**18, "attention_backward": 2**18, "gemm": 2**17}
    assert max(sum(buffer.nbytes for buffer in case.program.buffers) for case in cases) < 32e9
    assert len(kernel_cases(model, "bf16", QUICK_GPU)) < len(cases) / 2


def test_what_issuing_took_goes_with_a_profile_that_was_measured(tmp_path: Path) -> None:
    """Not with one out of tables, whose launches are the preset's: a cluster file's own figure stands."""
    cluster, made = tmp_path / "ours.toml", tmp_path / "made.json"
    preset = resources.files("topology").joinpath("hardware", "hgx-h100.toml").read_text()
    cluster.write_text(re.sub(r"(?m)^launch_s = .*$", "launch_s = 5e-6", preset))
    common = {"model": "llama3-8b", "seq": "64K", "cluster": str(cluster), "gpus": 8}
    assert Setup(profile="h100-sxm", **common).resolved().spec.gpu.launch_s == 5e-6  # type: ignore[arg-type]
    calibration = GpuCalibration(
        Plan("made", load_model("llama3-8b"), ("bf16",), quick=True, command=""), load_cluster("hgx-h100")
    )
    calibration._launch_s = LAUNCH_S
    save_profile(calibration.profile(complete=True), made)
    chosen = Setup(profile=str(made), **common).resolved()  # type: ignore[arg-type]
    assert chosen.spec.gpu.launch_s == LAUNCH_S
    twice = Setup(profile=str(made), set=("cluster.gpu.launch_s=*2",), **common).resolved()  # type: ignore[arg-type]
    assert twice.spec.gpu.launch_s == 2 * LAUNCH_S
