"""What ``longstep calibrate --against`` prints: one profile held against another, and the figures that both state."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.tables import seconds
from sim.engine.cost import measured_cluster
from sim.presets import preset_names
from sim.profile import Point, Profile, load_profile, write_whole
from sim.schedule.derive.kernels import ATTENTION_KERNELS

if TYPE_CHECKING:
    from calibrate.against import Row

_WIDTH = 200
"""Columns of the tables in a file."""
_HEADS = (
    "kernel", "points", "median (quartiles)", "short", "by", "long", "they differ in", "in 90 %", "predictions",
    "worst",
)  # fmt: skip
_COMPUTING = (*ATTENTION_KERNELS, "gemm")


def show_against(profile: Profile, other: Profile, console: Console) -> None:
    """Print what ``other`` says of the points of ``profile``, where they differ, and the figures of both."""
    from calibrate.against import NEAR, against

    found = against(profile, other)
    heading = f"profile {_named(profile)} held against {_named(other)}: predicted by the latter / measured"
    console.print(heading, markup=False)
    if not found.same_machine:
        console.print(
            f"these are different machines: the efficiencies of {other.name!r} are taken on {profile.machine.gpu!r}, "
            f"as a what-if does",
            markup=False,
        )
    table = Table(*_HEADS)
    for named in (table.columns[0], table.columns[-1]):
        named.overflow = "fold"  # kernels and shapes are read whole, or not at all
    for row in found.rows:
        table.add_row(*_cells(row, other))
    console.print(table)
    for line in _legend(NEAR):
        console.print(line)
    if found.left_out:
        what = ", ".join(f"{kernel} ({count} points)" for kernel, count in sorted(found.left_out.items()))
        console.print(f"{other.name!r} has no points of: {what}", markup=False)
    console.print("what they state:")
    console.print(_figures(profile, other))


def write_against(profile: Profile, others: list[Profile], path: Path, console: Console) -> None:
    """Print what each of some profiles says of another one's points, and write it to a text file, too."""
    text = io.StringIO()
    for to in (console, Console(file=text, width=_WIDTH, highlight=False, soft_wrap=True, force_terminal=False)):
        for other in others:
            show_against(profile, other, to)
    write_whole(path, text.getvalue().encode())


def shipped_of(gpu: str) -> list[Profile]:
    """Return the profiles of a GPU that ship."""
    shipped = map(load_profile, preset_names("sim/profiles", ".json"))
    return [profile for profile in shipped if profile.machine.gpu == gpu]


def _legend(near: float) -> list[str]:
    """Return what the columns say."""
    said = {
        "short, long": "medians of the shortest and of the longest third of the points",
        "by": "how much longer the short ones are predicted than measured",
        "they differ in": f"what is apart by more than {100 * near:g} %: a fixed time (launches, first tiles), if only "
        "the short ones are, a rate, if only the long ones; all alike, by one factor, where short and long are no "
        "further apart than that, else short and long, by two; between: only others",
        "in 90 %": "measured times in the interval that the latter promises of nine in ten",
        "predictions": "of shapes that it has measured, interpolated, borrowed from another shape, variant or data "
        "type, extrapolated beyond twice its sizes, or at the roofline, without a point of the kernel",
        "worst": "ratio and shape: of attention batch x queries x keys x heads x kv heads x head dim, of a gemm tokens "
        "x in x out, of a transfer ranks x bytes",
    }
    return [f"  {column}: {meaning}" for column, meaning in said.items()]


def _named(profile: Profile) -> str:
    return f"{profile.name!r} of {profile.machine.gpu}, {profile.created}"


def _cells(row: Row, other: Profile) -> list[str]:
    """Return what the table says of one kernel."""
    spread = other.residuals.get(row.first.kernel)
    first, (low, middle, high), worst = row.first, row.quartiles, row.worst
    bases = ", ".join(f"{count} {basis}" for basis, count in row.bases.most_common())
    return [
        " ".join(filter(None, (first.kernel, first.variant, first.dtype))),
        str(len(row.held)),
        f"{middle:.3f} ({low:.3f}, {high:.3f})",
        f"{row.short:.3f}",
        seconds(round(row.short_by_s, 9) + 0.0),  # to nanoseconds: below are errors of rounding, and -0
        f"{row.long:.3f}",
        row.differs,
        f"{100 * row.share_within(spread):.0f} %" if spread else "",
        bases,
        f"{worst.ratio:.3f} of {_shape(worst.point)}",
    ]


def _shape(point: Point) -> str:
    return "x".join(map(str, point.shape))


def _figures(profile: Profile, other: Profile) -> Table:
    """Return the figures that either profile states, side by side."""
    table = Table("", profile.name, other.name)
    for name, stated in _rows(profile, other).items():
        cells = [stated(profile), stated(other)]
        if any(cells):
            table.add_row(name, *map(Text, cells))  # drivers and sources write brackets, which are no markup
    return table


def _rows(profile: Profile, other: Profile) -> dict[str, Callable[[Profile], str]]:
    """Return what states each figure of a profile, empty where it has none."""
    software = dict.fromkeys([*profile.machine.software, *other.machine.software])
    issued = dict.fromkeys([*profile.issue, *other.issue])
    rows: dict[str, Callable[[Profile], str]] = {
        "machine": lambda one: one.machine.gpu,
        "made": lambda one: one.created,
        "peak": _peak,
        "memory": lambda one: f"{measured_cluster(one).hbm.bytes_per_s / 1e9:.5g} GB/s",
        "memory rate of kernels without points": lambda one: f"{100 * one.memory_efficiency:.3g} %",
        "launch": lambda one: seconds(measured_cluster(one).gpu.launch_s),
    }
    rows |= {f"host, to issue {kernel}": _issued(kernel) for kernel in issued}
    rows |= {
        f"of the peak: {kernel} {mask}": _rate(kernel, mask)
        for kernel in ATTENTION_KERNELS
        for mask in ("causal", "full")
    }
    rows["of the peak: gemm"] = _rate("gemm")
    rows |= {f"{kernel} under sustained load": _sustained(kernel) for kernel in _COMPUTING}
    rows |= {f"software: {name}": _software(name) for name in software}
    rows |= {f"source: {name}": _source(name) for name in ("attention", "gemm")}
    rows |= {f"state {when}": _state(when) for when in ("before", "after")}
    return rows


def _peak(profile: Profile) -> str:
    peaks = measured_cluster(profile).gpu.peak_flops_per_s
    return ", ".join(f"{dtype} {rate / 1e12:.4g}" for dtype, rate in peaks.items()) + " TFLOP/s"


def _issued(kernel: str) -> Callable[[Profile], str]:
    from calibrate.points import issue_s

    return lambda one: seconds(issue_s(one, kernel)) if one.issue else ""


def _rate(kernel: str, variant: str | None = None) -> Callable[[Profile], str]:
    from calibrate.points import largest_rate

    def stated(profile: Profile) -> str:
        rate = largest_rate(profile, kernel, variant)
        if rate is None:
            return ""
        return f"{100 * rate.share:.1f} % ({rate.point.dtype} {_shape(rate.point)})"

    return stated


def _sustained(kernel: str) -> Callable[[Profile], str]:
    return lambda one: f"{one.sustained[kernel]:.3g} times as long" if kernel in one.sustained else ""


def _software(name: str) -> Callable[[Profile], str]:
    return lambda one: one.machine.software.get(name, "")


def _source(name: str) -> Callable[[Profile], str]:
    return lambda one: one.sources.get(name, "")


def _state(when: str) -> Callable[[Profile], str]:
    return lambda one: one.machine.state.get(when, "")
