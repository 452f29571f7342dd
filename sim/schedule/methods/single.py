"""Attention on one device: no communication. The baseline, and what every head-parallel schedule does inside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sim.base.errors import InputError
from sim.schedule.ir.layout import contiguous
from sim.schedule.ir.masks import Band, Documents, mask_of
from sim.schedule.ir.ops import Attend, AttendBackward
from sim.schedule.ir.program import Schedule
from sim.schedule.ir.views import View
from sim.schedule.model.layer import AttentionPlan, build_around
from sim.schedule.write.attention import Saved, Shard, all_heads, attention_flops, needs_forward
from sim.schedule.write.blocks import blocks
from sim.schedule.write.builder import ProgramBuilder
from sim.words.mesh import Mesh
from sim.words.options import AttentionName, LayerOptions
from sim.words.workload import Workload

_SOURCES: dict[AttentionName, str] = {
    "flash": "arXiv:2307.08691 §4.1",
    "memory-efficient": "arXiv:2112.05682 §3",
    "standard": "arXiv:2205.14135 §3.1 (standard attention)",
}


@dataclass(frozen=True, kw_only=True)
class SingleOptions(LayerOptions):
    """Options of one device."""

    kernel: AttentionName = "flash"
    """How it attends: fused; in chunks of keys, unfused (arXiv:2112.05682); or with all scores written out."""


def build(workload: Workload, mesh: Mesh, options: SingleOptions = SingleOptions()) -> Schedule:
    """Return the schedule of one device, or of replicas of it; raises InputError for other axes."""
    mesh.only("single")
    kernel = options.kernel
    if kernel != "flash" and (beside := _only_flash(workload)):
        raise InputError(
            f"`set` schedule.kernel={kernel}: {beside} is computed by flash attention alone; leave it out, or choose "
            f"another `model` or mask"
        )
    if kernel == "standard":
        needs_forward(workload, "standard attention, which keeps its probabilities,")

    def plan(work: Workload) -> AttentionPlan:
        local = all_heads(work.model, contiguous(work.seq, 1)[0])
        return AttentionPlan(
            name="single",
            communicators=(),
            shard=lambda _: local,
            attention=lambda b: SingleAttention(b, local, kernel),
            wire_bytes=lambda _: 0,
            source=_SOURCES[kernel],
            flops=lambda work: attention_flops(work, kernel),
        )

    return build_around(plan, workload, mesh, options)


def _only_flash(workload: Workload) -> str:
    """Return what of a workload no other kernel computes, empty where there is nothing."""
    if workload.model.attention_softcap:
        return f"the soft-cap of scores of {workload.model.name}"
    masks = [mask_of(form) for form in workload.forms]
    if all(isinstance(mask, Band) for mask in masks):
        return ""
    if workload.pattern:
        return f"the `mask` {workload.pattern}"
    return "what `documents` keep apart" if any(isinstance(mask, Documents) for mask in masks) else "a `block_mask`"


class SingleAttention:
    """Attention of all queries to all keys in one kernel."""

    def __init__(self, builder: ProgramBuilder, shard: Shard, kernel: AttentionName = "flash") -> None:
        self._b = builder
        whole = contiguous(builder.workload.seq, 1)[0]
        mask = mask_of(builder.workload)
        self._kept: dict[str, Any] = {"band": mask} if isinstance(mask, Band) else blocks(mask, whole, whole)[0].kept
        self._kernel = kernel
        self.saved_shard = shard

    def forward(self, q: View, k: View, v: View) -> tuple[View, Saved]:
        """See DistributedAttention."""
        b, (batch, tokens, heads, _) = self._b, q.shape
        out, lse = b.tensor("out", tokens, heads, "saved"), b.lse("lse", tokens, heads, "saved")
        probs = None
        if self._kernel == "standard":
            probs = b.buffer("probs", "bhst", (batch, heads, tokens, k.shape[1]), b.workload.dtype, "saved")
        b.add(
            Attend(
                label="attend all",
                q=q,
                k=k,
                v=v,
                out=out,
                lse=lse,
                kernel=self._kernel,
                probs=probs,
                **self._kept,
            )
        )
        return out, Saved(q, k, v, out, lse, () if probs is None else (probs,))

    def backward(self, saved: Saved, dout: View) -> tuple[View, View, View]:
        """See DistributedAttention."""
        b = self._b
        dq, dk, dv = (b.like(f"d{x}", view, "attention") for x, view in zip("qkv", saved[:3], strict=True))
        probs = saved.more[0] if saved.more else None
        b.add(
            AttendBackward(
                label="backward all",
                q=saved.q,
                k=saved.k,
                v=saved.v,
                out=saved.out,
                lse=saved.lse,
                dout=dout,
                dq=dq,
                dk=dk,
                dv=dv,
                kernel=self._kernel,
                probs=probs,
                **self._kept,
            )
        )
        return dq, dk, dv
