"""What only a GPU can show: that issuing never waits for it, what its allocator gives, its own kernels, its graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import torch

from runtime.execution.execute import RankPlayer
from runtime.execution.inputs import global_state
from runtime.execution.ops.dense import rms_norm, rms_norm_backward
from runtime.execution.ops.state import adamw
from runtime.execution.ops.vocabulary import cross_entropy
from runtime.execution.reference import relative_error
from runtime.execution.streams import CudaStreams
from sim.accounts.memory import walk
from sim.base.units import percent, size
from sim.schedule.ir.ops import NO_LABEL
from sim.schedule.methods.one_device import on_one_device
from sim.schedule.proof.check import Checked, check
from sim.words.workload import Workload, load_model
from tests.helpers import make_checked
from tests.schedule.model.test_step import make_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
GPU = torch.device("cuda", 0)


def llama(name: str, ranks: int, layers: int = 1) -> Checked:
    """Return layers of Llama 3 8B, or attention alone where there are none; all ranks on one device."""
    model, scope = load_model("llama3-8b"), "layer" if layers else "attention"
    workload = Workload(model=model, seq=4096, dtype="bf16", scope=scope, layers=layers or 1)  # type: ignore[arg-type]
    checked = make_checked(name, workload, ranks)
    return check(on_one_device(checked)) if ranks > 1 else checked


ON_HOST = {"activations": "host", "loss": "chunked", "mlp": "tiled"}
"""Options of a step whose ops run on the GPU and its copy engines alone."""


def trained(ranks: int, **options: Any) -> Checked:
    """Return a training step of two layers of Llama 3 8B with a small vocabulary; all ranks on one device."""
    model = msgspec.structs.replace(load_model("llama3-8b"), vocab_size=16384)
    workload = Workload(model=model, seq=8192, dtype="bf16", scope="step", layers=2)
    checked = make_step("ulysses" if ranks > 1 else "single", ranks, workload, **options)
    return check(on_one_device(checked)) if ranks > 1 else checked


ISSUED = {
    "single": partial(llama, "single", 1),
    "zigzag": partial(llama, "zigzag", 4),
    "upipe": partial(llama, "upipe", 4),
    "a step": partial(trained, 1),
    "a step of two ranks with offload and tiles": partial(trained, 2, **ON_HOST),
}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("what", ISSUED)
def test_issuing_never_waits_for_the_device(what: str) -> None:
    player = RankPlayer(ISSUED[what]().of_rank(0), GPU)
    player.play()
    fresh = player._fresh()
    try:
        torch.cuda.set_sync_debug_mode("error")
        player._issue(player._streams, fresh, [])
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
    scope = f"{layers} layers" if layers else "attention"
    is_told(llama(name, ranks, layers), f"{name}, {ranks} ranks, {scope}", record_property)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {}), (2, {}), (2, {"checkpoint": "none"}), (1, ON_HOST), (2, ON_HOST), (2, ON_HOST | {"optimiser": "host"})],
)
def test_the_allocator_of_a_step(
    ranks: int, options: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    said = ", ".join(f"{name} {value}" for name, value in options.items())
    is_told(trained(ranks, **options), f"a step, {ranks} ranks, {said or 'FSDP alone'}", record_property)


def is_told(checked: Checked, what: str, record_property: Callable[[str, object], None]) -> None:
    """Print the predicted peak beside the allocator's."""
    said = walk(checked.schedule.program(0), checked.dependencies[0])
    player = RankPlayer(checked.of_rank(0), GPU, "aten-flash")
    step = [player.play() for _ in range(3)][-1]
    player.close()
    assert step.allocated_bytes >= step.peak_bytes == said.buffer_peak_bytes
    record_property("predicted_bytes", said.peak_bytes)
    record_property("allocated_bytes", step.allocated_bytes)
    sys.stdout.write(
        f"peak of {what}: predicted {size(said.peak_bytes)}, "
        f"allocated {size(step.allocated_bytes)} ({percent(said.peak_bytes / step.allocated_bytes - 1)})\n"
    )


def test_an_embedding_and_its_gradient_are_those_of_the_cpu() -> None:
    """Of more tokens than torch sums without sorting, ids that come often among them."""
    ids, dout = torch.randint(100, (1, 4096)), torch.randn(1, 4096, 64, dtype=torch.bfloat16)
    backward = torch.ops.aten.embedding_dense_backward
    here, there = (backward(dout.to(device), ids.to(device), 100, -1, False) for device in (torch.device("cpu"), GPU))
    assert relative_error(there.cpu().double(), here.double()) <= 2e-2


def test_updates_are_those_of_the_cpu() -> None:
    """To the last digits of fp32, also of states in bf16; and so are inputs that it makes."""
    for dtype in (torch.float32, torch.bfloat16):
        state = [torch.rand(1000).to(dtype) for _ in range(4)]
        there = [tensor.to(GPU) for tensor in state]
        for tensors in (state, there):
            adamw(*tensors)
        for one, other in zip(state, there, strict=True):
            assert relative_error(other.cpu().double(), one.double()) <= (1e-6 if dtype == torch.float32 else 1e-2)
    workload = Workload(model=load_model("tiny"), seq=64, dtype="bf16", scope="step", layers=1)
    for name in ("embedding parameters", "second moments of embedding"):
        assert torch.equal(global_state(name, 0, workload, GPU).cpu(), global_state(name, 0, workload))


def test_a_loss_is_that_of_the_cpu() -> None:
    logits = torch.randn(1, 2500, 1000, dtype=torch.bfloat16)
    labels = torch.randint(1000, (1, 2500)).masked_fill(torch.arange(2500) % 7 == 0, NO_LABEL)
    losses = [torch.empty(1, 2500), torch.empty(1, 2500, device=GPU)]
    gradients = [logits.clone(), logits.to(GPU)]
    for gradient, loss in zip(gradients, losses, strict=True):
        cross_entropy(gradient, labels.to(gradient.device), loss, 2142)
    assert relative_error(losses[1].cpu().double(), losses[0].double()) <= 1e-5
    assert relative_error(gradients[1].cpu().double(), gradients[0].double()) <= 1e-2


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
