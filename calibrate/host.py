"""Calibrates this machine: what to time, in which order, and what to keep when it is interrupted."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

from calibrate.held.leave_one_out import with_residuals
from calibrate.measure.cases import FULL_CPU, QUICK_CPU, KernelCase, kernel_cases
from calibrate.measure.fit import fitted_spec, together_of, traffic_of
from calibrate.measure.interference import Crowd, crowded_cases, jitter_of, short_cases, time_crowded, time_interference
from calibrate.measure.interference_schedules import AMONG_RANKS, Transfer
from calibrate.measure.kernels import time_kernel
from calibrate.measure.links import LinkCase, LinkTimes, link_cases, time_launch, time_link
from calibrate.plan import Calibration, Plan, Step, software
from sim.schedule.derive.kernels import ATTENTION_KERNELS
from sim.words.profile import Condition, Machine, Point, Profile, Slowdown
from sim.words.workload import Dtype, ModelSpec
from topology.cluster import load_cluster
from topology.host import host_facts

MAX_RANKS = 16
"""Processes that a calibration starts at most; on larger machines "busy" means that many cores."""

_QUICK_BUSY_TOKENS = (512, 1024)


class HostCalibration(Calibration):
    """The calibration of this machine, of a rank for each core."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._cores = min(max(host_facts().cores, 2), MAX_RANKS)
        self._kernels: list[Point] = []
        self._links: list[LinkTimes] = []
        self._crowds: list[Crowd] = []
        self._beside: list[Slowdown] = []
        self._launch_s: float | None = None
        self._budget_s = 0.1 if plan.quick else 1.0

    def steps(self) -> list[Step]:
        """Return all measurements: launch, links, kernels by size, so that an early end leaves the small ones, and what
        they do to each other; of that quick has no more than shows the machine's jitter.

        Links are timed with a rank per core, and with two, which then have to share.
        """
        plan = self._plan
        links = [
            Step(f"{link.label}, {ranks} ranks", partial(self._time_link, link, ranks))
            for ranks in (2 * self._cores, self._cores)
            for link in link_cases(quick=plan.quick, shared=ranks > self._cores)
        ]
        sizes = QUICK_CPU if plan.quick else FULL_CPU
        cases = [case for dtype in plan.dtypes for case in kernel_cases(plan.model, dtype, sizes)]
        kernels = [
            Step(f"{case.label}, {condition}", partial(self._time_kernel, case, condition))
            for case in cases
            for condition in self._conditions(case)
        ]
        launch = Step("launch", self._time_launch)
        if plan.quick:
            return [*links, launch, *self._crowds_of(short_cases), *kernels]
        beside = [
            Step(f"every kernel during {transfer}", partial(self._time_interference, transfer, dtype))
            for dtype in plan.dtypes
            for transfer in AMONG_RANKS
        ]
        return [*links, launch, *kernels, *self._crowds_of(crowded_cases), *beside]

    def _crowds_of(self, cases_of: Callable[[ModelSpec, Dtype], list[KernelCase]]) -> list[Step]:
        """Return the measurements of kernels on several ranks at once."""
        return [
            Step(f"{case.label}, on 1 to {self._cores} ranks", partial(self._time_crowd, case))
            for dtype in self._plan.dtypes
            for case in cases_of(self._plan.model, dtype)
        ]

    def profile(self, *, complete: bool) -> Profile:
        """Return what has been measured."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        nominal = load_cluster("host")
        launch_s = nominal.gpu.launch_s if self._launch_s is None else self._launch_s
        interference = [slowdown for crowd in self._crowds for slowdown in crowd.slowdowns] + self._beside
        together = together_of(self._kernels, interference, self._cores)
        spec = fitted_spec(nominal, self._kernels, self._links, together, launch_s, self._cores, now)
        facts = host_facts()
        profile = Profile(
            name=self._plan.name,
            created=now,
            command=self._plan.command,
            complete=complete,
            machine=Machine(gpu=spec.gpu.name, cores=facts.cores, threads_per_rank=spec.gpu.sms, software=software()),
            cluster=spec.figures(),
            points=tuple(self._kernels + [link.point for link in self._links]),
            interference=tuple(interference),
            traffic=traffic_of(together, spec.hbm.bytes_per_s),
            jitter=jitter_of(self._crowds),
        )
        return with_residuals(profile)

    def _conditions(self, case: KernelCase) -> tuple[Condition, ...]:
        """Return in which conditions to time a kernel; quick has few of them with all cores busy."""
        use, few = case.use, False
        if use.kernel in ATTENTION_KERNELS:
            few = use.shape[1] not in _QUICK_BUSY_TOKENS or use.shape[3] < self._plan.model.num_heads
        elif use.kernel == "gemm":
            few = use.shape[0] not in _QUICK_BUSY_TOKENS
        return ("idle",) if self._plan.quick and few else ("idle", "busy")

    def _time_launch(self) -> None:
        self._launch_s = time_launch(self._on(self._cores), self._plan.model, self._plan.dtypes[0], inline=True)

    def _time_link(self, case: LinkCase, ranks: int) -> None:
        self._links.append(time_link(self._on(ranks), case, self._plan.model, self._plan.dtypes[0]))

    def _time_kernel(self, case: KernelCase, condition: Condition) -> None:
        self._kernels.append(time_kernel(self._on(self._cores), case, condition, self._budget_s).point)

    def _time_crowd(self, case: KernelCase) -> None:
        self._crowds.append(time_crowded(self._on(self._cores), case))

    def _time_interference(self, transfer: Transfer, dtype: Dtype) -> None:
        self._beside += time_interference(self._on(self._cores), transfer, self._plan.model, dtype)
