"""A chapter of a report, by whatever result it is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from experiments.evidence.provenance import evidence_lines
from experiments.evidence.results import Result
from experiments.pages.drawn.charts import Chart
from experiments.pages.drawn.tables import Rows
from sim.engine.results.report import Evidence


class Chapter(msgspec.Struct, frozen=True, kw_only=True):
    """What a report says of one result."""

    title: str
    says: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Rows] = ()
    timeline: dict[str, Any] | None = None
    rests_on: Sequence[str] = ()
    """What its answer rests on, in three lines at most."""
    evidence: Sequence[str] = ()
    """All that its figures rest on."""


def said(result: Result, otherwise: Sequence[str]) -> list[str]:
    """Return the answer of a result, or what is said of one that has none."""
    return [result.answer] if result.answer else [*otherwise]


def stated(evidence: Mapping[str, Any]) -> list[str]:
    """Return evidence that a verb printed, in lines."""
    return evidence_lines(msgspec.convert(evidence, Evidence))


def is_figure(value: Any) -> bool:
    """Return whether a value has a place in a row."""
    return value is None or isinstance(value, bool | int | float | str)


def is_number(value: Any) -> bool:
    """Return whether a value has a place on an axis."""
    return isinstance(value, int | float) and not isinstance(value, bool)
