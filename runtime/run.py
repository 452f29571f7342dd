"""Runs a schedule on the processes of a session, as often as wanted, and joins what the ranks saw into one trace."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from runtime.execution.execute import Executed, RankPlayer
from runtime.execution.verify import output_errors, verifiable
from runtime.processes.launch import Session
from runtime.processes.rank import RankContext
from sim.errors import InputError
from sim.schedule.derive.matching import describe
from sim.schedule.ir.program import require_checked
from sim.schedule.proof.check import Checked, RankSchedule
from sim.trace import Row, Trace


class Step(NamedTuple):
    """One executed step."""

    trace: Trace
    peak_bytes: list[int]
    """Per rank, the largest sum of its buffers."""
    allocated_bytes: list[int]
    """Per rank, the most that a GPU's allocator had given; 0 on a CPU."""


class ScheduleRun:
    """One schedule on a session."""

    def __init__(self, session: Session, checked: Checked) -> None:
        require_checked(checked)
        ranks = checked.schedule.num_ranks
        if ranks != session.ranks:
            raise InputError(f"a schedule of {ranks} ranks cannot run on a session of {session.ranks}")
        self._session = session
        self._checked = checked
        self._key = checked.schedule.hash
        self._name_ops()
        session.call_each(_prepare, [(self._key, checked.of_rank(rank)) for rank in range(ranks)])

    def step(self, *, ahead: bool = False) -> Step:
        """Execute one step on all ranks; ``ahead`` as ``RankPlayer.play``."""
        self._name_ops()
        done: list[Executed] = self._session.call(_step, self._key, ahead)
        zero_s = min(executed.start_s for executed in done)
        one_clock = self._session.one_host  # those of several hosts say nothing of each other: all start at 0
        late_s = [executed.start_s - zero_s if one_clock else 0.0 for executed in done]
        rows = {
            (row.rank, row.op): row._replace(
                posted_s=row.posted_s + late_s[row.rank],
                begin_s=row.begin_s + late_s[row.rank],
                end_s=row.end_s + late_s[row.rank],
            )
            for executed in done
            for row in executed.rows
        }
        trace = Trace(
            player="executed",
            schedule_hash=self._key,
            num_ranks=self._session.ranks,
            rows=_with_group_begins(rows, self._checked),
        )
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


def _with_group_begins(rows: dict[tuple[int, int], Row], checked: Checked) -> list[Row]:
    """Return the rows by rank and op, with group ops beginning when the last of those involved has posted."""
    begins: dict[tuple[int, int], float] = {}
    for transfer in checked.matching.transfers:
        both = max(rows[transfer.source].posted_s, rows[transfer.target].posted_s)
        for side in (transfer.source, transfer.target):
            begins[side] = max(begins.get(side, 0.0), both)
    for group in checked.matching.groups:
        last = max(rows[member].posted_s for member in group.members)
        begins.update(dict.fromkeys(group.members, last))
    return [
        row._replace(begin_s=min(begins[key], row.end_s)) if key in begins else row for key, row in sorted(rows.items())
    ]


def _prepare(context: RankContext, key: str, schedule: RankSchedule) -> None:
    if key not in context.state:
        context.state[key] = RankPlayer(schedule, context.device, context.attention, context.progress, context.limit)


def _step(context: RankContext, key: str, ahead: bool) -> Executed:
    player: RankPlayer = context.state[key]
    return player.play(ahead=ahead)


_Array = np.ndarray[Any, np.dtype[np.float64]]


def _outputs(context: RankContext, key: str) -> list[_Array]:
    player: RankPlayer = context.state[key]
    return [value.double().numpy() for value in player.outputs()]


def _close(context: RankContext, key: str) -> None:
    context.state.pop(key).close()
