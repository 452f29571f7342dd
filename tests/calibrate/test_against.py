"""One profile held against another, of toy GPUs whose differences are known: 1 TFLOP/s, of which a GEMM gets half."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from calibrate.against import Against, Row, against
from calibrate.points import issue_s, largest_rate
from calibrate.published.reading import kernel_point, transfer_point
from sim.profile import Issue, Machine, Point, Profile, Spread
from sim.schedule.derive.kernels import KernelUse
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


def row(found: Against) -> Row:
    (only,) = found.rows
    return only


def test_a_profile_against_itself() -> None:
    mine = profile(gemms(10 * US, 4 * US))
    found = row(against(mine, mine))
    assert found.quartiles == pytest.approx((1, 1, 1))
    assert found.differs == "nothing"
    assert found.bases == {"measured": len(TOKENS)}


def test_a_longer_launch_shows_in_short_ones() -> None:
    """3 us more: 17 for 14 us of one token, 8205 for 8202 of the most; of the shortest third the middle two count."""
    found = row(against(profile(gemms(10 * US, 4 * US)), profile(gemms(13 * US, 4 * US))))
    assert found.short == pytest.approx((21 / 18 + 29 / 26) / 2)
    assert found.short_by_s == pytest.approx(3 * US)
    assert found.long == pytest.approx(1, abs=0.003)
    assert found.worst.ratio == pytest.approx(17 / 14)
    assert found.worst.point.shape == (1, 1000, 1000)
    assert found.differs == "fixed time"


def test_a_lower_rate_shows_in_long_ones() -> None:
    """5 for 4 us a token, behind 1 ms: 512 and 1024 tokens in the middle of the longest third."""
    found = row(against(profile(gemms(1000 * US, 4 * US)), profile(gemms(1000 * US, 5 * US))))
    assert found.short == pytest.approx(1, abs=0.005)
    assert found.long == pytest.approx(
        ((1000 + 5 * 512) / (1000 + 4 * 512) + (1000 + 5 * 1024) / (1000 + 4 * 1024)) / 2
    )
    assert found.differs == "rate"


def test_a_slower_clock_shows_in_all() -> None:
    mine = profile(gemms(10 * US, 4 * US))
    found = row(against(mine, profile(gemms(11 * US, 4.4 * US))))
    assert found.quartiles == pytest.approx((1.1, 1.1, 1.1))
    assert found.differs == "all alike"
    assert row(against(mine, profile(gemms(20 * US, 4.4 * US)))).differs == "short and long"


@pytest.mark.parametrize(
    ("short", "long", "differs"),
    [
        (0.952, 0.923, "all alike"),
        (0.945, 0.930, "all alike"),
        (1.049, 1.049, "nothing"),
        (1.051, 1.051, "all alike"),
        (0.949, 0.953, "nothing"),
        (0.97, 1.04, "nothing"),
        (0.94, 1.0, "fixed time"),
        (1.0, 1.06, "rate"),
    ],
)
def test_near_the_threshold(short: float, long: float, differs: str) -> None:
    """Thirds that are as near to each other as to 1 are not told apart by the side that each falls on."""
    mine = profile(gemms(0, 4 * US, (1, 2, 4)))
    factors = (short, (short + long) / 2, long)
    other = profile([gemm(2**n, 4 * US * 2**n * factor) for n, factor in enumerate(factors)])
    found = row(against(mine, other))
    assert (found.short, found.long) == (pytest.approx(short), pytest.approx(long))
    assert found.differs == differs


def test_what_differs_between() -> None:
    middle = [point.shape[0] in {16, 32, 64, 128, 256} for point in gemms(0, US)]
    times = [4 * US * tokens * (1.5 if inside else 1) for tokens, inside in zip(TOKENS, middle, strict=True)]
    other = profile([gemm(tokens, seconds) for tokens, seconds in zip(TOKENS, times, strict=True)])
    assert row(against(profile(gemms(0, 4 * US)), other)).differs == "nothing"
    assert row(against(profile(gemms(0, 4 * US, (1, 2, 16, 32, 64, 128, 256, 1024, 2048))), other)).differs == "between"


def test_the_share_within_the_interval_of_the_other() -> None:
    """Measured over predicted time: 14/17, 18/21, 26/29, 42/45, …; from 128 tokens on above 0.99."""
    found = row(against(profile(gemms(10 * US, 4 * US)), profile(gemms(13 * US, 4 * US))))
    assert found.share_within(Spread(low=0.9, high=1.1)) == pytest.approx(9 / 12)
    assert found.share_within(Spread(low=0.5, high=0.99)) == pytest.approx(7 / 12)


def test_what_predictions_are_made_of() -> None:
    mine = profile([
        *gemms(0, 4 * US, (64, 128, 2048)), gemm(64, 64 * 16 * US, fan=2000), gemm(64, 64 * 4 * US, variant="nt"),
        kernel_point(KernelUse("copy", "", "bf16", (1000,), 0, 1000), US),
    ])  # fmt: skip
    found = against(mine, profile(gemms(0, 4 * US, (32, 64, 256))))
    assert [(one.first.kernel, one.first.variant, dict(one.bases)) for one in found.rows] == [
        ("copy", "", {"roofline": 1}),
        ("gemm", "", {"measured": 1, "interpolated": 1, "extrapolated": 1, "borrowed": 1}),
        ("gemm", "nt", {"borrowed": 1}),
    ]
    assert [one.ratio for one in found.rows[1].held] == pytest.approx([1] * 4)


def test_another_machine_lends_its_efficiencies() -> None:
    """A GPU of twice the peak takes half as long: held against it at the same share of the peak, nothing differs."""
    mine, faster = profile(gemms(0, 4 * US)), profile(gemms(0, 2 * US), gpu="toy GPU 2", peak=2e12)
    found = against(mine, faster)
    assert not found.same_machine
    assert row(found).quartiles == pytest.approx((1, 1, 1))
    same = against(mine, msgspec.structs.replace(faster, machine=mine.machine, cluster=mine.cluster))
    assert same.same_machine
    assert row(same).quartiles == pytest.approx((0.5, 0.5, 0.5))


def test_transfers_without_points() -> None:
    """Links of 1 GB/s: of 1 MB a hop takes 1 ms, for the 2 ms that it took; of collectives nothing is said."""
    moved = [transfer_point(kind, "nvlink", 2, 10**6, 2e-3) for kind in ("exchange", "all_to_all")]
    host = transfer_point("offload", "dram", 1, 10**6, 1e-3)
    found = against(profile([*moved, host]), profile(gemms(0, 4 * US)))
    assert row(found).quartiles == pytest.approx((0.5, 0.5, 0.5))
    assert row(found).bases == {"roofline": 1}
    assert found.left_out == {"all_to_all": 1, "offload": 1}


def test_figures_of_a_profile() -> None:
    """2 of 4 us at the peak; the longest 8192 us for 4096 at the peak. Issuing takes 5 us and a launch of 2, or one."""
    found = profile(gemms(0, 4 * US), issue={"gemm": Issue(host_s=5 * US, launches=1)})
    rate = largest_rate(found, "gemm")
    assert rate is not None
    assert (rate.share, rate.point.shape[0]) == (pytest.approx(0.5), 2048)
    assert largest_rate(found, "gemm", "nt") is None
    assert largest_rate(found, "attention_forward") is None
    assert [issue_s(found, kernel) for kernel in ("gemm", "copy")] == pytest.approx([7 * US, 2 * US])
