"""What ``longstep calibrate --software`` prints: kernels, bytes and what is kept, part by part."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from sim.base.files import Output, require_outputs
from sim.software.counted import Counted, Formula, names


def count_software(name: str, output: Output | None, console: Console) -> None:
    """Count what a piece of software runs, print it, and write its table where asked."""
    from calibrate.software.tables import counted, encoded

    require_outputs([output])
    table = counted(name)
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
