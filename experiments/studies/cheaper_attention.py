"""What cheaper attention wins by length: exact, sliding window, block-sparse and linear, a training step on 8 H100."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

import longstep
from experiments.pages.study_page import Line, lines
from experiments.studies.stacked_hbm import kernel_seconds
from experiments.studies.study import Finding
from sim.base.units import length, size

QUESTION = "From which length on does cheaper attention make a step faster: window, blocks, or linear?"
ANSWER = 3
_STEP = longstep.Setup(
    model="llama3-8b", cluster="hgx-h100", gpus=8, jitter=0.0, yes=True,
    set={"schedule.activations": "host", "schedule.mlp": "tiled", "schedule.loss": "chunked"},
)  # fmt: skip
"""What lets 2M tokens fit; linear attention of so many takes two minutes."""
_SOFTMAX = ["zigzag", "ulysses"]
_KINDS: dict[str, dict[str, Any]] = {
    "exact": {"schedule": _SOFTMAX},
    "window of 4K": {"schedule": _SOFTMAX, "window": "4K"},
    "top 8 of blocks of 4K": {"schedule": _SOFTMAX, "block_mask": "topk:4K:8"},
    "linear": {"schedule": ["linear"]},
}
_LENGTHS = "16K..2M*2"
_SLOWER = (2, 4, 8)
"""Times as long as assumed that kernels may take: no block-sparse or linear kernel was measured."""


def find(jobs: int | None) -> Finding:
    """Return times as fast as exact attention by length, the faster of zigzag and Ulysses for each."""
    rows: list[dict[str, Any]] = []
    for kind, given in _KINDS.items():
        fields = {name: value for name, value in given.items() if name != "schedule"}
        step = _STEP.replace(**fields)
        vary = {"seq": _LENGTHS, "schedule": given["schedule"]}
        found = list(longstep.explore(step, vary, intervals=False, bounds=False, jobs=jobs))
        for seq in dict.fromkeys(row["seq"] for row in found):
            best = min((row for row in found if row["seq"] == seq), key=lambda row: row["step_time_s"])
            setup = step.replace(seq=seq, schedule=best["schedule"])
            alone = dataclasses.replace(setup, scope="attention", set=()).resolved()
            claims = alone.built().header.claims
            assert claims is not None
            rows.append({
                "attention": kind, "seq": seq, "schedule": best["schedule"], "step_time_s": best["step_time_s"],
                "attention_s": kernel_seconds(setup)["attention"], "peak_hbm_bytes": best["peak_hbm_bytes"],
                "sent_bytes_per_rank_and_layer": claims.wire_bytes / 8,
            })  # fmt: skip
    exact = {row["seq"]: row for row in rows if row["attention"] == "exact"}
    for row in rows:
        row["times_as_fast"] = exact[row["seq"]]["step_time_s"] / row["step_time_s"]
    series = [
        Line(kind, [(float(row["seq"]), row["times_as_fast"], _tip(row)) for row in rows if row["attention"] == kind])
        for kind in _KINDS
    ]
    picture = lines(
        series, about="Times as fast as with exact attention a training step is, by length",
        x_label="tokens of a sequence", y_label="times as fast", x_name=lambda tokens: length(int(tokens)),
    )  # fmt: skip
    return Finding(_conclusion(rows), picture, rows)


def _tip(row: dict[str, Any]) -> str:
    return f"{length(row['seq'])} tokens, {row['schedule']}: {row['step_time_s']:.4g} s, {size(row['peak_hbm_bytes'])}"


def _conclusion(rows: list[dict[str, Any]]) -> str:
    of = {kind: [row for row in rows if row["attention"] == kind] for kind in _KINDS}
    last = {kind: found[-1] for kind, found in of.items()}
    seq = length(last["exact"]["seq"])
    share = [100 * row["attention_s"] / row["step_time_s"] for row in (of["exact"][0], last["exact"])]
    gains = "; ".join(
        f"{kind} 1.1 from {_from(found, 1.1)} on, 2 from {_from(found, 2.0)} on, "
        f"{found[-1]['times_as_fast']:.3g} at {seq}"
        for kind, found in of.items()
        if kind != "exact"
    )
    growth = ", ".join(f"{kind} {_growth(found):.2f}" for kind, found in of.items())
    sent = ", ".join(
        f"{kind} {size(round(row['sent_bytes_per_rank_and_layer']))} ({row['schedule']})" for kind, row in last.items()
    )
    held = ", ".join(f"{kind} {size(row['peak_hbm_bytes'])}" for kind, row in last.items())
    slower = "; ".join(
        f"{kind} " + ", ".join(f"{_with_slower(last[kind], last['exact'], times):.3g}" for times in _SLOWER)
        for kind in list(_KINDS)[2:]
    )
    return (
        f"This says nothing of what models with such attention learn, only what a step of them costs. Llama-3-8B on 8 "
        f"H100 with offload, tiled MLP and chunked loss, the faster of zigzag and Ulysses where attention has softmax. "
        f"Exact attention's kernels take {share[0]:.3g} % of a step at {length(of['exact'][0]['seq'])} and "
        f"{share[1]:.3g} % at {seq}. Times as fast as exact: {gains}. Between the last two lengths the step grows with "
        f"the length to the power of: {growth}; near 1 the quadratic term has stopped to matter. At {seq} each rank "
        f"sends in a layer's attention, forward and backward: {sent}; a GPU holds: {held}. Blocks are drawn, the same "
        f"for all heads; what chooses them is not computed; up to 32K tokens they are all kept. Assumed is that "
        f"block-sparse kernels run kept blocks at the rate of dense ones, and linear ones at the datasheet's rate of "
        f"FLOPs or 0.75 of the memory's: at {seq}, if they take {', '.join(map(str, _SLOWER))} times as long: {slower} "
        f"times as fast as exact. All of these schedules are proved by check, and executed exactly (1e-12 in fp64) on "
        f"few tokens; none has run on a GPU."
    )


def _from(found: list[dict[str, Any]], times: float) -> str:
    """Return from which length on a step is so many times as fast, between lengths on a log scale."""
    if found[0]["times_as_fast"] >= times:
        return f"{length(found[0]['seq'])} or less"
    for before, after in pairwise(found):
        low, high = before["times_as_fast"], after["times_as_fast"]
        if high >= times:
            part = (times - low) / (high - low)
            return f"{before['seq'] * (after['seq'] / before['seq']) ** part / 1024:.0f}K"
    return f"beyond {length(found[-1]['seq'])}"


def _growth(found: list[dict[str, Any]]) -> float:
    before, after = found[-2:]
    return math.log(after["step_time_s"] / before["step_time_s"]) / math.log(after["seq"] / before["seq"])


def _with_slower(row: dict[str, Any], exact: dict[str, Any], times: int) -> float:
    """Return times as fast as exact, where attention's kernels take so many times as long with nothing beside them."""
    return float(exact["step_time_s"] / (row["step_time_s"] + (times - 1) * row["attention_s"]))
