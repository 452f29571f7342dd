"""One profile held against another: what the other predicts of each point of the first, and where the two differ.

Kernels take a fixed time and one that grows with their work. Where only the short ones differ it is the fixed time
(launches, the first tiles); where only the long ones do it is the rate; where all differ alike, the clock or the way
of measuring.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from calibrate.points import Basis, Predicted, Predictor, measured_s
from sim.engine.cost import measured_cluster
from sim.errors import InputError
from sim.profile import Point, Profile, Spread
from sim.workload import Dtype
from topology.specs import ClusterSpec

NEAR = 0.05
"""Share by which times may be apart and still count as equal."""

Differs = Literal["nothing", "fixed time", "rate", "all alike", "short and long", "between"]
"""Where two profiles are apart: short ones only; long ones only; both by the same factor, or by two; only others."""


class Held(NamedTuple):
    """A measured point, and what the other profile says of it."""

    point: Point
    predicted: Predicted

    @property
    def ratio(self) -> float:
        """Predicted over measured time."""
        return self.predicted.seconds / measured_s(self.point)


class Row(NamedTuple):
    """All points of one kernel, variant and data type, shortest first."""

    held: Sequence[Held]

    @property
    def first(self) -> Point:
        """Return the shortest, which names what all are of."""
        return self.held[0].point

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Return the lower quartile, the median and the upper quartile of predicted over measured time."""
        low, middle, high = np.percentile([one.ratio for one in self.held], [25, 50, 75])
        return float(low), float(middle), float(high)

    @property
    def worst(self) -> Held:
        """Return the point that is off by the largest factor."""
        return max(self.held, key=lambda one: abs(np.log(one.ratio)))

    @property
    def short(self) -> float:
        """Return the median ratio of the shortest third."""
        return statistics.median(one.ratio for one in self._shortest)

    @property
    def long(self) -> float:
        """Return the median ratio of the longest third."""
        return statistics.median(one.ratio for one in self.held[-self._third :])

    @property
    def short_by_s(self) -> float:
        """Return by how many seconds the shortest third is predicted too long, the median."""
        return statistics.median(one.predicted.seconds - measured_s(one.point) for one in self._shortest)

    @property
    def bases(self) -> Counter[Basis]:
        """Return how many predictions are made of what."""
        return Counter(one.predicted.basis for one in self.held)

    def share_within(self, spread: Spread) -> float:
        """Return the share of points whose measured times lie in the interval of their predictions."""
        return statistics.mean(spread.low <= 1 / one.ratio <= spread.high for one in self.held)

    @property
    def differs(self) -> Differs:
        """Return where the profiles are apart."""
        short, middle, long = self.short, self.quartiles[1], self.long
        short_is_off, long_is_off, off = (not _near(ratio, 1) for ratio in (short, long, middle))
        if _near(short, long) and _near(short, middle):  # one factor, on whichever side of the threshold each lies
            return "all alike" if off else "nothing"
        if short_is_off and long_is_off:
            return "all alike" if _near(short, long) else "short and long"
        if _near(short, long) or not (short_is_off or long_is_off):
            return "between" if off else "nothing"
        return "fixed time" if short_is_off else "rate"

    @property
    def _third(self) -> int:
        return max(len(self.held) // 3, 1)

    @property
    def _shortest(self) -> Sequence[Held]:
        return self.held[: self._third]


def _near(ratio: float, other: float) -> bool:
    return abs(ratio / other - 1) <= NEAR


class Against(NamedTuple):
    """What one profile says of another's points."""

    rows: list[Row]
    left_out: dict[str, int]
    """Points that the other says nothing of, by kernel."""
    same_machine: bool
    """Whether both are of one kind of GPU or host; else the other's efficiencies are taken on the first's machine."""


def against(profile: Profile, other: Profile) -> Against:
    """Return what ``other`` says of the idle points of ``profile``.

    It says what it would of its own machine where both are of the same GPU; of another one its efficiencies are taken,
    as a what-if on the cluster's figures does.
    """
    same = profile.machine.gpu == other.machine.gpu
    predictor = Predictor(other, None if same else _in_place_of(measured_cluster(other), measured_cluster(profile)))
    found: dict[tuple[str, str, Dtype], list[Held]] = defaultdict(list)
    left_out: Counter[str] = Counter()
    for point in profile.points:
        if point.condition != "idle":
            continue
        predicted = _predicted(predictor, point)
        if predicted:
            found[point.kernel, point.variant, point.dtype].append(Held(point, predicted))
        else:
            left_out[point.kernel] += 1
    rows = [Row(sorted(held, key=lambda one: measured_s(one.point))) for _, held in sorted(found.items())]
    return Against(rows, dict(left_out), same)


def _in_place_of(theirs: ClusterSpec, spec: ClusterSpec) -> ClusterSpec:
    """Return a machine under the name of another's GPU: the cost model refuses a profile of a GPU of another name, so
    that nobody mistakes one machine's times for another's; here that is what is asked for, and said in print.
    """
    return msgspec.structs.replace(spec, gpu=msgspec.structs.replace(spec.gpu, name=theirs.gpu.name))


def _predicted(predictor: Predictor, point: Point) -> Predicted | None:
    try:
        return predictor.predicted(point)
    except InputError:  # the machine has no such link, or no peak for the data type
        return None
