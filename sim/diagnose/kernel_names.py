"""Which kind of work a kernel of a profiler trace is, by its name, and which kind an op of a schedule is.

The one place where names are matched: to add a kernel, add what its name contains. Names are those of flash-attn 2 and
3, cuDNN, cuBLAS, CUTLASS, Transformer Engine, torch and Inductor, NCCL, and of torch's operators on a CPU.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias, get_args

KernelKind: TypeAlias = Literal["attention forward", "attention backward", "gemm", "elementwise", "optimiser"]
TransferKind: TypeAlias = Literal["send and receive", "all-gather", "reduce-scatter", "all-reduce", "broadcast"]
WorkKind: TypeAlias = KernelKind | TransferKind | Literal["host copy", "unknown"]
KERNELS: tuple[KernelKind, ...] = get_args(KernelKind)
TRANSFERS: tuple[TransferKind, ...] = get_args(TransferKind)
KINDS_OF_WORK: tuple[WorkKind, ...] = (*KERNELS, *TRANSFERS, "host copy", "unknown")

PATTERNS: tuple[tuple[WorkKind, str], ...] = (
    ("all-gather", r"nccl\w*AllGather|gloo:all_?gather"),
    ("reduce-scatter", r"nccl\w*ReduceScatter|gloo:reduce_?scatter"),
    ("all-reduce", r"nccl\w*AllReduce|gloo:all_?reduce"),
    ("broadcast", r"nccl\w*(Broadcast|Reduce)|gloo:(broadcast|reduce)"),
    # NCCL's all-to-all is grouped sends and receives: its kernel has their name
    ("send and receive", r"nccl\w*(SendRecv|AllToAll)|gloo:(send|recv|all_?to_?all)"),
    ("host copy", r"Memcpy (HtoD|DtoH|HtoH)"),
    ("elementwise", r"^Mem(cpy|set)"),
    (
        "attention backward",
        (r"flash\w*(::|_)\w*bwd|FlashAttn\w*Bwd|FlashAttentionBackward|fmha_?(cutlassB|\w*bwd|\w*backward)|sdpa\w*bprop|"
        r"_attn_bwd|dot_do_o|convert_d(q|kv)|(flash|efficient)_attention\w*_backward"),
    ),
    (
        "attention forward",
        (r"flash\w*(::|_)\w*fwd|FlashAttn\w*Fwd|FlashAttentionForward|fmha_?(cutlassF|\w*fwd|\w*forward)|sdpa\w*fprop|"
        r"_attn_fwd|splitkv\w*combine|aten::(_?scaled_dot_product\w*attention|_flash_attention_forward)"),
    ),
    ("gemm", r"gemm|nvjet|xmma|cublas|splitKreduce|cutlass|aten::(linear|mm|addmm|bmm|baddbmm|matmul|einsum)\b"),
    ("optimiser", r"multi_tensor_apply|adam|FusedOptimizer|lamb_|lpnorm|_foreach_|Optimizer\.step"),
    (
        "elementwise",
        (r"elementwise|vectorized|reduce_kernel|norm|rotary|rope|silu|swiglu|gelu|softmax|cross_?entropy|nll_loss|"
        r"embedding|index|gather|scatter|Cat(Array|Into)|copy|cast|fill|zero|dropout|triton_|cub::|unrolled|"
        r"aten::(add|sub|mul|div|neg|sum|mean|exp|log|logsumexp|sigmoid|pow|rsqrt|sqrt|cat|stack|clone|contiguous|"
        r"to|where|masked\w*|tril|triu|sin|cos|ones|arange|randn?|normal|uniform)_?\b"),
    ),
)  # fmt: skip
"""In this order: the first pattern that is found in a name says what it is."""

_COMPILED = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in PATTERNS)

_OPS: dict[str, WorkKind | None] = {
    "Attend": "attention forward",
    "AttendBackward": "attention backward",
    "Delta": "attention backward",
    "LinearAttend": "attention forward",
    "LinearAttendBackward": "attention backward",
    "StateSum": "attention forward",  # of backward, too: names do not tell
    "StateProduct": "attention forward",
    "Gemm": "gemm",
    "JoinedGemm": "gemm",
    "TiledMlp": "gemm",  # most of the loop; ``sim.diagnose.traced`` takes it apart beside a profiler's trace
    "TiledMlpBackward": "gemm",
    "AdamW": "optimiser",
    "HostAdamW": "optimiser",
    "SquareSum": "optimiser",
    "Exchange": "send and receive",
    "AllToAll": "send and receive",
    "AllGather": "all-gather",
    "ReduceScatter": "reduce-scatter",
    "AllReduce": "all-reduce",
    "HostCopy": "host copy",
    "HostSync": None,
    "Barrier": None,
}
"""Kinds of ops that are not elementwise; None of those that only wait."""


def kind_of_name(name: str) -> WorkKind:
    """Return what a kernel does, by its name.

    >>> kind_of_name("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4> >(Flash_fwd_params)")
    'attention forward'
    >>> kind_of_name("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"), kind_of_name("my_kernel")
    ('send and receive', 'unknown')
    """
    return next((kind for kind, pattern in _COMPILED if pattern.search(name)), "unknown")


def kind_of_op(op: str) -> WorkKind | None:
    """Return what an op of a schedule does, by the name of its class; None of one that only waits.

    >>> kind_of_op("Attend"), kind_of_op("RmsNorm"), kind_of_op("AllToAll"), kind_of_op("Barrier")
    ('attention forward', 'elementwise', 'send and receive', None)
    """
    return _OPS.get(op, "elementwise")
