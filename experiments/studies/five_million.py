"""What gets Llama-3-8B to 5M tokens on 8 H100: techniques switched on one after the other, and each taken out."""

from __future__ import annotations

import longstep
from experiments.pages.study_page import lengths
from experiments.studies.study import Finding
from sim.base.units import length, size

QUESTION = "Which techniques get Llama-3-8B to 5M tokens on 8 H100, and what does each cost?"
_SHOWN = ("techniques", "longest", "step_time_s", "peak_hbm_bytes", "free_bytes", "peak_host_bytes")
_WANTED = 5 * 2**20
_STEP = longstep.Setup(model="llama3-8b", cluster="hgx-h100", seq="1M", jitter=0.0)


def find(jobs: int | None) -> Finding:  # noqa: ARG001 - the rungs of a ladder are played in turn
    """Return the longest context of each rung, with its memory and step at 1M tokens."""
    rows = longstep.ladder(_STEP).rows
    enough = next(row for row in rows if row["longest"] >= _WANTED)
    most = max(rows, key=lambda row: row["longest"])
    without = {
        row["techniques"].removeprefix("all - "): row["longest"] for row in rows if "all - " in row["techniques"]
    }
    needed = [name for name, longest in without.items() if longest < _WANTED]
    conclusion = (
        f"5M tokens fit from '{enough['techniques']}' on; the longest context is {length(most['longest'])} with "
        f"'{most['techniques']}'. Without any one of {', '.join(needed) or 'none'} 5M do not fit. At 1M tokens the "
        f"peak goes from {size(rows[0]['peak_hbm_bytes'])} to {size(most['peak_hbm_bytes'])} a GPU."
    )
    picture = lengths(
        [(row["techniques"], row["longest"], f"{length(row['longest'])} tokens") for row in rows],
        about="Longest context with techniques one after the other, and with all but each",
        x_label="longest context, tokens",
    )  # fmt: skip
    return Finding(conclusion, picture, [{key: row[key] for key in _SHOWN} for row in rows])
