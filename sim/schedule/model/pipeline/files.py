"""Timetables of pipelines in files, as torch's pipelining reads and writes them: a row a rank, a pass a cell.

A cell is ``2F0``: stage, kind and micro-batch. Torch calls a stage what is a chunk here, and a rank what is a stage.
Its kinds are F, forward; B, backward as a whole; I and W, gradients of inputs and of weights. Empty cells say that a
rank is idle, and nothing follows from them (torch.distributed.pipelining.schedules, ``_Action`` and ``_load_csv``).
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from sim.base.errors import InputError
from sim.base.files import Kind, decoded_by
from sim.base.presets import read_bytes
from sim.schedule.model.pipeline.account import played
from sim.schedule.model.pipeline.timetables import Pipeline
from sim.schedule.model.step import Item

_WHERE = "`set` schedule.pipeline_schedule"
_MOST_ROWS, _MOST_CELLS = 2**14, 2**20
_Kind: TypeAlias = Literal["F", "BW", "B", "W"]
_KINDS: dict[str, _Kind] = {"F": "F", "B": "BW", "I": "B", "W": "W"}
"""Torch's kinds, and those of items."""
_LETTERS = {kind: letter for letter, kind in _KINDS.items()}
_INSTEAD: dict[_Kind, tuple[_Kind, ...]] = {"F": ("F",), "BW": ("BW", "B", "W"), "B": ("B", "BW"), "W": ("W", "BW")}
"""Passes of which a micro-batch has one."""
_NEEDED: tuple[tuple[_Kind, ...], ...] = (("F",), ("BW", "B"), ("BW", "W"))
"""Passes that it has, one of each."""
_PASS = re.compile(r"([0-9]{1,7})([FBIW])([0-9]{1,7})")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_LOWERED = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)[0-9]*")
_FORMS = "a pass such as 2F0, 2B0, 2I0 or 2W0, (2F1;3B0)OVERLAP_F_B, or an empty cell"


class Listed(NamedTuple):
    """What a file says."""

    name: str
    rows: tuple[tuple[Item, ...], ...]
    """Of each stage."""
    stages: dict[int, int]
    """That of each chunk."""
    micros: int

    def timetable(self, stage: int, stages: int, micros: int, chunks: int) -> list[Item]:
        """Return a row; raises InputError if something else is asked than what the file says."""
        own = (len(self.rows), self.micros, len(self.stages) // len(self.rows))
        if (stages, micros, chunks) != own:
            raise InputError(
                f"pipeline {self.name!r} has {own[0]} stages, {own[1]} micro-batches and {own[2]} chunks a stage, and "
                f"asked are {stages}, {micros} and {chunks}: set `pp_degree`, `set` schedule.micro_batches, or {_WHERE}"
            )
        return list(self.rows[stage])

    def stage_of(self, chunk: int, stages: int) -> int:
        """Return the stage of a chunk; raises InputError for one that the file does not have."""
        if chunk not in self.stages:
            raise InputError(
                f"pipeline {self.name!r} has {len(self.rows)} stages, and asked are {stages}: set `pp_degree`, or "
                f"{_WHERE}"
            )
        return self.stages[chunk]


class _Cell(NamedTuple):
    """A pass and where it stands; rows and cells are counted from 1."""

    item: Item
    row: int
    number: int

    def __str__(self) -> str:
        return f"row {self.row}, cell {self.number} {_spelled(self.item)}"


def read_pipeline(path: str) -> Pipeline:
    """Return the pipeline of a file in torch's format.

    Raises InputError for what is no such file, and where a pass stands twice, is missing, stands before what it needs
    or waits for ever; where a stage is on two ranks, or ranks have unlike numbers of stages.
    """
    return pipeline_in(read_bytes("pipeline", path, _WHERE), path)


def pipeline_in(data: bytes, name: str) -> Pipeline:
    """Return the pipeline that the content of a file describes; raises InputError as ``read_pipeline`` does."""
    try:
        cells = _cells(data)
        stages = _stages(cells)
        micros = _micro_batches(cells, len(stages))
        _require_order(cells, stages)
        rows = tuple(tuple(cell.item for cell in row) for row in cells)
        played(rows, lambda _: 1)
    except InputError as error:
        raise InputError(f"pipeline {name!r}: {error}; change it in that file, or set another with {_WHERE}") from None
    listed = Listed(name, rows, stages, micros)
    return Pipeline(listed.timetable, f"the file {name}", len(stages) // len(rows), listed.stage_of, rounds=None)


def to_csv(pipeline: Pipeline, stages: int, micros: int, chunks: int) -> bytes:
    """Return the file of a pipeline, which torch's ``_PipelineScheduleRuntime`` runs; raises InputError for one with
    copies of chunks.
    """
    if pipeline.copies > 1:
        raise InputError(
            "torch's pipelining has each stage on one rank, and this pipeline has copies of each on two: `set` "
            "schedule.pipeline_schedule=dualpipe-v, which is half of it, or another one"
        )
    rows = (pipeline.timetable(stage, stages, micros, chunks) for stage in range(stages))
    return "".join(f"{','.join(map(_spelled, items))}\r\n" for items in rows).encode()


PIPELINE_FILE = Kind("a timetable of a pipeline", decoded_by(lambda data: pipeline_in(data, "")))


def _cells(data: bytes) -> list[list[_Cell]]:
    """Return the passes of each row."""
    if data.count(b",") >= _MOST_CELLS or max(data.count(b"\n"), data.count(b"\r")) > _MOST_ROWS:
        raise InputError(f"expected at most {_MOST_ROWS} rows and {_MOST_CELLS} cells")
    text = data.removeprefix(codecs.BOM_UTF8).decode(errors="replace")
    found: list[list[_Cell]] = []
    try:
        for row, texts in enumerate(csv.reader(io.StringIO(text, newline=""), strict=True), start=1):
            found.append(
                [_Cell(item, row, at) for at, one in enumerate(texts, start=1) for item in _items(one, row, at)]
            )
            if not found[-1]:
                raise InputError(f"row {row} has no pass: expected those of rank {row - 1}, or no such row")
    except csv.Error as error:
        raise InputError(f"{error}: expected a CSV file") from None
    if not found:
        raise InputError("it has no row: expected one a rank")
    return found


def _items(text: str, row: int, number: int) -> Iterator[Item]:
    """Yield the passes of a cell; torch runs those of a pair in their order."""
    pair = _PAIR.fullmatch(text.strip())
    for word in map(str.strip, pair[1].split(";") if pair else [text]):
        if match := _PASS.fullmatch(word):
            yield Item(_KINDS[match[2]], int(match[3]), int(match[1]))
        elif word or pair:
            shown = repr(word) if len(word) < 64 else f"{word[:60]!r} …"
            expected = _FORMS
            if _LOWERED.fullmatch(word):
                expected = (
                    "passes alone, as _dump_csv(FILE, format='compute_only') writes: what is sent and gathered follows"
                )
            raise InputError(f"row {row}, cell {number} {shown}: expected {expected}")


def _stages(cells: list[list[_Cell]]) -> dict[int, int]:
    """Return the stage of each chunk."""
    found: dict[int, int] = {}
    for cell in itertools.chain(*cells):
        if found.setdefault(cell.item.chunk, cell.row - 1) != cell.row - 1:
            raise InputError(
                f"{cell}: expected each stage on one rank, and row {found[cell.item.chunk] + 1} has this one, too"
            )
    for cell in itertools.chain(*cells):
        if cell.item.chunk >= len(found):
            raise InputError(f"{cell}: expected stages 0 to {len(found) - 1}, as there are {len(found)}")
    counts = Counter(found.values())
    for rank, count in counts.items():
        if count != counts[0]:
            raise InputError(f"row {rank + 1} has {count} stages, and row 1 {counts[0]}: expected as many on each rank")
    return found


def _micro_batches(cells: list[list[_Cell]], chunks: int) -> int:
    """Return how many micro-batches there are, each of which passes each chunk forward and backward once."""
    seen: dict[Item, _Cell] = {}
    for cell in itertools.chain(*cells):
        item = cell.item
        for kind in _INSTEAD[item.kind]:
            if twice := seen.get(item._replace(kind=kind)):
                raise InputError(f"{cell}: expected it once, and there is {twice}")
        before = item._replace(kind="B" if item.kind == "W" else "F")
        if item.kind != "F" and before not in seen:
            raise InputError(f"{cell}: expected {_spelled(before)} before it in its row")
        seen[item] = cell
    micros = max(Counter(item.chunk for item in seen if item.kind == "F").values())
    for item, cell in seen.items():
        if item.micro >= micros:
            raise InputError(
                f"{cell}: expected micro-batches 0 to {micros - 1}, as stages have {micros} forward passes"
            )
    for chunk, micro in itertools.product(range(chunks), range(micros)):
        for kinds in _NEEDED:
            missing = [Item(kind, micro, chunk) for kind in kinds]
            if not any(item in seen for item in missing):
                raise InputError(f"there is no {' or '.join(map(_spelled, missing))}: expected each stage to have one")
    return micros


def _require_order(cells: list[list[_Cell]], stages: dict[int, int]) -> None:
    """Raise InputError where a stage takes what another one hands on in another order: messages keep theirs."""
    handed: dict[tuple[int, int, int], list[Item]] = defaultdict(list)
    taken: dict[tuple[int, int, int], list[_Cell]] = defaultdict(list)
    for cell in itertools.chain(*cells):
        chunk, step = cell.item.chunk, cell.item.onward
        if step and chunk + step in stages:
            handed[stages[chunk], stages[chunk + step], step].append(cell.item._replace(chunk=chunk + step))
        if step and chunk - step in stages:
            taken[stages[chunk - step], stages[chunk], step].append(cell)
    for way, followers in taken.items():
        for cell, item in zip(followers, handed[way], strict=True):
            if cell.item[1:] != item[1:]:
                raise InputError(
                    f"{cell}: expected {_spelled(item)} first, as row {way[0] + 1} hands on that micro-batch before"
                )


def _spelled(item: Item) -> str:
    return f"{item.chunk}{_LETTERS[item.kind]}{item.micro}"
