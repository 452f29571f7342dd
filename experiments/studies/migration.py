"""What bounds a step as sequences grow: elasticities of a training step to every rate, Ulysses on 8 H100."""

from __future__ import annotations

import longstep
from experiments.pages.study_page import shares
from experiments.studies.study import Finding
from sim.base.units import length

QUESTION = "What bounds a training step from 8K to 8M tokens?"
_STEP = longstep.Setup(
    "ulysses", model="llama3-8b", cluster="hgx-h100", jitter=0.0,
    set={"schedule.activations": "host", "schedule.mlp": "tiled", "schedule.loss": "chunked"},
)  # fmt: skip
_LENGTHS = tuple(8192 << power for power in range(11))
_SMALL = 0.02
"""Figures with less of every step are drawn together."""


def find(jobs: int | None) -> Finding:  # noqa: ARG001 - one simulation each, played in turn
    """Return by how many per cent a step gets shorter for each per cent of a figure, by length."""
    found = {}
    for seq in _LENGTHS:
        of = {row["figure"]: abs(row["elasticity"]) for row in _STEP.replace(seq=seq).predicted().elasticities()}
        found[seq] = of
    most = {name: max(other.get(name, 0.0) for other in found.values()) for of in found.values() for name in of}
    shown = sorted((name for name in most if most[name] >= _SMALL), key=lambda name: -most[name])
    rows, bars = [], []
    for seq, of in found.items():
        parts = {name: of.get(name, 0.0) for name in shown}
        parts["others"] = max(0.0, sum(of.values()) - sum(parts.values()))
        rows.append({"seq": seq} | {f"{name}_percent": 100 * share for name, share in parts.items()})
        bars.append((length(seq), parts))
    first, last = bars[0], bars[-1]
    ends = [max(parts, key=lambda name: parts[name]) for _, parts in (first, last)]
    change = next((bar for bar, parts in bars if max(parts, key=lambda name: parts[name]) != ends[0]), None)
    turn = f" The largest changes at {change}." if change else ""
    conclusion = (
        f"At {first[0]} tokens the largest elasticity is that of {ends[0]}, {first[1][ends[0]]:.2f}; at {last[0]} that "
        f"of {ends[1]}, {last[1][ends[1]]:.2f}.{turn} Compute has {first[1].get('compute', 0.0):.2f} at {first[0]} and "
        f"{last[1].get('compute', 0.0):.2f} at {last[0]}."
    )
    picture = shares(
        bars, about="Elasticity of the step time to each figure of the machine, by length",
        x_label="per cent of the step time for one per cent of a figure",
    )  # fmt: skip
    return Finding(conclusion, picture, rows)
