"""``longstep roofline``: the machine balance of a cluster, and where the kernels of a layer lie on its roofline."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

import longstep
from experiments.evidence.provenance import note_lines
from experiments.pages.drawn.render import PAGE_FILE
from experiments.pages.roofline_page import kernel_name, page
from experiments.verbs.shared.kinds import OptionalText
from experiments.verbs.shared.selection import listed
from experiments.verbs.shared.terminal import print_json, tell, tell_assumed
from experiments.verbs.shared.writes import Writes
from sim.base.files import require_outputs
from sim.base.units import length, percent, rate, seconds
from sim.setup.names import CLUSTER, MODEL

LENGTHS = "8K,128K,1M"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline(Writes):
    """Show the machine balance of a cluster, and FLOPs a byte and rate of every kernel of a layer by length."""

    model: str = MODEL
    """NAME, FILE.toml, or a config.json of Hugging Face."""
    cluster: str = CLUSTER
    """NAME, a GPU such as H100, so many GPUs such as 16xH100, or FILE.toml."""
    seq: str = LENGTHS
    """Sequence lengths on one GPU, such as 8K,128K."""
    profile: OptionalText = None
    """NAME, FILE.json, or datasheet; by default the one that the cluster names."""
    page: OptionalText = None
    """Write an HTML page with the plot to this file."""
    json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print JSON instead of tables: the answer, the balance of all clusters, and a list of all kernels."""
    evidence: bool = False
    """Also print all that the answer rests on, as a table."""


def roofline(command: Roofline, console: Console) -> None:
    """Print the balance of machines, and the kernels of a layer."""
    out = command.output(command.page, PAGE_FILE)
    require_outputs([out])
    setup = longstep.Setup(model=command.model, cluster=command.cluster, profile=command.profile)
    tell_assumed(setup, console, json=command.json)
    found = longstep.roofline(setup, listed(command.seq, "`seq`", LENGTHS))
    shipped = longstep.machine_balance()
    of_cluster = (
        shipped if command.cluster in shipped.to_dict()["cluster"] else longstep.machine_balance([command.cluster])
    )
    balanced = next(row for row in of_cluster if row["cluster"] == command.cluster)
    title = f"kernels of a layer of {command.model} on one {balanced['gpu']}"
    if out:
        out.write(page(title, balanced, found).encode())
    if command.json:
        said = {"answer": found.answer, "rests_on": found.rests_on}
        print_json({**said, "balance": of_cluster.rows, "kernels": found.rows}, console)
        return
    console.print(found.answer, markup=False)
    console.print(_balance_table(of_cluster.rows))
    console.print(_kernels_table(title, found.rows))
    known = {*(found.grounds.evidence.notes if found.grounds else ())}
    more = note_lines(sorted({row["note"] for row in found if row["note"]} - known))
    tell([found.grounds] if found.grounds else [], console, everything=command.evidence, more=more)


def _balance_table(rows: list[dict[str, Any]]) -> Table:
    heads = ("cluster", "peak", "HBM", "FLOPs/byte", "kernels reach", "of HBM", "FLOPs/byte")
    table = Table(*heads, title=f"machine balance in {rows[0]['dtype']}, by datasheet and as calibrated")
    for row in rows:
        cells = [rate(row["peak_flops_per_s"], "FLOP/s"), rate(row["hbm_bytes_per_s"], "B/s")]
        cells.append(f"{row['flops_per_byte']:.0f}")
        if row["calibrated_flops_per_s"]:
            cells += [rate(row["calibrated_flops_per_s"], "FLOP/s"), rate(row["calibrated_bytes_per_s"], "B/s")]
            cells.append(f"{row['calibrated_flops_per_byte']:.0f}")
        table.add_row(row["cluster"], *cells)
    return table


def _kernels_table(title: str, rows: list[dict[str, Any]]) -> Table:
    heads = ("length", "kernel", "FLOPs", "HBM bytes", "FLOPs/byte", "bound", "time", "rate", "of the roof")
    table = Table(*heads, title=title)
    for row in rows:
        table.add_row(
            length(row["seq"]),
            kernel_name(row),
            f"{row['flops']:.3g}",
            f"{row['hbm_bytes']:.3g}",
            f"{row['flops_per_byte']:.3g}",
            row["bound"],
            seconds(row["seconds"]),
            rate(row["flops_per_s"], "FLOP/s"),
            percent(row["share_of_roof"]).lstrip("+"),
        )
    return table
