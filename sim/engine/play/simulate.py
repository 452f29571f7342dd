"""The simulator: plays a checked schedule on a cluster and writes a trace.

Two engines play the same: ``reference`` by SimPy, which says what a simulation means, and ``native`` in C, which is as
much as a hundred times as fast. Their times are equal to the last bit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.accounts.trace import Trace
from sim.base.errors import InputError, ScheduleError
from sim.base.garbage import garbage_collection_off
from sim.engine.costs.cost import CostModel
from sim.engine.play import native
from sim.engine.play.fold import Fold, fold
from sim.engine.play.jitter import STEADY, Jitter, Stretch
from sim.engine.play.lowered import Lowered, Times, lowered
from sim.native.library import UnavailableError
from sim.schedule.ir.program import require_checked
from sim.schedule.proof.check import Checked
from sim.words.profile import Profile
from topology.cluster import Cluster

Engine = Literal["auto", "simpy", "native"]
"""``auto`` is native where there is a C compiler, else SimPy."""

_LOG = logging.getLogger(__name__)


class Simulation(NamedTuple):
    """A trace, and all that it was made from. Of several seeds it is the play with the median step."""

    checked: Checked
    cluster: Cluster
    profile: Profile | None
    jitter: Jitter
    cost: CostModel
    trace: Trace
    """Of the ranks that were played."""
    fold: Fold
    """Which those are."""
    noise: Jitter
    """Of this play."""
    step_times_s: tuple[float, ...]
    """Of the plays of all seeds, in order."""
    granted_s: NDArray[np.float64]
    """When each op of the trace had the SMs that it holds."""
    engine: Engine = "auto"

    def of_every_rank(self) -> Simulation:
        """Return the same with all ranks played, to be laid beside an executed step."""
        if not self.fold.played:
            return self
        return Prepared(self.checked).play(self.cluster, self.profile, self.noise, self.engine, every_rank=True)


class Prepared:
    """A checked schedule, lowered once, to be played on as many machines as are wanted."""

    def __init__(self, checked: Checked) -> None:
        require_checked(checked)
        self.checked = checked

    @property
    def lowered(self) -> Lowered:
        """The schedule as arrays; kept as long as the schedule is."""
        return lowered(self.checked)

    @garbage_collection_off()
    def play(
        self,
        cluster: Cluster,
        profile: Profile | None,
        jitter: Jitter = STEADY,
        engine: Engine = "auto",
        *,
        every_rank: bool = False,
    ) -> Simulation:
        """Return what happens on a cluster; see ``simulate``. Of equal ranks one is played, see ``fold``, unless
        ``every_rank`` has to be.
        """
        schedule = self.checked.schedule
        if schedule.num_ranks > len(cluster.devices):
            raise InputError(
                f"schedule {schedule.header.name!r} needs {schedule.num_ranks} GPUs, cluster {cluster.spec.name!r} has "
                f"{len(cluster.devices)}: set `gpus` to at most that, or `nodes`"
            )
        every_rank |= jitter.share > 0 and jitter.per_rank
        members = not jitter.share  # whose noise differs
        folded = Fold(self.checked, cluster) if every_rank else fold(self.checked, cluster, members=members)
        cost = CostModel(folded.cluster, profile)
        cost.notes.update(folded.notes)
        if jitter.share and (schedule.header.mesh.dp > 1 or not cost.cuda):
            drawn = "rank by rank" if jitter.per_rank else "the same in every replica"
            whose = "" if schedule.header.mesh.dp == 1 else f", {drawn}"
            cost.notes.add(f"kernels scatter by a share of {jitter.share:.2g}{whose}: see `jitter`")
        each = jitter.each()
        plays = list(_plays(folded, cost, jitter.stretches(folded, cost), engine))
        if any(times.ended.size and times.ended.min() < 0 for times in plays):
            raise ScheduleError(
                f"the simulation came to a standstill: communication kernels hold all SMs of a GPU while they wait for "
                f"each other; use fewer communicators at once, or set cluster.gpu.communication_sms below "
                f"{cluster.spec.gpu.communication_sms}"
            )
        traces = [
            Trace("simulated", folded.checked.schedule, found.posted, found.begun, found.ended, numbers=folded.ranks)
            for found in plays
        ]
        steps_s = [trace.step_time_s for trace in traces]
        median = sorted(range(len(each)), key=steps_s.__getitem__)[len(each) // 2]
        of_all = tuple(sorted(steps_s))
        return Simulation(
            self.checked,
            cluster,
            profile,
            jitter,
            cost,
            traces[median],
            folded,
            each[median],
            of_all,
            plays[median].granted,
            engine,
        )


def _plays(folded: Fold, cost: CostModel, stretches: Sequence[Stretch], engine: Engine) -> Iterator[Times]:
    """Yield the times of all ops with each noise."""
    if engine != "simpy":
        try:
            yield from native.plays(lowered(folded.checked), folded.cluster, cost, stretches)
        except UnavailableError as error:
            if engine == "native":
                raise InputError(f"`engine` native: {error}; install a C compiler, or take simpy") from error
            _say_once(str(error))
        else:
            return
    from sim.engine.play import reference  # noqa: PLC0415 - SimPy is loaded only where it plays

    for stretch in stretches:
        yield reference.play(folded.checked, folded.cluster, cost, stretch)


@cache
def _say_once(why: str) -> None:
    _LOG.warning("the SimPy engine plays, which takes about fifty times as long: %s", why)


def simulate(
    checked: Checked,
    cluster: Cluster,
    profile: Profile | None,
    jitter: Jitter = STEADY,
    placement: Sequence[int] | None = None,
    engine: Engine = "auto",
) -> Simulation:
    """Return what happens when rank i of a schedule runs on device ``placement[i]``, by default i; deterministic to the
    bit, and the same by either engine.

    Without a profile kernels and links run at the datasheet's rates. Raises InputError if the schedule was not checked,
    the cluster has too few devices, or the profile is of another machine.
    """
    placed = cluster if placement is None else Cluster(cluster.spec, placement)
    return Prepared(checked).play(placed, profile, jitter, engine)
