"""A record of ``longstep validate`` as a case file: executed steps that later versions can be held against."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.evidence.executed.cells import Cell
from experiments.evidence.executed.record import Judged, Record, judged, provenance, steadiness
from experiments.evidence.papers.cases import Case, case_fields, setup_of
from experiments.evidence.papers.published import profile_sha256
from sim.base.errors import InputError
from sim.base.files import Kind, Output, marked
from sim.schedule.methods.catalog import NAMED
from sim.setup.setup import Setup
from sim.words.profile import PROFILE_FILE, Profile, encode_profile, load_profile, save_profile

_OF_CASES = ("schedule", "seq")
"""What every case says for itself, also where it is the same in all."""

Fields = dict[str, Any]


def executed_cases(record: Record) -> list[Case]:
    """Return the cells of a record as cases that this version predicts. Of cells with quiet repeats only these
    count.

    How far off the others are says more of what else the machine did than of the prediction. Cells of schedules of the
    user's own are left out: a record has their names, and is no place to run code from.
    """
    return [
        Case("executed", setup_of(_fields(record, one.cell), record.profile), one.when_quiet.median_s)
        for one in judged(record)
        if one.when_quiet and one.cell.schedule in NAMED
    ]


def own_schedules(record: Record) -> list[str]:
    """Return the names of the schedules of a record that do not ship."""
    return sorted({cell.schedule for cell, _ in record.comparisons} - {*NAMED})


def common_fields(base: Setup) -> Fields:
    """Return what a case file says of all cells that share a setup."""
    return {key: value for key, value in case_fields(base).items() if key not in Cell._fields}


_MARK = "# longstep validate --cases-out"
CASES_FILE = Kind("a case file", marked(_MARK))


def save_cases(record: Record, output: Output) -> None:
    """Write a record as a case file, with its profile next to it; raises InputError where what its cells have in common
    lies in files of the user's.
    """
    require_portable(record.select, [cell for cell, _ in record.comparisons])
    profile = _profile_beside(record.profile, output)
    sha256 = profile_sha256(str(Path(output.path).with_name(profile)))
    output.write(case_file(record, profile, sha256).encode())


def require_portable(select: Fields, cells: Sequence[Cell]) -> None:
    """Raise InputError where a model, a cluster or a schedule is a file: a case file, which others read elsewhere and
    later, does not hold it.
    """
    named: list[tuple[str, str]] = [(key, select[key]) for key in ("model", "cluster") if key in select]
    named += [("schedule", schedule) for schedule in dict.fromkeys(cell.schedule for cell in cells)]
    for field, value in named:
        if value.endswith((".toml", ".json")) or "/" in value or ":" in value:
            kind = "a schedule that ships" if field == "schedule" else "a preset, with `set` for what differs"
            raise InputError(
                f"`cases_out`: `{field}` {value} is a file of yours, which a case file does not hold: take {kind}, or "
                f"leave `cases_out` away and keep the record (`out`)"
            )


def own_profile(output: Output) -> Output:
    """Return the file next to a case file for its profile, where another one is called profile.json."""
    path = Path(output.path)
    return PROFILE_FILE.at(path.with_name(f"{path.stem}-profile.json"), force=output.force)


def _profile_beside(profile: Profile, output: Output) -> str:
    """Return the name of the file with the profile next to a case file: profile.json, which is written if there is
    none. Where another profile has that name, it is a file of its own.
    """
    shared, own = Path(output.path).with_name("profile.json"), own_profile(output)
    if not shared.exists():
        save_profile(profile, shared)
    if _holds(shared, profile):
        return shared.name
    own.write(encode_profile(profile))
    return Path(own.path).name


def _holds(path: Path, profile: Profile) -> bool:
    try:
        return load_profile(str(path)) == profile
    except InputError:
        return False


def case_file(record: Record, profile: str, sha256: str) -> str:
    """Return a record as the TOML of a case file, a group for every scope, number of ranks and target."""
    cells = judged(record)
    described = [_fields(record, one.cell) for one in cells]
    common = _common(described)
    head = {"title": record.title, "source": "; ".join(provenance(record)), "quality": _quality(record, cells)}
    lines = [_MARK, *_lines(head | {"profile": profile, "profile_sha256": sha256}), "", "[select]", *_lines(common)]
    groups: dict[tuple[str, float], list[str]] = {}
    for one, fields in zip(cells, described, strict=True):
        rest = {key: value for key, value in fields.items() if key not in common}
        case = ", ".join(_lines(rest | {"measured_s": float(f"{one.times.median_s:.6g}")}))
        groups.setdefault(_group(one.cell), []).append(f"  {{ {case} }},")
    for (name, target), cases in groups.items():
        lines += ["", "[[group]]", *_lines({"name": name, "target": target}), "cases = [", *cases, "]"]
    return "\n".join(lines) + "\n"


def _group(cell: Cell) -> tuple[str, float]:
    """Return the name of the group that a cell is judged in, and its target."""
    return f"{cell.what}, P {cell.gpus}, within {100 * cell.target:g} %", cell.target


def _common(described: list[Fields]) -> Fields:
    """Return what all cases say alike."""
    first, *others = described
    return {
        key: value
        for key, value in first.items()
        if key not in _OF_CASES and all(key in other and other[key] == value for other in others)
    }


def _fields(record: Record, cell: Cell) -> Fields:
    """Return what a case file says of one cell, without its time."""
    layers = {} if cell.scope == "attention" else {"layers": cell.layers}
    named = {"gpus": cell.gpus, "scope": cell.scope, **layers, "schedule": cell.schedule, "seq": cell.seq}
    own = {"set": [*record.select.get("set", []), *cell.options]} if cell.options else {}
    return record.select | named | ({"stack": cell.stack} if cell.stack else {}) | own


def _quality(record: Record, cells: list[Judged]) -> str:
    """Return how the times were measured, and how far the machine was from its calibration."""
    repeats = _counts([len(one.errors) for one in cells])
    steps = _counts([len(found.step_times_s) for _, some in record.comparisons for found in some])
    return (
        f"executed: median of {repeats} repeats, of each the median of {steps} steps, from the common start to the end "
        f"of the last rank; {steadiness(record)}"
    )


def _counts(numbers: list[int]) -> str:
    return "/".join(map(str, sorted(set(numbers))))


def _lines(fields: Fields) -> list[str]:
    """Return lines of TOML, whose strings, numbers and lists of strings are written as JSON's are."""
    return [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items()]
