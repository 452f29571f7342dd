"""What is measured of Blackwell GPUs beside the large tables: single sizes of collectives and of matrix products."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from calibrate.published.reading import geometric_mean, rows, transfer_point
from sim.engine.traffic.collectives import wire_bytes
from sim.schedule.ir.ops import CollectiveName
from sim.words.profile import Point
from topology.cluster import Cluster

_KINDS: dict[str, CollectiveName] = {"all_reduce": "all_reduce", "alltoall": "all_to_all"}
LARGE_SOURCE = "8 and 16 GiB among 4 GPUs: nccl-tests, oracle-quickstart/oci-gpu-quickstarts@6a0abdc"
GEMM_SOURCE = (
    "6 products of this GPU, 8192 x 512 to 16384 x 8192, take 0.89 of that time on average (facebookexperimental/"
    "triton PR 740), which widens the interval"
)


def large(gpu: str, cluster: Cluster) -> Iterator[Point]:
    """Yield collectives among the GPUs of one tray. Larger groups have two sizes each, from which the time of short
    messages does not follow, so they are left out.
    """
    for row in rows("nccl_large_blackwell"):
        if (row["gpu"], row["what"]) == (gpu, "1 tray"):
            ranks, kind = int(row["gpus"]), _KINDS[row["collective"]]
            nbytes, link = wire_bytes(kind, tuple(range(ranks)), int(row["bytes"]), cluster)
            yield transfer_point(kind, link, ranks, nbytes, float(row["time_us"]) / 1e6)


def gemm_apart(gpu: str, points: Iterable[Point]) -> float:
    """Return by which factor the points of another GPU lie from a GPU's own matrix products; 1 if it has none."""
    known = {point.shape: point.flops / point.median_s for point in points if point.kernel == "gemm"}
    ratios = []
    for row in rows("gemm_gb300"):
        m, n, k = map(int, row["shape_MxNxK"].split("x"))
        if row["gpu"] == gpu and (m, k, n) in known:
            ratios.append(float(row["tflops"]) * 1e12 / known[m, k, n])
    ratio = geometric_mean(ratios) if ratios else 1.0
    return round(max(ratio, 1 / ratio), 4)
