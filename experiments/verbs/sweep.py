"""``longstep sweep``: predict all combinations of some values, a row each, into a file; the same command resumes."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO, NoReturn

import tyro
from rich.console import Console
from rich.table import Table as Shown

import longstep
from experiments.evidence.peaks import BESIDE, PEAK, beside_of
from experiments.evidence.provenance import SWEEP_MARK
from experiments.verbs.cli import with_flags
from experiments.verbs.shared.kinds import OptionalInt, OptionalText, Texts
from experiments.verbs.shared.selection import StepSelection, listed, require_names, typed_schedule, typed_values
from experiments.verbs.shared.terminal import print_json, progress, tell, tell_assumed
from experiments.verbs.shared.writes import Writes
from sim.base.errors import InputError
from sim.base.files import Kind, require_outputs
from sim.base.units import FEW, digits_within, number, seconds, seconds_between, size
from sim.compare.axes import axes_of, changed, combinations, field_of
from sim.compare.portions import COLUMNS, PLAYED
from sim.plan.told import Step, asked_step, grounds_of
from sim.setup.answers.places import best, shown, won
from sim.setup.names import schedule_name

_SHOWN = 40
"""Rows of the table; the file has all."""
_NAMES = ("model", "cluster", "schedule", "stack")
"""Keys whose values are names, which are looked up before anything is played."""
_NEEDS_PYARROW = "`out` FILE.parquet needs the package pyarrow: pip install 'longstep[parquet]', or name a .csv"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep(Writes):
    """Predict all combinations of lists and of --vary, a row each; the same command again goes on where it stood."""

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
    extend: bool = False
    """Tell each training step by few of its layers and micro-batches, as simulate --extend; a column says
    by how many."""
    jobs: OptionalInt = None
    """Processes; by default as many as there are cores."""
    dask: OptionalText = None
    """Address of the scheduler of a Dask cluster whose workers play the rows, such as tcp://host:8786."""
    json: bool = False
    """Print the answer and all rows as JSON instead of a table."""
    evidence: bool = False
    """Also print all that the answer rests on, not only its three lines, as a table."""


def sweep(command: Sweep, console: Console) -> None:
    """Predict all rows, write them, and print them."""
    setup, vary = command.selection.first("schedule").setup(), _varied(command)
    zipped = [listed(text, "`zip`", "seq,gpus") for text in command.zip]
    combined = combinations(axes_of(vary, zipped))
    out = command.output(command.out, _kind(command.out)) if command.out is not None else None
    require_outputs([out])
    journal = Path(f"{command.out}.journal") if command.out else None
    if command.step_only and setup.seeds is None:
        setup = setup.replace(seeds=1)
    tell_assumed(setup, console, json=command.json)
    with progress("predicting") as show:
        try:
            found = longstep.explore(
                setup, vary, zipped=zipped, intervals=not command.step_only, bounds=not command.step_only,
                extend=command.extend, jobs=command.jobs, dask=command.dask, journal=journal, force=command.force,
                progress=show,
            )  # fmt: skip
        except KeyboardInterrupt:
            if journal:
                sys.stderr.write(f"what is finished is in {str(journal)!r}: the same command goes on\n")
            raise
    refused = all(row["error"] for row in found)
    kept = refused and out is not None and Path(out.path).exists()  # rows of an earlier sweep are worth more
    if out and journal and not kept:
        about = {SWEEP_MARK: " ".join(sys.argv[1:]) or "called from Python"}
        out.write(_parquet(found, about) if out.path.endswith(".parquet") else _csv(found, about))
    if journal:
        journal.unlink(missing_ok=True)
    keys, name = list(combined[0]), schedule_name(setup.played)
    if refused:
        _print_refused(found, command, console, kept=kept)
    layers = setup.model_spec.num_layers if setup.layers is None else setup.layers
    said = best(found.rows, keys, name, scope=setup.scope, layers=layers)
    basis = grounds_of(_decisive(setup, found, combined, name, extend=command.extend))
    if command.json:
        told = {"assumed": setup.assumed, "answer": said, "rests_on": basis.lines}
        print_json({**told, "rows": found.rows}, console)
        return
    for line in (*_padded(found), *_extended(found)):
        console.print(line, markup=False)
    console.print(said, markup=False)
    console.print(_table(found, BESIDE if any(key.startswith("cluster") for key in keys) else beside_of(setup)))
    tell([basis], console, everything=command.evidence)


def _print_refused(found: longstep.Table, command: Sweep, console: Console, *, kept: bool) -> NoReturn:
    """Print rows none of which can be played, and raise InputError with the reason of the first."""
    if command.json:
        print_json({"answer": f"None of {len(found)} rows can be played", "rests_on": [], "rows": found.rows}, console)
    else:
        console.print(_table(found, BESIDE))
    written = f"; {command.out!r} stays as it was" if kept else f"; all reasons are in {command.out!r}"
    there = written if command.out else ""
    raise InputError(f"none of {len(found)} rows can be played; the first: {found[0]['error']}{there}")


def _decisive(
    setup: longstep.Setup, found: longstep.Table, rows: Sequence[Mapping[str, str]], name: str, *, extend: bool
) -> Step:
    """Return the step whose basis is told: of those that win, the one that takes longest."""
    numbers = [one.row for one in won(found.rows, list(rows[0]), name)]
    numbers = numbers or [number for number, row in enumerate(found.rows) if not row["error"]]
    longest = max(numbers, key=lambda number: float(found[number]["step_time_s"]))
    return asked_step(changed(setup, rows[longest]), extend=extend)


def _varied(command: Sweep) -> dict[str, str | list[str]]:
    """Return what is varied: lists of options first; raises InputError for what is named twice, and for unknown names.

    What is typed of schedules may be the user's own.
    """
    lists: dict[str, str | list[str]] = {
        field: [typed_schedule(value) for value in values] if field == "schedule" else values
        for field, values in command.selection.lists().items()
    }
    pairs = [_pair(text) for text in command.vary]
    vary = dict(pairs)
    for key, _ in pairs:
        if [other for other, _ in pairs].count(key) > 1:
            raise InputError(f"`vary` {key}: expected once, with all of its values such as {key}=A,B")
        if field_of(key) in lists:
            raise InputError(f"`vary` {key}: `{key}` lists several, too; name each once")
    require_names(
        {**lists, **{field_of(key): _names(values) for key, values in vary.items() if field_of(key) in _NAMES}}
    )
    return lists | vary


def _names(values: str | list[str]) -> list[str]:
    found = values.split(",") if isinstance(values, str) else values
    return [name.strip() for name in found if name.strip()]


def _padded(found: longstep.Table) -> Iterator[str]:
    """Yield how far documents are padded, or a length."""
    padding = sorted({row["padding"] for row in found.rows if row["padding"]})
    if padding:
        ends = f"{padding[0]} to {padding[-1]}" if len(padding) > 1 else str(padding[0])
        yield f"padded: {ends} tokens behind the sequence, which no other token sees"


def _extended(found: longstep.Table) -> Iterator[str]:
    """Yield of how many layers and micro-batches rows are told, where that is few."""
    told = dict.fromkeys(row[PLAYED] for row in found.rows if row.get(PLAYED))
    if told:
        more = f", and in {len(told) - 1} other ways" if len(told) > 1 else ""
        yield f"rows: {next(iter(told))}{more}; not proved, and without noise"


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

    columns = {name: _storable(column) for name, column in found.to_dict().items()}
    table = pa.table(columns).replace_schema_metadata(about)
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def _storable(column: Sequence[object]) -> Sequence[object]:
    """Return a column as Parquet takes it: as text where a whole number has more than 64 bits."""
    large = any(isinstance(value, int) and not -(2**63) <= value < 2**63 for value in column)
    return [None if value is None else str(value) for value in column] if large else column


def _csv(found: longstep.Table, about: dict[str, str]) -> bytes:
    import csv

    text = io.StringIO()
    for name, value in about.items():
        text.write(f"# {name}: {' '.join(value.split())}\n")
    writer = csv.DictWriter(text, list(found.to_dict()), lineterminator="\n")
    writer.writeheader()
    writer.writerows(found.rows)
    return text.getvalue().encode()


def _table(found: longstep.Table, memory: str) -> Shown:
    """Return the main columns of the first rows."""
    keys = [key for key in found[0] if key not in {*COLUMNS, PLAYED}]
    heads = (*keys, "degrees", "step", "90 % interval", "tokens/s/GPU", PEAK, "fits", "bound by")
    caption = "\n".join([memory, *_summary(found)])
    table = Shown(*heads, title_justify="left", caption=caption, caption_justify="left")
    for row in found.rows[:_SHOWN]:
        varied = [shown(key, row[key]) if key == "seq" else str(row[key]) for key in keys]
        if row["error"]:
            table.add_row(*varied, *[""] * 6, with_flags(row["error"]))
            continue
        low, high = row["low_s"], row["high_s"]
        within, digits = ("", FEW) if low is None else (seconds_between(low, high), digits_within(low, high))
        rate = number(row["tokens_per_s_per_gpu"], FEW)
        figures = [seconds(row["step_time_s"], digits), within, rate, size(row["peak_hbm_bytes"]), row["fits"]]
        table.add_row(*varied, row["degrees"], *figures, row["bound_by"] or "")
    return table


def _summary(found: longstep.Table) -> list[str]:
    """Return how many rows are not shown, and how many do not fit or were refused."""
    lines = [f"{len(found) - _SHOWN} more rows are not shown"] if len(found) > _SHOWN else []
    refused = Counter(row["error"] != "" for row in found)[True]
    unfit = sum(row["fits"] == "no" for row in found)
    if refused or unfit:
        lines.append(f"of {len(found)} rows {unfit} do not fit, {refused} cannot be played")
    return lines
