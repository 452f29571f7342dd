"""What large answers cost: ``make bench LARGE=yes`` prints CPU time and memory of each, in a process of its own.

A process begins with nothing but what Python has imported, and no proof that is remembered. A cell that takes long is
run once, others several times, and the least stands; one that fails or takes too long has a row that says so. As
machines differ, the same loop of Python is timed beside them.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from sim.base.units import seconds

ROUNDS = 5
LONG_S = 20.0
"""What takes longer is run once."""
MOST_S = 600
"""What takes longer, on the clock, is ended."""
LOOP = "count = 0\nfor one in range(10_000_000): count += one"
LOOP_S = 0.5
"""What that takes on the machine that targets were set for."""

README = "simulate --seq 512K --schedule "
OF_405B = (
    'Setup(model="llama3.1-405b", cluster="hgx-h100", gpus=16384, scope="step", seq="128K", schedule="{schedule}", '
    'tp_degree=8, pp_degree=16, ring_degree=16, global_batch=512, yes=True, set={{"schedule.zero_stage": {stage}, '
    '"schedule.pipeline_schedule": "interleaved", "schedule.pipeline_chunks": 2, '
    '"schedule.pipeline_layers": "{layers}"}})'
)
OF_70B = (
    'Setup(model="llama3-70b", cluster="hgx-h100", gpus=128, scope="step", seq="128K", schedule="zigzag", tp_degree=8, '
    "pp_degree=4, ring_degree=4, global_batch={batch})"
)


class Cell(NamedTuple):
    """Something that is answered in a process of its own."""

    name: str
    code: str
    """Python, without what is told to be imported."""
    asked_s: float = 0.0
    """CPU seconds from nothing; 0 where none are asked."""
    then: str = ""
    """Python that asks something else in the same process, of what the first code left."""
    then_asked_s: float = 0.0
    again: bool = False
    """Whether it is asked for the second time, so that its proof is remembered."""

    @property
    def imports(self) -> str:
        """What stands before it: of a command what that does first, of others what a script imports."""
        return OF_COMMANDS if self.code.startswith("run(") else OF_SETUPS


class Spent(NamedTuple):
    """What a process took."""

    imports_s: float
    code_s: float
    then_s: float
    peak_bytes: int

    @property
    def all_s(self) -> float:
        """From nothing."""
        return self.imports_s + self.code_s


def command(typed: str) -> str:
    """Return the code of a command line, whose output goes nowhere."""
    return f"run({typed.split()!r})"


def attention(schedule: str, ranks: int, heads: int = 0) -> str:
    """Return the code that predicts attention of 1M tokens, forward and backward."""
    wide = f', set={{"model.num_heads": {heads}, "model.num_kv_heads": {heads}}}' if heads else ""
    return (
        f'Setup("{schedule}", model="llama3-8b", cluster="hgx-h100", gpus={ranks}, seq="1M", scope="attention"{wide}, '
        "yes=True).predicted()"
    )


def replicas(count: int) -> str:
    """Return the code that predicts a step of 8 layers by Ulysses on 8 GPUs, sharded over so many replicas as well."""
    return (
        f'Setup("ulysses", model="llama3-8b", cluster="hgx-h100", dp_degree={count}, ulysses_degree=8, seq="128K", '
        'layers=8, scope="step", yes=True).predicted()'
    )


FAMILIES: dict[str, tuple[list[tuple[int, str, float]], float]] = {
    "ring": ([(ranks, attention("ring", ranks), 2.5 if ranks == 256 else 0.0) for ranks in (64, 128, 256)], 2.1),
    "zigzag": ([(ranks, attention("zigzag", ranks), 4.0 if ranks == 256 else 0.0) for ranks in (64, 128, 256)], 2.1),
    "ulysses": (
        [(ranks, attention("ulysses", ranks, ranks), asked) for ranks, asked in ((256, 0.0), (512, 0.5), (1024, 1.0))],
        1.1,
    ),
    "ulysses of 8 with FSDP over replicas": (
        [(8 * count, replicas(count), asked) for count, asked in ((64, 1.0), (512, 0.0), (2048, 3.0))],
        1.1,
    ),
}
"""Schedules by number of ranks, with seconds that are asked of some, and the exponent that their growth is to have."""

LENGTHS = "lengths.txt"
"""The file of as many documents as cells ask of."""
NUM_DOCUMENTS = 10_000


def cells() -> Iterator[Cell]:
    """Yield what is measured beside families."""
    yield Cell("README: ring, zigzag, ulysses", command(README + "ring,zigzag,ulysses"), 0.7)
    yield Cell("one schedule", command(README + "ulysses"), 0.45)
    yield Cell("one schedule, asked again", command(README + "ulysses"), 0.35, again=True)
    yield Cell("README: fit", command("fit --seq 1M,2M,5M --schedule ulysses --stack 5m"))
    yield Cell("ladder", command("ladder --schedule ulysses"), 6.0)
    yield Cell("USP of 64 GPUs", command("simulate --cluster 64xH100 --seq 1M --schedule usp"))
    for schedule, asked_s in (("zigzag", 0.6), ("wlb-llm", 3.0)):
        typed = f"simulate --scope attention --documents {LENGTHS} --schedule {schedule} --yes"
        yield Cell(f"{NUM_DOCUMENTS} documents, {schedule}", command(typed), asked_s)
    for batch, asked_s in ((4, 1.5), (32, 5.0)):
        yield Cell(f"70B, 128 GPUs, {batch} micro-batches", *extended(OF_70B.format(batch=batch), asked_s, 0.3))
    layers = ",".join(["3", *["4"] * 30, "3"])
    asked = [("allgather", 0, 5.0, 1.0), ("ring", 0, 10.0, 2.5), ("zigzag", 0, 12.0, 2.5), ("allgather", 3, 10.0, 2.5)]
    for schedule, stage, asked_s, then_s in asked:
        setup = OF_405B.format(schedule=schedule, layers=layers, stage=stage)
        yield Cell(f"405B, 16,384 GPUs, {schedule}{' with FSDP' * (stage > 0)}", *extended(setup, asked_s, then_s))


def extended(setup: str, asked_s: float, then_asked_s: float) -> tuple[str, float, str, float]:
    """Return what a cell asks of a large step: all that is told of it, and then another one's time."""
    code = f"found = longstep.extended({setup}); found.answer, found.bound_by"
    return code, asked_s, 'found.replace(set={"cluster.nvlink.bytes_per_s": "*2"}).step_time_s', then_asked_s


OF_COMMANDS = """from sim.base.garbage import collect_rarely
collect_rarely()
from experiments.verbs.cli import main
def run(typed):
    try: main(typed)
    except SystemExit as end: assert not end.code, end
"""
OF_SETUPS = """from longstep import Setup
import longstep, sim.engine.play.native
longstep.predict
"""
PRELUDE = """import contextlib, os, time
silent = contextlib.redirect_stdout(open(os.devnull, "w"))
at = [time.process_time()]
with silent:
"""
"""What stands before the code of a cell, behind its imports."""
ENDING = """at.append(time.process_time())
peak = open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]
print(*at, peak)
"""


def spent(cell: Cell, folder: str) -> Spent:
    """Ask a cell in a process of its own, which works in a folder; Linux tells what memory it had. Raises
    SubprocessError where it fails, or takes longer than ``MOST_S``.
    """
    steps = [cell.code, "at.append(time.process_time())", cell.then or "pass"]
    code = cell.imports + PRELUDE + "".join(f"    {one}\n" for one in steps) + ENDING
    proofs = {"LONGSTEP_PROOFS": "on"} if cell.again else {}
    environment = {**os.environ, "XDG_CACHE_HOME": folder, **proofs}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env=environment,
        timeout=MOST_S,
    )
    imports_s, code_s, then_s, peak_kb = map(float, done.stdout.split())
    return Spent(imports_s, code_s - imports_s, then_s - code_s, int(1024 * peak_kb))


def least(cell: Cell, folder: str) -> Spent | str:
    """Return the least of several runs, or the only one of what takes long; why there is none where it fails."""
    try:
        first = spent(cell, folder)
    except subprocess.TimeoutExpired:
        return f"over {MOST_S} s"
    except subprocess.CalledProcessError as error:
        return f"failed: {(error.stderr.strip() or str(error)).splitlines()[-1]}"
    if first.all_s > LONG_S:
        return first
    runs = [*([] if cell.again else [first]), *(spent(cell, folder) for _ in range(ROUNDS - 1))]
    return Spent(*(min(figures) for figures in zip(*runs, strict=True)))


def speed() -> float:
    """Return how many seconds of this machine one of that machine is which targets were set for."""
    done = [subprocess.run([sys.executable, "-c", f"import time\n{LOOP}\nprint(time.process_time())"],
                           capture_output=True, text=True, check=True) for _ in range(ROUNDS)]  # fmt: skip
    return min(float(one.stdout) for one in done) / LOOP_S


def bench_large(console: Console) -> None:
    """Ask all cells, and print what each takes beside what is asked."""
    heads = ("answer", "from nothing", "asked", "then", "asked", "memory")
    table = Table(*heads, title=f"CPU time, least of {ROUNDS}; of over {LONG_S:g} s once", title_justify="left")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / LENGTHS).write_text("\n".join(["128"] * NUM_DOCUMENTS))
        slower = speed()
        for cell in cells():
            table.add_row(*_row(cell, least(cell, folder)))
        for name, (sizes, most) in FAMILIES.items():
            found: dict[int, float] = {}
            for ranks, code, asked_s in sizes:
                cell = Cell(f"{name}, {ranks} GPUs", code, asked_s)
                table.add_row(*_row(cell, one := least(cell, folder)))
                if isinstance(one, Spent):
                    found[ranks] = one.code_s
            if len(found) > 1:
                (first, one_s), *_, (last, other_s) = found.items()
                exponent = math.log(other_s / one_s) / math.log(last / first)
                table.add_row(f"{name}: exponent from {first} to {last} GPUs", f"{exponent:.2f}", f"{most:g}")
    console.print(table)
    console.print(f"a loop of 10 M additions takes {slower:.2g} times what it took where the targets were set")


def _row(cell: Cell, found: Spent | str) -> list[str]:
    asked = [seconds(one) if one else "" for one in (cell.asked_s, cell.then_asked_s)]
    if isinstance(found, str):
        return [cell.name, found, asked[0], "", asked[1], ""]
    then = seconds(found.then_s) if cell.then else ""
    return [cell.name, seconds(found.all_s), asked[0], then, asked[1], f"{found.peak_bytes / 1e9:.2f} GB"]
