"""Ring, Ulysses or both, by the network between nodes and by length: one layer on two nodes of 8 H100."""

from __future__ import annotations

from collections import Counter
from typing import Any

import longstep
from experiments.pages.study_page import winners
from experiments.studies.study import Finding
from sim.base.units import length

QUESTION = "Ring, Ulysses, or USP of both: which is fastest at which network and length?"
_TIE = 0.01
_NICS = ("/32", "/16", "/8", "/4", "/2", "*1", "*2", "*4")
_LENGTHS = "16K..1M*2"
_LAYER = longstep.Setup(model="llama3-8b", cluster="hgx-h100", nodes=2, scope="layer", layers=1, jitter=0.0)
_CANDIDATES = {
    "zigzag ring": _LAYER.replace(schedule="zigzag"),
    "Ulysses": _LAYER.replace(schedule="ulysses"),
    "USP 8x2": _LAYER.replace(schedule="usp", ulysses_degree=8, ring_degree=2),
}


def find(jobs: int | None) -> Finding:
    """Return who wins by the rate of the NICs, 1 for 400 Gb/s a GPU, and by length."""
    vary = {"seq": _LENGTHS, "cluster.nic.bytes_per_s": _NICS}
    times: dict[tuple[str, int], dict[str, float]] = {}
    for name, setup in _CANDIDATES.items():
        for row in longstep.explore(setup, vary, intervals=False, bounds=False, jobs=jobs):
            times.setdefault((row["cluster.nic.bytes_per_s"], row["seq"]), {})[name] = row["step_time_s"]
    rows: list[dict[str, Any]] = []
    cells: dict[tuple[str, str], tuple[str, str]] = {}
    wins = Counter[str]()
    most = (0.0, "", "")
    for (nic, seq), of in times.items():
        first, second, *_ = sorted(of, key=lambda name: of[name])
        lead = of[second] / of[first] - 1
        winner = first if lead >= _TIE else f"within {100 * _TIE:.0f} %"
        wins[winner] += 1
        most = max(most, (lead, first, f"{length(seq)} tokens and NICs of {_rate(nic)}"))
        cells[length(seq), _rate(nic)] = (winner, f"{first} by {100 * lead:.2g} % before {second}")
        rows.append({"seq": seq, "nic": _rate(nic), "wins": winner, "lead_percent": 100 * lead}
                    | {f"{name}_s": time_s for name, time_s in of.items()})  # fmt: skip
    told = ", ".join(f"{name} {count}" for name, count in wins.most_common())
    slowest = {row["wins"] for row in rows if row["nic"] == _rate(_NICS[0])}
    conclusion = (
        f"Of {len(rows)} combinations win: {told}. With the slowest NICs it is {' or '.join(sorted(slowest))}. The "
        f"largest lead is {100 * most[0]:.0f} %, of {most[1]} at {most[2]}."
    )
    about = "Which schedule is fastest by the rate of the network and by length"
    picture = winners(cells, about=about, x_label="tokens of a sequence", y_label="")
    return Finding(conclusion, picture, rows)


def _rate(text: str) -> str:
    """Return the rate of a NIC in words: 400 Gb/s is that of the preset."""
    factor = float(text[1:]) if text[0] == "*" else 1 / float(text[1:])
    return f"{400 * factor:g} Gb/s"
