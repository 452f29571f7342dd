"""Frameworks of which code is written down, since they cannot be imported without what needs a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch

from calibrate.software.counting import layers, steps, tiles
from calibrate.software.counting.asked import Asked, Software
from calibrate.software.libraries import megatron, nanotron, torchtitan
from calibrate.software.libraries.megatron_scores import scores

PACKAGES = ("torch",)


def _nanotron() -> Software:
    parts = {
        "norm": Asked(
            "TritonRMSNorm, flash-attn's, without a residual", functools.partial(layers.norm, nanotron.NORM, None)
        ),
        "residual": Asked("hidden_states + residual, and both gradients added", layers.residual),
        "rotary": Asked("flash-attn's RotaryEmbedding on queries, and in place on keys", nanotron.rotary),
        "attention": Asked(
            "CausalSelfAttention with flash_attn_varlen_func and fewer heads of keys than of queries, less the rotary",
            nanotron.attention,
        ),
        "attention-alone": Asked("the same of one sequence at once: no copy before o_proj", nanotron.attention_alone),
        "attention-mha": Asked("the same with as many heads of keys", nanotron.attention_mha),
        "attention-mha-alone": Asked("the same of one sequence at once", nanotron.attention_mha_alone),
        "mlp": Asked("MLP: gate and up in one product, split", nanotron.mlp),
        "embedding": Asked("TensorParallelEmbedding of tokens, one rank", nanotron.embedding),
        "loss": Asked(
            "lm_head, cast to fp32 and sharded_cross_entropy; the fp32 logits kept in forward", nanotron.loss, peak=True
        ),
        "accumulate": Asked(
            "FP32GradientAccumulator, each micro-batch and parameter tensor", steps.accumulate, step=True
        ),
        "clip": Asked("clip_grad_norm of each gradient in fp32, of all parameters", steps.nanotron_clip, step=True),
        "copy-back": Asked("FP32GradientAccumulator.step of each owned parameter tensor", steps.copy_back, step=True),
        "zero": Asked("zero_grad of the buffer of all gradients", steps.zero, step=True),
    }
    what = f"nanotron {nanotron.VERSION} with flash-attn {nanotron.FLASH_ATTN} as their code has them, bf16 weights"
    return Software(what, PACKAGES, parts)


def _torchtitan() -> Software:
    norm = functools.partial(layers.norm, torchtitan.NORM)
    parts = {
        "norm": Asked("torch.nn.RMSNorm as CUDA runs it, fused", functools.partial(norm, None)),
        "query_norm": Asked("q_norm of GQAttention, of each head", functools.partial(norm, "heads")),
        "key_norm": Asked("k_norm of GQAttention, of each head", functools.partial(norm, "kv_heads")),
        "residual": Asked("x + attention(…), and both gradients added", layers.residual),
        "rotary": Asked("ComplexRoPE on queries and keys, with positions: Llama", torchtitan.rotary),
        "rotary-of-halves": Asked("CosSinRoPE on queries and keys, with positions: Qwen3", torchtitan.rotary_of_halves),
        "attention": Asked(
            "GQAttention with FusedQKVLinear and a flash kernel, less its norms and rotary", torchtitan.attention
        ),
        "mlp": Asked("FeedForward", torchtitan.mlp),
        "embedding": Asked("Embedding of tokens", torchtitan.embedding),
        "loss": Asked("ChunkedLossWrapper beside its chunks", torchtitan.loss, peak=True),
        "chunk": Asked("each chunk of it with CrossEntropyLoss, both passes in forward", torchtitan.chunk, peak=True),
        "zero": Asked("zero_grad of owned gradients where CUDA graphs keep them", steps.zero_each, step=True),
    }
    return Software(
        f"torchtitan {torchtitan.VERSION} as its code has it, eager, bf16 weights gathered", PACKAGES, parts
    )


def _torchtitan_compiled() -> Software:
    """Return a block as torch.compile has it, as one."""
    what = "Llama3TransformerBlock with a flash kernel; kernels by Inductor's rule of fusion, complex ones by ATen"
    code = f"torchtitan {torchtitan.VERSION} as its code has it, blocks compiled, bf16 weights gathered"
    return Software(code, PACKAGES, {"layer": Asked(what, torchtitan.layer)})


def _megatron() -> Software:
    norm = functools.partial(layers.norm, megatron.NORM)
    parts = {
        "norm": Asked("TENorm, or the norm of TELayerNormColumnParallelLinear", functools.partial(norm, None)),
        "query_norm": Asked("q_layernorm of SelfAttention, of each head", functools.partial(norm, "heads")),
        "key_norm": Asked("k_layernorm of SelfAttention, of each head", functools.partial(norm, "kv_heads")),
        "residual": Asked("bias_dropout_add without bias and dropout, and both gradients added", layers.residual),
        "rotary": Asked("apply_rotary_pos_emb with apply_rope_fusion: TransformerEngine's", megatron.rotary),
        "rotary-unfused": Asked("apply_rotary_pos_emb without, on queries and keys", megatron.rotary_unfused),
        "attention": Asked(
            "SelfAttention with a fused attention kernel, less its norms and rotary", megatron.attention
        ),
        "scores": Asked("DotProductAttention with masked_softmax_fusion and dropout, beside its products", scores),
        "mlp": Asked("MLP with bias_activation_fusion: gate and up in one product", megatron.mlp),
        "mlp-unfused": Asked("MLP without bias_activation_fusion", megatron.mlp_unfused),
        "embedding": Asked("VocabParallelEmbedding of tokens, one rank", megatron.embedding),
        "loss": Asked(
            "output layer and vocab_parallel_cross_entropy; bf16 logits kept in forward", megatron.loss, peak=True
        ),
        "loss-fused": Asked("the same with cross_entropy_loss_fusion, native", megatron.loss_fused, peak=True),
        "accumulate": Asked("each parameter tensor without gradient_accumulation_fusion", steps.accumulate, step=True),
        "scale": Asked("a bucket of gradients before it is reduced, of all parameters", steps.scale, step=True),
        "clip": Asked(
            "clip_grad_by_total_norm_fp32 of owned gradients above the limit", steps.megatron_clip, step=True
        ),
        "adamw": Asked("FusedAdam of owned parameters, states and gradients in fp32", steps.fused_adam, step=True),
        "copy-back": Asked("_copy_main_params_to_model_params of owned parameters", steps.copy_back, step=True),
        "zero": Asked("zero_grad_buffer of all gradients", steps.zero, step=True),
    }
    what = (
        f"megatron-core {megatron.VERSION} and TransformerEngine as their code has them, bf16 weights, one tensor rank"
    )
    return Software(what, PACKAGES, parts)


def _deepspeed() -> Software:
    parts = {
        "bucket": Asked(
            "each micro-batch, of whole gradients in bf16: into the bucket, in the order of ranks, divided",
            functools.partial(steps.deepspeed_bucket, torch.bfloat16),
            step=True,
        ),
        "bucket-fp32": Asked(
            "the same where gradients are summed in fp32",
            functools.partial(steps.deepspeed_bucket, torch.float32),
            step=True,
        ),
        "partition": Asked(
            "the first micro-batch's owned gradients in bf16, to where others add up",
            steps.deepspeed_partition,
            step=True,
        ),
        "accumulate": Asked(
            "each micro-batch but the first, of owned gradients in bf16", steps.deepspeed_accumulate, step=True
        ),
        "norm": Asked("get_grad_norm_direct of each owned gradient in bf16, in fp64", steps.deepspeed_norm, step=True),
        "gradients": Asked("owned gradients flat, in fp32, unscaled and clipped", steps.deepspeed_gradients, step=True),
        "adamw": Asked("FusedAdam of owned parameters, states and gradients in fp32", steps.fused_adam, step=True),
        "copy-back": Asked("fp32 partitions to those in bf16", steps.copy_back, step=True),
    }
    return Software("deepspeed 0.19.8 as its code has it: a step of ZeRO-3 on the GPU, bf16", PACKAGES, parts)


def _torchtune() -> Software:
    what = "of owned gradients in bf16, by ranks over tokens"
    parts = {"scale": Asked(f"scale_grads, {what}", steps.torchtune_scale, step=True)}
    return Software("torchtune 0.6.1 as its code has it: what a step runs before the optimiser", PACKAGES, parts)


def _alst() -> Software:
    parts = {
        "mlp-tile": Asked("each tile of TiledMLP with LlamaMLP's forward, its weights' gradients added", tiles.mlp),
        "loss-tile": Asked(
            "each tile of TiledFusedLogitsLoss with ForCausalLMLoss, both passes in forward", tiles.loss, peak=True
        ),
    }
    return Software(
        "tiles of deepspeed 0.19.8 as arctic_training 0.8.0 calls them, eager, bf16 weights", PACKAGES, parts
    )


def _fsdp2() -> Software:
    scatter = steps.fsdp2_scatter_in
    parts = {
        "gather-in": Asked(
            "owned parameters in fp32, to bf16, before each all-gather", steps.fsdp2_gather_in, step=True
        ),
        "gather-out": Asked("whole parameters in bf16, after each all-gather", steps.fsdp2_gather_out, step=True),
        "scatter-in-fp32": Asked(
            "whole gradients in bf16, to fp32, before each reduce-scatter",
            functools.partial(scatter, torch.float32),
            step=True,
        ),
        "scatter-in-bf16": Asked(
            "whole gradients in bf16, before each reduce-scatter", functools.partial(scatter, torch.bfloat16), step=True
        ),
        "scatter-out-bf16": Asked("owned gradients to fp32, after each in bf16", steps.fsdp2_scatter_out, step=True),
        "accumulate": Asked(
            "owned gradients in fp32, after each but the first of a step", steps.fsdp2_accumulate, step=True
        ),
    }
    return Software("fully_shard of torch: what it copies around its collectives", PACKAGES, parts)


SOFTWARE: Mapping[str, Callable[[], Software]] = {
    "nanotron": _nanotron,
    "torchtitan": _torchtitan,
    "torchtitan-compiled": _torchtitan_compiled,
    "megatron": _megatron,
    "deepspeed-step": _deepspeed,
    "torchtune": _torchtune,
    "alst": _alst,
    "fsdp2-copies": _fsdp2,
}
"""By the name of its table."""
