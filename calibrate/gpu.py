"""Calibrates GPUs of a kind: what to time, in which order, and their profile, with the tile model of attention."""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import threading
from datetime import UTC, datetime
from functools import partial

import msgspec
import numpy as np
import torch

from calibrate.held.leave_one_out import with_residuals
from calibrate.held.tiles import tile_models
from calibrate.measure.between_gpus import BetweenCase, between_cases, time_between
from calibrate.measure.cases import FULL_GPU, QUICK_GPU, KernelCase, kernel_cases
from calibrate.measure.host_copies import PLACES, SIZES, HostCopyTimes, time_host_copies
from calibrate.measure.interference import time_interference
from calibrate.measure.interference_schedules import AMONG_RANKS, Transfer
from calibrate.measure.kernels import Timed, time_kernel, time_replayed, time_sustained
from calibrate.measure.links import time_launch
from calibrate.measure.residuals import explained
from calibrate.plan import Calibration, Plan, Step, software
from calibrate.published.host import OVERLAP_SLOWDOWN
from runtime.execution.ops.attention_choice import attention_kernel
from runtime.execution.tensors import TORCH_DTYPE
from sim.words.options import FusedName, Place
from sim.words.profile import HOST_COPIES, FusedAttention, Issue, Machine, Point, Profile, Slowdown, Sustained
from sim.words.workload import ModelSpec
from topology.cluster import Cluster
from topology.specs import ClusterSpec, PcieSpec

GENERATIONS: dict[str, FusedName] = {
    "flash-attn-2": "flash-attention-2",
    "aten-flash": "flash-attention-2",
    "flash-attn-3": "flash-attention-3",
    "aten-cudnn": "cudnn",
    "aten-efficient": "cutlass",
}
"""Which kernel an implementation of ``runtime.execution.ops.attention_choice`` runs: torch's own flash is flash-attn
2.
"""
_STREAMING = ("copy", "accumulate")
"""Kernels that show what the memory gives."""
_SMALL = "accumulate"
"""The kernel that shows what a launch costs: on few elements it does nearly nothing."""
_LOAD_S = 5e-4
"""Longest kernel, at the peak, of which seconds of load are made: in a short run of it the clock has not fallen yet."""
_SETTLED = 0.8
"""Share of those seconds after which the driver is asked for clocks and power."""


class GpuCalibration(Calibration):
    """The calibration of a machine's first GPU, and of what is between it and so many in all."""

    def __init__(self, plan: Plan, spec: ClusterSpec, gpus: int = 1) -> None:
        super().__init__(plan, spec.gpu.kind)
        self._gpus = gpus
        self._spec = msgspec.structs.replace(spec, nodes=-(-gpus // spec.gpus_per_node))
        self._between: list[Point] = []
        self._timed: list[Timed] = []
        self._copied: list[HostCopyTimes] = []
        self._launch_s: float | None = None
        self._replayed_s: float | None = None
        self._budget_s = 0.05 if plan.quick else 0.2
        self._sustained: dict[str, Sustained] = {}
        self._beside: list[Slowdown] = []
        self._sustained_s = 1.0 if plan.quick else 5.0
        self._before = _state()

    def steps(self) -> list[Step]:
        """Return all measurements: communication between GPUs where there are several, and what it does to kernels;
        what issuing costs, copies to the host and back, what load does to the clock and copies to kernels; then kernels
        by size, so that an early end leaves the small.
        """
        plan, sizes = self._plan, QUICK_GPU if self._plan.quick else FULL_GPU
        cases = [case for dtype in plan.dtypes for case in kernel_cases(plan.model, dtype, sizes)]
        copies = [
            Step(f"host copies of {nbytes} bytes, {memory}", partial(self._time_host_copies, nbytes, place))
            for place, memory in PLACES.items()
            for nbytes in (SIZES[::3] if plan.quick else SIZES)
            if self._spec.socket
        ]
        kernels = [Step(case.label, partial(self._time, case)) for case in cases]
        most_flops = _LOAD_S * max(self._spec.gpu.peak_flops_per_s.values())
        sustained = [
            Step(f"{case.label}, {self._sustained_s:g} s", partial(self._time_sustained, case))
            for case in _heaviest(cases, most_flops)
        ]
        beside_copies, beside = (
            [
                Step(f"every kernel during {transfer}", partial(self._time_interference, transfer))
                for transfer in transfers
            ]
            for transfers in (
                HOST_COPIES if self._spec.socket and not plan.quick else (),
                AMONG_RANKS if self._gpus > 1 and not plan.quick else (),
            )
        )
        between = [
            Step(case.label, partial(self._time_between, case)) for case in between_cases(self._gpus, quick=plan.quick)
        ]
        small = next(case for case in cases if case.use.kernel == _SMALL)
        launches = [
            Step("launch", self._time_launch), Step("launch in a graph", partial(self._time_replayed, small))
        ]  # fmt: skip
        return [*between, *beside, *launches, *copies, *sustained, *beside_copies, *kernels]

    def profile(self, *, complete: bool) -> Profile:
        """Return what has been measured."""
        points = [timed.point for timed in self._timed]
        copied = [point for times in self._copied for point in times.points]
        gpu = self._spec.gpu
        if self._launch_s is not None:
            gpu = msgspec.structs.replace(gpu, launch_s=self._launch_s)
        gpu = msgspec.structs.replace(gpu, power_w=power_limit_w(self._before) or gpu.power_w)
        spec = msgspec.structs.replace(self._spec, gpu=gpu, pcie=self._pcie())
        ran = software() | self._implementations()
        profile = Profile(
            name=self._plan.name,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=self._plan.command,
            complete=complete,
            machine=Machine(
                gpu=gpu.name,
                software=ran,
                state={"before": self._before, "after": _state()},
            ),
            cluster=spec.figures(),
            points=(*points, *copied, *self._between),
            attention=_fused(ran["attention"]),
            interference=tuple(self._beside),
            memory_efficiency=_memory_efficiency(points, spec.hbm.bytes_per_s),
            replayed_s=self._replayed_s,
            issue=self._issue(),
            sustained=self._sustained,
            tiles=tile_models(points, gpu.sms),
        )
        return msgspec.structs.replace(
            with_residuals(profile), beside_communication=_beside_communication(profile, self._plan.model)
        )

    def _implementations(self) -> dict[str, str]:
        """Return which attention was timed, and with which CUDA."""
        device, dtype = torch.device(self._spec.gpu.kind), TORCH_DTYPE[self._plan.dtypes[0]]
        return {
            "attention": attention_kernel(device, dtype, self._plan.attention).name,
            "cuda": torch.version.cuda or "",
            "cudnn": str(torch.backends.cudnn.version() or ""),  # type: ignore[no-untyped-call]
        }

    def _time_launch(self) -> None:
        self._launch_s = time_launch(self._on(1), self._plan.model, self._plan.dtypes[0], inline=False)

    def _time_replayed(self, case: KernelCase) -> None:
        self._replayed_s = time_replayed(self._on(1), case)

    def _time(self, case: KernelCase) -> None:
        self._timed.append(time_kernel(self._on(1), case, "idle", self._budget_s))

    def _time_between(self, case: BetweenCase) -> None:
        plan, cluster = self._plan, Cluster(self._spec)
        self._between += time_between(self._on(case.ranks), case.link, plan.model, plan.dtypes[0], cluster)

    def _time_interference(self, transfer: Transfer) -> None:
        ranks = self._gpus if transfer in AMONG_RANKS else 1
        self._beside += time_interference(self._on(ranks), transfer, self._plan.model, self._plan.dtypes[0])

    def _time_sustained(self, case: KernelCase) -> None:
        session, states = self._on(1), list[str]()
        asked = threading.Timer(_SETTLED * self._sustained_s, lambda: states.append(_state()))
        asked.start()
        try:
            found = time_sustained(session, case, self._sustained_s)
        except BaseException:
            asked.cancel()
            raise
        asked.join()
        self._sustained[case.use.kernel] = msgspec.structs.replace(found, state=states[0])

    def _time_host_copies(self, nbytes: int, place: Place) -> None:
        self._copied.append(time_host_copies(self._on(1), nbytes, self._plan.model, self._plan.dtypes[0], place))

    def _pcie(self) -> PcieSpec | None:
        """Return the GPU's link, with what large copies both ways get together where that is less than twice one."""
        if self._spec.pcie is None or not self._copied:
            return self._spec.pcie
        one = self._spec.pcie.bytes_per_s * self._spec.pcie.payload
        both = max([one, *(times.both_bytes_per_s for times in self._copied if times.both_bytes_per_s)])
        return msgspec.structs.replace(self._spec.pcie, both_ways_bytes_per_s=both if both < 2 * one else None)

    def _issue(self) -> dict[str, Issue]:
        """Return what ops cost the host beyond a sum, with which the launch was timed."""
        found: dict[str, list[float]] = {}
        for timed in self._timed:
            found.setdefault(timed.point.kernel, []).append(timed.cpu_s)
        if _SMALL not in found:
            return {}
        one = statistics.median(found[_SMALL])
        more = {kernel: statistics.median(times) - one for kernel, times in found.items()}
        return {kernel: Issue(host_s=max(more_s, 0.0)) for kernel, more_s in more.items()}


def _beside_communication(profile: Profile, model: ModelSpec) -> float:
    """Return the factor over their simulated time that 19 of 20 upper quartiles of kernels during communication stay
    below; where none was measured, that of others' GPUs.
    """
    longer = [
        one.measured.high / one.simulated
        for one in explained(profile, model)
        if one.measured.slowed == "kernel" and one.measured.beside in AMONG_RANKS
    ]
    return max(round(float(np.percentile(longer, 95)), 4), 1.0) if longer else OVERLAP_SLOWDOWN


def _heaviest(cases: list[KernelCase], most_flops: float) -> list[KernelCase]:
    """Return per kernel that computes the case with most FLOPs, up to some."""
    found = []
    for kernel in ("attention_forward", "attention_backward", "gemm"):
        few = [case for case in cases if case.use.kernel == kernel and case.use.flops <= most_flops]
        found += [max(few, key=lambda case: case.use.flops)] if few else []
    return found


def _fused(implementation: str) -> FusedAttention | None:
    """Return which fused kernel was timed; None where it is one of a CPU."""
    kernel = GENERATIONS.get(implementation)
    return kernel and FusedAttention(kernel=kernel, said=f"{kernel} ({implementation})")


def _memory_efficiency(points: list[Point], bytes_per_s: float) -> float:
    """Return the share of the memory's bandwidth that the largest copies and sums get; 1 if there is none."""
    shares = []
    for kernel in _STREAMING:
        of_kernel = [point for point in points if point.kernel == kernel]
        if of_kernel:
            largest = max(of_kernel, key=lambda point: point.nbytes)
            shares.append(largest.nbytes / largest.median_s / bytes_per_s)
    return min(statistics.mean(shares), 1.0) if shares else 1.0


def power_limit_w(state: str) -> float | None:
    """Return the enforced power limit that the driver stated; None where it did not."""
    found = re.fullmatch(r".*, ([0-9.]+) W", state)
    return float(found[1]) if found else None


def _state() -> str:
    """Return what the driver says of the GPU: name, clocks, temperature, power; empty where there is no driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None or not torch.cuda.is_available():
        return ""
    fields = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw,power.limit"
    number = f"GPU-{torch.cuda.get_device_properties(0).uuid}"  # the driver counts them in another order
    query = [tool, f"--query-gpu={fields}", "--format=csv,noheader", f"--id={number}"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    return answer.stdout.strip()
