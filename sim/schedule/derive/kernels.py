"""Which kernels an op stands for, with their shapes, FLOPs and bytes.

Both players read it: the cost model looks these kernels up, the calibration times them, the runtime runs them.
``hbm_bytes`` is the traffic that no implementation can avoid (every operand once); what an implementation moves beyond
that is part of its measured efficiency.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sim.base.kept import kept
from sim.schedule.derive.tiles import tiles
from sim.schedule.ir.declare import views_in
from sim.schedule.ir.forms import Form
from sim.schedule.ir.fragments import Fragment
from sim.schedule.ir.masks import FULL, Band, DocumentBlock, RowBlock, Run, Span, count_pairs, moved_band
from sim.schedule.ir.ops import (
    Accumulate,
    AdamW,
    Attend,
    AttendBackward,
    Copy,
    CrossEntropy,
    EagerGeGlu,
    EagerGeGluBackward,
    EagerMlpKernel,
    EagerNormBackward,
    EagerNormKernel,
    EagerSwiGlu,
    Embed,
    EmbedBackward,
    ExpSum,
    Hold,
    Kernel,
    LargestLogit,
    LinearAttend,
    LinearAttendBackward,
    LinearKernel,
    LogitKernel,
    LogitLoss,
    Merge,
    Pack,
    ProductKernel,
    StateSum,
    StreamingKernel,
    TiledKernel,
    TiledMlpBackward,
    Unpack,
)
from sim.schedule.ir.program import Program, alone
from sim.words.options import AttentionName
from sim.words.workload import DTYPE_BYTES, Dtype

TILE = 128
"""Queries (keys in the backward pass) of a block, in all versions of flash-attention; and vice versa."""


class KernelUse(NamedTuple):
    """One kernel on operands of one shape."""

    kernel: str
    """attention_forward, attention_backward, gemm, and the memory-bound ones: merge, accumulate, copy, rms_norm, …"""
    variant: str
    """What selects another implementation: the mask of attention, the form of a gemm; empty otherwise."""
    dtype: Dtype
    shape: tuple[int, ...]
    """attention: (batch, queries, keys, heads, kv heads, head dim); gemm, of every form: (tokens, fan in, fan out);
    others: (elements,)."""
    flops: int
    hbm_bytes: int
    into_slice: bool = False
    """Whether a merge changes some rows of its buffer only: code that merges out of place then copies these back."""
    loop: tuple[tuple[KernelUse, float], ...] = ()
    """Of a loop over tiles, and of what is several kernels, those that it runs, and how often each; ``flops`` and
    ``hbm_bytes`` are theirs."""

    documents: tuple[tuple[KernelUse, int], ...] = ()
    """Of attention to several documents, or of several blocks of queries to the keys that each keeps, in one kernel
    what each alone would be, and how many are alike."""

    packs: tuple[str, int] = ("", 0)
    """Of the copy that packs gradients, which of ``PACKS`` stands for it, and how many elements these have in all."""

    casts: bool = False
    """Whether a copy or a sum of tensors reads one data type and writes another: then ATen reads one element at a time,
    as what is marked ``SCATTERED``."""

    @property
    def each(self) -> tuple[tuple[KernelUse, float], ...]:
        """The kernels that are run, and how often each: itself once, where it is no loop."""
        return self.loop or ((self, 1),)

    @property
    def fused_attention(self) -> bool:
        """Whether this is attention whose scores never leave the SMs."""
        return self.kernel in ATTENTION_KERNELS and self.variant in {"full", "causal", "masked"}

    @property
    def delta_bytes(self) -> int:
        """What a kernel of its own reads before the backward pass of fused attention: out and its gradient."""
        if self.kernel != "attention_backward" or not self.fused_attention:
            return 0
        batch, queries, _, heads, _, head_dim = self.shape
        return 2 * batch * queries * heads * head_dim * DTYPE_BYTES[self.dtype]

    @property
    def tiles(self) -> int | None:
        """Blocks of the grid that fused attention hands to the SMs, for ``TILE`` queries each (keys in the backward
        pass); None for other kernels.
        """
        if not self.fused_attention:
            return None
        if self.documents:
            return sum((use.tiles or 0) * n for use, n in self.documents)
        batch, queries, keys, heads, _, _ = self.shape
        return batch * heads * -(-(queries if self.kernel == "attention_forward" else keys) // TILE)


ELEMENTWISE = "elementwise"
"""A kernel that passes over elements once, as one of several that another stands for."""
SCATTERED = "scattered"
"""Marks, in a variant, a pointwise kernel of ATen in 16 bits that reads one element at a time: it casts, its operands
lie in memory in different orders, or one is broadcast (ATen/native/cuda/CUDALoops.cuh, gpu_kernel_impl)."""
PACKS = ("pack", "pack wide")
"""What stands, in what software runs, for the copy that packs gradients before ranks sum them: in their own data type,
or in a wider one.
"""
ATTENTION_KERNELS = ("attention_forward", "attention_backward")


def kernel_uses(program: Program) -> list[KernelUse | None]:
    """Return per op of a program the kernel that it runs; None for communication and synchronisation."""
    return [use for call in program.calls for use in _uses_of(call.fragment)]


def kernel_flops(program: Program) -> dict[str, int]:
    """Return the FLOPs of a program by kernel; those of attention are its own, also where it is several kernels."""
    found: Counter[str] = Counter()
    for fragment, calls in Counter([call.fragment for call in program.calls]).items():
        forms, which, _ = fragment.shared.formed
        for form, times in zip(forms, np.bincount(which).tolist(), strict=True):
            use = use_of(form)
            each = () if use is None else ((use, 1),) if use.kernel in ATTENTION_KERNELS else use.each
            for kernel, count in each:
                found[kernel.kernel] += calls * times * count * kernel.flops
    return found


def _uses_of(fragment: Fragment) -> list[KernelUse | None]:
    """Return the kernels of a fragment's ops, which are those of every call."""
    forms, which, _ = fragment.shared.formed
    uses = list(map(use_of, forms))
    return [uses[form] for form in which.tolist()]


@kept
def use_of(form: Form) -> KernelUse | None:
    """Return the kernel that ops of a form run, None for communication and synchronisation."""
    return kernel_use(form.op, alone(form)) if isinstance(form.op, Kernel) else None


def kernel_use(op: Kernel, program: Program) -> KernelUse:
    """Return the kernel that an op runs."""
    if isinstance(op, Attend | AttendBackward):
        backward = isinstance(op, AttendBackward)
        size = (program.dtype(op.q), op.q.shape, op.k.shape[1], op.k.shape[2], op.band)
        return (
            attention_use(backward, *size, op.documents or gathered(op.sparse or ()))
            if op.kernel == "flash"
            else unfused_use(op.kernel, backward, *size)
        )
    if isinstance(op, LinearKernel):
        return _linear_use(op, program)
    if isinstance(op, ProductKernel):
        return gemm_use(op, program)
    if isinstance(op, Embed | EmbedBackward):
        return _embedding_use(op, program)
    if isinstance(op, TiledKernel):
        return _tiled_use(op, program)
    if isinstance(op, Hold):
        return KernelUse(op.meta.kernel, "", program.dtype(op.held[0]), (0,), 0, 0)
    return _streaming_use(op, program)


def gemm_use(op: ProductKernel, program: Program) -> KernelUse:
    """Return the matrix product of a linear layer, or of several side by side, 2 FLOPs a multiply-add. All forms of one
    layer share their shape.
    """
    a, *_ = views_in(op.a)
    out, *_ = views_in(op.out)
    weights = [view.shape for view in views_in(op.out if op.form == "tn" else op.b)]
    moved = sum(map(program.nbytes, (*op.reads, *op.writes)))
    shape = (a.shape[0] * a.shape[1], weights[0][0], sum([fan_out for _, fan_out in weights]))
    variant = op.form + (" accumulate" if op.accumulate else "")
    if program.dtype(out) != program.dtype(a):
        variant += f" into {program.dtype(out)}"
    return KernelUse("gemm", variant, program.dtype(a), shape, 2 * math.prod(shape), moved)


def _linear_use(op: LinearKernel, program: Program) -> KernelUse:
    """Return a kernel of linear attention: products of D x D numbers a token, and of whole squares of scores in each
    chunk. States of chunks stay on the chip: not all that run do that.
    """
    first, *_ = op.reads
    batch, tokens, heads, dim = first.shape
    each = 2 * dim**2 * tokens
    if isinstance(op, LinearAttend | LinearAttendBackward):
        full, kv_heads = tokens // op.chunk, op.k.shape[2]
        scores = 2 * dim * (full * op.chunk**2 + (tokens - full * op.chunk) ** 2)
        backward = isinstance(op, LinearAttendBackward)
        name = f"attention_linear_{'backward' if backward else 'forward'}"
        flops = heads * ((5 if backward else 2) * scores + (2 if backward else 1) * each)
        flops += (3 if backward else 1) * kv_heads * each
    else:
        name = "attention_state_sum" if isinstance(op, StateSum) else "attention_state_product"
        flops = heads * each
    moved = sum(map(program.nbytes, (*op.reads, *op.writes)))
    return KernelUse(name, "", program.dtype(first), (math.prod(first.shape),), batch * flops, moved)


def _tiled_use(op: TiledKernel, program: Program) -> KernelUse:
    """Return all kernels of a loop over tiles: those of alike tiles are one kind each."""
    counts: Counter[KernelUse] = Counter()
    for tile in tiles(op, program):
        for use in kernel_uses(tile.program):
            assert use is not None
            counts[use] += tile.times
    name = "tiled_mlp_backward" if isinstance(op, TiledMlpBackward) else "tiled_mlp"
    flops, moved = (sum(getattr(use, what) * n for use, n in counts.items()) for what in ("flops", "hbm_bytes"))
    elements = math.prod(op.x.shape)
    return KernelUse(name, "", program.dtype(op.x), (elements,), flops, moved, loop=tuple(counts.items()))


def _embedding_use(op: Embed | EmbedBackward, program: Program) -> KernelUse:
    """Return what reads rows of a table and writes them, or reads their gradients and writes those of the table."""
    tokens, other = (op.out, op.out) if isinstance(op, Embed) else (op.dout, op.dtable)
    elements, moved = math.prod(tokens.shape), program.nbytes(tokens) + program.nbytes(other) + program.nbytes(op.ids)
    flops = op.meta.flops_per_element * elements
    return KernelUse(op.meta.kernel, "torch", program.dtype(tokens), (elements,), flops, moved)


def _streaming_use(op: StreamingKernel, program: Program) -> KernelUse:
    """Return a kernel that passes over its operands once; its size is that of its first one."""
    first = (*op.reads, *op.writes)[0]
    variant = "gather" if isinstance(op, Copy) and op.order else "fused" if isinstance(op, CrossEntropy) else ""
    elements = math.prod(first.shape)
    moved = sum(map(program.nbytes, (*op.reads, *op.writes)))
    if isinstance(op, Pack) and op.by_products:
        others = sum(math.prod(one.shape) for one in op.gradients if len(one.shape) == 1)
        moved = moved * others // op.flat.shape[0]
    if isinstance(op, AdamW):
        moved -= program.nbytes(op.gradient)  # where gradients are scaled first, software has a kernel of its own
    flops = op.meta.flops_per_element * elements
    if isinstance(op, CrossEntropy) and op.eager:
        return _eager_loss(op, program)
    if isinstance(op, LogitKernel) and op.eager:
        return _eager_share_of_loss(op, program)
    if isinstance(op, EagerNormKernel):
        return _eager_norm(op, program)
    if isinstance(op, EagerMlpKernel):
        return _eager_mlp(op, program)
    in_part = isinstance(op, Merge) and op.into_out.shape != program.buffers[op.into_out.buffer].shape
    packs = ("", 0)
    if isinstance(op, Pack) and not op.adds:
        packs = (PACKS[program.dtype(op.flat) != program.dtype(first)], op.flat.shape[0])
    casts = isinstance(op, Copy | Unpack | Accumulate) or (isinstance(op, Pack) and bool(op.adds))
    casts = casts and len({program.dtype(view) for view in (*op.reads, *op.writes)}) > 1
    return KernelUse(
        op.meta.kernel, variant, program.dtype(first), (elements,), flops, moved, in_part, packs=packs, casts=casts
    )


def _eager_loss(op: CrossEntropy, program: Program) -> KernelUse:
    """Return what torch runs: of a model in a narrow data type with casts of logits and of their gradient."""
    own, wide, elements = program.dtype(op.logits), program.dtype(op.loss), math.prod(op.logits.shape)
    size, wide_size = DTYPE_BYTES[own], DTYPE_BYTES[wide]
    cast = f"_to_copy {SCATTERED}"
    casts = [(cast, wide, size + wide_size), (cast, own, wide_size + size)] if own != wide else []
    bytes_each: list[tuple[str, Dtype, float]] = [
        *casts,
        ("_log_softmax", wide, 2 * wide_size),
        ("zeros", wide, wide_size),
        ("_log_softmax_backward_data", wide, 3 * wide_size),
    ]
    return in_place_of(
        KernelUse(op.meta.kernel, "eager", own, (elements,), op.meta.flops_per_element * elements, 0),
        [(name, dtype, each, 1) for name, dtype, each in bytes_each],
    )


def _eager_share_of_loss(op: LogitKernel, program: Program) -> KernelUse:
    """Return what torch runs of a share of the vocabulary (torch 2.13 distributed/tensor/parallel/loss.py, _log_softmax
    and _nll_loss_and_log_softmax_backward), but for what has a number for each token.
    """
    own, wide = program.dtype(op.logits), program.dtype(op.top)
    elements, size, wide_size = math.prod(op.logits.shape), DTYPE_BYTES[own], DTYPE_BYTES[wide]
    cast = f"_to_copy {SCATTERED}"
    made: dict[type[LogitKernel], list[tuple[str, int]]] = {
        LargestLogit: [("amax", 1)],
        ExpSum: [("sub", 2), ("exp", 2), ("sum", 1)],
        LogitLoss: [("sub", 2), ("zeros", 1), ("exp", 2), ("add", 3), ("mul", 2)],
    }
    run: list[tuple[str, Dtype, float, float]] = [(name, wide, n * wide_size, 1) for name, n in made[type(op)]]
    if own != wide and isinstance(op, LargestLogit):
        run.insert(0, (cast, wide, size + wide_size, 1))
    if own != wide and isinstance(op, LogitLoss):
        run.append((cast, own, wide_size + size, 1))
    return in_place_of(
        KernelUse(op.meta.kernel, "eager", own, (elements,), op.meta.flops_per_element * elements, 0), run
    )


class _Launched(NamedTuple):
    """A kernel that eager modules launch, by the elements that it reads and writes in the model's data type (own) and
    in that of sums (wide): of all features of all rows, of a row one each, or of one row.
    """

    name: str
    wide: bool
    """Whether it writes the data type of sums."""
    own: int = 0
    wides: int = 0
    of_rows: int = 0
    """In the data type of sums."""
    of_weight: int = 0
    """In the model's."""
    launches: int = 1


_EAGER_NORM = (
    _Launched(f"_to_copy {SCATTERED}", wide=True, own=1, wides=1),
    _Launched("pow", wide=True, wides=2),
    _Launched("mean", wide=True, wides=1, of_rows=1),
    _Launched("add", wide=True, of_rows=2),
    _Launched("rsqrt", wide=True, of_rows=2),
    _Launched("mul", wide=True, wides=2, of_rows=1),
    _Launched(f"_to_copy {SCATTERED}", wide=False, own=1, wides=1),
    _Launched(f"mul {SCATTERED}", wide=False, own=2, of_weight=1),
)
_EAGER_NORM_BACKWARD = (
    _Launched(f"mul {SCATTERED}", wide=False, own=2, of_weight=1),
    _Launched("mul", wide=False, own=3),
    _Launched("sum", wide=False, own=1, of_weight=1),
    _Launched(f"_to_copy {SCATTERED}", wide=True, own=1, wides=1),
    _Launched("mul", wide=True, wides=3, launches=2),
    _Launched("mul", wide=True, wides=2, of_rows=1),
    _Launched("sum", wide=True, wides=1, of_rows=1),
    _Launched("pow", wide=True, of_rows=2),
    _Launched("mul", wide=True, of_rows=2),
    _Launched("mul", wide=True, of_rows=3),
    _Launched("div", wide=True, wides=1, of_rows=1),
    _Launched("pow", wide=True, wides=2),
    _Launched("mul", wide=True, wides=2),
    _Launched("add", wide=True, wides=3),
    _Launched(f"_to_copy {SCATTERED}", wide=False, own=1, wides=1),
)
"""What LlamaRMSNorm and autograd launch (``sim/software/counted/transformers-llama.toml``). The second and third of the
way back make the gradient of the weight."""


def _eager_norm(op: EagerNormKernel, program: Program) -> KernelUse:
    """Return what an eager norm runs, forward or backward."""
    own = program.dtype(op.dx if isinstance(op, EagerNormBackward) else op.out)
    wide = program.dtype(op.wide)
    launched: Sequence[_Launched] = _EAGER_NORM
    if isinstance(op, EagerNormBackward):
        launched = _EAGER_NORM_BACKWARD if op.dweight else (_EAGER_NORM_BACKWARD[0], *_EAGER_NORM_BACKWARD[3:])
    elements, (features,) = math.prod(op.wide.shape), op.weight.shape
    loop = []
    for one in launched:
        moved = (one.own * elements + one.of_weight * features) * DTYPE_BYTES[own]
        moved += (one.wides * elements + one.of_rows * (elements // features)) * DTYPE_BYTES[wide]
        shape = (elements if one.own or one.wides else elements // features,)
        loop.append((KernelUse(ELEMENTWISE, one.name, wide if one.wide else own, shape, 0, moved), one.launches))
    flops, moved = op.meta.flops_per_element * elements, sum(use.hbm_bytes * count for use, count in loop)
    return KernelUse(op.meta.kernel, "eager", own, (elements,), flops, moved, loop=tuple(loop))


def _eager_mlp(op: EagerMlpKernel, program: Program) -> KernelUse:
    """Return what an eager MLP runs between its products, forward or backward."""
    own, elements = program.dtype(op.gate), math.prod(op.gate.shape)
    size, name = DTYPE_BYTES[own], "gelu" if isinstance(op, EagerGeGlu | EagerGeGluBackward) else "silu"
    run: list[tuple[str, Dtype, float, float]] = (
        [(name, own, 2 * size, 1), ("mul", own, 3 * size, 1)]
        if isinstance(op, EagerSwiGlu)
        else [("mul", own, 3 * size, 2), (f"{name}_backward", own, 3 * size, 1)]
    )
    flops = op.meta.flops_per_element * elements
    return in_place_of(KernelUse(op.meta.kernel, "eager", own, (elements,), flops, 0), run)


def in_place_of(use: KernelUse, run: Iterable[tuple[str, Dtype, float, float]]) -> KernelUse:
    """Return a kernel as a loop of what is run in its place: names, data types, bytes of each element, and launches of
    kernels that pass over its elements once.
    """
    (elements,) = use.shape
    loop = tuple(
        (KernelUse(ELEMENTWISE, name, dtype, use.shape, 0, round(each * elements)), launches)
        for name, dtype, each, launches in run
    )
    return use._replace(hbm_bytes=round(sum(one.hbm_bytes * launches for one, launches in loop)), loop=loop)


@lru_cache(maxsize=4096)
def attention_use(
    backward: bool,
    dtype: Dtype,
    q_shape: tuple[int, ...],
    num_keys: int,
    kv_heads: int,
    band: Band,
    parts: tuple[DocumentBlock, ...] = (),
) -> KernelUse:
    """Return the fused attention kernel for q of shape (B, S_q, H, D) and keys (B, S_k, H_kv, D).

    Forward 4*D FLOPs per kept pair and head (two matmuls), backward 10*D (five, one of them recomputes the scores;
    arXiv:2307.08691 §4.1).
    """
    batch, queries, heads, head_dim = q_shape
    if parts:
        each = tuple(
            (attention_use(backward, dtype, (batch, rows, heads, head_dim), columns, kv_heads, of_part), n)
            for (rows, columns, of_part), n in Counter((p.rows.size, p.columns.size, p.band) for p in parts).items()
        )
        variants = {use.variant for use, _ in each}
        shape, moved = _attention_operands(backward, DTYPE_BYTES[dtype], q_shape, num_keys, kv_heads)
        return each[0][0]._replace(
            variant=variants.pop() if len(variants) == 1 else "masked",
            shape=shape,
            flops=sum(use.flops * n for use, n in each),
            hbm_bytes=moved,
            documents=each,
        )
    pairs = count_pairs(band, Span(0, queries), Span(0, num_keys)) * batch * heads
    size = DTYPE_BYTES[dtype]
    variant = mask_variant(band, queries, num_keys)
    shape, moved = _attention_operands(backward, size, q_shape, num_keys, kv_heads)
    if not backward:
        return KernelUse("attention_forward", variant, dtype, shape, 4 * head_dim * pairs, moved)
    return KernelUse("attention_backward", variant, dtype, shape, 10 * head_dim * pairs, moved)


def gathered(parts: tuple[RowBlock, ...]) -> tuple[DocumentBlock, ...]:
    """Return what a block-sparse kernel does: each block of queries loops over the runs of keys that it keeps, as over
    so many keys of a document of its own. Where only the last run has a band it is theirs; else each run is by itself.
    """
    found = []
    for part in parts:
        *before, last = part.runs or (Run(0, 0, FULL),)
        if last.band.left is None and all(run.band == FULL for run in before):
            ahead = sum(run.columns for run in before)
            found.append(_alone(part.rows, ahead + last.columns, moved_band(last.band, 0, -ahead)))
        else:
            found += [_alone(part.rows, run.columns, run.band) for run in part.runs]
    return tuple(found)


def _alone(rows: int, columns: int, band: Band) -> DocumentBlock:
    return DocumentBlock(Span(0, rows), Span(0, columns), band)


def unfused_use(kernel: AttentionName, backward: bool, dtype: Dtype, q_shape: tuple[int, ...], num_keys: int,
                kv_heads: int, band: Band) -> KernelUse:  # fmt: skip
    """Return attention whose scores pass through HBM, whatever the mask keeps of them (arXiv:2205.14135 §3.1): products
    of each head, and kernels that pass over its scores, one after the other.

    Forward S = Q K^T, P = softmax(S), O = P V. Backward dV = P^T dO, dP = dO V^T, dS of P and dP, dQ = dS K, dK =
    dS^T Q; a memory-efficient one makes S and P again before.
    """
    batch, queries, heads, head_dim = q_shape
    size, pairs = DTYPE_BYTES[dtype], batch * heads * queries * num_keys
    operands = (math.prod(q_shape) + batch * num_keys * kv_heads * head_dim) * size

    def product(form: str, rows: int, fan_in: int, fan_out: int) -> KernelUse:
        """Every product is of scores, of one operand like q and of one like k."""
        of_heads = (batch * heads * rows, fan_in, fan_out)
        return KernelUse("gemm", form, dtype, of_heads, 2 * pairs * head_dim, operands + pairs * size)

    def over_scores(name: str, passes: int) -> KernelUse:
        """Beside scores it has a number for each query."""
        moved = (passes * pairs * size) + batch * heads * queries * max(4, size)
        return KernelUse(name, "", dtype, (pairs,), 0, moved)

    to_scores, from_scores = product("nt", queries, head_dim, num_keys), product("nn", queries, num_keys, head_dim)
    to_keys = product("tn", num_keys, queries, head_dim)
    made = (to_scores, over_scores("softmax", 2))
    run = (*made, from_scores)
    if backward:
        again = made if kernel == "memory-efficient" else ()
        run = (*again, to_keys, to_scores, over_scores("softmax_backward", 3), from_scores, to_keys)
    flops, moved = (sum(each) for each in zip(*((one.flops, one.hbm_bytes) for one in run), strict=True))
    name = "attention_backward" if backward else "attention_forward"
    variant = f"{kernel} {mask_variant(band, queries, num_keys)}"
    shape = (batch, queries, num_keys, heads, kv_heads, head_dim)
    return KernelUse(name, variant, dtype, shape, flops, moved, loop=tuple([(one, 1) for one in run]))


def _attention_operands(
    backward: bool, size: int, q_shape: tuple[int, ...], num_keys: int, kv_heads: int
) -> tuple[tuple[int, ...], int]:
    """Return the shape of a use, and the bytes of all operands once."""
    batch, queries, heads, head_dim = q_shape
    q_bytes = math.prod(q_shape) * size
    kv_bytes = 2 * batch * num_keys * kv_heads * head_dim * size
    lse_bytes = batch * heads * queries * max(4, size)
    moved = (4 * q_bytes + 2 * kv_bytes if backward else 2 * q_bytes + kv_bytes) + lse_bytes
    return (batch, queries, num_keys, heads, kv_heads, head_dim), moved


def mask_variant(band: Band, num_queries: int, num_keys: int) -> str:
    """Return which implementation of attention a band needs: full; causal, the last query seeing the last key; or
    masked for all others.
    """
    if band == FULL:
        return "full"
    return "causal" if num_keys >= num_queries and band == Band(right=num_keys - num_queries) else "masked"
