"""Communication of one rank over torch.distributed: a process group per communicator and group of ranks.

Buffers are contiguous (``check`` proves it) and no rank sends to itself, which gloo cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, assert_never

import torch
import torch.distributed as dist

from runtime.execution.tensors import Storage
from sim.schedule.ir.ops import AllGather, AllReduce, AllToAll, Barrier, Collective, Exchange, ReduceScatter
from sim.schedule.ir.program import Communicator
from sim.schedule.ir.views import Split, View

_NO_LIMIT = timedelta(0)
"""Of a wait beyond that of its group."""


class Groups:
    """The process groups of one schedule. Every rank makes them all, in the same order; a rank that is the only one of
    its group needs none.
    """

    def __init__(self, communicators: Iterable[Communicator], rank: int, limit: timedelta | None) -> None:
        self._mine: dict[str, dist.ProcessGroup] = {}
        for communicator in communicators:
            for ranks in communicator.groups:
                if len(ranks) == 1:
                    continue
                group = dist.new_group(list(ranks), timeout=limit)
                if rank in ranks:
                    self._mine[communicator.name] = group

    def close(self) -> None:
        """Give the process groups back."""
        for group in self._mine.values():
            dist.destroy_process_group(group)

    def bind(self, op: Exchange | Collective, storage: Storage) -> Callable[[], list[dist.Work]]:
        """Return what begins a communication op on the tensors that its views are now; it returns what to wait for.

        Receive buffers are taken here, in the order of issue, whenever the op begins.
        """
        group = self._mine.get(op.communicator)
        if group is None:
            return _alone(op, storage)
        if isinstance(op, Exchange):
            sent = [(_given(storage, message.view), message.peer) for message in op.sends]
            received = [(_taken(storage, message.view), message.peer) for message in op.recvs]
            calls = _messages(sent, received, group)
            if op.num_messages == 1:  # a call by itself, in a group of its two ranks where it has one
                return lambda: [calls[0].op(calls[0].tensor, calls[0].peer, group)]
            return lambda: dist.batch_isend_irecv(calls) if calls else []
        if isinstance(op, AllToAll):
            into, parts = _parts(op.recvs, storage, _taken), _parts(op.sends, storage, _given)
            return lambda: _all_to_all(into, parts, group)
        if isinstance(op, AllGather):
            given = _given(storage, op.send)
            if op.recvs.sizes or (op.recvs.parts == 2 and _is_gloo(group)):  # gloo refuses sizes, and see _messages
                into = _parts(op.recvs, storage, _taken)
                return lambda: _all_to_all(into, [given] * len(into), group)
            out = _taken(storage, op.recvs.view)
            return lambda: [_all_gather(out, given, group=group, async_op=True)]
        if isinstance(op, ReduceScatter):
            out = _taken(storage, op.recv)
            if op.sends.sizes:  # which neither gloo nor NCCL sums in one call
                parts = _parts(op.sends, storage, _given)
                return lambda: [_SumOfParts(out, parts, group)]
            whole = _given(storage, op.sends.view)
            return lambda: [_reduce_scatter(out, whole, group=group, async_op=True)]
        if isinstance(op, AllReduce):
            both = _given(storage, op.view)
            by = dist.ReduceOp.MAX if op.largest else dist.ReduceOp.SUM
            return lambda: [dist.all_reduce(both, op=by, group=group, async_op=True)]
        if isinstance(op, Barrier):
            return lambda: [dist.barrier(group=group, async_op=True)]
        assert_never(op)


def _given(storage: Storage, view: View) -> torch.Tensor:
    """Return what is sent of a view, as it lies in memory."""
    return storage.flat(view, storage.read(view))


def _taken(storage: Storage, view: View) -> torch.Tensor:
    """Return where a view is received, as it lies in memory."""
    return storage.flat(view, storage.write(view))


def _parts(split: Split, storage: Storage, take: Callable[[Storage, View], torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the parts of a view as flat tensors of the one that ``take`` returns of it."""
    sizes = [math.prod(split.part(number).shape) for number in range(split.parts)]
    return take(storage, split.view).split(sizes)


def _is_gloo(group: dist.ProcessGroup) -> bool:
    return dist.get_backend(group) == "gloo"


def _messages(
    sent: Sequence[tuple[torch.Tensor, int]], received: Sequence[tuple[torch.Tensor, int]], group: dist.ProcessGroup
) -> list[dist.P2POp]:
    """Return the calls of an exchange, of tensors and peers. Receives come first: gloo tells a sender that it may begin
    on the connection by which it sends itself. Behind a large message that note made two ranks send in turns (2 MB each
    way at 50 Mbit/s took 0.60 s for 0.35 s).
    """
    calls = [dist.P2POp(dist.irecv, tensor, peer, group) for tensor, peer in received]
    return calls + [dist.P2POp(dist.isend, tensor, peer, group) for tensor, peer in sent]


def _all_to_all(
    out: Sequence[torch.Tensor], given: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Begin an all-to-all of flat parts, one for and from each rank of the group. On gloo it is messages, as NCCL makes
    it: gloo's own call sends first (see ``_messages``).
    """
    if not _is_gloo(group):
        return [dist.all_to_all(list(out), list(given), group=group, async_op=True)]
    ranks, own = dist.get_process_group_ranks(group), dist.get_rank(group)
    out[own].copy_(given[own])
    after = [(own + step) % len(ranks) for step in range(1, len(ranks))]
    sent = [(given[other], ranks[other]) for other in after if given[other].numel()]
    received = [(out[other], ranks[other]) for other in reversed(after) if out[other].numel()]
    calls = _messages(sent, received, group)
    return dist.batch_isend_irecv(calls) if calls else []


def _alone(op: Exchange | Collective, storage: Storage) -> Callable[[], list[dist.Work]]:
    """Return what does a communication op in a group of one rank, which has no peer: at most a copy."""
    if isinstance(op, Exchange | AllReduce | Barrier):
        return list
    target, source = _taken(storage, op.writes[0]), _given(storage, op.reads[0])

    def copy() -> list[dist.Work]:
        target.copy_(source, non_blocking=True)
        return []

    return copy


def _all_gather(out: torch.Tensor, given: torch.Tensor, **options: Any) -> dist.Work:
    """Gather into one tensor. torch 2.13 renamed this call and deprecates the older name, the only one before."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(out, given, **options)


def _reduce_scatter(out: torch.Tensor, given: torch.Tensor, **options: Any) -> dist.Work:
    """Reduce and scatter one tensor; as ``_all_gather``."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(out, given, **options)


class _SumOfParts(dist.Work):
    """A reduce-scatter of parts of several sizes: every rank is sent its own ones, and sums them."""

    def __init__(self, out: torch.Tensor, given: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        self._out, self._parts = out, out.new_empty(len(given), out.numel())
        super().__init__()
        self._work = _all_to_all(self._parts.unbind(), given, group)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Wait for all parts; the sum follows on the same stream."""
        done = [work.wait(timeout) for work in self._work]
        torch.sum(self._parts, dim=0, out=self._out)
        return all(done)


def start_together(ranks: int, device: torch.device) -> None:
    """Return on all ranks at nearly the same time."""
    if ranks > 1:
        together = torch.zeros(1, device=device)
        dist.all_reduce(together)
        together.item()  # on CUDA the host has to wait, too
