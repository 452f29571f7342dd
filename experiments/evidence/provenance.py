"""Sentences on what predictions rest on, and the command line that made a file."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from sim.engine.results.report import Evidence

SWEEP_MARK = "longstep sweep"
"""Begins what a table of a sweep says of itself: the command that made it."""


def evidence_lines(evidence: Evidence) -> list[str]:
    """Return what a prediction rests on."""
    if evidence.profile == "datasheet":
        return [f"evidence: {note}" for note in evidence.notes]
    state = "" if evidence.complete else ", not complete"
    rates = f", {evidence.rates} rates" if evidence.rates else ""
    head = (
        f"evidence: profile {evidence.profile!r} of {evidence.measured_on}, measured {evidence.created}{state}{rates}"
    )
    return [head, *note_lines(evidence.notes)]


def note_lines(notes: Sequence[str]) -> list[str]:
    """Return what is noted, a line for each reason."""
    return [f"evidence: {note}" for note in _grouped(notes)]


def _grouped(notes: Sequence[str]) -> list[str]:
    """Return notes with those that end in one reason as one line: "reason: this; that"."""
    of_reason: dict[str, list[str]] = {}
    for note in notes:
        subject, _, reason = note.rpartition(": ")
        of_reason.setdefault(reason, []).append(subject)
    lines = []
    for reason, subjects in of_reason.items():
        whole = f"{subjects[0]}: {reason}" if subjects[0] else reason
        lines.append(whole if len(subjects) == 1 else f"{reason}: {'; '.join(subjects)}")
    return lines


def command_line() -> str:
    """Return what was typed, as profiles and records keep it: they are for others, whose folders differ."""
    program = "python -m experiments.recipes" if Path(sys.argv[0]).parent.name == "recipes" else "longstep"
    return " ".join([program, *(re.sub(r"(^|=)/\S*/", r"\1", argument) for argument in sys.argv[1:])])
