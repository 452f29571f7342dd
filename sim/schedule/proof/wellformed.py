"""What every op must satisfy by itself, whatever lies in its buffers: shapes that fit, views that do not collide."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import combinations
from typing import assert_never

from sim.schedule.derive.dependencies import Slices, overlap
from sim.schedule.ir.layout import num_tokens
from sim.schedule.ir.ops import (
    COMPUTE,
    FETCH,
    HOST,
    OFFLOAD,
    Accumulate,
    AllGather,
    AllReduce,
    AllToAll,
    Attend,
    AttendBackward,
    Barrier,
    Communication,
    Copy,
    Delta,
    Exchange,
    Fold,
    Gemm,
    HostCopy,
    HostSync,
    Kernel,
    Merge,
    Op,
    ReduceScatter,
    RmsNorm,
    RmsNormBackward,
    Rope,
    SwiGlu,
    SwiGluBackward,
    Zero,
)
from sim.schedule.ir.program import Port, Program
from sim.schedule.ir.views import Split, View, is_contiguous, parts_are_contiguous
from sim.schedule.model.equations import heads_of
from sim.workload import ModelSpec


def op_problem(op: Op, program: Program, inputs: dict[int, str]) -> str:
    """Return what is wrong with an op of a program, by itself; empty if nothing is. ``inputs``: tensors by buffer."""
    reads, writes = op.reads, op.writes
    for view in (*reads, *writes):
        if problem := _view_problem(view, program):
            return problem
    if op.stream != (wanted := _stream(op, program)):
        return f"is on stream {op.stream!r}: a {type(op).__name__} like this one belongs on {wanted!r}"
    for view in writes:
        if view.buffer in inputs:
            return f"writes to the input {inputs[view.buffer]!r}; copy it first"
    if isinstance(op, HostCopy):
        return _host_copy_problem(op, program)
    problem = _place_problem((*reads, *writes), program) or _collision(op, reads, writes, program)
    if isinstance(op, Communication):
        return problem or _message_problem(op, (*reads, *writes), program)
    return problem or _dims_problem(op, program) or _shape_problem(op)


def _view_problem(view: View, program: Program) -> str:
    """Return where a view is not inside a buffer of the program."""
    if not 0 <= view.buffer < len(program.buffers):
        return f"uses buffer {view.buffer} of {len(program.buffers)}"
    buffer = program.buffers[view.buffer]
    if len(buffer.dims) == len(buffer.shape) and _is_inside(view.slices, buffer.shape):
        return ""
    return f"uses {view.slices} of buffer {buffer.name!r}, which has dims {buffer.dims!r} and shape {buffer.shape}"


@lru_cache(maxsize=65536)
def _is_inside(slices: Slices, shape: tuple[int, ...]) -> bool:
    """Return whether a box has the dimensions of a shape, and lies in it."""
    return len(slices) == len(shape) and all(
        0 <= start < stop <= extent for (start, stop), extent in zip(slices, shape, strict=True)
    )


def _stream(op: Op, program: Program) -> str:
    """Return the stream that an op belongs on: on another one, players would take turns that nobody proved."""
    if isinstance(op, Kernel):
        return COMPUTE
    if isinstance(op, Communication):
        return op.communicator
    if isinstance(op, HostCopy):
        return OFFLOAD if program.buffers[op.source.buffer].place == "hbm" else FETCH
    if isinstance(op, HostSync):
        return HOST
    assert_never(op)


def _place_problem(views: tuple[View, ...], program: Program) -> str:
    """Return where an op that runs on the GPU uses memory of its host."""
    on_host = [program.buffers[view.buffer].name for view in views if program.buffers[view.buffer].place != "hbm"]
    return f"uses buffer {on_host[0]!r}, which lies in the host's memory; copy it first" if on_host else ""


def _host_copy_problem(op: HostCopy, program: Program) -> str:
    """Return where a copy engine would have to do more than to move bytes between a GPU and its host."""
    source, target = (program.buffers[view.buffer] for view in (op.source, op.target))
    if [source.place, target.place].count("hbm") != 1:
        return f"copies from {source.place} to {target.place}: takes one of them in hbm; use a Copy inside one memory"
    if (source.dims, source.dtype) != (target.dims, target.dtype):
        return f"takes {source.dims} of {source.dtype} for {target.dims} of {target.dtype}"
    if not (is_contiguous(op.source, source) and is_contiguous(op.target, target)):
        return "copies a view with gaps; copy it into a buffer first"
    return _differ(op.source.shape, [op.target])


def _shape_problem(op: Kernel | HostSync) -> str:
    """Return where operands do not fit each other."""
    if isinstance(op, Attend | AttendBackward):
        batch, queries, heads, dim = op.q.shape
        like_q, like_k, like_lse = [op.out], [op.v], [op.lse]
        if isinstance(op, AttendBackward):
            like_k += [op.dk, op.dv]
            like_q = [op.dout, op.dq]
            (like_lse if op.from_delta else like_q).append(op.out)
        keys = (batch, op.k.shape[1], op.k.shape[2], dim)
        if (op.kernel == "standard") != (op.probs is not None):
            return f"has probabilities {op.probs} for the kernel {op.kernel!r}: those of a standard one are kept"
        return (
            _differ(op.q.shape, like_q)
            or _differ(keys, [op.k, *like_k])
            or _differ((batch, heads, queries), like_lse)
            or _differ((batch, heads, queries, keys[1]), [op.probs] if op.probs else [])
            or ("" if heads % op.k.shape[2] == 0 else f"has {heads} heads for {op.k.shape[2]} key/value heads")
        )
    if isinstance(op, Merge):
        batch, tokens, heads, _ = op.out.shape
        return _differ(op.out.shape, [op.into_out]) or _differ((batch, heads, tokens), [op.lse, op.into_lse])
    if isinstance(op, Accumulate):
        return _differ(op.source.shape, [op.into])
    if isinstance(op, Delta):
        batch, tokens, heads, _ = op.out.shape
        return _differ(op.out.shape, [op.dout]) or _differ((batch, heads, tokens), [op.delta])
    if isinstance(op, Zero):
        return ""
    if isinstance(op, Copy | Fold):
        return _parts_problem(op)
    if isinstance(op, Gemm):
        return _gemm_problem(op)
    if isinstance(op, RmsNorm | RmsNormBackward):
        batch, tokens, width = op.x.shape
        like = [op.out] if isinstance(op, RmsNorm) else [op.dout, op.dx]
        weights = [op.weight] if isinstance(op, RmsNorm) else [op.weight, op.dweight]
        return _differ(op.x.shape, like) or _differ((batch, tokens), [op.rstd]) or _differ((width,), weights)
    if isinstance(op, Rope):
        count = num_tokens(op.tokens)
        return "" if count == op.x.shape[1] else f"rotates {op.x.shape[1]} tokens by {count} positions"
    if isinstance(op, SwiGlu | SwiGluBackward):
        return _differ(op.gate.shape, [*op.reads, *op.writes])
    if isinstance(op, HostSync):
        return ""
    assert_never(op)


def _dims_problem(op: Kernel | HostSync, program: Program) -> str:
    """Return where views of one shape mean different things: heads that are taken for tokens."""
    views: tuple[View, ...]
    if isinstance(op, Attend | AttendBackward):
        views, wanted = (op.q, op.k, op.v), "bshd"
    elif isinstance(op, Merge | Delta):
        views, wanted = (op.out,), "bshd"
    elif isinstance(op, RmsNorm | RmsNormBackward):
        views, wanted = (op.x,), "bse"
    elif isinstance(op, Copy | Fold):
        views, wanted = (op.target.view,), program.buffers[op.source.view.buffer].dims
    elif isinstance(op, Accumulate):
        views, wanted = (op.source,), program.buffers[op.into.buffer].dims
    else:
        return ""
    for view in views:
        dims = program.buffers[view.buffer].dims
        if dims != wanted:
            return f"takes {wanted} for {dims} of buffer {program.buffers[view.buffer].name!r}"
    return ""


def _parts_problem(op: Copy | Fold) -> str:
    """Return where parts of one shape do not fall to parts of the other side."""
    source, target = op.source, op.target
    for split in (source, target):
        if not 0 <= split.dim < 3 or split.parts < 1 or split.view.shape[split.dim] % split.parts:
            return f"cuts {split.view.shape} along dimension {split.dim} into {split.parts} parts"
    if source.part_shape != target.part_shape:
        return f"takes parts {source.part_shape} for parts {target.part_shape}"
    if isinstance(op, Fold):
        return "" if source.parts % target.parts == 0 else f"sums {source.parts} parts into {target.parts}"
    order = op.order or range(source.parts)
    fits = len(order) == target.parts and all(0 <= part < source.parts for part in order)
    return "" if fits else f"takes parts {tuple(order)} of {source.parts} for {target.parts}"


def _gemm_problem(op: Gemm) -> str:
    """Return where the sides of a matrix product do not fit."""

    def width(view: View) -> int:
        return math.prod(view.shape[2:])

    if op.form == "tn":
        fits = op.out.shape == (width(op.a), width(op.b)) and op.a.shape[:2] == op.b.shape[:2]
    else:
        weight = op.b.shape if op.form == "nn" else op.b.shape[::-1]
        fits = weight == (width(op.a), width(op.out)) and op.a.shape[:2] == op.out.shape[:2]
    return "" if fits else f"multiplies {op.a.shape} with {op.b.shape} into {op.out.shape} ({op.form})"


def _differ(shape: tuple[int, ...], views: list[View] | tuple[View, ...]) -> str:
    """Return what to say of the first view that has another shape."""
    for view in views:
        if view.shape != shape:
            return f"has operands of shape {view.shape} where {shape} is needed"
    return ""


def _collision(op: Op, reads: tuple[View, ...], writes: tuple[View, ...], program: Program) -> str:
    """Return where an op writes to what it also reads or writes: the order within an op is nobody's promise.

    What is updated in place, the same view read and written, is what some ops are for.
    """
    if len({view.buffer for view in (*reads, *writes)}) == len(reads) + len(writes):
        return ""
    in_place = set(writes) if isinstance(op, Merge | Accumulate | AllReduce | Rope | Gemm) else set()
    pairs = [*combinations(writes, 2), *((a, b) for a in reads for b in writes if not (a == b and a in in_place))]
    for a, b in pairs:
        if a.buffer == b.buffer and overlap(a.slices, b.slices):
            return f"uses overlapping parts of buffer {program.buffers[a.buffer].name!r}; give it another buffer"
    return ""


def _message_problem(op: Communication, views: tuple[View, ...], program: Program) -> str:
    """Return where a message does not lie in one piece, or goes to its own rank; matching compares both sides."""
    for view in views:
        if not is_contiguous(view, program.buffers[view.buffer]):
            return "sends or receives a view with gaps; copy it into a buffer first"
    for split in _splits(op):
        if not parts_are_contiguous(split, program.buffers[split.view.buffer]):
            return f"cuts its view along dimension {split.dim}, which leaves gaps; copy first"
    if isinstance(op, Exchange) and any(peer == program.rank for peer, _ in (*op.sends, *op.recvs)):
        return "exchanges with its own rank; use a Copy"
    return ""


def _splits(op: Communication) -> list[Split]:
    """Return the splits that an op sends or receives."""
    if isinstance(op, AllToAll):
        return [op.sends, op.recvs]
    if isinstance(op, AllGather):
        return [op.recvs]
    if isinstance(op, ReduceScatter):
        return [op.sends]
    if isinstance(op, Exchange | AllReduce | Barrier):
        return []
    assert_never(op)


def port_problem(port: Port, program: Program, model: ModelSpec, batch: int) -> str:
    """Return where a port's view has not the shape of what it says it holds; empty if it has."""
    if problem := _view_problem(port.view, program):
        return problem
    dims = dict(zip(program.buffers[port.view.buffer].dims, port.view.shape, strict=True))
    wanted = {"b": batch, "s": num_tokens(port.tokens), "i": num_tokens(port.tokens), "h": port.heads.size}
    for dim, extent in dims.items():
        if dim in wanted and extent != wanted[dim]:
            return f"holds {extent} along {dim!r}, but says {wanted[dim]}"
    if ("h" in dims) != (heads_of(port.tensor, model) is not None):
        return f"has dims {''.join(dims)!r}, which are not those of {port.tensor}"
    return ""
