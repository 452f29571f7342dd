"""How long FPDT's chunks should be, by the rate of PCIe: four layers' training step of 1M tokens on 8 H100."""

from __future__ import annotations

import longstep
from experiments.pages.study_page import Line, lines
from experiments.studies.study import Finding
from sim.base.units import length, size

QUESTION = "How long should FPDT's chunks be, and what does faster PCIe buy?"
_PCIE = "cluster.pcie.bytes_per_s"
_STEP = longstep.Setup("fpdt", model="llama3-8b", cluster="hgx-h100", seq="1M", layers=4, jitter=0.0)
_CHUNKS = (32768, 65536, 131072, 262144, 524288)
_RATES = {"/4": "a quarter", "/2": "half", "*1": "PCIe 5.0", "*2": "twice"}


def find(jobs: int | None) -> Finding:
    """Return tokens/s by chunk and rate."""
    vary = {"schedule.chunk": _CHUNKS, _PCIE: list(_RATES)}
    found = list(longstep.explore(_STEP, vary, intervals=False, bounds=False, jobs=jobs))
    rows, series = [], []
    for rate, name in _RATES.items():
        points = []
        for row in found:
            if row[_PCIE] == rate:
                chunk, speed = row["schedule.chunk"], row["tokens_per_s_per_gpu"]
                points.append((chunk, speed, f"chunks of {length(chunk)}: {size(row['peak_hbm_bytes'])} a GPU"))
                rows.append({"pcie": name, "chunk": length(chunk), "tokens_per_s_per_gpu": speed,
                             "step_time_s": row["step_time_s"], "peak_hbm_bytes": row["peak_hbm_bytes"]})  # fmt: skip
        series.append(Line(name, points))
    best = {name: max((row for row in rows if row["pcie"] == name), key=lambda row: row["tokens_per_s_per_gpu"])
            for name in _RATES.values()}  # fmt: skip
    own, slow = best["PCIe 5.0"], best["a quarter"]
    spread = [row for row in rows if row["pcie"] == "PCIe 5.0"]
    conclusion = (
        f"Fastest are chunks of {own['chunk']} with PCIe 5.0 and of {slow['chunk']} with a quarter of its rate, which "
        f"then costs {100 * (1 - slow['tokens_per_s_per_gpu'] / own['tokens_per_s_per_gpu']):.1f} % of the tokens a "
        f"second; twice the rate wins "
        f"{100 * (best['twice']['tokens_per_s_per_gpu'] / own['tokens_per_s_per_gpu'] - 1):.1f} %. Chunks of "
        f"{spread[0]['chunk']} hold {size(spread[0]['peak_hbm_bytes'])} a GPU, those of {spread[-1]['chunk']} "
        f"{size(spread[-1]['peak_hbm_bytes'])}."
    )
    picture = lines(
        series, about="Tokens a second by the length of chunks, for several rates of PCIe",
        x_label="tokens of a chunk, over all ranks", y_label="tokens/s/GPU", x_name=lambda chunk: length(int(chunk)),
    )  # fmt: skip
    return Finding(conclusion, picture, rows)
