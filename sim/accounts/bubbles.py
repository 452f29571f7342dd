"""The bubbles of a pipeline: when a stage has nothing to do until another one hands something on, or ends its step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

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
    trace: Trace, walked: list[MemoryWalk], header: Header, counts: Sequence[int], reserved: Sequence[Reserved] = ()
) -> tuple[Stage, ...]:
    """Return the stages of a pipeline, by the walks of the ranks of a trace, each of which stands for so many, and by
    what is reserved on each, where that is known; none where there is one. The header is that of all ranks.
    """
    mesh = header.mesh
    if mesh.pp == 1:
        return ()
    waits, ranks = bubbles_s(trace, header), list[list[int]]([] for _ in range(mesh.pp))
    for at, number in enumerate(trace.numbers):
        ranks[mesh.place(number)["pp"]].append(at)
    return tuple(
        Stage(
            bubbles=_mean(waits[own], [counts[rank] for rank in own]) / trace.step_time_s if trace.step_time_s else 0.0,
            peak_hbm_bytes=max(walked[rank].peak_bytes for rank in own),
            peak_reserved=reserved[stage] if reserved else None,
        )
        for stage, own in enumerate(ranks)
    )


def _mean(values: Times, counts: Sequence[int]) -> float:
    """Return the mean of values that are there so often, the same however they are ordered."""
    return math.fsum(np.repeat(values, counts).tolist()) / sum(counts)


def bubbles_s(trace: Trace, header: Header) -> Times:
    """Return the seconds in which each rank waits for other stages, without a kernel, copy or transfer of its own:
    (ranks,). It waits for what they hand on, and at the end for their part of sums over all stages, as the norm of
    gradients.
    """
    between, ranks = _between_stages(header), pairwise(trace.ops.starts)
    waits = [_waits(trace, between, slice(first, last)) for first, last in ranks]
    return np.array([np.sum(wait.lasts_s[wait.waits]) for wait in waits])


def waited_s(trace: Trace, header: Header, at: int, times: Times) -> Times:
    """Return the seconds in which a rank, whose place in the trace is given, has waited so until some times."""
    wait = _waits(trace, _between_stages(header), slice(*trace.ops.starts[at : at + 2]))
    waited = np.concatenate([[0.0], np.cumsum(np.where(wait.waits, wait.lasts_s, 0.0))])
    found: Times = np.interp(times, wait.at_s, waited)
    return found


class _Waits(NamedTuple):
    """When a rank begins or ends to wait, or to do something else."""

    at_s: Times
    lasts_s: Times
    """From each of these times to the next one."""
    waits: NDArray[np.bool_]
    """Whether it does nothing but wait meanwhile."""


def _between_stages(header: Header) -> set[str]:
    """Return the communicators between stages."""
    return {one.name for one in header.communicators if _spans_stages(one, header.mesh)}


def _waits(trace: Trace, between: set[str], own: slice) -> _Waits:
    """Return when a rank with some ops waits for those of communicators ``between`` stages."""
    posted_s, begun_s, ended_s = trace.posted_s[own], trace.begun_s[own], trace.ended_s[own]
    waits = np.array([stream in between for stream in trace.ops.streams[own]], bool)
    busy = np.array([KINDS[kind].meta.activity != "synchronisation" for kind in trace.ops.kinds[own]], bool)
    at = np.concatenate([posted_s[waits], begun_s[waits], begun_s[busy], ended_s[busy]])
    changes = np.repeat([[1, 0], [-1, 0], [0, 1], [0, -1]], [waits.sum()] * 2 + [busy.sum()] * 2, axis=0)
    order = at.argsort(kind="stable")
    waiting, working = np.cumsum(changes[order], axis=0).T
    return _Waits(at[order], np.diff(at[order]), ((waiting > 0) & (working == 0))[:-1])


def _spans_stages(communicator: Communicator, mesh: Mesh) -> bool:
    return any(len({mesh.place(rank)["pp"] for rank in group}) > 1 for group in communicator.groups)
