"""What a small kernel takes behind another, from its dispatch to its drain, and how far sources lie apart."""

from __future__ import annotations

from typing import NamedTuple

from calibrate.published.reading import rows
from sim.words.profile import Spread


class Queued(NamedTuple):
    """Seconds from one kernel of 65.5 kB to the next, by te42kyfo/gpu-benches."""

    replayed_s: float
    """In a CUDA graph."""
    streamed_s: float
    """On a stream, where the host may be what they wait for."""
    vidur: str
    """What the GPU is called in Vidur's table."""

    @property
    def apart(self) -> Spread:
        """Bounds, as factors over the time in a graph: between that, what a stream has, and the part of Vidur's sums
        that does not grow with their elements.
        """
        factors = [seconds / self.replayed_s for seconds in (self.replayed_s, self.streamed_s, self._intercept_s())]
        return Spread(low=round(min(factors), 4), high=round(max(factors), 4))

    def _intercept_s(self) -> float:
        """Return what the two smallest sums would take without elements."""
        small, large = sorted(
            (int(row["tokens"]), float(row["time_us"]) / 1e6)
            for row in rows("elementwise_rates")
            if row["gpu"] == self.vidur and row["op"] == "add(residual)"
        )[:2]
        return small[1] - (large[1] - small[1]) / (large[0] - small[0]) * small[0]


OF_A100 = Queued(1.4e-6, 2.7e-6, "a100")
OF_HOPPER = Queued(1.3e-6, 2.5e-6, "h100")
"""H200, and taken for all later GPUs."""
SOURCES = {
    "replayed_s": "te42kyfo/gpu-benches@1c36d50 gpu-small-kernels, kernels of 65.5 kB back to back in a CUDA graph: "
    "48 GB/s on A100 (a100_80_graph.txt), 50 on H200 (h200_graph.txt), taken for H100 and later GPUs, too",
    "replayed": "the same on a stream (24 and 26 GB/s), and residual sums of 128 and 512 tokens, whose times are a "
    "line of their elements: microsoft/vidur@7d47513, on A100 and H100",
}
