"""Reads the tables that profiles are made from, and turns times into points."""

from __future__ import annotations

import csv
import gzip
import io
import math
from collections.abc import Iterator
from importlib import resources
from typing import NamedTuple

from sim.schedule.derive.kernels import KernelUse, attention_use
from sim.schedule.ir.masks import Band
from sim.words.profile import Point

Row = dict[str, str]


def rows(table: str) -> Iterator[Row]:
    """Yield the rows of a table."""
    data = resources.files("calibrate.published").joinpath("tables", f"{table}.csv.gz").read_bytes()
    lines = io.StringIO(gzip.decompress(data).decode())
    yield from csv.DictReader(line for line in lines if not line.startswith("#"))


class Averaged(NamedTuple):
    """What one or more sources say of kernels."""

    points: list[Point]
    disagreement: dict[str, float]
    """By kernel, the factor by which two sources lie above and below their mean."""


def square_attention(backward: bool, q_shape: tuple[int, int, int, int], band: Band) -> KernelUse:
    """Return attention in bf16 with as many keys as queries, and as many key/value heads."""
    return attention_use(backward, "bf16", q_shape, q_shape[1], q_shape[2], band)


def transfer_point(
    kernel: str, link: str, ranks: int, nbytes: int, seconds: float, runs: int = 1, nodes: int | None = None
) -> Point:
    """Return the point of a transfer that puts so many bytes on the wire per rank; over NICs with the number of nodes,
    by default as many as the ranks fill.
    """
    shape = (ranks, nbytes) if nodes is None else (ranks, nbytes, nodes)
    return kernel_point(KernelUse(kernel, link, "bf16", shape, 0, nbytes), seconds, runs)


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


def geometric_mean(values: list[float]) -> float:
    """Return what sources that disagree say together."""
    return values[0] if len(values) == 1 else math.exp(sum(map(math.log, values)) / len(values))
