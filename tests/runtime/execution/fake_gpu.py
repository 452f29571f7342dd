"""A GPU that is not there: torch's fake tensors of device cuda have shapes, strides and data types, and no values.

Programs are issued on it by the runtime's own kernels. Every op of torch is seen: what attention kernels are handed,
and what would make the host wait.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.execution import tensors
from runtime.execution.ops import kernels, state, varlen
from runtime.execution.ops.attention import AttentionKernel
from runtime.execution.ops.kernels import host_copy, run_kernel
from runtime.execution.ops.varlen import ALIGNED_BYTES
from runtime.execution.tensors import TORCH_DTYPE, Storage, ends_at
from sim.accounts.memory import lifetimes
from sim.schedule.ir.ops import HostAdamW, HostCopy, HostSync, Kernel
from sim.schedule.ir.views import Buffer, View
from sim.schedule.proof.check import RankSchedule

GPU = torch.device("cuda", 0)
_CUDA, _META, _DEVICES = 1, 14, 21
"""Numbers of torch's device types, c10/core/DeviceType.h."""
_KEPT = (kernels._rows, kernels._index, state._step, varlen._segments)
"""What sends to a device once and keeps it there."""
_ATTENTION = {
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
    "_flash_attention_forward",
    "_flash_attention_backward",
}
_PACKED = {"_scaled_dot_product_cudnn_attention_backward": {"out", "grad_out", "logsumexp"}}
"""Operands whose strides are in no key of torch's graphs of cuDNN. Of all kernels, log-sum-exps are packed."""


class Seen(TorchDispatchMode):
    """Every op, and what is wrong with operands of attention kernels and with copies, for which the host may wait."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self.attended = 0
        self.findings: list[str] = []
        self.issuing = False
        """Whether the host should not wait: not the first time, when tables are made and sent."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        name = function._schema.name.removeprefix("aten::")
        if name in _ATTENTION:
            self.attended += 1
            for argument, operand in zip(function._schema.arguments, args, strict=False):
                if isinstance(operand, torch.Tensor) and operand.numel():
                    self._operand(name, argument.name, operand)
        made = function(*args, **given)
        if self.issuing and name in {"copy_", "_to_copy"}:
            source, target = (args[1], args[0]) if name == "copy_" else (args[0], made)
            queued = name == "copy_" and len(args) > 2 and args[2]
            if source.device != target.device and not queued:
                self.findings.append(f"{name} of {tuple(source.shape)} from {source.device} to {target.device}")
        return made

    def _operand(self, kernel: str, name: str, operand: torch.Tensor) -> None:
        is_lse, is_index = name == "logsumexp", name.startswith("cum_seq")
        dtype = torch.float32 if is_lse else torch.int32 if is_index else self._dtype
        packed = is_lse or is_index or name in _PACKED.get(kernel, ())
        rows = operand.transpose(1, 2) if packed and operand.dim() == 4 and not is_lse else operand
        steps = [step for step, extent in zip(operand.stride(), operand.shape, strict=True) if extent > 1]
        wrong = {
            f"on {operand.device}": operand.device != GPU,
            f"{operand.dtype}": operand.dtype != dtype,
            f"strides {operand.stride()}": packed and not rows.is_contiguous(),
            "last stride not 1": operand.shape[-1] > 1 and operand.stride(-1) != 1,
            "not aligned": operand.storage_offset() * operand.itemsize % ALIGNED_BYTES > 0,
            "rows not aligned": not packed and any(step * operand.itemsize % ALIGNED_BYTES for step in steps[:-1]),
        }
        self.findings += [f"{kernel} {name} {tuple(operand.shape)}: {what}" for what, is_so in wrong.items() if is_so]


def issued(schedule: RankSchedule, attention: AttentionKernel) -> Seen:
    """Issue all ops of a rank twice; return what was seen. Raises what torch does where a value is asked for."""
    _, workload, _, program, dependencies, _ = schedule
    ends = ends_at(lifetimes(program, dependencies), len(program.ops))
    rotations: tensors.Rotations = {}
    with _no_gpu(), FakeTensorMode(), Seen(TORCH_DTYPE[workload.dtype]) as seen:
        for seen.issuing in (False, True):
            storage = Storage(program, GPU, rotations=rotations)
            for port in program.inputs:
                storage.write(port.view)
            for op, ended in zip(program.ops, ends, strict=True):
                storage.drop(ended)
                if isinstance(op, Kernel | HostAdamW):
                    run_kernel(op, storage, attention)
                elif isinstance(op, HostCopy):
                    host_copy(op, storage)()
                elif not isinstance(op, HostSync):
                    for view in op.writes:  # as the network does
                        storage.write(view)
                seen.findings += [f"{op.label}: {wrong}" for view in op.writes if (wrong := _is_not(storage, view))]
    return seen


def _is_not(storage: Storage, view: View) -> str:
    """Return how what an op has written differs from what its buffer is; empty where it does not."""
    buffer, found = storage.program.buffers[view.buffer], storage.read(view)
    wanted = TORCH_DTYPE[buffer.dtype], tuple(view.shape), GPU if buffer.place == "hbm" else torch.device("cpu")
    is_now = found.dtype, tuple(found.shape), found.device
    return "" if is_now == wanted else f"{is_now} for {wanted}"


@contextmanager
def _no_gpu() -> Iterator[None]:
    """Let a torch without CUDA slice tensors that are said to be there, memory be pinned that is none, and nothing be
    kept from one fake GPU to the next.
    """

    def pinned(buffer: Buffer) -> torch.Tensor:
        return torch.empty(buffer.shape, dtype=TORCH_DTYPE[buffer.dtype])

    _guard()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "pinned", pinned)
        for kept in _KEPT:
            kept.cache_clear()
        try:
            yield
        finally:
            for kept in _KEPT:
                kept.cache_clear()


def _guard() -> None:
    """Where torch was built without CUDA, switching to its device fails; give it the guard of meta tensors, which does
    nothing.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * _DEVICES).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    if guards[_CUDA] is None:
        guards[_CUDA] = guards[_META]
