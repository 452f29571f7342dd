"""Predictions held against a lab of slow links: cells of network, rate, schedule and length, each executed in a network
whose rates are set, between two checks that say whether the machine was quiet.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from experiments.evidence.comparison import Measured, measured
from experiments.evidence.machine import require_torch
from sim.breakdown import breakdown, critical_rank, overlapped_s
from sim.errors import InputError
from sim.files import Kind, decoded_by
from sim.presets import from_json, read_bytes
from sim.profile import Profile
from sim.setup.names import PLACEMENTS
from sim.setup.prediction import Prediction
from sim.setup.setup import Setup
from topology.lab import NETWORKS
from topology.specs import ClusterSpec, PerGpu

if TYPE_CHECKING:
    from runtime.processes.launch import Session

STEADY = 0.05
"""How far the checks before and after a repeat may be apart: one of more is void."""
YIELDS = 0.9
"""Share of a rate that a lone transfer has to get: else this machine cannot yield the rate, and it is left out."""
_TRIES = 3
"""Transfers of which the fastest tells whether a rate is yielded."""
_LEAST_S, _MOST_STEPS = 0.5, 5
"""Steps of a repeat take so long together, but are no more than that."""
FAULTS = {"slow-nic": PerGpu(link=0.25), "slow-rank": PerGpu(speed=0.5)}
"""What may be wrong with one rank: its links have a quarter of their rate, or it computes at half of its speed."""
FAULTY = 1
"""Which rank."""
MBIT = 1e6 / 8
"""Bytes a second of 1 Mbit/s."""


class LabCell(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration."""

    network: str
    bytes_per_s: float
    """Of its links, headers included."""
    schedule: str
    placement: str = ""
    """Where a schedule splits heads and sequence: which is inside."""
    seq: str
    fault: str = ""
    """What is wrong with the network, one of ``FAULTS``; empty: nothing."""

    @property
    def method(self) -> str:
        """The schedule, with its placement."""
        return f"{self.schedule} {self.placement}".strip()

    @property
    def place(self) -> tuple[str, float, str]:
        """What is built for it: cells of one place share it."""
        return self.network, self.bytes_per_s, self.fault

    @property
    def where(self) -> str:
        """That, in words."""
        fault = f", {self.fault} of rank {FAULTY}" if self.fault else ""
        return f"{self.network} at {self.bytes_per_s / MBIT:g} Mbit/s{fault}"

    @property
    def name(self) -> str:
        """All of it, in words."""
        return f"{self.method}, S {self.seq}, {self.where}"


class Repeat(msgspec.Struct, frozen=True, kw_only=True):
    """Some steps between two checks."""

    step_s: float
    """The median of its steps."""
    before_s: tuple[float, float]
    """The fixed kernel and the fixed transfer."""
    after_s: tuple[float, float]

    @property
    def drift(self) -> float:
        """How far apart the two checks were: the larger of the kernel's and the transfer's."""
        return max(abs(after / before - 1) for before, after in zip(self.before_s, self.after_s, strict=True))

    @property
    def void(self) -> bool:
        """Whether the machine changed meanwhile."""
        return self.drift > STEADY


class LabResult(msgspec.Struct, frozen=True, kw_only=True):
    """A cell, predicted and measured."""

    cell: LabCell
    predicted_s: float
    share: float
    """Of the predicted step of its critical rank in which that communicates, computing or not."""
    repeats: list[Repeat]

    @property
    def valid(self) -> list[float]:
        """Step times of the repeats that are not void."""
        return [repeat.step_s for repeat in self.repeats if not repeat.void]

    @property
    def times(self) -> Measured:
        """Predicted beside measured: of the repeats that count, else of all."""
        return measured(self.predicted_s, self.valid or [repeat.step_s for repeat in self.repeats])


class LabRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All results of a sweep, with the profile that they rest on."""

    profile: Profile
    title: str
    begun: str
    """Date and time, UTC, ISO 8601."""
    command: str
    software: dict[str, str]
    ranks: int
    goodput: float
    """Share of a link's rate without headers that large messages got when the lab was calibrated."""
    results: list[LabResult]
    left_out: list[str]
    """Rates that this machine does not yield, and cells that cannot be built, each with the reason."""

    def with_repeat(self, cell: LabCell, prediction: Prediction, repeat: Repeat) -> LabRecord:
        """Return it with one more repeat of a cell."""
        results = list(self.results)
        at = next((number for number, one in enumerate(results) if one.cell == cell), None)
        if at is None:
            results.append(
                LabResult(cell=cell, predicted_s=prediction.step_time_s, share=share_of(prediction), repeats=[repeat])
            )
        else:
            results[at] = msgspec.structs.replace(results[at], repeats=[*results[at].repeats, repeat])
        return msgspec.structs.replace(self, results=results)


LAB_FILE = Kind("a record of a lab", decoded_by(msgspec.json.Decoder(LabRecord).decode))


def read_lab(path: str) -> LabRecord:
    """Return the record in a file; raises InputError if it is none."""
    data = read_bytes("record", path, "`record`")
    record = from_json(data, LabRecord, f"record {path!r}", "longstep lab --out writes one")
    if not record.results:
        raise InputError(f"record {path!r} holds no result; longstep lab --out writes one")
    return record


class LabSweep(NamedTuple):
    """What is to be executed."""

    cells: Sequence[LabCell]
    base: Setup
    """What all cells have in common: model, scope, layers, profile of the lab."""
    ranks: int
    profile: Profile
    repeats: int


def lab_cells(
    networks: Sequence[str],
    rates: Sequence[float],
    schedules: Sequence[str],
    lengths: Sequence[str],
    faults: Sequence[str] = ("",),
) -> list[LabCell]:
    """Return all cells; a schedule that splits heads and sequence stands for both of its placements."""
    methods = [
        (name, placement) for name in schedules for placement in (PLACEMENTS if name in {"usp", "upipe"} else ("",))
    ]
    return [
        LabCell(network=network, bytes_per_s=rate, schedule=name, placement=placement, seq=seq, fault=fault)
        for network in networks for rate in rates for fault in faults for seq in lengths for name, placement in methods
    ]  # fmt: skip


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


def share_of(prediction: Prediction) -> float:
    """Return the share of a step in which its critical rank communicates."""
    trace = prediction.trace
    rank = critical_rank(trace)
    return (breakdown(trace, rank)["communication"] + overlapped_s(trace, rank)) / trace.step_time_s


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
        self._warm: set[LabCell] = set()

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

    def repeat(self, cell: LabCell) -> Repeat:
        """Execute a cell between two checks: short steps several times."""
        run = self._runs[cell]
        if cell not in self._warm:
            run.step()
            self._warm.add(cell)
        steps = min(math.ceil(_LEAST_S / self.predictions[cell].step_time_s), _MOST_STEPS)
        before = self._checks.timed()
        times = [run.step().trace.step_time_s for _ in range(steps)]
        after = self._checks.timed()
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


def require_networks(names: Sequence[str]) -> None:
    """Raise InputError for a network that there is none of."""
    for name in names:
        if name not in NETWORKS:
            raise InputError(f"`network` {name}: expected some of {', '.join(NETWORKS)}, separated by commas")
