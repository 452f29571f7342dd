"""Random mutations of proved schedules: whatever ``check`` accepts has to be exact, and to play.

    python -m tests.schedule.proof.mutations --count 3000 --seed 0
    python -m tests.schedule.proof.mutations --count 1000 --seed 0 --of steps

Every mutant is a schedule with one change, on one rank, on two, or in the same way on all, or of what stands above them
(``mutation_headers``): attention and layers of the catalog (``mutation_operators``), training steps
(``mutation_steps``), packed documents under all planners and masks (``mutation_documents``), or tensor-parallel layers
and pipelines (``mutation_parallel``). What ``check`` accepts is executed on the virtual cluster in fp64, in several
random orders, and simulated. A table counts, per operator, the
mutants tried, refused, accepted and exact, accepted and wrong, and other: tracebacks of ``check``, of the execution or
of the simulator. The last two must be 0; mutant N of a seed is made again by ``--first N --count 1``.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from random import Random
from typing import Any, Literal, NamedTuple, get_args

import torch
import tyro
from rich.console import Console
from rich.table import Table

from runtime.execution.verify import output_errors
from runtime.execution.virtual import execute_virtual
from sim.base.errors import InputError, LongstepError, ScheduleError
from sim.engine.play.simulate import simulate
from sim.schedule.ir.program import Schedule
from sim.schedule.proof.check import Checked, check
from sim.words.workload import Workload
from tests.helpers import OFFLOADED, VARIANTS, make_checked, make_cluster_spec, make_model
from tests.schedule.proof.mutation_documents import DOCUMENT_OPERATORS, drawn_documents
from tests.schedule.proof.mutation_headers import HEADER_OPERATORS, featured
from tests.schedule.proof.mutation_operators import OPERATORS, Operator
from tests.schedule.proof.mutation_parallel import PARALLEL_OPERATORS, drawn_parallel
from tests.schedule.proof.mutation_steps import STEP_OPERATORS, drawn_step
from topology.cluster import Cluster
from topology.specs import DramSpec, PcieSpec, SocketSpec

EXACT = 1e-9
"""Largest relative error in fp64 that counts as exact."""
ORDERS = 3
"""Random orders in which an accepted mutant is executed."""
PER_SCHEDULE = 10
"""Mutants that are made of one schedule, since building and proving it takes as long as they do."""
CELLS = 100
"""Schedules in which an operator has to find something to change."""

Verdict = Literal["refused", "exact", "wrong", "other"]
Sort = Literal["layers", "steps", "documents", "parallel"]
"""What is mutated: attention and layers, training steps, packed documents, or tensor-parallel layers and pipelines."""


class Mutant(NamedTuple):
    """A schedule with one change, and what became of it."""

    number: int
    operator: str
    cell: str
    verdict: Verdict
    why: str


def mutants(count: int, seed: int, first: int = 0, of: Sort = "layers") -> Iterator[Mutant]:
    """Yield mutants number ``first`` on; each depends on its number, the seed and what is mutated only."""
    names = list(operators(of))
    for number in range(first, first + count):
        operator = names[number % len(names)]
        cell, original, changed = mutate(operator, number, seed, of)
        yield Mutant(number, operator, cell, *verdict(changed, original, number))


def operators(of: Sort) -> dict[str, Operator]:
    """Return what changes schedules of a sort, what is of this sort alone last."""
    own: dict[Sort, dict[str, Operator]] = {
        "steps": STEP_OPERATORS,
        "documents": DOCUMENT_OPERATORS,
        "parallel": PARALLEL_OPERATORS,
    }
    return OPERATORS | HEADER_OPERATORS | own.get(of, {})


def mutate(operator: str, number: int, seed: int, of: Sort = "layers") -> tuple[str, Checked, Schedule]:
    """Return a cell, its proved schedule, and the same with one change: the number's own cell, or the first of those
    that follow in which there is something to change.
    """
    draw, first = Random(f"{seed} {number}"), number // PER_SCHEDULE
    for cell in range(first, first + CELLS):
        name, original = proved(f"{seed} {cell}", of)
        for _ in range(5):
            changed = operators(of)[operator](draw, original.schedule)
            if changed and _differs(changed, original.schedule):
                return name, original, changed
    raise AssertionError(f"operator {operator!r} finds nothing to change in {CELLS} schedules: does the field exist?")


def _differs(changed: Schedule, original: Schedule) -> bool:
    return changed.header != original.header or changed.programs != original.programs


@lru_cache(maxsize=8)
def proved(seed: str, of: Sort) -> tuple[str, Checked]:
    """Return a schedule for a random workload that it takes, with what people call it."""
    drawn = {"layers": drawn_layers, "steps": drawn_step, "documents": drawn_documents, "parallel": drawn_parallel}
    return drawn[of](Random(seed))


def drawn_layers(draw: Random) -> tuple[str, Checked]:
    """Return a proved schedule of the catalog, of attention or of layers, with what people call it."""
    while True:
        name, ranks = draw.choice([*VARIANTS, *OFFLOADED]), draw.choice((2, 3, 4, 8))
        if (VARIANTS | OFFLOADED)[name].schedule == "single":
            ranks = 1
        heads, mask = draw.choice([(8, 8), (8, 4), (8, 2)]), draw.choice(["causal", "full", "window"])
        fields: dict[str, Any] = {"window": 9} if mask == "window" else {"mask": mask}
        fields |= {"batch": draw.choice((1, 2)), "scope": "layer", "layers": 2, "passes": "both"}
        if name in VARIANTS and draw.random() < 0.6:
            fields |= {"scope": "attention", "layers": 1, "passes": draw.choice(["both"] * 4 + ["forward", "backward"])}
        feature, model = featured(draw, make_model(*heads, head_dim=4))
        try:
            workload = Workload(model=model, seq=48, dtype="fp64", **fields)
            checked = make_checked(name, workload, ranks)
        except ScheduleError:
            raise
        except InputError:
            continue
        return f"{name}, P = {ranks}, {heads[0]}:{heads[1]}, {mask}, {feature}, {fields}", checked


def verdict(changed: Schedule, original: Checked, order_seed: int) -> tuple[Verdict, str]:
    """Return what became of a mutant, and why; executed in orders that the seed draws."""
    try:
        checked = check(changed)
    except LongstepError as error:
        return "refused", str(error)
    except Exception as error:  # noqa: BLE001 - whatever comes out of check is to be counted
        return "other", f"check: {error!r}"
    missing = owned(original.schedule) - owned(changed)
    if missing:
        return "wrong", f"nobody owns {len(missing)} cells, such as {min(missing)}"
    try:
        for order in range(ORDERS):
            outputs = execute_virtual(checked, torch.device("cpu"), ORDERS * order_seed + order)
            for tensor, error in output_errors(checked, outputs).items():
                if not error <= EXACT:
                    return "wrong", f"{tensor} is off by {error:.1e}"
        simulate(checked, cluster(changed.num_ranks), None)
    except Exception as error:  # noqa: BLE001 - as above
        return "other", f"accepted, then: {error!r}"
    return "exact", ""


def owned(schedule: Schedule) -> set[tuple[object, ...]]:
    """Return the (tensor, sequences, features, token, head) cells of all outputs."""
    return {
        (port.name, port.batch, port.features, token, head)
        for program in schedule.programs
        for port in program.outputs
        if port.tensor != "lse"  # which a schedule need not leave
        for span in port.tokens
        for token, head in product(range(*span), range(*port.heads))
    }


@lru_cache
def cluster(gpus: int) -> Cluster:
    """Return a toy node whose GPUs reach their host's memory."""
    socket = SocketSpec(dram=DramSpec(capacity_bytes=2**40, bytes_per_s=1e9))
    return Cluster(make_cluster_spec(gpus, pcie=PcieSpec(bytes_per_s=1e9, latency_s=0.0), socket=socket))


def main(count: int = 3000, seed: int = 0, first: int = 0, of: Sort = "layers") -> None:
    """Print what became of so many mutants of a sort, number ``first`` on; exits with 1 where one is wrong or other."""
    torch.set_num_threads(1)
    console, begin = Console(), time.perf_counter()
    verdicts: defaultdict[str, Counter[Verdict]] = defaultdict(Counter)
    for mutant in mutants(count, seed, first, of):
        verdicts[mutant.operator][mutant.verdict] += 1
        if mutant.verdict in {"wrong", "other"} or count == 1:
            console.print(*mutant, sep=" | ", markup=False, highlight=False)
    table = Table("operator", *(f"[right]{name}" for name in ("tried", "refused", "exact", "wrong", "other")))
    total = sum(verdicts.values(), Counter())
    for operator, found in (*verdicts.items(), ("all", total)):
        table.add_row(operator, *map(str, (found.total(), *(found[name] for name in get_args(Verdict)))))
    console.print(table)
    console.print(f"{60 * count / (time.perf_counter() - begin):.0f} mutants a minute")
    sys.exit(1 if total["wrong"] or total["other"] else 0)


if __name__ == "__main__":
    tyro.cli(main)
