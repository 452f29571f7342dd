"""``longstep recheck``: how far a profile can be trusted, by this machine as it is now or by another profile."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from experiments.evidence.machine import require_machine
from experiments.verbs.profile_diff import show_profile_diff
from experiments.verbs.shared.kinds import OptionalText
from sim.base.errors import InputError, unknown
from sim.base.presets import read_bytes
from sim.base.units import percent, seconds
from sim.engine.costs.measured import measured_cluster
from sim.setup.names import DATASHEET
from sim.words.profile import Profile, load_profile, profile_names

_OWN = "host"
"""The profile that other verbs take by default on this machine."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recheck:
    """Time a few points of a profile again, and say how far this machine has drifted; or compare it with another."""

    profile: Annotated[str, tyro.conf.Positional] = _OWN
    """NAME or FILE.json of the profile."""
    against: OptionalText = None
    """Time nothing: compare the profile's points with what this one (NAME or FILE.json) predicts of them."""


def recheck(command: Recheck, console: Console) -> None:
    """Print how the points of a profile compare with new ones, or with those that another profile predicts."""
    if command.profile == _OWN and _OWN not in profile_names():
        raise InputError(f"there is no profile {_OWN!r} yet: longstep calibrate makes one, or name one")
    profile = _profile(command.profile, "PROFILE of longstep recheck")
    if command.against is None:
        _repeat(profile, console)
    else:
        show_profile_diff(profile, _profile(command.against, "--against"), console)


def _profile(name: str, option: str) -> Profile:
    """Return a profile; raises InputError that names the option where there is none."""
    if name == DATASHEET:
        raise InputError(f"{option} {name}: a datasheet has no points; name a profile: {', '.join(profile_names())}")
    if name.endswith(".json") or "/" in name:
        read_bytes("profile", name, option)
    elif name not in profile_names():
        raise unknown("profile", name, [*profile_names(), "FILE.json"], option)
    return load_profile(name)


def _repeat(profile: Profile, console: Console) -> None:
    """Repeat some points of a profile, and print how they compare."""
    from calibrate.measure.residuals import repeat
    from runtime.processes.launch import Session

    spec = measured_cluster(profile)
    require_machine(spec, 1)
    title = f"profile {profile.name!r} of {profile.created}, repeated"
    table = Table("kernel", "shape", "then", "now", "drift", title=title, title_justify="left")
    with Session(1, device=spec.gpu.kind, attention=profile.machine.software.get("attention", "")) as session:
        repeated = repeat(profile, session, most=8, budget_s=0.3)
    if not repeated:
        raise InputError(f"profile {profile.name!r} has no point that can be repeated; run longstep calibrate")
    for point, now_s in repeated:
        shape = "x".join(map(str, point.shape))
        drift = percent(now_s / point.median_s - 1)
        table.add_row(f"{point.kernel} {point.variant}", shape, seconds(point.median_s), seconds(now_s), drift)
    console.print(table)
    drifts = [one.drift for one in repeated]
    spread = f"from {percent(min(drifts))} to {percent(max(drifts))}"
    console.print(f"drift: median {percent(statistics.median(drifts))}, {spread}")
