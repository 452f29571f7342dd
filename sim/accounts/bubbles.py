"""The bubbles of a pipeline: when a stage has nothing to do until another one hands something on, or ends its step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

from sim.accounts.memory import MemoryWalk
from sim.accounts.reserved import Reserved
from sim.accounts.trace import Times, Trace
from sim.schedule.ir.ops import KINDS
from sim.schedule.ir.program import Communicator, Header
from sim.words.mesh import Mesh


class Stage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stage of a pipeline."""

    bubbles: float
    """Share of the step in which its ranks wait for other stages and do nothing else, on average."""
    peak_hbm_bytes: int
    """Of its rank that needs most."""
    peak_reserved: Reserved | None = None
    """What the allocator reserves for that one, where it is known."""


def stages_of(
    trace: Trace, walked: list[MemoryWalk], header: Header, reserved: Sequence[Reserved] = ()
) -> tuple[Stage, ...]:
    """Return the stages of a pipeline, by the walks of the ranks of a trace, and by what is reserved on each, where
    that is known; none where there is one.
    """
    mesh = header.mesh
    if mesh.pp == 1:
        return ()
    waits, ranks = bubbles_s(trace, header), list[list[int]]([] for _ in range(mesh.pp))
    for at, number in enumerate(trace.numbers):
        ranks[mesh.place(number)["pp"]].append(at)
    return tuple(
        Stage(
            bubbles=float(np.mean(waits[own])) / trace.step_time_s if trace.step_time_s else 0.0,
            peak_hbm_bytes=max(walked[rank].peak_bytes for rank in own),
            peak_reserved=reserved[stage] if reserved else None,
        )
        for stage, own in enumerate(ranks)
    )


def bubbles_s(trace: Trace, header: Header) -> Times:
    """Return the seconds in which each rank waits for other stages, without a kernel, copy or transfer of its own:
    (ranks,). It waits for what they hand on, and at the end for their part of sums over all stages, as the norm of
    gradients.
    """
    ops, over_stages = trace.ops, {one.name for one in header.communicators if _spans_stages(one, header.mesh)}
    is_link = np.array([stream in over_stages for stream in ops.streams], bool)
    works = np.array([KINDS[kind].meta.activity != "synchronisation" for kind in ops.kinds], bool)
    found = []
    for first, last in pairwise(ops.starts):
        own = slice(first, last)
        posted_s, begun_s, ended_s = trace.posted_s[own], trace.begun_s[own], trace.ended_s[own]
        waits, busy = is_link[own], works[own]
        at = np.concatenate([posted_s[waits], begun_s[waits], begun_s[busy], ended_s[busy]])
        changes = np.repeat([[1, 0], [-1, 0], [0, 1], [0, -1]], [waits.sum()] * 2 + [busy.sum()] * 2, axis=0)
        order = at.argsort(kind="stable")
        waiting, working = np.cumsum(changes[order], axis=0).T
        found.append(np.sum(np.diff(at[order])[((waiting > 0) & (working == 0))[:-1]]))
    return np.array(found)


def _spans_stages(communicator: Communicator, mesh: Mesh) -> bool:
    return any(len({mesh.place(rank)["pp"] for rank in group}) > 1 for group in communicator.groups)
