"""A usual configuration that fits, found by a few bounds of memory, so that a search has something at once.

People split a sequence over no more GPUs than it needs, by heads inside a node and by parts between nodes, recompute
whole layers, and move activations and states to the host only where they must. A replica of few GPUs is also the
quickest to simulate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from sim.base.errors import InputError
from sim.engine.results.room import Limit
from sim.plan.search.branches import Played, least_limits, played
from sim.plan.search.space import Branch, Family
from sim.plan.search.steps import reserved_room
from sim.setup import names

USUAL = ("ulysses", "usp", "zigzag", "ring", "single")
"""Schedules of frameworks, those with fewest ops first; all others are less usual."""
STAYS = (("activations", "optimiser"), ("optimiser",), ("activations",), ())
"""What stays on the GPU of the configuration that holds least there, the most first."""

PINNED = 0.5
"""Which share of the host's memory is pinned at most where others need some: files, data, the system (assumed)."""


def that_fit(families: Sequence[Family], is_late: Callable[[], bool]) -> Iterator[Played]:
    """Yield the usual configuration that fits with the fewest GPUs a replica, of each way to cut weights into shares
    and stages, whole ones first. None is yielded where none was found, which proves nothing.
    """
    cuts: dict[tuple[int, int], list[Family]] = defaultdict(list)
    for family in sorted(families, key=unusual):
        cuts[family.setup.tp_degree, family.setup.pp_degree].append(family)
    found = (_first_of_cut(alike, is_late) for alike in cuts.values())
    yield from (one for one in found if one)


def _first_of_cut(families: Sequence[Family], is_late: Callable[[], bool]) -> Played | None:
    """Return the same of families, in order, that cut weights alike.

    Small replicas are tried first: their steps take least to build, and those of thousands of GPUs minutes. Where not
    even the one that holds least fits, nothing of that size is tried.
    """
    for size in sorted({_size(family) for family in families}):
        there = [one for one in families if _size(one) == size]
        if is_late() or not _of_first(there, STAYS[-1])[1]:
            continue
        for stays in STAYS:
            leaf, fits = _of_first(there, stays)
            if leaf is None or is_late():
                break
            if not fits:
                continue
            found = played(leaf, float("inf"))
            if isinstance(found, Played) and found.room is not None:
                return found
            break
    return None


def _of_first(families: Sequence[Family], stays: Sequence[str]) -> tuple[Branch | None, bool]:
    """Return a configuration of the first family that can be built, and whether it fits."""
    for family in families:
        chosen = (values[0] if key in stays else values[-1] for key, values in family.grid.items())
        leaf = Branch(family, tuple(chosen))
        try:
            return leaf, _fits(leaf)
        except InputError:
            continue
    return None, False


def _fits(leaf: Branch) -> bool:
    """Return whether people would run a configuration, by its bounds. Where its software's allocator is known, what
    that reserves has to fit too, which takes longer to compute.
    """
    if not all(limit.free_bytes >= 0 and is_usual(limit) for limit in least_limits(leaf.setup)):
        return False
    known = leaf.setup.resolved().allocator is not None
    return not known or reserved_room(leaf.setup).free_bytes >= 0


def is_usual(limit: Limit) -> bool:
    """Return whether people give so much of a memory away."""
    return limit.memory != "host" or limit.held_bytes <= PINNED * limit.capacity_bytes


def _size(family: Family) -> int:
    """Return how many GPUs a replica has."""
    return (family.setup.gpus or 1) // family.setup.dp_degree


def unusual(family: Family) -> tuple[int, bool, int]:
    """Return how unusual a family is: stages, shares of weights, its schedule, heads that are split between nodes, few
    parts of heads.
    """
    name, ulysses = family.named.partition(" ")[0], family.setup.ulysses_degree or 1
    order = USUAL.index(name) if name in USUAL else len(USUAL)
    per_node = names.cluster_spec(family.setup.cluster).gpus_per_node
    pp, tp = family.setup.pp_degree, family.setup.tp_degree
    between = ulysses * tp > per_node or family.named.endswith("ring-inner)")
    return order + len(USUAL) * (between + 2 * (pp > 1) + 2 * (tp > 1)), between, -ulysses
