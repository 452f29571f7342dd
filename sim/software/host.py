"""AdamW on the CPUs of a node of GPUs: the bytes that an implementation moves, and how fast it moves them."""

from __future__ import annotations

from functools import cache, cached_property
from typing import Annotated, NamedTuple

import msgspec

from sim.base.errors import InputError
from sim.base.kept import kept
from sim.base.presets import Name, load_toml
from sim.software.counted import Formula, Kernel, load_counted
from sim.words.options import HostOptimiserName
from sim.words.profile import Profile
from sim.words.workload import DTYPE_BYTES

ZERO_OFFLOAD: HostOptimiserName = "deepspeed"
"""Whose it is where nobody names it: that of ZeRO-Offload."""
COUNTED = "torch-optimisers"


class Passing(NamedTuple):
    """Bytes that pass a memory, for each byte that the weights have there."""

    read: float
    written: float


class HostAdam(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """One implementation."""

    said: Name
    counted: str
    """The part of ``counted/torch-optimisers.toml`` whose bytes it moves."""
    share: Annotated[float, msgspec.Meta(gt=0, le=1)]
    """Of the bandwidth of its sockets' memory, what all their cores get of it."""
    core_bytes_per_s: Annotated[float, msgspec.Meta(gt=0)]
    """What one core moves."""
    sources: dict[str, str]

    @cached_property
    def update(self) -> Passing:
        """What the update moves, without what scales the gradient before and casts the weights behind."""
        part = load_counted(COUNTED).part(self.counted)

        def of(formula: Formula, kernel: Kernel) -> float:
            return kernel.launches * formula.get("parameters", 0.0) / DTYPE_BYTES["fp32"]

        kernels = part.step.kernels
        return Passing(sum(of(one.reads, one) for one in kernels), sum(of(one.writes, one) for one in kernels))


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    implementations: dict[HostOptimiserName, HostAdam]


@cache
def _table() -> dict[HostOptimiserName, HostAdam]:
    return load_toml("table", "host", _Table, "sim/software", "`software`").implementations


def host_adam(profile: Profile | None) -> HostAdam:
    """Return the implementation that a profile names, or that of ZeRO-Offload."""
    return _table()[(profile and profile.host_optimiser) or ZERO_OFFLOAD]


def one_pass() -> HostAdam:
    """Return how what passes once over a memory moves its bytes, whosoever's update is beside it."""
    return _table()[ZERO_OFFLOAD]


def updating(profile: Profile | None, name: HostOptimiserName, kind: str) -> Profile | None:
    """Return a profile that names an implementation, for the same one always the same object, beside which its tables
    are kept. Raises InputError on ranks that are no GPUs, which run their own, and without a profile to say it.
    """
    if kind == "cpu":
        raise InputError(
            f"`set` software.host_optimiser={name}: it is of the CPUs of a node of GPUs, and ranks here are processes "
            f"of a host; leave it out"
        )
    if profile is None:
        if name == ZERO_OFFLOAD:
            return None
        raise InputError(
            f"`set` software.host_optimiser={name}: at datasheet rates it is {ZERO_OFFLOAD}; set `profile` to one of "
            f"this GPU if there is one, or leave it out"
        )
    named = _named(profile)
    if name not in named:
        named[name] = msgspec.structs.replace(profile, host_optimiser=name)
    return named[name]


@kept
def _named(profile: Profile) -> dict[HostOptimiserName, Profile]:  # noqa: ARG001 - beside which they are kept
    return {}
