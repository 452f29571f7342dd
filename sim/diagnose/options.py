"""Options of a schedule, as hypotheses change them."""

from __future__ import annotations

from typing import Any

import msgspec

from sim.setup.configuration import Configuration
from sim.setup.setup import Setup
from sim.words.options import OF_GROUPS, OF_LAYERS, OF_STEPS, LayerOptions


def options_of(found: Configuration) -> dict[str, Any]:
    """Return the options that the schedule takes at this scope, those at their defaults, too."""
    options: dict[str, Any] = msgspec.to_builtins(found.options or {})
    if isinstance(found.options, LayerOptions):
        scope = found.workload.scope
        left_out = {*(OF_STEPS if scope != "step" else ()), *(OF_LAYERS if scope == "attention" else ())}
        left_out |= {*OF_GROUPS} if found.mesh.tp == 1 else set()
        return {name: value for name, value in options.items() if name not in left_out}
    return options


def with_option(setup: Setup, found: Configuration, name: str, value: str) -> Setup | None:
    """Return a setup with an option of its schedule changed; None if it has none, or has that value."""
    options = options_of(found)
    if name not in options or str(options[name]) == value:
        return None
    return setup.replace(set={f"schedule.{name}": value})
