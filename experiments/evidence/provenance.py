"""What a prediction rests on, in sentences."""

from __future__ import annotations

from sim.engine.report import Evidence


def evidence_lines(evidence: Evidence) -> list[str]:
    """Return what a prediction rests on."""
    if evidence.profile == "datasheet":
        return [f"evidence: {note}" for note in evidence.notes]
    state = "" if evidence.complete else ", not complete"
    head = f"evidence: profile {evidence.profile!r} of {evidence.measured_on}, measured {evidence.created}{state}"
    return [head, *(f"evidence: {note}" for note in evidence.notes)]
