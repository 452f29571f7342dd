"""``longstep count``: counts what modules of real software run: kernels, bytes and what is kept, part by part."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from experiments.verbs.shared.kinds import OptionalText
from experiments.verbs.shared.writes import Writes
from sim.base.files import require_outputs
from sim.software.counted import COUNTED_FILE, Counted, Formula, names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Count(Writes):
    """Count the kernels that the modules of a piece of software run, their bytes, and what backward keeps."""

    name: Annotated[str, tyro.conf.Positional] = ""
    """NAME of the software, such as transformers-llama."""
    out: OptionalText = None
    """Write the table to this FILE.toml."""


def count(command: Count, console: Console) -> None:
    """Count what a piece of software runs, print it, and write its table where asked."""
    from calibrate.software.tables import counted, encoded

    output = command.output(command.out, COUNTED_FILE)
    require_outputs([output])
    table = counted(command.name)
    where = "--out FILE.toml writes it"
    if output:
        output.write(encoded(table))
        where = f"written to {output.path}"
    versions = ", ".join(f"{package} {version}" for package, version in table.versions.items())
    console.print(f"{table.software}; {versions}; {where}", markup=False)
    _show(table, console)


def _show(counted: Counted, console: Console) -> None:
    """Print a row for each pass of each part."""
    columns = ("part", "pass", "kernels", "bytes that they read and write", "products", "bytes kept", "peak bytes")
    table = Table(*columns)
    for column in table.columns:
        column.overflow = "fold"
    for name, part in counted.parts.items():
        allocated = [_sum(part.kept), _sum(part.peak)]
        for label, of in (("forward", part.forward), ("backward", part.backward), ("step", part.step)):
            if of.kernels or of.products:
                products = sum(one.launches for one in of.products)
                table.add_row(name, label, str(of.launches), _sum(of.traffic), str(products or ""), *allocated)
                name, allocated = "", ["", ""]  # noqa: PLW2901 - once for all its passes
    console.print(table)


def _sum(formula: Formula) -> str:
    """Return an amount in words, what has most dimensions first: 36 tokens*hidden + 24 tokens."""
    ordered = sorted(formula.items(), key=lambda item: -len([*names(item[0])]))
    return " + ".join(f"{each:g}" + (f" {product}" if product != "1" else "") for product, each in ordered)
