"""Kernels that software is said to run: attention of another generation than the profile's."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, get_args

import msgspec
import pytest

import longstep
from sim.base.errors import InputError
from sim.base.presets import load_toml
from sim.engine.costs.cost import CostModel
from sim.engine.costs.measured import measured_cluster
from sim.engine.costs.tiles import use_of
from sim.schedule.derive.kernels import ATTENTION_KERNELS, attention_use
from sim.schedule.ir.masks import CAUSAL, FULL, Band
from sim.setup.answers.answer import rests_on
from sim.setup.setup import Setup
from sim.software.attention import Tables, _tables, attending, kernels_of
from sim.software.attention import named as named_on
from sim.words.options import FusedName
from sim.words.profile import Profile, load_profile, shipped_profile
from tests.helpers import slow_but
from topology.cluster import Cluster, load_cluster

CLUSTERS = ("dgx-a100", "a800", "hgx-h100", "h800", "hgx-h200", "hgx-b200", "gb200-nvl72", "gb300-nvl72")
THERE = [(name, kernel) for name in CLUSTERS for kernel in kernels_of(load_cluster(name).gpu.chip)]
SMALL = {"model": "tiny", "seq": "4K", "cluster": "hgx-h100", "gpus": 2, "scope": "attention", "seeds": 1}


@cache
def of(cluster: str, kernel: FusedName | None) -> Profile:
    """The profile of a cluster, with attention of a kernel."""
    spec = load_cluster(cluster)
    assert spec.profile
    own = load_profile(spec.profile)
    return own if kernel is None else attending(own, kernel, spec.gpu.chip)


def tflops(cluster: str, kernel: FusedName | None, backward: bool, band: Band, head_dim: int = 128) -> float:
    """The rate of 16K tokens in short runs, as many heads as 2048 dimensions make."""
    heads = 2048 // head_dim
    use = attention_use(backward, "bf16", (1, 16384, heads, head_dim), 16384, heads, band)
    seconds, note = CostModel(Cluster(load_cluster(cluster)), of(cluster, kernel)).kernel_seconds(0, use)
    assert not note
    return use.flops / seconds / 1e12


@pytest.mark.parametrize("there", slow_but([("hgx-h100", "flash-attention-2"), ("hgx-b200", "cudnn")], THERE))
def test_points_of_a_kernel_come_back(there: tuple[str, FusedName]) -> None:
    cluster, kernel = there
    profile = of(cluster, kernel)
    assert profile.attention is not None
    assert profile.attention.kernel == kernel
    cost = CostModel(Cluster(load_cluster(cluster)), profile)
    points = [point for point in profile.points if point.kernel in ATTENTION_KERNELS and point.shape[1] >= 4096]
    assert {point.kernel for point in points} == {*ATTENTION_KERNELS}
    for point in points:
        assert cost.kernel_seconds(0, use_of(point)) == (pytest.approx(point.median_s), "")


@pytest.mark.parametrize(
    ("backward", "band", "head_dim", "fa2", "fa3"),
    [
        (False, CAUSAL, 128, 335, 642),  # arXiv:2407.08608 Fig. 5
        (False, FULL, 128, 370, 648),
        (False, CAUSAL, 64, 299, 497),
        (False, FULL, 64, 324, 497),
        (True, FULL, 128, 322, 561),  # its Fig. 6
        (True, FULL, 64, 291, 474),
    ],
)
def test_the_third_generation_on_hopper_is_so_much_faster(
    backward: bool, band: Band, head_dim: int, fa2: float, fa3: float
) -> None:
    """Its abstract says 1.5 to 2 times."""
    rates = [tflops("hgx-h100", kernel, backward, band, head_dim) for kernel in get_args(FusedName)[1:3]]
    assert rates == pytest.approx([fa2, fa3], rel=0.02)
    assert 1.5 < rates[1] / rates[0] < 2


def test_nothing_but_attention_changes() -> None:
    before, after = of("hgx-h100", None), of("hgx-h100", "flash-attention-2")
    for name in ("points", "disagreement", "residuals", "beyond", "sustained"):
        one, other = (getattr(profile, name) for profile in (before, after))
        if isinstance(one, dict):
            one, other = ({k: v for k, v in found.items() if k not in ATTENTION_KERNELS} for found in (one, other))
        else:
            one, other = ([p for p in found if p.kernel not in ATTENTION_KERNELS] for found in (one, other))
        assert one == other, name
    changed = {"points", "attention", "tiles", "blocks_per_sm", "disagreement", "residuals", "beyond", "sustained"}
    for field in msgspec.structs.fields(Profile):
        if field.name not in {*changed, "sources"}:
            assert getattr(before, field.name) == getattr(after, field.name), field.name
    assert "H800" in after.sources["attention"]
    assert before.sources | {"attention": ""} == after.sources | {"attention": ""}


def test_the_kernel_of_the_profile_is_the_default_and_others_are_made_once() -> None:
    profile = load_profile("h100-sxm")
    assert attending(profile, "flash-attention-3", "H100-SXM") is profile
    again = attending(profile, "cudnn", "H100-SXM")
    assert attending(profile, "cudnn", "H100-SXM") is again
    own = longstep.predict("ring", **SMALL)
    named = longstep.predict("ring", **SMALL, set={"software.attention": "flash-attention-3"})
    assert named.report == own.report
    slower = own.replace(set={"software.attention": "flash-attention-2"})
    assert slower.step_time_s > own.step_time_s
    lines = [next(iter(rests_on(one))) for one in (own, slower)]
    assert ["; attention: FlashAttention-3; " in lines[0], "; attention: FlashAttention-2; " in lines[1]] == [
        True,
        True,
    ]


def test_h200_has_the_second_generation_of_h100() -> None:
    for backward in (False, True):
        rates = [tflops(name, "flash-attention-2", backward, CAUSAL) for name in ("hgx-h100", "hgx-h200")]
        assert rates[0] == pytest.approx(rates[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"software.attention": "flash"}, "software.attention=flash: allowed are flash-attention-1, .*cutlass"),
        ({"software.attentions": "cudnn"}, "unknown key 'attentions'.*attention"),
        (
            {"software.attention": "flash-attention-4"},
            "no figures of it on H100-SXM, but of flash-attention-2, flash-attention-3, cudnn; set one of these",
        ),
    ],
)
def test_a_kernel_without_figures_is_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        longstep.predict("ring", **SMALL, set=changes)


def test_it_goes_with_a_profile_and_with_flash_attention() -> None:
    fa2 = {"software.attention": "flash-attention-2"}
    with pytest.raises(InputError, match="at datasheet rates all kernels are alike; set `profile`, or leave it out"):
        longstep.predict("ring", **SMALL, profile="datasheet", set=fa2)
    unfused = fa2 | {"schedule.kernel": "standard"}
    with pytest.raises(InputError, match=r"schedule\.kernel=standard: it names the kernel of flash attention"):
        longstep.predict("single", **SMALL | {"gpus": 1}, set=unfused)


def test_every_profile_says_which_kernel_it_has() -> None:
    said = {load_cluster(name).profile: of(name, None).attention for name in CLUSTERS}
    assert {profile: one and one.kernel for profile, one in said.items()} == {
        "a100-sxm": "flash-attention-2",
        "a800-ultraattn": "flash-attention-2",
        "h100-sxm": "flash-attention-3",
        "h800-ultraattn": "flash-attention-2",
        "h200-sxm": "flash-attention-3",
        "b200-sxm": "",
        "gb200-nvl72": "cudnn",
        "gb300-nvl72": "cudnn",
    }


def test_tables_are_of_as_many_sms_at_the_same_peak() -> None:
    """Else points, which count as shares of the peak of the profile that they are put into, would be other times."""
    specs = [load_cluster(name) for name in CLUSTERS]
    tables = load_toml("table", "attention", Tables, "sim/software", "").chips
    assert tables.keys() == {spec.gpu.chip for spec in specs}
    for spec in specs:
        for name in tables[spec.gpu.chip].values():
            gpu = measured_cluster(shipped_profile(name)).gpu
            assert (gpu.sms, gpu.peak_flops_per_s["bf16"]) == (spec.gpu.sms, spec.gpu.peak_flops_per_s["bf16"]), name


def test_what_torch_picks_is_a_kernel_of_the_gpu() -> None:
    """FlashAttention-2 on H100, cuDNN on B200, and the profile's own where nobody has said it."""
    for cluster, picked in (("hgx-h100", "flash-attention-2"), ("hgx-b200", "cudnn")):
        setup = {"model": "llama3-8b", "cluster": cluster, "seq": "8K", "gpus": 2, "seeds": 1, "scope": "attention"}
        named, sdpa = (
            longstep.predict("ring", **setup, set={"software.attention": kernel})  # type: ignore[arg-type]
            for kernel in (picked, "sdpa")
        )
        assert sdpa.report == named.report
    assert named_on("sdpa", "L20") is None
    assert set().union(*_tables().sdpa.values()) == set(_tables().chips)


def test_what_torch_picks_depends_on_its_version() -> None:
    """On H100 torch 2.5.0 took cuDNN, 2.5.1 no longer; the first line of the evidence says which version."""
    setup = Setup(model="llama3-8b", cluster="hgx-h100", seq="32K", gpus=2, scope="attention", software="torchtitan")
    older, newer = (setup.replace(set={"software.torch": version}).predicted() for version in ("2.5.1", "2.5"))
    assert newer.step_time_s < 0.8 * older.step_time_s
    for found, kernel in ((older, "FlashAttention-2"), (newer, "cuDNN")):
        said = rests_on(found)[0].partition("; attention: ")[2]
        assert said.startswith(kernel), said
        assert ", what SDPA of torch 2.5" in said
    assert setup.predicted().report.step_time_s == older.report.step_time_s  # its own is 2.8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"set": {"software.torch": "2.5"}}, "what software.attention=sdpa picks, and attention is flash-attention-2"),
        ({"set": {"software.torch": "2.5"}, "software": None}, "and attention is of the profile; set both"),
        ({"set": {"software.torch": "nightly"}}, "software.torch=nightly: expected a version such as 2.5.1"),
        ({"set": {"software.torch": "2." + "9" * 5000}}, "expected a version such as 2.5.1"),
        ({"set": {"software.torch": "2.1", "software.attention": "sdpa"}}, "picks on H100-SXM is known from 2.2 on"),
        (
            {"cluster": "hgx-b200", "set": {"software.torch": "2.5", "software.attention": "sdpa"}},
            "picks on B200-SXM is known from 2.7 on",
        ),
    ],
)
def test_versions_of_torch_that_decide_nothing_are_refused(fields: dict[str, Any], message: str) -> None:
    setup = Setup(model="llama3-8b", cluster="hgx-h100", seq="8K", gpus=2, software="nanotron")
    with pytest.raises(InputError, match=re.escape(message)):
        setup.replace(**fields).resolved()


@pytest.mark.parametrize(("overlap", "leave"), [("chunks", True), ("gradients", False), ("none", False)])
def test_products_in_chunks_leave_sms_to_what_is_sent(overlap: str, *, leave: bool) -> None:
    """Elsewhere those on Hopper are persistent grids, whose blocks wait for SMs."""
    step = {"schedule.tp_overlap": overlap}
    found = Setup("single", model="tiny", seq="1K", gpus=2, tp_degree=2, scope="step", set=step).resolved()
    assert found.profile is not None
    assert (not found.profile.persistent) is leave
