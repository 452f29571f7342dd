"""Predictions side by side, one row each."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator
from typing import Any, Self

from sim.base.errors import InputError
from sim.setup.answers.answer import Grounds, as_html, as_text, degrees
from sim.setup.answers.charts import charts_of_rows
from sim.setup.played import PlayedStep


class Table:
    """The main figures of some predictions: times in seconds, sizes in bytes, rates in tokens per second and GPU. Those
    of a question have its answer in a sentence.

    >>> print(Table([{"schedule": "ring", "step_time_s": 0.25}, {"schedule": "ulysses", "step_time_s": 0.125}]))
    schedule  step_time_s
    ring      0.25
    ulysses   0.125
    """

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        """A dict of the same keys for every prediction."""
        self.answer = ""
        """What they say, in one sentence; empty where nothing was asked."""
        self.grounds: Grounds | None = None
        """What the answer rests on."""

    @property
    def rests_on(self) -> list[str]:
        """What the answer rests on, in three lines at most."""
        return self.grounds.lines if self.grounds else []

    def answering(self, answer: str, grounds: Grounds | None = None) -> Self:
        """Return the table with what it says."""
        self.answer, self.grounds = answer, grounds
        return self

    def to_dict(self) -> dict[str, list[Any]]:
        """Return the columns by name, as ``pandas.DataFrame`` or ``polars.DataFrame`` take them."""
        return {name: [row[name] for row in self.rows] for name in (self.rows[0] if self.rows else ())}

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame``; raises ModuleNotFoundError where pandas is not installed."""
        import pandas as pd  # noqa: PLC0415 - Longstep itself needs none

        return pd.DataFrame(self.to_dict())

    def require_any(self) -> None:
        """Raise InputError where rows have an ``error`` and all of them have one."""
        if self.rows and all(row.get("error") for row in self.rows):
            raise InputError(f"none of {len(self)} rows can be played; the first: {self.rows[0]['error']}")

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.rows[number]

    def __str__(self) -> str:
        return as_text(self.answer, self._text(), self.rests_on) if self.answer else self._text()

    __repr__ = __str__

    def _text(self) -> str:
        columns = [[name, *map(_shown, values)] for name, values in self.to_dict().items()]
        widths = [max(map(len, column)) for column in columns]
        lines = zip(*columns, strict=True)
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)

    def _repr_html_(self) -> str:
        def line(tag: str, cells: Iterable[Any]) -> str:
            return f"<tr>{''.join(f'<{tag}>{html.escape(_shown(cell))}</{tag}>' for cell in cells)}</tr>"

        heads = line("th", self.rows[0]) if self.rows else ""
        rows = "".join(line("td", row.values()) for row in self.rows)
        shown = f'<div style="overflow-x: auto"><table>{heads}{rows}</table></div>{charts_of_rows(self.rows)}'
        return as_html(self.answer, shown, self.rests_on) if self.answer else shown


def table(predictions: PlayedStep | Iterable[PlayedStep]) -> Table:
    """Return predictions, or one alone, side by side; the 90 % interval of each takes two more simulations.

    >>> from sim.setup.predict import predict
    >>> p = predict("ring", model="llama3-8b", seq="32K", cluster="hgx-h100", gpus=2, layers=2)
    >>> table([p, p.replace(schedule="ulysses")]).to_dict()["schedule"]
    ['ring', 'ulysses']
    """
    if isinstance(predictions, PlayedStep):
        predictions = [predictions]
    return Table([_row(prediction) for prediction in predictions])


def _row(prediction: PlayedStep) -> dict[str, Any]:
    if not isinstance(prediction, PlayedStep):
        raise InputError(f"{prediction!r} is no prediction: expected those that longstep.predict returns")
    header, found = prediction.checked.schedule.header, prediction.figures
    low_s, high_s = prediction.interval or (None, None)
    return {
        "schedule": prediction.schedule,
        "degrees": degrees(prediction),
        "seq": header.workload.seq,
        "gpus": prediction.checked.schedule.num_ranks,
        "cluster": prediction.cluster.spec.name,
        "step_time_s": found.step_time_s,
        "low_s": low_s,
        "high_s": high_s,
        "tokens_per_s_per_gpu": found.tokens_per_s_per_gpu,
        "mfu": found.mfu,
        "peak_hbm_bytes": found.peak_hbm_bytes,
        "fits": found.fits,
        "free_bytes": None if found.room is None else found.room.free_bytes,
        "bound_by": found.bound_by,
        "profile": found.evidence.profile,
    }


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return "" if value is None else str(value)
