"""The doctor held against executed runs: clean ones, and ones with a fault planted, on two processes of this machine.

Every run is executed over gloo. The doctor is given its trace, the memory of its buffers, and the configuration that
was meant, nothing else. Run ``python -m experiments.recipes doctor`` on a machine with nothing else to do.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

import longstep
from experiments.evidence.executed.execution import measured_steps, open_session
from experiments.evidence.provenance import command_line
from experiments.verbs.calibrate import Calibrate, calibrate
from longstep import Diagnosis, Measured, Setup
from sim.accounts.trace import CHROME_TRACE, Trace
from sim.base.errors import InputError
from sim.base.files import make_folder, write_whole
from sim.base.units import seconds
from sim.base.workers import end_with_parent
from sim.diagnose.profiled import one_after_the_other, read_traces
from sim.schedule.proof.check import Checked
from sim.setup.names import at_least_one
from sim.setup.prediction import write_trace
from sim.words.profile import Machine
from sim.words.workload import Scope
from topology.host import num_cores

RANKS = 2
CLEAN, FAULTS, STEPS = 10, 20, 5
"""Runs without a fault, with one, and steps of each that count."""
_PERIOD_S = 0.008
"""Of stopping and going on: short beside a step, long beside what a signal takes."""
MEANT = (("zigzag", "2K"), ("zigzag", "4K"), ("striped", "2K"))
"""What is said to have run: schedule and length."""


class Planted(NamedTuple):
    """A fault: another program that is executed, or what is done to the processes meanwhile."""

    name: str
    says: str
    named: frozenset[str]
    """Causes of the doctor that are this fault; several where they are one thing on a host."""
    program: Callable[[Setup], Setup] = lambda said: said
    meanwhile: Callable[[list[int], random.Random], contextlib.AbstractContextManager[Any]] = lambda _pids, _draw: (
        contextlib.nullcontext()
    )
    """With the process ids of the ranks."""
    scope: Scope = "attention"
    """What is meant to run; attention alone is short."""


def _tokens(said: Setup) -> int:
    return said.resolved().workload.seq


@contextlib.contextmanager
def _stopped_at_times(pids: list[int], draw: random.Random) -> Iterator[None]:
    """Stop one rank for about half of the time, as a GPU of a lower clock would be slower."""
    pid, share, end = draw.choice(pids), draw.uniform(0.45, 0.65), threading.Event()

    def stop_and_go() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not end.wait((1 - share) * _PERIOD_S):
                os.kill(pid, signal.SIGSTOP)
                end.wait(share * _PERIOD_S)
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stop_and_go, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _spin() -> None:
    end_with_parent()
    while True:
        pass


@contextlib.contextmanager
def _other_work(_pids: list[int], _draw: random.Random) -> Iterator[None]:
    """Keep all cores busy with other processes, which end here."""
    others = [multiprocessing.get_context("spawn").Process(target=_spin, daemon=True) for _ in range(num_cores())]
    for other in others:
        other.start()
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.join()


PLANTED = (
    Planted("slow-rank", "one rank is stopped for about half of the time", frozenset({"slow-rank"}),
            meanwhile=_stopped_at_times),
    Planted("cp-off", "each rank trains its own S/P tokens", frozenset({"cp-off"}),
            lambda said: said.replace(schedule="single", seq=_tokens(said) // RANKS, dp_degree=RANKS, set={})),
    Planted("full-mask", "the mask is full", frozenset({"full-mask"}), lambda said: said.replace(mask="full")),
    Planted("contiguous", "the layout is contiguous", frozenset({"contiguous"}),
            lambda said: said.replace(schedule="ring")),
    Planted("busy-host", "other processes keep all cores busy: on a host that slows its kernels, too",
            frozenset({"busy-host", "slow-gpus"}), meanwhile=_other_work),
    Planted("short-length", "the sequence has S/P tokens", frozenset({"short-length"}),
            lambda said: said.replace(seq=_tokens(said) // RANKS)),
    Planted("long-length", "the sequence has S x P tokens", frozenset({"long-length"}),
            lambda said: said.replace(seq=_tokens(said) * RANKS)),
    Planted("checkpointed", "checkpointing is on", frozenset({"checkpointed"}),
            lambda said: said.replace(set={"schedule.checkpoint": "full"}), scope="step"),
)  # fmt: skip
"""To plant another fault, add it here."""


class DoctorRun(msgspec.Struct, frozen=True, kw_only=True):
    """One executed run, and what the doctor said of it. Times in seconds, sizes in bytes."""

    fault: str
    """Empty of a clean run."""
    schedule: str
    seq: str
    ran_hash: str
    """Of the schedule that was executed."""
    steps_s: list[float]
    simulated_s: float
    interval_s: tuple[float, float]
    memory_bytes: int
    verdict: str
    consistent: list[str]
    """Causes, the best explanation first."""
    findings: list[str]
    named: bool
    first: bool


class DoctorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """All runs, and what they rest on."""

    begun: str
    """Date and time, UTC, ISO 8601."""
    command: str
    profile: str
    calibrated: str
    machine: Machine
    software: dict[str, str]
    runs: list[DoctorRun]

    def lines(self) -> list[str]:
        """Return the counts, and how often what was planted was called what."""
        clean = [run for run in self.runs if not run.fault]
        faults = [run for run in self.runs if run.fault]
        alarms = sum(run.verdict != "healthy" for run in clean)
        called = Counter((run.fault or "clean", (run.consistent or [run.verdict])[0]) for run in self.runs)
        return [
            f"{self.begun}, {self.machine.gpu}, profile of {self.calibrated}, {RANKS} ranks over gloo",
            f"{len(faults)} faults: named {sum(run.named for run in faults)}, first {sum(run.first for run in faults)}",
            f"{len(clean)} clean runs: {alarms} alarms",
            "",
            f"{'planted':16} {'called, the best explanation':30} runs",
            *(f"{fault:16} {name:30} {count}" for (fault, name), count in sorted(called.items())),
        ]


def said_of(schedule: str, seq: str, profile: str | None, scope: Scope = "attention") -> Setup:
    """Return what is meant to run; of training steps one layer, with few words and without checkpointing."""
    of_step = {"schedule.checkpoint": "none", "model.vocab_size": 512} if scope == "step" else {}
    return Setup(
        schedule, model="tiny", cluster="host", gpus=RANKS, seq=seq, scope=scope, layers=1, profile=profile, set=of_step
    )


def diagnosed(said: Setup, steps: Sequence[Trace], checked: Checked, memory_bytes: int) -> Diagnosis:
    """Return what the doctor says of a run, by the traces of its steps as files and its memory."""
    read = []
    for step in steps:
        with tempfile.TemporaryDirectory() as folder:
            output = CHROME_TRACE.at(Path(folder) / "trace.json")
            write_trace(output, checked, [step])
            read.append(read_traces([output.path]))
    return longstep.doctor(said, Measured(memory_bytes=memory_bytes), traces=one_after_the_other(read))


def executed(said: Setup, planted: Planted | None, steps: int, draw: random.Random) -> DoctorRun:
    """Return what the doctor said of one run; without ``planted`` it ran as it was meant."""
    from runtime.processes.process import LocalRank
    from runtime.run import ScheduleRun

    found = (planted.program(said) if planted else said).resolved()
    checked = found.checked()
    with open_session(checked, found.spec, found.profile) as session:
        run = ScheduleRun(session, checked)
        pids = [process.pid for process in session.processes if isinstance(process, LocalRank)]
        with planted.meanwhile(pids, draw) if planted else contextlib.nullcontext():
            taken = measured_steps(run.step, steps)
    memory_bytes = max(size for step in taken for size in step.peak_bytes)
    diagnosis = diagnosed(said, [step.trace for step in taken], checked, memory_bytes)
    names = [cause.name for cause in diagnosis.consistent]
    return DoctorRun(
        fault=planted.name if planted else "",
        schedule=str(said.schedule),
        seq=str(said.seq),
        ran_hash=checked.schedule.hash,
        steps_s=[step.trace.step_time_s for step in taken],
        simulated_s=diagnosis.simulated_s,
        interval_s=(diagnosis.low_s, diagnosis.high_s),
        memory_bytes=memory_bytes,
        verdict=diagnosis.verdict,
        consistent=names,
        findings=diagnosis.findings,
        named=bool(planted and planted.named & {*names}),
        first=bool(planted and names and names[0] in planted.named),
    )


def doctor(
    console: Console,
    *,
    out: str | None = None,
    profile: str | None = None,
    clean: int = CLEAN,
    faults: int = FAULTS,
    steps: int = STEPS,
) -> DoctorRecord:
    """Execute all runs in a random order, print what the doctor says of each, and write the record.

    ``out`` is the folder, by default experiments/results/DATE-doctor. Without ``profile`` (NAME or FILE.json) this
    machine is calibrated first. Raises InputError for counts below 1.
    """
    for name, count in (("clean", clean), ("faults", faults), ("repeats", steps)):
        at_least_one(name, count)
    begun = datetime.now(UTC)
    folder = Path(out or f"experiments/results/{begun:%Y-%m-%d}-doctor")
    make_folder(folder)
    if profile is None:
        profile = str(folder / "profile.json")
        calibrate(Calibrate(quick=True, out=profile, force=True), console)
    draw = random.Random(1)
    order = [None] * clean + [PLANTED[number % len(PLANTED)] for number in range(faults)]
    draw.shuffle(order)
    rests_on = said_of(*MEANT[0], profile).resolved().profile
    if rests_on is None:
        raise InputError(
            f"`profile` {profile}: a datasheet does not say what this machine takes; run longstep calibrate"
        )
    record = DoctorRecord(
        begun=f"{begun:%Y-%m-%dT%H:%M:%SZ}", command=command_line(), profile=rests_on.name,
        calibrated=rests_on.created, machine=rests_on.machine, software=rests_on.machine.software, runs=[],
    )  # fmt: skip
    for planted in order:
        scope: Scope = planted.scope if planted else draw.choice(("attention", "attention", "step"))
        run = executed(said_of(*draw.choice(MEANT), profile, scope), planted, steps, draw)
        record.runs.append(run)
        times = f"{seconds(sorted(run.steps_s)[(steps - 1) // 2])}, simulated {seconds(run.simulated_s)}"
        called = ", ".join(run.consistent) or "nothing explains it" * (run.verdict != "healthy")
        console.print(
            f"{run.schedule} {run.seq}, planted {run.fault or 'nothing'}: {times}, {run.verdict}: {called}",
            markup=False,
        )
        write_whole(folder / "doctor.json", msgspec.json.format(msgspec.json.encode(record), indent=1))
    text = "\n".join(record.lines())
    write_whole(folder / "doctor.txt", f"{text}\n".encode())
    console.print(text, markup=False)
    return record
