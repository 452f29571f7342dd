"""How results look in a terminal: units for people, and the tables that several verbs print."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from experiments.evidence.units import seconds, size
from sim.breakdown import PartName
from sim.engine.report import Evidence, Report


def report_table(title: str, report: Report) -> Table:
    """Return the figures of one simulated step."""
    table = Table("figure", "value", title=title, title_justify="left")
    table.add_row("step time", seconds(report.step_time_s))
    if report.interval_s:
        table.add_row("  nine of ten in", f"{seconds(report.interval_s.low_s)} to {seconds(report.interval_s.high_s)}")
    table.add_row("tokens per second and GPU", f"{report.tokens_per_s_per_gpu:.4g}")
    if report.mfu is not None:
        table.add_row("MFU", f"{100 * report.mfu:.3g} %")
    table.add_row("peak memory of its buffers", size(report.peak_hbm_bytes))
    table.add_row("  of it", ", ".join(f"{name} {size(n)}" for name, n in report.memory.items()))
    if report.peak_host_bytes:
        table.add_row("  and of its host's", size(report.peak_host_bytes))
    table.add_row(f"rank {report.critical_rank}, the least waiting", parts_line(report.breakdown))
    table.add_row("bound by", report.bound_by)
    table.add_row("floors", ", ".join(f"{name} {seconds(s)}" for name, s in report.floors.items()))
    table.add_row("schedule", report.schedule_hash)
    return table


def parts_line(parts: Mapping[PartName, float]) -> str:
    """Return the parts of a step that take any time."""
    total = sum(parts.values())
    shown = [f"{name} {seconds(s)} ({100 * s / total:.3g} %)" for name, s in parts.items() if s > 0]
    return ", ".join(shown)


def evidence_lines(evidence: Evidence) -> list[str]:
    """Return what a prediction rests on."""
    if evidence.profile == "datasheet":
        return [f"evidence: {note}" for note in evidence.notes]
    state = "" if evidence.complete else ", not complete"
    head = f"evidence: profile {evidence.profile!r} of {evidence.measured_on}, measured {evidence.created}{state}"
    return [head, *(f"evidence: {note}" for note in evidence.notes)]
