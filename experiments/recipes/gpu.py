"""``make gpu``: verify, calibrate and compare on a GPU of this machine."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from rich.console import Console

from calibrate.held.profile_diff import shipped_of
from experiments.evidence.executed.execution import Execution
from experiments.evidence.machine import gpus_here, is_of
from experiments.recipes.carry import ROOT, lacking, needed_by_tests, what_is_missing
from experiments.verbs.calibrate import Calibrate, calibrate
from experiments.verbs.cli import with_flags
from experiments.verbs.profile_diff import write_profile_diffs
from experiments.verbs.run import Run, run
from experiments.verbs.shared.cells import CellSelection
from experiments.verbs.shared.selection import Selection
from experiments.verbs.validate import Validate, validate
from sim.base.errors import InputError, LongstepError, RankError, unknown
from sim.base.files import make_folder
from sim.base.presets import preset_names
from sim.schedule.methods.catalog import SCHEDULES
from sim.setup.names import DATASHEET
from sim.words.profile import load_profile
from topology.cluster import load_cluster
from topology.named import gpu_name

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
    steps: str = "8K,32K,128K"
    """Lengths of training steps on one rank."""
    layers: tuple[int, ...] = (2, 4)
    """Of training steps: the fewer in the part step, the more in the part step-deep."""
    stacks: str = "fsdp,unsloth,untied-ulysses,5m"
    """Of training steps: FSDP and full checkpointing; inputs of layers on the host and the loss in chunks; the MLP in
    tiles, too; the optimiser on the host, too."""
    shared: str = "ring,ulysses"
    """Schedules of training steps of four ranks."""
    set: tuple[str, ...] = ()
    """Figures of training steps to replace."""


class Part(NamedTuple):
    """A part of ``make gpu``, which leaves results of its own."""

    name: str
    about: str
    minutes: int
    """About how long it takes on one H200: estimated from FLOPs, bytes and set-up, not measured."""
    do: Callable[[GpuRun], None]
    several: bool = False
    """Whether it is for several GPUs."""

    @property
    def listed(self) -> str:
        """The part as lists show it."""
        return f"{self.name:<11}{self.about} (about {self.minutes} minutes)"


def gpu(
    console: Console,
    *parts: str,
    out: str | None = None,
    profile: str | None = None,
    attention: str = "",
    seconds: float = math.inf,
    plan: GpuPlan = GpuPlan(),  # noqa: B008 - immutable
) -> None:
    """Prove on one GPU of this machine: exact, calibrated, predicted; leave a folder that is small enough to commit.

    Schedules play their ranks on it in turn, with copies for transfers; where there are several GPUs they are executed
    over NCCL, too. ``parts`` are some of ``GPU_PARTS``, for a GPU that is there for minutes only; by default all. Each
    writes what it prints to ``out`` as it comes, PART.txt once all of it went well, and is left out where that is
    there. One that was ended, or that failed, goes on where it was. No schedule, measurement or cell begins after so
    many ``seconds``. What is predicted takes the profile that the part calibrate left in the same folder, or
    ``profile``. ``attention`` names the kernel to verify and calibrate with, by default the fastest one; comparisons
    take the profile's. After every part what is in ``out`` is packed into one file beside it, OUT.tar.gz.
    """
    if not seconds > 0:
        raise InputError(f"--seconds {seconds}: expected seconds above 0")
    for name in parts:
        if name not in GPU_PARTS:
            raise unknown("part", name, [f"{part.name} ({part.about})" for part in GPU_PARTS.values()], "PART of gpu")
    cluster, name = gpu_here()
    gpus = gpus_here(load_cluster(cluster))
    counts = [2**n for n in range(1, gpus.bit_length())]  # most degrees divide heads and tokens then
    folder = Path(out) if out else Path("experiments", "results", f"{datetime.now(UTC).date()}-{name}")
    make_folder(folder)
    rests_on = profile or str(folder / "profile.json")
    end_s = time.monotonic() + seconds
    run_of = GpuRun(plan, cluster, name, counts, folder, rests_on, attention, console, end_s)
    for part in GPU_PARTS.values():
        if parts and part.name not in parts:
            continue
        if part.several and not counts:
            console.print(f"{part.name}: left out, it is for several GPUs and there is one", markup=False)
        else:
            run_of.leave(part)
            if out:
                _pack(folder)
    console.print(f"written to {folder}", markup=False)
    if run_of.late:
        console.print(f"time was up; begin again to go on with {', '.join(run_of.late)}", markup=False)
    if run_of.failed:
        raise RankError(f"{len(run_of.failed)} parts failed: {'; '.join(run_of.failed)}")


def what_runs(cluster: str, attention: str) -> str:
    """Return the versions that count here, and the attention of a name, or the fastest one."""
    import torch

    from runtime.execution.ops.attention_choice import attention_kernel, described

    kernel = attention_kernel(torch.device(load_cluster(cluster).gpu.kind), torch.bfloat16, attention)
    return f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}; attention: {described(kernel.name)}"


@dataclasses.dataclass(frozen=True)
class GpuRun:
    """A run of ``gpu``."""

    plan: GpuPlan
    cluster: str
    name: str
    counts: list[int]
    """Numbers of ranks to execute over NCCL; none where there is one GPU."""
    folder: Path
    profile: str
    """The profile that comparisons rest on."""
    attention: str
    """Name of the kernel to verify and calibrate with; empty: the fastest one."""
    console: Console
    end_s: float = math.inf
    """When nothing more begins, on the monotonic clock."""
    failed: list[str] = dataclasses.field(default_factory=list)
    late: list[str] = dataclasses.field(default_factory=list)
    """Parts for some of which there was no time."""
    done: set[str] = dataclasses.field(default_factory=set)
    """What of the present part went well, now or before."""

    @property
    def left_s(self) -> float:
        """How long something may still begin."""
        return self.end_s - time.monotonic()

    def leave(self, part: Part) -> None:
        """Do a part. What it prints goes to PART-partly.txt as it comes, which becomes PART.txt if all went well, or
        else PART-failed.txt.
        """
        path, failed, partly = (self.folder / f"{part.name}{end}.txt" for end in ("", "-failed", "-partly"))
        if path.exists():
            self.console.print(f"{part.name}: done before, see {path}; delete that to do it again", markup=False)
            return
        if self.left_s <= 0:
            self.late.append(part.name)
            return
        if failed.exists():
            failed.replace(partly)
        self.done.clear()
        if partly.exists():
            lines = partly.read_text(encoding="utf-8").splitlines()
            self.done.update(line.removeprefix(_DONE) for line in lines if line.startswith(_DONE))
        before, begin_s = len(self.failed), time.monotonic()
        with partly.open("a", encoding="utf-8") as kept, _kept(self.console, kept):
            self.console.rule(f"{part.name}: {part.about}; about {part.minutes} minutes on one H200 (an estimate)")
            self.console.print(f"{self.name}; {what_runs(self.cluster, self.attention)}", markup=False)
            try:
                part.do(self)
            except _LateError:
                self.late.append(part.name)
            except LongstepError as error:
                self._has_failed(error)
            self.console.print(f"{part.name}: took {time.monotonic() - begin_s:.0f} s", markup=False)
        if len(self.failed) > before:
            partly.replace(failed)
        elif part.name not in self.late:
            partly.replace(path)

    def attempt(self, what: str, do: Callable[[], None]) -> None:
        """Do something of a part that was not done before. Failures are told at the end, so that no time on a GPU is
        lost.
        """
        if what in self.done:
            self.console.print(f"done already: {what}", markup=False)
            return
        if self.left_s <= 0:
            raise _LateError
        try:
            do()
        except LongstepError as error:
            if self.left_s <= 0:
                self.console.print(f"not all: {with_flags(str(error))}", markup=False)
                raise _LateError from error
            self._has_failed(error)
        else:
            self.console.print(f"{_DONE}{what}", markup=False, soft_wrap=True)

    def _has_failed(self, error: LongstepError) -> None:
        self.failed.append(str(error))
        self.console.print(f"failed: {with_flags(str(error))}", markup=False)


_DONE = "done: "
_ESCAPED = re.compile(r"\x1b\[[0-9;]*m")


class _LateError(Exception):
    """There is no time for the rest of a part."""


class _Kept:
    """What a console prints to, and a file that gets the same at once, without colours."""

    def __init__(self, shown: IO[str], file: IO[str]) -> None:
        self._shown, self._file = shown, file

    def write(self, text: str) -> int:
        self._file.write(_ESCAPED.sub("", text))
        self._file.flush()
        return self._shown.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shown, name)


@contextmanager
def _kept(console: Console, file: IO[str]) -> Iterator[None]:
    """Write what a console prints to a file, too."""
    shown = console.file
    console.file = cast("IO[str]", _Kept(shown, file))
    try:
        yield
    finally:
        console.file = shown


def _pack(folder: Path) -> None:
    """Pack a folder into one file beside it, for what takes but few files along."""
    whole = folder.with_name(f"{folder.name}.tar.gz")
    new = whole.with_name(f".{whole.name}")
    with tarfile.open(new, "w:gz") as packed:
        packed.add(folder, folder.name)
    new.replace(whole)


def _test(gpu: GpuRun) -> None:
    gpu_tests(gpu.console)


def gpu_tests(console: Console) -> None:
    """Run the tests that need a GPU; raises RankError if one fails, InputError if what they need is not here."""
    if not (ROOT / "tests").is_dir():
        raise InputError(f"part test: {ROOT} is no checkout, so there are no tests: leave it out, or run it in one")
    if missing := lacking(needed_by_tests()):
        raise InputError(f"part test: {what_is_missing(missing)}")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-rP", "-p", "no:cacheprovider", "tests"]
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # this machine's plugins may warn, which fails tests
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=alone, **piped) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:
            console.print(line.rstrip(), markup=False)
    if tests.returncode:
        raise RankError(f"pytest -m gpu: exit code {tests.returncode}")


def _verify(gpu: GpuRun) -> None:
    """Hold every schedule against one process in fp64: on one device, and over NCCL; and every stack of a step."""
    for schedule in gpu.plan.schedules:
        alone = schedule == "single"
        one = Selection(
            cluster=gpu.cluster, schedule=schedule, gpus="1" if alone else "4", seq=gpu.plan.verified, dtype="bf16",
            scope="layer", one_device=True, profile=DATASHEET
        )  # fmt: skip
        also = [dataclasses.replace(one, layers=3, set=(_OFFLOADED,))] if alone else []
        if gpu.counts and not alone:
            also = [dataclasses.replace(one, gpus=str(gpu.counts[-1]), one_device=False)]
        for selection in (one, *also):
            _hold(gpu, selection)
    for stack in gpu.plan.stacks.split(","):
        step = Selection(
            cluster=gpu.cluster, schedule="ulysses", stack=stack, gpus="2", seq=gpu.plan.verified, dtype="bf16",
            scope="step", layers=2, one_device=True, profile=DATASHEET, set=gpu.plan.set
        )  # fmt: skip
        _hold(gpu, step)


def _hold(gpu: GpuRun, selection: Selection) -> None:
    """Execute once, and hold the result against one process in fp64."""
    command = Run(selection=selection, verify=True, execution=Execution(repeats=1, attention=gpu.attention))
    one = selection
    where = "on one device" if one.one_device else "over NCCL"
    what = f"{one.schedule}, {one.gpus} ranks, {where}, {one.layers or 1} layers, stack {one.stack or 'none'}"
    gpu.attempt(f"{what}, {', '.join(one.set)}".removesuffix(", "), partial(run, command, gpu.console))


def _calibrate(gpu: GpuRun) -> None:
    """Calibrate, and hold the profile against those that ship."""
    made = str(gpu.folder / "profile.json")
    command = Calibrate(
        cluster=gpu.cluster, name=gpu.name, model=gpu.plan.model, attention=gpu.attention, out=made,
        seconds=gpu.left_s if math.isfinite(gpu.left_s) else None,
    )  # fmt: skip
    calibrate(command, gpu.console)
    hold_against_shipped(made, gpu.folder / "against.txt", gpu.console)


def _alone(gpu: GpuRun) -> CellSelection:
    """Return the lengths of one layer on one rank."""
    return CellSelection(
        model=gpu.plan.model, cluster=gpu.cluster, profile=gpu.profile, scope="layer", target=0.05, seq=gpu.plan.alone,
        ranks="1", schedule="single"
    )  # fmt: skip


def _together(gpu: GpuRun) -> CellSelection:
    """Return every schedule of several ranks, all on one device."""
    split = ",".join(schedule for schedule in gpu.plan.schedules if schedule != "single")
    return dataclasses.replace(
        _alone(gpu), seq=gpu.plan.together, ranks=gpu.plan.ranks, schedule=split, one_device=True
    )


def _layers(gpu: GpuRun) -> None:
    _compare(gpu, "layers", _alone(gpu))


def _schedules(gpu: GpuRun) -> None:
    _compare(gpu, "schedules", _together(gpu))


def _offload(gpu: GpuRun) -> None:
    _compare(gpu, "offloaded", dataclasses.replace(_alone(gpu), seq=gpu.plan.offloaded, layers=4, set=(_OFFLOADED,)))


def _steps(gpu: GpuRun, layers: int) -> CellSelection:
    """Return training steps on one rank, with every stack."""
    return dataclasses.replace(
        _alone(gpu), scope="step", layers=layers, seq=gpu.plan.steps, stack=gpu.plan.stacks, set=gpu.plan.set
    )


def _step(gpu: GpuRun) -> None:
    steps = _steps(gpu, gpu.plan.layers[0])
    ranks = dataclasses.replace(steps, seq=gpu.plan.together, ranks="4", schedule=gpu.plan.shared, one_device=True)
    for what, sweep in (("step", steps), ("step-ranks", ranks)):
        _compare(gpu, what, sweep)


def _step_deep(gpu: GpuRun) -> None:
    _compare(gpu, "step-deep", _steps(gpu, gpu.plan.layers[-1]))


def _nccl(gpu: GpuRun) -> None:
    counts = ",".join(map(str, gpu.counts))
    _compare(gpu, "nccl", dataclasses.replace(_together(gpu), ranks=counts, one_device=False))


def _compare(gpu: GpuRun, what: str, sweep: CellSelection) -> None:
    """Predict and execute a sweep, or what is left of it; raises InputError where there is no profile yet."""
    if not Path(gpu.profile).is_file():
        raise InputError(
            f"part {what} predicts with {gpu.profile}, which is not there: do the part calibrate first, with the same "
            f"--out, or name another one with --profile FILE"
        )
    record, html, figure, cases = (str(gpu.folder / f"{what}.{kind}") for kind in ("json", "html", "svg", "toml"))
    command = Validate(
        sweep=sweep, repeats=1, out=record, html=html, figure=figure, cases_out=cases, go_on=True,
        seconds=gpu.left_s if math.isfinite(gpu.left_s) else None,
    )  # fmt: skip
    gpu.attempt(what, partial(validate, command, gpu.console))


GPU_PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        Part("test", "the tests that need a GPU", 4, _test),
        Part("verify", "every schedule, and training steps, against one process in fp64", 5, _verify),
        Part("calibrate", "time kernels, launches and copies: makes the profile", 6, _calibrate),
        Part("layers", "predict and execute a layer by itself at several lengths", 4, _layers),
        Part("schedules", "predict and execute every schedule, all ranks on one GPU", 6, _schedules),
        Part("offloaded", "predict and execute layers whose activations lie in the host's memory", 3, _offload),
        Part("step", "predict and execute training steps of 2 layers, of one rank and of four on one GPU", 7, _step),
        Part("step-deep", "predict and execute training steps of 4 layers", 8, _step_deep),
        Part("nccl", "predict and execute every schedule over NCCL, on several GPUs", 6, _nccl, several=True),
    )
}
"""What ``make gpu`` consists of, in this order. On one GPU each takes less than ten minutes; calibrating begins nothing
new after 7.5.
"""


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
            return cluster, "-".join(gpu_name(spec.gpu.name).words).lower()
    raise InputError(
        f"no cluster preset has {device.name!r} with {device.multi_processor_count} SMs and "
        f"{device.total_memory / 1e9:.0f} GB: write a TOML file, then longstep calibrate --cluster FILE.toml"
    )
