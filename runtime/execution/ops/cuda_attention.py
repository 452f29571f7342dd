"""Attention kernels of GPUs: flash-attention 3 and 2 where their packages are installed, and what torch carries. Tested
by their signatures, but not run on a GPU yet: see README.

Signatures: flash_attn 2.8 flash_attn/flash_attn_interface.py, hopper/flash_attn_interface.py of the same repository,
and torch 2.11 to 2.13 aten/src/ATen/native/native_functions.yaml. Their traps:

* flash-attention counts a window from the diagonal of the last query and the last key, ours from the first ones.
* A query that sees no key gets lse +inf in flash-attention, which would corrupt every merge; here it is -inf, as in the
  CPU's, and +inf again for the backward pass, where it makes all of its probabilities 0.
* Memory-efficient attention pads lse to a multiple of 32 queries, and knows no heads that share keys.
* No kernel is known to take an lse with strides, so each gets it ``packed``. flash-attention reads it as packed, and so
  do cuDNN's backward kernels of compute capability 8.0 before cuDNN 9.26 (cudnn-frontend PR 304).
* torch keeps the graphs that cuDNN has built under shapes and strides of q, k and v alone (MHAParams in
  aten/src/ATen/native/cudnn/MHA.cpp). One that was built for some strides of out, dout and lse would be run on others:
  they are packed, too, so that their strides follow from their shapes.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from runtime.execution.ops.attention import Backward, Forward, Saved, Tensor, TopLeft
from runtime.execution.ops.varlen import Segments, packed, varlen_backward, varlen_forward
from sim.base.errors import InputError
from sim.schedule.derive.kernels import mask_variant
from sim.schedule.ir.masks import Band, DocumentBlock

_HALF = (torch.bfloat16, torch.float16)
HOPPER = 9
"""Compute capability that flash-attention 3 is for, and cuDNN's attention made for first."""


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False


class Window(NamedTuple):
    """A mask as flash-attention takes it: keys from ``left`` before to ``right`` behind the diagonal; -1: no limit."""

    causal: bool
    left: int
    right: int


def window_of(band: Band, queries: int, keys: int) -> Window:
    """Return a block's mask as flash-attention takes it; raises InputError for a band that it cannot express."""
    variant = mask_variant(band, queries, keys)
    if variant != "masked":
        return Window(variant == "causal", -1, -1)
    last = keys - queries
    left = -1 if band.left is None else band.left + last
    right = -1 if band.right is None else band.right - last
    if (band.left is not None and left < 0) or (band.right is not None and right < 0):
        raise InputError(f"flash-attention has no window for {band} on {queries}x{keys}: its diagonal lies outside")
    return Window(False, left, right)


class _Kernel(ABC):
    """What can be chosen by its name."""

    name: str
    dtypes: tuple[torch.dtype, ...] = _HALF
    windows = True
    """Whether it knows masks that are neither full nor causal."""
    repeats_keys = False
    """Whether heads that share keys and values get copies of them first, which counts as the kernel's time."""

    @staticmethod
    def is_here() -> bool:
        """Return whether this machine has it."""
        return True


class _Flash(_Kernel):
    """What all flash-attention kernels share: (B, S, H, D), windows, grouped heads, lse (B, H, S) in fp32."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> Forward:
        """See AttentionKernel."""
        out, lse = self._call_forward(q, k, v, window_of(band, q.shape[1], k.shape[1]))
        return Forward(out, lse.masked_fill(lse == math.inf, -math.inf))

    def backward(self, saved: Saved, dout: Tensor, band: Band) -> Backward:
        """See AttentionKernel."""
        q, k, v, out, lse = saved
        lse = lse.masked_fill(lse == -math.inf, math.inf)
        return self._call_backward((q, k, v, out, packed(lse)), dout, window_of(band, q.shape[1], k.shape[1]))

    def forward_parts(self, operands: tuple[Tensor, Tensor, Tensor], parts: tuple[DocumentBlock, ...]) -> Forward:
        """See PartsKernel."""
        out, lse = varlen_forward(self._varlen_forward, _window_of_part, operands, parts)
        return Forward(out, lse.masked_fill(lse == math.inf, -math.inf))

    def backward_parts(self, saved: Saved, dout: Tensor, parts: tuple[DocumentBlock, ...]) -> Backward:
        """See PartsKernel."""
        q, k, v, out, lse = saved
        lse = lse.masked_fill(lse == -math.inf, math.inf)
        return varlen_backward(self._varlen_backward, _window_of_part, (q, k, v, out, lse), dout, parts)

    @abstractmethod
    def _varlen_forward(self, q: Tensor, k: Tensor, v: Tensor, at: Segments, window: Window) -> tuple[Tensor, Tensor]:
        """Return out (T_q, H, D) and lse (H, T_q) of parts, as the kernel does."""

    @abstractmethod
    def _varlen_backward(self, saved: Saved, dout: Tensor, at: Segments, window: Window) -> Backward:
        """Return the gradients of parts."""

    @abstractmethod
    def _call_forward(self, q: Tensor, k: Tensor, v: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        """Return out and lse as the kernel does."""

    @abstractmethod
    def _call_backward(self, saved: Saved, dout: Tensor, window: Window) -> Backward:
        """Return the gradients."""


def _window_of_part(part: DocumentBlock) -> Window:
    return window_of(part.band, part.rows.size, part.columns.size)


class AtenFlash(_Flash):
    """flash-attention 2 as torch carries it."""

    name = "aten-flash"

    def _call_forward(self, q: Tensor, k: Tensor, v: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, window.causal, False, **_sides(window)
        )
        return out, lse

    def _call_backward(self, saved: Saved, dout: Tensor, window: Window) -> Backward:
        q, k, v, out, lse = saved
        unused = torch.empty(0, dtype=torch.uint64, device=q.device)  # random state of dropout, which is 0
        grads = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, window.causal, unused, unused,
            **_sides(window)
        )  # fmt: skip
        return Backward(*grads)

    def _varlen_forward(self, q: Tensor, k: Tensor, v: Tensor, at: Segments, window: Window) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, at.row_ends, at.column_ends, at.most_rows, at.most_columns, 0.0, window.causal, False,
            **_sides(window)
        )  # fmt: skip
        return out, lse

    def _varlen_backward(self, saved: Saved, dout: Tensor, at: Segments, window: Window) -> Backward:
        q, k, v, out, lse = saved
        unused = torch.empty(0, dtype=torch.uint64, device=q.device)
        grads = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, at.row_ends, at.column_ends, at.most_rows, at.most_columns, 0.0, window.causal,
            unused, unused, **_sides(window)
        )  # fmt: skip
        return Backward(*grads)


def _sides(window: Window) -> dict[str, int]:
    """Return the window as keywords."""
    return {"window_size_left": window.left, "window_size_right": window.right}


class FlashAttention2(_Flash):
    """The package flash-attn, 2.7 and later."""

    name = "flash-attn-2"

    @staticmethod
    def is_here() -> bool:
        """See _Kernel."""
        return _is_installed("flash_attn.flash_attn_interface")  # the folder alone may be version 4's

    def __init__(self) -> None:
        self._package = importlib.import_module("flash_attn.flash_attn_interface")

    def _call_forward(self, q: Tensor, k: Tensor, v: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._package._flash_attn_forward(
            q, k, v, 0.0, q.shape[-1] ** -0.5, window.causal, window.left, window.right, 0.0, None, False
        )
        return out, lse

    def _call_backward(self, saved: Saved, dout: Tensor, window: Window) -> Backward:
        q, k, v, out, lse = saved
        grads = Backward(torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        self._package._flash_attn_backward(
            dout.contiguous(), q, k, v, out, lse, *grads, 0.0, q.shape[-1] ** -0.5,
            window.causal, window.left, window.right, 0.0, None, False
        )  # fmt: skip
        return grads

    def _varlen_forward(self, q: Tensor, k: Tensor, v: Tensor, at: Segments, window: Window) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._package._flash_attn_varlen_forward(
            q, k, v, at.row_ends, at.column_ends, at.most_rows, at.most_columns, 0.0, q.shape[-1] ** -0.5,
            window.causal, window.left, window.right, 0.0, None, False
        )  # fmt: skip
        return out, lse

    def _varlen_backward(self, saved: Saved, dout: Tensor, at: Segments, window: Window) -> Backward:
        q, k, v, out, lse = saved
        grads = Backward(torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        self._package._flash_attn_varlen_backward(
            dout, q, k, v, out, lse, *grads, at.row_ends, at.column_ends, at.most_rows, at.most_columns, 0.0,
            q.shape[-1] ** -0.5, window.causal, window.left, window.right, 0.0, None, False
        )  # fmt: skip
        return grads


class FlashAttention3(_Flash):
    """The package flash_attn_interface, built from hopper/ of flash-attention, on compute capability 9.0."""

    name = "flash-attn-3"

    @staticmethod
    def is_here() -> bool:
        """See _Kernel."""
        return _is_installed("flash_attn_interface") and torch.cuda.get_device_capability()[0] == HOPPER

    def __init__(self) -> None:
        self._package = importlib.import_module("flash_attn_interface")

    def _call_forward(self, q: Tensor, k: Tensor, v: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _as_taken(self._package._flash_attn_forward)(
            q, k, v, softmax_scale=q.shape[-1] ** -0.5, causal=window.causal, **_sides(window)
        )
        return out, lse

    def _call_backward(self, saved: Saved, dout: Tensor, window: Window) -> Backward:
        q, k, v, out, lse = saved
        grads = Backward(torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        _as_taken(self._package._flash_attn_backward)(
            dout.contiguous(), q, k, v, out, lse, **grads._asdict(), softmax_scale=q.shape[-1] ** -0.5,
            is_causal=window.causal, **_sides(window)
        )  # fmt: skip
        return grads

    def _varlen_forward(self, q: Tensor, k: Tensor, v: Tensor, at: Segments, window: Window) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _as_taken(self._package._flash_attn_forward)(
            q, k, v, softmax_scale=q.shape[-1] ** -0.5, causal=window.causal, **_sides(window), **_named(at)
        )
        return out, lse

    def _varlen_backward(self, saved: Saved, dout: Tensor, at: Segments, window: Window) -> Backward:
        q, k, v, out, lse = saved
        grads = Backward(torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        _as_taken(self._package._flash_attn_backward)(
            dout, q, k, v, out, lse, **grads._asdict(), softmax_scale=q.shape[-1] ** -0.5,
            is_causal=window.causal, **_sides(window), **_named(at)
        )  # fmt: skip
        return grads


def _as_taken(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of flash-attention 3 that takes keywords as of today's interface: builds until 2025 have the
    window as a pair, one name for ``causal``, and no defaults.
    """
    taken = inspect.signature(call).parameters
    if "window_size" not in taken:
        return call

    def older(*given: Any, window_size_left: int, window_size_right: int, **named: Any) -> Any:
        if "is_causal" in named and "is_causal" not in taken:
            named["causal"] = named.pop("is_causal")
        named["window_size"] = window_size_left, window_size_right
        required = [name for name, one in list(taken.items())[len(given) :] if one.default is inspect.Parameter.empty]
        return call(*given, **dict.fromkeys(required) | named)

    return older


def _named(at: Segments) -> dict[str, Any]:
    """Return where parts end, as keywords."""
    return {
        "cu_seqlens_q": at.row_ends,
        "cu_seqlens_k": at.column_ends,
        "max_seqlen_q": at.most_rows,
        "max_seqlen_k": at.most_columns,
    }


class _HeadsFirst(TopLeft, _Kernel):
    """What torch's other kernels share: (B, H, S, D), as many heads of keys as of queries, no windows.

    cuDNN itself knows heads that share keys; torch's op for it is given as many as of queries until that has been tried
    on a GPU. The copies cost about 3 % of a causal forward pass at 16K tokens and 4 query heads a key head, by their
    bytes.
    """

    windows = False
    repeats_keys = True  # sim.schedule.derive.workspace.REPEATING names them, since that takes memory

    def _operands(self, saved: tuple[Tensor, ...], band: Band) -> tuple[bool, list[Tensor]]:
        """Return is_causal, and q, k, v, … with heads first and with the keys of every query head."""
        q, k, v, *rest = saved
        variant = mask_variant(band, q.shape[1], k.shape[1])
        if variant == "masked":
            raise InputError(f"{self.name} runs full and causal blocks, not {band} on {q.shape[1]}x{k.shape[1]}")
        group = q.shape[2] // k.shape[2]
        k, v = (kv.repeat_interleave(group, dim=2) if group > 1 else kv for kv in (k, v))
        return variant == "causal", [tensor.transpose(1, 2) for tensor in (q, k, v, *rest)]


class MemoryEfficient(_HeadsFirst):
    """torch's memory-efficient attention: the one fused kernel for fp32."""

    name = "aten-efficient"
    dtypes = (*_HALF, torch.float32)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> Forward:
        causal, operands = self._operands((q, k, v), band)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(*operands, None, True, 0.0, causal)
        return Forward(out.transpose(1, 2), lse[:, :, : q.shape[1]].contiguous())

    def _backward(self, saved: Saved, dout: Tensor, band: Band) -> Backward:
        q, k, v, out, lse = saved
        causal, (*operands, given) = self._operands((q, k, v, out, dout), band)
        short = -lse.shape[2] % _LSE_ALIGNMENT
        padded = torch.nn.functional.pad(lse, (0, short), value=math.inf) if short else packed(lse)
        seed = torch.empty(0, dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            given, *operands[:3], None, operands[3], padded, seed, seed, 0.0, [True, True, True, False], causal
        )
        return _ungrouped(dq, dk, dv, k.shape[2])


_LSE_ALIGNMENT = 32
"""Queries to a multiple of which memory-efficient attention pads its lse."""


class Cudnn(_HeadsFirst):
    """cuDNN's attention, for bf16 and fp16."""

    name = "aten-cudnn"

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> Forward:
        causal, operands = self._operands((q, k, v), band)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*operands, None, True, 0.0, causal, False)
        return Forward(out.transpose(1, 2), lse.squeeze(-1))

    def _backward(self, saved: Saved, dout: Tensor, band: Band) -> Backward:
        q, k, v, out, lse = saved
        causal, (*operands, given) = self._operands((q, k, v, packed(out), packed(dout)), band)
        seed = torch.empty(0, dtype=torch.int64, device=q.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            given,
            *operands,
            packed(lse).unsqueeze(-1),
            seed,
            seed,
            None,
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            causal,
        )
        return _ungrouped(dq, dk, dv, k.shape[2])


def _ungrouped(dq: Tensor, dk: Tensor, dv: Tensor, kv_heads: int) -> Backward:
    """Return gradients in (B, S, H, D), those of keys summed over the query heads that share them."""
    if dk.shape[1] != kv_heads:
        dk, dv = (grad.unflatten(1, (kv_heads, -1)).sum(dim=2) for grad in (dk, dv))
    return Backward(*(grad.transpose(1, 2) for grad in (dq, dk, dv)))
