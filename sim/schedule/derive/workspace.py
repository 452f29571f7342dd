"""Workspace: GPU memory that a kernel holds while it runs, in addition to the buffers of its op.

Of fused attention by the code of flash-attention, with ``repeated_bytes`` for kernels that know no heads that share
keys; a log-sum-exp that is packed for a kernel takes the place of the one that flash-attention's is marked in. Of all
others by how ``runtime`` writes them out on CUDA: each temporary that is alive at the worst moment. Results that cannot
become the buffer that they are for (a part of it, or of another data type) are copied there, and so held twice. So are
those whose buffer was there before: the walk, which knows that, counts them.
"""

from __future__ import annotations

import math
from typing import TypeAlias, assert_never

from sim.schedule.derive.tiles import held_bytes, tiles
from sim.schedule.ir import ops
from sim.schedule.ir.program import Program
from sim.schedule.ir.views import View
from sim.words.workload import DTYPE_BYTES, Dtype, accumulation_dtype

QUERY_CHUNK, KEY_CHUNK = 1024, 4096
"""Scores that memory-efficient attention holds at once (arXiv:2112.05682 §3, its published code)."""

LOSS_ROWS = 1024
"""Tokens whose probabilities are held at once in the data type of sums."""

_UNSORTED, _OF_SEGMENT = 3072, 10
"""Tokens up to which torch's gradient of an embedding does not sort, and what it sums at a time where it does."""

_InPlace: TypeAlias = (
    ops.ProductKernel
    | ops.TokenSum
    | ops.Accumulate
    | ops.SwiGlu
    | ops.SwiGluBackward
    | ops.Gelu
    | ops.GeluBackward
    | ops.Scale
    | ops.Embed
    | ops.Unpack
    | ops.Pack
    | ops.Divide
    | ops.Zero
    | ops.Hold
)
"""Most kernels: they hold nothing beside their operands."""


def workspace_bytes(op: ops.Kernel, program: Program) -> int:
    """Return the largest workspace of a kernel in bytes."""
    if isinstance(op, _InPlace):
        return 0
    if isinstance(op, ops.AttentionKernel):
        return _of_attention(op, program)
    if isinstance(op, ops.LinearKernel):
        return _of_linear(op, program)
    if isinstance(op, ops.Rope):
        rotated = op.rotated or op.x.shape[3]
        return _wide_bytes(op.x, program) * rotated // op.x.shape[3]  # both halves, turned
    if isinstance(op, ops.Copy):
        return program.nbytes(op.target.view) if op.order else 0
    if isinstance(op, ops.Fold):
        return program.nbytes(op.source.view) // (op.source.parts // op.target.parts)
    if isinstance(op, ops.NormKernel | ops.EagerMlpKernel):
        return _of_module(op, program)
    if isinstance(op, ops.EmbedBackward):
        return embed_backward_bytes(program.dtype(op.dout), op.dout.shape, op.dtable.shape[0]) + _copied(op, program)
    if isinstance(op, ops.CrossEntropy):
        wide, tokens = DTYPE_BYTES[program.dtype(op.loss)], math.prod(op.labels.shape)
        rows = tokens if op.eager else min(LOSS_ROWS, tokens)
        casts = program.dtype(op.logits) != program.dtype(op.loss)
        of_label = 9 if casts or op.eager else 9 + wide  # whether there is one, its index, and its logarithm
        capped = DTYPE_BYTES[program.dtype(op.logits)] if op.softcap else 0
        copies = 3 if op.eager else 1 + casts
        return rows * (op.logits.shape[2] * (wide * copies + capped) + of_label) + _subtracted(op, program)
    if isinstance(op, ops.LogitKernel):
        return _of_share_of_logits(op, program)
    if isinstance(op, ops.TiledKernel):
        given = len(op.reads) + len(op.writes)
        return max(held_bytes(tile.program, given) for tile in tiles(op, program))
    if isinstance(op, ops.SquareSum):
        return program.nbytes(op.square)
    if isinstance(op, ops.AdamW):
        return 3 * DTYPE_BYTES[program.dtype(op.squares)]  # a norm, and what makes the factor of it
    assert_never(op)


def _of_share_of_logits(op: ops.LogitKernel, program: Program) -> int:
    """Return what a kernel of a share of the vocabulary holds: of some rows a copy of the logits in the data type of
    sums, where they are bent by tanh its derivative, too, and by row what says where the label's logit is. Torch's ops
    are of all rows, and hold what they make of that copy, too (loss_parallel).
    """
    tokens = math.prod(op.logits.shape[:2])
    rows = tokens if op.eager else min(LOSS_ROWS, tokens)
    wide, columns = DTYPE_BYTES[program.dtype(op.writes[-1])], op.logits.shape[2]
    copies = {ops.LargestLogit: 1, ops.ExpSum: 3, ops.LogitLoss: 4}[type(op)] if op.eager else 1
    copies += 1 if op.softcap and isinstance(op, ops.LogitLoss) else 0
    of_row = 0 if isinstance(op, ops.LargestLogit) else 8 + 2 * wide
    return rows * (columns * wide * copies + of_row) + (
        _subtracted(op, program) if isinstance(op, ops.LogitLoss) else 0
    )


def _subtracted(op: ops.CrossEntropy | ops.LogitLoss, program: Program) -> int:
    """Return the bytes of logits less their largest, where these are another tensor."""
    return _wide_bytes(op.logits, program) if op.subtracts is True else 0


REPEATING = ("aten-cudnn", "aten-efficient")
"""Attention kernels of ``runtime`` that are given copies of shared keys and values for every query head."""


def repeats(attention: str) -> bool:
    """Return whether a kernel of a name, or any of what is said to have run, is given such copies."""
    return any(name in attention for name in REPEATING)


def repeated_bytes(op: ops.Op, program: Program) -> int:
    """Return what such a kernel holds more than flash-attention, in bytes: k and v of every query head. dk and dv of
    every query head are in ``flash_backward_bytes`` already.
    """
    if not isinstance(op, ops.Attend | ops.AttendBackward) or op.kernel != "flash":
        return 0
    batch, keys, kv_heads, head_dim = op.k.shape
    heads = op.q.shape[2]
    return 2 * batch * keys * heads * head_dim * DTYPE_BYTES[program.dtype(op.k)] if heads != kv_heads else 0


def embed_backward_bytes(dtype: Dtype, dout_shape: tuple[int, ...], rows: int) -> int:
    """Return what torch's gradient of a table of so many rows allocates for dout (B, S, E): of more than 3072 tokens
    their numbers, sorted, where each id and each ten tokens of an id begin, and a sum in the data type of sums of each
    of the latter, counted as if every id were there (torch 2.13 aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu).
    """
    batch, length, embed_dim = dout_shape
    if (tokens := batch * length) <= _UNSORTED:
        return 0
    segments = min(tokens, rows)
    partial = tokens // _OF_SEGMENT + segments
    numbers = 3 * tokens + 2 * segments + partial
    return numbers * DTYPE_BYTES["int64"] + partial * embed_dim * DTYPE_BYTES[accumulation_dtype(dtype)]


def _of_attention(op: ops.AttentionKernel, program: Program) -> int:
    if isinstance(op, ops.Attend):
        if op.kernel != "flash":
            return _unfused(op, program)
        where_unseen = math.prod(op.lse.shape)  # a byte each
        return program.nbytes(op.lse) + where_unseen + _copied(op, program)
    if isinstance(op, ops.AttendBackward):
        return _attend_backward(op, program)
    if isinstance(op, ops.Merge):
        return 4 * program.nbytes(op.lse)  # the sum, the same without infinities, and two weights
    if isinstance(op, ops.Delta):
        return _wide_bytes(op.out, program) + program.nbytes(op.delta)
    assert_never(op)


def _of_module(op: ops.NormKernel | ops.EagerMlpKernel, program: Program) -> int:
    """Return the workspace of a norm, or of what is between the products of an MLP that keeps what it makes."""
    if isinstance(op, ops.EagerSwiGluBackward):
        return program.nbytes(op.dgate)  # the gradient of the activated gate
    if isinstance(op, ops.EagerSwiGlu):
        return 0
    beside = 0
    if isinstance(op, ops.EagerNorm):  # wide * rstd, while there is no out
        beside = program.nbytes(op.wide) - program.nbytes(op.out)
    if isinstance(op, ops.EagerNormBackward):  # five tensors of pow's derivative, while there is no dx
        beside = 5 * program.nbytes(op.wide) - program.nbytes(op.dx)
    return beside + _copied(op, program)


def _of_linear(op: ops.LinearKernel, program: Program) -> int:
    """Return what linear attention holds in the data type of sums: of a chunk its operands and two squares of scores,
    those of a product with a state, and two states, one of them for each query head.
    """
    batch, tokens, heads, dim = op.reads[0].shape
    wide = DTYPE_BYTES[accumulation_dtype(program.dtype(op.reads[0]))]
    states = 2 * batch * heads * dim**2
    if isinstance(op, ops.LinearAttend | ops.LinearAttendBackward):
        chunk = min(op.chunk, tokens)
        return wide * (states + batch * heads * chunk * (4 * dim + 2 * chunk))
    return wide * (states + 2 * batch * tokens * heads * dim)


def _attend_backward(op: ops.AttendBackward, program: Program) -> int:
    """Return the workspace of a block's backward pass; where delta is given, an out that has it is made first."""
    if op.kernel != "flash":
        return _unfused(op, program)
    held = flash_backward_bytes(program.dtype(op.q), op.q.shape, op.k.shape)
    held += program.nbytes(op.lse)  # in the way that the kernel marks queries without keys
    held += _copied(op, program)
    if op.out:
        return held
    made = program.nbytes(op.q)
    cast = made if program.dtype(op.q) != accumulation_dtype(program.dtype(op.q)) else 0
    return max(held + made, _wide_bytes(op.q, program) + cast + 2 * program.nbytes(op.lse))


def flash_backward_bytes(dtype: Dtype, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> int:
    """Return what flash-attention's backward pass allocates for q (B, S_q, H, D) and k (B, S_k, H_kv, D): delta in
    fp32, dq summed in fp32 where the model's type is narrower, and dk, dv of every query head where heads share keys
    (flash_attn 2.8 csrc/flash_attn/flash_api.cpp, mha_bwd).
    """
    batch, queries, heads, head_dim = q_shape
    size = DTYPE_BYTES[dtype]
    delta = batch * heads * queries * max(4, size)
    dq_sum = math.prod(q_shape) * 4 if size < 4 else 0
    expanded = 2 * batch * k_shape[1] * heads * head_dim * size if heads != k_shape[2] else 0
    return delta + dq_sum + expanded


def _unfused(op: ops.Attend | ops.AttendBackward, program: Program) -> int:
    """Return what attention by other kernels holds of scores, probabilities and their gradients: forward scores in both
    types where they differ, backward (where a chunk's old ones are still there) three of them.
    """
    batch, queries, heads, _ = op.q.shape
    keys, size = op.k.shape[1], DTYPE_BYTES[program.dtype(op.q)]
    wide = DTYPE_BYTES[accumulation_dtype(program.dtype(op.q))]
    cast = size if size != wide else 0
    if op.kernel == "standard":
        a_pair = 2 * size if isinstance(op, ops.AttendBackward) else (wide if cast else 0)
        return batch * heads * queries * keys * a_pair
    chunk = batch * heads * min(queries, QUERY_CHUNK) * min(keys, KEY_CHUNK)
    if isinstance(op, ops.AttendBackward):
        return 3 * wide * chunk + sum(_wide_bytes(view, program) for view in (op.q, op.k, op.v))
    return (wide + size + cast) * chunk + program.nbytes(op.q)


def _wide_bytes(view: View, program: Program) -> int:
    """Return the bytes of a view in the accumulation data type."""
    return math.prod(view.shape) * DTYPE_BYTES[accumulation_dtype(program.dtype(view))]


def _results(op: ops.Op, program: Program) -> list[tuple[View, Dtype]]:
    """Return what a kernel makes in memory of its own, with the data types that it makes."""
    if isinstance(op, ops.Attend | ops.AttendBackward) and op.kernel != "flash":
        return []
    if isinstance(op, ops.Attend | ops.RmsNorm):
        own = program.dtype(op.q if isinstance(op, ops.Attend) else op.x)
        return list(zip(op.writes, (own, accumulation_dtype(own)), strict=True))
    if isinstance(op, ops.EagerNorm):
        own = program.dtype(op.x)
        return list(zip(op.writes, (own, *[accumulation_dtype(own)] * 2, own), strict=True))
    if isinstance(op, ops.AttendBackward | ops.RmsNormBackward | ops.EagerNormBackward | ops.EmbedBackward):
        own = program.dtype(op.dx if isinstance(op, ops.EagerNormBackward) else op.reads[0])
        return [(view, own) for view in op.writes]
    return []


def _fits(view: View, dtype: Dtype, program: Program) -> bool:
    """Return whether a result can become the buffer that it is for."""
    buffer = program.buffers[view.buffer]
    return buffer.dtype == dtype and view.shape == buffer.shape


def _copied(op: ops.Kernel, program: Program) -> int:
    """Return the bytes of results that are copied to where they belong."""
    made = _results(op, program)
    return sum(math.prod(view.shape) * DTYPE_BYTES[dtype] for view, dtype in made if not _fits(view, dtype, program))


def adopted(op: ops.Op, program: Program) -> list[int]:
    """Return the buffers that results of an op become. One that is there before is held beside its result."""
    return [view.buffer for view, dtype in _results(op, program) if _fits(view, dtype, program)]
