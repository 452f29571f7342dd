"""Which kernel computes attention: by the device, the data type, what is installed, and the name that was asked for."""

from __future__ import annotations

import torch

from runtime.execution.attention import AttentionKernel, CpuFlash
from runtime.execution.cuda_attention import AtenFlash, Cudnn, FlashAttention2, FlashAttention3, MemoryEfficient
from sim.errors import InputError, unknown

_KERNELS = (FlashAttention3, FlashAttention2, AtenFlash, MemoryEfficient, Cudnn)
"""Of GPUs, the best first."""


def attention_kernel(device: torch.device, dtype: torch.dtype, name: str = "") -> AttentionKernel:
    """Return the implementation of a name, or the best one, for a device; raises InputError for a data type that none
    is for.
    """
    return CpuFlash() if device.type == "cpu" else cuda_kernel(dtype, name)


def cuda_kernel(dtype: torch.dtype, name: str = "") -> AttentionKernel:
    """Return the kernel of a name, or the best one here, for a data type; raises InputError where there is none."""
    if name and name not in (names := [kernel.name for kernel in _KERNELS]):
        raise unknown("attention kernel", name, names, "--attention")
    possible = {kernel.name: kernel for kernel in _KERNELS if dtype in kernel.dtypes and kernel.is_here()}
    given = str(dtype).removeprefix("torch.")
    if not possible:
        raise InputError(f"attention on CUDA runs bf16, fp16 and fp32, not {given}; set --dtype bf16")
    if name and name not in possible:
        raise InputError(
            f"attention kernel {name!r} does not run {given} here, {', '.join(possible)} would: set --attention, or "
            f"calibrate with one of them"
        )
    return possible[name or next(iter(possible))]()


def runs(name: str, dtype: torch.dtype) -> bool:
    """Return whether there is a kernel of a name, on this machine or another one, and for a data type."""
    return any(kernel.name == name and dtype in kernel.dtypes for kernel in _KERNELS)
