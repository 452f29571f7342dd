"""Causal linear attention: no softmax, so that all keys before a query come to it as one D x D state per head.

out_i = sum over j <= i of (q_i . k_j) v_j / sqrt(D) = q_i S_i with S_i = sum over j <= i of k_j^T v_j / sqrt(D). It is
another function than softmax attention, and what models make of it is not looked at here. Each rank has a contiguous
slice of tokens. It attends within it chunk by chunk (arXiv:2401.04658 §3), while states are handed from rank to rank:
each receives the sum of all before, adds its own and sends it on; then its queries read what has arrived
(arXiv:2404.02882 §3.2). Backward the gradient of the state goes the other way. What is sent does not grow with S.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from sim.base.errors import InputError
from sim.schedule.ir.layout import contiguous
from sim.schedule.ir.ops import (
    Accumulate,
    Exchange,
    HostSync,
    LinearAttend,
    LinearAttendBackward,
    Message,
    StateProduct,
    StateSum,
)
from sim.schedule.ir.program import Communicator, Schedule
from sim.schedule.ir.views import Category, View
from sim.schedule.model.layer import AttentionPlan, build_around
from sim.schedule.write.attention import Saved, Shard, all_heads, needs_forward
from sim.schedule.write.builder import ProgramBuilder
from sim.words.mesh import Mesh
from sim.words.options import OverlapOptions
from sim.words.workload import DTYPE_BYTES, Workload, accumulation_dtype


@dataclass(frozen=True, kw_only=True)
class LinearOptions(OverlapOptions):
    """Options of linear attention."""

    chunk: int = 256
    """Tokens between which scores are computed; all before them come as a state."""


def build(workload: Workload, mesh: Mesh, options: LinearOptions = LinearOptions()) -> Schedule:
    """Return linear attention along the axis ring; raises InputError for other masks than a causal one."""
    mesh.only("linear", "ring")
    other = workload.has_window or workload.documents or workload.block_mask or workload.pattern
    if workload.mask != "causal" or other:
        raise InputError(
            "schedule 'linear' has a causal mask, no other: leave out `mask`, `window`, `documents` and `block_mask`"
        )
    if options.chunk < 1:
        raise InputError(f"`set` schedule.chunk={options.chunk}: expected 1 or more tokens")
    needs_forward(workload, "linear attention, which keeps a state,")
    layout = contiguous(workload.seq, mesh.ring)
    prefix = Communicator(name="states", groups=mesh.groups("ring"))

    def shard(rank: int) -> Shard:
        return all_heads(workload.model, layout[mesh.place(rank)["ring"]])

    plan = AttentionPlan(
        name="linear",
        communicators=(prefix,) if mesh.ring > 1 else (),
        shard=shard,
        attention=lambda b: LinearAttention(b, prefix, shard(b.rank), options),
        wire_bytes=lambda work: _wire_bytes(work, mesh.ring),
        source="arXiv:2404.02882 §3.2: P-1 hops of a state; chunks as in arXiv:2401.04658",
        flops=lambda work: _flops(work, options.chunk, mesh.ring),
        computes="linear",
    )
    return build_around(plan, msgspec.structs.replace(workload, attention="linear"), mesh, options)


class LinearAttention:
    """Linear attention of one rank."""

    def __init__(self, builder: ProgramBuilder, prefix: Communicator, shard: Shard, options: LinearOptions) -> None:
        self._b = builder
        self._prefix = prefix
        ranks, at = prefix.group_of(builder.rank), prefix.position(builder.rank)
        self._before = ranks[at - 1] if at > 0 else None
        self._after = ranks[at + 1] if at + 1 < len(ranks) else None
        self._options = options
        self.saved_shard = shard

    def forward(self, q: View, k: View, v: View) -> tuple[View, Saved]:
        """Send the state of all keys until here on, attend to own ones meanwhile, then to those before."""
        b = self._b
        out = b.tensor("out", q.shape[1], q.shape[2], "saved")
        before = self._handed("state", (k, v), self._before, self._after, "saved")
        b.add(LinearAttend(label="attend own", q=q, k=k, v=v, out=out, chunk=self._options.chunk))
        if before is not None:
            b.add(StateProduct(label="attend before", x=q, state=before, into=out, transposed=False))
        return out, Saved(q, k, v, out, out, () if before is None else (before,))

    def backward(self, saved: Saved, dout: View) -> tuple[View, View, View]:
        """Send the state's gradient of all queries from here on back, and read what has arrived."""
        b, (q, k, v) = self._b, saved[:3]
        dq, dk, dv = (b.like(f"d{x}", view, "attention") for x, view in zip("qkv", (q, k, v), strict=True))
        after = self._handed("dstate", (q, dout), self._after, self._before, "attention")
        b.add(
            LinearAttendBackward(
                label="backward own", q=q, k=k, v=v, dout=dout, dq=dq, dk=dk, dv=dv, chunk=self._options.chunk
            )
        )
        for before in saved.more:
            b.add(StateProduct(label="dq before", x=dout, state=before, into=dq, transposed=True))
        if after is not None:
            b.add(StateProduct(label="dk after", x=v, state=after, into=dk, transposed=True))
            b.add(StateProduct(label="dv after", x=k, state=after, into=dv, transposed=False))
        return dq, dk, dv

    def _handed(
        self, name: str, factors: tuple[View, View], source: int | None, target: int | None, category: Category
    ) -> View | None:
        """Append the hand-over of a state; return what the source sends. With the own one it goes to the target."""
        b, model = self._b, self._b.workload.model
        shape = (b.batch.size, model.num_kv_heads, model.head_dim, model.head_dim)
        arrived = own = None
        if target is not None:
            own = b.buffer(f"own {name}", "bhdd", shape, b.sum_dtype, "communication")
            b.add(StateSum(label=f"sum {name}", a=factors[0], b=factors[1], state=own))
        if source is not None:
            arrived = b.buffer(f"{name} handed", "bhdd", shape, b.sum_dtype, category)
            self._move(f"receive {name}", recvs=(Message(source, arrived),))
        if own is not None and target is not None:
            if arrived is not None:
                b.add(Accumulate(label=f"add {name}", source=arrived, into=own))
            self._move(f"send {name}", sends=(Message(target, own),))
        return arrived

    def _move(self, label: str, sends: tuple[Message, ...] = (), recvs: tuple[Message, ...] = ()) -> None:
        self._b.add(Exchange(label=label, communicator=self._prefix.name, sends=sends, recvs=recvs))
        if not self._options.overlap:
            self._b.add(HostSync(label=f"wait for {label}", streams=(self._prefix.name,)))


def _wire_bytes(workload: Workload, size: int) -> int:
    """Over all ranks: P - 1 hops of a state of D x D numbers per key/value head, in each pass."""
    model, wide = workload.model, DTYPE_BYTES[accumulation_dtype(workload.dtype)]
    state = workload.batch * model.num_kv_heads * model.head_dim**2 * wide
    return (size - 1) * state * (workload.forward + workload.backward)


def _flops(workload: Workload, chunk: int, size: int) -> int:
    """Return what all ranks compute, scores of chunks as whole squares: see ``derive.kernels.linear_flops``."""
    model, rows = workload.model, workload.seq // size
    heads, kv_heads = model.num_heads, model.num_kv_heads
    each, full = 2 * model.head_dim**2 * rows, rows // chunk
    scores = 2 * model.head_dim * (full * chunk**2 + (rows - full * chunk) ** 2)
    forward = size * (heads * (2 * scores + each) + kv_heads * each) + (size - 1) * (heads + kv_heads) * each
    backward = size * (heads * (5 * scores + 2 * each) + 3 * kv_heads * each)
    backward += (size - 1) * 2 * (heads + kv_heads) * each
    return workload.batch * (forward * workload.forward + backward * workload.backward)
