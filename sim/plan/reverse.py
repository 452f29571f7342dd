"""Plans asked the other way round: the longest context, the fewest GPUs for a target, the cheapest tokens.

Each is a search over configurations (``search``) at several lengths or numbers of GPUs. Whether any configuration fits
and reaches the target ends at the first that does; that none does, bounds prove.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from sim.base.cpu_time import CpuTime
from sim.base.errors import InputError
from sim.plan.answer import Answer, Plan
from sim.plan.lengths import PER_OCTAVE, ROUND, last_enough, lengths_of_units
from sim.plan.plan import num_jobs, require_any_built, require_price, require_searchable, shortage, told
from sim.plan.planned_batch import with_batch
from sim.plan.search.branches import Open, Played, opened, played
from sim.plan.search.families import as_ring, families
from sim.plan.search.search import Progress, Search
from sim.plan.search.space import ANYTHING, OPTIONS, Branch, Family, Target
from sim.setup import names
from sim.setup.answers.table import Table
from sim.setup.configuration import Configuration
from sim.setup.setup import Setup

LAST = 0.3
"""Which share of its time a question keeps for the plan of what it found."""
AT_ONCE = 4
"""How many families are asked first of which a search before had the best hopes."""


class _Asked(NamedTuple):
    """How a question is asked."""

    options: Mapping[str, Sequence[str]]
    target: Target
    most: int
    cpu: CpuTime
    jobs: int
    progress: Progress | None

    @property
    def kept_s(self) -> float:
        """What is kept for the plan."""
        return 0.0 if self.cpu.limit_s == math.inf else LAST * self.cpu.limit_s

    def families(self, setup: Setup) -> list[Family]:
        """Return the configurations of a setup."""
        return families(setup, self.options, self.target)

    def any(self, found: list[Family], hopes: Mapping[str, float] = {}) -> Search:
        """Return a search that ended where something fits and reaches the target, or nothing does. With the hopes of a
        search before, most families are asked only where those with the best have nothing.
        """
        found = sorted(found, key=lambda one: hopes.get(one.named, math.inf))
        lean = self.target == ANYTHING
        if not lean:  # first what takes least of what it may, not what trains most
            found = [one._replace(worth=one.within_s) for one in found]
        enough_s = 0.0 if lean else 1.0
        search = Search(
            found,
            1,
            self.cpu,
            self.progress,
            kept_s=self.kept_s,
            leanest_first=lean,
            enough_s=enough_s,
            at_once=AT_ONCE if hopes else None,
        )
        search.run(self.jobs, until_one=True)
        return search

    def last(self, setup: Setup, lengths: Sequence[int], winner: Branch, known: int) -> int:
        """Return the last of some lengths at which a configuration reaches what it has to, as it does at a known one:
        the last that its bounds allow, or the next shorter one at which it does.
        """

        def misses(short: int) -> bool:
            return not self._reaches(setup, lengths, winner, allowed - short)

        try:
            allowed = last_enough(len(lengths), known, partial(self._may_reach, setup, lengths, winner))
            if allowed == known or not misses(0):
                return allowed
            return allowed - 1 - last_enough(allowed - known, 0, misses)
        except KeyboardInterrupt:
            self.cpu.interrupted = True
            return known

    def _reaches(self, setup: Setup, lengths: Sequence[int], winner: Branch, number: int) -> bool:
        """Return whether a configuration fits at one of some lengths, and reaches the target there; no when it is too
        late to ask.
        """
        if self._is_late:
            return False
        found = played(self._at(setup, lengths[number], winner), math.inf)
        return isinstance(found, Played) and found.reaches

    def _may_reach(self, setup: Setup, lengths: Sequence[int], winner: Branch, number: int) -> bool:
        """Return whether its bounds allow that."""
        return not self._is_late and isinstance(opened(self._at(setup, lengths[number], winner)), Open)

    @property
    def _is_late(self) -> bool:
        return self.cpu.left_s() <= self.kept_s

    def _at(self, setup: Setup, seq: int | str, winner: Branch) -> Branch:
        """Return a configuration at another length."""
        there = (one for one in self.families(setup.replace(seq=seq)) if one.named == winner.family.named)
        return winner._replace(family=next(there))

    def plan(self, setup: Setup, winner: Branch) -> Plan:
        """Return the fastest of a setup that reach the target: that one which is known to, where time is over before
        any is found.
        """
        search = Search(self.families(setup), self.most, self.cpu, self.progress)
        search.run(self.jobs)
        if not search.best and isinstance(known := played(self._at(setup, setup.seq, winner), math.inf), Played):
            search.know(known)
        return told(search, self.most, {})


def longest_context(
    setup: Setup,
    *,
    step_time_s: float | None = None,
    tokens_per_s: float | None = None,
    until: int | str = "16M",
    options: Mapping[str, Sequence[str]] = OPTIONS,
    most: int = 3,
    limit_s: float | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Answer:
    """Return the longest context in tokens, up to ``until``, of which a training step fits on the GPUs of a setup,
    takes no longer than ``step_time_s`` and trains ``tokens_per_s`` on all of them, with the plan for it; what else is
    varied, and how, is as in ``plan``, but that shares of weights are tried only where one asks. A step has one
    sequence where no ``global_batch`` says how many.

    Lengths are multiples of two for each GPU (as zigzag needs), and from 128 of these on 0.8 % apart at most; where a
    schedule needs another multiple, they are padded. A configuration that is enough is followed to its own longest
    length, by bisection; then any other is looked for that is enough for the next one, until there is none. That a
    configuration takes no less memory and no less time where the length grows is taken for granted, not proved: where
    a time is asked for, the next round length is tried, too, since others divide into worse tiles and chunks. Raises
    InputError as ``plan`` does.

    >>> tiny = Setup("ulysses", model="tiny", cluster="hgx-h100", gpus=2, ulysses_degree=2, layers=2)
    >>> longest_context(tiny, options={"checkpoint": ["full"]}, until="8K").value
    8192
    """
    asked = _asked(Target(step_time_s, tokens_per_s), options, most, limit_s, jobs, progress)
    if setup.documents is not None:
        raise InputError("`documents` say how long a sequence is: leave them out where the longest is asked for")
    setup = with_batch(setup, of_any_length=True)
    if "tp_degree" not in options:
        setup = setup.replace(tp_degree=int(setup.tp_degree))  # so that all lengths are asked of the same families
    mesh, limit = _whole(setup).mesh, names.tokens("until", until)
    sharing = mesh.sharing * mesh.tp
    lengths = list(lengths_of_units(2 * sharing, limit))
    if not lengths:
        raise InputError(
            f"`until` {limit}: expected {2 * sharing * PER_OCTAVE} tokens or more where {sharing} GPUs share a sequence"
        )
    rows: list[dict[str, Any]] = []
    dropped, hopes, best, waiting = set[str](), dict[str, float](), None, [0]
    winner: Branch | None = None
    while waiting:
        at = waiting.pop(0)
        there = asked.families(setup.replace(seq=lengths[at]))
        search = asked.any([one for one in there if one.named not in dropped], hopes)
        hopes |= search.hopes
        rows.append(_verdict("seq", lengths[at], search))
        if not search.best:
            if best is None:
                require_any_built(search)
            continue
        dropped |= {lost.branch.family.named for lost in search.lost if lost.memory and not lost.branch.chosen}
        winner = search.best[0].branch
        best = asked.last(setup, lengths, winner, at)
        if best > at:
            rows.append({"seq": lengths[best], "reaches": True, "why": f"{winner.family.named}, {winner.named}"})
        ahead = {best + 1} if asked.target == ANYTHING else {best + 1, -(-(best + 2) // ROUND) * ROUND}
        waiting = sorted(number for number in ahead if number < len(lengths))
    if best is None or winner is None:
        return Answer(None, None, Table(rows))
    return Answer(lengths[best], asked.plan(setup.replace(seq=lengths[best]), winner), Table(rows))


def fewest_gpus(
    setup: Setup,
    *,
    step_time_s: float | None = None,
    tokens_per_s: float | None = None,
    counts: Sequence[int] | None = None,
    options: Mapping[str, Sequence[str]] = OPTIONS,
    most: int = 3,
    limit_s: float | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Answer:
    """Return the fewest GPUs on which a training step of the setup's length fits, takes no longer than ``step_time_s``
    and trains ``tokens_per_s``, with the plan for them; what else is varied, and how, is as in ``plan``.

    ``counts`` are tried from the fewest on, since more GPUs need not be faster; by default those that divide a node,
    and whole nodes, up to what the setup has. GPUs that are a part of a socket's have that share of its memory. Raises
    InputError as ``plan`` does, and for counts that are none.

    >>> tiny = Setup(model="tiny", cluster="hgx-h100", gpus=4, layers=2, seq="4K", global_batch=4)
    >>> fewest_gpus(tiny, step_time_s=1.0, options={"checkpoint": ["full"]}).value
    1
    """
    asked = _asked(Target(step_time_s, tokens_per_s), options, most, limit_s, jobs, progress)
    tried = _counts(setup, counts)
    setup, rows, refused = with_batch(setup, tried), [], 0
    for gpus in tried:
        there = _on(setup, gpus)
        search = asked.any(asked.families(there))
        rows.append(_verdict("gpus", gpus, search))
        if search.best:
            return Answer(gpus, asked.plan(there, search.best[0].branch), Table(rows))
        try:
            require_any_built(search)
        except InputError as error:
            refused += 1
            rows[-1] |= {"why": str(error)}
            if refused == len(tried):
                raise
    return Answer(None, None, Table(rows))


def cheapest(
    setup: Setup,
    price: float | Mapping[str, float],
    *,
    step_time_s: float | None = None,
    tokens_per_s: float | None = None,
    counts: Sequence[int] | None = None,
    options: Mapping[str, Sequence[str]] = OPTIONS,
    most: int = 3,
    limit_s: float | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Return the configurations whose tokens cost least, of those that fit, take no longer than ``step_time_s`` and
    train ``tokens_per_s``, on any number of GPUs up to what the setup has: ``counts``, by default those that divide a
    node, and whole nodes.

    ``price`` is that of a GPU-hour, of the setup's cluster or of each of several. All of it is one search: what bounds
    prove dearer is not looked into. Raises InputError as ``plan`` does, and for a price that is none.

    >>> tiny = Setup("ulysses", model="tiny", cluster="hgx-h100", gpus=2, layers=2, seq="4K")
    >>> cheapest(tiny, 2.5, options={"checkpoint": ["none"]}).best[0]["gpus"]
    1
    """
    require_searchable(most, limit_s)
    target = Target(step_time_s, tokens_per_s)
    target.require()
    prices: Mapping[Any, float] = price if isinstance(price, Mapping) else {setup.cluster: price}
    first = setup.replace(cluster=next(iter(prices)))
    setup = setup.replace(global_batch=with_batch(first, _counts(first, counts)).global_batch)
    found = []
    for cluster, hourly in prices.items():
        require_price(hourly)
        of_cluster = setup.replace(cluster=cluster)
        for gpus in _counts(of_cluster, counts):
            beside = [f"{gpus} x {names.cluster_spec(cluster).name}"]
            found += families(_on(of_cluster, gpus), options, target, hourly, beside)
    if not found:
        raise InputError("no schedule takes any of these numbers of GPUs: set `gpus`, or its degrees")
    search = Search(found, most, CpuTime(limit_s), progress)
    search.run(num_jobs(jobs))
    return told(search, most, prices, by_cost=True)


def _asked(
    target: Target,
    options: Mapping[str, Sequence[str]],
    most: int,
    limit_s: float | None,
    jobs: int | None,
    progress: Progress | None,
) -> _Asked:
    require_searchable(most, limit_s)
    target.require()
    return _Asked(options, target, most, CpuTime(limit_s), num_jobs(jobs), progress)


def _counts(setup: Setup, counts: Sequence[int] | None) -> list[int]:
    """Return the numbers of GPUs to try, in rising order."""
    if counts is not None:
        if not counts:
            raise InputError("`counts` []: expected numbers of GPUs such as [8, 16]")
        return sorted({names.at_least_one("counts", count) for count in counts})
    found = _whole(setup)
    most, per_node = found.mesh.size, found.spec.gpus_per_node
    inside, shared = [count for count in range(1, per_node) if per_node % count == 0], found.mesh.pp * found.mesh.tp
    some = (count for count in (*inside, *range(per_node, most, per_node)) if count < most and count % shared == 0)
    return sorted({*some} | {most})


def _whole(setup: Setup) -> Configuration:
    """Return all GPUs of a setup in one ring, in each of its stages."""
    return as_ring(setup.replace(ulysses_degree=None, ring_degree=None, cp=None, dp_degree=1))


def _on(setup: Setup, gpus: int) -> Setup:
    """Return a setup on so many GPUs, with as many nodes as these need. GPUs that are a part of a socket's get that
    share of its memory, because the other GPUs of the socket use the rest.
    """
    there = setup.replace(gpus=gpus, nodes=None, dp_degree=1)
    spec = _whole(there).spec
    if spec.socket is None or (each := -(-spec.gpus_per_node // spec.socket.per_node)) <= gpus:
        return there
    tiers = {"dram": spec.socket.dram} | ({"cxl": spec.socket.cxl} if spec.socket.cxl else {})
    shares = {name: tier.capacity_bytes * gpus // each for name, tier in tiers.items()}
    return there.replace(set={f"cluster.socket.{name}.capacity_bytes": share for name, share in shares.items()})


def _verdict(what: str, value: int, search: Search) -> dict[str, Any]:
    """Return a row: whether anything reaches the target and what does, or what is missing least."""
    row: dict[str, Any] = {what: value, "reaches": None, "why": "not known in this time: `limit_s` gives it longer"}
    if search.best:
        first = search.best[0]
        why = f"{first.branch.family.named}, {first.branch.named}: {first.step_s:.4g} s"
        return row | {"reaches": True, "why": why}
    if search.open:
        return row
    late = [found.least_s * found.branch.family.worth for found in search.lost if found.least_s is not None]
    late += [one.step_s for one in search.played if not one.reaches]
    said = [f"what may fit takes {min(late):.4g} s or more"] if late else []
    said += [shortage(search)] if any(found.memory for found in search.lost) else []
    return row | {"reaches": False, "why": "; ".join(said) or "builders refuse all"}
