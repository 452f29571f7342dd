"""What fewer heads at a time save and cost: UPipe beside Ulysses and USP, a training step of 2M tokens on 8 H100."""

from __future__ import annotations

from typing import Any

import longstep
from experiments.pages.study_page import Line, lines
from experiments.studies.study import Finding

QUESTION = "How many heads at a time: what does UPipe save in memory, and what does it cost?"
_STEP = longstep.Setup(
    model="llama3-8b", cluster="hgx-h100", seq="2M", jitter=0.0,
    set={"schedule.checkpoint": "full", "schedule.activations": "host", "schedule.mlp": "tiled",
         "schedule.loss": "chunked"},
)  # fmt: skip
_DEGREES = ((8, 1), (4, 2), (2, 4))


def find(jobs: int | None) -> Finding:  # noqa: ARG001 - six steps, played in turn
    """Return peak memory against tokens/s."""
    rows: list[dict[str, Any]] = []
    points: dict[str, list[tuple[float, float, str]]] = {}
    for ulysses, ring in _DEGREES:
        for name in ("usp" if ring > 1 else "ulysses", "upipe"):
            degrees = {"ulysses_degree": ulysses, "ring_degree": ring if ring > 1 else None}
            found = _STEP.replace(schedule=name, **degrees).predicted()
            assert found.room is not None
            held, rate = found.peak_hbm_bytes, found.figures.tokens_per_s_per_gpu
            heads = ulysses if name == "upipe" else 32
            family = "UPipe" if name == "upipe" else "Ulysses, USP"
            points.setdefault(family, []).append((held / 2**30, rate, f"U {ulysses} R {ring}, {heads} heads at a time"))
            rows.append({"schedule": name, "ulysses": ulysses, "ring": ring, "heads_at_a_time": heads,
                         "peak_hbm_bytes": held, "attention_bytes": found.room.terms["attention"],
                         "tokens_per_s_per_gpu": rate, "step_time_s": found.step_time_s})  # fmt: skip
    whole, parts = rows[0], rows[1]
    least = min(rows, key=lambda row: row["peak_hbm_bytes"])
    saved = (whole["peak_hbm_bytes"] - parts["peak_hbm_bytes"]) / 2**30
    cost = 100 * (parts["step_time_s"] / whole["step_time_s"] - 1)
    slower = 100 * (least["step_time_s"] / whole["step_time_s"] - 1)
    conclusion = (
        f"At 2M tokens with tiled MLP and offload UPipe of 8 heads at a time takes {saved:.1f} GiB less than Ulysses "
        f"({parts['peak_hbm_bytes'] / 2**30:.1f} for {whole['peak_hbm_bytes'] / 2**30:.1f}) and {cost:+.1f} % of time. "
        f"Least memory of all has {least['heads_at_a_time']} heads at a time with rings of {least['ring']}: "
        f"{least['peak_hbm_bytes'] / 2**30:.1f} GiB, at {slower:+.1f} %."
    )
    ordered = sorted(rows, key=lambda row: row["schedule"] == "upipe")
    picture = lines(
        [Line(name, of) for name, of in points.items()], about="Tokens a second against the peak allocated of a GPU",
        x_label="peak allocated of a GPU, GiB", y_label="tokens/s/GPU", x_name=lambda gib: f"{gib:.3g}",
    )  # fmt: skip
    return Finding(conclusion, picture, ordered)
