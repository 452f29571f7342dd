"""Which order of micro-batches for how many of them: Llama-3-8B in 8 stages, with small and large vocabularies."""

from __future__ import annotations

from typing import Any

import longstep
from experiments.pages.study_page import Line, lines
from experiments.studies.study import Finding

QUESTION = "Which pipeline schedule for how many micro-batches, and what does a large head cost?"
_STEP = longstep.Setup(
    "single", model="llama3-8b", cluster="hgx-h100", gpus=8, pp_degree=8, seq="8K", jitter=0.0, software="megatron",
    set={"schedule.checkpoint": "none"},
)  # fmt: skip
_ORDERS = {
    "1F1B": ("1f1b", 1),
    "interleaved (4 chunks)": ("interleaved", 4),
    "ZB-H1": ("zb-h1", 1),
    "ZB-V": ("zb-v", 2),
}
_COUNTS = (8, 16, 32)
_VOCABULARIES = {"32K": 32768, "128K": 128256}


def find(jobs: int | None) -> Finding:  # noqa: ARG001 - steps of some seconds each, played in turn
    """Return what share of a step stages wait, against the micro-batches of a step."""
    rows: list[dict[str, Any]] = []
    series: list[Line] = []
    for words, vocabulary in _VOCABULARIES.items():
        for name, (order, chunks) in _ORDERS.items():
            points: list[tuple[float, float, str]] = []
            for count in _COUNTS:
                options = {"schedule.pipeline_schedule": order, "schedule.micro_batches": str(count)}
                options |= {"schedule.pipeline_chunks": str(chunks)} if order == "interleaved" else {}
                found = _STEP.replace(batch=count, set=options | {"model.vocab_size": str(vocabulary)}).predicted()
                stages = found.report.stages
                waits = sum(stage.bubbles for stage in stages) / len(stages)
                peak = max(stage.peak_hbm_bytes for stage in stages)
                rows.append({"order": name, "vocab_size": vocabulary, "micro_batches": count, "bubbles": waits,
                             "step_time_s": found.step_time_s, "peak_hbm_bytes": peak})  # fmt: skip
                points.append((float(count), 100 * waits, f"{name}, {count} micro-batches"))
            series.append(Line(f"{name}, vocabulary of {words}", points))
    step_s = {(row["order"], row["vocab_size"], row["micro_batches"]): row["step_time_s"] for row in rows}
    (small, large), few, many = _VOCABULARIES.values(), _COUNTS[0], _COUNTS[-1]

    def best(vocabulary: int, count: int) -> tuple[str, float]:
        """Return the fastest order, and how many times as fast as 1F1B it is."""
        least_s, name = min((step_s[name, vocabulary, count], name) for name in _ORDERS)
        return name, step_s["1F1B", vocabulary, count] / least_s

    (of_few, few_times), (of_many, many_times), (of_large, large_times) = (
        best(vocabulary, count) for vocabulary, count in ((small, few), (small, many), (large, many))
    )
    longer = step_s["1F1B", large, many] / step_s["1F1B", small, many]
    conclusion = (
        f"Llama-3-8B in 8 stages of one H100, micro-batches of 8K tokens, kernels of Megatron-Core. With a vocabulary "
        f"of 32K {of_few} is fastest at {few} micro-batches, {few_times:.2f} times as fast as 1F1B, and {of_many} at "
        f"{many}, {many_times:.2f} times. With one of 128K the last stage has the longest work: at {many} "
        f"micro-batches 1F1B takes {longer:.2f} times as long, and {of_large} is fastest, {large_times:.2f} times."
    )
    picture = lines(
        series, about="Share of a step that stages wait for each other",
        x_label="micro-batches of a step", y_label="bubbles, %", x_name=lambda count: f"{count:.0f}",
    )  # fmt: skip
    return Finding(conclusion, picture, rows)


ANSWER = 1
