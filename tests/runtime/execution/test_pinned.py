"""Pinned memory of a GPU's host: taken before a step and its time limits, as much as it holds, or a clear error."""

from __future__ import annotations

import re
import weakref
from functools import partial

import pytest
import torch

from runtime.execution import tensors as module
from runtime.execution.tensors import TORCH_DTYPE, ends_at, pinned, reserve_pinned
from sim.accounts.memory import lifetimes, walk
from sim.base.errors import InputError
from sim.schedule.ir.views import Buffer
from sim.schedule.proof.check import Checked
from sim.words.workload import Workload
from tests.helpers import make_checked, make_model
from tests.schedule.model.test_step import make_step, step

GPU = torch.device("cuda")


def layers(name: str) -> Checked:
    return make_checked(name, Workload(model=make_model(8, 4), seq=64, scope="layer", layers=3), 1)


PINNING = {
    "layers that keep everything": partial(layers, "single"),
    "layers that keep nothing": partial(layers, "single, offloaded"),
    "a step with everything on the host": partial(make_step, "single", 1, step(), activations="host", optimiser="host"),
}


@pytest.mark.parametrize("what", PINNING)
def test_as_much_is_pinned_as_a_step_holds(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Of an optimiser's state all that there is, before the first op."""
    checked = PINNING[what]()
    program, dependencies = checked.schedule.program(0), checked.dependencies[0]
    ends = ends_at(lifetimes(program, dependencies), len(program.ops))
    live, peaks, advanced = 0, [0], []

    def taken(buffer: Buffer) -> torch.Tensor:
        nonlocal live
        live += buffer.nbytes
        peaks.append(live)
        tensor = torch.empty(buffer.shape, dtype=TORCH_DTYPE[buffer.dtype])
        weakref.finalize(tensor, given_back, buffer.nbytes)
        return tensor

    def given_back(nbytes: int) -> None:
        nonlocal live
        live -= nbytes

    monkeypatch.setattr(module, "pinned", taken)
    reserve_pinned(program, ends, GPU, lambda: advanced.append(live))
    assert max(peaks) == walk(program, dependencies).host_peak_bytes
    assert (max(peaks) > 0) == (what != "layers that keep everything")
    assert len(advanced) == len(peaks) - 1
    assert live == 0
    reserve_pinned(program, ends, torch.device("cpu"), lambda: pytest.fail("a CPU pins nothing"))


def test_a_system_that_pins_nothing_more_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **given: object) -> torch.Tensor:
        assert given["pin_memory"]
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported elsewhere")

    monkeypatch.setattr(torch, "empty", refused)
    monkeypatch.setattr(module.resource, "getrlimit", lambda _: (65536, 65536))
    checked = make_checked("single, offloaded", Workload(model=make_model(8, 4), seq=64, scope="layer", layers=3), 1)
    buffer = next(buffer for buffer in checked.schedule.program(0).buffers if buffer.place == "host")
    expected = (
        f"pinning {buffer.nbytes} bytes of the host's memory for '{buffer.name}' failed (CUDA error: out of memory; "
        f"locked memory has a limit of 65536 bytes here): raise ulimit -l or take a shorter `seq`, or `set` "
        f"schedule.activations=pageable or schedule.optimiser=gpu"
    )
    with pytest.raises(InputError, match=f"^{re.escape(expected)}$"):
        pinned(buffer)
