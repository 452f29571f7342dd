"""What issuing an op costs a host thread."""

from __future__ import annotations

import math

from sim.engine.costs.kernels import KernelCosts
from sim.engine.costs.on_host import HOST_COPY_KINDS
from sim.schedule.derive.kernels import KernelUse
from sim.schedule.ir.ops import Collective, Exchange, Family, Hold, HostCopy, HostSync, Op
from sim.words.profile import SLICE_BACK, Issue, Profile
from topology.cluster import Cluster

COPY_LAUNCHES = 2
"""Calls of CUDA for a message by copy engines, on each side: an event that orders it behind what was issued before, and
the copy (TransformerEngine common/comm_gemm_overlap/userbuffers, userbuffers_send) or the wait for its flag
(userbuffers_recv; torch distributed/_symmetric_memory, a barrier and a copy): from memory."""

_OF_MODULES = frozenset[Family](("matrix product", "norm, rope, SwiGLU"))


def of_module(op: Op) -> bool:
    """Return whether an op is a kernel of a layer's modules, and neither attention nor a sum."""
    return op.meta.family in _OF_MODULES


class IssueCosts:
    """By a profile's entries; what it has none of takes a launch."""

    def __init__(self, cluster: Cluster, profile: Profile | None, kernels: KernelCosts) -> None:
        self._cluster, self._profile, self._kernels = cluster, profile, kernels

    def seconds(self, op: Op, use: KernelUse | None, among: int = 1) -> float:
        """Return what issuing an op costs the host thread: of a loop all of its kernels, before the first one runs; of
        a collective ``among`` so many ranks also what they check.
        """
        if use and (each := self._kernels.run(use)):
            return math.fsum(self.seconds(op, kernel) * count for kernel, count in each)
        if isinstance(op, Hold):
            return 0.0
        issue = self._profile.issue if self._profile else {}
        if isinstance(op, Exchange) and op.by_copies:
            return COPY_LAUNCHES * op.num_messages * self._cluster.spec.gpu.launch_s
        if isinstance(op, Exchange) and op.num_messages > 1:
            return self._of_entry(issue.get("exchange")) + op.num_messages * self._of_entry(issue.get("message"), 0.0)
        if isinstance(op, HostSync) and op.calls:
            return op.calls * self._of_entry(issue.get("kernel"))
        if isinstance(op, Collective):
            check_s = self._profile.check_s if self._profile else 0.0
            return self._of_entry(issue.get(op.name)) + among * check_s
        kind = use.kernel if use else _kind(op)
        back_s = self._of_entry(issue.get(SLICE_BACK), 0.0) if use and use.into_slice else 0.0
        return self._of_entry(issue.get(kind, issue.get("kernel") if use else None)) + back_s + self.python_s(op, use)

    def python_s(self, op: Op, use: KernelUse | None) -> float:
        """Return what of that is the Python around kernels of eager modules, which are those without an entry."""
        eager = self._profile.eager if self._profile else None
        if not self._profile or eager is None or use is None or not of_module(op):
            return 0.0
        if each := self._kernels.run(use):
            return math.fsum(self.python_s(op, kernel) * count for kernel, count in each)
        if use.kernel in self._profile.issue:
            return 0.0
        return eager.forward_s if op.part == "forward" else eager.backward_s

    def _of_entry(self, issue: Issue | None, unknown: float = 1.0) -> float:
        """Return what the host takes for one entry of a profile; where it has none, so many launches."""
        launch_s = self._cluster.spec.gpu.launch_s
        if issue is None:
            return unknown * launch_s
        each_s = self._of_entry(self._profile.issue.get("kernel")) if self._profile and issue.kernels else 0.0
        return issue.host_s + issue.launches * launch_s + issue.kernels * each_s


def _kind(op: Op) -> str:
    """Return what the issue of an op that is no kernel is called in profiles; empty if it is in none."""
    if isinstance(op, HostCopy):
        return HOST_COPY_KINDS["host"][op.stream]
    return "call" if isinstance(op, Exchange) else op.meta.kernel
