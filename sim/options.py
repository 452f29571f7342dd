"""Options that several schedules share. They change time or memory, never the result; others are in ``methods``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from sim.errors import InputError

LayoutName = Literal["contiguous", "zigzag", "striped"]
Sharding = Literal["sequence", "document"]
"""Whether a layout is one of the whole sequence, or of each of its documents."""
Place = Literal["hbm", "host", "pageable"]
"""GPU memory, pinned host memory (which copy engines reach), pageable host memory."""
SavingName = Literal["hbm", "host", "save-on-cpu", "pageable"]
LossName = Literal["whole", "chunked", "unfused", "torch"]
MlpName = Literal["whole", "tiled", "mini"]
ModulesName = Literal["fused", "eager"]
OptimiserPlace = Literal["gpu", "host"]
ZeroStage = Literal[0, 1, 2, 3]
AttentionName = Literal["flash", "memory-efficient", "standard"]
"""What of attention passes through HBM: no scores (flash), those of a tile at a time (arXiv:2112.05682), or all."""
FusedName = Literal[
    "flash-attention-1", "flash-attention-2", "flash-attention-3", "flash-attention-4", "cudnn", "cutlass"
]
"""Which kernel computes flash attention: cutlass is xformers', which torch calls memory-efficient."""


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """Options of the layers around any attention."""

    activations: SavingName = "hbm"
    """Where layers keep saved activations: on the GPU; all but the last offloaded to host memory (pinned or pageable)
    and prefetched one layer ahead; or all of them in pinned memory, in the way of kernels, as torch's save_on_cpu."""
    offloaded: str = "all"
    """What of that goes to host memory: all, or a list of tensors, as x+out; the rest stays on the GPU."""
    offload_from: int = 0
    """First layer of which it does: what those before it save stays on the GPU."""
    rotary_table: bool = False
    """Whether a table of rotary factors of all positions, in the data type of sums, stays on the GPU, as torchtitan's
    freqs_cis; else kernels make those of their tokens."""
    checkpoint: str = "full"
    """What a training step keeps of a layer for its backward pass: none, everything (no checkpointing); full, its input
    only, so that all of the layer is computed again; attention, its output, too; or a list of tensors, as x+out+h2."""
    loss: LossName = "whole"
    """Whether a training step holds the logits of all tokens, or of a chunk at a time (chunked), or those of all tokens
    and a copy in the data type of sums, in which their gradient is made (unfused), as Megatron-LM does it
    (megatron-core 0.16.1 tensor_parallel/cross_entropy.py); or those of all tokens and three tensors of their size in
    the data type of sums, which torch's cross_entropy and its derivative make (torch)."""
    mlp: MlpName = "whole"
    """Whether a training step computes the MLP of all tokens at once, or in tiles, each computed again in backward:
    tiled as ALST (arXiv:2506.13996), mini as MST (arXiv:2407.15892)."""
    modules: ModulesName = "fused"
    """Whether a norm and what is between the products of an MLP are one kernel each; or those that Hugging Face's
    LlamaRMSNorm and LlamaMLP run in turn (eager), of which backward keeps a copy of a norm's input in the data type of
    sums, what its weight multiplies, and the activated gate (transformers 4.57.6
    src/transformers/models/llama/modeling_llama.py)."""
    zero_stage: ZeroStage = 3
    """What is sharded in a training step: 0 nothing, 1 the optimiser's state, 2 gradients,
    too, 3 weights, too, as FSDP does."""
    shards: Literal["all", "replica"] = "all"
    """Over which ranks: all of them, or those of each data-parallel replica, over which gradients are summed then
    (HSDP)."""
    prefetch: int = 1
    """Layers whose weights are gathered ahead at stage 3."""
    reduce: Literal["fp32", "model"] = "fp32"
    """Data type in which gradients of weights are summed over ranks in a training step."""
    optimiser: OptimiserPlace = "gpu"
    """Where the optimiser's weights and moments are and are updated: on the GPU, or in pinned memory of its host by the
    CPU (ZeRO-Offload, arXiv:2101.06840)."""
    optimiser_states: Literal["fp32", "model"] = "fp32"
    """Data type of the weights and moments that the optimiser updates: fp32, or the model's for all of them."""
    micro_batches: int = 1
    """Parts of a replica's batch that go forward and backward one after the other in a training step; their gradients
    add up in fp32."""
    sync: Literal["every", "last"] = "every"
    """Whether gradients of every micro-batch are summed over ranks at stages 2 and 3, or whole ones add up on each rank
    and are summed with the last one (no_sync). Below stage 2 they are summed once in any case."""

    def of_scope(self, scope: str) -> dict[str, Any]:
        """Return them by name, those of a training step only where it is one; raises InputError for such a one that is
        set at another scope.
        """
        found = dataclasses.asdict(self)
        if self.offload_from < 0 or (self.offload_from and self.activations == "hbm"):
            raise InputError(
                f"`set` schedule.offload_from={self.offload_from}: expected 0 or more, and above 0 only where `set` "
                f"schedule.activations=save-on-cpu, host or pageable"
            )
        for name in () if scope == "step" else OF_STEPS:
            if found.pop(name) != getattr(LayerOptions, name):
                raise InputError(f"`set` schedule.{name}={getattr(self, name)} is of training steps: set `scope` step")
        for name, default in _LATER.items():
            if found.get(name) == default:
                del found[name]
        if self.prefetch < 0:
            raise InputError(f"`set` schedule.prefetch={self.prefetch}: expected 0 or more")
        if self.optimiser == "host" and self.zero_stage == 0:
            raise InputError(
                "`set` schedule.optimiser=host with schedule.zero_stage=0: the host would hold and update all of the "
                "optimiser's state once for every GPU; set schedule.zero_stage to 1, 2 or 3"
            )
        if self.micro_batches > 1 and (self.zero_stage < 2 or self.sync == "last") and self.reduce == "model":
            raise InputError(
                f"`set` schedule.micro_batches={self.micro_batches} adds gradients up in fp32, and below zero_stage 2 "
                f"or with schedule.sync=last these are what ranks sum: leave out `set` schedule.reduce, or set "
                f"schedule.zero_stage=2 and schedule.sync=every"
            )
        return found


_LATER = {"offloaded": "all", "offload_from": 0, "rotary_table": False, "sums": "needed", "sharding": "sequence",
          "halves": "slices", "modules": "fused"}  # fmt: skip
"""Defaults that no header has, so that schedules without these options keep their hash."""

OF_LAYERS = ("modules",)
"""What attention alone has nothing of."""

OF_STEPS = (
    *("checkpoint", "loss", "mlp", "micro_batches", "zero_stage", "shards", "prefetch", "reduce"),
    *("optimiser", "optimiser_states", "sync", "rotary_table"),
)


@dataclass(frozen=True, kw_only=True)
class SumOptions(LayerOptions):
    """Options of schedules that sum partial gradients."""

    gradients: Literal["fp32", "model"] = "fp32"
    """Data type in which partial gradients of q, k and v are summed and sent: promote(model dtype, fp32), or the
    model's."""


@dataclass(frozen=True, kw_only=True)
class OverlapOptions(LayerOptions):
    """Options of schedules whose ranks send each other messages: hops of rings, or what plans say."""

    overlap: bool = True
    """Whether kernels overlap with messages that they do not need; else the host waits for each. All-to-alls have an
    option of their own: ``TradeOptions.all_to_alls``."""
