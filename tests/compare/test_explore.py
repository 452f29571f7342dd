"""Sweeps over anything: what can be varied, rows that are never lost or repeated, processes and clusters that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

import longstep
from longstep import Setup
from sim.accounts.breakdown import PARTS
from sim.base.errors import InputError
from sim.compare.axes import axes_of, combinations
from sim.compare.journal import Journal

ROOT = Path(__file__).parents[2]
H100 = Setup("ulysses", model="llama3-8b", cluster="hgx-h100", seq="32K", layers=1, scope="layer")
NVLINK = "cluster.nvlink.bytes_per_s"


def test_lists_ranges_products_and_zips() -> None:
    vary = {"seq": "64K..256K*2", NVLINK: ["*1", "*2"], "gpus": "2..8:3", "batch": "1..3+1"}
    axes = axes_of(vary, [["gpus", "batch"]])
    assert [axis.keys for axis in axes] == [("seq",), (NVLINK,), ("gpus", "batch")]
    assert axes[2].values == (("2", "1"), ("4", "2"), ("8", "3"))
    rows = combinations(axes)
    assert len(rows) == 3 * 2 * 3
    assert rows[0] == {"seq": "65536", NVLINK: "*1", "gpus": "2", "batch": "1"}
    assert [row["gpus"] for row in rows[:4]] == ["2", "4", "8", "2"]
    assert axes_of({"cluster.nic.bytes_per_s": "25e9..100e9:3"})[0].values == (
        ("25000000000",),
        ("50000000000",),
        ("100000000000",),
    )


@pytest.mark.parametrize(
    ("vary", "zipped", "message"),
    [
        ({}, [], "`vary` is empty"),
        ({"seqs": "1K"}, [], "did you mean 'seq'"),
        ({"clusters.nvlink": "1"}, [], "did you mean 'cluster'"),
        ({"seq": ""}, [], "expected values such as"),
        ({"seq": "1K,1K"}, [], "1K stands there twice"),
        ({"seq": "2K..1K*2"}, [], "rising"),
        ({"seq": "1K..8K*1"}, [], "rising"),
        ({"seq": "1K..x*2"}, [], "'x' is no number"),
        ({"seq": "1..2000+1", "batch": "1..2000+1"}, [], "4000000 combinations: allowed are 1000000"),
        ({"seq": "1K,2K", "gpus": "1,2,3"}, [["seq", "gpus"]], "has 2 of seq, 3 of gpus"),
        ({"seq": "1K,2K"}, [["seq", "gpus"]], "unknown key of `zip` 'gpus'"),
        ({"seq": "1K", "gpus": "1"}, [["seq", "gpus"], ["gpus", "seq"]], "it is in two of them"),
    ],
)
def test_what_cannot_be_varied(vary: dict[str, str], zipped: list[list[str]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        longstep.explore(H100, vary, zipped=zipped)


@pytest.mark.sweep
def test_extended_rows_are_those_of_whole_steps() -> None:
    """With what they consist of; a machine is played on the schedules that are there."""
    step = H100.replace(gpus=2, layers=8, scope="step", jitter=0.0)
    vary = {"seq": ["16K", "32K"], NVLINK: ["*1", "/4"]}
    found = longstep.explore(step, vary, intervals=False, bounds=False, extend=True, jobs=1)
    whole = longstep.explore(step, vary, intervals=False, bounds=False, jobs=1)
    assert {row["played"] for row in found} == {"told by 3 and 4 of 8 layers"}
    assert "played" not in whole[0]
    for few, row in zip(found, whole, strict=True):
        assert few["peak_host_bytes"] is None
        for key in {*row} - {"peak_host_bytes"}:
            assert few[key] == (pytest.approx(row[key], rel=1e-4) if isinstance(row[key], float) else row[key]), key
        assert sum(few[f"{part}_s"] for part in PARTS) == pytest.approx(few["step_time_s"])


def test_a_row_that_cannot_be_extended_says_why() -> None:
    (row,) = longstep.explore(H100, {"seq": ["32K"]}, extend=True, jobs=1)
    assert row["error"].startswith("`extend` is of training steps")
    assert row["played"] is None


@pytest.mark.sweep
def test_rows_are_those_of_single_predictions() -> None:
    vary = {"schedule": ["ring", "ulysses"], NVLINK: ["*1", "*2"]}
    found = longstep.explore(H100, vary, jobs=1)
    assert len(found) == 4
    for row in found:
        alone = H100.replace(schedule=row["schedule"], set={NVLINK: row[NVLINK]}).predicted()
        assert (row["step_time_s"], row["mfu"], row["bound_by"]) == (
            alone.step_time_s,
            alone.figures.mfu,
            alone.bound_by,
        )
        assert alone.interval is not None
        assert (row["low_s"], row["high_s"]) == (alone.interval.low_s, alone.interval.high_s)
    assert longstep.explore(H100, vary, jobs=2).rows == found.rows


@pytest.mark.sweep
def test_what_cannot_be_played_is_a_row() -> None:
    found = longstep.explore(H100, {"gpus": "2,3,4", "batch": "1,2"}, jobs=1, intervals=False, bounds=False)
    assert [bool(row["error"]) for row in found] == [False, False, True, True, False, False]
    assert "Ulysses degree 3 does not divide" in found[2]["error"]
    assert found[2]["step_time_s"] is None
    steps = longstep.explore(H100.replace(scope="step", layers=None), {"seq": "128K,4M"}, jobs=1, bounds=False)
    assert [row["fits"] for row in steps] == ["yes", "no"]
    assert steps[1]["free_bytes"] < 0 < steps[1]["saved_activations_bytes"]


def test_a_text_that_is_no_value_is_a_row(tmp_path: Path) -> None:
    found = longstep.explore(H100, {"gpus": ["2", "two"], "pad": ["true", "false"]}, jobs=1, bounds=False)
    assert [row["error"] for row in found][:2] == ["", ""]
    assert found[2]["error"] == "`vary` gpus=two: expected int or none"


@pytest.mark.sweep
def test_a_journal_goes_on_where_it_stood(tmp_path: Path) -> None:
    path, vary = tmp_path / "journal", {"seq": "32K,64K", NVLINK: ["*1", "*2"]}
    whole = longstep.explore(H100, vary, jobs=1, journal=path)
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    for kept in (data[:9], b"".join(lines[:3]) + lines[3][:-5], data):
        path.write_bytes(kept)
        played: list[object] = []
        again = longstep.explore(
            H100, vary, jobs=2, journal=path, progress=lambda *told, played=played: played.append(told)
        )
        assert again.rows == whole.rows
        assert len(played) == len(lines) - 1 - max(0, kept.count(b"\n") - 1)
        numbers = [number for line in path.read_bytes().splitlines()[1:] for number in json.loads(line[8:])["numbers"]]
        assert sorted(numbers) == list(range(4))
    with pytest.raises(InputError, match="4 rows of another sweep that was not finished"):
        longstep.explore(H100, {"seq": "32K"}, journal=path)
    assert len(longstep.explore(H100, {"seq": "32K"}, journal=path, force=True)) == 1


@pytest.mark.parametrize("foreign", [b"a,b\n1,2\n", b"abc", b'{"mark": 1}\n'])
def test_a_file_that_is_no_journal_stays(tmp_path: Path, foreign: bytes) -> None:
    path = tmp_path / "mine"
    path.write_bytes(foreign)
    with pytest.raises(InputError, match="is no journal of a sweep"):
        Journal(path, "any")
    assert path.read_bytes() == foreign
    with pytest.raises(InputError, match="cannot be written"):
        Journal(tmp_path / "nowhere" / "journal", "any")


COMMAND = [
    "sweep", "--model", "llama3-8b", "--cluster", "hgx-h100", "--layers", "1", "--scope", "layer", "--step-only",
    "--vary", "seq=32K..256K*2", "--vary", "schedule=ring,ulysses,zigzag,upipe", "--vary", f"{NVLINK}=*1,*2,*3,*4",
    "--vary", "cluster.hbm.bytes_per_s=*1,*2,*3",
]  # fmt: skip


def started(out: Path) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-m", "longstep", *COMMAND, "--out", str(out)]
    return subprocess.Popen(
        program, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("kills", [1, 10])
def test_a_sweep_that_is_killed_goes_on(tmp_path: Path, kills: int) -> None:
    """At random moments, with all of its processes; the rows are those of a sweep that nobody has killed."""
    draw, out, journal = Random(kills), tmp_path / "rows.csv", tmp_path / "rows.csv.journal"
    for _ in range(kills):
        before, process = lines_in(journal), started(out)
        while process.poll() is None and lines_in(journal) <= before + 1:
            time.sleep(0.02)
        time.sleep(draw.random() * 0.1)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if out.exists():
            break
        assert lines_in(journal) > before
    assert started(out).wait(300) == 0
    assert not journal.exists()
    undisturbed = tmp_path / "undisturbed.csv"
    assert started(undisturbed).wait(300) == 0
    shown = [path.read_text().splitlines()[1:] for path in (out, undisturbed)]
    assert len(shown[0]) == 1 + 4 * 4 * 4 * 3
    assert shown[0] == shown[1]


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A Dask scheduler and two workers in processes of their own."""
    pytest.importorskip("distributed")
    file, processes = tmp_path / "scheduler.json", []

    def start(*arguments: str) -> None:
        command = [sys.executable, "-m", "distributed.cli." + arguments[0], *arguments[1:]]
        processes.append(
            subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )
        )

    start("dask_scheduler", "--port", "0", "--no-dashboard", "--host", "127.0.0.1", "--scheduler-file", str(file))
    while not file.exists() or not file.read_text():
        time.sleep(0.1)
    address = json.loads(file.read_text())["address"]
    for _ in range(2):
        start("dask_worker", address, "--nthreads", "1", "--no-dashboard", "--local-directory", str(tmp_path))
    try:
        yield address, processes
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.slow
@pytest.mark.gloo
def test_a_dask_worker_that_is_killed_loses_nothing(scheduler: tuple[str, list[subprocess.Popen[bytes]]]) -> None:
    address, (_, worker, _) = scheduler
    vary = {"seq": "32K..256K*2", "schedule": "ring,ulysses,zigzag,upipe", NVLINK: "*1,*2"}
    told: list[int] = []

    def killing(done: int, _count: int, _left: float) -> None:
        if not told:
            os.killpg(worker.pid, signal.SIGKILL)
        told.append(done)

    asked: dict[str, Any] = {"intervals": False, "bounds": False}
    found = longstep.explore(H100, vary, dask=address, progress=killing, **asked)
    assert found.rows == longstep.explore(H100, vary, jobs=2, **asked).rows
    assert told[-1] == 32


@pytest.mark.slow
@pytest.mark.gloo
def test_a_local_cluster_of_dask() -> None:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        found = longstep.explore(H100, {"seq": "32K,64K"}, dask=cluster.scheduler_address)
    assert found.rows == longstep.explore(H100, {"seq": "32K,64K"}, jobs=1).rows


@pytest.mark.sweep
def test_a_cluster_that_does_not_answer() -> None:
    pytest.importorskip("distributed")
    with pytest.raises(InputError, match="no scheduler answers"):
        longstep.explore(H100, {"seq": "32K"}, dask="nonsense://127.0.0.1:1")
