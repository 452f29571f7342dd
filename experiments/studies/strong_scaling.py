"""One global batch on ever more GPUs: Llama-3.1-405B from 512 to 16,384, in more replicas with fewer micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np

import longstep
from experiments.pages.study_page import Line, lines
from experiments.studies.study import Finding
from sim.accounts.breakdown import PartName, breakdown
from sim.accounts.bubbles import bubbles_s
from sim.engine.play.simulate import Simulation

QUESTION = "What is left of the speed of Llama-3.1-405B when 16M tokens are spread over 512 to 16,384 GPUs?"
_STEP = longstep.Setup(
    "single", model="llama3.1-405b", tp_degree=8, pp_degree=16, cp=1, seq="8K", jitter=0.0, software="megatron",
    set={"schedule.checkpoint": "x+q+k+v+out+middle+gate+up", "schedule.zero_stage": "1",
         "schedule.pipeline_layers": ",".join(["7", *["8"] * 14, "7"])},
    yes=True,
)  # fmt: skip
"""The first and the last stage have a layer less, as in arXiv:2407.21783 §3.3.2, from memory. Its ranks are many, few
are written."""
_SEQUENCES = 2048
_REPLICAS = (4, 8, 16, 32, 64, 128)
_WAITS: tuple[PartName, ...] = ("communication", "synchronisation")


def find(jobs: int | None) -> Finding:  # noqa: ARG001 - steps of some seconds each, played in turn
    """Return what share of a step stages wait, and what moves bytes beside no kernel takes, against the GPUs."""
    rows: list[dict[str, Any]] = []
    for replicas in _REPLICAS:
        gpus, count = replicas * 128, _SEQUENCES // replicas
        options = {"schedule.micro_batches": str(count)}
        steps = longstep.extended(
            _STEP.replace(cluster=f"{gpus}xH100", dp_degree=replicas, batch=count, set=options)
        ).steps
        bubbles, beside = steps.told(_bubbles_s), steps.told(_without_kernel_s)
        rows.append({"gpus": gpus, "micro_batches": count, "step_time_s": steps.step_s,
                     "bubbles": bubbles / steps.step_s, "exposed": (beside - bubbles) / steps.step_s})  # fmt: skip
    few, many = rows[0], rows[-1]
    more, faster = many["gpus"] / few["gpus"], few["step_time_s"] / many["step_time_s"]
    of = {name: " ".join(f"{100 * row[name]:.1f}" for row in rows) for name in ("bubbles", "exposed")}
    counts = {name: " ".join(f"{row[name]:,}" for row in rows) for name in ("gpus", "micro_batches")}
    conclusion = (
        f"TP 8, 16 stages in 1F1B, micro-batches of one sequence of 8K, kernels of Megatron-Core, norms and "
        f"SwiGLU recomputed, states of the optimiser sharded over replicas. On {few['gpus']:,} H100 a step takes "
        f"{few['step_time_s']:.1f} s, on {many['gpus']:,} {many['step_time_s']:.2f} s: {more:.0f} times as many are "
        f"{faster:.1f} times as fast, {100 * faster / more:.0f} % of what they could be. On {counts['gpus']} GPUs a "
        f"stage has {counts['micro_batches']} micro-batches; stages wait for each other {of['bubbles']} % of a step, "
        f"and for {of['exposed']} % ranks communicate, or wait for others than stages, beside no kernel. Of more than "
        f"18 micro-batches 17 and 18 are played and the others told. Interleaved chunks would wait less."
    )
    series = {"bubbles": "stages wait for each other", "exposed": "other communication beside no kernel"}
    picture = lines(
        [Line(said, [(float(row["gpus"]), 100 * row[name], f"{row['gpus']:,} GPUs") for row in rows])
         for name, said in series.items()],
        about="Share of a step, by GPUs, of one global batch", x_label="H100", y_label="of a step, %",
        x_name=lambda gpus: f"{gpus:.0f}",
    )  # fmt: skip
    return Finding(conclusion, picture, [{**row, "what": said} for said in series.values() for row in rows])


ANSWER = 1


def _bubbles_s(simulation: Simulation) -> float:
    """Return how long a rank waits for other stages, on average."""
    waits = bubbles_s(simulation.trace, simulation.checked.schedule.header)
    return float(np.average(waits, weights=simulation.fold.counts))


def _without_kernel_s(simulation: Simulation) -> float:
    """Return how long a rank has transfers under way or waits for others, and no kernel or copy, on average."""
    trace = simulation.trace
    parts = [breakdown(trace, rank) for rank in range(len(trace.numbers))]
    spent_s = [sum([each[name] for name in _WAITS]) for each in parts]
    return float(np.average(spent_s, weights=simulation.fold.counts))
