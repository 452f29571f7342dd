"""``longstep plan``: which configuration trains fastest on some GPUs, of all that fit."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table

import longstep
from experiments.evidence.units import length, seconds, size
from experiments.verbs.kinds import OptionalFloat, OptionalInt, Texts
from experiments.verbs.selection import StepSelection, listed
from experiments.verbs.terminal import print_json, progress
from sim.errors import InputError
from sim.setup.space import OPTIONS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(StepSelection):
    """Find the schedule, degrees and options that train fastest on some GPUs, of all that fit.

    What is named or set is kept; all else is varied.
    """

    model: str = "llama3-8b"
    """NAME, FILE.toml, or a config.json of Hugging Face."""
    cluster: str = "hgx-h100"
    """NAME or FILE.toml."""
    vary: Texts = ()
    """OPTION=VALUE,VALUE of schedules to vary, as often as wanted, beside those that are varied anyway:
    zero_stage=1,3, loss=whole,chunked."""
    most: int = 3
    """How many configurations to show."""
    price: OptionalFloat = None
    """Price of a GPU-hour: then a million tokens have a cost in the same currency."""
    limit: float = 45.0
    """Seconds of searching, after which the best so far are shown, with how much faster others may be; 0 for none."""
    jobs: OptionalInt = None
    """Processes; by default as many as there are cores."""
    json: bool = False
    """Print JSON instead of tables."""


def plan(command: Plan, console: Console) -> None:
    """Print the best configurations, and why the others lose."""
    if command.scope != "step":
        raise InputError(f"`scope` {command.scope}: plans are of training steps: set `scope` step")
    if command.stack is not None or command.dp_degree != 1 or command.one_device or command.jitter is not None:
        raise InputError(
            "`stack`, `dp_degree`, `one_device` and `jitter` are not for plans, which vary options and replicas and "
            "take kernels at their median: leave them out"
        )
    if command.limit < 0:
        raise InputError(f"`limit` {command.limit:g}: expected 0 seconds or more")
    with progress("searching") as show:
        found = longstep.plan(
            command.setup(), options=_varied(command.vary), most=command.most, price=command.price,
            limit_s=command.limit or None, jobs=command.jobs, progress=show,
        )  # fmt: skip
    if command.json:
        print_json(
            {**found._asdict(), "best": found.best.rows, "lost": found.lost.rows},
            console,
        )
        return
    said = f"{found.configurations} configurations, {found.simulated} simulated"
    if len(found.best):
        title = f"training steps of {command.model}, S {length(longstep.workload(command.model, command.seq).seq)}: "
        console.print(_best_table(title + said, found.best.rows))
        for row in found.best.rows:
            if row["tie"]:
                console.print(f"- {row['schedule']}, {row['options']}: a tie with the first", markup=False)
    else:
        said = "nothing was found so far that fits" if found.slack else "nothing fits"
        console.print(f"{said}; the smallest shortage: {found.shortage}", markup=False)
    if found.slack:
        rest = f"at most {100 * found.slack:.2g} % faster by its lower bound" if found.slack < 1 else "not known yet"
        console.print(f"The search was cut short: what was not simulated is {rest}; --limit gives it longer.")
    table = Table("schedule", "configurations", "simulated", "with", "why it loses", title="all", title_justify="left")
    by_schedule: dict[str, list[dict[str, Any]]] = {}
    for row in found.lost:
        by_schedule.setdefault(row["schedule"], []).append(row)
    for schedule, rows in by_schedule.items():
        nearest = min(rows, key=_distance)
        counts = (str(sum(row[key] for row in rows)) for key in ("configurations", "simulated"))
        table.add_row(schedule, *counts, nearest["degrees"], nearest["why"])
    console.print(table)


def _distance(row: dict[str, Any]) -> tuple[int, float]:
    """Return how far a schedule with its degrees is from the first: simulated, by a bound, or not known."""
    for number, key in enumerate(("slower", "slower_at_least")):
        if row[key] is not None:
            return number, row[key]
    return 2, row["too_large"] / row["configurations"]


def _varied(texts: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return the options to vary: those that always are, and what was asked for."""
    found = dict(OPTIONS)
    for text in texts:
        key, equals, values = text.partition("=")
        if not (key and equals):
            raise InputError(f"`vary` {text}: expected OPTION=VALUE,VALUE such as zero_stage=1,3")
        found[key] = tuple(listed(values, f"`vary` {key}", "1,3"))
    return found


def _best_table(title: str, rows: list[dict[str, Any]]) -> Table:
    priced = "cost_per_million_tokens" in rows[0]
    heads = ("schedule", "step", "90 % interval", "tokens/s/GPU", "peak HBM", "free", "bound by")
    table = Table(*heads, *(["a million tokens"] if priced else []), title=title, title_justify="left")
    for row in rows:
        within = "not known" if row["low_s"] is None else f"{seconds(row['low_s'])} to {seconds(row['high_s'])}"
        host = f", a socket {size(row['peak_socket_bytes'])}" if row["peak_socket_bytes"] else ""
        cells = [
            f"{row['schedule']}\n{row['options']}",
            seconds(row["step_time_s"]),
            within,
            f"{row['tokens_per_s_per_gpu']:.4g}",
            size(row["peak_hbm_bytes"]) + host,
            f"{'~' if row['fits'] is None else ''}{size(row['free_bytes'])}",
            row["bound_by"],
        ]
        table.add_row(*cells, *([f"{row['cost_per_million_tokens']:.4g}"] if priced else []))
    return table
