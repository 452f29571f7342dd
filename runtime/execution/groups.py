"""Communication of one rank over torch.distributed: a process group per communicator and group of ranks.

Buffers are contiguous (``check`` proves it) and no rank sends to itself, which gloo cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, assert_never

import torch
import torch.distributed as dist

from runtime.execution.tensors import Storage
from sim.schedule.ir.ops import AllGather, AllReduce, AllToAll, Barrier, Collective, Exchange, ReduceScatter
from sim.schedule.ir.program import Communicator
from sim.schedule.ir.views import Split

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
            sent = [(storage.read(message.view), message.peer) for message in op.sends]
            received = [(storage.write(message.view), message.peer) for message in op.recvs]
            calls = [dist.P2POp(dist.isend, tensor, peer, group) for tensor, peer in sent]
            calls += [dist.P2POp(dist.irecv, tensor, peer, group) for tensor, peer in received]
            if op.num_messages == 1:  # a call by itself, in a group of its two ranks where it has one
                return lambda: [calls[0].op(calls[0].tensor, calls[0].peer, group)]
            return lambda: dist.batch_isend_irecv(calls) if calls else []
        if isinstance(op, AllToAll):
            out, given = storage.write(op.recvs.view).view(-1), storage.read(op.sends.view).view(-1)
            taken, each = (_part_elements(side) if side.sizes else None for side in (op.recvs, op.sends))
            return lambda: [dist.all_to_all_single(out, given, taken, each, group=group, async_op=True)]
        if isinstance(op, AllGather):
            out, given = storage.write(op.recvs.view).view(-1), storage.read(op.send).view(-1)
            if op.recvs.sizes:  # which gloo's all-gather does not take
                n, taken = op.recvs.parts, _part_elements(op.recvs)
                each = [given.numel()] * n
                return lambda: [dist.all_to_all_single(out, given.repeat(n), taken, each, group=group, async_op=True)]
            return lambda: [_all_gather(out, given, group=group, async_op=True)]
        if isinstance(op, ReduceScatter):
            out, given = storage.write(op.recv).view(-1), storage.read(op.sends.view).view(-1)
            if op.sends.sizes:  # which neither gloo nor NCCL sums in one call
                return lambda: [_SumOfParts(out, given, _part_elements(op.sends), group)]
            return lambda: [_reduce_scatter(out, given, group=group, async_op=True)]
        if isinstance(op, AllReduce):
            both = storage.read(op.view)
            return lambda: [dist.all_reduce(both, group=group, async_op=True)]
        if isinstance(op, Barrier):
            return lambda: [dist.barrier(group=group, async_op=True)]
        assert_never(op)


def _alone(op: Exchange | Collective, storage: Storage) -> Callable[[], list[dist.Work]]:
    """Return what does a communication op in a group of one rank, which has no peer: at most a copy."""
    if isinstance(op, Exchange | AllReduce | Barrier):
        return list
    target, source = storage.write(op.writes[0]).view(-1), storage.read(op.reads[0]).view(-1)

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

    def __init__(self, out: torch.Tensor, given: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> None:
        self._out, self._parts = out, given.new_empty(len(sizes), out.numel())
        super().__init__()
        own = [out.numel()] * len(sizes)
        self._work = dist.all_to_all_single(self._parts.view(-1), given, own, sizes, group=group, async_op=True)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Wait for all parts; the sum follows on the same stream."""
        done = self._work.wait(timeout)
        torch.sum(self._parts, dim=0, out=self._out)
        return done


def _part_elements(split: Split) -> list[int]:
    """Return how many elements each part has."""
    return [math.prod(split.part(number).shape) for number in range(split.parts)]


def start_together(ranks: int, device: torch.device) -> None:
    """Return on all ranks at nearly the same time."""
    if ranks > 1:
        together = torch.zeros(1, device=device)
        dist.all_reduce(together)
        together.item()  # on CUDA the host has to wait, too
