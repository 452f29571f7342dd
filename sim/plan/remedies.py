"""What would make a training step fit of which no configuration does: shares of weights, more GPUs, a shorter sequence,
other options.

Each is asked of the configuration that lacks least, or of the one like it on other GPUs, by the memory of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sim.base.errors import InputError
from sim.plan.fit import switched_off, using
from sim.plan.search.branches import least_limits
from sim.plan.search.degrees import DEGREES, divides
from sim.plan.search.families import families
from sim.plan.search.space import Branch
from sim.plan.search.usual import unusual
from sim.setup import names
from sim.setup.global_batch import divisors
from sim.setup.setup import Setup

DOUBLINGS = 5
"""How often the number of GPUs is doubled."""
PARTS = 16
"""Parts of a sequence of which some are left out."""


def remedies(setup: Setup, least: Branch, options: Mapping[str, Sequence[str]]) -> list[str]:
    """Return changes each of which would be enough for a step to fit; ``least`` is what lacks least."""
    return [*_techniques(least), *_shares(setup, least, options), *_gpus(setup, least, options), *_shorter(least)]


def _techniques(least: Branch) -> list[str]:
    """Return options that are not varied, each of which is enough."""
    found = []
    for name, on in switched_off(least.setup).items():
        if _fits(using(least.setup, on)):
            found.append(f"{name} ({', '.join(f'schedule.{key}={value}' for key, value in on.items())})")
    return found


def _shares(setup: Setup, least: Branch, options: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the fewest ranks of a node that are enough to share out weights, where nobody said how many."""
    if least.setup.tp_degree > 1 or "tp_degree" in options or not isinstance(setup.tp_degree, names.Untold):
        return []
    gpus, name = least.setup.gpus or 1, least.family.named.partition(" ")[0]
    per_node = names.cluster_spec(setup.cluster).gpus_per_node
    for degree in (one for one in divisors(math.gcd(gpus, per_node))[1:] if divides(setup.model_spec, one)):
        there = families(setup.replace(schedule=setup.schedule or name, tp_degree=degree), options)
        for family in sorted(there, key=unusual):
            if _fits(Branch(family).leanest.setup):
                return [f"tensor parallelism: {family.named}"]
    return []


def _gpus(setup: Setup, least: Branch, options: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the fewest GPUs that are enough, of twice as many, four times and so on, that share one sequence."""
    gpus, name = least.setup.gpus or 1, least.family.named.partition(" ")[0]
    for more in (gpus << times for times in range(1, DOUBLINGS + 1)):
        try:
            on_more = setup.replace(gpus=more, nodes=None, schedule=setup.schedule or name)
            on_more = on_more.replace(ulysses_degree=None, ring_degree=None)
            there = families(on_more.replace(**{name: getattr(least.setup, name) for name in DEGREES}), options)
            there = [one for one in there if one.setup.dp_degree == 1]
        except InputError:
            return []
        for family in sorted(there, key=unusual):
            if _fits(Branch(family).leanest.setup):
                return [f"{more} GPUs: {family.named}"]
    return []


def _shorter(least: Branch) -> list[str]:
    """Return the longest part of the sequence that is short enough, in sixteenths."""
    if least.setup.documents is not None:
        return []
    tokens = least.setup.resolved().workload.seq
    low, high = 0, PARTS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(least.setup.replace(seq=tokens * middle // PARTS)) else (low, middle)
    return [f"a sequence of {tokens * low // PARTS} tokens, {low}/{PARTS} of this one"] if low else []


def _fits(setup: Setup) -> bool:
    try:
        return all(limit.free_bytes >= 0 for limit in least_limits(setup))
    except InputError:
        return False
