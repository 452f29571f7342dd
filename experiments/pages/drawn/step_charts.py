"""Charts of one step: the same on the page that ``longstep serve`` opens and in notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.evidence.peaks import PEAK
from experiments.pages.drawn.charts import BYTES, SECONDS, SHARE, Chart, bars
from experiments.pages.drawn.plots import HUES
from sim.accounts.memory import TERMS
from sim.base.units import size
from sim.engine.results.report import Report

_BESIDE_BUFFERS = "beside buffers"


def memory_chart(found: Report) -> Chart:
    """Return the bytes of a GPU by term, against what it has; those of the peak where that is not known."""
    if found.room is None or found.room.limits[0].memory != "GPU":
        return bars([PEAK], {name: [held] for name, held in found.memory.items()}, unit=BYTES, title=PEAK,
                    about="Bytes at the peak by what they are of")  # fmt: skip
    limit = found.room.limits[0]
    parts: dict[str, list[float]] = {str(term): [found.room.terms.get(term, 0)] for term in TERMS}
    of_allocator = max(0, limit.held_bytes - sum(found.room.terms.values()))
    parts[_BESIDE_BUFFERS] = [limit.reserved_bytes + of_allocator]
    chart = bars(
        ["GPU"], parts, title=f"memory of a GPU, {size(limit.capacity_bytes)} in all",
        about="Bytes of a GPU at the peak by term, against its capacity", unit=BYTES,
        limit=("capacity", limit.capacity_bytes),
    )  # fmt: skip
    for trace in chart.traces:
        if trace["name"] == _BESIDE_BUFFERS:
            trace |= {"hue": [*HUES].index("grey"), "marker": {"pattern": {"shape": "/"}}}
    return chart


def parts_chart(breakdown: Mapping[Any, float]) -> Chart:
    """Return the seconds of the critical rank by what they go into."""
    title = "where the step of the critical rank goes"
    parts = {str(part): [taken] for part, taken in breakdown.items()}
    return bars(["step"], parts, title=title, about=f"One bar of its parts: {title}", unit=SECONDS)


def saves_chart(saves: Mapping[str, float]) -> Chart:
    """Return the share of the step that doubling each figure of the machine saves, the largest first."""
    names = sorted(saves, key=lambda figure: -saves[figure])
    return bars(names, {"saved": [saves[name] for name in names]}, title="what doubling each figure saves",
                about="Share of the step that doubling each figure of the machine saves", unit=SHARE)  # fmt: skip
