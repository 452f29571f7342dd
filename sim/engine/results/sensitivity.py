"""What a step depends on: its elasticities, and the figure of its machine whose doubling saves most.

Both come from the play that was simulated, which carries other machines along (``worlds``). Without a C compiler there
is none of that: then the bound comes from plays of its own, and elasticities are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from typing import NamedTuple

from sim.accounts.breakdown import kernels_s
from sim.base.errors import InputError
from sim.engine.play.simulate import Prepared, Simulation
from sim.engine.play.work import links_s
from sim.engine.results.figures import COMPUTE, HBM, HOST, Figure, figures_of
from sim.engine.results.worlds import Change, World, worlds
from sim.native.library import UnavailableError

STEP = 0.02
"""How far figures are moved for an elasticity, up and down, as a share."""
_KINK = 0.03
"""Elasticities above and below today's figure that are farther apart are of two bounds."""
IMBALANCE = "imbalance"
BOTH = " + "
"""Between two links that are doubled together."""
"""What bounds a step whose ranks have unequal work, beside figures of the machine."""
TOLD = 0.01
"""Shares of a step that are worth telling."""


class Elasticity(NamedTuple):
    """d ln(step time) / d ln(figure): -0.5 is 1 % less time for 2 % more of a rate, 0.5 for 2 % less of a time."""

    figure: str
    elasticity: float
    bound_changes_nearby: bool
    """Whether within 2 % another critical path takes over, or SMs go to other kernels first: then it may jump."""


def elasticities(simulation: Simulation) -> list[Elasticity]:
    """Return the elasticity of the step time to every figure of the machine, the largest first, by one play.

    Those of rates are negative. Together they make 1, but for the times of a profile that no figure scales. Raises
    InputError where there is no C compiler.
    """
    step_s = simulation.trace.step_time_s
    figures = _used(simulation) if step_s else []
    moved = [Change((figure,), figure.factor(1 + by)) for figure in figures for by in (STEP, -STEP)]
    try:
        found = worlds(simulation, moved)
    except UnavailableError as error:
        raise InputError(f"elasticities come from the native engine: {error}; install a C compiler") from error
    of = {figure.name: _elasticity(step_s, *found[2 * n : 2 * n + 2]) for n, figure in enumerate(figures)}
    known = [one.name for one in figures_of(simulation.cluster.spec, simulation.profile)]
    rows = [Elasticity(name, *of.get(name, (0.0, False))) for name in known]
    return sorted(rows, key=lambda row: -abs(row.elasticity))


def _elasticity(step_s: float, more: World, less: World) -> tuple[float, bool]:
    above = math.log(more.step_time_s / step_s) / math.log1p(STEP)
    below = math.log(less.step_time_s / step_s) / math.log1p(-STEP)
    central = math.log(more.step_time_s / less.step_time_s) / (math.log1p(STEP) - math.log1p(-STEP))
    return central, more.turned or less.turned or abs(above - below) > _KINK


class Bound(NamedTuple):
    """What a step is bound by."""

    by: str
    """The figure whose doubling saves most (of a time, whose halving), host, or imbalance."""
    saves: dict[str, float]
    """By figure, the share of the step that doubling it saves, the largest first, from a hundredth on; of imbalance
    what kernels spread evenly over the ranks save; of two links with a plus what they save together, where one masks
    the other."""


NOT_ASKED = Bound("", {})


def bound(simulation: Simulation, told: float = TOLD) -> Bound:
    """Return what bounds a step. Imbalance does where evening it out saves more than doubling any figure, and more than
    twice the compute would save after that. Of savings those are named that are at least as much as ``told``.
    """
    step_s = simulation.trace.step_time_s
    if not step_s:
        return Bound("host", {})
    used = _used(simulation)
    hosts = tuple(figure for figure in used if figure in HOST)
    alone = {figure.name: Change((figure,), 2.0) for figure in used if figure not in HOST}
    if hosts:
        alone["host"] = Change(hosts, 2.0)
    rates = [figure for figure in used if figure.resource and figure.rate]
    pairs = {pair: Change(pair, 2.0) for pair in combinations(rates, 2)}
    uneven = _uneven(simulation)
    changes = [*alone.values(), *pairs.values(), *([Change((COMPUTE, HBM), uneven)] if uneven > 1 + TOLD else [])]
    try:
        steps_s = [one.step_time_s for one in worlds(simulation, changes)]
    except UnavailableError:
        steps_s = [played_s(simulation, change) for change in changes]
    shares = [1 - one_s / step_s for one_s in steps_s]
    saves = dict(zip(alone, shares, strict=False))
    for pair, together in zip(pairs, shares[len(alone) :], strict=False):
        first, second = (figure.name for figure in pair)
        if together > saves[first] + saves[second] + TOLD:
            saves[f"{first}{BOTH}{second}"] = together
    if len(shares) > len(alone) + len(pairs):
        saves[IMBALANCE] = shares[-1]
    return bound_of(saves, told)


def bound_of(saves: Mapping[str, float], told: float = TOLD) -> Bound:
    """Return what bounds a step of which doubling each figure saves these shares, pairs of links behind those alone."""
    best = max((name for name in saves if BOTH not in name and name != IMBALANCE), key=lambda name: saves[name])
    for name, together in saves.items():
        if BOTH in name and together / 2 > saves[best]:  # equally full, so that neither helps by itself
            best = max(name.split(BOTH), key=lambda link: saves[link])
    if even := saves.get(IMBALANCE, 0.0):
        kernels = {COMPUTE.name, HBM.name}
        others = max((share for name, share in saves.items() if name not in {*kernels, IMBALANCE}), default=0.0)
        if even > max(others, (1 - even) * max(saves.get(name, 0.0) for name in kernels)):
            best = IMBALANCE
    named = {name: share for name, share in saves.items() if share >= told or name == best}
    return Bound(best, dict(sorted(named.items(), key=lambda item: -item[1])))


def _used(simulation: Simulation) -> list[Figure]:
    """Return the figures that a schedule has anything to do with."""
    links = links_s(simulation.fold.checked, simulation.fold.cluster)
    known = figures_of(simulation.cluster.spec, simulation.profile)
    return [figure for figure in known if not figure.resource or links.get(figure.resource)]


def _uneven(simulation: Simulation) -> float:
    """Return how many times as long as the mean the kernels of the busiest rank take."""
    busy_s = simulation.fold.of_all(kernels_s(simulation.trace).tolist())
    return max(busy_s) * len(busy_s) / math.fsum(busy_s) if any(busy_s) else 1.0


def played_s(simulation: Simulation, change: Change) -> float:
    """Return the step under a change, by a play of its own."""
    spec, profile = change.of(simulation.cluster.spec), change.of_host(simulation.profile)
    played = Prepared(simulation.checked).play(
        simulation.cluster.like(spec), profile, simulation.noise, simulation.engine
    )
    return played.trace.step_time_s
