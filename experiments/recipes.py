"""Runs with a name: what ``make demo`` and ``make gpu`` do, in Python. ``python -m experiments.recipes demo``."""

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
from rich.table import Table

from experiments.against import shipped_of, write_against
from experiments.calibrate import Calibrate, calibrate
from experiments.cells import Sweep
from experiments.cli import guarded, open_console
from experiments.compare import comparison
from experiments.comparison import Comparison, comparison_table, drift_line
from experiments.execute import Execution, Run, open_session, run
from experiments.machine import gpus_here, is_of
from experiments.selection import DATASHEET, Selection, choose
from experiments.simulate import title, write_trace
from experiments.tables import evidence_lines, parts_line, percent, seconds, size
from experiments.validate import Validate, validate
from sim.engine.report import report
from sim.errors import InputError, LongstepError, RankError, unknown
from sim.presets import preset_names
from sim.profile import load_profile, make_folder
from sim.schedule.methods.catalog import SCHEDULES
from topology.cluster import load_cluster

TRACE_FILE = "demo-trace.json"
LENGTHS = ("128K", "256K", "512K", "1M")


def demo(console: Console) -> None:
    """Calibrate this machine, execute and simulate two schedules on it, and predict both for 8 x H100."""
    console.rule("1. Calibrate: time the kernels and links of this machine")
    calibrate(Calibrate(quick=True), console)
    console.rule("2. Ring and Ulysses on this machine: the same schedule, simulated and executed")
    compare_here(console)
    console.rule("3. The same simulator for 8 x H100, at the rates of the datasheet")
    predict_h100(console)


def compare_here(console: Console) -> None:
    """Compare ring and Ulysses attention of the tiny model on two ranks; write a trace of the last comparison."""
    from runtime.run import ScheduleRun

    found: list[tuple[str, str, Comparison]] = []
    base = Selection(gpus=2)
    first = choose(base)
    with open_session(first, first.checked(), Execution()) as session:
        for seq in ("4K", "8K"):
            for schedule in ("ring", "ulysses"):
                chosen = choose(dataclasses.replace(base, seq=seq, schedule=schedule))
                checked = chosen.checked()
                result, traces = comparison(chosen, checked, session, Execution().repeats)
                console.print(comparison_table(title(chosen, checked), result))
                found.append((seq, schedule, result))
        write_trace(TRACE_FILE, checked, traces)
        small = choose(dataclasses.replace(base, seq="2K"))
        checked = small.checked()
        run = ScheduleRun(session, checked)
        run.step()
        errors = ", ".join(f"{tensor} {error:.1e}" for tensor, error in run.errors().items())
    table = Table("S", "schedule", "simulated", "measured", "error", title="step times", title_justify="left")
    for seq, schedule, result in found:
        times = (seconds(result.step.simulated_s), seconds(result.step.median_s), percent(result.step.error))
        table.add_row(seq, schedule, *times)
    console.print(table)
    console.print(drift_line([found[0][2].drift[0], found[-1][2].drift[1]]), markup=False)
    console.print(f"largest relative error of the executed ring at S = 2K: {errors}", markup=False)
    console.print(f"trace of the last comparison: {TRACE_FILE} (open it in https://ui.perfetto.dev)", markup=False)


def predict_h100(console: Console) -> None:
    """Predict ring and Ulysses attention of one layer of Llama 3 8B, forward and backward, on 8 x H100."""
    table = Table(
        "S", "schedule", "step", "tokens/s/GPU", "MFU", "memory", "critical rank", title="llama3-8b on hgx-h100",
        title_justify="left"
    )  # fmt: skip
    for seq in LENGTHS:
        for schedule in ("ring", "ulysses"):
            selection = Selection(model="llama3-8b", cluster="hgx-h100", seq=seq, schedule=schedule, profile=DATASHEET)
            chosen = choose(selection)
            found = report(chosen.simulated(chosen.checked()))
            mfu = f"{100 * (found.mfu or 0.0):.1f} %"
            rate = f"{found.tokens_per_s_per_gpu:.4g}"
            memory, parts = size(found.peak_hbm_bytes), parts_line(found.breakdown)
            table.add_row(seq, schedule, seconds(found.step_time_s), rate, mfu, memory, parts)
    console.print(table)
    for line in evidence_lines(found.evidence):
        console.print(line, markup=False)


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
        write_against(measured, shipped, path, console)


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


RECIPES: dict[str, Callable[..., None]] = {"demo": demo, "gpu": gpu}


def main() -> None:
    """Run the recipe that the command line names."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES, "python -m experiments.recipes NAME")
    if sys.argv[2:] and name != "gpu":
        raise InputError(f"recipe {name!r} has no parts: leave out {' '.join(sys.argv[2:])}")
    RECIPES[name](open_console(), *sys.argv[2:])


if __name__ == "__main__":
    guarded(main)
