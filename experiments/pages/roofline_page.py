"""The roofline of a GPU as one HTML page: FLOPs a byte against FLOP/s, with the kernels of a layer by length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from experiments.pages.drawn.pictures import Drawn, Entry, is_narrow, legend, picture
from experiments.pages.drawn.plots import (
    HUES,
    SHAPES,
    SWATCH,
    Axis,
    Frame,
    Mark,
    Plot,
    Tick,
    Trend,
    apart,
    height_below,
)
from experiments.pages.drawn.render import render
from sim.base.units import length, rate, seconds
from sim.setup.answers.table import Table

_WIDTH, _HEIGHT, _LOW = 1000, 520, 380
"""Of the plot in pixels, on a wide screen; its height on a phone."""
_FAMILIES = ("flash", "memory-efficient", "standard", "gemm", "other")
"""Kernels that have a colour each."""


def page(title: str, balance: dict[str, Any], found: Table) -> str:
    """Return the page of a row of ``longstep.machine_balance`` and of what ``longstep.roofline`` returned."""
    rows = found.rows
    lengths = sorted({row["seq"] for row in rows})
    families = [Entry(SWATCH, _hue(name), name) for name in _FAMILIES]
    shapes = [Entry(_shape(lengths, seq), "inked", length(seq)) for seq in lengths]
    return render(
        "roofline.html.j2",
        title=f"Roofline: {title}",
        answer=found.answer,
        balance=balance,
        picture=picture(
            lambda width: Drawn(plot(balance, rows, width), legend([families, shapes], width)), _WIDTH
        ),
        heads=(
            "kernel", "length", "FLOPs", "HBM bytes", "FLOPs/byte", "bound by", "time", "FLOP/s", "of the roof", "note"
        ),
        rows=rows,
        name=kernel_name,
        length=length,
        rate=rate,
    )  # fmt: skip


def kernel_name(row: dict[str, Any]) -> str:
    """Return what tells a kernel of a layer from the others."""
    if row["attention"]:
        return f"{row['kernel']} {row['attention']}"
    if row["kernel"] == "gemm":
        return f"gemm {row['shape'][1]} x {row['shape'][2]} {row['variant']}"
    return str(row["kernel"])


def plot(balance: dict[str, Any], rows: Sequence[dict[str, Any]], width: float = _WIDTH) -> Plot:
    """Return the plot, both axes logarithmic: a line for the datasheet, one for what calibrated kernels reach."""
    frame, x_label = Frame(86, 14, width - 16, (_LOW if is_narrow(width) else _HEIGHT) - 48), "FLOPs a byte of HBM"
    lengths = sorted({row["seq"] for row in rows})
    across = _axis([row["flops_per_byte"] for row in rows] + [balance["flops_per_byte"]], frame.left, frame.right)
    rates = [row["flops_per_s"] for row in rows] + [balance["peak_flops_per_s"]]
    up = _axis(rates, frame.bottom, frame.top)
    trends = [Trend("equal", _roof(balance["peak_flops_per_s"], balance["hbm_bytes_per_s"], across, up))]
    if balance["calibrated_flops_per_s"]:
        reached = _roof(balance["calibrated_flops_per_s"], balance["calibrated_bytes_per_s"], across, up)
        trends.append(Trend(_hue("other"), reached))
    return Plot(
        about="Rate of every kernel over its FLOPs a byte, below the roof of the GPU",
        width=width,
        height=height_below(frame, x_label),
        frame=frame,
        x_ticks=apart([Tick(across.at(value), f"{value:,g}") for value in _decades(across)], width),
        y_ticks=[Tick(up.at(value), rate(value, "FLOP/s")) for value in _decades(up)],
        x_label=x_label,
        y_label="FLOP/s",
        trends=trends,
        marks=[_mark(number, row, lengths, across, up) for number, row in enumerate(rows)],
    )


def _roof(flops_per_s: float, bytes_per_s: float, across: Axis, up: Axis) -> list[tuple[float, float]]:
    """Return the corners of a roof within the plot."""
    low = max(across.low, up.low / bytes_per_s)
    ridge = flops_per_s / bytes_per_s
    found = [(low, low * bytes_per_s), (ridge, flops_per_s), (across.high, flops_per_s)]
    return [(across.at(x), up.at(y)) for x, y in found]


def _axis(values: Sequence[float], begin: float, end: float) -> Axis:
    return Axis(low=min(values) / 2, high=max(values) * 2, begin=begin, end=end)


def _decades(axis: Axis) -> list[float]:
    return [10.0**power for power in range(math.ceil(math.log10(axis.low)), math.floor(math.log10(axis.high)) + 1)]


def _mark(number: int, row: dict[str, Any], lengths: list[int], across: Axis, up: Axis) -> Mark:
    x, y = across.at(row["flops_per_byte"]), up.at(row["flops_per_s"])
    family = row["attention"] or ("gemm" if row["kernel"] == "gemm" else "other")
    tip = (
        f"{kernel_name(row)} at {length(row['seq'])}\n{row['flops_per_byte']:.4g} FLOPs/byte, bound by {row['bound']}\n"
        f"{seconds(row['seconds'])}, {rate(row['flops_per_s'], 'FLOP/s')}: {100 * row['share_of_roof']:.3g} % of it"
    )
    look = _hue(family)
    return Mark(x=x, y=y, whisker="", ends=(x, x), shape=_shape(lengths, row["seq"]), look=look, row=number, tip=tip)


def _hue(family: str) -> str:
    return f"hue-{_FAMILIES.index(family) % len(HUES)}"


def _shape(lengths: list[int], seq: int) -> str:
    return SHAPES[lengths.index(seq) % len(SHAPES)]
