"""Cluster files from what tools print. The files in ``printed`` have the form of these tools' output, the layouts are
those of common servers; none was taken from a machine.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import msgspec
import pytest

from experiments.verbs import cli
from sim.base.errors import InputError
from sim.setup.setup import Setup
from topology.cluster import Cluster, load_cluster
from topology.detect.machine import Machine, machine
from topology.detect.tools import GpuFacts, RdmaDevice, Topology, read_gpus, read_rdma, read_topology
from topology.specs import ClusterSpec

PRINTED = Path(__file__).with_name("printed")
H100 = GpuFacts("NVIDIA H100 80GB HBM3", 81559 * 2**20, 700.0, 5, 16)
A100 = GpuFacts("NVIDIA A100 80GB PCIe", 81920 * 2**20, 300.0, 4, 16)


def card(name: str, memory_gib: float) -> GpuFacts:
    return GpuFacts(name, memory_gib * 2**30, None, None, None)


def printed(name: str) -> str:
    return (PRINTED / name).read_text()


def read(name: str, gpus: str, *, ib: bool = True, like: str = "", chip: str = "") -> Machine:
    rdma = read_rdma(printed(f"{name}.ib.txt")) if ib else ()
    return machine(read_topology(printed(f"{name}.topo.txt")), read_gpus(printed(gpus)), rdma, like=like, chip=chip)


def topology_of(
    gpus: int, ways: dict[tuple[int, int | str], str], *, otherwise: str, nics: tuple[str, ...] = ()
) -> Topology:
    """Return a node with some ways between GPUs, or to NICs, and all others of one kind."""
    found = {
        (f"GPU{one}", f"GPU{other}" if isinstance(other, int) else other): ways.get(
            (one, other), ways.get((other, one), otherwise) if isinstance(other, int) else "SYS"
        )
        for one, other in product(range(gpus), (*range(gpus), *nics))
        if one != other
    }
    return Topology(gpus, nics, found, ())


def test_eight_h100_are_the_preset_but_for_what_their_tools_tell() -> None:
    """NV18 is 18 links of 25 GB/s; of 10 NICs 8 have 400 Gb/s, the others are for storage."""
    found = read("h100", "h100.gpus.csv")
    spec, preset = found.spec, load_cluster("hgx-h100")
    assert (spec.gpu.power_w, spec.nics_per_node, spec.nvlink) == (650, 8, preset.nvlink)
    assert [remark.partition(": ")[2] for remark in found.remarks] == ["mlx5_4, mlx5_5"]
    same = {"name": preset.name, "sources": preset.sources, "gpu": preset.gpu, "nic": preset.nic}
    assert msgspec.structs.replace(spec, **same) == preset
    assert spec.sources["nvlink.bytes_per_s"].startswith("nvidia-smi topo -m: NV18")
    assert spec.sources["nic.bytes_per_s"] == "ibstat: 400 Gb/s InfiniBand"
    assert spec.sources["hbm.bytes_per_s"] == f"hgx-h100: {preset.sources['hbm.bytes_per_s']}"


def test_a_dgx_a100_has_two_gpus_behind_each_switch() -> None:
    """NVLink hides the way over PCIe; that GPUs share a switch is seen by the NICs that both reach by PXB."""
    spec = read("a100", "a100.gpus.xml").spec
    preset = load_cluster("dgx-a100")
    assert spec.pcie == preset.pcie
    assert spec.nvlink == preset.nvlink
    assert (spec.nic, spec.socket) == (msgspec.structs.replace(preset.nic, per_node=8), preset.socket)
    assert spec.gpu == preset.gpu


def test_gpus_without_nvlink_exchange_through_the_host() -> None:
    """One card is in a slot of 8 lanes: all have its 15.75 GB/s. A NIC that is down is left out."""
    found = read("l20", "l20.gpus.csv")
    pcie, socket = found.spec.pcie, found.spec.socket
    assert pcie is not None
    assert socket is not None
    assert found.spec.nvlink is None
    assert (pcie.bytes_per_s, pcie.gpus_per_switch, pcie.peers, socket.per_node) == (15.75e9, 1, "switch", 2)
    assert pcie.uplink is not None
    assert pcie.uplink.both_ways_bytes_per_s == 38e9 / 2
    assert found.spec.nic is not None
    assert (found.spec.nic.bytes_per_s, found.spec.nic.per_node) == (12.5e9, 1)
    assert [remark.split()[0] for remark in found.remarks] == ["links", "no", "NICs"]
    route = Cluster(found.spec).route(0, 1)
    assert any("dram" in Cluster(found.spec).resources[one].name for one in route.resources)


def test_a_gpu_without_a_preset_takes_the_figures_of_a_file() -> None:
    for name in ("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 4090 D"):
        with pytest.raises(InputError, match=rf"no preset has the GPU '{name}' of 26 GB: .*L20-48GB \(l20-pcie\)"):
            machine(topology_of(2, {}, otherwise="PHB"), [card(name, 24)] * 2)
    with pytest.raises(InputError, match="`like` l20-pcie: it has L20-48GB, and this node NVIDIA GeForce RTX 4090"):
        read("workstation", "workstation.gpus.csv", ib=False, like="L20")
    found = read("workstation", "workstation.gpus.csv", ib=False, like="L20", chip="L20")
    assert [one.partition(";")[0] for one in found.remarks] == [
        "the GPU is NVIDIA GeForce RTX 4090",
        "its 24 GiB of memory are taken to be as fast as those of L20-48GB",
    ]
    assert (found.spec.gpu.name, found.spec.hbm.capacity_bytes) == ("L20-24GB", 24564 * 2**20)
    assert found.spec.socket is not None
    assert (found.spec.gpus_per_node, found.spec.socket.per_node, found.spec.nic) == (2, 1, None)


def test_consumer_cards_exchange_through_host_memory() -> None:
    """Also those behind one switch, where others would write into each other's memory."""
    found = read("workstation", "workstation.gpus.csv", ib=False)
    assert (found.spec.gpu.name, found.remarks) == ("RTX-4090-24GB", [])
    cards = card("NVIDIA GeForce RTX 4090", 24)
    behind_one = machine(topology_of(2, {}, otherwise="PIX"), [cards] * 2)
    assert "GPUs 0, 1 share PCIe switches" in behind_one.remarks[0]
    for one in (found, behind_one):
        cluster = Cluster(one.spec)
        assert any(cluster.resources[link].group == "dram" for link in cluster.route(0, 1).resources)


@pytest.mark.parametrize(("gpu", "memory_gib", "preset"), [
    ("NVIDIA H100 PCIe", 79.65, "h100-pcie"), ("NVIDIA H100 NVL", 93.58, "h100-nvl"), ("NVIDIA H20", 95.58, "hgx-h20"),
    ("NVIDIA A100-SXM4-40GB", 40, "dgx-a100-40gb"), ("NVIDIA A100-SXM4-80GB", 80, "dgx-a100"),
    ("NVIDIA L40S", 44.99, "l40s-pcie"), ("NVIDIA RTX A6000", 47.99, "rtx-a6000"), ("NVIDIA A10G", 22.49, "a10g"),
    ("NVIDIA RTX 6000 Ada Generation", 47.99, "rtx-6000-ada"), ("NVIDIA GH200 480GB", 95.58, "gh200"),
])  # fmt: skip
def test_a_gpu_is_found_by_what_its_driver_calls_it(gpu: str, memory_gib: float, preset: str) -> None:
    found = machine(topology_of(1, {}, otherwise="SYS"), [card(gpu, memory_gib)])
    assert found.spec.gpu.name == load_cluster(preset).gpu.name


@pytest.mark.parametrize("name", ["NVIDIA H20", "NVIDIA H100 PCIe", "NVIDIA H200", "NVIDIA GH200 480GB"])
def test_another_chip_is_no_chip_of_the_preset(name: str) -> None:
    """Unless it is named: then its memory still is that of this node."""
    node = topology_of(8, {}, otherwise="NV18")
    gpu = H100._replace(name=name, memory_bytes=97871 * 2**20)
    with pytest.raises(InputError, match=f"`like` hgx-h100: it has H100-SXM-80GB, and this node {name}"):
        machine(node, [gpu] * 8, like="hgx-h100")
    with pytest.raises(InputError, match="or set `chip` H100-SXM"):
        machine(node, [gpu] * 8, like="hgx-h100", chip="H200-SXM")
    named = machine(node, [gpu] * 8, like="hgx-h100", chip="H100-SXM").spec
    assert (named.gpu.name, named.hbm.capacity_bytes) == ("H100-SXM-96GB", 97871 * 2**20)


@pytest.mark.sweep
def test_what_the_driver_says_of_the_memory_counts() -> None:
    """An A100 of 40 GiB is the chip of dgx-a100, whose profile it keeps, with another memory."""
    gpu = GpuFacts("NVIDIA A100-SXM4-40GB", 40960 * 2**20, 400.0, 4, 16)
    found = machine(topology_of(8, {}, otherwise="NV12"), [gpu] * 8, like="dgx-a100")
    assert (found.spec.gpu.name, found.spec.hbm.capacity_bytes) == ("A100-SXM-40GB", 40 * 2**30)
    assert (found.spec.hbm.bytes_per_s, found.spec.profile) == (1.555e12, "a100-sxm")
    assert found.spec.sources["hbm.capacity_bytes"] == "nvidia-smi: memory.total"
    step = Setup("ulysses", model="llama3-8b", gpus=8, layers=1, seq="1536K")
    small, large = (step.replace(cluster=cluster).predicted() for cluster in (found.spec, "dgx-a100"))
    assert (small.fits, large.fits) == (False, True)
    assert small.report.evidence.profile == "a100-sxm"
    assert small.step_time_s > large.step_time_s


@pytest.mark.parametrize(("name", "gpus", "like"), [
    ("h100", "h100.gpus.csv", ""), ("a100", "a100.gpus.xml", ""), ("l20", "l20.gpus.csv", ""),
    ("workstation", "workstation.gpus.csv", "l20-pcie"),
])  # fmt: skip
def test_the_file_is_read_as_what_was_written(name: str, gpus: str, like: str, tmp_path: Path) -> None:
    found = read(name, gpus, ib=(PRINTED / f"{name}.ib.txt").exists(), like=like, chip="L20" if like else "")
    file = tmp_path / "cluster.toml"
    file.write_text(found.toml())
    assert load_cluster(str(file)) == found.spec
    figures = msgspec.to_builtins(found.spec)
    del figures["sources"]
    for path in found.spec.sources:
        node = figures
        for key in path.split("."):
            node = node[key]
        assert node is not None, path


def spec_of(topology: Topology, gpu: GpuFacts = H100, *rdma: RdmaDevice) -> ClusterSpec:
    return machine(topology, [gpu] * topology.gpus, rdma).spec


def test_bridges_between_pairs_are_no_nvlink_of_the_node() -> None:
    pairs = spec_of(topology_of(4, {(0, 1): "NV12", (2, 3): "NV12"}, otherwise="SYS"), A100)
    assert pairs.nvlink is not None
    assert pairs.pcie is not None
    assert (pairs.bridged_gpus, pairs.nvlink.bytes_per_s, pairs.pcie.peers) == (2, 300e9, "switch")
    apart = machine(topology_of(4, {(0, 2): "NV12", (1, 3): "NV12"}, otherwise="SYS"), [A100] * 4)
    assert apart.spec.nvlink is None
    assert "2 of 6 pairs of GPUs are joined by NVLink, of 12 links" in apart.remarks[0]
    two = spec_of(topology_of(2, {}, otherwise="NV12"), A100)
    assert two.nvlink is not None
    assert (two.nvlink.bytes_per_s, two.nvlink.reduces, two.gpu.name) == (300e9, False, "A100-PCIe-80GB")
    assert two.sources["nvlink.latency_s"].startswith("dgx-a100: ")


def test_links_between_each_pair_are_those_of_a_pair() -> None:
    """Four H100 without switches have 6 links to each other one: 150 GB/s, and nothing that sums."""
    found = machine(topology_of(4, {}, otherwise="NV6"), [H100] * 4)
    assert found.spec.nvlink is not None
    assert (found.spec.nvlink.bytes_per_s, found.spec.nvlink.reduces, found.spec.nvlink.peer_sms) == (150e9, False, 12)
    assert (found.spec.bridged_gpus, found.remarks) == (4, [])
    for part in (spec_of(topology_of(2, {}, otherwise="NV18")), spec_of(topology_of(8, {}, otherwise="NV17"))):
        assert part.bridged_gpus is None, "two GPUs of a node with switches; a port without one of its links"


def test_switches_that_differ_are_said() -> None:
    uneven = topology_of(4, {(0, 1): "PIX", (1, 2): "PXB", (0, 2): "PXB"}, otherwise="NODE")
    found = machine(uneven, [A100] * 4)
    assert found.spec.pcie is not None
    assert found.spec.pcie.gpus_per_switch == 1
    assert "PCIe switches have GPUs 0, 1, 2; 3" in found.remarks[0]
    alternating = topology_of(4, {(0, 2): "PIX", (1, 3): "PIX"}, otherwise="NODE")
    assert "GPUs 0, 2; 1, 3" in machine(alternating, [A100] * 4).remarks[0], "neighbours share a switch in a cluster"


def test_gpus_take_their_nearest_nics() -> None:
    """Of 3 NICs for 4 GPUs two can be shared evenly; without ibstat their rate is that of the preset."""
    nics = ("mlx5_0", "mlx5_1", "mlx5_2")
    near: dict[tuple[int, int | str], str] = {
        (0, "mlx5_0"): "PIX", (1, "mlx5_0"): "PIX", (2, "mlx5_1"): "PIX", (3, "mlx5_1"): "PIX", (3, "mlx5_2"): "PIX"
    }  # fmt: skip
    found = machine(topology_of(4, near, otherwise="NV18", nics=nics), [H100] * 4)
    assert found.spec.nic is not None
    assert (found.spec.nic.per_node, found.spec.nic.bytes_per_s) == (2, 50e9)
    assert found.spec.pcie is not None
    assert found.spec.pcie.gpus_per_switch == 2
    assert "3 NICs for 4 GPUs cannot be shared evenly" in found.remarks[0]
    down = [RdmaDevice(name, 0.0, "InfiniBand") for name in nics]
    none = machine(topology_of(4, near, otherwise="NV18", nics=nics), [H100] * 4, down)
    assert none.spec.nic is None
    assert "no port of mlx5_0, mlx5_1, mlx5_2 is active" in none.remarks[0]


def test_tools_that_contradict_each_other_are_refused() -> None:
    node = topology_of(2, {}, otherwise="NV18", nics=("mlx5_0",))
    with pytest.raises(InputError, match="`topo` has 2 GPUs, `gpus` has 3"):
        machine(node, [H100] * 3)
    with pytest.raises(InputError, match="`ib` does not name mlx5_0, which `topo` has; it names mlx4_0"):
        machine(node, [H100] * 2, [RdmaDevice("mlx4_0", 4e11, "InfiniBand")])
    with pytest.raises(InputError, match="different GPUs"):
        machine(node, [H100, A100])
    with pytest.raises(InputError, match="of 43 GB"):
        machine(node, [H100._replace(memory_bytes=40 * 2**30)] * 2)


@pytest.mark.parametrize(("reads", "text", "told"), [
    (read_topology, "", "no line names GPU0"),
    (read_topology, "No devices were found", "no line names GPU0"),
    (read_topology, "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV4\t0-3\n", "row of GPU1 does not tell 2 ways"),
    (read_topology, "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tfast\nGPU1\tNV4\t X \n", "row of GPU0"),
    (read_gpus, "", "names no GPU"),
    (read_gpus, "NVIDIA H100 80GB HBM3, 81559 MiB\n", "names no GPU"),
    (read_gpus, "<?xml version='1.0'?><nvidia_smi_log>", "no XML"),
    (read_gpus, "<nvidia_smi_log></nvidia_smi_log>", "names no GPU"),
    (read_rdma, "ibpanic: no devices", "no line begins with CA"),
])  # fmt: skip
def test_what_no_tool_prints_is_refused(reads: object, text: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        reads(text)  # type: ignore[operator]


def test_figures_that_a_driver_does_not_tell_are_left_to_the_preset() -> None:
    text = "name, power.limit [W], pcie.link.gen.max\nNVIDIA L20, [N/A], [Not Supported]\n"
    assert read_gpus(text) == [GpuFacts("NVIDIA L20", None, None, None, None)]
    bare = "name, memory.total [MiB]\nNVIDIA L20, 46068\n"
    assert read_gpus(bare)[0].memory_bytes == 46068 * 2**20, "with nounits the unit stands in the head alone"


def test_the_command_writes_and_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["machine", "--topo", str(PRINTED / "h100.topo.txt"), "--gpus", str(PRINTED / "h100.gpus.csv")]
    cli.main(given)
    assert capsys.readouterr().out == read("h100", "h100.gpus.csv", ib=False).toml()
    file = tmp_path / "mine.toml"
    cli.main([*given, "--ib", str(PRINTED / "h100.ib.txt"), "--out", str(file)])
    assert "no NIC of the GPUs" in capsys.readouterr().out
    assert load_cluster(str(file)) == read("h100", "h100.gpus.csv").spec


@pytest.mark.parametrize(("given", "told"), [
    ((), "this machine has no nvidia-smi: run nvidia-smi topo -m where the GPUs are"),
    (("--topo", "x"), "--topo and --gpus belong together"),
    (("--topo", "none.txt", "--gpus", "none.csv"), "--topo file 'none.txt' cannot be read"),
])  # fmt: skip
def test_mistakes_are_one_line(
    given: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit):
        cli.main(["machine", *given])
    assert told in capsys.readouterr().err


@pytest.mark.gloo
def test_this_machine_is_asked_where_no_file_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By tools that stand in for those of a machine with GPUs."""
    for tool, told in (
        ("nvidia-smi", f'[ "$1" = topo ] && cat {PRINTED}/l20.topo.txt || cat {PRINTED}/l20.gpus.csv'),
        ("ibstat", f"cat {PRINTED}/l20.ib.txt"),
    ):
        (tmp_path / tool).write_text(f"#!/bin/sh\n{told}\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    cli.main(["machine"])
    text = capsys.readouterr().out
    assert '"socket.dram.capacity_bytes" = "sysconf(SC_PHYS_PAGES), of a socket"' in text
    assert "bytes_per_s = 12.5e9" in text
