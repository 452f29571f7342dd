"""Whether this machine, or what torchrun has started, is what a cluster describes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sim.base.errors import InputError
from sim.words.workload import Dtype
from topology.detect.machine import is_named
from topology.specs import ClusterSpec

if TYPE_CHECKING:
    from runtime.processes.worker import World


NEEDS_TORCH = "executing on real hardware needs torch: pip install 'longstep[runtime]'"


def require_torch() -> None:
    """Raise InputError where torch is not installed, without which nothing is executed."""
    try:
        import torch  # noqa: F401 - not whether it is there, but whether it loads
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise InputError(NEEDS_TORCH) from error


def require_processes(spec: ClusterSpec, ranks: int, world: World) -> None:
    """Raise InputError if torchrun has started fewer processes than ranks, or has split them into other nodes than a
    cluster of GPUs has.
    """
    if ranks > world.size:
        raise InputError(
            f"{ranks} ranks need as many processes, torchrun has started {world.size}: set its --nproc-per-node and "
            f"--nnodes, or `gpus` {world.size}"
        )
    if spec.gpu.kind == "cuda" and min(ranks, spec.gpus_per_node) != min(ranks, world.local_size):
        raise InputError(
            f"cluster {spec.name!r} has {spec.gpus_per_node} GPUs a node, torchrun has started {world.local_size} "
            f"processes on each: set its --nproc-per-node {spec.gpus_per_node}, or "
            f"`set` cluster.gpus_per_node={world.local_size}"
        )


def require_machine(spec: ClusterSpec, gpus: int, dtypes: Sequence[Dtype] = (), attention: str = "") -> None:
    """Raise InputError if this machine is not what a cluster describes, has too few GPUs of it, or no attention (of a
    name) for a data type.
    """
    import torch

    if spec.gpu.kind == "cpu":
        if gpus > spec.gpus_per_node:
            raise InputError(
                f"`gpus` {gpus}: cluster {spec.name!r} takes at most {spec.gpus_per_node} processes; set fewer, or "
                f"`set` cluster.gpus_per_node"
            )
        if attention:
            raise InputError(
                f"`attention` {attention}: a CPU has one kernel; leave it out, or set `cluster` to a GPU's"
            )
        return
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    if not found or not all(is_of(spec, device) for device in found[:gpus]):
        has = ", ".join(sorted({f"{device.name} ({device.total_memory / 1e9:.0f} GB)" for device in found})) or "no GPU"
        raise InputError(
            f"cluster {spec.name!r} is not this machine, which has {has}: executing takes `cluster` host, or a cluster "
            f"of this machine's GPUs"
        )
    if len(found) < gpus:
        raise InputError(
            f"{gpus} ranks need as many GPUs, this machine has {len(found)}: set `gpus`, or `one_device` to play all "
            f"ranks on one"
        )
    from runtime.execution.ops.attention_choice import cuda_kernel
    from runtime.execution.tensors import TORCH_DTYPE

    for dtype in dtypes:
        cuda_kernel(TORCH_DTYPE[dtype], attention)


def gpus_here(spec: ClusterSpec) -> int:
    """Return how many GPUs of the kind that a cluster has this machine has, counted from the first."""
    import torch

    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return next((number for number, device in enumerate(found) if not is_of(spec, device)), len(found))


def is_of(spec: ClusterSpec, device: Any) -> bool:
    """Return whether a GPU, by the properties that torch sees, is of the kind that a cluster has."""
    return is_named(spec, device.name, device.total_memory) and device.multi_processor_count == spec.gpu.sms
