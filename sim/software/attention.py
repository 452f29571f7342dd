"""Fused attention of another kernel than a profile's: the points of a table for the same chip take their place."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TypeVar

import msgspec

from sim.base.errors import InputError
from sim.base.kept import kept
from sim.base.presets import load_toml
from sim.schedule.derive.kernels import ATTENTION_KERNELS
from sim.words.options import ChosenAttention, FusedName
from sim.words.profile import Profile, shipped_profile

T = TypeVar("T")


class Tables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which profile that ships has which kernel's attention, and which kernel torch picks, by chip."""

    sdpa: dict[str, FusedName]
    chips: dict[str, dict[FusedName, str]]


@cache
def _tables() -> Tables:
    return load_toml("table", "attention", Tables, "sim/software", "`software`")


def kernels_of(chip: str, profile: Profile | None = None) -> list[FusedName]:
    """Return the kernels of attention that there are figures of on a chip, that of a profile among them."""
    found = [*_tables().chips.get(chip, {})]
    own = profile.attention.kernel if profile and profile.attention else ""
    return found if not own or own in found else [own, *found]


def named(kernel: ChosenAttention | None, chip: str) -> FusedName | None:
    """Return a kernel by its name; None for none, and for torch's choice on a chip of which nobody has said it."""
    return _tables().sdpa.get(chip) if kernel == "sdpa" else kernel


def attending(profile: Profile | None, kernel: FusedName, chip: str) -> Profile:
    """Return a profile whose attention is that of a kernel: itself where its own is, and for the same one always the
    same object, beside which its tables are kept. Raises InputError where there are no figures of it on the chip.
    """
    if profile is None:
        raise InputError(
            f"`set` software.attention={kernel}: at datasheet rates all kernels are alike; set `profile`, or leave it "
            f"out"
        )
    if profile.attention and profile.attention.kernel == kernel:
        return profile
    if kernel not in _tables().chips.get(chip, {}):
        there = ", ".join(kernels_of(chip, profile)) or "none"
        raise InputError(
            f"`set` software.attention={kernel}: there are no figures of it on {chip}, but of {there}; set one of "
            f"these, or `profile` one that longstep calibrate --attention has made of it"
        )
    others = _of_kernels(profile)
    if kernel not in others:
        others[kernel] = _with_attention(profile, shipped_profile(_tables().chips[chip][kernel]))
    return others[kernel]


@kept
def _of_kernels(profile: Profile) -> dict[FusedName, Profile]:  # noqa: ARG001 - beside which they are kept
    return {}


def _with_attention(profile: Profile, other: Profile) -> Profile:
    """Return a profile with all that another one says of attention, and nothing that it said itself."""

    def put(own: Mapping[str, T], theirs: Mapping[str, T]) -> dict[str, T]:
        stays = {key: value for key, value in own.items() if key not in ATTENTION_KERNELS}
        return stays | {key: value for key, value in theirs.items() if key in ATTENTION_KERNELS}

    return msgspec.structs.replace(
        profile,
        points=(
            *(point for point in profile.points if point.kernel not in ATTENTION_KERNELS),
            *(point for point in other.points if point.kernel in ATTENTION_KERNELS),
        ),
        attention=other.attention,
        tiles=other.tiles,
        traffic=put(profile.traffic, other.traffic),
        blocks_per_sm=put(profile.blocks_per_sm, other.blocks_per_sm),
        disagreement=put(profile.disagreement, other.disagreement),
        residuals=put(profile.residuals, other.residuals),
        beyond=put(profile.beyond, other.beyond),
        sustained=put(profile.sustained, other.sustained),
        sources=profile.sources | {"attention": other.sources["attention"]},
    )
