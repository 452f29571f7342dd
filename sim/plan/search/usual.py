"""A usual configuration that fits, found by a few bounds of memory, so that a search has something at once.

People split a sequence over no more GPUs than it needs, by heads inside a node and by parts between nodes. They
recompute whole layers, and move activations and states to the host, only where they must. A replica of few GPUs is also
the quickest to simulate. Where there are many families, bounds of one rank guess which ways to cut weights may be
fastest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf

from sim.base.errors import InputError
from sim.engine.results.room import Limit
from sim.plan.search.branches import Played, least_limits, least_of_rank, played
from sim.plan.search.few import turns_of
from sim.plan.search.space import Branch, Family
from sim.plan.search.stages import STATES, waits
from sim.plan.search.steps import reserved_room
from sim.setup import names

USUAL = ("ulysses", "usp", "zigzag", "ring", "single")
"""Schedules of frameworks, those with fewest ops first; all others are less usual."""
STAYS = (
    ("checkpoint", "activations", "optimiser", "mlp"),
    ("checkpoint", "activations", "optimiser"),
    ("activations", "optimiser"),
    ("optimiser",),
    ("activations",),
    (),
)
"""What stays on the GPU of the configuration that holds least there, the most first."""
Cut = tuple[int, int]
"""Into how many shares and how many stages weights are cut."""
MANY = 256
"""Families of which those ways to cut weights are looked at first that may be fastest: the bounds of a family take 0.3
to 2 s of a core, so that those of all take minutes."""
NEAR = 1.07
"""How many times the least guess that of a cut may be which is looked at, too. Where guesses of 405B on 16,384 GPUs
were 5 % apart, their steps were 1 % apart, in the other order."""

PINNED = 0.5
"""Which share of the host's memory is pinned at most where others need some: files, data, the system (assumed)."""


def that_fit(families: Sequence[Family], is_late: Callable[[], bool]) -> Iterator[Played]:
    """Yield the usual configuration that fits with the fewest GPUs a replica, of each way to cut weights into shares
    and stages, whole ones first. None is yielded where none was found, which proves nothing.
    """
    found = (_first_of_cut(alike, is_late) for alike in _by_cut(families).values())
    yield from (one for one in found if one)


def of_many(
    families: Sequence[Family], guessed_s: Mapping[Cut, float], is_late: Callable[[], bool]
) -> Iterator[Played]:
    """Yield the same of the cuts that may be fastest by guesses, those of few stages first; of others only until one is
    found, in their order.
    """
    cuts = _by_cut(families)
    near_s = NEAR * min(guessed_s.values(), default=inf)
    near = sorted((cut for cut in cuts if guessed_s[cut] <= near_s), key=lambda cut: (cut[1], guessed_s[cut]))
    others = sorted(cuts.keys() - {*near}, key=lambda cut: guessed_s[cut])
    any_found = False
    for cut in [*near, *others]:
        if any_found and cut not in near:
            return
        if found := _first_of_cut(cuts[cut], is_late, any_size=not any_found):
            any_found = True
            yield found


def guesses(families: Sequence[Family], is_late: Callable[[], bool]) -> dict[Cut, float]:
    """Return of each way to cut weights how long its usual step may take."""
    return {cut: _guessed_s(alike, is_late) for cut, alike in _by_cut(families).items()}


def _by_cut(families: Sequence[Family]) -> dict[Cut, list[Family]]:
    """Return families by how they cut weights, the most usual first."""
    cuts: dict[Cut, list[Family]] = defaultdict(list)
    for family in sorted(families, key=unusual):
        cuts[cut_of(family)].append(family)
    return cuts


def cut_of(family: Family) -> Cut:
    """Return into how many shares and stages a family cuts weights."""
    return family.setup.tp_degree, family.setup.pp_degree


def _guessed_s(families: Sequence[Family], is_late: Callable[[], bool]) -> float:
    """Return how long the first of families takes that can be built, of those with fewest GPUs a replica, where nothing
    is computed again and no transfer is hidden: by bounds of a rank and the bubbles of equal stages, in seconds over
    worth.
    """
    for family in sorted(families, key=_size):
        if is_late():
            break
        with suppress(InputError):
            fastest = Branch(family).fastest.setup
            least, found = least_of_rank(fastest), fastest.resolved()
            order = getattr(found.options, "pipeline_schedule", "")
            chunks = getattr(found.options, "pipeline_chunks", 1)
            idle_s = least.kernels_s * waits(order, found.mesh.pp, turns_of(found), chunks)
            return (least.kernels_s + idle_s + least.states_s + least.links_s) / family.worth
    return inf


def _first_of_cut(families: Sequence[Family], is_late: Callable[[], bool], *, any_size: bool = True) -> Played | None:
    """Return the same of families, in order, that cut weights alike.

    Small replicas are tried first: their steps take least to build, and those of thousands of GPUs minutes. Where not
    even the one that holds least fits, nothing of that size is tried, and of others only where ``any_size`` will do.
    """
    sizes = sorted({_size(family) for family in families})
    for size in sizes if any_size else sizes[:1]:
        there = [one for one in families if _size(one) == size]
        if is_late() or not _of_first(there, STAYS[-1])[1]:
            continue
        for stays in STAYS:
            leaf, fits = _of_first(there, stays)
            if leaf is None or is_late():
                break
            if not fits:
                continue
            found = played(leaf, inf)
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


def unusual(family: Family) -> tuple[int, bool, bool, int, int]:
    """Return how unusual a family is: stages, shares of weights, its schedule, heads that are split between nodes,
    stages whose weights are gathered for every micro-batch or whose layers are few chunks, few parts of heads.
    """
    name, ulysses = family.named.partition(" ")[0], family.setup.ulysses_degree or 1
    order = USUAL.index(name) if name in USUAL else len(USUAL)
    per_node = names.cluster_spec(family.setup.cluster).gpus_per_node
    pp, tp = family.setup.pp_degree, family.setup.tp_degree
    between = ulysses * tp > per_node or "ring-inner" in family.named
    said = dict(names.pairs(family.setup.set))
    gathers = pp > 1 and said.get("schedule.zero_stage") != STATES
    chunks = int(said.get("schedule.pipeline_chunks", 1))
    return order + len(USUAL) * (between + 2 * (pp > 1) + 2 * (tp > 1)), between, gathers, -chunks, -ulysses
