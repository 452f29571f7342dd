"""Runs a schedule on the processes of a session, as often as wanted, and joins what the ranks saw into one trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from runtime.execution.execute import Executed, RankPlayer
from runtime.execution.verify import output_errors, verifiable
from runtime.processes.launch import Session
from runtime.processes.rank import RankContext
from sim.accounts.trace import Times, Trace, ops_of
from sim.base.errors import InputError
from sim.schedule.derive.matching import describe
from sim.schedule.ir.program import require_checked
from sim.schedule.proof.check import Checked, RankSchedule


class Step(NamedTuple):
    """One executed step."""

    trace: Trace
    peak_bytes: list[int]
    """Per rank, the largest sum of its buffers."""
    allocated_bytes: list[int]
    """Per rank, the most that a GPU's allocator had given; 0 on a CPU."""


class ScheduleRun:
    """One schedule on a session. Rank i computes at ``speeds[i]`` of what its CPU can, by default at all of it."""

    def __init__(self, session: Session, checked: Checked, speeds: Sequence[float] = ()) -> None:
        require_checked(checked)
        ranks = checked.schedule.num_ranks
        if ranks != session.ranks:
            raise InputError(f"a schedule of {ranks} ranks cannot run on a session of {session.ranks}")
        self._session = session
        self._checked = checked
        self._key = checked.schedule.hash
        self._name_ops()
        every = speeds or [1.0] * ranks
        if len(every) != ranks or not all(0 < speed <= 1 for speed in every):
            raise InputError(f"speeds {tuple(speeds)}: expected one above 0, at most 1, for each of {ranks} ranks")
        session.call_each(_prepare, [(self._key, checked.of_rank(rank), every[rank]) for rank in range(ranks)])

    def step(self, *, ahead: bool = False) -> Step:
        """Execute one step on all ranks; ``ahead`` as ``RankPlayer.play``."""
        self._name_ops()
        done: list[Executed] = self._session.call(_step, self._key, ahead)
        zero_s = min(executed.start_s for executed in done)
        one_clock = self._session.one_host  # those of several hosts say nothing of each other: all start at 0
        late_s = [executed.start_s - zero_s if one_clock else 0.0 for executed in done]
        posted_s = np.concatenate([one.posted_s + late for one, late in zip(done, late_s, strict=True)])
        ended_s = np.concatenate([one.ended_s + late for one, late in zip(done, late_s, strict=True)])
        begun_s = _group_begins(posted_s, ended_s, self._checked)
        ran = [name for executed in done for name in executed.ran]
        trace = Trace("executed", self._checked.schedule, posted_s, begun_s, ended_s, ran)
        return Step(trace, [executed.peak_bytes for executed in done], [executed.allocated_bytes for executed in done])

    def errors(self) -> dict[str, float]:
        """Return how far the outputs of the last step are from the reference, see ``output_errors``."""
        verifiable(self._checked.schedule.header.workload)
        held: list[list[_Array]] = self._session.call(_outputs, self._key)
        return output_errors(self._checked, [list(map(torch.from_numpy, of_rank)) for of_rank in held])

    def close(self) -> None:
        """Free what the ranks hold for this schedule."""
        self._session.call(_close, self._key)

    def _name_ops(self) -> None:
        self._session.name_ops(lambda rank, op: describe(self._checked.schedule, (rank, op)))


def _group_begins(posted_s: Times, ended_s: Times, checked: Checked) -> Times:
    """Return when ops begin: group ops when the last of those involved has posted, others when posted."""
    starts = ops_of(checked.schedule).starts
    begun_s = posted_s.copy()
    for transfer in checked.matching.transfers:
        sides = [starts[rank] + index for rank, index in (transfer.source, transfer.target)]
        begun_s[sides] = np.maximum(begun_s[sides], posted_s[sides].max())
    for group in checked.matching.groups:
        members = [starts[rank] + index for rank, index in group.members]
        begun_s[members] = posted_s[members].max()
    return np.minimum(begun_s, ended_s)


def _prepare(context: RankContext, key: str, schedule: RankSchedule, speed: float) -> None:
    if key not in context.state:
        context.state[key] = RankPlayer(
            schedule, context.device, context.attention, context.progress, context.limit, speed
        )


def _step(context: RankContext, key: str, ahead: bool) -> Executed:
    player: RankPlayer = context.state[key]
    return player.play(ahead=ahead)


_Array = np.ndarray[Any, np.dtype[np.float64]]


def _outputs(context: RankContext, key: str) -> list[_Array]:
    player: RankPlayer = context.state[key]
    return [value.double().numpy() for value in player.outputs()]


def _close(context: RankContext, key: str) -> None:
    context.state.pop(key).close()
