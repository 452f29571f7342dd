"""Calibration: what is timed is what runs, figures follow from points, and an interruption keeps what there is."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest
import torch
from rich.console import Console

from calibrate import plan as plan_module
from calibrate.gpu import GpuCalibration
from calibrate.held.leave_one_out import leave_one_out
from calibrate.host import HostCalibration
from calibrate.measure.cases import QUICK_CPU, kernel_cases
from calibrate.measure.fit import fitted_spec, together_of
from calibrate.measure.kernels import time_kernel
from calibrate.measure.links import LinkCase, LinkTimes, link_cases, link_schedule, time_launch, time_link
from calibrate.measure.residuals import repeat
from calibrate.plan import Plan, Step, software
from experiments.verbs import calibrate as verb
from runtime.processes.launch import Session
from runtime.processes.rank import RankContext
from sim.base.errors import RankError
from sim.engine.costs.measured import measured_cluster
from sim.engine.play.simulate import simulate
from sim.schedule.derive.kernels import attention_use
from sim.schedule.ir.masks import CAUSAL
from sim.schedule.proof.check import check
from sim.words.profile import Machine, Point, Profile, load_profile
from sim.words.workload import Workload, load_model
from tests.helpers import make_checked, make_model
from topology.cluster import Cluster, load_cluster
from topology.host import HostFacts, with_facts

TINY = load_model("tiny")
NOMINAL = with_facts(load_cluster("host"), HostFacts("Test CPU", 2, 2**34))


def point(kernel: str, shape: tuple[int, ...], seconds: float, **fields: Any) -> Point:
    times = {"median_s": seconds, "mean_s": seconds, "low_s": seconds, "high_s": seconds, "runs": 5}
    options: dict[str, Any] = {"dtype": "fp32", "condition": "idle"} | times | fields
    return Point(kernel=kernel, shape=shape, **options)


@pytest.mark.sweep
def test_every_kernel_of_the_schedules_is_timed() -> None:
    """What ring and Ulysses run, in kernel and mask, is a subset of what a quick calibration covers; a Hold takes no
    time.
    """
    covered = {(case.use.kernel, case.use.variant) for case in kernel_cases(TINY, "bf16", QUICK_CPU)} | {("hold", "")}
    for name in ("ring", "ulysses"):
        for mask in ("causal", "full"):
            for scope in ("attention", "layer", "step"):
                workload = Workload(model=make_model(8, 4), seq=64, batch=2, mask=mask, dtype="bf16", scope=scope)
                for uses in make_checked(name, workload, 4).kernels:
                    assert {(use.kernel, use.variant) for use in uses if use} <= covered


@pytest.mark.sweep
@pytest.mark.parametrize("case", [*link_cases(quick=False, shared=False), *link_cases(quick=True, shared=True)])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_schedules_that_time_links_are_schedules(case: LinkCase, ranks: int) -> None:
    check(link_schedule(case, ranks, TINY, "fp32"))


def test_figures_follow_from_the_points() -> None:
    """By hand: attention 5 % slower when both cores run it; a cold copy at 20 GB/s alone and 2 x 15 together; small
    transfers 0.2 ms, 0.3 beside computation; a large one takes 10 ms, and 8 ms from the 30 ms of attention beside it.
    """
    shape = (1, 1024, 1024, 8, 4, 64)
    kernels = [
        point("attention_forward", shape, 0.100, variant="full", flops=10**12),
        point("attention_forward", shape, 0.105, variant="full", flops=10**12, condition="busy"),
        point("copy", (2**23,), 2**26 / 20e9, nbytes=2**26),
        point("copy", (2**23,), 2**26 / 15e9, nbytes=2**26, condition="busy"),
    ]
    links = [
        LinkTimes(point("exchange", (2, 4096), 0.2e-3, nbytes=4096), [], [40e-6, 50e-6, 60e-6]),
        LinkTimes(point("exchange", (2, 4096), 0.3e-3, nbytes=4096, condition="busy"), [], []),
        LinkTimes(point("exchange", (2, 2**24), 10e-3, nbytes=2**24), [], [50e-6]),
        LinkTimes(point("exchange", (2, 2**24), 20e-3, nbytes=2**24, condition="busy"), [8e-3, 8e-3], []),
        LinkTimes(point("exchange", (4, 4096), 9e-3, nbytes=4096), [], []),
    ]
    spec = fitted_spec(NOMINAL, kernels, links, together_of(kernels, [], 2), 3e-6, 2, "now")
    assert spec.host is not None
    assert spec.loopback is not None
    assert spec.host.cores == pytest.approx(2 / 1.05)
    assert spec.hbm.bytes_per_s == pytest.approx(30e9)
    assert spec.loopback.latency_s == pytest.approx(0.2e-3)
    assert spec.loopback.bytes_per_s == pytest.approx(2**24 / 10e-3)
    assert spec.host.wakeup_s == pytest.approx(0.1e-3)
    assert spec.host.handoff_s == pytest.approx(50e-6)
    assert spec.host.transfer_cores == pytest.approx(0.8)
    assert spec.gpu.launch_s == 3e-6
    assert spec.gpu.peak_flops_per_s["fp32"] == 10**13, "a peak that was beaten is none"
    for figure in ("host.cores", "hbm.bytes_per_s", "loopback.latency_s", "host.transfer_cores"):
        assert "measured by longstep calibrate, now" in spec.sources[figure]


def test_without_points_the_nominal_figures_stay() -> None:
    spec = fitted_spec(NOMINAL, [], [], [], 1e-6, 2, "now")
    assert spec.hbm == NOMINAL.hbm
    assert spec.loopback == NOMINAL.loopback


def test_points_that_follow_the_model_predict_each_other() -> None:
    """Attention at half of the peak at every length: no residual; one point that takes twice as long: 100 % there."""
    spec = fitted_spec(NOMINAL, [], [], [], 1e-6, 2, "now")
    peak = spec.gpu.peak_flops_per_s["fp32"]
    lengths = (256, 512, 1024, 2048)

    def profile(slow: int) -> Profile:
        points = []
        for length in lengths:
            use = attention_use(False, "fp32", (1, length, 8, 64), length, 4, CAUSAL)
            seconds = use.flops / peak * (4 if length == slow else 2)
            options = {"variant": use.variant, "flops": use.flops, "nbytes": use.hbm_bytes}
            points.append(point(use.kernel, use.shape, seconds, **options))
        machine = Machine(gpu=spec.gpu.name, cores=2, threads_per_rank=1, software={})
        cluster = msgspec.to_builtins(spec, str_keys=True)
        return Profile(
            name="x", created="", command="", complete=True, machine=machine, cluster=cluster, points=tuple(points)
        )

    (steady,) = leave_one_out(profile(0))
    assert (steady.kernel, steady.points) == ("attention_forward", 2)
    assert steady.worst == pytest.approx(0.0, abs=1e-9)
    (uneven,) = leave_one_out(profile(1024))
    assert uneven.worst == pytest.approx(-0.5)


@pytest.mark.slow
@pytest.mark.gloo
def test_timing_kernels_and_links_on_real_processes(ranks: Callable[[int], Session]) -> None:
    """A few steps of a real calibration."""
    session = ranks(2)
    cases = {case.use.kernel: case for case in reversed(kernel_cases(make_model(8, 4), "bf16", QUICK_CPU))}
    assert len(cases) == 19
    for case in cases.values():
        alone, together = (time_kernel(session, case, when, 0.01).point for when in ("idle", "busy"))  # type: ignore[arg-type]
        assert 0 < alone.low_s <= alone.median_s <= alone.high_s
        assert (alone.kernel, alone.shape, alone.flops) == (together.kernel, together.shape, together.flops)
        assert together.runs >= 2 * 5
    for kind in ("exchange", "all_to_all", "all_gather", "reduce_scatter", "all_reduce"):
        for condition in ("idle", "busy"):
            case_ = LinkCase(kind, 2**14, condition)  # type: ignore[arg-type]
            found = time_link(session, case_, TINY, "fp32")
            assert found.point.shape == (2, 2**14)
            assert found.point.median_s > 0
            assert bool(found.lost_s) == (condition == "busy")
            assert bool(found.handoff_s) == (condition == "idle")
    assert 0 < time_launch(session, TINY, "fp32", inline=True) < 1e-2


@pytest.mark.gloo
def test_a_calibration_keeps_what_it_has(ranks: Callable[[int], Session]) -> None:
    with HostCalibration(Plan("host", TINY, ("fp32",), quick=True, command="test")) as calibration:
        assert calibration.profile(complete=False).points == ()
        steps = {step.label: step for step in calibration.steps()}
        assert len(steps) > 100
        for label in ("exchange of 4096 bytes, 2 ranks", "attention_forward causal 1x256x256x8x4x64, idle"):
            steps[label].run()
        profile = calibration.profile(complete=False)
    (again,) = repeat(profile, ranks(1), most=3, budget_s=0.01)
    assert again.now_s > 0
    assert not profile.complete
    assert len(profile.points) == 2
    read = msgspec.json.decode(msgspec.json.encode(profile), type=Profile)
    checked = make_checked("ring", Workload(model=TINY, seq=512), 2)
    simulation = simulate(checked, Cluster(measured_cluster(read)), read)
    assert simulation.trace.step_time_s > 0
    assert simulation.cost.notes


@pytest.mark.slow
@pytest.mark.gloo
def test_ctrl_c_writes_the_points_so_far(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    command = [sys.executable, "-m", "experiments.verbs.cli", "calibrate", "--quick", "--out", str(out)]
    hears = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # tests in the background start deaf to it
    code = f"import signal, sys; {hears}; from experiments.verbs.cli import main; main(sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command[3:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"COLUMNS": "200", "TTY_COMPATIBLE": "1"},
    )
    assert process.stderr is not None
    progress = ""
    try:
        while not re.search(r"\b5/\d+", progress):
            arrived = os.read(process.stderr.fileno(), 4096).decode(errors="replace")
            assert arrived, progress
            progress += arrived
        process.send_signal(signal.SIGINT)
        printed, complained = process.communicate(timeout=60)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    assert process.returncode == 130, progress + complained
    assert "interrupted" in printed
    profile = msgspec.json.decode(out.read_bytes(), type=Profile)
    assert not profile.complete
    assert profile.points
    assert not list(tmp_path.glob(".*"))


class Failing:
    """A calibration in which one of four measurements fails, and which has no processes."""

    def __init__(self, which: set[str], error: Exception) -> None:
        self.which, self.error = which, error
        self.made: list[str] = []
        self.ended = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def steps(self) -> list[Step]:
        return [Step(name, partial(self.make, name)) for name in ("launch", "copies", "clocks", "kernels", "f", "g")]

    def make(self, name: str) -> None:
        if name in self.which:
            raise self.error
        self.made.append(name)

    def end_session(self) -> None:
        self.ended += 1

    def profile(self, *, complete: bool) -> Profile:
        machine = Machine(gpu="CPU", cores=2, threads_per_rank=1, software={})
        points = tuple(point("copy", (256 + n,), 1e-3) for n in range(len(self.made)))
        cluster = msgspec.to_builtins(NOMINAL, str_keys=True)
        return Profile(
            name="x", created="", command="", complete=complete, machine=machine, cluster=cluster, points=points
        )


@pytest.mark.parametrize("error", [RankError("rank 0 ran out of memory"), ZeroDivisionError("division by zero")])
def test_a_measurement_that_fails_does_not_end_a_calibration(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "made.json"

    def calibrated(failing: set[str]) -> tuple[Failing, str]:
        failing_one = Failing(failing, error)
        monkeypatch.setattr(verb, "_calibration", lambda *_: failing_one)
        monkeypatch.setattr(verb, "_summary", lambda *_: None)
        with pytest.raises(RankError) as failed:
            verb.calibrate(verb.Calibrate(out=str(out)), Console(quiet=True))
        return failing_one, str(failed.value)

    calibration, said = calibrated({"copies"})
    assert calibration.made == ["launch", "clocks", "kernels", "f", "g"]
    assert calibration.ended == 1
    assert said == f"1 measurements failed: copies: {error}"
    profile = msgspec.json.decode(out.read_bytes(), type=Profile)
    assert (len(profile.points), profile.complete) == (5, False)
    calibration, said = calibrated({"launch", "copies", "clocks", "kernels", "f", "g"})
    assert calibration.ended == verb.FAILURES
    assert said.startswith(f"{verb.FAILURES} measurements failed: launch: {error}; copies: ")


def test_what_was_measured_is_written_meanwhile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "made.json"

    class Killed(Failing):
        def make(self, name: str) -> None:
            if name == "kernels":
                assert len(msgspec.json.decode(out.read_bytes(), type=Profile).points) == 3
                raise SystemExit(9)
            super().make(name)

    monkeypatch.setattr(verb, "_calibration", lambda *_: Killed(set(), ValueError()))
    monkeypatch.setattr(verb, "KEPT_S", 0.0)
    with pytest.raises(SystemExit):
        verb.calibrate(verb.Calibrate(out=str(out)), Console(quiet=True))
    assert len(load_profile(str(out)).points) == 3


@pytest.mark.gloo
@pytest.mark.parametrize("on_gpu", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_session_that_failed_is_replaced(*, on_gpu: bool) -> None:
    plan = Plan("here", make_model(8, 4), ("fp32",), quick=True, command="test")
    with GpuCalibration(plan, load_cluster("host")) if on_gpu else HostCalibration(plan) as calibration:
        with pytest.raises(RankError, match="invalid literal"):
            calibration._on(1).call(_raises)
        calibration.end_session()
        assert calibration._on(1).call(_rank) == [0]


def _raises(context: RankContext) -> int:
    return int(f"rank {context.rank}")


def _rank(context: RankContext) -> int:
    return context.rank


def test_versions_are_known_where_longstep_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine to which a checkout was carried."""
    installed = software()
    assert installed["torch"] == torch.__version__

    def none_here(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(plan_module, "version", none_here)
    assert software() == installed
