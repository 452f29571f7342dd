"""What predictions of many sizes take, each in a process of its own, beside the estimates of ``sim.setup.effort``.

The rates that it estimates by come from this table, measured on one core of an AMD EPYC.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from rich.console import Console
from rich.table import Table

from sim.balance.balance import balance
from sim.base.units import seconds, size
from sim.batches.lengths import draw, uniform
from sim.setup.effort import PLANNED_RANKS, PLANNING, Effort, effort_of_plans, estimate, sizes_of
from sim.setup.setup import Setup

_STEP = Setup(model="llama3-8b", cluster="hgx-h100", seq="1M", yes=True)
_ATTENTION = _STEP.replace(scope="attention")
_MANY_HEADS = {"model.num_heads": 512, "model.num_kv_heads": 512}
_DOCUMENTS = 10_000

CASES: dict[str, Setup] = {
    **{f"ring of {gpus}": _ATTENTION.replace(schedule="ring", gpus=gpus) for gpus in (64, 128, 256)},
    **{f"zigzag of {gpus}": _ATTENTION.replace(schedule="zigzag", gpus=gpus) for gpus in (64, 128, 256)},
    **{f"stripes of {gpus}": _ATTENTION.replace(schedule="striped", gpus=gpus) for gpus in (32, 64)},
    **{f"balanced ring of {gpus}": _ATTENTION.replace(schedule="balanced-ring", gpus=gpus) for gpus in (64, 128, 256)},
    **{
        f"ulysses of {gpus}": _ATTENTION.replace(schedule="ulysses", gpus=gpus, set=_MANY_HEADS)
        for gpus in (128, 256, 512)
    },
    **{f"FSDP step of usp on {gpus}": _STEP.replace(schedule="usp", gpus=gpus, layers=8) for gpus in (64, 128)},
    **{f"fpdt of {chunks} chunks": _STEP.replace(schedule="fpdt", seq=chunks << 16, layers=8) for chunks in (16, 32)},
    **{
        f"{count} micro-batches": _STEP.replace(
            schedule="ulysses", seq="64K", batch=count, set={"schedule.micro_batches": count}
        )
        for count in (1, 16, 256)
    },
}
"""Setups by what is large of them."""


def sizes(console: Console) -> None:
    """Print what is told of every case beside what it takes."""
    table = Table("case", "ops", "told", "seconds of a core", "told", "memory", "told", title_justify="left")
    rows: dict[str, tuple[Callable[[], Effort], Callable[[], int]]] = {}
    for name, setup in CASES.items():
        rows[name] = partial(_told, setup), partial(_predicted, setup)
    for name in PLANNING:
        plans = partial(effort_of_plans, [name], _DOCUMENTS, PLANNED_RANKS)
        rows[f"{_DOCUMENTS} documents by {name}"] = plans, partial(_balanced, name)
    for name, (told, play) in rows.items():
        expected, taken = told(), _alone(play)
        shown = [(f"{one.ops}", seconds(one.seconds), size(int(one.memory_bytes))) for one in (taken, expected)]
        table.add_row(name, *(cell for pair in zip(*shown, strict=True) for cell in pair))
    console.print(table)


def _told(setup: Setup) -> Effort:
    found = estimate(setup.resolved().asked)
    assert found is not None
    return found.at(sizes_of(found.asked))


def _predicted(setup: Setup) -> int:
    found = setup.predicted()
    found.report  # noqa: B018 - all figures, as a command prints them
    return sum(program.num_ops for program in found.played.schedule.programs)


def _balanced(planner: str) -> int:
    lengths = draw(uniform(128, 4096), 16384 * (_DOCUMENTS // 8), 0)[:_DOCUMENTS]
    balance(_ATTENTION.replace(gpus=PLANNED_RANKS), lengths, [planner])
    return 0


def _alone(play: Callable[[], int]) -> Effort:
    """Return what a play takes in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_taken, play).result()


def _taken(play: Callable[[], int]) -> Effort:
    begin = time.process_time()
    ops = play()
    return Effort(ops, time.process_time() - begin, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
