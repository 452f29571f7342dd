"""``longstep sweep``: predict all combinations of some values, a row each, into a file that goes on where it stood."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, BinaryIO

import tyro
from rich.console import Console
from rich.table import Table as Shown

import longstep
from experiments.evidence.peaks import BESIDE, PEAK, beside, spec_of
from experiments.evidence.provenance import SWEEP_MARK
from experiments.verbs.kinds import OptionalInt, OptionalText, Texts
from experiments.verbs.selection import StepSelection, listed, typed_values
from experiments.verbs.terminal import print_json, progress, tell_assumed
from experiments.verbs.writes import Writes
from sim.errors import InputError
from sim.files import Kind, require_outputs
from sim.setup.axes import axes_of
from sim.setup.portions import COLUMNS
from sim.units import length, seconds, size

_SHOWN = 40
"""Rows of the table; the file has all."""
_NEEDS_PYARROW = "`out` FILE.parquet needs the package pyarrow: pip install 'longstep[parquet]', or name a .csv"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep(Writes):
    """Predict all combinations of some values, a row each; the same command again goes on where it stood."""

    selection: Annotated[StepSelection, tyro.conf.arg(name="")] = dataclasses.field(default_factory=StepSelection)
    vary: Texts = ()
    """KEY=VALUES, as often as wanted: an option or a key of --set, with a list or a range: seq=64K..1M*2,
    schedule=ring,zigzag, cluster.nvlink.bytes_per_s=*1,*2, cluster.nic.bytes_per_s=25e9..200e9:4 (at equal ratios)."""
    zip: Texts = ()
    """KEY,KEY of those that are varied together, not in all combinations."""
    out: OptionalText = None
    """Write the rows to this file, FILE.parquet or FILE.csv. Until all are there FILE.journal keeps those that are."""
    step_only: bool = False
    """Play one seed of noise, and leave out intervals and what bounds a step: four times faster."""
    jobs: OptionalInt = None
    """Processes; by default as many as there are cores."""
    dask: OptionalText = None
    """Address of the scheduler of a Dask cluster whose workers play the rows, such as tcp://host:8786."""
    json: bool = False
    """Print all rows as JSON instead of a table."""


def sweep(command: Sweep, console: Console) -> None:
    """Predict all rows, write them, and print them."""
    setup = command.selection.setup()
    vary = dict(_pair(text) for text in command.vary)
    zipped = [listed(text, "`zip`", "seq,gpus") for text in command.zip]
    axes_of(vary, zipped)
    out = command.output(command.out, _kind(command.out)) if command.out else None
    require_outputs([out])
    journal = Path(f"{command.out}.journal") if command.out else None
    if command.step_only and setup.seeds is None:
        setup = setup.replace(seeds=1)
    tell_assumed(setup, console, json=command.json)
    with progress("predicting") as show:
        try:
            found = longstep.explore(
                setup, vary, zipped=zipped, intervals=not command.step_only, bounds=not command.step_only,
                jobs=command.jobs, dask=command.dask, journal=journal, force=command.force, progress=show,
            )  # fmt: skip
        except KeyboardInterrupt:
            if journal:
                sys.stderr.write(f"what is finished is in {str(journal)!r}: the same command goes on\n")
            raise
    if out and journal:
        about = {SWEEP_MARK: " ".join(sys.argv[1:]) or "called from Python"}
        out.write(_parquet(found, about) if out.path.endswith(".parquet") else _csv(found, about))
        journal.unlink(missing_ok=True)
    if command.json:
        print_json(found.rows, console)
    else:
        changed = any(key.startswith("cluster") for key in found[0])
        console.print(_table(found, BESIDE if changed else beside(spec_of(setup))))
        for line in _summary(found):
            console.print(line, markup=False)
    found.require_any()


def _pair(text: str) -> tuple[str, str | list[str]]:
    key, equals, values = text.partition("=")
    if not (equals and key.strip() and values.strip()):
        raise InputError(f"`vary` {text}: expected KEY=VALUES such as seq=64K,128K or cluster.nvlink.bytes_per_s=*1,*2")
    return key.strip(), typed_values(key, values)


def _kind(path: str | None) -> Kind:
    """Return what kind of file a name asks for; raises InputError for one that is none of them."""
    if path and path.endswith(".csv"):
        return Kind("a table of a sweep", _is_csv)
    if not (path and path.endswith(".parquet")):
        raise InputError(f"`out` {path}: expected a name that ends in .parquet or .csv")
    try:
        import pyarrow.parquet  # noqa: F401
    except ModuleNotFoundError:
        raise InputError(_NEEDS_PYARROW) from None
    return Kind("a table of a sweep", _is_parquet)


def _is_csv(file: BinaryIO) -> bool:
    return file.readline().startswith(f"# {SWEEP_MARK}".encode())


def _is_parquet(file: BinaryIO) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return SWEEP_MARK.encode() in (pq.read_schema(file).metadata or {})
    except pa.ArrowInvalid:
        return False


def _parquet(found: longstep.Table, about: dict[str, str]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(found.to_dict()).replace_schema_metadata(about)
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def _csv(found: longstep.Table, about: dict[str, str]) -> bytes:
    import csv

    text = io.StringIO()
    for name, value in about.items():
        text.write(f"# {name}: {value}\n")
    writer = csv.DictWriter(text, list(found.to_dict()), lineterminator="\n")
    writer.writeheader()
    writer.writerows(found.rows)
    return text.getvalue().encode()


def _table(found: longstep.Table, memory: str) -> Shown:
    """Return the main columns of the first rows."""
    keys = [key for key in found[0] if key not in COLUMNS]
    table = Shown(*keys, "step", "90 % interval", "tokens/s/GPU", PEAK, "fits", "bound by", title_justify="left")
    table.caption, table.caption_justify = memory, "left"
    for row in found.rows[:_SHOWN]:
        varied = [length(row[key]) if key == "seq" and isinstance(row[key], int) else str(row[key]) for key in keys]
        if row["error"]:
            table.add_row(*varied, "", "", "", "", "", row["error"])
            continue
        within = "" if row["low_s"] is None else f"{seconds(row['low_s'])} to {seconds(row['high_s'])}"
        rate = f"{row['tokens_per_s_per_gpu']:.4g}"
        figures = [seconds(row["step_time_s"]), within, rate, size(row["peak_hbm_bytes"]), row["fits"]]
        table.add_row(*varied, *figures, row["bound_by"] or "")
    return table


def _summary(found: longstep.Table) -> list[str]:
    """Return how many rows are not shown, do not fit or were refused, and which is the fastest of the others."""
    lines = [f"{len(found) - _SHOWN} more rows are not shown"] if len(found) > _SHOWN else []
    refused = Counter(row["error"] != "" for row in found)[True]
    unfit = sum(row["fits"] == "no" for row in found)
    if refused or unfit:
        lines.append(f"of {len(found)} rows {unfit} do not fit, {refused} cannot be played")
    return lines
