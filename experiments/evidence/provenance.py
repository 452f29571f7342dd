"""What predictions rest on, in sentences, and how files of them came about."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sim.engine.report import Evidence


def evidence_lines(evidence: Evidence) -> list[str]:
    """Return what a prediction rests on."""
    if evidence.profile == "datasheet":
        return [f"evidence: {note}" for note in evidence.notes]
    state = "" if evidence.complete else ", not complete"
    head = f"evidence: profile {evidence.profile!r} of {evidence.measured_on}, measured {evidence.created}{state}"
    return [head, *(f"evidence: {note}" for note in evidence.notes)]


def command_line() -> str:
    """Return what was typed, as profiles and records keep it: they are for others, whose folders differ."""
    program = "python -m experiments.recipes" if Path(sys.argv[0]).parent.name == "recipes" else "longstep"
    return " ".join([program, *(re.sub(r"(^|=)/\S*/", r"\1", argument) for argument in sys.argv[1:])])
