"""How kernels are repeated: what libraries do at the first run is in no time, and load is load."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from calibrate.measure import kernels as module
from calibrate.measure.cases import QUICK_CPU, KernelCase, kernel_cases
from calibrate.measure.interference import _set_up
from calibrate.measure.kernels import _sustained, _time
from runtime.execution.ops.attention import CpuFlash
from runtime.processes.rank import RankContext
from tests.helpers import make_model

ISSUE_S, KERNEL_S, SEEN_S = 60e-6, 400e-6, 30e-6


def context() -> RankContext:
    """The first of two ranks, of which it alone is at work."""
    found: Any = SimpleNamespace(
        rank=0, ranks=2, device=torch.device("cpu"), attention="", progress=lambda *_: None, state={}
    )
    return found  # type: ignore[no-any-return]


def case_of(kernel: str) -> KernelCase:
    cases = kernel_cases(make_model(8, 4), "fp32", QUICK_CPU)
    return min((case for case in cases if case.use.kernel == kernel), key=lambda case: case.use.flops)


class Building(CpuFlash):
    """Takes half a second for the first call of a shape."""

    def __init__(self) -> None:
        self.built: set[Any] = set()

    def _forward(self, q: Any, k: Any, v: Any, band: Any) -> Any:
        if (q.shape, k.shape, band) not in self.built:
            self.built.add((q.shape, k.shape, band))
            time.sleep(0.5)
        return super()._forward(q, k, v, band)


@pytest.mark.sweep
def test_what_a_library_builds_first_is_in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "attention_kernel", lambda *_: Building())
    monkeypatch.setattr(module, "_num_sets", lambda *_: 1)
    program = case_of("attention_forward").program.to_json()
    laps = _time(context(), program, 1, 0.01)
    assert len(laps) >= module._MIN_RUNS, "it is short"
    assert max(lap.wall_s for lap in laps) < 0.4
    assert max(lap.wall_s for lap in _set_up(context(), program)) < 0.4


class Gpu:
    """A device that takes 400 us for a kernel, a host that takes 60 to issue one and 30 to see that one has ended."""

    inline = False

    def __init__(self) -> None:
        self.host_s = self.free_s = self.busy_s = 0.0
        self.begun_s: list[float] = []

    def start(self) -> float:
        return self.host_s

    def get_ahead(self, seconds: float) -> None:
        self.free_s = max(self.free_s, self.host_s) + seconds

    def issue(self, *_: Any) -> Any:
        self.host_s += ISSUE_S
        begin_s = max(self.free_s, self.host_s)
        self.free_s = end_s = begin_s + KERNEL_S
        self.busy_s += KERNEL_S
        self.begun_s.append(begin_s)

        def wait() -> None:
            self.host_s = max(self.host_s, end_s + SEEN_S)

        return SimpleNamespace(wait=wait, times=lambda: (begin_s, end_s))


def test_a_device_under_load_never_waits_for_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    monkeypatch.setattr(module, "open_streams", lambda _: gpu)
    monkeypatch.setattr(module, "_operands", lambda *_: None)
    monkeypatch.setattr(module, "_copied", lambda *_: None)
    monkeypatch.setattr(module, "run_kernel", lambda *_: None)
    monkeypatch.setattr(module, "_QUEUED", {"cpu": module._QUEUED["cuda"]})
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: gpu.host_s, thread_time=lambda: 0.0))
    monkeypatch.setattr(module.RepeatedKernel, "once_each", lambda _: [])
    found = _sustained(context(), case_of("gemm").program.to_json(), 2.0)
    assert gpu.busy_s / (gpu.free_s - gpu.begun_s[0]) > 0.999
    assert gpu.free_s >= 2
    assert found.longer == found.high == 1
