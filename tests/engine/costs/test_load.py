"""Kernels under load, by hand: which take longer, by how much, and what another power limit makes of them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

import longstep
from sim.base.errors import InputError
from sim.engine.costs.cost import CostModel
from sim.engine.costs.load import Load
from sim.engine.intervals.interval import interval
from sim.engine.intervals.learned import NOTHING
from sim.schedule.derive.kernels import KernelUse
from sim.words.profile import Bound, Held, PowerLaw, Profile, Sustained, at_rates, load_profile
from topology.cluster import Cluster, load_cluster

GEMM = KernelUse("gemm", "", "bf16", (4096, 4096, 4096), 2 * 4096**3, 3 * 2 * 4096**2)
LOADED = Sustained(longer=1.2, low=1.1, high=1.3, rises_s=(1e-5, 1e-4), falls_s=(1e-3, 1e-2))
PEAK_S = 0.1e-3
"""What it takes at the peak, of which nothing depends where no rate held is known."""
LAW = PowerLaw(exponent=0.5, low=0.25, high=1.0, from_w=500, to_w=1000)


def loaded(**changes: Any) -> Load:
    profile = msgspec.structs.replace(
        load_profile("h100-sxm"), **{"sustained": {"gemm": LOADED}, "power": LAW, "rates": "sustained"} | changes
    )
    return Load(profile, 1000)


@pytest.mark.parametrize(
    ("seconds", "burst", "sustained"),
    [
        (1e-6, 1, 1),
        (1e-5, 1, 1),  # too short to reach the limit
        (math.sqrt(1e-9), 1, 1.2**0.5),
        (1e-4, 1, 1.2),
        (1e-3, 1, 1.2),
        (math.sqrt(1e-5), 1, 1.2**0.5),
        (1e-2, 1, 1),  # a short run of it has lowered the clock
        (1, 1, 1),
    ],
)
def test_kernels_between_the_tiny_and_the_long_take_longer(seconds: float, burst: float, sustained: float) -> None:
    assert loaded().longer(GEMM, seconds, PEAK_S, 1000) == pytest.approx(sustained)
    assert loaded(rates="burst").longer(GEMM, seconds, PEAK_S, 1000) == pytest.approx(burst)
    assert loaded(rates=None).longer(GEMM, seconds, PEAK_S, None) == pytest.approx(burst)


@pytest.mark.parametrize(
    ("power_w", "of_1_ms", "of_100_ms"),
    [
        (250, 1.2 * 2, 2),
        (1000, 1.2, 1),
        (1440, 1.0, 1 / 1.2),  # here the clock of short runs can be held
        (9000, 1.0, 1 / 1.2),
    ],
)
def test_rates_under_load_follow_the_power_limit(power_w: float, of_1_ms: float, of_100_ms: float) -> None:
    """In short runs only those of long kernels do."""
    assert loaded().longer(GEMM, 1e-3, PEAK_S, power_w) == pytest.approx(of_1_ms)
    assert loaded().longer(GEMM, 0.1, PEAK_S, power_w) == pytest.approx(of_100_ms)
    assert loaded(rates="burst").longer(GEMM, 1e-3, PEAK_S, power_w) == pytest.approx(1)
    assert loaded(rates="burst").longer(GEMM, 0.1, PEAK_S, power_w) == pytest.approx(of_100_ms)


HELD = msgspec.structs.replace(LOADED, held=Held(share=0.5, low=0.4, high=0.6))


@pytest.mark.parametrize(
    ("seconds", "of_peak", "factor"),
    [
        (1e-3, 0.8, 1.2),  # its points have not lowered the clock
        (math.sqrt(1e-5), 0.8, math.sqrt(1.2 * 1.6)),
        (1e-2, 0.8, 1.6),
        (1, 0.8, 1.6),
        (1, 0.4, 1),  # it never was as fast as that
    ],
)
def test_long_kernels_get_no_more_than_the_rate_held(seconds: float, of_peak: float, factor: float) -> None:
    def longer(**changes: Any) -> float:
        return loaded(sustained={"gemm": HELD}, **changes).longer(GEMM, seconds, of_peak * seconds, 1000)

    assert longer() == pytest.approx(factor)
    assert longer(rates="burst") == longer(bound="low") == pytest.approx(1)
    assert longer(bound="high") >= longer()


def test_twice_the_tokens_beyond_the_points_take_no_longer_than_the_rate_held() -> None:
    """B200: 16K tokens are the longest point, 5.7 ms; gradients of weights into fp32 hold as much less as they get."""
    cluster, known = Cluster(load_cluster("hgx-b200")), load_profile("b200-sxm")
    burst, under_load = (CostModel(cluster, at_rates(known, rates)) for rates in ("burst", "sustained"))
    rate = known.sustained["gemm"].held
    assert rate is not None
    use = KernelUse("gemm", "", "bf16", (2**19, 4096, 8192), 2**20 * 2**25, 2 * (2**19 * 12288 + 2**25))
    least_s = use.flops / 2.25e15 / rate.share
    assert burst.kernel_seconds(0, use)[0] < 0.9 * least_s
    for variant in ("nn", "tn into fp32"):
        longer = known.forms[f"gemm {variant}"].longer
        seconds, _ = under_load.kernel_seconds(0, use._replace(variant=variant))
        assert seconds == pytest.approx(least_s * longer), variant


@pytest.mark.parametrize("rates", ["burst", "sustained"])
@pytest.mark.parametrize(
    ("bound", "power_w", "factor"), [("low", 1000, 1), ("high", 1000, 1.3), ("low", 250, 1), ("high", 250, 1.3 * 4)]
)
def test_bounds_lie_at_both_rates(bound: Bound, power_w: float, factor: float, rates: str) -> None:
    bounded = loaded(bound=bound, rates=rates)
    assert bounded.longer(GEMM, 1e-3, PEAK_S, power_w) == pytest.approx(factor)
    ends = {250: {"low": math.sqrt(2), "high": 4}, 1000: {"low": 1, "high": 1}}
    assert bounded.longer(GEMM, 0.1, PEAK_S, power_w) == pytest.approx(ends[int(power_w)][bound])


def test_other_power_limits_are_said() -> None:
    assert loaded().note(1000) == loaded().note(None) == ""
    assert loaded().note(750) == ("gpu.power_w 750, measured at 1000 W: rates follow its power of 0.5 (0.25 to 1)")
    assert loaded().note(400).endswith(", which sources show for 500 to 1000 W only")
    assert loaded(power=None).note(750).endswith("the profile does not say how rates follow it, they stay")


def test_what_memory_bounds_keeps_its_rate() -> None:
    """Of 128 tokens a product reads its weights longer than it computes, of 4096 it does not."""
    cluster = Cluster(load_cluster("hgx-h100"))
    known = load_profile("h100-sxm")
    burst, under_load = CostModel(cluster, at_rates(known, "burst")), CostModel(cluster, at_rates(known, "sustained"))
    for tokens, longer in ((128, 1.0), (4096, known.sustained["gemm"].longer)):
        nbytes = 2 * (2 * tokens * 8192 + 8192**2)
        use = KernelUse("gemm", "", "bf16", (tokens, 8192, 8192), 2 * tokens * 8192**2, nbytes)
        assert under_load.kernel_seconds(0, use)[0] == pytest.approx(longer * burst.kernel_seconds(0, use)[0]), tokens


def test_a_weight_gradient_into_fp32_is_a_kernel_of_its_own() -> None:
    """It takes its factor over the forward pass, without a note; what has points of its own does not."""
    cluster, known = Cluster(load_cluster("hgx-h100")), at_rates(load_profile("h100-sxm"), "burst")
    cost = CostModel(cluster, known)
    plain, _ = cost.kernel_seconds(0, GEMM)
    for variant in ("nn", "tn", "tn into fp32"):
        seconds, note = cost.kernel_seconds(0, GEMM._replace(variant=variant))
        assert (seconds / plain, note) == (pytest.approx(known.forms[f"gemm {variant}"].longer), "")
    own = msgspec.structs.replace(next(point for point in known.points if point.kernel == "gemm"), variant="tn")
    measured = CostModel(cluster, msgspec.structs.replace(known, points=(*known.points, own)))
    use = KernelUse("gemm", "tn", own.dtype, own.shape, own.flops, own.nbytes)
    assert measured.kernel_seconds(0, use)[0] == pytest.approx(own.median_s)


def predicted(**changes: Any) -> longstep.Prediction:
    fields: dict[str, Any] = {"model": "llama3-8b", "seq": "16K", "cluster": "hgx-b200", "gpus": 1, "seeds": 1}
    return longstep.predict("single", **({"scope": "attention"} | fields | changes))


@pytest.mark.sweep
def test_layers_take_sustained_rates_and_attention_alone_those_of_short_runs() -> None:
    for scope, rates in (("attention", "burst"), ("layer", "sustained")):
        found = predicted(scope=scope)
        other = {"burst": "sustained", "sustained": "burst"}[rates]
        against = predicted(scope=scope, set={"profile.rates": other})
        assert (found.report.evidence.rates, against.report.evidence.rates) == (rates, other)
        assert (found.step_time_s < against.step_time_s) == (rates == "burst")
        of_points, of_other = (interval(one.simulation, NOTHING) for one in (found, against))
        assert of_points == pytest.approx(of_other)
        assert found.interval is not None
        assert found.interval.low_s < against.step_time_s < found.interval.high_s


def test_what_a_small_kernel_takes_can_be_set() -> None:
    none, some, most = (predicted(scope="layer", set={"profile.replayed_s": x}) for x in ("0", "*1", "*10"))
    assert none.step_time_s < some.step_time_s < most.step_time_s
    assert most.step_time_s - none.step_time_s == pytest.approx(10 * (some.step_time_s - none.step_time_s), rel=0.05)


def test_a_gpu_with_a_lower_power_limit_is_slower() -> None:
    whole, capped = (predicted(scope="layer", set={"cluster.gpu.power_w": watts}) for watts in (1000, 750))
    assert 1.1 < capped.step_time_s / whole.step_time_s < (1000 / 750) ** 0.65
    assert any("gpu.power_w 750" in note for note in capped.report.evidence.notes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"set": {"profile.rates": "fast"}}, "`set profile.rates`"),
        ({"set": {"profile.replayed_s": "-1"}}, "profile.replayed_s=-1"),
        ({"set": {"profile.replayed_s": "1e-6"}, "profile": "datasheet"}, "no such figure"),
        ({"set": {"profile.points": "1"}}, "profile.rates"),
        ({"set": {"profile.rates": "sustained"}, "profile": "datasheet"}, "short runs only"),
    ],
)
def test_rates_that_there_are_none_of_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        predicted(**given)


def test_profiles_without_load_say_so() -> None:
    known: Profile = load_profile("a800-ultraattn")
    assert not known.sustained
    found = predicted(cluster="a800", profile=known, scope="layer")
    assert found.report.evidence.rates == "burst"
    assert Load(known, 400).longer(GEMM, 1e-3, PEAK_S, 300) == 1
