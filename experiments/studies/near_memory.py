"""Element-wise kernels and softmax computed beside the memory, as TransPIM does: what of that a training step gains."""

from __future__ import annotations

from typing import Any

import longstep
from experiments.pages.study_page import Line, lines
from experiments.studies.stacked_hbm import HBM, LENGTHS, STEP, kernel_seconds
from experiments.studies.study import Finding
from sim.base.units import length
from sim.compare.roofline import calibrated

QUESTION = "What do element-wise kernels and softmax beside the memory win in training?"
ANSWER = 1
_INSIDE = (2, 4, 8, 16, 32)
"""Times the HBM's bandwidth that units beside the memory get. Assumed, hence the sweep."""
_SCORES = (1, 2, 4, 8)
"""Times the HBM's bandwidth at which scores cross to the memory and back. Assumed as well."""
_MATMULS = (2, 2, 5)
"""Products of scores' size in forward, its replay and backward: Q K and P V; in backward Q K again, dP, dV, dQ, dK."""
_CROSSINGS = (2, 2, 4)
"""Times that matrices of scores pass between GPU and memory: S there, P back; in a backward dP and dS, too."""
_SCORE_BYTES = 2


def find(jobs: int | None) -> Finding:
    """Return the most that offloaded element-wise kernels and offloaded softmax win, by length."""
    played = longstep.explore(STEP, {"seq": LENGTHS}, intervals=False, bounds=False, jobs=jobs)
    step_s = {row["seq"]: row["step_time_s"] for row in played}
    own = {seq: kernel_seconds(STEP.replace(seq=seq)) for seq in LENGTHS}
    rows: list[dict[str, Any]] = []
    series = []
    for inside in _INSIDE:
        points = []
        for seq in LENGTHS:
            there_s = kernel_seconds(STEP.replace(seq=seq, set={HBM: f"*{inside}"}))["element-wise"]
            faster = 100 * (step_s[seq] / (step_s[seq] - own[seq]["element-wise"] + there_s) - 1)
            points.append((float(seq), max(faster, 0.0), f"{length(seq)} tokens: {faster:.3g} %"))
            rows.append({"times_bandwidth": inside, "seq": seq, "faster_percent": faster,
                         "element_wise_s": own[seq]["element-wise"], "offloaded_s": there_s})  # fmt: skip
        series.append(Line(f"element-wise, {inside} times 3.35 TB/s", points))
    crossing = {times: _unfused_s(LENGTHS[-1], times) / own[LENGTHS[-1]]["attention"] for times in _SCORES}
    told = ", ".join(f"{ratio:.2f} at {times} times" for times, ratio in crossing.items())
    most = [max(row["faster_percent"] for row in rows if row["seq"] == seq) for seq in (LENGTHS[0], LENGTHS[-1])]
    shares = [100 * own[seq]["optimiser"] / step_s[seq] for seq in (LENGTHS[0], LENGTHS[-1])]
    conclusion = (
        f"Llama-3-8B, Ulysses on 8 H100. With all element-wise kernels of forward and backward beside memory of up to "
        f"{_INSIDE[-1]} times the bandwidth, and nothing waiting for them, a step is {most[0]:.3g} % faster at "
        f"{length(LENGTHS[0])} tokens and {most[1]:.2g} % at {length(LENGTHS[-1])}. Optimiser and gradient traffic "
        f"stay; the optimiser takes {shares[0]:.2g} % and {shares[1]:.2g} % of the step. Softmax beside the memory "
        f"takes FlashAttention apart: scores pass twice in forward, twice in its replay, four times in backward. "
        f"Even if it takes no time and products run at their best rate, attention takes so many times as long as fused "
        f"at {length(LENGTHS[-1])}, by the rate at which scores pass, in times of HBM's: {told}. Sourced are "
        f"the rates of H100; both multiples are assumed and swept. That TransPIM is 22.1 to 114.9 times as fast as a "
        f"GPU is not testable from what is published in its abstract: GPU, model, batch and the rate of its units are "
        f"missing, its matrix products are in memory as well, and it infers. The sweep gives at most "
        f"{1 + max(most) / 100:.2f} for element-wise kernels. Hybrid bonding as in H2-LLM is inference, where each "
        f"weight is read for few tokens: an analogy only, no figure of it is used."
    )
    picture = lines(
        series, about="Per cent that a step gets faster with element-wise kernels beside the memory, at most",
        x_label="tokens of a sequence", y_label="% faster", x_name=lambda tokens: length(int(tokens)),
    )  # fmt: skip
    times = [1 + row["faster_percent"] / 100 for row in rows]
    return Finding(conclusion, picture, rows, {"times_as_fast": (min(times), max(times))})


def _unfused_s(seq: int, times: int) -> float:
    """Return the least time of a step's attention on a GPU whose scores pass at so many times HBM's bandwidth. Products
    run at the highest calibrated rate, passes run beside them, and softmax is free.
    """
    found = STEP.replace(seq=seq).resolved()
    model = found.workload.model
    assert found.profile is not None
    roof = calibrated(found.profile, found.spec, "bf16")
    assert roof is not None
    pairs = seq * (seq + 1) / 2 * model.num_heads * model.num_layers / found.mesh.size
    return sum(
        max(
            2 * model.head_dim * matmuls * pairs / roof.flops_per_s,
            _SCORE_BYTES * crossings * pairs / (times * found.spec.hbm.bytes_per_s),
        )
        for matmuls, crossings in zip(_MATMULS, _CROSSINGS, strict=True)
    )
