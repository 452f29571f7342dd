"""The figures of a step as people read them: the same in notebooks and on the page that ``longstep serve`` opens."""

from __future__ import annotations

import html

from sim.base.units import FEW, number, seconds, size
from sim.engine.results.report import Report
from sim.engine.results.room import Limit
from sim.setup.answers.answer import degrees
from sim.setup.played import PlayedStep


def figures_shown(prediction: PlayedStep, found: Report) -> list[tuple[str, str]]:
    """Return the names of figures with their values, units included; those that are not known are left out.

    >>> from sim.setup.predict import predict
    >>> p = predict("ring", model="tiny", cluster="hgx-h100", gpus=2, seq="8K")
    >>> dict(figures_shown(p, p.report))["GPUs"]
    '2 x H100-SXM-80GB'
    """
    ranks, training = prediction.checked.schedule.num_ranks, found.training
    told = [
        ("step", seconds(found.step_time_s)),
        ("tokens/s/GPU", number(found.tokens_per_s_per_gpu, FEW)),
        ("tokens/s", number(found.tokens_per_s_per_gpu * ranks, FEW)),
        ("MFU", _share(found.mfu)),
        ("HFU", _share(training.hfu if training else None)),
        ("GPUs", f"{ranks} x {prediction.cluster.spec.gpu.name}"),
        ("degrees", degrees(prediction)),
        ("GPU hours for a billion tokens", number(training.gpu_hours_per_billion_tokens, FEW) if training else ""),
        *((f"{limit.memory} memory", limit_shown(limit)) for limit in (found.room.limits if found.room else ())),
    ]
    return [(name, text) for name, text in told if text]


def limit_shown(limit: Limit) -> str:
    """Return whether a memory is enough, and what is left of it."""
    fits = {True: "fits", False: "does not fit", None: "at the limit"}[limit.fits]
    left = f"{size(abs(limit.free_bytes), FEW)} {'left' if limit.free_bytes >= 0 else 'missing'}"
    return f"{fits}, {left} of {size(limit.capacity_bytes, FEW)}"


def as_rows(pairs: list[tuple[str, str]]) -> str:
    """Return names and values as a table of HTML, a row each."""
    rows = (f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in pairs)
    return f"<table>{''.join(rows)}</table>"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.3g} %"
