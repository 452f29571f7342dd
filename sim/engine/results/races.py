"""Where a step hangs on which kernel gets SMs first, so that the answer says so."""

from __future__ import annotations

import numpy as np

from sim.accounts.breakdown import critical_rank
from sim.engine.costs.phases import Flow
from sim.engine.play.facts import COLLECTIVE, EXCHANGE, KERNEL, Array
from sim.engine.play.lowered import lowered
from sim.engine.play.native import held
from sim.engine.play.simulate import Simulation

RACE = 1.02
"""How far seeds of noise may be apart, as a factor, before the answer says so: noise of kernels alone makes less than
1 %, and what the slowest GPU of each seed makes is left out. So much longer are also the waits of which it speaks."""
LOST = 0.01
"""Share of the step that a GPU may lose to kernels that wait on its SMs before the answer says so."""
NEAR = 0.5
"""Launches by which a kernel may miss its SMs to be near: how long a launch takes is known to a factor of two."""


def races(simulation: Simulation) -> list[str]:
    """Return a note for each way in which microseconds, or waiting kernels, decide how long the step takes."""
    return [*_seeds(simulation), *_near(simulation), *_lost(simulation)]


def _seeds(simulation: Simulation) -> list[str]:
    """Say where seeds of noise come out differently."""
    fastest_s, slowest_s = simulation.step_times_s[0], simulation.step_times_s[-1]
    chips = [one.slowest(simulation.fold, simulation.cost) for one in simulation.jitter.each()]
    if slowest_s <= fastest_s * RACE * max(chips) / min(chips):
        return []
    span = f"{fastest_s * 1e3:.4g} to {slowest_s * 1e3:.4g} ms in {len(simulation.step_times_s)} seeds of noise"
    return [f"which kernel gets its SMs first decides the step: {span}; a machine may be at either end"]


def _near(simulation: Simulation) -> list[str]:
    """Say where kernels that communicate come just after a grid has filled the SMs, and so wait for most of it."""
    arrays, trace = lowered(simulation.fold.checked), simulation.trace
    step_s, launch_s = trace.step_time_s, simulation.cluster.spec.gpu.launch_s
    waits_s = np.where(_communicates(simulation), simulation.granted_s - trace.posted_s, 0.0)
    late = np.flatnonzero(waits_s > 0)
    if not late.size or not simulation.cost.cuda:
        return []
    kernels = np.flatnonzero(arrays.ops["kind"] == KERNEL)
    order = 2 * step_s * arrays.op_rank
    before = np.searchsorted((order + trace.begun_s)[kernels], (order + trace.posted_s)[late], "right") - 1
    beside = kernels[np.maximum(before, 0)]
    filled_s = trace.begun_s[beside] + np.array(_heads(simulation))[arrays.op_use[beside]]
    missed_s = trace.posted_s[late] - filled_s
    near = (before >= 0) & (arrays.op_rank[beside] == arrays.op_rank[late]) & (missed_s < NEAR * launch_s)
    near &= (missed_s > 0) & (trace.posted_s[late] < trace.ended_s[beside])
    of_ranks = np.bincount(arrays.op_rank[late], waits_s[late] * near)
    if (longest_s := float(of_ranks.max())) <= (RACE - 1) * step_s:
        return []
    waits = f"kernels that communicate wait {longest_s * 1e3:.4g} ms in all for SMs that they miss by less than half a"
    return [f"{waits} launch: on a machine where these come first the step is shorter by up to that"]


def _heads(simulation: Simulation) -> list[float]:
    """Return per use of a kernel how long it takes until its grid fills the SMs, as the kernel for delta does."""
    heads = []
    for use in lowered(simulation.fold.checked).uses.found:
        flows = [phase for phase in simulation.cost.kernel_anywhere(0, use) if isinstance(phase, Flow)]
        fills = [number for number, flow in enumerate(flows) if flow.fills != -1]
        heads.append(sum(flow.seconds for flow in flows[: fills[-1]]) if fills else 0.0)
    return heads


def _late(simulation: Simulation) -> list[float]:
    """Return per use of a kernel how late blocks of its grid make it that find no SM (``Flow.late``)."""
    each = (simulation.cost.kernel_anywhere(0, use) for use in lowered(simulation.fold.checked).uses.found)
    return [max((phase.late for phase in phases if isinstance(phase, Flow)), default=0.0) for phases in each]


def _lost(simulation: Simulation) -> list[str]:
    """Say where such kernels hold SMs of the critical GPU while their peers' wait for SMs of other GPUs."""
    arrays, trace = lowered(simulation.fold.checked), simulation.trace
    if not simulation.cost.cuda or not trace.ended_s.size:
        return []
    rank = critical_rank(trace)
    own = arrays.op_rank == rank
    since_s = np.maximum(simulation.granted_s, _all_posted_s(simulation))
    spins = np.flatnonzero(own & _communicates(simulation) & (trace.begun_s > since_s))
    kernels = np.flatnonzero(own & (arrays.ops["kind"] == KERNEL))
    if not spins.size or not kernels.size:
        return []
    lost_s, sms = 0.0, held(arrays, simulation.cost)[spins]
    late = np.array(_late(simulation))[arrays.op_use[kernels]]
    for by_sm in np.unique(late):
        of_grid = kernels[late == by_sm]
        edges = np.stack([trace.begun_s[of_grid], trace.ended_s[of_grid]], axis=1).reshape(-1)
        busy = np.repeat(np.cumsum(trace.ended_s[of_grid] - trace.begun_s[of_grid]), 2)
        busy[::2] -= trace.ended_s[of_grid] - trace.begun_s[of_grid]
        beside_s = np.interp(trace.begun_s[spins], edges, busy) - np.interp(since_s[spins], edges, busy)
        longer = np.minimum(by_sm * sms, 1.0)
        lost_s += float(beside_s @ (longer / (1 + longer) if by_sm else sms / simulation.cluster.spec.gpu.sms))
    if lost_s <= LOST * trace.step_time_s:
        return []
    loses = f"GPU {trace.numbers[rank]} loses {lost_s * 1e3:.4g} ms to kernels that communicate: they hold SMs"
    return [f"{loses} while their peers' wait behind grids of other GPUs, as streams of one priority do"]


def _communicates(simulation: Simulation) -> Array:
    return np.isin(lowered(simulation.fold.checked).ops["kind"], (EXCHANGE, COLLECTIVE))


def _all_posted_s(simulation: Simulation) -> Array:
    """Return per op when the last of those that it communicates with was posted."""
    arrays, posted_s = lowered(simulation.fold.checked), simulation.trace.posted_s
    found = posted_s.copy()
    source, target = arrays.transfers["source"], arrays.transfers["target"]
    np.maximum.at(found, source, posted_s[target])
    np.maximum.at(found, target, posted_s[source])
    if len(arrays.groups):
        last_s = np.maximum.reduceat(posted_s[arrays.members], arrays.groups["members"])
        found[arrays.members] = np.repeat(last_s, arrays.groups["members_end"] - arrays.groups["members"])
    return found
