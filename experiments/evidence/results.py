"""Results that verbs wrote, read again; what a file holds is told by its content, not by its name.

=============  =====================================================================================
kind           written by
=============  =====================================================================================
rows           ``sweep --out`` (Parquet, CSV) and ``--json``; ``simulate --json`` of several: of these the rows
trace          ``simulate``, ``run`` and ``compare``, ``--trace``
record         ``validate --out``
lab            ``lab --out``
all others     ``--json`` of the verb of their name
=============  =====================================================================================
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from experiments.evidence.executed.record import Record
from experiments.evidence.links.lab import LabRecord
from experiments.evidence.provenance import SWEEP_MARK
from sim.base.errors import InputError
from sim.base.presets import decoded, from_json, read_bytes

_OBJECTS = {
    "trace": {"traceEvents"},
    "record": {"comparisons", "profile"},
    "lab": {"results", "goodput", "left_out"},
    "plan": {"best", "lost"},
    "answer": {"tried", "sure"},
    "doctor": {"causes", "verdict"},
    "balance": {"planners", "of"},
    "roofline": {"balance", "kernels"},
    "crossover": {"along", "crossings", "points"},
    "study": {"question", "conclusion", "rows"},
    "compare": {"kinds", "step", "report"},
    "run": {"step_times_s", "critical_rank", "error_bound"},
    "simulate": {"step_time_s", "floors", "evidence"},
}
"""Keys that tell an object; the first that has all of its keys is meant."""
_LISTS = {
    "ladder": {"techniques", "longest"},
    "fit": {"row", "helps"},
    "elasticities": {"figure", "elasticity"},
    "winners": {"winner", "why"},
    "neighbours": {"change", "ratio", "extrapolated"},
    "cases": {"cases", "predicted_s", "measured_s"},
    "rows": {"step_time_s"},
}
"""Keys of each row that tell a list of rows, which is alone or stands as ``rows`` beside its answer."""


class Result(NamedTuple):
    """What a file holds."""

    name: str
    """Of the file, without its folder."""
    kind: str
    data: Any
    """A ``Record``, a ``LabRecord``, or the JSON that the verb printed; of tables a list of rows."""
    command: str = ""
    """That made it, where the file says so."""
    answer: str = ""
    """What it says in one sentence, where the file does."""
    rests_on: tuple[str, ...] = ()
    """What that rests on, likewise."""


def read_result(path: str) -> Result:
    """Return what a file holds; raises InputError for one that no verb wrote, or that cannot be read."""
    data, name = read_bytes("result", path, "the files of report"), Path(path).name
    if data.startswith(b"PAR1"):
        return _parquet(name, data)
    if data.startswith(f"# {SWEEP_MARK}".encode()):
        return _csv(name, data)
    found = _json(path, data)
    kind = _kind(found)
    if kind == "record":
        return Result(name, kind, from_json(data, Record, f"record {path!r}", "longstep validate --out writes one"))
    if kind == "lab":
        return Result(name, kind, from_json(data, LabRecord, f"record {path!r}", "longstep lab --out writes one"))
    if not kind:
        raise InputError(
            f"{path!r} holds no result of Longstep: expected what a verb printed with --json, a table of sweep --out, "
            f"a record of validate or lab --out, or a trace of --trace; name such a file"
        )
    if isinstance(found, list):
        return Result(name, kind, found)
    answer, rests_on = str(found.get("answer", "")), found.get("rests_on")
    lines = tuple(map(str, rests_on if isinstance(rests_on, list) else ()))
    if kind in _LISTS:
        found = [{key: value for key, value in row.items() if key != "answer"} for row in found["rows"]]
    return Result(name, kind, found, answer=answer, rests_on=lines)


def _json(path: str, data: bytes) -> Any:
    """Return an object or a list; of a file with one object a line their list."""
    what, advice = f"{path!r} is neither Parquet, CSV of a sweep nor JSON", "name another"
    try:
        return decoded(data, what, advice)
    except InputError:
        lines = [line for line in data.splitlines() if line.strip()]
        if len(lines) < 2:
            raise
        return [decoded(line, f"{what}: line {number}", advice) for number, line in enumerate(lines, 1)]


def _kind(found: Any) -> str:
    """Return the kind of what was read; empty for none."""
    if isinstance(found, Mapping):
        return _first(_OBJECTS, found.keys()) or _kind_of_rows(found.get("rows"))
    return _kind_of_rows(found)


def _kind_of_rows(found: Any) -> str:
    if isinstance(found, list) and found and all(isinstance(row, Mapping) for row in found):
        return _first(_LISTS, set.intersection(*(set(row) for row in found)))
    return ""


def _first(kinds: Mapping[str, set[str]], keys: Any) -> str:
    return next((kind for kind, needed in kinds.items() if needed <= keys), "")


def _csv(name: str, data: bytes) -> Result:
    """Return the rows of a table of a sweep, numbers as such."""
    lines = data.decode(errors="replace").splitlines(keepends=True)
    head = [line for line in lines if line.startswith("# ")]
    try:
        rows = list(csv.DictReader(io.StringIO("".join(lines[len(head) :]))))
    except csv.Error as error:
        raise InputError(f"{name!r} cannot be read as CSV ({error}); name another") from None
    if not rows or any(None in row or None in row.values() for row in rows):
        raise InputError(f"{name!r}: expected rows that have a cell for each name of the first one; name another")
    said = head[0].removeprefix("# ").partition(": ")[2].strip()
    return Result(name, "rows", [{key: _number(text) for key, text in row.items()} for row in rows], _command(said))


def _number(text: str | None) -> Any:
    """Return what a cell of a CSV file holds."""
    if not text:
        return None
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _parquet(name: str, data: bytes) -> Result:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise InputError(f"{name!r} needs the package pyarrow: pip install 'longstep[parquet]', or a .csv") from None
    try:
        table = pq.read_table(io.BytesIO(data))
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{name!r} cannot be read as Parquet ({error}); name another") from None
    said = (table.schema.metadata or {}).get(SWEEP_MARK.encode())
    if said is None:
        raise InputError(f"{name!r} is no table of a sweep: longstep sweep --out writes one")
    return Result(name, "rows", table.to_pylist(), _command(said.decode()))


def _command(typed: str) -> str:
    return f"{SWEEP_MARK} {typed.removeprefix('sweep ')}" if typed else ""
