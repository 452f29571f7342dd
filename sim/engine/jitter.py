"""Noise: no kernel takes the same time twice. It decides which of two kernels is first where microseconds do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.engine.cost import CostModel
from sim.engine.lowered import lowered
from sim.errors import InputError
from sim.kept import kept
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

MOST_SEEDS = 99
_FEW = 2**17
"""Ops of a schedule for which what was drawn is kept: at most 1 MiB a seed."""

Stretch = NDArray[np.float64] | None
"""Per op a factor: of a kernel's time, or on GPUs of the event that wakes another op. None: no noise."""


class Jitter(NamedTuple):
    """Noise of ``share`` of a kernel's time, drawn before anything is played.

    On a GPU the factor is exp(share z), z standard normal: clocks go both ways, and the median is what was measured;
    but no kernel is faster than its FLOPs at the peak. On
    a CPU it is 1 + share |z|, since others can only take time away. Ranks draw by their role, so that data-parallel
    replicas, which have the same, stay equal.
    """

    share: float = 0.0
    seed: int = 0
    per_rank: bool = False
    """Whether every rank draws for itself; then all are played."""
    seeds: int = 1
    """How many seeds are played, from ``seed`` on; odd, since the median of their steps is what counts."""

    def each(self) -> list[Jitter]:
        """Return the noise of each seed; without noise one is as good as many."""
        seeds = range(self.seed, self.seed + self.seeds) if self.share else [self.seed]
        return [self._replace(seed=seed, seeds=1) for seed in seeds]

    def stretch(self, checked: Checked, cost: CostModel) -> Stretch:
        """Return the factors of all ops; their z are the same for the same seed, rank (or role) and place in its
        program, whatever they cost.
        """
        if not self.share:
            return None
        mesh, arrays = checked.schedule.header.mesh, lowered(checked)
        roles = [rank if self.per_rank else mesh.role(rank) for rank in range(len(arrays.programs))]
        known = _drawn(checked)
        z = known.get((self.seed, self.per_rank))
        if z is None:
            z = _draw(self.seed, roles, [end - begin for begin, end, _ in arrays.programs.tolist()])
            if arrays.num_ops <= _FEW:
                known[self.seed, self.per_rank] = z
        own = arrays.op_use >= 0
        if not cost.cuda:
            return np.where(own, 1.0 + self.share * np.abs(z), 1.0)
        taken_s = np.array([cost.kernel_seconds(0, use)[0] for use in arrays.uses.found] or [0.0])
        share = self.share * np.sqrt(SHORT_S / np.maximum(taken_s, SHORT_S))
        scatter: NDArray[np.float64] = np.where(own, share[arrays.op_use], HANDOFFS)
        factors: NDArray[np.float64] = np.exp(scatter * z)
        peak = np.array([cost.peak_share(use) for use in arrays.uses.found] or [0.0])
        return np.maximum(factors, np.where(own, peak[arrays.op_use], 0.0))


@kept
def _drawn(_: Checked) -> dict[tuple[int, bool], NDArray[np.float64]]:
    """Return where the z of a schedule's ops are kept, by seed and by whether ranks draw for themselves: they are those
    of all what-ifs.
    """
    return {}


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
