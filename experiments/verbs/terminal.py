"""How results look in a terminal: the tables that several verbs print."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from experiments.evidence.comparison import Comparison, Measured
from experiments.evidence.units import percent, seconds, size
from sim.breakdown import PartName
from sim.engine.report import Report


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


def comparison_table(name: str, found: Comparison) -> Table:
    """Return simulated against measured, per op kind and for the step."""
    table = Table("op kind", "ops", "simulated", "measured", "least", "most", "error", title=name, title_justify="left")
    for row in found.kinds:
        table.add_row(f"{row.kind} {row.part}", str(row.count), *_cells(row.times))
    table.add_section()
    table.add_row("step", "", *_cells(found.step))
    return table


def _cells(times: Measured) -> list[str]:
    shown = [seconds(value) for value in (times.simulated_s, times.median_s, times.low_s, times.high_s)]
    return [*shown, percent(times.error)]
