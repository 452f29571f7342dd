"""Options that several schedules share. They change time or memory, never the result; others are in ``methods``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from sim.base.errors import InputError
from sim.words.stage_layers import written_out

LayoutName = Literal["contiguous", "zigzag", "striped"]
Sharding = Literal["sequence", "document"]
"""Whether a layout is one of the whole sequence, or of each of its documents."""
Place = Literal["hbm", "host", "pageable"]
"""GPU memory, pinned host memory (which copy engines reach), pageable host memory."""
SavingName = Literal["hbm", "host", "save-on-cpu", "pageable"]
LossName = Literal["whole", "chunked", "unfused", "subtracted", "torch"]
IN_FP32: tuple[LossName, ...] = ("unfused", "subtracted")
"""Losses of a copy of the logits in the data type of sums, which becomes their gradient."""
MlpName = Literal["whole", "tiled", "mini"]
ModulesName = Literal["fused", "eager-mlp", "eager"]
ProductsName = Literal["apart", "joined", "joined-views"]
TensorOverlap = Literal["none", "gradients", "shards", "chunks"]
MemoryOrder = Literal["bsh", "sbh"]
TensorBuffers = Literal["new", "inputs", "all"]
OptimiserPlace = Literal["gpu", "host"]
WeightsPlace = Literal["gpu", "host", "host-states"]
ZeroStage = Literal[0, 1, 2, 3]
AttentionName = Literal["flash", "memory-efficient", "standard"]
"""What of attention passes through HBM: no scores (flash), those of a tile at a time (arXiv:2112.05682), or all."""
FusedName = Literal[
    "flash-attention-1", "flash-attention-2", "flash-attention-3", "flash-attention-4", "cudnn", "cutlass"
]
"""Which kernel computes flash attention: cutlass is xformers', which torch calls memory-efficient."""
ChosenAttention = FusedName | Literal["sdpa"]
"""The same as software says it: by name, or what torch's scaled_dot_product_attention picks on the GPU."""
AllocatorName = Literal["caching", "expandable"]
"""What of torch gives tensors their memory on a GPU: its caching allocator, by segments of cudaMalloc, or by expandable
ones (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)."""
HostOptimiserName = Literal["deepspeed", "torch", "torch-fused"]
"""Whose AdamW runs on the host of GPUs: torch makes a pass over memory for each operation, the others one for all."""


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
    only, so that all that backward needs is computed again, as torch's checkpoint stops early (torch 2.13
    utils/checkpoint.py, set_checkpoint_early_stop); whole, the same where all of the layer is computed again, also what
    is behind that, as Megatron-LM (megatron-core 0.16.1 tensor_parallel/random.py, CheckpointFunction) and reentrant
    checkpoints of torch do it; attention, its output, too; or a list of tensors, as x+out+h2."""
    loss: LossName = "whole"
    """Whether a training step holds the logits of all tokens, or of a chunk at a time (chunked), or those of all tokens
    and a copy in the data type of sums, in which their gradient is made (unfused), as Megatron-LM does it
    (megatron-core 0.16.1 tensor_parallel/cross_entropy.py); that, while the largest logit of each token is subtracted
    into one more (subtracted: nanotron 0.4 parallel/tensor_parallel/functional.py, _ShardedCrossEntropy, whose caller
    holds what it is given); or those of all tokens and three tensors of their size in the data type of sums, which
    torch's cross_entropy and its derivative make (torch); of shares of the vocabulary four, by its loss_parallel (torch
    2.13 distributed/tensor/parallel/loss.py)."""
    mlp: MlpName = "whole"
    """Whether a training step computes the MLP of all tokens at once, or in tiles, each computed again in backward:
    tiled as ALST (arXiv:2506.13996), mini as MST (arXiv:2407.15892)."""
    modules: ModulesName = "fused"
    """Whether a norm and what is between the products of an MLP are one kernel each; or the MLP alone is not, and keeps
    its activated gate beside the product (eager-mlp: nanotron 0.4 models/llama.py, GLUActivation); or those that
    Hugging Face's LlamaRMSNorm and LlamaMLP run in turn (eager), of which backward keeps a copy of a norm's input in
    the data type of sums, what its weight multiplies, and the activated gate (transformers 4.57.6
    src/transformers/models/llama/modeling_llama.py)."""
    products: ProductsName = "apart"
    """Whether linear layers of one input (of q, k and v, and of an MLP's gate and up) are a product each, as those of
    Hugging Face and torchtitan; or one for all, forward, backward and of weights' gradients, as Megatron-LM's
    linear_qkv and linear_fc1 and nanotron's qkv_proj and gate_up_proj. Adapted ones are apart in any case, and all are
    where attention projects part by part. joined-views: q is rotated where it lies beside k and v, which so stay for
    the backward pass next to those that attention takes, where each query head has its own key/value head: nanotron's
    qkv_states (0.4 models/llama.py, CausalSelfAttention, where is_gqa is false) and its rotary embedding (flash-attn
    2.6.3 layers/rotary.py, RotaryEmbedding.forward, inplace=True)."""
    tp_overlap: TensorOverlap = "none"
    """What of tensor parallelism is sent beside products. none: nothing but the sum of an input's gradient, beside the
    last of its products for a weight's. gradients: backward of products by columns of weights, the input is gathered
    beside all that make its gradient, and that is summed up and scattered beside all that make those of weights, as
    in Megatron-LM (megatron-core 0.16.1 tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication),
    where products of one input are one. shards: that, and products of gathered tokens begin with the rank's own and go
    on with those before and those behind: forward by columns (nanotron 0.4 parallel/tensor_parallel/functional.py,
    _ColumnLinearAsyncCommunication), and backward by rows, as later versions have it, from memory: 0.4 gathers there
    what other ranks make by their own rows, which is no gradient. chunks: gradients, and in place of what shards have
    products of gathered tokens take those of one member at a time, which copy engines hand on around the group beside
    them; and products by rows forward take those of one member at a time, each of which is sent there beside the next,
    and summed up there (userbuffers of TransformerEngine, common/comm_gemm_overlap/comm_gemm_overlap.cpp,
    split_overlap_ag and split_overlap_rs of CommOverlapP2PBase; torch's distributed/_symmetric_memory,
    _pipelined_all_gather_and_consume and _pipelined_produce_and_all2all: from memory). Inside a node alone, and not of
    the head. What attention projects part by part, MLPs in tiles and a loss in chunks are as with none."""
    tp_sequence: bool = True
    """Whether ranks that have shares of weights have some of their group's tokens each between products of these
    (sequence parallelism, arXiv:2205.05198 §4.2.2); else all have all of them there and compute the same, and what they
    sum up is summed up on all (arXiv:1909.08053 §3)."""
    tp_hands: Literal["all", "parts"] = "all"
    """What each rank with a share of weights hands on to the next stage of a pipeline where all of them have all
    tokens: these, or a part of them, which are gathered over the group there, so that each token crosses between stages
    once (arXiv:2104.04473 §4.1; Megatron-LM's p2p_communication.py before sequence parallelism,
    scatter_gather_tensors_in_pipeline, from memory)."""
    memory_order: MemoryOrder = "bsh"
    """Of several sequences at a time that such ranks have: whether between attention one sequence lies behind the other
    (bsh), so that gathered tokens, and those to be scattered, are copied; or in each token all sequences lie together
    (sbh), as in Megatron-LM and nanotron, so that a part of the tokens is a part of memory. Attention takes one
    sequence behind the other in any case."""
    tp_buffers: TensorBuffers = "new"
    """What products of gathered tokens take these from: a new tensor each time; or a buffer that stays for all of them,
    of what goes into products by columns, forward and backward again (inputs), as Megatron-Core's own linear layers
    have it (megatron-core 0.16.1 tensor_parallel/layers.py, get_global_memory_buffer().get_tensor(..., "mpu")); that,
    and one of the gradients that products by rows take backward (all), as later versions of nanotron have them, from
    memory: parallel/tensor_parallel/functional.py, MemoryBuffer().get("allgather") and "allgather2", where 0.4 takes
    new tensors. What is gathered by a loss in chunks, by MLPs in tiles, for an embedding, for attention that projects
    part by part, or by copy engines, is in new ones in any case."""
    zero_stage: ZeroStage = 3
    """What is sharded in a training step: 0 nothing, 1 the optimiser's state, 2 gradients,
    too, 3 weights, too, as FSDP does."""
    shards: Literal["all", "replica"] = "all"
    """Over which ranks: all of them, or those of each data-parallel replica, over which gradients are summed then
    (HSDP)."""
    prefetch: int = 1
    """Layers whose weights are gathered ahead at stage 3."""
    backward_prefetch: Literal["ahead", "never"] = "ahead"
    """Whether weights are gathered as far ahead in backward passes, too; or each layer's when its turn comes, behind
    the sum of gradients of the one before, as FSDP1's without a backward_prefetch: Hugging Face's Trainer and
    accelerate set none unless they are told (transformers 4.57.6 training_args.py, accelerate 1.15
    utils/dataclasses.py: NO_PREFETCH)."""
    weight_communicators: Literal["one", "two"] = "one"
    """Whether weights are gathered and their gradients summed through one communicator, which takes one collective at a
    time, in the order in which they are issued, or through one each. Torch's FSDP2 has one unless
    set_separate_reduce_scatter_group is called (pytorch PRs 177098, 177015), Megatron-FSDP without
    --create-all-gather-group (Megatron-LM PR 2663) and DeepSpeed likewise; so has FSDP1 (torch 2.13
    distributed/fsdp/_runtime_utils.py, _reduce_grad, and _flat_param.py, _all_gather_flat_param), after two since
    pytorch PR 70235."""
    reduce: Literal["fp32", "model"] = "fp32"
    """Data type in which gradients of weights are summed over ranks in a training step."""
    reduce_to: Literal["owner", "all"] = "owner"
    """Which ranks get the sum of a gradient at stage 1: the one that updates with it, by a reduce-scatter, or all, by
    an all-reduce, of which each takes what it owns and finds the norm by itself, as nanotron does it (0.4 trainer.py,
    training_step: reduce_scatter=False)."""
    reduce_by: Literal["reduce-scatter", "all-reduce"] = "reduce-scatter"
    """By what owners get their part of a sum at stages 1 and 2: a reduce-scatter; or an all-reduce, of which each
    copies what it owns, as DeepSpeed's use_multi_rank_bucket_allreduce has it (0.19.8 runtime/zero/config.py, where it
    is on, and stage_1_and_2.py, allreduce_and_scatter). At stage 3 it is a reduce-scatter in any case."""
    sum_waits: Literal["never", "below-3", "always"] = "never"
    """Whether kernels of a backward pass wait for each sum of gradients over ranks that is made in it: never; below-3,
    at stages 0 to 2, as without DeepSpeed's overlap_comm, which is on by default at stage 3 alone (0.19.8
    runtime/zero/config.py, overlap_comm_valid); always. Where they do not and owners copy their part of an all-reduce,
    they do so behind the kernels of the next unit, and gradients are packed in two buffers in turn (stage_1_and_2.py,
    average_tensor and setup_buckets)."""
    divides: Literal["in-sums", "before"] = "in-sums"
    """Where gradients become means over ranks: in the collective that sums them, as of FSDP2 in bf16 and fp32 (torch
    2.13 distributed/fsdp/_fully_shard/_fsdp_collectives.py, _get_gradient_divide_factors), or in the copy to a bucket,
    as of torch's DDP; or before, in a pass over all of a gradient where it lies, as Megatron-Core's without
    average_in_collective (megatron-core 0.16.1 distributed/param_and_grad_buffer.py, start_grad_sync) and FSDP1's
    (torch 2.13 distributed/fsdp/_runtime_utils.py, _reduce_grad, which divides what a rank owns once more)."""
    bucket_mb: int = 0
    """At how many MiB of gradients, in the model's data type, an all-reduce of them ends, with the weight that reaches
    so many, as DDP's bucket_cap_mb: from the last weight of a unit to its first, so that a unit's last bucket may be
    smaller. 0: one all-reduce for each unit. With accumulate=in-place the last gradients go through buckets of their
    own, which stay to the step's end."""
    gather: Literal["units", "all"] = "units"
    """When new weights are gathered at stages 1 and 2: a unit's as soon as it is updated, to where they belong;
    or those of all units behind the last update, through a tensor for each rank, as nanotron's all_gather_coalesced
    (0.4 optim/zero.py, distributed.py) has them, which holds all weights twice more meanwhile, and
    takes each rank's part of each tensor apart by a call of the host."""
    optimiser: OptimiserPlace = "gpu"
    """Where the optimiser's weights and moments are and are updated: on the GPU, or in pinned memory of its host by the
    CPU (ZeRO-Offload, arXiv:2101.06840)."""
    weights: WeightsPlace = "gpu"
    """Where shards of weights are at stage 3, beside an optimiser on the host: on the GPU; or in pinned memory of its
    host, and copied to the GPU before they are gathered for a pass: those that passes use, in the model's data type, as
    DeepSpeed's offload_param has them (host; ZeRO-Infinity, arXiv:2104.07857 §5.1.1), or the optimiser's own, which are
    cast behind the copy, as FSDP2's CPUOffloadPolicy has them (host-states; torch/distributed/fsdp/_fully_shard/
    _fsdp_param.py, all_gather_inputs). Frozen weights go there with any optimiser."""
    optimiser_states: Literal["fp32", "model"] = "fp32"
    """Data type of the weights and moments that the optimiser updates: fp32, or the model's for all of them."""
    micro_batches: int = 1
    """Parts of a replica's batch that go forward and backward one after the other in a training step; their gradients
    add up in fp32."""
    pipeline_schedule: str = "1f1b"
    """In which order stages of a pipeline take micro-batches forward and backward: 1f1b, gpipe, interleaved, zb-h1,
    zb-v, dualpipe or another one of ``model.pipeline.timetables``, or FILE.csv as torch's pipelining writes it."""
    pipeline_chunks: int = 1
    """Chunks of layers that each stage has, a round of all stages apart, where the schedule does not say how many."""
    pipeline_layers: str = ""
    """How many layers each chunk has, in the order of the model, as 15,16,16,15, or 0,1*126,0 for 126 of one between
    two without; or as many each. The first one has the embedding, too, and the last one the head and the loss."""
    host_waits: Literal["never", "micro-batch", "messages"] = "never"
    """Whether the host waits before each further micro-batch for all that it has issued, as where inputs are brought by
    a blocking copy (nanotron 0.4 dataloader.py, sanity_check_dataloader) or a loss is looked at (transformers 4.57.6
    trainer.py, logging_nan_inf_filter), or runs ahead of the GPU all through a step. With messages it also waits for
    each one between stages, as where a header says what comes (nanotron 0.4 parallel/pipeline_parallel/p2p.py)."""
    sync: Literal["every", "last"] = "every"
    """Whether gradients of every micro-batch are summed over ranks at stages 2 and 3, or whole ones add up on each rank
    and are summed with the last one (no_sync), each unit's beside the backward pass of the next. Below stage 2 they are
    summed once in any case: with every, behind the last backward pass where there are several or the stage is 1."""
    accumulate: Literal["copies", "in-place", "in-products"] = "copies"
    """How whole gradients add up in fp32: an fp32 copy of each micro-batch's is added to those before (copies), or each
    as it is to one fp32 buffer of all weights, which is there from step to step and begins each as zeros (in-place), as
    nanotron's FP32GradientAccumulator (0.4 optim/gradient_accumulator.py); or those of matrices are added there by the
    products that make them (in-products), as Megatron-LM's main_grad (megatron-core 0.16.1 tensor_parallel/layers.py,
    gradient_accumulation_fusion): no kernel of its own adds them, but that of an embedding."""

    accumulate_in: Literal["fp32", "model"] = "fp32"
    """Data type in which copies add up: fp32, or that of the model where ranks sum in it, too (reduce=model). So are
    gradients of FSDP's whole weights, where it casts to that type what it sums (torch 2.13 distributed/fsdp/
    _fully_shard/_fsdp_param.py, to_accumulated_grad_if_needed), and DeepSpeed's, where no grad_accum_dtype is set
    (0.19.8 runtime/engine.py, get_data_types). Whole ones are then added as they are, without a copy."""

    @property
    def adds_narrow(self) -> bool:
        """Whether gradients of micro-batches add up in the model's data type."""
        return self.accumulate_in == "model" and self.reduce == "model"

    def __post_init__(self) -> None:
        """Write out products in a text of layers, so that a schedule has one way to say it, and one hash."""
        object.__setattr__(self, "pipeline_layers", written_out(self.pipeline_layers))

    @property
    def cuts_sums(self) -> bool:
        """Whether a rank gets the sums of all gradients, and copies what it owns of them."""
        return self.reduce_by == "all-reduce" and self.zero_stage in {1, 2} and self.reduce_to == "owner"

    @property
    def waits_for_sums(self) -> bool:
        """Whether kernels of a backward pass wait for sums of gradients over ranks that are made in it."""
        return self.sum_waits == "always" or (self.sum_waits == "below-3" and self.zero_stage < 3)

    @property
    def begins_with_own(self) -> bool:
        """Whether products of gathered tokens begin with a rank's own, wherever these lie among all."""
        return self.tp_sequence and self.tp_overlap in {"shards", "chunks"}

    @property
    def moves_chunks(self) -> bool:
        """Whether copy engines move the tokens of one member at a time beside products of others."""
        return self.tp_sequence and self.tp_overlap == "chunks"

    @property
    def sums_late(self) -> bool:
        """Whether gradients are summed over ranks when all units have theirs."""
        return self.sync == "every" and (self.zero_stage == 1 or (self.zero_stage == 0 and self.micro_batches > 1))

    @property
    def adds_whole(self) -> bool:
        """Whether whole gradients of micro-batches add up before they are summed over ranks, unit by unit."""
        return self.sync == "last" and (self.micro_batches > 1 or self.accumulate != "copies")

    @property
    def sums_whole(self) -> bool:
        """Whether gradients are summed over ranks once a step, those over tensor-parallel groups, too."""
        return self.sums_late or self.adds_whole

    def of_scope(self, scope: str, tp: int = 1) -> dict[str, Any]:
        """Return them by name, those of a training step only where it is one, and those of tensor parallelism only
        where so many ranks have shares of weights; raises InputError for one of a step that is set at another scope.
        """
        found = dataclasses.asdict(self if tp > 1 else dataclasses.replace(self, **OF_GROUPS))
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
        if self.weights != "gpu" and self.zero_stage < 3:
            raise InputError(
                f"`set` schedule.weights={self.weights} with schedule.zero_stage={self.zero_stage}: below stage 3 "
                f"every GPU has all weights and gathers none for a pass; set schedule.zero_stage=3"
            )
        whole = self.zero_stage < 2 or self.sync == "last"
        if self.micro_batches > 1 and whole and self.reduce == "model" and not self.adds_narrow:
            raise InputError(
                f"`set` schedule.micro_batches={self.micro_batches} adds gradients up in fp32, and below zero_stage 2 "
                f"or with schedule.sync=last these are what ranks sum: leave out `set` schedule.reduce, or set "
                f"schedule.accumulate_in=model, or schedule.zero_stage=2 and schedule.sync=every"
            )
        if self.reduce_to == "all" and self.zero_stage != 1:
            raise InputError(
                f"`set` schedule.reduce_to=all is of stage 1, and schedule.zero_stage={self.zero_stage} is set: at "
                f"stage 0 all ranks get all sums, from 2 on owners alone"
            )
        if self.bucket_mb < 0 or (self.bucket_mb and self.zero_stage and self.reduce_to == "owner"):
            raise InputError(
                f"`set` schedule.bucket_mb={self.bucket_mb}: expected 0 or more, and above 0 only with "
                f"schedule.zero_stage=0, or zero_stage=1 and reduce_to=all, where all-reduces sum gradients"
            )
        if self.gather == "all" and self.zero_stage not in {1, 2}:
            raise InputError(
                f"`set` schedule.gather=all is of stages 1 and 2, and zero_stage={self.zero_stage} is set: "
                f"at stage 0 no weights are gathered, at 3 each unit's for each pass"
            )
        if self.accumulate != "copies" and ((self.zero_stage >= 2 and self.sync == "every") or self.reduce == "model"):
            raise InputError(
                f"`set` schedule.accumulate={self.accumulate} adds whole gradients up in fp32: set schedule.zero_stage "
                f"to 0 or 1, or schedule.sync=last, and leave out `set` schedule.reduce; zero_stage={self.zero_stage}, "
                f"sync={self.sync}, reduce={self.reduce} are set"
            )
        return found


OF_GROUPS: dict[str, Any] = {
    "tp_overlap": "none", "tp_sequence": True, "tp_hands": "all", "memory_order": "bsh", "tp_buffers": "new",
}  # fmt: skip
"""Defaults of what is of tensor parallelism: where ranks have whole weights other values change nothing."""

OF_STAGES: dict[str, Any] = {"pipeline_schedule": "1f1b", "pipeline_chunks": 1, "pipeline_layers": ""}
"""The same of pipelines, where there is one stage."""

_LATER = {"offloaded": "all", "offload_from": 0, "rotary_table": False, "sums": "needed", "rotation": "hops",
          "sharding": "sequence", "halves": "slices", "accumulate": "copies", "accumulate_in": "fp32",
          "reduce_to": "owner", "reduce_by": "reduce-scatter", "sum_waits": "never", "divides": "in-sums",
          "bucket_mb": 0, "backward_prefetch": "ahead", "gather": "units", "weights": "gpu", "host_waits": "never",
          "modules": "fused", "products": "apart", **OF_STAGES, **OF_GROUPS}  # fmt: skip
"""Defaults that no header has, so that schedules without these options keep their hash."""

OF_LAYERS = ("modules", "products", *OF_GROUPS)
"""What attention alone has nothing of."""

OF_STEPS = (
    *("checkpoint", "loss", "mlp", "micro_batches", "zero_stage", "shards", "prefetch", "backward_prefetch", "reduce"),
    *("weight_communicators", "optimiser", "optimiser_states", "sync", "rotary_table"),
    *("accumulate", "accumulate_in", "reduce_to", "reduce_by", "sum_waits", "divides", "bucket_mb", "gather"),
    *("host_waits", "weights", *OF_STAGES),
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
