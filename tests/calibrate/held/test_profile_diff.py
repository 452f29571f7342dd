"""One profile held against another, of toy GPUs whose differences are known: 1 TFLOP/s, of which a GEMM gets half."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from calibrate.held.profile_diff import KernelDiff, ProfileDiff, profile_diff
from calibrate.published.reading import kernel_point, transfer_point
from sim.schedule.derive.kernels import KernelUse
from sim.words.profile import Machine, Point, Profile
from tests.helpers import make_cluster_spec
from topology.specs import GpuSpec

TOKENS = tuple(2**n for n in range(12))
US = 1e-6


def gemm(tokens: int, seconds: float, fan: int = 1000, variant: str = "") -> Point:
    """2 MFLOP a token: 2 us at the peak."""
    return kernel_point(KernelUse("gemm", variant, "bf16", (tokens, fan, fan), 2 * tokens * fan * fan, 0), seconds)


def gemms(fixed_s: float, per_token_s: float, tokens: tuple[int, ...] = TOKENS) -> list[Point]:
    return [gemm(count, fixed_s + count * per_token_s) for count in tokens]


def profile(points: list[Point], gpu: str = "toy GPU", peak: float = 1e12, **changes: Any) -> Profile:
    spec = make_cluster_spec(gpu=GpuSpec(name=gpu, sms=100, peak_flops_per_s={"bf16": peak}, launch_s=2 * US))
    found = Profile(
        name="toy", created="today", command="by hand", complete=True, machine=Machine(gpu=gpu, software={}),
        cluster=msgspec.to_builtins(spec, str_keys=True), points=tuple(points),
    )  # fmt: skip
    return msgspec.structs.replace(found, **changes)


def row(found: ProfileDiff) -> KernelDiff:
    (only,) = found.rows
    return only


def test_a_profile_against_itself() -> None:
    mine = profile(gemms(10 * US, 4 * US))
    found = row(profile_diff(mine, mine))
    assert found.spread == pytest.approx((1, 1, 1))
    assert (found.name, len(found.points)) == ("gemm bf16", len(TOKENS))


def test_a_longer_launch_is_worst_for_the_shortest() -> None:
    """3 us more: 17 for 14 us of one token, 21 for 18 of two, ... 8205 for 8202 of the most."""
    found = row(profile_diff(profile(gemms(10 * US, 4 * US)), profile(gemms(13 * US, 4 * US))))
    ratios = [(13 + 4 * tokens) / (10 + 4 * tokens) for tokens in TOKENS]
    assert [one.ratio for one in found.points] == pytest.approx(ratios)
    assert (found.worst.ratio, found.worst.point.shape) == (pytest.approx(17 / 14), (1, 1000, 1000))
    low, median, high = found.spread
    assert ratios[-1] < low < ratios[-2]
    assert median == pytest.approx((ratios[5] + ratios[6]) / 2)
    assert ratios[1] < high < ratios[0]


def test_half_the_time_is_as_far_off_as_twice() -> None:
    mine = profile(gemms(0, 4 * US, (1, 2, 4)))
    other = profile([gemm(tokens, 4 * US * tokens * factor) for tokens, factor in ((1, 1.9), (2, 1.0), (4, 0.5))])
    assert row(profile_diff(mine, other)).worst.ratio == pytest.approx(0.5)


def test_kernels_variants_and_data_types_stand_apart() -> None:
    copy = kernel_point(KernelUse("copy", "", "bf16", (1000,), 0, 1000), US)
    mine = profile([*gemms(0, 4 * US, (64, 2048)), gemm(64, 64 * 4 * US, variant="nt"), copy])
    found = profile_diff(mine, profile(gemms(0, 4 * US, (32, 64, 256))))
    assert [(one.name, len(one.points)) for one in found.rows] == [
        ("copy bf16", 1),
        ("gemm bf16", 2),
        ("gemm nt bf16", 1),
    ]


def test_another_machine_lends_its_efficiencies() -> None:
    """A GPU of twice the peak takes half as long: held against it at the same share of the peak, nothing differs."""
    mine, faster = profile(gemms(0, 4 * US)), profile(gemms(0, 2 * US), gpu="toy GPU 2", peak=2e12)
    found = profile_diff(mine, faster)
    assert not found.same_machine
    assert row(found).spread == pytest.approx((1, 1, 1))
    same = profile_diff(mine, msgspec.structs.replace(faster, machine=mine.machine, cluster=mine.cluster))
    assert same.same_machine
    assert row(same).spread == pytest.approx((0.5, 0.5, 0.5))


def test_transfers_without_points() -> None:
    """Links of 1 GB/s: of 1 MB a hop takes 1 ms, for the 2 ms that it took; of collectives nothing is said."""
    moved = [transfer_point(kind, "nvlink", 2, 10**6, 2e-3) for kind in ("exchange", "all_to_all")]
    host = transfer_point("offload", "dram", 1, 10**6, 1e-3)
    found = profile_diff(profile([*moved, host]), profile(gemms(0, 4 * US)))
    assert row(found).spread == pytest.approx((0.5, 0.5, 0.5))
    assert found.left_out == {"all_to_all": 1, "offload": 1}
