"""``longstep calibrate``: measure this machine and write a profile."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments.selection import one_of
from experiments.simulate import writable
from sim.errors import InputError
from sim.profile import Profile, profile_folder, save_profile
from sim.workload import DTYPE_BYTES, load_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Time the kernels and links that execute runs on this machine. Ctrl-C keeps what has been measured."""

    quick: bool = False
    """Fewer sizes and runs: under two minutes."""
    model: str = "tiny"
    """The model whose heads and head dim are timed."""
    dtype: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Data type to time, as often as wanted; by default the model's."""
    name: str = "host"
    """Name of the profile; host is what the other verbs take by default."""
    out: str | None = None
    """Write to this file instead of the user's folder of profiles."""


def calibrate(command: Calibrate, console: Console) -> None:
    """Measure, and write a profile; exits with 130 if it was interrupted, with what there is."""
    from calibrate.host import HostCalibration, Plan

    if not re.fullmatch(r"[A-Za-z0-9._-]+", command.name):
        raise InputError(f"--name {command.name!r}: expected letters, digits, '.', '_' and '-'")
    model = load_model(command.model)
    dtypes = [one_of("--dtype", dtype, DTYPE_BYTES) for dtype in command.dtype or (model.dtype,)]
    if command.out:
        writable(command.out)
    path = Path(command.out) if command.out else profile_folder() / f"{command.name}.json"
    line = " ".join(["longstep", *sys.argv[1:]])
    plan = Plan(command.name, model, tuple(dtypes), command.quick, line)  # type: ignore[arg-type]
    complete = False
    with HostCalibration(plan) as calibration:
        with contextlib.suppress(KeyboardInterrupt):
            steps = calibration.steps()
            with _progress(console) as progress:
                task = progress.add_task("", total=len(steps))
                for step in steps:
                    progress.update(task, description=step.label)
                    step.run()
                    progress.advance(task)
            complete = True
        profile = calibration.profile(complete=complete)
    if not profile.points:
        raise InputError("interrupted before anything was measured; nothing was written")
    save_profile(profile, path)
    _summary(profile, path, console)
    if not complete:
        sys.exit(130)


def _progress(console: Console) -> Progress:
    columns = (
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    return Progress(*columns, console=Console(stderr=True), transient=not console.is_terminal)


def _summary(profile: Profile, path: Path, console: Console) -> None:
    """Print what was found, in the figures that the simulator uses."""
    host, memory, loopback = (profile.cluster[name] for name in ("host", "hbm", "loopback"))
    state = "" if profile.complete else " (interrupted: larger sizes will be extrapolated)"
    console.print(f"profile {profile.name!r}: {len(profile.points)} points{state}, written to {path}", markup=False)
    console.print(
        f"  {profile.machine.gpu}: {host['cores']:.3g} cores at once, memory {memory['bytes_per_s'] / 1e9:.3g} GB/s, "
        f"loopback {loopback['bytes_per_s'] / 1e9:.3g} GB/s after {loopback['latency_s'] * 1e6:.3g} us; "
        f"a transfer takes {host['transfer_cores']:.2g} cores per rank",
        markup=False,
    )
