"""Faults that the recipe plants in executed runs, and what the doctor makes of them."""

from __future__ import annotations

import random
import time
from pathlib import Path

import msgspec
import pytest

from experiments.recipes.__main__ import main
from experiments.recipes.doctor import PLANTED, DoctorRecord, DoctorRun, Planted, diagnosed, said_of
from experiments.verbs.cli import open_console
from longstep import InputError, Setup
from sim.accounts.memory import walks
from sim.diagnose.hypotheses import MACHINES, PROGRAMS
from sim.words.profile import Machine

PROGRAM_FAULTS = [one for one in PLANTED if one.program(said_of("zigzag", "2K", "datasheet", one.scope)) != said_of(
    "zigzag", "2K", "datasheet", one.scope)]  # fmt: skip
DEAR = {"checkpointed", "contiguous", "full-mask", "long-length", "short-length"}


@pytest.mark.sweep
@pytest.mark.parametrize(
    "planted",
    [pytest.param(one, id=one.name, marks=[pytest.mark.slow] * (one.name in DEAR)) for one in PROGRAM_FAULTS],
)
def test_another_program_is_named_by_its_trace_and_memory(planted: Planted) -> None:
    """Simulated in place of executed, with the file, on GPUs whose interval is known."""
    said = Setup("zigzag", model="llama3-8b", cluster="hgx-h100", gpus=2, seq="64K", scope=planted.scope, jitter=0,
                 layers=1, set={"schedule.checkpoint": "none"} if planted.scope == "step" else {})  # fmt: skip
    ran = planted.program(said).predicted()
    found = diagnosed(said, [ran.trace], ran.checked, max(walk.peak_bytes for walk in walks(ran.checked)))
    assert planted.named & {cause.name for cause in found.consistent}, [(one.name, one.off) for one in found.causes]
    clean = said.predicted()
    assert diagnosed(said, [clean.trace], clean.checked, clean.peak_hbm_bytes).verdict == "healthy"


def test_what_is_planted_is_something_that_the_doctor_knows() -> None:
    known = {one.name for one in (*PROGRAMS, *MACHINES)}
    assert all(one.named <= known for one in PLANTED)
    assert len({one.name for one in PLANTED}) == len(PLANTED)


@pytest.mark.gloo
def test_a_stopped_rank_goes_on_in_the_end() -> None:
    """A process that only counts is stopped for about half of the time, and runs on when the fault is over."""
    import multiprocessing

    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    process.start()
    pid = process.pid
    assert pid
    slow = next(one for one in PLANTED if one.name == "slow-rank")
    seen = set()
    with slow.meanwhile([pid], random.Random(1)):
        end = time.monotonic() + 5
        while "T" not in seen and time.monotonic() < end:
            seen.add(_state(pid))
    assert "T" in seen
    assert _state(pid) != "T"
    process.kill()
    process.join()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_a_record_counts_what_was_named() -> None:
    run = DoctorRun(fault="", schedule="zigzag", seq="2K", ran_hash="x", steps_s=[1.0], simulated_s=1.0,
                    interval_s=(0.9, 1.1), memory_bytes=1, verdict="healthy", consistent=[], findings=[], named=False,
                    first=False)  # fmt: skip
    alarm = msgspec.structs.replace(run, verdict="too slow", consistent=["slow-gpus"])
    second = msgspec.structs.replace(alarm, fault="full-mask", consistent=["slow-gpus", "full-mask"], named=True)
    machine = Machine(gpu="a CPU", cores=2, threads_per_rank=1, software={})
    record = DoctorRecord(begun="2026-01-01T00:00:00Z", command="", profile="host", calibrated="2026-01-01",
                          machine=machine, software={}, runs=[run, alarm, second])  # fmt: skip
    told = "\n".join(record.lines())
    assert "1 faults: named 1, first 0" in told
    assert "2 clean runs: 1 alarms" in told
    assert "full-mask        slow-gpus                      1" in told


def test_counts_and_datasheets_are_refused(tmp_path: Path) -> None:
    from experiments.recipes.doctor import doctor

    with pytest.raises(InputError, match="`clean` 0"):
        doctor(open_console(), out=str(tmp_path), profile="host", clean=0)
    with pytest.raises(InputError, match="`profile` datasheet: a datasheet does not say"):
        doctor(open_console(), out=str(tmp_path), profile="datasheet")


@pytest.mark.gloo
@pytest.mark.slow
def test_two_clean_runs_and_three_faults_are_executed(tmp_path: Path) -> None:
    """Calibrated and executed for real. What is named depends on how idle the machine is, so that counts are left to
    the recipe; that another program ran, and nothing else, does not.
    """
    main(["doctor", "--out", str(tmp_path), "--clean", "2", "--faults", "3", "--steps", "2"])
    record = msgspec.json.decode((tmp_path / "doctor.json").read_bytes(), type=DoctorRecord)
    assert sorted(run.fault for run in record.runs) == ["", "", "cp-off", "full-mask", "slow-rank"]
    for run in record.runs:
        assert len(run.steps_s) == 2
        assert run.memory_bytes > 0
        meant = {
            said_of(run.schedule, run.seq, "datasheet", scope).resolved().checked().schedule.hash
            for scope in ("attention", "step")
        }
        assert (run.ran_hash in meant) == (run.fault in {"", "slow-rank"})
    assert "3 faults: named" in (tmp_path / "doctor.txt").read_text()
