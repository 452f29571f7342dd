"""Executes the cells of a sweep in networks that are built for them, in turn, and predicts each from what is known
before: kernels of this machine, what transfers were calibrated to take, and the rates.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from experiments.evidence.links.lab import FAULTS, FAULTY, LabCell, Repeat
from experiments.evidence.machine import require_torch
from sim.base.errors import InputError
from sim.setup.prediction import Prediction
from sim.setup.setup import Setup
from sim.words.profile import Profile
from topology.specs import ClusterSpec

if TYPE_CHECKING:
    from calibrate.lab import Checked
    from runtime.processes.launch import Session

YIELDS = 0.9
"""Share of a rate that a lone transfer has to get: else this machine cannot yield the rate, and it is left out."""
_TRIES = 3
"""Transfers of which the fastest tells whether a rate is yielded."""
_LEAST_S, _MOST_STEPS = 0.5, 5
"""Steps of a repeat take so long together, but are no more than that."""
_COLD_S = 2.0
"""Predicted steps below it begin with one that does not count: other cells were executed since, whose buffers fill the
caches, which shows in a short one (half a second of twelve cells in turn: 9 % longer than of one by itself).
"""


class LabSweep(NamedTuple):
    """What is to be executed."""

    cells: Sequence[LabCell]
    base: Setup
    """What all cells have in common: model, scope, layers, profile of the lab."""
    ranks: int
    profile: Profile
    repeats: int


def prediction_of(cell: LabCell, sweep: LabSweep) -> Prediction:
    """Return what the simulator says of a cell: from the kernels of this machine and the rates alone."""
    return setup_of(cell, sweep).predicted()


def setup_of(cell: LabCell, sweep: LabSweep) -> Setup:
    """Return a cell as a setup."""
    fields: dict[str, Any] = {}
    if cell.placement:
        fields = {"ulysses_degree": 2, "ring_degree": sweep.ranks // 2, "set": [f"schedule.placement={cell.placement}"]}
    return sweep.base.replace(
        schedule=cell.schedule, cluster=network_spec(cell, sweep), profile=sweep.profile, gpus=sweep.ranks,
        seq=cell.seq, **fields,
    )  # fmt: skip


def network_spec(cell: LabCell, sweep: LabSweep) -> ClusterSpec:
    """Return the cluster of a cell: a network of the lab at its rate."""
    from calibrate.lab import lab_cluster

    spec = lab_cluster(sweep.profile, cell.network, sweep.ranks, cell.bytes_per_s)
    return msgspec.structs.replace(spec, per_gpu={FAULTY: FAULTS[cell.fault]}) if cell.fault else spec


def measured_lab(
    sweep: LabSweep, keep: Callable[[LabCell, Prediction, Repeat], None], leave_out: Callable[[str], None],
    advance: Callable[[str], None],
) -> None:  # fmt: skip
    """Execute every cell so often; ``keep`` gets each repeat, ``advance`` hears what is done. All cells take turns, so
    that a noisy minute does not hit one alone. A rate that this machine does not yield is left out, with what it got.
    """
    require_torch()
    predictions = {cell: found for cell in sweep.cells if (found := _predicted(cell, sweep, leave_out))}
    with ExitStack() as stack:
        rooms: list[_Room] = []
        for _, together in groupby(predictions, key=lambda cell: cell.place):
            cells = list(together)
            advance(f"building {cells[0].where}")
            room = stack.enter_context(_room({cell: predictions[cell] for cell in cells}, sweep.ranks))
            if why := room.slower_than_set():
                leave_out(why)
                continue
            rooms.append(room)
        for number in range(sweep.repeats):
            for room in rooms:
                room.arrive()
                for cell in room.predictions:
                    advance(f"repeat {number + 1} of {sweep.repeats}: {cell.name}")
                    keep(cell, predictions[cell], room.repeat(cell))


def _predicted(cell: LabCell, sweep: LabSweep, leave_out: Callable[[str], None]) -> Prediction | None:
    try:
        return prediction_of(cell, sweep)
    except InputError as error:
        leave_out(f"{cell.name}: {error}")
        return None


class _Room:
    """A network that was built, with ranks in it that hold all schedules that they are to execute there."""

    def __init__(self, predictions: dict[LabCell, Prediction], session: Session) -> None:
        from calibrate.lab import Checks
        from runtime.run import ScheduleRun

        self.predictions = predictions
        self._cell, first = next(iter(predictions.items()))
        workload = first.checked.schedule.header.workload
        self._checks = Checks(session, first.cluster, workload.model, workload.dtype)
        speeds = [device.speed for device in first.cluster.devices[: session.ranks]]
        self._runs = {cell: ScheduleRun(session, found.checked, speeds) for cell, found in predictions.items()}
        self._last: Checked | None = None
        """The check after what was executed last."""

    def slower_than_set(self) -> str:
        """Return how much less a lone transfer gets than the rate that was set; empty if it gets that."""
        self._checks.timed()  # TCP opens its window
        share = self._checks.least_s / min(self._checks.timed().transfer_s for _ in range(_TRIES))
        if share >= YIELDS:
            return ""
        return (
            f"{self._cell.where}: a transfer of {self._checks.nbytes} "
            f"bytes got {100 * share:.0f} % of what headers leave, so this machine does not yield that rate"
        )

    def arrive(self) -> None:
        """Check the machine before the first cell of a turn; before the first turn every cell is executed once."""
        if self._last is None:
            for run in self._runs.values():
                run.step()
        self._last = self._checks.timed()

    def repeat(self, cell: LabCell) -> Repeat:
        """Execute a cell between two checks, of which the first may be the last one's second: short steps several
        times.
        """
        assert self._last is not None
        run, before = self._runs[cell], self._last
        predicted_s = self.predictions[cell].step_time_s
        if predicted_s < _COLD_S:
            run.step()
        steps = min(math.ceil(_LEAST_S / predicted_s), _MOST_STEPS)
        times = [run.step().trace.step_time_s for _ in range(steps)]
        self._last = after = self._checks.timed()
        checked = {"before_s": (before.kernel_s, before.transfer_s), "after_s": (after.kernel_s, after.transfer_s)}
        return Repeat(step_s=statistics.median(times), **checked)


@contextmanager
def _room(predictions: dict[LabCell, Prediction], ranks: int) -> Iterator[_Room]:
    """Build the network of some cells, and start ranks in it."""
    from calibrate.lab_network import lab_network
    from runtime.lab.lab import Lab
    from runtime.processes.launch import Session

    cluster = next(iter(predictions.values())).cluster
    with Lab(lab_network(cluster)) as lab, Session(ranks, networks=lab.namespaces) as session:
        yield _Room(predictions, session)
