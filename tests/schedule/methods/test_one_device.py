"""Every schedule on one device: proved again, exact when executed, with the kernels and the memory of all ranks."""

from __future__ import annotations

import pytest
import torch

from runtime.execution.verify import output_errors
from runtime.execution.virtual import execute_virtual
from sim.accounts.memory import walk
from sim.schedule.ir.ops import Copy, Kernel
from sim.schedule.ir.program import Schedule
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.methods.one_device import on_one_device
from sim.schedule.proof.check import check
from sim.words.workload import Workload
from tests.helpers import VARIANTS, checked_or_refused, make_checked, make_model, slow_but

CPU = torch.device("cpu")


@pytest.mark.sweep
@pytest.mark.parametrize("cells", [[(4, (8, 4)), (1, (8, 4))], pytest.param([(8, (8, 2))], marks=pytest.mark.slow)])
@pytest.mark.parametrize("scope", slow_but({"attention"}, ["attention", "layer"]))
@pytest.mark.parametrize("name", slow_but(SCHEDULES, VARIANTS))
def test_every_schedule_is_exact_on_one_device(name: str, scope: str, cells: list[tuple[int, tuple[int, int]]]) -> None:
    """Also with keys that fewer ranks have than split the heads, and in random orders of what does not depend."""
    done = 0
    for ranks, heads in cells:
        workload = Workload(model=make_model(*heads), seq=48, batch=2, dtype="fp64", scope=scope, layers=1)  # type: ignore[arg-type]
        checked = checked_or_refused(name, workload, ranks)
        if checked is None:
            continue
        done += 1
        folded = check(on_one_device(checked))
        assert folded.schedule.num_ranks == 1
        assert not folded.matching.transfers
        assert not folded.matching.groups
        kernels = [use for uses in checked.kernels for use in uses if use]
        copied = sum(isinstance(op, Kernel) for op in folded.schedule.program(0).ops) - len(kernels)
        assert (copied > 0) == bool(checked.matching.transfers or checked.matching.groups)
        assert sum(use.flops for use in folded.kernels[0] if use and "attention" in use.kernel) == sum(
            use.flops for use in kernels if "attention" in use.kernel
        )
        assert max(output_errors(folded, execute_virtual(folded, CPU, ranks)).values()) <= 1e-12
    assert done or VARIANTS[name].schedule == "single"


@pytest.mark.sweep
def test_activations_on_the_host_of_one_device() -> None:
    """Copies of all ranks on the same two streams."""
    workload = Workload(model=make_model(8, 4), seq=48, dtype="fp64", scope="layer", layers=3)
    checked = make_checked("zigzag, offloaded", workload, 4)
    folded = check(on_one_device(checked))
    copies = [type(op).__name__ for op in folded.schedule.program(0).ops].count("HostCopy")
    assert copies == 4 * [type(op).__name__ for op in checked.schedule.program(0).ops].count("HostCopy") > 0
    assert max(output_errors(folded, execute_virtual(folded, CPU, 1)).values()) <= 1e-12


@pytest.mark.sweep
def test_activations_on_the_host_save_memory_of_one_device_too() -> None:
    workload = Workload(model=make_model(8, 4), seq=1536, scope="layer", layers=8)
    peaks = {}
    for name in ("zigzag", "zigzag, offloaded"):
        folded = check(on_one_device(make_checked(name, workload, 4)))
        peaks[name] = walk(folded.schedule.program(0), folded.dependencies[0]).by_category["saved"]
    assert peaks["zigzag, offloaded"] < 0.4 * peaks["zigzag"]


def test_a_hop_of_a_ring_is_a_copy_of_its_keys_and_values() -> None:
    """Forward on four ranks: three hops each, of keys and of values."""
    workload = Workload(model=make_model(8, 4), seq=64, passes="forward")
    folded = on_one_device(make_checked("ring", workload, 4))
    ops = folded.program(0).ops
    assert all(isinstance(op, Kernel) for op in ops)
    assert sum(isinstance(op, Copy) for op in ops) == 4 * 3 * 2
    assert folded.header.name == "ring, 4 ranks on one device"
    assert Schedule.from_json(folded.to_json()).hash == folded.hash
