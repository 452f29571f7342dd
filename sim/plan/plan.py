"""Which configuration trains fastest on some GPUs, of all that fit, and why the others lose."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from sim.base.cpu_time import CpuTime
from sim.base.errors import InputError
from sim.engine.results.room import Room
from sim.plan.answer import Plan
from sim.plan.planned_batch import require_shared, with_batch
from sim.plan.remedies import remedies
from sim.plan.search.branches import Lost, Open, Played
from sim.plan.search.families import as_ring, families
from sim.plan.search.search import Progress, Search
from sim.plan.search.space import OPTIONS, Family
from sim.plan.search.tensors import TENSORS, require_tensors
from sim.plan.search.usual import is_usual
from sim.setup.answers.table import Table
from sim.setup.names import at_least_one
from sim.setup.setup import Setup
from topology.host import num_cores

Found = TypeVar("Found", Open, Lost, Played)


def plan(
    setup: Setup,
    *,
    options: Mapping[str, Sequence[str]] = OPTIONS,
    memory_budget: float | None = None,
    tensors: Sequence[str] | None = None,
    most: int = 3,
    price: float | None = None,
    limit_s: float | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Return the configurations that train most tokens a second on the GPUs of a setup, of those that fit.

    ``options`` are varied, each over its values; so are all schedules, degrees and placements that the setup leaves
    open, and stages of a pipeline, where nobody says how many (``pp_degree``) and micro-batches fill them. Ranks of a
    stage share out weights, or the optimiser's state alone (``zero_stage`` 3 or 1). Steps of pipelines are told by few
    layers of each stage: within 1e-4, and 0.6 % where chunks of layers are unlike. Shares of weights (``tp_degree``)
    are tried unasked where GPUs have few tokens (``sim.plan.search.degrees``). Options may have both degrees:
    ``{"tp_degree": ["1", "2"]}``, or ``["any"]``, which are those that divide a node and the model.

    The ``global_batch`` stays what it is: with fewer replicas each trains more of its sequences, one after the other.
    It is about 512K tokens where nobody says it (``sim.plan.planned_batch``); with ``any`` it is chosen: each replica
    has ``batch`` sequences, so that configurations with replicas train more of them a step. With a ``price`` of a
    GPU-hour rows have the cost of a billion tokens. A usual configuration that fits is looked for first. After
    ``limit_s`` seconds of CPU time, of this process and of those that it starts, or Ctrl-C, the search ends with what
    it has, and ``slack`` says what it may have missed. ``jobs`` processes search, by default as many as there are
    cores. Kernels take their median times (no jitter).

    A ``memory_budget`` is what a GPU may use, in bytes, of its memory, contexts of libraries included. With it, or with
    ``tensors``, what becomes of the tensors of a block is not one option for all: each group, as ``"gate+up"``, is
    kept, offloaded or computed again by itself, in the way that makes the step fastest; those in no group are computed
    again.

    Raises InputError for an option that no schedule has, and where no configuration can be built.

    >>> small = Setup("ulysses", model="tiny", cluster="hgx-h100", gpus=2, layers=2, seq="8K")
    >>> found = plan(small, options={"checkpoint": ["none", "full"]})
    >>> found.best[0]["options"], found.slack
    ('checkpoint none', 0.0)
    """
    require_searchable(most, limit_s)
    if price is not None:
        require_price(price)
    if memory_budget is not None:
        setup = _within(setup, memory_budget)
    if tensors is not None:
        require_tensors(tensors, setup.model_spec)
    elif memory_budget is not None:
        tensors = TENSORS
    setup = with_batch(setup)
    found_families = families(setup, options, tensors=tensors or ())
    require_shared(setup, found_families)
    search = Search(found_families, most, CpuTime(limit_s), progress)
    search.run(num_jobs(jobs))
    found = told(search, most, {} if price is None else {setup.cluster: price})
    least = _least_short(search)
    if found.best.rows or least is None or found.interrupted:
        return found
    return found._replace(remedies=remedies(setup, least.branch.leanest, options))


def _within(setup: Setup, memory_budget: float) -> Setup:
    """Return a setup whose GPUs have no more memory than may be used."""
    has = as_ring(setup.replace(ulysses_degree=None, ring_degree=None, cp=None, dp_degree=1)).spec.hbm.capacity_bytes
    if not 0 < memory_budget <= has:
        raise InputError(
            f"`memory_budget` {memory_budget:.12g} bytes: expected more than 0 and at most what a GPU has, {has}; to "
            f"try larger ones `set` cluster.hbm.capacity_bytes"
        )
    return setup.replace(set={"cluster.hbm.capacity_bytes": int(memory_budget)})


def require_searchable(most: int, limit_s: float | None) -> None:
    """Raise InputError for no rows, or no time."""
    at_least_one("most", most)
    if limit_s is not None and not limit_s > 0:
        raise InputError(f"`limit_s` {limit_s}: expected a number above 0, or none")


def require_price(price: float) -> None:
    """Raise InputError for what no GPU-hour costs."""
    if not 0 < price < math.inf:
        raise InputError(f"`price` {price}: expected a number above 0, or none")


def num_jobs(jobs: int | None) -> int:
    """Return how many processes search: by default one for each core."""
    return num_cores() if jobs is None else at_least_one("jobs", jobs)


def require_any_built(search: Search) -> None:
    """Raise InputError where builders refuse all that there is."""
    refused = [found.refused for found in search.lost if found.refused]
    if not search.best and not search.open and len(refused) == len(search.lost) and not search.played:
        why = refused[0] if refused else "no schedule takes so many GPUs: set `gpus`, or its degrees"
        alone = all(family.setup.dp_degree < (family.setup.gpus or 1) for family in search.families)
        more = "; a larger `global_batch` allows more replicas of fewer GPUs" if refused and alone else ""
        raise InputError(f"no configuration can be built; the first: {why}{more}")


def told(search: Search, most: int, prices: Mapping[Any, float], *, by_cost: bool = False) -> Plan:
    """Return what a search has found, with what a billion tokens cost where the clusters of ``prices`` are."""
    require_any_built(search)
    first_s = search.best[0].batch_s if search.best else None
    words = ("the cheapest", "dearer") if by_cost else ("the fastest", "slower")
    return Plan(
        Table(_rows(search.best[:most], prices)),
        Table(_by_family(search, first_s, words)),
        max(0.0, 1 - search.least_s / first_s) if first_s else float(bool(search.open)),
        len(search.played),
        search.count,
        "" if search.best else shortage(search),
        interrupted=search.interrupted,
        by_cost=by_cost,
        grounds=search.best[0].grounds if search.best else None,
    )


def shortage(search: Search) -> str:
    """Return what is missing least."""
    least = _least_short(search)
    if least is None:
        return "nothing is known yet"
    branch = least.branch.leanest
    return (
        f"{branch.family.named} with {branch.named} needs {least.missing_bytes / 2**30:.3g} GiB more of {least.memory} "
        f"memory"
    )


def _least_short(search: Search) -> Lost | None:
    """Return the branch that lacks least memory, of those that do not fit."""
    return min((found for found in search.lost if found.memory), key=lambda found: found.missing_bytes, default=None)


def _by_family(search: Search, first_s: float | None, words: tuple[str, str]) -> list[dict[str, Any]]:
    """Return what became of each family."""
    played, left, lost = _grouped(search.played), _grouped(search.open), _grouped(search.lost)
    found = []
    for family in search.families:
        bounds = [search.least_of(one) for one in left.get(family.named, ())]
        tried, gone = played.get(family.named, ()), lost.get(family.named, ())
        found.append(_of_family(family, tried, bounds, gone, first_s, words))
    return found


def _grouped(found: Iterable[Found]) -> dict[str, list[Found]]:
    """Return branches by the name of their family."""
    groups: dict[str, list[Found]] = defaultdict(list)
    for one in found:
        groups[one.branch.family.named].append(one)
    return groups


def _of_family(
    family: Family,
    tried: Sequence[Played],
    bounds: Sequence[float],
    lost: Sequence[Lost],
    first_s: float | None,
    words: tuple[str, str],
) -> dict[str, Any]:
    """Return what became of a family: its best step against the first, what bounds prove, what does not fit."""
    best, worse = words
    played = [one.batch_s for one in tried if one.reaches]
    short = [found for found in lost if found.memory]
    refused = [found for found in lost if found.refused]
    late = [found.least_s for found in lost if found.least_s is not None]
    late += [one.batch_s for one in tried if not one.reaches]
    said = []
    if played and first_s:
        slower = min(played) / first_s - 1
        said.append(best if slower <= 0 else f"{100 * slower:.2g} % {worse}")
    elif bounds and first_s and min(bounds) >= first_s:
        said.append(f"at least {100 * (min(bounds) / first_s - 1):.2g} % {worse} by its lower bound")
    elif bounds:
        said.append("not simulated")
    too_large = sum(found.branch.num_leaves for found in short)
    if short:
        said.append(f"{too_large} need {min(found.missing_bytes for found in short) / 2**30:.2g} GiB more, or beyond")
    if late:
        least_s = min(late) * family.worth
        said.append(f"too slow: a step takes {least_s:.3g} s or more, and may take {family.within_s:.3g} s")
    if refused:
        said.append(f"{len(refused)} refused: {refused[0].refused}")
    return {
        "schedule": family.named.partition(" ")[0],
        "degrees": family.named.partition(" ")[2].strip("()"),
        "slower": min(played) / first_s - 1 if played and first_s else None,
        "slower_at_least": min(bounds) / first_s - 1 if bounds and first_s else None,
        "configurations": family.num_leaves,
        "simulated": len(tried),
        "too_large": too_large,
        "too_slow": sum(found.branch.num_leaves for found in lost if found.least_s is not None),
        "refused": len(refused),
        "why": "; ".join(said),
    }


def _rows(found: list[Played], prices: Mapping[Any, float]) -> list[dict[str, Any]]:
    """Return the best as rows."""
    rows: list[dict[str, Any]] = []
    for number, one in enumerate(found):
        setup, room = one.branch.setup, one.room
        workload = setup.resolved().workload
        assert setup.gpus is not None
        assert room is not None
        rate = workload.num_real_tokens / (one.step_s / setup.dp_degree) / setup.gpus
        price = prices.get(setup.cluster)
        held = {limit.memory: limit.held_bytes for limit in room.limits}
        row = {
            "schedule": one.branch.family.named,
            "options": one.branch.named,
            "gpus": setup.gpus,
            "sequences": setup.batch * setup.dp_degree,
            "step_time_s": one.step_s,
            "low_s": one.within and one.within.low_s,
            "high_s": one.within and one.within.high_s,
            "tokens_per_s_per_gpu": rate,
            "tie": number > 0 and _is_tie(found[0], one),
            "fits": room.fits,
            "free_bytes": room.free_bytes,
            "peak_hbm_bytes": sum(room.terms.values()),
            "peak_socket_bytes": held.get("host", 0) + held.get("CXL", 0),
            "bound_by": one.bound_by,
            "saves": dict(one.saves),
            "unusual": _unusual(room),
        }
        rows.append(row if price is None else row | {"cost_per_billion_tokens": price / 3600 * 1e9 / rate})
    return rows


def _unusual(room: Room) -> str:
    """Return why no one would run a configuration that fits; empty where nothing is known against it."""
    for limit in room.limits:
        if limit.memory == "host" and not is_usual(limit):
            pinned, has = (nbytes / 2**30 for nbytes in (limit.held_bytes, limit.capacity_bytes))
            return f"it pins {pinned:.3g} of {has:.3g} GiB of a socket's memory"
    return ""


def _is_tie(first: Played, other: Played) -> bool:
    """Return whether another is no slower than the first: as predicted, or with all costs of both at one end of their
    range.
    """
    if first.within is None or other.within is None:
        return other.batch_s <= first.batch_s
    ends = zip((first.step_s, *first.within), (other.step_s, *other.within), strict=True)
    worth = first.branch.family.worth, other.branch.family.worth
    return any(theirs / worth[1] <= own / worth[0] for own, theirs in ends)
