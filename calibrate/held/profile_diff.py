"""What one profile predicts of the points of another, beside what was measured."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import NamedTuple

import msgspec
import numpy as np

from calibrate.held.points import Predictor, measured_s
from sim.base.errors import InputError
from sim.base.presets import preset_names
from sim.engine.costs.measured import measured_cluster
from sim.words.profile import Point, Profile, load_profile
from topology.specs import ClusterSpec


class PointDiff(NamedTuple):
    """A measured point, and what the other profile says of it."""

    point: Point
    ratio: float
    """Predicted over measured time."""


class KernelDiff(NamedTuple):
    """All points of one kernel, variant and data type."""

    points: list[PointDiff]

    @property
    def name(self) -> str:
        """Kernel, variant and data type."""
        first = self.points[0].point
        return " ".join(filter(None, (first.kernel, first.variant, first.dtype)))

    @property
    def spread(self) -> tuple[float, float, float]:
        """The 5th percentile, the median and the 95th percentile of the ratios."""
        low, median, high = np.percentile([one.ratio for one in self.points], [5, 50, 95])
        return float(low), float(median), float(high)

    @property
    def worst(self) -> PointDiff:
        """The point that is off by the largest factor."""
        return max(self.points, key=lambda one: abs(math.log(one.ratio)))


class ProfileDiff(NamedTuple):
    """What one profile says of another's points."""

    rows: list[KernelDiff]
    left_out: dict[str, int]
    """Points that it says nothing of, by kernel."""
    same_machine: bool
    """Whether both are of one kind of GPU or host; else efficiencies of the one are taken on the other's machine."""


def profile_diff(profile: Profile, other: Profile) -> ProfileDiff:
    """Return what ``other`` says of the idle points of ``profile``.

    It says what it would of its own machine where both are of the same GPU; of another one its efficiencies are taken,
    as a what-if on the cluster's figures does.
    """
    same = profile.machine.gpu == other.machine.gpu
    predictor = Predictor(other, None if same else _in_place_of(measured_cluster(other), measured_cluster(profile)))
    found: dict[tuple[str, str, str], list[PointDiff]] = defaultdict(list)
    left_out: Counter[str] = Counter()
    for point in profile.points:
        if point.condition != "idle":
            continue
        seconds = _seconds(predictor, point)
        if seconds is None:
            left_out[point.kernel] += 1
        else:
            ratio = seconds / measured_s(point)
            found[point.kernel, point.variant, point.dtype].append(PointDiff(point, ratio))
    return ProfileDiff([KernelDiff(points) for _, points in sorted(found.items())], dict(left_out), same)


def _in_place_of(theirs: ClusterSpec, spec: ClusterSpec) -> ClusterSpec:
    """Return a machine under the name of another's GPU. The cost model refuses a profile of another GPU, so that nobody
    mistakes one machine's times for another's; here that is what is asked for, and the print says so.
    """
    return msgspec.structs.replace(spec, gpu=msgspec.structs.replace(spec.gpu, name=theirs.gpu.name))


def _seconds(predictor: Predictor, point: Point) -> float | None:
    try:
        return predictor.seconds(point)
    except InputError:  # the machine has no such link, or no peak for the data type
        return None


def shipped_of(gpu: str) -> list[Profile]:
    """Return the profiles of a GPU that ship."""
    shipped = map(load_profile, preset_names("sim/profiles", ".json"))
    return [profile for profile in shipped if profile.machine.gpu == gpu]
