"""Attention on one device: no communication. The baseline, and the reference of every other schedule."""

from __future__ import annotations

from sim.errors import InputError
from sim.schedule.accumulate import SoftmaxAccumulator
from sim.schedule.attention import Saved, Shard, all_heads
from sim.schedule.builder import ProgramBuilder
from sim.schedule.ir import Schedule
from sim.schedule.layer import AttentionPlan, build_around
from sim.schedule.layout import contiguous
from sim.schedule.masks import MASKS
from sim.schedule.views import View
from sim.workload import Parallel, Workload


def build(workload: Workload, parallel: Parallel) -> Schedule:
    """Return the schedule of one device; raises InputError for more than one rank."""
    if parallel.num_ranks != 1:
        raise InputError(f"schedule 'single' runs on 1 GPU, not on {parallel.num_ranks}: set --gpus 1")
    local = all_heads(workload.model, contiguous(workload.seq, 1)[0])
    plan = AttentionPlan(
        name="single",
        communicators=(),
        shard=lambda _: local,
        attention=lambda b: SingleAttention(b, local),
        wire_bytes=0,
        source="arXiv:2307.08691 §4.1",
    )
    return build_around(plan, workload, parallel)


class SingleAttention:
    """Attention of all queries to all keys in one kernel."""

    def __init__(self, builder: ProgramBuilder, shard: Shard) -> None:
        self._b = builder
        self.saved_shard = shard

    def forward(self, q: View, k: View, v: View) -> tuple[View, Saved]:
        """See DistributedAttention."""
        softmax = SoftmaxAccumulator(self._b, q, num_blocks=1)
        softmax.attend(k, v, MASKS[self._b.workload.mask], "all")
        return softmax.out, Saved(q, k, v, softmax.out, softmax.lse)

    def backward(self, saved: Saved, dout: View) -> tuple[View, View, View]:
        """See DistributedAttention."""
        b = self._b
        grads = (
            b.like("dq", saved.q, "attention"),
            b.like("dk", saved.k, "attention"),
            b.like("dv", saved.v, "attention"),
        )
        b.attend_backward(saved, dout, grads, MASKS[b.workload.mask], "attend backward")
        return grads
