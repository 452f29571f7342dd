"""``longstep plan``: which configuration trains fastest on some GPUs, of all that fit."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

import longstep
from experiments.evidence.peaks import BESIDE, PEAK, beside_of
from experiments.verbs.shared.kinds import OptionalFloat, OptionalInt, OptionalText, Texts
from experiments.verbs.shared.quantities import read_bytes, read_count, read_prices, read_seconds
from experiments.verbs.shared.selection import StepSelection, listed
from experiments.verbs.shared.terminal import Ticker, print_json, printable, tell, tell_assumed
from sim.base.errors import InputError
from sim.base.units import FEW, length, number, seconds, size
from sim.plan.answer import Plan as Found
from sim.plan.answer import interval_of, step_of
from sim.plan.planned_batch import with_batch
from sim.plan.search.branches import Played
from sim.plan.search.degrees import DEGREES
from sim.plan.search.search import Progress
from sim.plan.search.space import OPTIONS
from sim.setup.global_batch import ANY
from sim.setup.global_batch import told as batch_told

_LONGER = "--limit SECONDS searches longer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(StepSelection):
    """Find the schedule, degrees and options that train fastest on some GPUs, of all that fit.

    What is named or set is kept; all else is varied. Also the longest context, the fewest GPUs, and the cheapest.
    """

    vary: Texts = ()
    """OPTION=VALUE,VALUE of schedules to vary, as often as wanted, beside those that are varied anyway:
    zero_stage=1,3, loss=whole,chunked. --tp-degree and --pp-degree list theirs by themselves: 1,2,4; --tp-degree any
    takes all that divide a node and the model."""
    memory_budget: OptionalText = None
    """What a GPU may use in all, such as 60GiB: then each group of --tensors is kept, offloaded or computed again by
    itself, as makes the step fastest."""
    tensors: OptionalText = None
    """Groups of a block's tensors that are decided together, with --memory-budget or within all memory:
    x,gate+up+act,q+k+v,out,h1+middle+h2; those in none are computed again."""
    most: int = 3
    """How many configurations to show."""
    longest: bool = False
    """Find the longest context instead of --seq that fits, and keeps to --step-time or --tokens-per-s where given."""
    until: str = "16M"
    """Longest length that --longest tries."""
    fewest_gpus: bool = False
    """Find the fewest GPUs, up to --gpus or --nodes, on which it fits, and that keep to --step-time or
    --tokens-per-s."""
    cheapest: bool = False
    """Find what trains a billion tokens at the least --price, on any number of GPUs up to --gpus or --nodes."""
    counts: OptionalText = None
    """Numbers of GPUs that --fewest-gpus and --cheapest try, as 8,16,32; by default those that divide a node, and whole
    nodes."""
    step_time: OptionalText = None
    """Longest time that a step may take, such as 60s or 2min."""
    tokens_per_s: OptionalFloat = None
    """Tokens that all GPUs together have to train in a second."""
    price: OptionalText = None
    """Price of a GPU-hour, in any currency: then a billion tokens have a cost. With --cheapest also of several
    clusters, to choose among these: hgx-h100=2.5,dgx-a100=1.3."""
    limit: float = 60.0
    """Seconds of CPU time, of all processes together, after which the best so far are shown, as after Ctrl-C, with how
    much faster others may be; 0 for none."""
    jobs: OptionalInt = None
    """Processes; by default as many as there are cores."""
    json: bool = False
    """Print JSON instead of tables."""
    evidence: bool = False
    """Also print, as tables, why others lose, what doubling each figure of the machine saves, and all that the answer
    rests on."""


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
    command, degrees = _without_several(command)
    prices = None if command.price is None else read_prices(command.price, command.cluster)
    _require_one_question(command, prices)
    setup = command.setup().replace(cluster=next(iter(prices))) if prices else command.setup()
    setup = with_batch(setup, _counts(command), of_any_length=command.longest)
    tell_assumed(setup, console, json=command.json)
    with _live() as show:
        answer, found = _found(command, setup, _varied(command.vary) | degrees, prices, show)
    said = answer or found
    assert said is not None
    if command.json:
        print_json({"answer": said.answer, "rests_on": said.rests_on, **_asked(answer), **_planned(found)}, console)
        return
    console.print(said.answer, markup=False)
    if answer is not None:
        _print_tried(command, answer, console)
    if found is not None:
        _print_plan(command, found, answer, console)


def _without_several(command: Plan) -> tuple[Plan, dict[str, tuple[str, ...]]]:
    """Return the command without the degrees of which several were typed, or any, and these."""
    lists = command.lists() | ({"tp_degree": [ANY]} if command.tp_degree == ANY else {})
    several = {name: tuple(values) for name, values in lists.items() if name in DEGREES}
    left_out: dict[str, Any] = dict.fromkeys(several)
    return dataclasses.replace(command, **left_out), several


def _asked(answer: longstep.Answer | None) -> dict[str, Any]:
    """Return what a question asked the other way round found, as plain data."""
    return {} if answer is None else {"value": answer.value, "sure": answer.sure, "tried": answer.tried.rows}


def _planned(found: Found | None) -> dict[str, Any]:
    """Return a plan as plain data."""
    if found is None:
        return {}
    figures = found._asdict()
    grounds = figures.pop("grounds")
    return {**figures, "best": found.best.rows, "lost": found.lost.rows, "evidence": grounds and grounds.evidence}


@contextlib.contextmanager
def _live() -> Iterator[Progress | None]:
    """Yield what shows on a terminal the best so far, and how far the search is; None where stderr is none."""
    console = Console(stderr=True, markup=False, emoji=False)
    if not console.is_terminal:
        yield None
        return
    with Ticker.hushed(), Live(console=console, transient=True, auto_refresh=False) as live:

        def show(done: int, count: int, left_s: float, best: Sequence[Played]) -> None:
            left = "" if left_s == math.inf else f", {seconds(left_s)} of CPU time left"
            told = f"{done} of {count} configurations are settled{left}; Ctrl-C ends the search with the best so far"
            live.update(Group(*([_best_so_far(best)] if best else []), told), refresh=True)

        yield show


def _best_so_far(best: Sequence[Played]) -> Table:
    """Return the best of a search that goes on."""
    table = Table("schedule", "step", "left", title="the best so far", title_justify="left")
    for one in best:
        setup, room = one.branch.setup, one.room
        count = setup.batch * setup.dp_degree
        step = f"{seconds(one.step_s)} for {count} sequence{'s' * (count > 1)}"
        table.add_row(
            printable(one.branch.family.named) + "\n" + printable(one.branch.named),
            step,
            size(room.free_bytes) if room else "",
        )
    return table


def _require_one_question(command: Plan, prices: dict[str, float] | None) -> None:
    """Raise InputError for options that do not go together."""
    asked = [name for name in ("longest", "fewest_gpus", "cheapest") if getattr(command, name)]
    if len(asked) > 1:
        raise InputError(f"`{asked[0]}` and `{asked[1]}` are two questions: ask one at a time")
    if asked and (command.memory_budget is not None or command.tensors is not None):
        raise InputError(f"`memory_budget` and `tensors` are of plans: leave them out, or leave out `{asked[0]}`")
    if not asked and (command.step_time is not None or command.tokens_per_s is not None):
        raise InputError(
            "`step_time` and `tokens_per_s` are for `longest`, `fewest_gpus` and `cheapest`: a plan is of the fastest"
        )
    if command.cheapest and prices is None:
        raise InputError("`cheapest` needs the price of a GPU-hour: set `price` 2.5, or CLUSTER=2.5,CLUSTER=1.3")
    if prices is not None and (command.longest or command.fewest_gpus):
        raise InputError(f"`price` {command.price}: leave it out, or set `cheapest`")
    if command.counts is not None and not (command.fewest_gpus or command.cheapest):
        raise InputError(f"`counts` {command.counts}: for `fewest_gpus` and `cheapest`; set `gpus` for one plan")
    if not command.cheapest and len(prices or {}) > 1:
        raise InputError(f"`price` {command.price}: several clusters are for `cheapest`; expected one price")


def _counts(command: Plan) -> list[int] | None:
    """Return the numbers of GPUs to try, if any were typed."""
    return None if command.counts is None else [read_count("counts", one) for one in command.counts.split(",")]


def _found(
    command: Plan,
    setup: longstep.Setup,
    options: dict[str, tuple[str, ...]],
    prices: dict[str, float] | None,
    show: Progress | None,
) -> tuple[longstep.Answer | None, Found | None]:
    """Return the answer to a question asked the other way round, if one was, and a plan."""
    how: dict[str, Any] = {
        "options": options, "most": command.most, "limit_s": command.limit or None,
        "jobs": command.jobs, "progress": show,
    }  # fmt: skip
    target: dict[str, Any] = {
        "step_time_s": None if command.step_time is None else read_seconds("step_time", command.step_time),
        "tokens_per_s": command.tokens_per_s,
    }
    counts = _counts(command)
    if command.cheapest:
        return None, longstep.cheapest(setup, prices or {}, counts=counts, **target, **how)
    if command.longest:
        answer = longstep.longest_context(setup, until=command.until, **target, **how)
        return answer, answer.plan
    if command.fewest_gpus:
        answer = longstep.fewest_gpus(setup, counts=counts, **target, **how)
        return answer, answer.plan
    price = next(iter((prices or {}).values()), None)
    budget = None if command.memory_budget is None else read_bytes("memory_budget", command.memory_budget)
    tensors = None if command.tensors is None else listed(command.tensors, "`tensors`", "x,gate+up+act,out")
    return None, longstep.plan(setup, memory_budget=budget, tensors=tensors, price=price, **how)


def _print_tried(command: Plan, answer: longstep.Answer, console: Console) -> None:
    """Print what was tried."""
    what = "seq" if command.longest else "gpus"
    shown = length if command.longest else str
    table = Table("length" if command.longest else "GPUs", "enough", "with, or why not", title_justify="left")
    for row in answer.tried:
        table.add_row(shown(row[what]), {True: "yes", False: "no", None: "not known"}[row["reaches"]], row["why"])
    console.print(table)
    if not answer.sure:
        console.print(_LONGER)


def _print_plan(command: Plan, found: Found, answer: longstep.Answer | None, console: Console) -> None:
    """Print the best configurations, or what would do, and what that rests on; and why the others lose."""
    seq = answer.value if answer and command.longest else None
    said = f"{found.configurations} configurations, {found.simulated} simulated"
    if len(found.best):
        at = seq or longstep.workload(command.model, command.seq, documents=command.documents).seq
        title = f"training steps of {command.model}, S {length(at)}{_sequences(found.best.rows, at)}: {said}"
        console.print(_best_table(title, found.best.rows, _beside(command)))
        for row in found.best.rows[1:]:
            if row["unusual"]:
                said = f"no one would run this, {row['unusual']}"
                console.print(f"- {row['schedule']}, {row['options']}: {said}", markup=False)
    elif found.remedies:
        told = "".join(f"\n- {one}" for one in found.remedies)
        console.print(f"any of these would do, by the memory of one rank:{told}", markup=False)
    if found.slack and (answer is None or answer.sure):  # else it is said
        console.print(_LONGER)
    if command.evidence:
        console.print(_lost_table(found))
    tell([found.grounds] if found.grounds else [], console, everything=command.evidence, more=_saved(found))


def _saved(found: Found) -> list[str]:
    """Return what doubling figures of the machine saves the first."""
    if not len(found.best):
        return []
    saved = ", ".join(f"{name} {100 * share:.2g} %" for name, share in found.best[0]["saves"].items())
    return [f"doubling one figure of the machine saves the first: {saved}; all others below 1 %"]


def _lost_table(found: Found) -> Table:
    """Return why others lose, a row for each schedule."""
    table = Table(
        "schedule", "configurations", "simulated", "with", "why it loses", title="why others lose", title_justify="left"
    )
    by_schedule: dict[str, list[dict[str, Any]]] = {}
    for row in found.lost:
        by_schedule.setdefault(row["schedule"], []).append(row)
    for schedule, rows in by_schedule.items():
        nearest = min(rows, key=_distance)
        counts = (str(sum(row[key] for row in rows)) for key in ("configurations", "simulated"))
        table.add_row(schedule, *counts, nearest["degrees"], nearest["why"])
    return table


def _sequences(rows: list[dict[str, Any]], tokens: int) -> str:
    """Return how many sequences of so many tokens a step trains, where that is the same in all rows."""
    several = {row["sequences"] for row in rows}
    return f", {batch_told(min(several), min(several) * tokens)} a step" if len(several) == 1 else ""


def _distance(row: dict[str, Any]) -> tuple[int, float]:
    """Return how far a schedule with its degrees is from the first: simulated, by a bound, or not known."""
    for place, key in enumerate(("slower", "slower_at_least")):
        if row[key] is not None:
            return place, row[key]
    return 2, (row["too_large"] + row["too_slow"]) / row["configurations"]


def _varied(texts: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return the options to vary: those that always are, and what was asked for."""
    found = dict(OPTIONS)
    for text in texts:
        key, equals, values = text.partition("=")
        if not (key and equals):
            raise InputError(f"`vary` {text}: expected OPTION=VALUE,VALUE such as zero_stage=1,3")
        found[key] = tuple(listed(values, f"`vary` {key}", "1,3"))
    return found


def _beside(command: Plan) -> str:
    """Return what lies beside peaks, where all are of one cluster."""
    if "," in command.cluster:
        return BESIDE
    setup = command.setup()
    if command.memory_budget is not None:
        setup = setup.replace(
            set={"cluster.hbm.capacity_bytes": int(read_bytes("memory_budget", command.memory_budget))}
        )
    return beside_of(setup)


def _best_table(title: str, rows: list[dict[str, Any]], memory: str) -> Table:
    priced = "cost_per_billion_tokens" in rows[0]
    differ = len({row["sequences"] for row in rows}) > 1
    heads = ("schedule", "step", "90 % interval", "tokens/s/GPU", PEAK, "left", "bound by")
    table = Table(*heads, *(["a billion tokens"] if priced else []), title=title, title_justify="left")
    table.caption, table.caption_justify = memory, "left"
    for row in rows:
        host = f", a socket {size(row['peak_socket_bytes'])}" if row["peak_socket_bytes"] else ""
        cells = [
            f"{row['schedule']}\n{row['options']}",
            step_of(row) + (f" for {row['sequences']} sequences" if differ else ""),
            interval_of(row),
            number(row["tokens_per_s_per_gpu"], FEW),
            size(row["peak_hbm_bytes"]) + host,
            f"{'~' if row['fits'] is None else ''}{size(row['free_bytes'])}",
            row["bound_by"],
        ]
        table.add_row(*cells, *([number(row["cost_per_billion_tokens"], FEW)] if priced else []))
    return table
