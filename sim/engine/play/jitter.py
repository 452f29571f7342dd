"""Noise: no kernel takes the same time twice. It decides which of two kernels is first where microseconds do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.base.errors import InputError
from sim.base.kept import kept
from sim.engine.costs.cost import CostModel
from sim.engine.play.fold import Fold
from sim.engine.play.lowered import lowered
from sim.schedule.proof.check import Checked

KERNELS = 0.0127
"""Standard deviation of a short kernel's time on a GPU, as a share. Of 215 kernels of A100 with nothing beside them
(NetX-lab/Echo-slowdown@7d698a7, merge/output/merged_features.csv, rows without overlap) quartiles of the time in a run
over that alone are 0.033 apart below 10 us, 0.017 to 0.048 from 10 to 200 us, 0.007 above (0.22 ms in the mean), and
0.003 for GEMMs of 2.8 ms. Divided by 1.35 and by the root of two, for a ratio of two times, that is 0.09 us for each
root of a microsecond, as disturbances that are independent add up: 0.0127 at 50 us."""

SHORT_S = 50e-6
"""Kernels up to this scatter by the whole share, longer ones by less, with the root of their time."""

HANDOFFS = 0.13
"""Standard deviation, as a share, of the time until an event of one stream wakes another on a GPU. Launches take 11.3
to 17.7 us, 14.5 in the mean, read as a 90 % range (NVIDIA/dgxc-benchmarking@841f546, cpu_overhead). NCCL's single hops
scatter as much: 3.1 to 4.4 us between 2 and 8 A100 (NVIDIA/nccl-tests issue 123)."""

CHIPS = 0.015
"""Standard deviation between GPUs of one kind, as a share of a kernel's time at their power limit: chips need different
voltages for the same clock, so the limit gives each a clock of its own. Over five clusters the performance of equal
GPUs varies by 8 % (Sinha et al., "Not All GPUs Are Created Equal", SC 2022): from whisker to whisker, so 5.4 standard
deviations of a normal distribution. Between the 8 GPUs of a node it is 5 % (stas00/ml-engineering, its README on
accelerators), and 8 draws have a range of 2.85 deviations."""

MOST_SEEDS = 99
_FEW = 2**19
"""Ops of a schedule for which what was drawn is kept: at most 4 MiB a seed."""

Stretch = NDArray[np.float64] | None
"""Per op a factor: of a kernel's time, or on GPUs of the event that wakes another op. None: no noise."""


class Jitter(NamedTuple):
    """Noise of ``share`` of a kernel's time, drawn before anything is played.

    On a GPU the factor is exp(share z), z standard normal: clocks go both ways, and the median is what was measured;
    but no kernel is faster than its FLOPs at the peak. Kernels at the power limit have a factor of their GPU as well,
    exp(CHIPS z); without noise all GPUs are as slow as the slowest of the job in the median. On a CPU the factor is
    1 + share |z|, since others can only take time away. Ranks draw by their role, so that data-parallel replicas stay
    equal; the GPU of a role is the slowest of all replicas, since they wait for it.
    """

    share: float = 0.0
    seed: int = 0
    per_rank: bool = False
    """Whether every rank draws for itself; then all are played."""
    seeds: int = 1
    """How many seeds are played, from ``seed`` on; odd, since the median of their steps is what counts."""
    among: int = 0
    """Of how many GPUs the slowest one is as slow as all are without noise, where it is not of those of the schedule:
    of a larger step that this one stands for."""

    def each(self) -> list[Jitter]:
        """Return the noise of each seed; without noise one is as good as many."""
        seeds = range(self.seed, self.seed + self.seeds) if self.share else [self.seed]
        return [self._replace(seed=seed, seeds=1) for seed in seeds]

    def stretch(self, folded: Fold, cost: CostModel) -> Stretch:
        """Return the factors of all ops with the noise of the first seed."""
        return self._replace(seeds=1).stretches(folded, cost)[0]

    def stretches(self, folded: Fold, cost: CostModel) -> list[Stretch]:
        """Return the factors of all ops with the noise of each seed; their z are the same for the same seed, rank (or
        role) and place in its program, whatever they cost.
        """
        arrays = lowered(folded.checked)
        own, counts = arrays.op_use >= 0, [end - begin for begin, end, _ in arrays.programs.tolist()]
        limited = np.array([cost.limited(use) for use in arrays.uses.found] or [0.0])
        reached = np.where(own, limited[arrays.op_use], 0.0) if limited.any() else None

        def chips(noise: Jitter) -> Stretch:
            return None if reached is None else np.repeat(_chips(noise, folded), counts) ** reached

        if not self.share:
            return [chips(self)]
        if not cost.cuda:
            return [np.where(own, 1.0 + self.share * np.abs(_z(one, folded, counts)), 1.0) for one in self.each()]
        taken_s = np.array([cost.kernel_seconds(0, use)[0] for use in arrays.uses.found] or [0.0])
        share = self.share * np.sqrt(SHORT_S / np.maximum(taken_s, SHORT_S))
        scatter: NDArray[np.float64] = np.where(own, share[arrays.op_use], HANDOFFS)
        peak = np.array([cost.peak_share(use) for use in arrays.uses.found] or [0.0])
        least: NDArray[np.float64] = np.where(own, peak[arrays.op_use], 0.0)
        found: list[Stretch] = []
        for one in self.each():
            of_chips = chips(one)
            factors = np.exp(scatter * _z(one, folded, counts)) * (1.0 if of_chips is None else of_chips)
            found.append(np.maximum(factors, least))
        return found

    def slowest(self, folded: Fold, cost: CostModel) -> float:
        """Return the factor of the slowest GPU at the power limit; 1 where no kernel reaches it."""
        limited = max((cost.limited(use) for use in lowered(folded.checked).uses.found), default=0.0)
        return math.pow(_chips(self, folded).max(), limited)


def _chips(noise: Jitter, folded: Fold) -> NDArray[np.float64]:
    """Return the factor at the power limit of the GPU of each rank that is played."""
    schedule = folded.checked.schedule
    num_ranks = schedule.num_ranks
    if not noise.share:
        return np.full(num_ranks, _slowest(0.5, noise.among or len(folded.of_all([0.0] * num_ranks))))
    roles = [rank if noise.per_rank else schedule.role(rank) for rank in range(num_ranks)]
    among = 1 if noise.per_rank else schedule.whole.header.mesh.dp
    drawn = {role: _slowest(np.random.default_rng([noise.seed, role, 1]).random(), among) for role in set(roles)}
    return np.array([drawn[role] for role in roles])


def _slowest(quantile: float, among: int) -> float:
    """Return a quantile of the factor of the slowest of so many GPUs at their power limit."""
    return math.exp(CHIPS * NormalDist().inv_cdf(quantile ** (1 / among)))


@kept
def _drawn(_: Checked) -> dict[tuple[int, bool], NDArray[np.float64]]:
    """Return where the z of a schedule's ops are kept, by seed and by whether ranks draw for themselves: they are those
    of all what-ifs.
    """
    return {}


def _z(noise: Jitter, folded: Fold, counts: Sequence[int]) -> NDArray[np.float64]:
    """Return the z of all ops of ranks that have so many each."""
    known, key, role = _drawn(folded.checked), (noise.seed, noise.per_rank), folded.checked.schedule.role
    if key in known:
        return known[key]
    z = _draw(noise.seed, [rank if noise.per_rank else role(rank) for rank in range(len(counts))], counts)
    if len(z) <= _FEW:
        known[key] = z
    return z


def _draw(seed: int, roles: Sequence[int], counts: Sequence[int]) -> NDArray[np.float64]:
    """Return the z of the ops of all ranks, of some roles, that have so many each."""
    # Of replicas that have shards of their own the last one may pad what it sends, which takes more ops.
    most = max(counts, default=0)
    drawn = {role: np.random.default_rng([seed, role]).standard_normal(most) for role in dict.fromkeys(roles)}
    return np.concatenate([drawn[role][:count] for role, count in zip(roles, counts, strict=True)])


STEADY = Jitter()


def require_seeds(seeds: object) -> int:
    """Return a number of seeds that has a median; raises InputError for another."""
    if not isinstance(seeds, int) or not 1 <= seeds <= MOST_SEEDS or seeds % 2 == 0:
        raise InputError(f"`seeds` {seeds}: expected an odd number from 1 to {MOST_SEEDS}, whose median is taken")
    return seeds
