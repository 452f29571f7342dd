"""What ``longstep recheck --against`` prints: what one profile predicts of another's points, kernel by kernel."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sim.base.files import write_whole
from sim.base.units import seconds
from sim.words.profile import Profile

_WIDTH = 200
"""Columns of the tables in a file."""


def show_profile_diff(profile: Profile, other: Profile, console: Console) -> None:
    """Print how the points of ``profile`` compare with what ``other`` predicts of them."""
    from calibrate.held.points import measured_s
    from calibrate.held.profile_diff import profile_diff

    found = profile_diff(profile, other)
    console.print(f"points of {_named(profile)}, predicted by {_named(other)}: predicted / measured time", markup=False)
    if not found.same_machine:
        console.print(
            f"these are different machines: the efficiencies of {other.name!r} are taken on {profile.machine.gpu!r}, "
            f"as a what-if does",
            markup=False,
        )
    table = Table("kernel", "points", "median", "90 % of the points", "worst", "of shape", "measured")
    for column in (table.columns[0], table.columns[-2]):
        column.overflow = "fold"  # kernels and shapes are read whole, or not at all
    for row in found.rows:
        (low, median, high), (point, ratio) = row.spread, row.worst
        shape, spread = "x".join(map(str, point.shape)), f"{low:.3f} to {high:.3f}"
        count, worst_s = str(len(row.points)), seconds(measured_s(point))
        table.add_row(row.name, count, f"{median:.3f}", spread, f"{ratio:.3f}", shape, worst_s)
    console.print(table)
    if found.left_out:
        what = ", ".join(f"{kernel} ({count} points)" for kernel, count in sorted(found.left_out.items()))
        console.print(f"{other.name!r} has no points of: {what}", markup=False)


def write_profile_diffs(profile: Profile, others: list[Profile], path: Path, console: Console) -> None:
    """Print what each of some profiles says of another one's points, and write it to a text file, too."""
    text = io.StringIO()
    for to in (console, Console(file=text, width=_WIDTH, highlight=False, soft_wrap=True, force_terminal=False)):
        for other in others:
            show_profile_diff(profile, other, to)
    write_whole(path, text.getvalue().encode())


def _named(profile: Profile) -> str:
    return f"profile {profile.name!r} of {profile.machine.gpu}, {profile.created}"
