"""Options that several schedules share. They change time or memory, never the result; others are in ``methods``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from sim.errors import InputError

LayoutName = Literal["contiguous", "zigzag", "striped"]
Place = Literal["hbm", "host", "pageable"]
"""GPU memory, pinned host memory (which copy engines reach), pageable host memory."""
SavingName = Literal["hbm", "host", "save-on-cpu", "pageable"]
LossName = Literal["whole", "chunked"]
ZeroStage = Literal[0, 1, 2, 3]
AttentionName = Literal["flash", "memory-efficient", "standard"]


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """Options of the layers around any attention."""

    activations: SavingName = "hbm"
    """Where layers keep saved activations: on the GPU; all but the last offloaded to host memory (pinned or pageable)
    and prefetched one layer ahead; or all of them in pinned memory, in the way of kernels, as torch's save_on_cpu."""
    checkpoint: str = "full"
    """What a training step keeps of a layer for its backward pass: none, everything (no checkpointing); full, its input
    only, so that all of the layer is computed again; attention, its output, too; or a list of tensors, as x+out+h2."""
    loss: LossName = "whole"
    """Whether a training step holds the logits of all tokens, or of a chunk at a time (chunked)."""
    zero_stage: ZeroStage = 3
    """What is sharded over the ranks of a replica in a training step: 0 nothing, 1 the optimiser's state, 2 gradients,
    too, 3 weights, too, as FSDP does."""
    prefetch: int = 1
    """Layers whose weights are gathered ahead at stage 3."""
    reduce: Literal["fp32", "model"] = "fp32"
    """Data type in which gradients of weights are summed over ranks in a training step."""

    def of_scope(self, scope: str) -> dict[str, Any]:
        """Return them by name, those of a training step only where it is one; raises InputError for such a one that is
        set at another scope.
        """
        found = dataclasses.asdict(self)
        for name in () if scope == "step" else _OF_STEPS:
            if found.pop(name) != getattr(LayerOptions, name):
                raise InputError(f"`set` schedule.{name}={getattr(self, name)} is of training steps: set `scope` step")
        if self.prefetch < 0:
            raise InputError(f"`set` schedule.prefetch={self.prefetch}: expected 0 or more")
        return found


_OF_STEPS = ("checkpoint", "loss", "zero_stage", "prefetch", "reduce")


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
