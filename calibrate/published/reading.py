"""Reads the tables that profiles are made from, and turns times into points."""

from __future__ import annotations

import csv
import gzip
import io
import math
from collections.abc import Iterator
from importlib import resources

from sim.profile import Issue, Point
from sim.schedule.kernels import KernelUse

Row = dict[str, str]


def rows(table: str) -> Iterator[Row]:
    """Yield the rows of a table."""
    data = resources.files("calibrate.published").joinpath("tables", f"{table}.csv.gz").read_bytes()
    yield from csv.DictReader(io.StringIO(gzip.decompress(data).decode()))


def transfer_point(kernel: str, link: str, ranks: int, nbytes: int, seconds: float, runs: int = 1) -> Point:
    """Return the point of a transfer that puts so many bytes on the wire per rank."""
    return kernel_point(KernelUse(kernel, link, "bf16", (ranks, nbytes), 0, nbytes), seconds, runs)


def kernel_point(use: KernelUse, seconds: float, runs: int = 1) -> Point:
    """Return the point of a kernel of which a table states one time."""
    return Point(
        kernel=use.kernel,
        variant=use.variant,
        dtype=use.dtype,
        shape=use.shape,
        condition="idle",
        median_s=seconds,
        mean_s=seconds,
        low_s=seconds,
        high_s=seconds,
        runs=runs,
        flops=use.flops,
        nbytes=use.hbm_bytes,
    )


EAGER_TRAFFIC = {"merge": 3.8}
"""Partial results are merged by eager kernels in fp32 that move 38 bytes an element, not the 10 of a fused one."""
EAGER_SOURCES = {
    "traffic.merge": "counted in zhuzilin/ring-flash-attention ring_flash_attn/utils.py",
    "issue": "calibrate/eager.py: the host's part alone, on a CPU of this project",
}


def eager_issue() -> dict[str, Issue]:
    """Return what ops cost the host in eager PyTorch, as ``calibrate.eager`` has measured it."""
    table = rows("eager_host")
    return {row["op"]: Issue(host_s=float(row["host_us"]) / 1e6, launches=int(row["launches"])) for row in table}


def geometric_mean(values: list[float]) -> float:
    """Return what sources that disagree say together."""
    return values[0] if len(values) == 1 else math.exp(sum(map(math.log, values)) / len(values))
