"""``longstep lab``: builds networks whose link rates are set, executes schedules there, and holds predictions from
kernels and rates alone against them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import tyro
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import longstep
from experiments.evidence.links.lab import (
    FAULTS,
    LAB_FILE,
    MBIT,
    LabCell,
    LabRecord,
    Repeat,
    lab_cells,
    read_lab,
    require_networks,
    save_lab,
)
from experiments.evidence.links.lab_sweep import LabSweep, measured_lab
from experiments.evidence.links.lab_verdict import LAB_HEADS, lab_lines, lab_row
from experiments.evidence.machine import require_torch
from experiments.evidence.provenance import command_line
from experiments.pages.drawn.render import FIGURE_FILE, PAGE_FILE
from experiments.pages.lab_page import figure, page
from experiments.verbs.calibrate import Calibrate, calibrate
from experiments.verbs.shared.kinds import OptionalText
from experiments.verbs.shared.selection import listed, typed_schedules
from experiments.verbs.shared.terminal import print_json
from experiments.verbs.shared.writes import Writes
from sim.base.errors import InputError, LongstepError
from sim.base.files import Output, require_outputs
from sim.setup.machine import require_same_host
from sim.setup.names import CLUSTER_HERE, MODEL_HERE, at_least_one, one_of
from sim.words.profile import PROFILE_FILE, Profile, encode_profile, load_profile, profile_names
from topology.cluster import Cluster, load_cluster
from topology.lab import lab_spec

if TYPE_CHECKING:
    from sim.setup.prediction import Prediction

RATES, SCHEDULES, LENGTHS = "200,1000", "ring,zigzag,ulysses,usp,allgather", "1K,2K"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lab(Writes):
    """Execute schedules in networks of set rates on this machine, and compare with predictions. It takes root."""

    network: str = "flat"
    """flat, thin, tree, chain, torus; several with commas."""
    rates: str = RATES
    """Mbit/s of the links, several with commas."""
    schedule: str = SCHEDULES
    """NAMEs of schedules with commas; usp is played with both placements."""
    seq: str = LENGTHS
    """Global sequence lengths."""
    gpus: int = 4
    """Ranks: processes, each in a network namespace of its own."""
    model: str = MODEL_HERE
    """NAME or FILE.toml."""
    scope: str = "layer"
    """layer, attention, or a training step (step)."""
    fault: OptionalText = None
    """Play every cell also with this wrong: slow-nic, the links of rank 1 at a quarter of their rate; slow-rank, rank 1
    at half of its speed. Several with commas."""
    repeats: int = 5
    """Repeats of every cell, each between two checks; all cells take turns."""
    profile: str = "host"
    """NAME or FILE.json of this machine's profile; host is calibrated first if there is none."""
    calibration: OptionalText = None
    """Keep the calibration of the lab in this FILE.json, or take it from there if it is there."""
    out: OptionalText = None
    """Write the record to this JSON file, after every repeat."""
    page: OptionalText = None
    """Write an HTML page with a parity plot and all cells to this file."""
    figure: OptionalText = None
    """Write the parity plot to this SVG file."""
    record: OptionalText = None
    """Measure nothing: show this record."""
    json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print JSON instead of a table."""


def lab(command: Lab, console: Console) -> None:
    """Calibrate, execute, compare; print what was found, also of a sweep that was interrupted."""
    html = command.output(command.page, PAGE_FILE)
    drawing = command.output(command.figure, FIGURE_FILE)
    out = command.output(command.out, LAB_FILE)
    if command.record is not None:
        if out:
            raise InputError("`record` shows what was measured, and `out` writes what is: leave one of them out")
        require_outputs([html, drawing])
        _show(read_lab(command.record), html, drawing, command, console)
        return
    networks, schedules = (
        listed(command.network, "`network`", "flat,thin"),
        typed_schedules(command.schedule),
    )
    rates = [_rate(text) for text in listed(command.rates, "`rates`", RATES)]
    require_networks(networks)
    faults = listed(command.fault, "`fault`", "slow-nic,slow-rank") if command.fault is not None else []
    cells = lab_cells(
        networks,
        rates,
        schedules,
        listed(command.seq, "`seq`", LENGTHS),
        ["", *(one_of("fault", one, FAULTS) for one in faults)],
    )
    for name in ("repeats", "gpus"):
        at_least_one(name, getattr(command, name))
    base = longstep.Setup(model=command.model, cluster=CLUSTER_HERE, scope=command.scope, layers=1)
    _require_cells(cells, base, command.gpus)
    kept = command.calibration and Path(command.calibration).exists()
    keep = None if kept else command.output(command.calibration, PROFILE_FILE)
    require_outputs([html, drawing, out, keep])
    profile = _kept_calibration(command)
    _require_lab()
    host = None if profile else _host_profile(command, console)
    with _progress() as progress:
        task = progress.add_task("")

        def said(text: str) -> None:
            progress.update(task, description=text)

        if host:
            profile = _calibrated(host, base, command, said, keep)
        assert profile
        record, stopped = _measured(command, cells, base, profile, said, out)
    if record.results or record.left_out:
        _show(record, html, drawing, command, console)
    if stopped:
        raise stopped


def _rate(text: str) -> float:
    """Return a rate in bytes a second."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 1 <= rate <= 1e5:
        raise InputError(f"`rates` {text}: expected Mbit/s from 1 to 100000, such as {RATES}")
    return rate * MBIT


def _require_cells(cells: list[LabCell], base: longstep.Setup, ranks: int) -> None:
    """Raise InputError for what cannot be built or played, before anything is calibrated."""
    from calibrate.lab_network import lab_network

    host = load_cluster("host")
    for cell in cells:
        lab_network(Cluster(lab_spec(host, cell.network, ranks, cell.bytes_per_s)))
        base.replace(schedule=cell.schedule, gpus=ranks, seq=cell.seq, profile="datasheet").resolved()


def _require_lab() -> None:
    require_torch()
    from runtime.lab.lab import why_not

    if why := why_not():
        raise InputError(why)


def _host_profile(command: Lab, console: Console) -> Profile:
    """Return the profile of this machine; a quick calibration makes one if there is none."""
    if command.profile == "host" and "host" not in profile_names():
        console.print("this machine was not calibrated yet: longstep calibrate --quick")
        calibrate(Calibrate(quick=True), console)
    found = load_profile(command.profile)
    require_same_host(found)
    return found


def _kept_calibration(command: Lab) -> Profile | None:
    """Return the calibration of a lab that was kept in a file; None if there is none yet."""
    from calibrate.lab import require_calibrated

    path = command.calibration
    if path is None or not Path(path).exists():
        return None
    found = load_profile(str(Path(path).absolute()))
    require_calibrated(found, command.gpus)
    require_same_host(found)
    return found


def _calibrated(
    host: Profile, base: longstep.Setup, command: Lab, said: Callable[[str], None], keep: Output | None
) -> Profile:
    """Calibrate the lab, and keep that where it was asked for."""
    from calibrate.lab import calibrated_lab

    model = base.model_spec
    found = calibrated_lab(host, command.gpus, model, model.dtype, said)
    if keep:
        keep.write(encode_profile(found))
    return found


def _measured(
    command: Lab,
    cells: list[LabCell],
    base: longstep.Setup,
    profile: Profile,
    said: Callable[[str], None],
    out: Output | None,
) -> tuple[LabRecord, BaseException | None]:
    """Return what was measured, and what has ended it early."""
    from calibrate.lab import goodput
    from calibrate.plan import software

    begun = datetime.now(UTC).isoformat(timespec="seconds")
    record = LabRecord(
        profile=profile,
        title=f"{command.scope} of {command.model}, {command.gpus} ranks",
        begun=begun,
        command=command_line(),
        software=software(),
        ranks=command.gpus,
        goodput=goodput(profile),
        results=[],
        left_out=[],
    )
    sweep = LabSweep(cells, base, command.gpus, profile, command.repeats)

    def keep(cell: LabCell, prediction: Prediction, repeat: Repeat) -> None:
        nonlocal record
        record = record.with_repeat(cell, prediction, repeat)
        if out:
            save_lab(record, out)

    def leave_out(why: str) -> None:
        nonlocal record
        record = msgspec.structs.replace(record, left_out=[*record.left_out, why])

    try:
        measured_lab(sweep, keep, leave_out, said)
    except (KeyboardInterrupt, LongstepError) as error:
        return record, error
    return record, None


def _show(record: LabRecord, html: Output | None, drawing: Output | None, command: Lab, console: Console) -> None:
    """Print a record, and write its page and its figure."""
    if html:
        html.write(page(record).encode())
    if drawing:
        drawing.write(figure(record).encode())
    if command.json:
        print_json(record, console)
        return
    table = Table(*LAB_HEADS, title=f"{record.title}: predicted from kernels and rates alone", title_justify="left")
    for one in record.results:
        table.add_row(*lab_row(one))
    console.print(table)
    for line in lab_lines(record):
        console.print(line, markup=False)


def _progress() -> Progress:
    return Progress(TimeElapsedColumn(), TextColumn("{task.description}"), console=Console(stderr=True), transient=True)
