"""Which kernel computes attention: by the device, the data type, what is installed, and the name that was asked for."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from runtime.execution.ops.attention import AttentionKernel, CpuFlash
from runtime.execution.ops.cuda_attention import (
    HOPPER,
    AtenFlash,
    Cudnn,
    FlashAttention2,
    FlashAttention3,
    MemoryEfficient,
)
from sim.base.errors import InputError, unknown
from sim.schedule.derive.kernels import mask_variant
from sim.schedule.ir.masks import Band
from sim.schedule.ir.ops import Attend, AttendBackward, parts_of
from sim.schedule.ir.program import Program

GpuKernel = type[FlashAttention3 | FlashAttention2 | AtenFlash | MemoryEfficient | Cudnn]

_BEFORE_HOPPER: tuple[GpuKernel, ...] = (FlashAttention2, AtenFlash, MemoryEfficient, Cudnn)
_FROM_HOPPER: tuple[GpuKernel, ...] = (FlashAttention3, Cudnn, FlashAttention2, AtenFlash, MemoryEfficient)
"""The fastest first. On H100 at 16K tokens and head dimension 128, causal, in TFLOP/s forward and backward:
flash-attention 3 672 and 562, cuDNN 554 to 590 and 461 to 499, flash-attention 2 364 and 322, also as torch carries it
(digitised from figures of SandAI-org/MagiAttention@2c64135): it has none of the instructions that Hopper brought.
"""
NAMES = tuple(kernel.name for kernel in _FROM_HOPPER)


def attention_kernel(
    device: torch.device, dtype: torch.dtype, name: str = "", *, windows: bool = False
) -> AttentionKernel:
    """Return the implementation of a name, or the fastest one, for a device, as ``cuda_kernel`` does for GPUs."""
    return CpuFlash() if device.type == "cpu" else cuda_kernel(dtype, name, windows=windows)


def cuda_kernel(dtype: torch.dtype, name: str = "", *, windows: bool = False) -> AttentionKernel:
    """Return the kernel of a name, or the fastest one here, for a data type, and for sliding windows where there are
    any; raises InputError where there is none.
    """
    if name and name not in NAMES:
        raise unknown("attention kernel", name, NAMES, "`attention`")
    possible = {kernel.name: kernel for kernel in _fastest_first() if dtype in kernel.dtypes and kernel.is_here()}
    given = str(dtype).removeprefix("torch.")
    if not possible:
        raise InputError(f"attention on CUDA runs bf16, fp16 and fp32, not {given}; set `dtype` bf16")
    if windows:
        possible = {name: kernel for name, kernel in possible.items() if kernel.windows}
        given = f"sliding windows in {given}"
        if not possible:
            raise InputError(f"no attention kernel on CUDA runs {given}: set `dtype` bf16, or leave out `window`")
    if name and name not in possible:
        raise InputError(
            f"attention kernel {name!r} does not run {given} here, {', '.join(possible)} would: set `attention`, or "
            f"calibrate with one of them"
        )
    return possible[name or next(iter(possible))]()


def _fastest_first() -> tuple[GpuKernel, ...]:
    """Return the kernels of this machine's GPU; where there is none, as if it were an older one."""
    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
    return _FROM_HOPPER if major >= HOPPER else _BEFORE_HOPPER


def runs(name: str, dtype: torch.dtype, *, windows: bool = False) -> bool:
    """Return whether there is a kernel of a name, on this machine or another one, for a data type and, where asked, for
    sliding windows.
    """
    return any(kernel.name == name and dtype in kernel.dtypes and kernel.windows >= windows for kernel in _FROM_HOPPER)


def described(name: str) -> str:
    """Return the name of a kernel, with what its time holds beside attention."""
    repeats = any(kernel.name == name and kernel.repeats_keys for kernel in _FROM_HOPPER)
    return f"{name}, after copying shared keys and values for every query head" if repeats else name


def needs_windows(program: Program) -> bool:
    """Return whether attention of a program has masks that are neither full nor causal."""
    return any(
        mask_variant(*block) == "masked"
        for op in program.ops
        if isinstance(op, Attend | AttendBackward) and op.kernel == "flash"
        for block in _blocks(op)
    )


def _blocks(op: Attend | AttendBackward) -> Iterator[tuple[Band, int, int]]:
    """Yield the band, rows and columns of what kernels are called on: a block, or each of its parts."""
    parts = parts_of(op)
    if not parts:
        yield op.band, op.q.shape[1], op.k.shape[1]
    for part in parts:
        yield part.band, part.rows.size, part.columns.size
