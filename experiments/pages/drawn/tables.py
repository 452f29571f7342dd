"""Rows of results as sortable tables: the suffix of a column's name, such as ``_s`` or ``_bytes``, tells its unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from experiments.pages.drawn.charts import Cell
from sim.base.units import length, percent, seconds, size

_LENGTHS = {"seq", "longest"}
_SHARES = {"mfu", "hfu", "share_of_roof", "share", "saves", "extrapolated"}


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """A table."""

    title: str
    heads: Sequence[str]
    rows: list[list[Cell]]


def table(title: str, rows: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> Rows:
    """Return a table of some columns of rows, by default of all in which any row has something."""
    known = names or list(dict.fromkeys(key for row in rows for key in row))
    kept = [name for name in known if any(row.get(name) not in (None, "") for row in rows)]
    return Rows(
        title=title,
        heads=[head(name) for name in kept],
        rows=[[cell(name, row.get(name)) for name in kept] for row in rows],
    )


def head(name: str) -> str:
    """Return the name of a column for people: its unit stands in its cells."""
    stem = name.removesuffix("_s") if not name.endswith("_per_s") else name
    return stem.removesuffix("_bytes").replace("_", " ")


def cell(name: str, value: Any) -> Cell:
    """Return what a figure sorts by and how it is shown."""
    if value is None or isinstance(value, str):
        return Cell(value or "", value or "")
    if isinstance(value, bool):
        return Cell(int(value), "yes" if value else "no")
    if isinstance(value, Mapping):
        text = ", ".join(f"{key} {cell(name, one).shown}" for key, one in value.items())
        return Cell(text, text)
    if isinstance(value, list | tuple):
        text = ", ".join(cell(name, one).shown for one in value)
        return Cell(text, text)
    return Cell(value, _figure(name, value))


def _figure(name: str, value: float) -> str:
    if name in _LENGTHS:
        return length(int(value)) if value else "none"
    if name.endswith("_bytes"):
        return f"{'-' if value < 0 else ''}{size(abs(value))}"
    if name == "seconds" or (name.endswith("_s") and not name.endswith("_per_s")):
        return seconds(value)
    if name in _SHARES:
        return f"{100 * value:.3g} %"
    if name == "error":
        return percent(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
