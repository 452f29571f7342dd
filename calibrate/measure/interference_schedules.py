"""Schedules that measure interference between kernels and transfers: the same ops twice, with every kernel once after a
transfer and once during it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, assert_never

import msgspec

from sim.schedule.derive.kernels import KernelUse, kernel_use
from sim.schedule.ir.declare import rebound
from sim.schedule.ir.masks import CAUSAL, FULL, Span
from sim.schedule.ir.ops import AllReduce, AllToAll, Attend, Exchange, Kernel, Merge, Message, Op
from sim.schedule.ir.program import Communicator, Header, Program, Schedule
from sim.schedule.ir.views import Split
from sim.schedule.methods import single
from sim.schedule.write.builder import ProgramBuilder
from sim.words.mesh import Mesh
from sim.words.workload import DTYPE_BYTES, Dtype, ModelSpec, Workload

Transfer = Literal["exchange", "all_to_all", "all_reduce", "offload", "fetch"]
AMONG_RANKS: tuple[Transfer, ...] = ("exchange", "all_to_all", "all_reduce")
"""The others are copies between one rank and its host."""

_TOKENS = 1024
_TRANSFER_BYTES = 2**24


class Place(NamedTuple):
    """A pair of a kernel and a transfer."""

    use: KernelUse
    transfer: int
    """Number of the transfer's op, in both schedules."""

    def kernel(self, *, overlapped: bool) -> int:
        """Return the number of the kernel's op: right after the transfer's, or after the one that waits for it."""
        return self.transfer + (1 if overlapped else 2)


class InterferenceSchedules(NamedTuple):
    """Two schedules that differ only in whether kernels wait for the transfer issued before them."""

    sequential: Schedule
    overlapped: Schedule
    places: list[Place]
    """One for every kernel and variant that a layer, a ring and Ulysses run."""


def interference_schedules(transfer: Transfer, ranks: int, model: ModelSpec, dtype: Dtype) -> InterferenceSchedules:
    """Return the schedules of one kind of transfer, among all ranks or of each to its host."""
    workload = Workload(model=model, seq=_TOKENS, dtype=dtype, scope="layer")
    link = Communicator(name="link", groups=(tuple(range(ranks)),))
    mesh = Mesh(ring=ranks)
    header = Header(name=f"kernels during {transfer}", workload=workload, mesh=mesh, communicators=(link,))

    def schedule(*, overlapped: bool) -> Schedule:
        return Schedule(header, lambda rank: _program(rank, transfer, workload, link, overlapped=overlapped)[0])

    places = _program(0, transfer, workload, link, overlapped=False)[1]
    return InterferenceSchedules(schedule(overlapped=False), schedule(overlapped=True), places)


def _program(
    rank: int, transfer: Transfer, workload: Workload, link: Communicator, *, overlapped: bool
) -> tuple[Program, list[Place]]:
    """Return a rank's program and its places: the kernels of a layer and others, the first of each with a transfer."""
    own = _own(rank, transfer, workload, link)
    layer = single.build(workload, Mesh()).program(0)
    number = {buffer: len(own.buffers) + buffer for buffer in range(len(layer.buffers))}
    fill, moving, waiting, *others = own.ops
    given = own.replace(
        buffers=(*own.buffers, *layer.buffers),
        inputs=(*own.inputs, *(port.rebound(number) for port in layer.inputs)),
    )
    places: dict[tuple[str, str], Place] = {}
    ops: list[Op] = [fill]
    for op in (*(rebound(op, number) for op in layer.ops), *others):
        assert isinstance(op, Kernel)
        use = kernel_use(op, given)
        kind = (use.kernel, use.variant)
        if kind in places:
            ops.append(op)
            continue
        places[kind] = Place(use, len(ops))
        meeting = msgspec.structs.replace(moving, label=f"{transfer} and {' '.join(kind)}")
        ops += [meeting, op, waiting] if overlapped else [meeting, waiting, op]
    return given.replace(ops=tuple(ops)), list(places.values())


def _own(rank: int, transfer: Transfer, workload: Workload, link: Communicator) -> Program:
    """Return a program that fills a buffer, moves it and waits until it may be read or written again, with the kernels
    that no layer has: a copy, attention without a mask, and a merge.
    """
    model, tokens, ranks = workload.model, workload.seq, len(link.groups[0])
    row_bytes = model.num_heads * model.head_dim * DTYPE_BYTES[workload.dtype]
    heads, kv_heads, sent = Span(0, model.num_heads), Span(0, model.num_kv_heads), _TRANSFER_BYTES // row_bytes
    b = ProgramBuilder(rank, workload)
    given = b.input("dq", (Span(0, max(sent // ranks, 1) * ranks),), heads)
    taken = b.like("taken", given, "communication")
    awaited = (taken[:, :1], b.like("awaited", taken[:, :1], "attention"))
    if transfer == "fetch":
        there = b.elsewhere(given, "host")
        b.host_copy(given, there, "fill")
    else:
        b.copy(given, taken, "fill")
    if transfer == "exchange":
        b.add(
            Exchange(
                label=transfer,
                communicator=link.name,
                sends=(Message((rank + 1) % ranks, given),),
                recvs=(Message((rank - 1) % ranks, taken),),
            )
        )
    elif transfer == "all_to_all":
        b.add(
            AllToAll(label=transfer, communicator=link.name, sends=Split(given, 1, ranks), recvs=Split(taken, 1, ranks))
        )
    elif transfer == "all_reduce":
        b.add(AllReduce(label=transfer, communicator=link.name, view=taken))
    elif transfer == "offload":
        b.host_copy(taken, b.elsewhere(given, "host"), transfer)
        awaited = (given[:, :1], taken[:, :1])
    elif transfer == "fetch":
        b.host_copy(there, taken, transfer)
    else:
        assert_never(transfer)
    b.copy(*awaited, "await")
    b.copy(given, b.like("copied", given, "attention"), "copy")
    halves = (Span(0, tokens // 2), Span(tokens // 2, tokens))
    q = b.input("q", halves[1:], heads)
    parts = []
    for half, band in zip(halves, (FULL, CAUSAL), strict=True):
        k, v = b.input("k", (half,), kv_heads), b.input("v", (half,), kv_heads)
        out, lse = b.like("out", q, "attention"), b.lse("lse", q.shape[1], model.num_heads, "attention")
        b.add(Attend(label="attend", q=q, k=k, v=v, out=out, lse=lse, band=band))
        parts.append((out, lse))
    b.add(Merge(label="merge", out=parts[0][0], lse=parts[0][1], into_out=parts[1][0], into_lse=parts[1][1]))
    return b.build()
