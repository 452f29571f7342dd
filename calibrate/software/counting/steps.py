"""What frameworks run around the optimiser: gradients accumulated, cast and clipped, and parameters copied.

Each part is of one tensor of parameters, or of all of them where the framework has them in one.
"""

from __future__ import annotations

import torch

from calibrate.software.counting.count import Ready, Run, run
from calibrate.software.counting.log import launch
from calibrate.software.counting.sizes import Sizes


def accumulate(sizes: Sizes) -> Run:
    """Return what a micro-batch adds: a gradient in bf16 to one in fp32."""

    def build(sizes: Sizes) -> Ready:
        total, gradient = _wide(sizes), _half(sizes)
        return Ready(lambda: (total.add_(gradient),))

    return run(build, sizes)


def copy_back(sizes: Sizes) -> Run:
    """Return a copy of masters in fp32 to parameters in bf16."""

    def build(sizes: Sizes) -> Ready:
        half, master = _half(sizes), _wide(sizes)
        return Ready(lambda: (half.copy_(master),))

    return run(build, sizes)


def zero(sizes: Sizes) -> Run:
    """Return what sets gradients in fp32 to zero."""

    def build(sizes: Sizes) -> Ready:
        gradient = _wide(sizes)
        return Ready(lambda: (gradient.zero_(),))

    return run(build, sizes)


def zero_each(sizes: Sizes) -> Run:
    """Return what zero_grad of torch's optimisers runs where gradients stay, as CUDA graphs need them to."""

    def build(sizes: Sizes) -> Ready:
        gradients = _halves(sizes, torch.float32)

        def step() -> tuple[()]:
            torch._foreach_zero_(gradients)
            return ()

        return Ready(step)

    return run(build, sizes)


def scale(sizes: Sizes) -> Run:
    """Return what multiplies gradients in fp32 in place."""

    def build(sizes: Sizes) -> Ready:
        gradient = _wide(sizes)
        return Ready(lambda: (gradient.mul_(0.5),))

    return run(build, sizes)


def torchtune_scale(sizes: Sizes) -> Run:
    """Return what scale_grads of torchtune 0.6.1 (training/_grad_scaler.py) runs on a gradient in bf16."""

    def build(sizes: Sizes) -> Ready:
        gradient, scaler = _half(sizes), torch.empty(())
        return Ready(lambda: (gradient.mul_(scaler),))

    return run(build, sizes)


def nanotron_clip(sizes: Sizes) -> Run:
    """Return what optim/clip_grads.py of nanotron 0.4 runs on each gradient in fp32: it scales them in any case."""

    def build(sizes: Sizes) -> Ready:
        gradient = _wide(sizes)

        def step() -> tuple[torch.Tensor]:
            each = torch.linalg.vector_norm(gradient, ord=2.0, dtype=torch.float)
            total = torch.linalg.vector_norm(torch.stack([each]), ord=2.0, dtype=torch.float).pow(2.0)
            total.pow_(0.5)
            return (gradient.mul_(torch.clamp(1.0 / (total + 1.0e-6), max=1.0)),)

        return Ready(step)

    return run(build, sizes)


def fused_adam(sizes: Sizes) -> Run:
    """Return what FusedAdam of apex, TransformerEngine or DeepSpeed runs: one kernel of many tensors in fp32."""

    def build(sizes: Sizes) -> Ready:
        master, gradient, mean, square = (_wide(sizes) for _ in range(4))

        def step() -> tuple[()]:
            launch("multi_tensor_adam", (master, gradient, mean, square), (master, mean, square))
            return ()

        return Ready(step)

    return run(build, sizes)


def megatron_clip(sizes: Sizes) -> Run:
    """Return what optimizer/clip_grads.py of Megatron-Core runs where the norm is above the limit; else no scale."""

    def build(sizes: Sizes) -> Ready:
        gradient, norm, sums = _wide(sizes), torch.empty(1), torch.empty(sizes["multiprocessors"])

        def step() -> tuple[()]:
            launch("multi_tensor_l2norm", (gradient,), (sums,))
            launch("multi_tensor_l2norm, cleanup", (sums,), (norm,))
            launch("multi_tensor_scale", (gradient,), (gradient,))
            return ()

        return Ready(step)

    return run(build, sizes)


def deepspeed_norm(sizes: Sizes) -> Run:
    """Return what get_grad_norm_direct of runtime/zero/stage3.py runs on each owned gradient: its norm in fp64."""

    def build(sizes: Sizes) -> Ready:
        gradient = _half(sizes)

        def step() -> tuple[torch.Tensor]:
            total = torch.sum(torch.pow(torch.stack([gradient.to(torch.double).norm(2.0)]), 2.0)) ** 0.5
            invalid = total.isnan().logical_or(total.isinf())
            return (torch.where(invalid, torch.tensor(-1.0, dtype=torch.float, device=total.device), total),)

        return Ready(step)

    return run(build, sizes)


def deepspeed_gradients(sizes: Sizes) -> Run:
    """Return what a sub-group runs before the optimiser: owned gradients flat, cast to fp32, unscaled and clipped.

    ``_prepare_fp32_grad_for_sub_group`` and ``unscale_and_clip_grads`` of runtime/zero/stage3.py.
    """

    def build(sizes: Sizes) -> Ready:
        gradients = [torch.empty(sizes["parameters"] // 2, dtype=torch.bfloat16) for _ in range(2)]
        norm = torch.empty((), dtype=torch.float64)

        def step() -> tuple[torch.Tensor]:
            flat = torch.cat(gradients).to(torch.float32)
            clip = torch.clamp(((norm / 1.0) + 1e-6) / 1.0, min=1.0)
            return (flat.mul_(1.0 / (clip * 1.0)),)

        return Ready(step)

    return run(build, sizes)


def deepspeed_bucket(kept: torch.dtype, sizes: Sizes) -> Run:
    """Return what gradients of whole parameters go through before they are scattered, each micro-batch.

    Into the bucket, in the order of ranks, divided by them: ``__add_grad_to_ipg_bucket`` of runtime/zero/stage3.py and
    ``reduce_scatter_coalesced`` of runtime/comm/coalesced_collectives.py. Stages 1 and 2 move as many bytes in another
    order (``reduce_independent_p_g_buckets_and_remove_grads``, ``average_tensor`` and ``allreduce_bucket`` of
    stage_1_and_2.py), and stage 0 once a step (``allreduce_bucket`` and ``allreduce_and_copy`` of runtime/engine.py).
    """

    def build(sizes: Sizes) -> Ready:
        gradient, bucket = _half(sizes), torch.empty(sizes["parameters"], dtype=kept)

        def step() -> tuple[torch.Tensor]:
            bucket.copy_(gradient)
            first, second = torch.chunk(bucket, 2)
            return (torch.cat([first, second]).div_(2),)

        return Ready(step)

    return run(build, sizes)


def deepspeed_partition(sizes: Sizes) -> Run:
    """Return what brings a step's first owned gradients to where others add up: partition_grads of
    runtime/zero/stage3.py, copy_grads_in_partition of stage_1_and_2.py.
    """

    def build(sizes: Sizes) -> Ready:
        total, gradient = _half(sizes), _half(sizes)
        return Ready(lambda: (total.copy_(gradient),))

    return run(build, sizes)


def deepspeed_accumulate(sizes: Sizes) -> Run:
    """Return what a micro-batch but the first adds to owned gradients: partition_grads of runtime/zero/stage3.py."""

    def build(sizes: Sizes) -> Ready:
        total, gradient = _half(sizes), _half(sizes)
        return Ready(lambda: (total.add_(gradient),))

    return run(build, sizes)


def fsdp2_gather_in(sizes: Sizes) -> Run:
    """Return what comes before an all-gather: owned parameters cast to bf16, and copied to the buffer.

    ``_get_param_all_gather_inputs`` and ``all_gather_copy_in`` of FSDP2's _fsdp_collectives.py.
    """

    def build(sizes: Sizes) -> Ready:
        shards, parts = _halves(sizes, torch.float32), _halves(sizes, torch.bfloat16)

        def step() -> tuple[()]:
            flat = torch.empty(sizes["parameters"], dtype=torch.bfloat16)
            cast = list(torch.split(flat, sizes["parameters"] // 2))
            torch._foreach_copy_(cast, shards)
            torch._foreach_copy_(parts, cast)
            return ()

        return Ready(step)

    return run(build, sizes)


def fsdp2_gather_out(sizes: Sizes) -> Run:
    """Return the copy-out of an all-gather: the buffer of all ranks to whole parameters."""

    def build(sizes: Sizes) -> Ready:
        gathered = torch.empty(2, sizes["parameters"] // 2, dtype=torch.bfloat16)
        whole = [torch.empty(2, sizes["parameters"] // 4, dtype=torch.bfloat16) for _ in range(2)]

        def step() -> tuple[()]:
            torch.split_with_sizes_copy(gathered, 2 * [sizes["parameters"] // 4], dim=1, out=whole)
            return ()

        return Ready(step)

    return run(build, sizes)


def fsdp2_scatter_in(reduced: torch.dtype, sizes: Sizes) -> Run:
    """Return the copy-in of a reduce-scatter: whole gradients in bf16 to the buffer, in the type of the reduction."""

    def build(sizes: Sizes) -> Ready:
        gradients = [one.view(2, -1) for one in _halves(sizes, torch.bfloat16)]
        buffer = torch.empty(2, sizes["parameters"] // 2, dtype=reduced)

        def step() -> tuple[()]:
            torch._chunk_cat(gradients, dim=0, num_chunks=2, out=buffer)  # noqa: SLF001 - what chunk_cat calls
            return ()

        return Ready(step)

    return run(build, sizes)


def fsdp2_scatter_out(sizes: Sizes) -> Run:
    """Return what comes after a reduce-scatter in bf16: owned gradients cast to fp32."""

    def build(sizes: Sizes) -> Ready:
        reduced = _half(sizes)
        return Ready(lambda: (reduced.to(torch.float32),))

    return run(build, sizes)


def fsdp2_accumulate(sizes: Sizes) -> Run:
    """Return what adds reduced gradients to those of the micro-batches before, a parameter tensor at a time."""

    def build(sizes: Sizes) -> Ready:
        total, reduced = _wide(sizes), _wide(sizes)
        return Ready(lambda: (total.add_(reduced),))

    return run(build, sizes)


def _wide(sizes: Sizes) -> torch.Tensor:
    return torch.empty(sizes["parameters"], dtype=torch.float32)


def _half(sizes: Sizes) -> torch.Tensor:
    return torch.empty(sizes["parameters"], dtype=torch.bfloat16)


def _halves(sizes: Sizes, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.empty(sizes["parameters"] // 2, dtype=dtype) for _ in range(2)]
