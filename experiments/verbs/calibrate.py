"""``longstep calibrate``: measures this machine and writes a profile."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from experiments.evidence.machine import gpus_here, require_machine
from experiments.evidence.provenance import command_line
from experiments.verbs.shared.kinds import OptionalFloat, OptionalText, Texts
from experiments.verbs.shared.writes import Writes
from sim.base.errors import InputError, RankError
from sim.base.files import Output, make_folder, require_outputs
from sim.base.units import percent
from sim.setup.names import one_of
from sim.words.profile import (
    OWN_PROFILE_FILE,
    PROFILE_FILE,
    Profile,
    encode_profile,
    profile_folder,
)
from sim.words.workload import FLOATS, ModelSpec, load_model
from topology.cluster import load_cluster
from topology.specs import ClusterSpec

if TYPE_CHECKING:
    from calibrate.plan import Calibration, Plan

QUICK_S = 105.0
"""Nothing new is begun after this time where it has to be quick; the largest sizes come last."""
GPU_S = 450.0
"""Nor after this on a GPU."""
KEPT_S = 30.0
"""How often what has been measured is written meanwhile."""
FAILURES = 5
"""Measurements that may fail one after the other; each starts new processes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrate(Writes):
    """Time the kernels and links that execute runs on this machine. Ctrl-C keeps what has been measured."""

    quick: bool = False
    """Fewer sizes and runs: under two minutes."""
    published: OptionalText = None
    """Measure nothing: make the profile of a machine that others have measured, from their tables."""
    cluster: str = "host"
    """host, or the NAME or FILE.toml of a cluster that this machine's GPU is one of."""
    model: OptionalText = None
    """The model whose heads and shapes are timed; by default tiny on a host, llama3-8b on a GPU."""
    dtype: Texts = ()
    """Data type to time, as often as wanted; by default the model's."""
    attention: str = ""
    """Attention kernel of a GPU: flash-attn-3, flash-attn-2, aten-flash, aten-efficient or aten-cudnn; by default the
    fastest that is installed and runs the data type."""
    seconds: OptionalFloat = None
    """Begin no measurement after so many seconds; the largest come last."""
    name: OptionalText = None
    """Name of the profile; by default that of the cluster, and host is what the other verbs take by default."""
    out: OptionalText = None
    """Write to this file instead of the user's folder of profiles."""


def calibrate(command: Calibrate, console: Console) -> None:
    """Measure, and write a profile; exits with 130 if it was interrupted, with what there is."""
    name = command.name or Path(command.cluster).stem
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        raise InputError(f"--name {name!r}: expected letters, digits, '.', '_' and '-'")
    if command.seconds is not None and not command.seconds > 0:
        raise InputError(f"--seconds {command.seconds}: expected seconds above 0")
    if command.published is not None:
        measures = command.quick or command.dtype or command.model or command.attention or command.seconds
        if measures or command.cluster != "host":
            raise InputError("--published measures nothing: it goes with --out only")
        _published(command.published, command.output(command.out, PROFILE_FILE), console)
    else:
        _calibrated(command, name, console)


def _calibrated(command: Calibrate, name: str, console: Console) -> None:
    """Measure, write what there is, and print it."""
    from calibrate.plan import Plan

    spec = load_cluster(command.cluster)
    on_gpu = spec.gpu.kind == "cuda"
    model = load_model(command.model or ("llama3-8b" if on_gpu else "tiny"))
    dtypes = [one_of("dtype", dtype, FLOATS) for dtype in command.dtype or (model.dtype,)]
    require_machine(spec, 1, dtypes, command.attention)
    output = command.output(command.out, PROFILE_FILE)
    if output is None:
        make_folder(profile_folder())
        output = OWN_PROFILE_FILE.at(profile_folder() / f"{name}.json", force=command.force)
    output.require()
    plan = Plan(name, model, tuple(dtypes), command.quick, command_line(), command.attention)
    limit_s = min(QUICK_S if command.quick else GPU_S if on_gpu else math.inf, command.seconds or math.inf)
    state, failed = "interrupted", dict[str, Exception]()
    with _calibration(plan, spec) as calibration:
        kept_s = time.monotonic()

        def keep() -> None:
            """Write what there is, now and then: whoever ends this process by force loses little."""
            nonlocal kept_s
            if time.monotonic() > kept_s + KEPT_S and (partly := calibration.profile(complete=False)).points:
                output.write(encode_profile(partly))
                kept_s = time.monotonic()

        with contextlib.suppress(KeyboardInterrupt):
            state = _measure(calibration, limit_s, keep, failed, console)
        if failed and not state:
            state = f"{len(failed)} measurements failed"
        profile = calibration.profile(complete=not state)
    if profile.points:
        output.write(encode_profile(profile))
        _summary(profile, state, output.path, console)
        _interference(profile, model, console)
    if failed:
        raise RankError(
            f"{len(failed)} measurements failed: {'; '.join(f'{label}: {why}' for label, why in failed.items())}"
        ) from next(iter(failed.values()))
    if not profile.points:
        raise InputError("interrupted before anything was measured; nothing was written")
    if state == "interrupted":
        sys.exit(130)


def _calibration(plan: Plan, spec: ClusterSpec) -> Calibration:
    """Return what measures the machine that a cluster describes."""
    from calibrate.gpu import GpuCalibration
    from calibrate.host import HostCalibration

    return HostCalibration(plan) if spec.gpu.kind == "cpu" else GpuCalibration(plan, spec, gpus_here(spec))


def _published(name: str, output: Output | None, console: Console) -> None:
    """Make the profile of a machine that others have measured; one of that name ships, so it only goes where asked."""
    from calibrate.published import published

    require_outputs([output])
    profile = published(name)
    where = "--out FILE writes it"
    if output:
        output.write(encode_profile(profile))
        where = f"written to {output.path}"
    console.print(f"profile {name!r}: {len(profile.points)} points; {where}", markup=False)
    _residuals(profile, console)


def _residuals(profile: Profile, console: Console) -> None:
    """Print how well the points of a profile predict each other."""
    from calibrate.held.leave_one_out import leave_one_out

    table = Table("each point from the others", "points", "median error", "worst")
    for kernel, points, median, worst in leave_one_out(profile):
        table.add_row(kernel, str(points), f"{100 * median:.1f} %", percent(worst))
    if table.row_count:
        console.print(table)


def _measure(
    calibration: Calibration, limit_s: float, keep: Callable[[], None], failed: dict[str, Exception], console: Console
) -> str:
    """Make the measurements that there is time for; return why some are missing, empty if none is. A measurement that
    fails is put into ``failed``, and the others go on in new processes, unless several in a row fail.
    """
    begin_s, steps, in_turn = time.monotonic(), calibration.steps(), 0
    with _progress(console) as progress:
        task = progress.add_task("", total=len(steps))
        for number, step in enumerate(steps):
            if time.monotonic() - begin_s > limit_s:
                return f"the {len(steps) - number} largest left out for lack of time"
            progress.update(task, description=step.label)
            try:
                step.run()
                in_turn = 0
            except Exception as error:  # noqa: BLE001 - whatever it was, it is raised when the others are done
                failed[step.label] = error
                calibration.end_session()
                in_turn += 1
            if in_turn == FAILURES:
                return f"{FAILURES} failed one after the other, and {len(steps) - number - 1} were left out"
            keep()
            progress.advance(task)
    return ""


def _progress(console: Console) -> Progress:
    columns = (
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    return Progress(*columns, console=Console(stderr=True), transient=not console.is_terminal)


def _summary(profile: Profile, missing: str, path: str, console: Console) -> None:
    """Print what was found, in the figures that the simulator uses, and how well the points predict each other."""
    state = f" ({missing}: larger sizes will be extrapolated)" if missing else ""
    console.print(f"profile {profile.name!r}: {len(profile.points)} points{state}, written to {path}", markup=False)
    if profile.machine.cores:
        _host_figures(profile, console)
    else:
        _gpu_figures(profile, console)
    _residuals(profile, console)


def _gpu_figures(profile: Profile, console: Console) -> None:
    """Print what a calibration found of a GPU."""
    from runtime.execution.ops.attention_choice import described

    launch_s, rate = profile.cluster["gpu"]["launch_s"], profile.cluster["hbm"]["bytes_per_s"]
    console.print(
        f"  {profile.machine.gpu}: {launch_s * 1e6:.3g} us to issue a small kernel; copies get "
        f"{100 * profile.memory_efficiency:.0f} % of the memory's {rate / 1e12:.3g} TB/s",
        markup=False,
    )
    console.print(f"  attention: {described(profile.machine.software['attention'])}", markup=False)
    if profile.replayed_s:
        console.print(
            f"  {profile.replayed_s * 1e6:.3g} us from one small kernel to the next in a CUDA graph: "
            f"--set cluster.gpu.launch_s={profile.replayed_s:.3g} asks what graphs would buy",
            markup=False,
        )
    for kernel, load in profile.sustained.items():
        console.print(
            f"  {kernel} under load takes {load.longer:.3g} times as long ({load.low:.3g} to {load.high:.3g})"
            f"{load.state and f': {load.state}'}",
            markup=False,
        )
    for when, state in profile.machine.state.items():
        console.print(f"  {when}: {state}", markup=False)


def _host_figures(profile: Profile, console: Console) -> None:
    """Print the host's figures that a calibration found."""
    host, memory, loopback = (profile.cluster[name] for name in ("host", "hbm", "loopback"))
    console.print(
        f"  {profile.machine.gpu}: {host['cores']:.3g} cores at once, memory {memory['bytes_per_s'] / 1e9:.3g} GB/s, "
        f"loopback {loopback['bytes_per_s'] / 1e9:.3g} GB/s after {loopback['latency_s'] * 1e6:.3g} us; "
        f"a transfer takes {host['transfer_cores']:.2g} cores per rank",
        markup=False,
    )


def _interference(profile: Profile, model: ModelSpec, console: Console) -> None:
    """Print how much kernels and transfers slow each other, and what the simulator makes of it."""
    from calibrate.measure.residuals import explained

    cells: dict[tuple[str, str], dict[str, str]] = {}
    for one, simulated in explained(profile, model):
        beside = f"{one.ranks} ranks" if one.beside == "ranks" else one.beside
        pair = (one.slowed, f"{one.kernel} {one.variant} {one.dtype}".replace("  ", " "))
        cells.setdefault(pair, {})[beside] = f"{one.median:.2f} ({one.low:.2f}, {one.high:.2f}) / {simulated:.2f}"
    heads = list(dict.fromkeys(beside for row in cells.values() for beside in row))
    for slowed, title in (
        ("kernel", "interference: how many times as long a kernel takes, measured (quartiles) / simulated"),
        ("transfer", "and the transfer beside it"),
    ):
        used = [beside for beside in heads if any(beside in row for key, row in cells.items() if key[0] == slowed)]
        table = Table("kernel", *(f"beside {beside}" for beside in used), title=title, title_justify="left")
        for (what, kernel), row in cells.items():
            if what == slowed:
                table.add_row(kernel, *(row.get(beside, "") for beside in used))
        if used:
            console.print(table)
    if profile.jitter:
        jitter = profile.jitter
        console.print(
            f"jitter of kernels while all ranks are busy: --jitter {jitter.share:.2g}, correlation between ranks "
            f"{jitter.correlation:.2g}, {jitter.runs} runs"
        )
