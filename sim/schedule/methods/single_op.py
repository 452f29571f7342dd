"""One op by itself, on every rank at once: attention of some queries to some keys, or communication of some bytes.

What others have timed of a step, or in a microbenchmark, is compared with it
(``experiments.evidence.papers.published``).
"""

from __future__ import annotations

import msgspec

from sim.base.errors import InputError
from sim.schedule.ir import ops
from sim.schedule.ir.masks import Span, mask_of
from sim.schedule.ir.program import Communicator, Header, Program, Schedule
from sim.schedule.ir.views import TOKENS, Data, Split, View
from sim.schedule.write.attention import all_heads
from sim.schedule.write.blocks import blocks
from sim.schedule.write.builder import ProgramBuilder
from sim.words.mesh import AXES, Mesh
from sim.words.workload import DTYPE_BYTES, Count, Workload


class Attended(Data, frozen=True, kw_only=True):
    """How large attention is. The last query and the last key are the same token, as where keys are cached."""

    queries: Count
    keys: Count


class Sent(Data, frozen=True, kw_only=True):
    """How large communication is: the whole tensor on each rank, so what an exchange sends, a reduce-scatter is given
    and an all-gather receives; of an all-to-all with the part that stays.
    """

    nbytes: Count


Size = Attended | Sent

ALONE: dict[str, type[Size]] = {
    "Attend": Attended,
    "AttendBackward": Attended,
    "Exchange": Sent,
    "AllToAll": Sent,
    "AllGather": Sent,
    "ReduceScatter": Sent,
    "AllReduce": Sent,
}
"""Kinds of op that can be played alone, and what says how large they are."""


def build(kind: str, size: Size, workload: Workload, mesh: Mesh) -> Schedule:
    """Return a schedule of one op on every rank; raises InputError where bytes do not divide among the ranks."""
    everyone = Communicator(name="everyone", groups=mesh.groups(*AXES))
    if isinstance(size, Attended):
        workload = msgspec.structs.replace(workload, seq=max(size.queries, size.keys))
    else:
        _check_parts(kind, size.nbytes, workload, mesh.size)

    def program(rank: int) -> Program:
        b = ProgramBuilder(rank, workload)
        if isinstance(size, Attended):
            _attend(b, kind, size)
        else:
            shape = (1, size.nbytes // DTYPE_BYTES[workload.dtype], 1)
            given, taken = (b.buffer(x, "bse", shape, workload.dtype, "communication") for x in ("given", "taken"))
            b.add(ops.Zero(label="something to send", into=given))
            communicate(b, kind, everyone, given, taken, kind)
        return b.build()

    header = Header(name=kind, workload=workload, mesh=mesh, communicators=(everyone,))
    return Schedule(header, program)


def _check_parts(kind: str, nbytes: int, workload: Workload, ranks: int) -> None:
    """Raise InputError where there is nobody to send to, or no part for each."""
    if ranks == 1:
        raise InputError(f"{kind} takes 2 GPUs or more: set gpus")
    multiple = DTYPE_BYTES[workload.dtype] * (1 if kind in {"Exchange", "AllReduce"} else ranks)
    if nbytes % multiple:
        raise InputError(f"nbytes {nbytes}: {kind} in {workload.dtype} on {ranks} GPUs takes multiples of {multiple}")


def _attend(b: ProgramBuilder, kind: str, size: Attended) -> None:
    """Append attention, or its backward pass, of the last queries to the last keys of a sequence."""
    end = b.workload.seq
    queries, keys = (Span(end - size.queries, end),), (Span(end - size.keys, end),)
    _, heads, kv_heads = all_heads(b.workload.model, queries)
    q, k, v = b.input("q", queries, heads), b.input("k", keys, kv_heads), b.input("v", keys, kv_heads)
    (block,) = blocks(mask_of(b.workload), queries, keys)
    q, k, v = q[:, block.rows], k[:, block.columns], v[:, block.columns]
    if kind == "Attend":
        out, lse = b.like("out", q, "attention"), b.lse("lse", q.shape[TOKENS], heads.size, "attention")
        b.add(
            ops.Attend(
                label=kind,
                q=q,
                k=k,
                v=v,
                out=out,
                lse=lse,
                **block.kept,
            )
        )
        return
    b.part = "backward"
    out, dout = (b.input(x, queries, heads)[:, block.rows] for x in ("out", "dout"))
    lse = b.input("lse", queries, heads)[:, :, block.rows]
    dq, dk, dv = (b.like(f"d{x}", view, "attention") for x, view in zip("qkv", (q, k, v), strict=True))
    b.add(
        ops.AttendBackward(
            label=kind,
            q=q,
            k=k,
            v=v,
            out=out,
            lse=lse,
            dout=dout,
            dq=dq,
            dk=dk,
            dv=dv,
            **block.kept,
        )
    )


def communicate(b: ProgramBuilder, kind: str, over: Communicator, given: View, taken: View, label: str) -> None:
    """Append one kind of communication among the ranks of a group, each of which has ``given`` and gets ``taken``, or
    part of it; an exchange sends to the next rank. A sum of all is made in ``taken``, of a copy.
    """
    ranks = over.group_of(b.rank)
    size, at = len(ranks), over.position(b.rank)
    part = slice(0, given.shape[TOKENS] // size)
    if kind == "Exchange":
        sends, recvs = ops.Message(ranks[(at + 1) % size], given), ops.Message(ranks[at - 1], taken)
        b.add(ops.Exchange(label=label, communicator=over.name, sends=(sends,), recvs=(recvs,)))
    elif kind == "AllToAll":
        b.add(
            ops.AllToAll(
                label=label, communicator=over.name, sends=Split(given, TOKENS, size), recvs=Split(taken, TOKENS, size)
            )
        )
    elif kind == "AllGather":
        b.add(ops.AllGather(label=label, communicator=over.name, send=given[:, part], recvs=Split(taken, TOKENS, size)))
    elif kind == "ReduceScatter":
        b.add(
            ops.ReduceScatter(
                label=label, communicator=over.name, sends=Split(given, TOKENS, size), recv=taken[:, part]
            )
        )
    else:
        assert kind == "AllReduce", kind
        b.copy(given, taken, "copy")
        b.add(ops.AllReduce(label=label, communicator=over.name, view=taken))
