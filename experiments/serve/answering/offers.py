"""What a question may change to, and why the rest may not: each choice is tried up to its builder, none is played."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from sim.base.errors import InputError
from sim.plan.fit import using
from sim.plan.search.degrees import divides
from sim.schedule.methods.catalog import NAMED
from sim.setup.configuration import Configuration
from sim.setup.names import ONE_REPLICA
from sim.setup.setup import Setup
from sim.setup.stacks import TECHNIQUES

RATES = ("nvlink", "pcie", "nic", "hbm")
"""Tables of a cluster whose rate a slider multiplies, where there are such."""


def offers(setup: Setup, found: Configuration) -> Iterator[dict[str, Any]]:
    """Yield the choices of a question, group by group, each with the reason why it is none, or an empty one."""
    yield {"schedules": {name: _why(_by(setup, name)) for name in NAMED}}
    yield {"gpus": found.mesh.size, "degrees": [_tried(setup, degrees, found) for degrees in _degrees(found)]}
    yield {"techniques": dict(_techniques(setup, found, _why(setup)))}
    yield {"sliders": _sliders(found)}


def _by(setup: Setup, schedule: str) -> Setup:
    """Return a setup with another schedule: on all GPUs, with the degrees that this one has by itself."""
    gpus = setup.gpus
    if NAMED[schedule].degrees:
        return setup.replace(schedule=schedule, ulysses_degree=None, ring_degree=None)
    return setup.replace(schedule=schedule, gpus=gpus, cp=None, ulysses_degree=None, ring_degree=None,
                         dp_degree=gpus // setup.pp_degree // setup.tp_degree if gpus else ONE_REPLICA)  # fmt: skip


def _why(setup: Setup) -> str:
    """Return why a setup cannot be played, as far as that is told without writing its programs."""
    try:
        found = setup.replace(pad=True).resolved()
        found.entry.schedule(found.workload, found.mesh, found.options, found.hints)
    except InputError as error:
        return str(error)
    return ""


def _tried(setup: Setup, degrees: dict[str, int | None], found: Configuration) -> dict[str, Any]:
    """Return degrees with why they cannot be had, and whether they are those of now."""
    mesh = found.mesh
    same = all(getattr(mesh, axis) == (degrees[f"{axis}_degree"] or 1) for axis in mesh.degrees)
    return {**degrees, "now": same, "why": _why(setup.replace(**degrees))}


def _degrees(found: Configuration) -> Iterator[dict[str, int | None]]:
    """Yield the ways to use as many GPUs as now: ranks that split heads and sequence, replicas; of layers ranks that
    share out weights, within a node; and where a step has several micro-batches and shares are as now, stages, at most
    as many as these, each with as many layers. Of shares that the model has not there is one way.
    """
    gpus, mesh = found.mesh.size, found.mesh
    of_node = _divisors(math.gcd(gpus, found.spec.gpus_per_node)) if found.workload.scope != "attention" else []
    for tp in sorted({1, mesh.tp, *of_node}):
        ways = _ways(found, gpus // tp, other_stages=tp == mesh.tp)
        for way in ways if divides(found.workload.model, tp) else islice(ways, 1):
            yield {"gpus": gpus, "cp": None, "tp_degree": tp, **way}


def _ways(found: Configuration, gpus: int, *, other_stages: bool) -> Iterator[dict[str, int | None]]:
    """Yield the ways to use so many GPUs beside shares of weights."""
    axes, turns = found.entry.degrees, getattr(found.options, "micro_batches", 1) if other_stages else 0
    for pp in (one for one in _divisors(gpus) if one in {1, found.mesh.pp} or _takes(found, one, turns)):
        for dp in _divisors(gpus // pp):
            for ulysses in _divisors(gpus // pp // dp) if "ulysses" in axes else (1,):
                ring = gpus // pp // dp // ulysses
                if ring == 1 or "ring" in axes:
                    yield {
                        "pp_degree": pp, "dp_degree": dp, "ulysses_degree": ulysses if "ulysses" in axes else None,
                        "ring_degree": ring if "ring" in axes else None,
                    }  # fmt: skip


def _takes(found: Configuration, stages: int, turns: int) -> bool:
    """Return whether so many stages have as many layers each, and something to do at once."""
    return stages <= turns and found.workload.layers % stages == 0


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _techniques(setup: Setup, found: Configuration, wrong: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each technique that is an option of the schedule: whether it is on, what switches it, and why it may not
    be. A fault that the question has anyway (``wrong``) is no reason.
    """
    options = found.options
    for name, technique in TECHNIQUES.items():
        if "schedule" in technique.on or not all(hasattr(options, key) for key in technique.on):
            continue
        on = any(str(getattr(options, key)) != technique.off[key] for key in technique.on)
        turns: Mapping[str, str] = {key: technique.off[key] for key in technique.on} if on else technique.on
        why = _why(using(setup, turns))
        yield name, {"on": on, "about": technique.about, "turns": turns, "why": "" if why == wrong else why}


def _sliders(found: Configuration) -> dict[str, str]:
    """Return the keys of figures that sliders multiply, by what they are called; only those that the cluster has."""
    keys = {name: f"cluster.{name}.bytes_per_s" for name in RATES if getattr(found.spec, name) is not None}
    keys["compute"] = f"cluster.gpu.peak_flops_per_s.{found.workload.dtype}"
    keys["launch"] = "cluster.gpu.launch_s"
    return keys
