"""Where context parallelism overtakes tensor parallelism inside a node: training steps on 8 H100, by length."""

from __future__ import annotations

from typing import Any

import longstep
from experiments.pages.study_page import Line, lines
from experiments.studies.study import Finding
from sim.base.units import length

QUESTION = "Tensor or context parallelism inside a node: which is faster, by length?"
_STEP = longstep.Setup(
    model="llama3-8b", cluster="hgx-h100", gpus=8, jitter=0.0,
    set={"schedule.checkpoint": "full", "schedule.loss": "chunked", "schedule.tp_overlap": "gradients"},
)  # fmt: skip
_WAYS: dict[str, dict[str, Any]] = {
    "TP 8": {"schedule": "single", "tp_degree": 8},
    "TP 2 x Ulysses 4": {"schedule": "ulysses", "tp_degree": 2, "ulysses_degree": 4},
    "Ulysses 8": {"schedule": "ulysses", "tp_degree": 1, "ulysses_degree": 8},
    "zigzag 8": {"schedule": "zigzag", "tp_degree": 1, "ring_degree": 8},
}
_LENGTHS = tuple(2**at for at in range(12, 21))


def find(jobs: int | None) -> Finding:  # noqa: ARG001 - steps of half a second each, played in turn
    """Return tokens a second against length, for each way to share a sequence and weights."""
    rows: list[dict[str, Any]] = []
    points: dict[str, list[tuple[float, float, str]]] = {}
    for seq in _LENGTHS:
        for name, degrees in _WAYS.items():
            found = _STEP.replace(seq=seq, **degrees).predicted()
            rate = found.figures.tokens_per_s_per_gpu
            points.setdefault(name, []).append((float(seq), rate, f"{name}, {length(seq)}"))
            rows.append({"way": name, "seq": seq, "step_time_s": found.step_time_s, "tokens_per_s_per_gpu": rate,
                         "peak_hbm_bytes": found.peak_hbm_bytes, "fits": found.fits})  # fmt: skip
    step_s = {(row["way"], row["seq"]): row["step_time_s"] for row in rows}
    fastest = {seq: min((step_s[way, seq], way) for way in _WAYS)[1] for seq in _LENGTHS}
    spans = [f"{fastest[seq]} from {length(seq)}" for at, seq in enumerate(_LENGTHS)
             if at == 0 or fastest[seq] != fastest[_LENGTHS[at - 1]]]  # fmt: skip
    first, last = _LENGTHS[0], _LENGTHS[-1]
    ratios = [step_s["TP 8", seq] / step_s["Ulysses 8", seq] for seq in (first, last)]
    conclusion = (
        f"Llama-3-8B on 8 H100, one sequence a step, all layers computed again, FSDP over what context parallelism "
        f"shares. Fastest is {'; '.join(spans)}. TP 8 with sequence parallelism takes {ratios[0]:.2f} times as long as "
        f"Ulysses 8 at {length(first)}, and {ratios[1]:.2f} times at {length(last)}."
    )
    picture = lines(
        [Line(name, of) for name, of in points.items()], about="Tokens a second of a GPU against the length",
        x_label="tokens of a sequence", y_label="tokens/s/GPU", x_name=lambda seq: length(round(seq)),
    )  # fmt: skip
    return Finding(conclusion, picture, rows)


ANSWER = 1
