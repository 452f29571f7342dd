"""Predictions held against a lab of slow links: cells of network, rate, schedule and length, each executed in a network
whose rates are set, between two checks that say whether the machine was quiet.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from experiments.evidence.executed.comparison import Measured, measured
from experiments.evidence.kept import Kept, kept_in
from sim.accounts.breakdown import breakdown, critical_rank, overlapped_s
from sim.base.errors import InputError
from sim.base.files import Kind, Output, decoded_by
from sim.base.presets import from_json, read_bytes
from sim.setup.names import PLACEMENTS
from sim.setup.prediction import Prediction
from sim.words.profile import Profile
from topology.lab import NETWORKS
from topology.specs import PerGpu

STEADY = 0.05
"""How far the checks before and after a repeat may be apart: one of more is void."""
SHARE = 1 / 3
"""Of a step that has to be communication where the error is judged: below it is the kernels' that shows."""
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
        """The place in words."""
        fault = f", {self.fault} of rank {FAULTY}" if self.fault else ""
        return f"{self.network} at {self.bytes_per_s / MBIT:g} Mbit/s{fault}"

    @property
    def name(self) -> str:
        """The cell in words."""
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
    def judged(self) -> bool:
        """Whether its error counts: enough of the step is communication, and a repeat is not void."""
        return self.share >= SHARE and bool(self.valid)

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


def save_lab(record: LabRecord, output: Output) -> None:
    """Write a record; a reader sees the old file or the whole new one."""
    output.write(msgspec.json.encode(record, enc_hook=str))  # the name of a schedule of the user's own


def read_lab(path: str) -> LabRecord:
    """Return the record in a file; raises InputError if it is none."""
    data = read_bytes("record", path, "`record`")
    record = from_json(data, LabRecord, f"record {path!r}", "longstep lab --out writes one")
    if not record.results:
        raise InputError(f"record {path!r} holds no result; longstep lab --out writes one")
    return record


def kept_labs(folder: str) -> list[Kept[LabRecord]]:
    """Return all records of a lab that lie in a folder; raises InputError if one is damaged."""
    return kept_in(folder, "results", read_lab)


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


def share_of(prediction: Prediction) -> float:
    """Return the share of a step in which its critical rank communicates."""
    trace = prediction.trace
    rank = critical_rank(trace)
    return (breakdown(trace, rank)["communication"] + overlapped_s(trace, rank)) / trace.step_time_s


def require_networks(names: Sequence[str]) -> None:
    """Raise InputError for a network that there is none of."""
    for name in names:
        if name not in NETWORKS:
            raise InputError(f"`network` {name}: expected some of {', '.join(NETWORKS)}, separated by commas")
