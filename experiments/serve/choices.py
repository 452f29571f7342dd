"""What a form offers whatever is asked: names that ship, and ranges."""

from __future__ import annotations

from typing import Any

from experiments.serve.answering.dropped import DISTRIBUTIONS
from experiments.serve.answering.jobs import BUDGET_BYTES, BUDGET_S, MOST_PINNED, MOST_TOKENS
from sim.base.presets import preset_names
from sim.schedule.methods.catalog import NAMED
from sim.setup import names
from sim.setup.stacks import STACKS, TECHNIQUES
from sim.software.software import software_names

LEAST_TOKENS = 1024
"""From where on the slider of lengths goes."""
FACTOR = 16
"""By how much sliders of rates multiply or divide at most."""


def choices() -> dict[str, Any]:
    """Return what the page's form offers."""
    return {
        "models": [*names.names("models")],
        "clusters": [*(name for name in names.names("clusters") if name != "host")],
        "gpus": ["8xH100", "16xH100", "8xA100", "4x4090"],
        "schedules": [*NAMED],
        "alone": [name for name, entry in NAMED.items() if not entry.degrees],
        "of_stack": {name: stack.schedule for name, stack in STACKS.items()},
        "stacks": {name: stack.about for name, stack in STACKS.items()},
        "software": software_names(),
        "techniques": {name: one.about for name, one in TECHNIQUES.items() if "schedule" not in one.on},
        "distributions": preset_names(DISTRIBUTIONS),
        "least_tokens": LEAST_TOKENS,
        "most_tokens": MOST_TOKENS,
        "most_pinned": MOST_PINNED,
        "factor": FACTOR,
        "budget": f"{BUDGET_S:g} s of a core or {BUDGET_BYTES / 1e9:g} GB",
    }
