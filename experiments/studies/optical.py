"""Optical links at every GPU, as of silicon photonics: what they win over electrical networks of several rates."""

from __future__ import annotations

from typing import Any

import longstep
from experiments.pages.study_page import Line, lines
from experiments.studies.study import Finding
from sim.base.units import length

QUESTION = "What do optical links of several Tb/s at every GPU win between nodes?"
ANSWER = 1
_LENGTHS = tuple(16 * 1024 << power for power in range(0, 7, 2))
_ELECTRICAL = (100, 400)
"""Gb/s of a GPU. 400 is the preset's; 100 is assumed, a slow network of the time of the claim."""
_OPTICAL = (800, 1600, 3200, 6400, 12800)
"""Gb/s of a GPU, assumed, hence the sweep. 12800 is what RAMP gives a whole node."""
_LATENCIES_S = (14e-6, 1.4e-6)
"""As of the NICs, and a tenth of it, which is assumed: no switch but a passive one."""
_CLAIM = (1.3, 9.1)
"""Times as fast as electrical networks: SiP-ML, SIGCOMM 2021, abstract."""
_LAYER = longstep.Setup(model="llama3-8b", cluster="hgx-h100", nodes=2, scope="layer", layers=1, jitter=0.0)
_CANDIDATES = {
    "zigzag": _LAYER.replace(schedule="zigzag"),
    "Ulysses": _LAYER.replace(schedule="ulysses"),
    "USP 8x2": _LAYER.replace(schedule="usp", ulysses_degree=8, ring_degree=2),
}


_NIC, _LATENCY, _PCIE = "cluster.nic.bytes_per_s", "cluster.nic.latency_s", "cluster.pcie.bytes_per_s"


def _best(jobs: int | None) -> dict[tuple[int, float, int], float]:
    """Return the time of a layer with the fastest schedule by Gb/s, latency and length. The way to a GPU is no slower
    than its link.
    """
    rates = {gbits * 1e9 / 8: gbits for gbits in (*_ELECTRICAL, *_OPTICAL)}
    vary = {
        "seq": _LENGTHS, _NIC: [str(rate) for rate in rates], _PCIE: [str(max(2 * rate, 63e9)) for rate in rates],
        _LATENCY: [str(latency_s) for latency_s in _LATENCIES_S],
    }  # fmt: skip
    best: dict[tuple[int, float, int], float] = {}
    for setup in _CANDIDATES.values():
        for row in longstep.explore(setup, vary, zipped=[(_NIC, _PCIE)], intervals=False, bounds=False, jobs=jobs):
            key = rates[row[_NIC]], row[_LATENCY], row["seq"]
            best[key] = min(best.get(key, row["step_time_s"]), row["step_time_s"])
    return best


def find(jobs: int | None) -> Finding:
    """Return how many times as fast a layer is, by the rate of optical links, for each electrical network and length;
    the latency is that of the NICs. The conclusion has the shorter latency, too.
    """
    best = _best(jobs)
    rows: list[dict[str, Any]] = []
    series = []
    for gbits in _ELECTRICAL:
        for seq in _LENGTHS:
            points = []
            for optical in _OPTICAL:
                times, short = (
                    best[gbits, _LATENCIES_S[0], seq] / best[optical, latency_s, seq] for latency_s in _LATENCIES_S
                )
                points.append((float(optical), times, f"{optical} Gb/s: {times:.3f} times as fast"))
                rows.append({"electrical_gbits_per_s": gbits, "seq": seq, "optical_gbits_per_s": optical,
                             "times_as_fast": times, "short_latency_times_as_fast": short})  # fmt: skip
            series.append(Line(f"{length(seq)}, from {gbits} Gb/s", points))
    found = [(row["times_as_fast"], row["short_latency_times_as_fast"], row["electrical_gbits_per_s"]) for row in rows]
    ranges = "; ".join(
        f"{min(min(own[:2]) for own in found if own[2] == gbits):.2f} to "
        f"{max(max(own[:2]) for own in found if own[2] == gbits):.2f} from {gbits} Gb/s"
        for gbits in _ELECTRICAL
    )
    inside = sum(_CLAIM[0] <= own[number] <= _CLAIM[1] for own in found for number in range(2))
    last = max(max(own[:2]) for own, row in zip(found, rows, strict=True) if row["seq"] == _LENGTHS[-1])
    conclusion = (
        f"One layer of Llama-3-8B on two nodes of 8 H100, the fastest of zigzag, Ulysses and USP 8x2 before and after. "
        f"Links of {_OPTICAL[0] / 1000:g} to {_OPTICAL[-1] / 1000:g} Tb/s a GPU, with the NICs' latency or a tenth of "
        f"it, are so many times as fast: {ranges}; at {length(_LENGTHS[-1])} tokens at most {last:.2f}. Of "
        f"{2 * len(rows)} combinations {inside} are within 1.3 to 9.1, as claimed of silicon photonics (SiP-ML). That "
        f"claim is not testable from what is published in its abstract: rate and shape of the electrical network, "
        f"rate of the optical one, models and batches are missing; nor is RAMP's (1.3 to 16 times, arXiv:2211.15226). "
        f"Co-packaged optics that widen the domain of NVLink (2.7 times as fast, arXiv:2510.15893) are in "
        f"nvl72-or-nodes. Sourced are the electrical 400 Gb/s and its latency; assumed and swept are all other rates "
        f"and the shorter latency, and a way from GPU to link that is no slower than it. Circuits are not switched "
        f"during a step."
    )
    picture = lines(
        series, about="Times as fast as with electrical links, by the rate of optical ones",
        x_label="Gb/s of a GPU's optical link", y_label="times as fast", x_name=lambda gbits: f"{gbits:g}",
    )  # fmt: skip
    every = [one for own in found for one in own[:2]]
    return Finding(conclusion, picture, rows, {"times_as_fast": (min(every), max(every))})
