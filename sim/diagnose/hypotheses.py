"""What may be wrong with a run, each as a change of its configuration that is then simulated (``sim.diagnose.doctor``).

To add one, add a line to a table: programs other than the one that was meant, or a machine with a figure off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec

from sim.diagnose.options import options_of, with_option
from sim.diagnose.stages import chunks_of, even, of_one_chunk, uneven, unfilled
from sim.engine.results.figures import FIGURES, LAUNCHES, scaled, with_attention, with_calls
from sim.setup import names
from sim.setup.configuration import Configuration
from sim.setup.setup import Setup
from sim.setup.unnamed_software import SLOWEST
from sim.software.attention import kernels_of
from sim.software.software import load_software
from sim.words.mesh import Axis
from sim.words.options import FusedName
from topology.specs import ClusterSpec, PerGpu

Sign = Literal["faster", "slower", "more memory", "less memory", "uneven ranks"]
"""How a measured run is beside the one that was meant."""


class Program(NamedTuple):
    """Another program than the one that was meant."""

    name: str
    says: str
    check: str
    """How a user sees whether it is so."""
    signs: tuple[Sign, ...]
    """What it is simulated for at first; for others where nothing else explains a run."""
    change: Callable[[Setup, Configuration], Setup | None]
    """None where it is what was meant, or there is no such thing."""


class Machine(NamedTuple):
    """The program that was meant, on a machine with one figure worse by a factor, which is found from the time; or by
    other GPUs of it.
    """

    name: str
    says: str
    """With {factor}, above 1."""
    check: str
    most: float
    """Largest factor that is tried: what is slower has another cause."""
    change: Callable[[Configuration, float, int], Configuration | None]
    """By the configuration, the factor and the slowest rank; None where there is no such figure."""


def _of(name: str, value: str) -> Callable[[Setup, Configuration], Setup | None]:
    return lambda setup, found: with_option(setup, found, name, value)


def _from(name: str, was: str, value: str) -> Callable[[Setup, Configuration], Setup | None]:
    """Return the change of an option only where it was another certain one."""

    def changed(setup: Setup, found: Configuration) -> Setup | None:
        options = options_of(found)
        return with_option(setup, found, name, value) if str(options.get(name)) == was else None

    return changed


def _ranks(found: Configuration) -> int:
    """Return the ranks that share a sequence."""
    return found.mesh.sharing


def _fixed(found: Configuration) -> bool:
    """Return whether documents or a block mask say how long a sequence is."""
    return found.workload.documents is not msgspec.UNSET or found.workload.block_mask is not msgspec.UNSET


def _without_cp(setup: Setup, found: Configuration, seq: int) -> Setup | None:
    """Return each rank training sequences of its own, of so many tokens."""
    ranks = _ranks(found)
    if ranks == 1 or _fixed(found) or found.one_device or seq < 2:
        return None
    has = msgspec.to_builtins(names.entry("single").options)
    kept = [
        f"{key}={value}"
        for key, value in names.pairs(setup.set)
        if not key.startswith("schedule.") or key.removeprefix("schedule.") in has
    ]
    return dataclasses.replace(
        setup, schedule="single", set=kept, seq=seq, pad=False, dp_degree=found.mesh.dp * ranks, ring_degree=None,
        ulysses_degree=None, cp=None, gpus=None,
    )  # fmt: skip


def _shards(setup: Setup, found: Configuration) -> Setup | None:
    return _without_cp(setup, found, found.workload.seq // _ranks(found))


def _whole_sequences(setup: Setup, found: Configuration) -> Setup | None:
    return _without_cp(setup, found, found.workload.seq)


def _length(setup: Setup, found: Configuration, numerator: int, denominator: int) -> Setup | None:
    if _fixed(found) or numerator == denominator:
        return None
    return setup.replace(seq=found.workload.seq * numerator // denominator)


def _mask(setup: Setup, found: Configuration, mask: str) -> Setup | None:
    if found.workload.mask == mask and not found.workload.pattern:
        return None
    return setup.replace(mask=mask, window=found.workload.window)


def _window(setup: Setup, found: Configuration, part: int) -> Setup | None:
    tokens = found.workload.seq // part
    has = found.workload.window
    if (has is not None and has <= tokens) or found.workload.pattern or not tokens:
        return None
    return setup.replace(mask=found.workload.mask, window=tokens)


def _documents(setup: Setup, found: Configuration, count: int) -> Setup | None:
    if _fixed(found) or found.workload.seq % count or found.workload.seq < 2 * count:
        return None
    return setup.replace(documents=(found.workload.seq // count,) * count)


def _batch_of_one(setup: Setup, found: Configuration) -> Setup | None:
    return setup.replace(batch=1) if found.workload.batch > 1 else None


def _one_sequence(setup: Setup, found: Configuration) -> Setup | None:
    return setup.replace(documents=None) if found.workload.documents is not msgspec.UNSET else None


def _less_sharded(setup: Setup, found: Configuration, stage: int) -> Setup | None:
    return (
        with_option(setup, found, "zero_stage", str(stage)) if getattr(found.options, "zero_stage", 0) > stage else None
    )


def _attention(setup: Setup, found: Configuration, kernel: FusedName) -> Setup | None:
    """Return attention by another kernel, where there are figures of it."""
    if found.profile is None or found.profile.attention is None or found.profile.attention.kernel == kernel:
        return None
    if kernel not in kernels_of(found.spec.gpu.chip) or getattr(found.options, "kernel", "flash") != "flash":
        return None
    return setup.replace(set={"software.attention": kernel})


_NEWER: dict[FusedName, str] = {"cudnn": "cuDNN's", "flash-attention-3": "FlashAttention-3"}


def _newer(kernel: FusedName) -> Callable[[Setup, Configuration], Setup | None]:
    """Return attention by a kernel that came after FlashAttention-2, where that is what runs."""

    def changed(setup: Setup, found: Configuration) -> Setup | None:
        runs = found.profile and found.profile.attention and found.profile.attention.kernel
        return _attention(setup, found, kernel) if runs == "flash-attention-2" else None

    return changed


def _eager(setup: Setup, found: Configuration) -> Setup | None:
    """Return what is between products by torch's own ops, where nothing else is said to run."""
    if found.profile is None or found.profile.runs or found.spec.gpu.kind != "cuda":
        return None
    rotary = load_software(SLOWEST).kernels.rotary
    changed = with_option(setup, found, "modules", "eager")
    return changed and changed.replace(set={"software.rotary": rotary})


def _torch_on_host(setup: Setup, found: Configuration) -> Setup | None:
    """Return the optimiser of the host as torch's, where there is one, and a profile that can name another."""
    if options_of(found).get("optimiser") != "host" or found.spec.gpu.kind == "cpu":
        return None
    if found.profile is None or found.profile.host_optimiser == "torch":
        return None
    return setup.replace(set={"software.host_optimiser": "torch"})


def _parted(
    change: Callable[[Setup, Configuration, int], Setup | None], number: int
) -> Callable[[Setup, Configuration], Setup | None]:
    return lambda setup, found: change(setup, found, number)


_PRINT_SHAPES = "print the shape of q, k and v inside attention on every rank"
_PRINT_MASK = "print what attention is called with: causal, window_size, cu_seqlens"

PROGRAMS: tuple[Program, ...] = (
    Program(
        "cp-off", "context parallelism is off: each rank attends its own S/P tokens as a sequence by itself",
        "print which keys a query of the last rank sees; the loss is that of a context of S/P", ("faster",), _shards,
    ),
    Program(
        "cp-off-replicated", "context parallelism is off: each rank trains whole sequences of S tokens",
        f"{_PRINT_SHAPES}: they have S tokens, not S/P", ("slower", "more memory"), _whole_sequences,
    ),
    Program(
        "short-length", "the length was that of all ranks: the sequence has S/P tokens in all",
        _PRINT_SHAPES, ("faster", "less memory"), lambda s, f: _length(s, f, 1, _ranks(f)),
    ),
    Program(
        "long-length", "the length was that of one rank: the sequence has S x P tokens in all",
        _PRINT_SHAPES, ("slower", "more memory"), lambda s, f: _length(s, f, _ranks(f), 1),
    ),
    Program(
        "batch-of-job", "the batch was that of the job, not of each context-parallel group: it is 1",
        _PRINT_SHAPES, ("faster", "less memory"), _batch_of_one,
    ),
    Program(
        "causal-mask", "the mask is causal, not full", _PRINT_MASK, ("faster",), lambda s, f: _mask(s, f, "causal"),
    ),
    Program(
        "full-mask", "the mask is full: what a causal one hides is computed, too", _PRINT_MASK, ("slower",),
        lambda s, f: _mask(s, f, "full"),
    ),
    *(
        Program(f"window-{part}", f"a sliding window of S/{part} tokens is on", _PRINT_MASK, ("faster",),
                _parted(_window, part))
        for part in (4, 16, 64)
    ),
    *(
        Program(f"documents-{count}", f"attention is within documents, as with {count} of S/{count} tokens",
                _PRINT_MASK, ("faster",), _parted(_documents, count))
        for count in (4, 16, 64)
    ),
    Program(
        "documents-merged", "documents are not kept apart: tokens see those of other documents", _PRINT_MASK,
        ("slower",), _one_sequence,
    ),
    Program(
        "contiguous", "each rank has contiguous tokens: under a causal mask the last one has most work",
        "print the position ids of rank 0: balanced layouts have early and late ones", ("slower", "uneven ranks"),
        _of("layout", "contiguous"),
    ),
    Program(
        "zigzag", "the layout is zigzag, not contiguous", "print the position ids of rank 0",
        ("faster", "uneven ranks"), _from("layout", "contiguous", "zigzag"),
    ),
    *(
        Program(f"unfilled-pipeline-{parts}",
                f"the pipeline is idle: a step has {parts} micro-batch{'es' * (parts > 1)}, as large together",
                "print how many micro-batches pass through a stage in a step, and their shape",
                ("slower", "more memory"), _parted(unfilled, parts))
        for parts in (1, 2, 4)
    ),
    Program(
        "all-forward-first", "all micro-batches go forward through the pipeline before any goes backward (GPipe)",
        "a profiler trace: no backward kernel on the last stage before its last forward pass",
        ("slower", "more memory"), of_one_chunk("pipeline_schedule", "gpipe"),
    ),
    Program(
        "not-interleaved", "stages of the pipeline have one chunk of layers each: it is not interleaved",
        "print the layers of each stage: they follow each other", ("slower", "less memory"),
        lambda s, f: of_one_chunk("pipeline_schedule", "1f1b")(s, f) if chunks_of(f) > 1 else None,
    ),
    *(
        Program(f"uneven-stages-{part}",
                f"stages of the pipeline are uneven: 1/{part} of the layers of the first one are in the last, too",
                "print the layers of each stage; kernel seconds of each rank side by side", ("slower", "uneven ranks"),
                _parted(uneven, part))
        for part in (8, 4, 2)
    ),
    Program(
        "even-stages", "all stages of the pipeline have as many layers, the last one with the head beside them",
        "print the layers of each stage", ("slower", "faster", "uneven ranks"), even,
    ),
    Program(
        "no-overlap", "messages between ranks are not overlapped with kernels",
        "a profiler trace: NCCL kernels lie between attention kernels, not beside them", ("slower",),
        _of("overlap", "False"),
    ),
    Program(
        "host-sync", "the host waits for each all-to-all", "a profiler trace: cudaDeviceSynchronize behind all-to-alls",
        ("slower",), _of("all_to_alls", "host-sync"),
    ),
    Program(
        "checkpointed", "all of each layer is computed again: checkpointing is on",
        "count attention forward kernels: two a layer and step", ("slower", "less memory"), _of("checkpoint", "full"),
    ),
    Program(
        "not-checkpointed", "checkpointing is off: layers keep all their activations",
        "count attention forward kernels: one a layer and step", ("faster", "more memory"), _of("checkpoint", "none"),
    ),
    Program(
        "pageable", "offload goes through pageable memory of the host", "tensor.is_pinned() of the host's buffers",
        ("slower",), _from("activations", "host", "pageable"),
    ),
    Program(
        "save-on-cpu", "offload is in the way of kernels, not beside them (torch's save_on_cpu)",
        "a profiler trace: Memcpy DtoH is on the stream of the kernels", ("slower",),
        _from("activations", "host", "save-on-cpu"),
    ),
    Program(
        "not-offloaded", "activations stay on the GPU: offload is off", "no Memcpy DtoH in a profiler trace",
        ("faster", "more memory"), _of("activations", "hbm"),
    ),
    Program(
        "eager-attention", "attention is eager: scores pass through HBM, no flash kernel runs",
        "a profiler trace has no kernel with flash in its name", ("slower", "more memory"), _of("kernel", "standard"),
    ),
    Program(
        "flash-attention-2", "attention is FlashAttention-2: what scaled_dot_product_attention picks, and flash_attn 2",
        "names of attention kernels in a profiler trace: flash_fwd_kernel is FlashAttention-2", ("slower",),
        lambda s, f: _attention(s, f, "flash-attention-2"),
    ),
    *(
        Program(kernel, f"attention is {said}, which is faster on Hopper and Blackwell than FlashAttention-2",
                "names of attention kernels in a profiler trace: flash_fwd_kernel is FlashAttention-2", ("faster",),
                _newer(kernel))
        for kernel, said in _NEWER.items()
    ),
    Program(
        "eager-modules", "norms, rotary embedding and MLP are eager: each op of torch is a kernel",
        "a profiler trace: a norm is 8 kernels; torch.compile, Liger or TransformerEngine make it one",
        ("slower", "more memory"),
        _eager,
    ),
    Program(
        "torch-loss", "the loss is torch's on logits in fp32, of which three copies are held at once",
        "torch.cuda.memory._snapshot", ("slower", "more memory"), _of("loss", "torch"),
    ),
    Program(
        "whole-logits", "the loss holds logits of all tokens, not of a chunk", "torch.cuda.memory._snapshot",
        ("more memory",), _of("loss", "whole"),
    ),
    Program(
        "whole-mlp", "the MLP is not tiled", "torch.cuda.memory._snapshot", ("faster", "more memory"),
        _of("mlp", "whole"),
    ),
    *(
        Program(f"zero-{stage}", f"only what ZeRO stage {stage} shards is sharded",
                "the size of parameters and of optimiser.state on one rank", ("faster", "more memory"),
                _parted(_less_sharded, stage))
        for stage in (0, 1, 2)
    ),
    Program(
        "optimiser-on-gpu", "the optimiser's state is on the GPU", "the device of optimiser.state",
        ("faster", "more memory"), _from("optimiser", "host", "gpu"),
    ),
    Program(
        "torch-on-host", "the optimiser on the host is torch's, a pass over memory for each operation",
        "type(optimizer): DeepSpeedCPUAdam, or torch.optim's without fused", ("slower",), _torch_on_host,
    ),
)  # fmt: skip


def both(one: Program, other: Program) -> Program:
    """Return what is wrong in two ways at once."""

    def changed(setup: Setup, found: Configuration) -> Setup | None:
        first = one.change(setup, found)
        second = first and other.change(first, first.resolved())
        return None if second in (first, other.change(setup, found)) else second  # one undoes the other

    says, check = f"{one.says}; and {other.says}", f"{one.check}; {other.check}"
    return Program(f"{one.name} and {other.name}", says, check, (), changed)


def _with(found: Configuration, spec: ClusterSpec, **more: Any) -> Configuration:
    return dataclasses.replace(found, spec=spec, **more)


def _slow_rank(found: Configuration, factor: float, rank: int) -> Configuration | None:
    """Return one GPU slower than it is said to be."""
    if found.mesh.size == 1:
        return None
    now = found.spec.per_gpu.get(rank, PerGpu())
    slow = msgspec.structs.replace(now, speed=now.speed / factor)
    return _with(found, msgspec.structs.replace(found.spec, per_gpu=found.spec.per_gpu | {rank: slow}))


def _slow_gpus(found: Configuration, factor: float, rank: int) -> Configuration | None:  # noqa: ARG001 - all ranks
    speeds = {
        number: found.spec.per_gpu.get(number, PerGpu()).speed
        for number in range(found.spec.nodes * found.spec.gpus_per_node)
    }
    slow = {number: PerGpu(speed=speed / factor) for number, speed in speeds.items()}
    return _with(found, msgspec.structs.replace(found.spec, per_gpu=found.spec.per_gpu | slow))


def _thin(link: str) -> Callable[[Configuration, float, int], Configuration | None]:
    """Return the change of the rate of one kind of link."""
    (figure,) = [one for one in FIGURES if one.name == link]

    def change(found: Configuration, factor: float, rank: int) -> Configuration | None:  # noqa: ARG001 - all ranks
        spec = scaled(found.spec, figure, 1 / factor)
        return None if spec == found.spec else _with(found, spec)

    return change


def _busy_host(found: Configuration, factor: float, rank: int) -> Configuration | None:  # noqa: ARG001 - all ranks
    return _with(found, scaled(found.spec, LAUNCHES, factor), profile=with_calls(found.profile, factor))


def _slow_attention(found: Configuration, factor: float, rank: int) -> Configuration | None:  # noqa: ARG001 - all ranks
    if found.profile is None:  # nothing is known of its kernels
        return None
    return dataclasses.replace(found, profile=with_attention(found.profile, factor))


def _no_nvlink(found: Configuration, factor: float, rank: int) -> Configuration | None:  # noqa: ARG001 - no factor
    if found.spec.nvlink is None or found.spec.pcie is None or found.mesh.size == 1:
        return None
    return _with(found, msgspec.structs.replace(found.spec, nvlink=None, bridged_gpus=None))


def _shares_between_nodes(found: Configuration, factor: float, rank: int) -> Configuration | None:  # noqa: ARG001 - none
    """Return tensor parallelism outside of all other axes, where its groups are inside of nodes."""
    if found.mesh.tp == 1 or found.mesh.size <= found.spec.gpus_per_node or found.spec.gpus_per_node % found.mesh.tp:
        return None
    outside: tuple[Axis, ...] = ("tp", *(axis for axis in found.mesh.order if axis != "tp"))
    return dataclasses.replace(found, mesh=msgspec.structs.replace(found.mesh, order=outside))


NO_FACTOR = 1.0
"""Of a machine that differs in kind, not by a factor."""
_LEAST_OF_LINKS = {"nic": 50.0, "nvlink": 18.0, "pcie": 64.0, "loopback": 1000.0}
"""Which part of their rate links give that still work: a NIC 10 Gb/s of Ethernet instead of 400 of InfiniBand, or a
little less; NVLink one link of 18; PCIe one lane of Gen3 instead of 16 of Gen5; the host's what `tc` may set."""
MACHINES: tuple[Machine, ...] = (
    Machine(
        "slow-rank", "one GPU, here of rank {rank}, computes {factor:.3g} times slower than the others",
        "kernel seconds of each rank side by side; nvidia-smi -q -d PERFORMANCE,CLOCK there", 64.0, _slow_rank,
    ),
    Machine(
        "slow-gpus", "every GPU computes {factor:.3g} times slower: clocks, power limit, or other kernels",
        "one kernel alone (longstep calibrate); nvidia-smi -q -d PERFORMANCE", 16.0, _slow_gpus,
    ),
    Machine(
        "slow-attention", "attention kernels take {factor:.3g} times as long: an older kernel, or a fallback",
        "names of attention kernels in a profiler trace; attn_implementation, the version of flash-attn", 4.0,
        _slow_attention,
    ),
    Machine(
        "no-nvlink", "GPUs of a node talk over PCIe, not NVLink", "nvidia-smi topo -m; NCCL_DEBUG=INFO: via P2P or SHM",
        NO_FACTOR, _no_nvlink,
    ),
    Machine(
        "tp-between-nodes", "tensor-parallel groups span nodes: their ranks are not GPUs of one node",
        "print the host of every rank of a tensor-parallel group; ranks follow each other in a node, as with "
        "srun --distribution=block", NO_FACTOR, _shares_between_nodes,
    ),
    *(
        Machine(f"thin-{link}", f"{name} gives 1/{{factor:.3g}} of its rate", check, _LEAST_OF_LINKS[link], _thin(link))
        for link, name, check in (
            ("nic", "the network between nodes", "nccl-tests between two nodes; NCCL_DEBUG=INFO: NET/IB or NET/Socket"),
            ("nvlink", "NVLink", "nccl-tests in one node; nvidia-smi nvlink -s"),
            ("pcie", "PCIe", "lspci -vv: LnkSta beside LnkCap; nvbandwidth"),
            ("loopback", "the connection between processes", "iperf3 on the same interface"),
        )
    ),
    Machine(
        "busy-host", "the host issues kernels {factor:.3g} times slower: it is busy, or waits for the GPU",
        "a profiler trace: the GPU is idle while the CPU launches; top; .item() and print in the step", 1000.0,
        _busy_host,
    ),
)  # fmt: skip
