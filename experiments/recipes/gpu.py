"""``make gpu``: verify, calibrate and compare on a GPU of this machine."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from calibrate.profile_diff import shipped_of
from experiments.evidence.execution import Execution
from experiments.evidence.machine import gpus_here, is_of
from experiments.verbs.calibrate import Calibrate, calibrate
from experiments.verbs.profile_diff import write_profile_diffs
from experiments.verbs.run import Run, run
from experiments.verbs.selection import Selection
from experiments.verbs.sweep import Sweep
from experiments.verbs.validate import Validate, validate
from sim.errors import InputError, LongstepError, RankError, unknown
from sim.files import make_folder
from sim.presets import preset_names
from sim.profile import load_profile
from sim.schedule.methods.catalog import SCHEDULES
from sim.setup.names import DATASHEET
from topology.cluster import load_cluster

_OFFLOADED = "schedule.activations=host"


class GpuPlan(NamedTuple):
    """What ``make gpu`` covers."""

    schedules: tuple[str, ...] = tuple(SCHEDULES)
    verified: str = "2K"
    """Length at which schedules are held against the reference."""
    model: str = "llama3-8b"
    alone: str = "8K,16K,32K,64K,128K,256K"
    """Lengths of layers on one rank."""
    together: str = "16K"
    """Length of layers on several."""
    ranks: str = "2,4,8"
    offloaded: str = "16K,64K"
    """Lengths of four layers whose activations lie in the host's memory."""


def gpu(console: Console, *parts: str, plan: GpuPlan = GpuPlan()) -> None:  # noqa: B008 - immutable
    """Prove on one GPU of this machine: exact, calibrated, predicted; leave a folder that is small enough to commit.

    Schedules play their ranks on it in turn, with copies for transfers; where there are several GPUs they are executed
    over NCCL, too. The profile is made before what it predicts. ``parts`` are some of ``GPU_PARTS``, for a GPU that is
    there for minutes only; by default all.
    """
    for part in parts:
        if part not in GPU_PARTS:
            raise unknown("part", part, GPU_PARTS, "PARTS of make gpu")
    cluster, name = gpu_here()
    gpus = gpus_here(load_cluster(cluster))
    counts = [2**n for n in range(1, gpus.bit_length())]  # most degrees divide heads and tokens then
    folder = Path("experiments", "results", f"{datetime.now(UTC).date()}-{name}")
    make_folder(folder)
    run_of = GpuRun(plan, cluster, name, counts, folder, console, [])
    for part, do in GPU_PARTS.items():
        if not parts or part in parts:
            console.rule(f"{part}: {name}, {gpus} here")
            do(run_of)
    console.print(f"written to {folder}", markup=False)
    if run_of.failed:
        raise RankError(f"{len(run_of.failed)} parts failed: {'; '.join(run_of.failed)}")


class GpuRun(NamedTuple):
    """A run of ``gpu``."""

    plan: GpuPlan
    cluster: str
    name: str
    counts: list[int]
    """Numbers of ranks to execute over NCCL; none where there is one GPU."""
    folder: Path
    console: Console
    failed: list[str]

    @property
    def profile(self) -> str:
        """The profile that is made here."""
        return str(self.folder / "profile.json")

    def attempt(self, part: Callable[[], None]) -> None:
        """Do a part; what fails is told at the end, so that time on a GPU is not lost."""
        try:
            part()
        except LongstepError as error:
            self.failed.append(str(error))
            self.console.print(f"failed: {error}", markup=False)


def _test(gpu: GpuRun) -> None:
    """Run the tests that need a GPU."""
    gpu.attempt(gpu_tests)


def gpu_tests() -> None:
    """Run the tests that need a GPU; raises RankError if one fails."""
    ended = subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu"], check=False)
    if ended.returncode:
        raise RankError(f"pytest -m gpu: exit code {ended.returncode}")


def _verify(gpu: GpuRun) -> None:
    """Hold every schedule against one process in fp64: on one device, and over NCCL."""
    for schedule in gpu.plan.schedules:
        alone = schedule == "single"
        one = Selection(
            cluster=gpu.cluster, schedule=schedule, gpus=1 if alone else 4, seq=gpu.plan.verified, dtype="bf16",
            scope="layer", one_device=True, profile=DATASHEET
        )  # fmt: skip
        also = [dataclasses.replace(one, layers=3, set=(_OFFLOADED,))] if alone else []
        if gpu.counts and not alone:
            also = [dataclasses.replace(one, gpus=gpu.counts[-1], one_device=False)]
        for selection in (one, *also):
            command = Run(selection=selection, verify=True, execution=Execution(repeats=1))
            gpu.attempt(partial(run, command, gpu.console))


def _calibrate(gpu: GpuRun) -> None:
    """Calibrate, and hold the profile against those that ship."""
    calibrate(Calibrate(cluster=gpu.cluster, name=gpu.name, model=gpu.plan.model, out=gpu.profile), gpu.console)
    gpu.attempt(partial(hold_against_shipped, gpu.profile, gpu.folder / "against.txt", gpu.console))


def _compare(gpu: GpuRun) -> None:
    """Predict and execute layers, with activations on the host, too, and every schedule on one device and over NCCL."""
    plan = gpu.plan
    alone = Sweep(
        model=plan.model, cluster=gpu.cluster, profile=gpu.profile, scope="layer", target=0.05, seq=plan.alone,
        ranks="1", schedule="single"
    )  # fmt: skip
    split = ",".join(schedule for schedule in plan.schedules if schedule != "single")
    together = dataclasses.replace(alone, seq=plan.together, ranks=plan.ranks, schedule=split, one_device=True)
    offloaded = dataclasses.replace(alone, seq=plan.offloaded, layers=4, set=(_OFFLOADED,))
    sweeps = {"layers": alone, "schedules": together, "offloaded": offloaded}
    if gpu.counts:
        sweeps["nccl"] = dataclasses.replace(together, ranks=",".join(map(str, gpu.counts)), one_device=False)
    for what, sweep in sweeps.items():
        record, html, figure, cases = (str(gpu.folder / f"{what}.{kind}") for kind in ("json", "html", "svg", "toml"))
        command = Validate(sweep=sweep, repeats=1, out=record, html=html, figure=figure, cases_out=cases)
        gpu.attempt(partial(validate, command, gpu.console))


GPU_PARTS: dict[str, Callable[[GpuRun], None]] = {
    "test": _test,
    "verify": _verify,
    "calibrate": _calibrate,
    "compare": _compare,
}
"""What ``make gpu`` consists of, in this order; comparing takes the profile of the same day's calibration."""


def hold_against_shipped(profile: str, path: Path, console: Console) -> None:
    """Print what the profiles that ship of the same GPU, if any do, say of one, and write it to a text file."""
    measured = load_profile(profile)
    shipped = shipped_of(measured.machine.gpu)
    if shipped:
        write_profile_diffs(measured, shipped, path, console)


def gpu_here() -> tuple[str, str]:
    """Return the cluster that this machine's GPU is of, and the GPU's name; raises InputError if there is none."""
    import torch

    if not torch.cuda.is_available():
        raise InputError("make gpu needs a GPU: torch sees none; install a torch built for CUDA, see the README")
    device = torch.cuda.get_device_properties(0)
    for cluster in preset_names("topology/hardware", ".toml"):
        spec = load_cluster(cluster)
        if spec.gpu.kind == "cuda" and is_of(spec, device):
            return cluster, spec.gpu.name.partition("-")[0].lower()
    raise InputError(
        f"no cluster preset has {device.name!r} with {device.multi_processor_count} SMs and "
        f"{device.total_memory / 1e9:.0f} GB: write a TOML file, then longstep calibrate --cluster FILE.toml"
    )
