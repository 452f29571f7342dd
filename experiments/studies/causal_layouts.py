"""What balanced layouts win over a contiguous ring under a causal mask: attention alone, both passes, 8 H100."""

from __future__ import annotations

from typing import Any

import longstep
from experiments.pages.study_page import Line, lines
from experiments.studies.study import Finding
from sim.base.units import length

QUESTION = "Striped, zigzag or contiguous: what do layouts win under a causal mask?"
_ATTENTION = longstep.Setup(model="llama3-8b", cluster="hgx-h100", scope="attention", layers=1, jitter=0.0)
_SCHEDULES = ("zigzag", "striped", "balanced-ring")


def find(jobs: int | None) -> Finding:
    """Return how many times faster than a contiguous ring each is, by length."""
    vary = {"schedule": ["ring", *_SCHEDULES], "seq": "8K..1M*2"}
    found = list(longstep.explore(_ATTENTION, vary, intervals=False, bounds=False, jobs=jobs))
    ring = {row["seq"]: row["step_time_s"] for row in found if row["schedule"] == "ring"}
    rows: list[dict[str, Any]] = []
    points: dict[str, list[tuple[float, float, str]]] = {}
    for row in found:
        if row["schedule"] != "ring":
            faster = ring[row["seq"]] / row["step_time_s"]
            said = f"{length(row['seq'])}: {faster:.3g} times as fast"
            points.setdefault(row["schedule"], []).append((row["seq"], faster, said))
            rows.append({"schedule": row["schedule"], "seq": row["seq"], "times_as_fast": faster,
                         "step_time_s": row["step_time_s"], "ring_s": ring[row["seq"]]})  # fmt: skip
    ends = [f"{name} {of[0][1]:.2f} and {of[-1][1]:.2f}" for name, of in points.items()]
    times = {name: [row["step_time_s"] for row in rows if row["schedule"] == name] for name in _SCHEDULES}
    slower = sum(striped > zigzag for striped, zigzag in zip(times["striped"], times["zigzag"], strict=True))
    conclusion = (
        f"On 8 H100 times as fast as the contiguous ring at 8K and at 1M tokens: {'; '.join(ends)}. The bound for 8 "
        f"ranks is 15/8. Striped is slower than zigzag at {slower} of {len(ring)} lengths: all of its hops have a "
        f"mask, and tiles that the mask cuts are computed whole."
    )
    picture = lines(
        [Line(name, of) for name, of in points.items()], about="Times as fast as a contiguous ring, by length",
        x_label="tokens of a sequence", y_label="times as fast as contiguous", x_name=lambda seq: length(int(seq)),
    )  # fmt: skip
    return Finding(conclusion, picture, rows)
