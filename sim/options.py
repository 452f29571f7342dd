"""What may differ between runs of one schedule: options that change its time or memory, never what it computes.

Each method has its own, where it stands; here are those that several share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LayoutName = Literal["contiguous", "zigzag", "striped"]
Place = Literal["hbm", "host", "pageable"]
"""A GPU's memory; its host's where that is pinned, so that copy engines reach it; and where it is not."""
AttentionName = Literal["flash", "memory-efficient", "standard"]


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """Options of the layers around any attention."""

    activations: Place = "hbm"
    """Where layers but the last keep what their backward pass needs: in the GPU's memory, or copied to its host's
    (pinned, or pageable) and fetched again one layer ahead."""


@dataclass(frozen=True, kw_only=True)
class SumOptions(LayerOptions):
    """Options of schedules that sum partial gradients."""

    gradients: Literal["fp32", "model"] = "fp32"
    """Data type in which partial gradients of q, k and v are summed and sent: promote(model dtype, fp32), or the
    model's."""


@dataclass(frozen=True, kw_only=True)
class OverlapOptions(LayerOptions):
    """Options of schedules that communicate beside kernels."""

    overlap: bool = True
    """Whether kernels run beside communication that they do not need; else the host waits for each."""
