"""Charts in notebooks. ``experiments.pages`` draws them, which no room of ``sim`` may import, so ``import longstep``
hands over what draws. Without it there are tables only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sim.setup.played import PlayedStep


class Drawing(NamedTuple):
    """What draws, as HTML."""

    of_step: Callable[[PlayedStep], str]
    of_rows: Callable[[Sequence[dict[str, Any]]], str]
    """The charts of rows of a sweep; "" of others."""


_loads: list[Callable[[], Drawing]] = []
"""What loads it when the first chart is shown; at most one."""


def draw_by(load: Callable[[], Drawing]) -> None:
    """Let charts be drawn from now on."""
    _loads[:] = [load]


def charts_of_step(prediction: PlayedStep) -> str:
    """Return the charts of a prediction as HTML; "" where nothing draws."""
    return "".join(load().of_step(prediction) for load in _loads)


def charts_of_rows(rows: Sequence[dict[str, Any]]) -> str:
    """Return the charts of the rows of a table, likewise."""
    return "".join(load().of_rows(rows) for load in _loads)
