"""Branch and bound over configurations of a training step, in as many processes as are wanted.

    families ── options, one after the other ── configurations ── simulation ── memory of all ranks

A branch is a schedule with its degrees and its first options. None of its configurations is faster than the one that
recomputes and copies least, and none holds less than the one that holds least (``bounds``, from one rank's program). A
usual configuration that fits is simulated first (``usual``), and its family is searched before others; of very many
families one of each of the most promising cuts of weights, and then those like the best. What is looked at next is only
a guess: the bound, and what links add where nothing hides them, or what they added in the same family. The search ends
where no bound is below the last of the best, or with its time; a usual configuration that is simulated then is not cut
short.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from sim.base.cpu_time import CpuTime
from sim.base.workers import Workers
from sim.plan.search.bounds import Least
from sim.plan.search.branches import Lost, Open, Played, opened, parts, played
from sim.plan.search.space import Branch, Family
from sim.plan.search.usual import MANY, cut_of, guesses, of_many, that_fit

Progress = Callable[[int, int, float, Sequence[Played]], object]
"""Told how many configurations are settled, of how many, the seconds of CPU time that are left, and the best so far, of
which the fastest is first."""

NEAR = 1.02
"""How much slower by its bound what is looked at may be than the fastest, while nothing is known that fits."""

_SOON_S = 0.05
"""How soon it is asked again at the earliest how much CPU time is left."""

LARGE = 4
"""How many times the ops of the smallest program one has that is looked at last, where any that fits will do."""


class Search:
    """What is known of all configurations."""

    def __init__(
        self,
        families: list[Family],
        most: int,
        cpu: CpuTime,
        progress: Progress | None,
        *,
        kept_s: float = 0.0,
        leanest_first: bool = False,
        enough_s: float = 0.0,
        at_once: int | None = None,
    ) -> None:
        """Take families, of which so many are asked for bounds ``at_once``, by default all; the others in their order
        once nothing is left of what is known. Of the CPU time ``kept_s`` are left for others.
        """
        self.families, self._most, self._progress = families, most, progress
        self._leanest_first, self._enough_s = leanest_first, enough_s
        self._cpu, self._kept_s = cpu, kept_s
        self._place = {family.named: place for place, family in enumerate(families)}
        self.count = sum(family.num_leaves for family in families)
        self.open: list[Open] = [Open(Branch(family)) for family in families]
        self._unasked = {id(found) for found in self.open}
        """Branches without bounds."""
        self._at_once = {id(found) for found in self.open[:at_once]}
        self.best: list[Played] = []
        """Those that fit, the fastest first."""
        self.played: list[Played] = []
        self.lost: list[Lost] = []
        self._added_s: dict[str, float] = {}
        """Per family what a configuration took at least beyond its bound."""
        self._roots: dict[str, Least] = {}
        """Per family what its fastest configurations are not below, in seconds."""
        self._usual = ""
        """The family of the usual configuration that was looked for first."""
        self._turn = 0
        self._ops: dict[str, int] = {}
        """Per family how many ops a rank has."""

    @property
    def beaten_at(self) -> float:
        """Seconds over worth from which on a configuration is not among the best."""
        return self.best[self._most - 1].batch_s if len(self.best) >= self._most else float("inf")

    @property
    def hopes(self) -> dict[str, float]:
        """By name of the families that were opened, how near they may come to what is wanted; less is nearer. It is the
        seconds over worth of their bounds, or the missing bytes where the only question is whether anything fits.
        """
        found: dict[str, float] = {}
        asked = [one for one in self.open if id(one) not in self._unasked]
        if self._leanest_first:
            near = [(one.branch, float(-one.leanest.free_bytes)) for one in asked if one.leanest]
        else:
            near = [(one.branch, one.least_s) for one in asked]
            near += [(one.branch, one.least_s) for one in self.lost if one.least_s is not None]
        near += [(one.branch, one.batch_s) for one in self.played]
        for branch, hope in near:
            named = branch.family.named
            found[named] = min(hope, found.get(named, hope))
        return found

    @property
    def least_s(self) -> float:
        """Lower bound of all that was not simulated; infinite where nothing is left."""
        return min(map(self.least_of, self.open), default=float("inf"))

    def least_of(self, found: Open) -> float:
        """Return the lower bound of a branch. Of stages that nobody has looked at, it is that of the family with one
        stage whose ranks do the same work.
        """
        family, known = found.branch.family, self._roots.get(found.branch.family.like)
        if known is None:
            return found.least_s
        return max(found.least_s, (known.kernels_s + family.bubbles * known.layers_s) / family.worth)

    def _is_told(self, found: Open) -> bool:
        """Return whether something is known of a branch's bounds."""
        return id(found) not in self._unasked or found.branch.family.like in self._roots

    def run(self, jobs: int, *, until_one: bool = False) -> None:
        """Search until no bound is below the last of the best, or the time is over. With ``until_one`` it ends with the
        first configuration that fits and reaches the target.
        """
        try:
            self._begin()  # before there are workers, which find loaded what it has loaded
            with Workers(jobs) as workers:
                try:
                    self._search(workers, jobs, until_one)
                finally:
                    self._cpu.add(workers.cpu_s)
        except KeyboardInterrupt:
            self._cpu.interrupted = True

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C has ended it."""
        return self._cpu.interrupted and bool(self.open)

    def _begin(self) -> None:
        """Look for a usual configuration that fits, so that something is known at once."""
        if self._leanest_first or self._enough_s:
            return
        if len(self.families) >= MANY:
            self._begin_with_many()
        elif found := next((one for one in that_fit(self.families, self._is_late) if one.reaches), None):
            self.know(found)
            self._usual = found.branch.family.named
            self._tell(self._left_s())

    def _begin_with_many(self) -> None:
        """Look for usual configurations of the cuts of weights that may be fastest. Bounds of all families may take
        longer than there is time: those are asked for at once that cut weights as the best does and have as many
        replicas, others in the order of their cuts' guesses.
        """
        guessed_s = guesses(self.families, self._is_late)
        for found in of_many(self.families, guessed_s, self._is_late):
            if found.reaches:
                self.know(found)
                self._tell(self._left_s())
        self.open.sort(key=lambda one: guessed_s[cut_of(one.branch.family)])

        def size(one: Open | Played) -> tuple[int, int, int]:
            return (*cut_of(one.branch.family), one.branch.family.setup.dp_degree)

        self._at_once = {id(one) for one in self.open if self.best and size(one) == size(self.best[0])}

    def _is_late(self) -> bool:
        return self._left_s() <= 0

    def _left_s(self, workers_s: float = 0.0) -> float:
        return self._cpu.left_s(workers_s) - self._kept_s

    def _search(self, workers: Workers, jobs: int, until_one: bool) -> None:
        running: dict[int, Open] = {}
        while (left_s := self._left_s(workers.cpu_s)) > 0:
            while workers.idle and (found := self._pick(running)):
                if id(found) in self._unasked:
                    number = workers.submit(opened, found.branch)
                elif found.branch.is_leaf:
                    number = workers.submit(played, found.branch, self.beaten_at)
                else:
                    number = workers.submit(parts, found)
                running[number] = found
            if not running:
                return
            done = workers.wait(None if left_s == math.inf else max(_SOON_S, left_s / jobs))
            if done is None:
                continue
            number, result = done
            self._take(running.pop(number), result)
            self._tell(self._left_s(workers.cpu_s))
            if until_one and self.best:
                return

    def _take(self, asked: Open, result: Open | Lost | Played | list[Open | Lost]) -> None:
        self.open = [found for found in self.open if found is not asked]
        self._unasked.discard(id(asked))
        for one in result if isinstance(result, list) else [result]:
            if isinstance(one, Open):
                if not self._is_known(one.branch):
                    self.open.append(one)
                if one.fastest is not None:
                    if not one.branch.chosen:
                        self._roots[one.branch.family.named] = one.fastest
                    self._ops.setdefault(one.branch.family.named, one.fastest.ops)
            elif isinstance(one, Lost):
                self.lost.append(one)
            else:
                self.know(one)
                name, added_s = asked.branch.family.named, one.batch_s - asked.least_s
                self._added_s[name] = min(added_s, self._added_s.get(name, added_s))

    def _is_known(self, branch: Branch) -> bool:
        """Return whether a configuration was simulated, as a usual one is before all others."""
        return any(one.branch == branch for one in self.played)

    def know(self, one: Played) -> None:
        """Take a configuration with what its step takes."""
        self.played.append(one)
        if one.room is not None:
            self.best = sorted([*self.best, one], key=self._order)

    def _order(self, one: Played) -> tuple[float, int, list[int]]:
        """Return the place of a configuration in the result. Equal times are ordered by family and values, not by which
        worker answered first.
        """
        family, chosen = one.branch
        places = [list(values).index(value) for values, value in zip(family.grid.values(), chosen, strict=True)]
        return one.batch_s, self._place.get(family.named, len(self._place)), places

    def _pick(self, running: dict[int, Open]) -> Open | None:
        """Return what to look at next; None if nothing waits.

        While there is one, it is a branch of the usual configuration's family. Branches get their bounds when they are
        asked for at once, or when no others wait. Where it is only asked whether anything fits, the branch that holds
        least is next. Once something fits, configurations and branches take turns, that of the least guessed time
        first. Until then it is the smallest of those within ``NEAR`` of that time, or within ``enough_s``, so that
        something is soon known that fits; those whose memory may not be enough come last.
        """
        taken = {id(found) for found in running.values()}
        waiting = [found for found in self.open if id(found) not in taken and self.least_of(found) < self.beaten_at]
        if self.best and (kin := [found for found in waiting if found.branch.family.named == self._usual]):
            waiting = kin
        unasked = [found for found in waiting if not self._is_told(found)]
        if soon := [found for found in unasked if id(found) in self._at_once]:
            return soon[0]
        waiting = [found for found in waiting if self._is_told(found)]
        if unasked and not waiting:
            return unasked[0]
        if self._leanest_first:
            return max(waiting, key=self._ease, default=None)
        self._turn += 1
        if self.best:
            kind = [found for found in waiting if found.branch.is_leaf == bool(self._turn % 2)]
            return min(kind or waiting, key=self._guessed_s, default=None)
        waiting = [found for found in waiting if not found.leanest or found.leanest.free_bytes >= 0] or waiting
        nearest_s = max(self._enough_s, NEAR * min(map(self._guessed_s, waiting), default=0.0))
        near = [found for found in waiting if self._guessed_s(found) <= nearest_s]
        if self._enough_s:
            near.sort(key=self._ease, reverse=True)
        return max(near, key=lambda found: len(found.branch.chosen), default=None)

    def _guessed_s(self, found: Open) -> float:
        """Return the guessed time of a branch: its bound, and what links added to others of its family, or may add."""
        return self.least_of(found) + self._added_s.get(found.branch.family.named, found.exposed_s)

    def _tell(self, left_s: float) -> None:
        if self._progress is not None:
            settled = len(self.played) + sum(found.branch.num_leaves for found in self.lost)
            self._progress(settled, self.count, max(0.0, left_s), self.best[: self._most])

    def _ease(self, found: Open) -> tuple[bool, float, int]:
        """Return how soon a branch may show that something fits; the largest is soonest. It is what holds least, but
        what takes long to build comes last, such as schedules whose chunks grow in number.
        """
        sizes = self._ops.values()
        large = self._ops.get(found.branch.family.named, 0) > LARGE * min(sizes, default=0)
        free = float("-inf") if found.leanest is None else found.leanest.free_bytes
        return not large, free, len(found.branch.chosen)
