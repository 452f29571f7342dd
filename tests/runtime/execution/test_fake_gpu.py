"""Every op of every schedule, issued on a GPU that is not there: device, shape, data type, what attention kernels are
handed, and that the host waits for nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.execution.ops import cuda_attention
from runtime.execution.ops.attention import AttentionKernel
from runtime.execution.ops.attention_choice import needs_windows
from runtime.execution.ops.cuda_attention import AtenFlash, Cudnn, MemoryEfficient
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.proof.check import Checked
from sim.setup.setup import Setup
from sim.words.workload import Workload
from tests.helpers import OFFLOADED, VARIANTS, checked_or_refused, make_model, slow_but
from tests.runtime.execution.fake_gpu import issued

pytestmark = pytest.mark.sweep
KERNELS: dict[str, AttentionKernel] = {kernel.name: kernel for kernel in (Cudnn(), AtenFlash(), MemoryEfficient())}
SHIFTED = ("allgather", "burst", "double-ring", "striped", "zigzag")
"""Schedules in which parts of a rank's queries are attended."""


def is_issued(checked: Checked, attention: AttentionKernel) -> None:
    """Issue a rank of a schedule, the second where there is one, and see nothing wrong."""
    rank = min(1, checked.schedule.num_ranks - 1)
    if needs_windows(checked.schedule.program(rank)) and not attention.windows:  # type: ignore[attr-defined]
        pytest.skip("it never gets windows")
    seen = issued(checked.of_rank(rank), attention)
    assert not seen.findings
    assert seen.attended


def small(name: str, ranks: int, kernel: str = "aten-cudnn", **fields: Any) -> Checked | None:
    dtype = "fp32" if kernel == "aten-efficient" else "bf16"
    layers = 2 if name in OFFLOADED else 1  # the last one stays
    options = {"seq": 64, "batch": 2, "scope": "layer", "layers": layers, "dtype": dtype}
    return checked_or_refused(name, Workload(model=make_model(8, 4), **(options | fields)), ranks)


@pytest.mark.parametrize("kernel", slow_but({"aten-cudnn"}, KERNELS))
@pytest.mark.parametrize(
    "name",
    slow_but(
        {"zigzag", "allgather", "fpdt", "upipe"},
        [name for name, one in (VARIANTS | OFFLOADED).items() if "kernel" not in one.options],
    ),
)
def test_every_op_is_issued(name: str, kernel: str) -> None:
    """Two sequences, so that a part of a rank's queries has other strides than the whole."""
    checked = small(name, 4, kernel) or small(name, 1, kernel)
    assert checked
    is_issued(checked, KERNELS[kernel])


@pytest.mark.parametrize("kernel", slow_but({"aten-flash"}, ["aten-cudnn", "aten-flash"]))
def test_documents_are_issued(kernel: str) -> None:
    """In parts of odd lengths: flash-attention takes them in few launches, cuDNN one by one."""
    for name in ("zigzag", "allgather"):
        checked = small(name, 4, kernel, documents=(37, 11, 16))
        assert checked
        is_issued(checked, KERNELS[kernel])


def llama(model: str, **fields: Any) -> Checked:
    common: dict[str, Any] = {"cluster": "hgx-h100", "profile": "datasheet", "dtype": "bf16"}
    return Setup(model=model, **(common | fields)).resolved().checked()


@pytest.mark.parametrize("stack", slow_but({"5m"}, ["fsdp", "unsloth", "untied-ulysses", "5m"]))
def test_steps_are_issued(stack: str) -> None:
    """With offload, loss and MLP in tiles, and the optimiser on the host."""
    is_issued(llama("tiny", schedule="ulysses", gpus=2, seq="1K", layers=2, stack=stack), Cudnn())


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["aten-cudnn", "aten-flash"])
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_op_of_llama_is_issued(name: str, ranks: int, kernel: str) -> None:
    for one_device in (False, True):
        gpus = 1 if name == "single" else ranks
        fields = {"schedule": name, "gpus": gpus, "seq": "16K", "scope": "layer", "one_device": one_device}
        is_issued(llama("llama3-8b", **fields), KERNELS[kernel])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["aten-cudnn", "aten-flash"])
@pytest.mark.parametrize("stack", ["fsdp", "unsloth", "untied-ulysses", "5m"])
def test_steps_of_llama_are_issued(stack: str, kernel: str) -> None:
    steps = [
        {"schedule": "single", "gpus": 1, "seq": "32K"},
        {"schedule": "ulysses", "gpus": 4, "seq": "16K", "one_device": True},
    ]
    for fields in steps:
        is_issued(llama("llama3-8b", layers=2, stack=stack, **fields), KERNELS[kernel])


@pytest.mark.parametrize("name", slow_but({"striped"}, SHIFTED))
def test_a_log_sum_exp_that_is_not_packed_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_attention, "packed", lambda tensor: tensor)
    checked = small(name, 4)
    assert checked
    found = [one for rank in range(4) for one in issued(checked.of_rank(rank), Cudnn()).findings]
    assert any("logsumexp" in one and "strides" in one for one in found)
    assert any("logsumexp" in one and "not aligned" in one for one in found) == (name == "striped")


def test_what_the_host_waits_for_is_seen() -> None:
    """A value asked for, and a copy to pageable memory or from it."""
    checked = small("single", 1)
    assert checked

    class Asking(Cudnn):
        def _forward(self, q: Any, *rest: Any) -> Any:
            assert float(q.sum()) > 0
            return super()._forward(q, *rest)

    class Sending(Cudnn):
        def _forward(self, q: Any, *rest: Any) -> Any:
            return super()._forward(q + torch.zeros(1, dtype=q.dtype).to(q.device), *rest)

    with pytest.raises(Exception, match="(?i)data.dependent|local_scalar"):
        issued(checked.of_rank(0), Asking())
    assert issued(checked.of_rank(0), Sending()).findings == ["_to_copy of (1,) from cpu to cuda:0"]


def test_what_attention_should_not_be_handed_is_seen() -> None:
    checked = small("single", 1)
    assert checked

    class Odd(Cudnn):
        def _forward(self, q: Any, k: Any, v: Any, band: Any) -> Any:
            beside = torch.empty(q.numel() + 4, dtype=q.dtype, device=q.device)[4:]
            return super()._forward(beside.view(*q.shape[:2], -1, q.shape[2]).transpose(-1, -2), k, v.float(), band)

    found = issued(checked.of_rank(0), Odd()).findings
    assert {what.split(": ")[1] for what in found} >= {"not aligned", "last stride not 1", "torch.float32"}
