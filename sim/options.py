"""Options that several schedules share. They change time or memory, never the result; others are in ``methods``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LayoutName = Literal["contiguous", "zigzag", "striped"]
Place = Literal["hbm", "host", "pageable"]
"""GPU memory, pinned host memory (which copy engines reach), pageable host memory."""
AttentionName = Literal["flash", "memory-efficient", "standard"]


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """Options of the layers around any attention."""

    activations: Place = "hbm"
    """Where layers except the last keep saved activations: on the GPU, or offloaded to host memory (pinned or pageable)
    and prefetched one layer ahead."""


@dataclass(frozen=True, kw_only=True)
class SumOptions(LayerOptions):
    """Options of schedules that sum partial gradients."""

    gradients: Literal["fp32", "model"] = "fp32"
    """Data type in which partial gradients of q, k and v are summed and sent: promote(model dtype, fp32), or the
    model's."""


@dataclass(frozen=True, kw_only=True)
class OverlapOptions(LayerOptions):
    """Options of schedules that overlap communication with kernels."""

    overlap: bool = True
    """Whether kernels overlap with communication that they do not need; else the host waits for each."""
