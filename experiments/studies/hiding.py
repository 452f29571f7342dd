"""From which tokens per GPU on a contiguous ring hides its transfers: attention alone, forward, with a full mask."""

from __future__ import annotations

import longstep
from experiments.pages.study_page import Line, lines
from experiments.studies.study import Finding
from sim.base.units import length

QUESTION = "From how many tokens per GPU on does a ring hide its transfers behind attention?"
_HIDDEN = 0.05
_TOKENS = tuple(512 << power for power in range(8))
_RING = longstep.Setup(
    "ring", model="llama3-8b", scope="attention", passes="forward", mask="full", layers=1, jitter=0.0
)
_CLUSTERS = {
    "8 H100, NVLink": _RING.replace(cluster="hgx-h100"),
    "16 H100, 400 Gb/s between nodes": _RING.replace(cluster="hgx-h100", nodes=2),
    "8 A100, NVLink": _RING.replace(cluster="dgx-a100"),
    "16 A100, 200 Gb/s between nodes": _RING.replace(cluster="dgx-a100", nodes=2),
}


def find(jobs: int | None) -> Finding:
    """Return which share of attention's time no kernel runs."""
    rows, series, told = [], [], []
    for name, setup in _CLUSTERS.items():
        gpus = 8 * (setup.nodes or 1)
        vary = {"seq": [gpus * tokens for tokens in _TOKENS]}
        points = []
        for row in longstep.explore(setup, vary, intervals=False, bounds=False, jobs=jobs):
            tokens, share = row["seq"] // gpus, 1 - row["compute_s"] / row["step_time_s"]
            said = f"{length(tokens)} tokens a GPU: {100 * share:.3g} % without a kernel"
            points.append((tokens, 100 * share, said))
            rows.append({"cluster": name, "tokens_per_gpu": tokens, "seq": row["seq"], "exposed_percent": 100 * share,
                         "step_time_s": row["step_time_s"]})  # fmt: skip
        series.append(Line(name, points))
        hidden = next((tokens for tokens, share, _ in points if share < 100 * _HIDDEN), None)
        told.append(f"{name} {'more than ' + length(_TOKENS[-1]) if hidden is None else length(hidden)}")
    conclusion = (
        f"Less than {100 * _HIDDEN:.0f} % of the time is left without a kernel from so many tokens per GPU on: "
        f"{'; '.join(told)}. Llama-3-8B sends 8 heads of keys and values and computes 32 of queries, so that a block "
        f"needs a quarter of the tokens that FLOP/s over B/s say for as many heads of both (arXiv:2310.01889 §3)."
    )
    picture = lines(
        series, about="Share of the time in which no kernel runs, by tokens per GPU", x_label="tokens per GPU",
        y_label="% of the time without a kernel", x_name=lambda tokens: length(int(tokens)),
    )  # fmt: skip
    return Finding(conclusion, picture, rows)
