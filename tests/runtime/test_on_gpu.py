"""What only a GPU can show: that issuing never waits for it, what its allocator gives, its fused norms, its graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from experiments.evidence.units import percent, size
from runtime.execution.dense import rms_norm, rms_norm_backward
from runtime.execution.execute import RankPlayer
from runtime.execution.reference import relative_error
from runtime.execution.streams import CudaStreams
from sim.memory import walk
from sim.schedule.methods.one_device import on_one_device
from sim.schedule.proof.check import Checked, check
from sim.workload import Workload, load_model
from tests.helpers import make_checked

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
GPU = torch.device("cuda", 0)


def llama(name: str, ranks: int, layers: int = 1) -> Checked:
    """Return layers of Llama 3 8B, or attention alone where there are none; all ranks on one device."""
    model, scope = load_model("llama3-8b"), "layer" if layers else "attention"
    workload = Workload(model=model, seq=4096, dtype="bf16", scope=scope, layers=layers or 1)  # type: ignore[arg-type]
    checked = make_checked(name, workload, ranks)
    return check(on_one_device(checked)) if ranks > 1 else checked


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(("name", "ranks"), [("single", 1), ("zigzag", 4), ("upipe", 4)])
def test_issuing_never_waits_for_the_device(name: str, ranks: int) -> None:
    player = RankPlayer(llama(name, ranks).of_rank(0), GPU)
    player.play()
    try:
        torch.cuda.set_sync_debug_mode("error")
        player._issue(player._streams, player._fresh(), [])
    finally:
        torch.cuda.set_sync_debug_mode("default")
        player.close()


@pytest.mark.parametrize(
    ("name", "ranks", "layers"),
    [
        ("single", 1, 1), ("zigzag", 4, 1), ("ulysses", 4, 1), ("burst", 2, 1), ("single, offloaded", 1, 3),
        ("single", 1, 0), ("burst", 2, 0), ("allgather", 4, 0),
    ],
)  # fmt: skip
def test_the_allocator_beside_what_the_walk_says(
    name: str, ranks: int, layers: int, record_property: Callable[[str, object], None]
) -> None:
    """A measurement, kept in the report (--junitxml) and printed (-rP): how far the predicted peak is from the
    allocator's. What has to hold is that it gave the buffers, and that they are what was counted.
    """
    checked = llama(name, ranks, layers)
    said = walk(checked.schedule.program(0), checked.dependencies[0])
    player = RankPlayer(checked.of_rank(0), GPU, "aten-flash")
    step = [player.play() for _ in range(3)][-1]
    player.close()
    assert step.allocated_bytes >= step.peak_bytes == said.buffer_peak_bytes
    record_property("predicted_bytes", said.peak_bytes)
    record_property("allocated_bytes", step.allocated_bytes)
    scope = f"{layers} layers" if layers else "attention"
    sys.stdout.write(
        f"peak of {name}, {ranks} ranks, {scope}: predicted {size(said.peak_bytes)}, "
        f"allocated {size(step.allocated_bytes)} ({percent(said.peak_bytes / step.allocated_bytes - 1)})\n"
    )


def test_fused_norms_are_those_of_the_cpu() -> None:
    x, dout = (torch.randn(2, 64, 4096, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(4096, dtype=torch.bfloat16)
    here, there = rms_norm(x, weight, 1e-5), rms_norm(x.to(GPU), weight.to(GPU), 1e-5)
    back = rms_norm_backward(x, weight, here.second, dout)
    back_there = rms_norm_backward(x.to(GPU), weight.to(GPU), there.second, dout.to(GPU))
    for one, other in ((here, there), (back, back_there)):
        assert other.name.startswith("aten fused")
        for tensor, found in ((one.out, other.out), (one.second, other.second)):
            assert relative_error(found.cpu().double(), tensor.double()) <= 2e-2


def test_graphs_replay_kernels() -> None:
    x = torch.zeros(1024, device=GPU)

    def add() -> list[torch.distributed.Work]:
        x.add_(1)
        return []

    streams = CudaStreams(GPU)
    streams.start()
    assert 0 < streams.replay(add, 100) < 1e-3
    assert x.eq(200).all()  # twice, once to warm up
    streams.close()
