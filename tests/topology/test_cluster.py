"""Clusters: presets with a source for every figure, fixed routes, and links that are shared where they are."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sim.base.errors import InputError
from sim.base.presets import preset_names
from sim.engine.results.figures import figures_of
from sim.engine.results.worlds import Change
from tests.helpers import make_cluster_spec
from topology.cluster import Cluster, load_cluster
from topology.specs import LinkSpec, NicSpec, PerGpu

PRESETS = preset_names("topology/hardware")


def figures(data: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in data.items():
        if isinstance(value, dict):
            found += figures(value, f"{prefix}{key}.")
        elif isinstance(value, int | float):
            found.append(prefix + key)
    return found


@pytest.mark.parametrize("name", PRESETS)
def test_every_figure_of_a_preset_has_its_source(name: str) -> None:
    spec = load_cluster(name)
    data = {key: value for key, value in msgspec.to_builtins(spec).items() if key not in {"sources", "per_gpu"}}
    defaults = {"gpu.communication_sms", "host.wakeup_s", "host.handoff_s", "host.transfer_cores", "host.shared"}
    links = [(name, data[name]) for name in ("nvlink", "pcie", "nic", "loopback") if data[name]]
    links += [("pcie.uplink", data["pcie"]["uplink"])] if data["pcie"] and data["pcie"]["uplink"] else []
    links += [("socket.link", data["socket"]["link"])] if data["socket"] and data["socket"]["link"] else []
    defaults |= {"pcie.gpus_per_switch"} if data["pcie"] and data["pcie"]["gpus_per_switch"] == 1 else set()
    defaults |= {f"{name}.payload" for name, link in links if link["payload"] == 1}
    defaults |= {f"{name}.reduces" for name, link in links if not link["reduces"]}
    without = [path for path in figures(data) if path not in spec.sources]
    assert all(path in defaults for path in without), without
    assert all(len(text) > 3 for text in spec.sources.values())


def test_hgx_h100_is_what_the_datasheet_says() -> None:
    spec = load_cluster("hgx-h100")
    assert spec.gpus_per_node == 8
    assert spec.gpu.peak_flops_per_s["bf16"] == pytest.approx(132 * 4096 * 1830e6, rel=1e-3)
    assert spec.nvlink is not None
    assert spec.nvlink.bytes_per_s == 18 * 25e9
    assert spec.nic is not None
    assert spec.nic.bytes_per_s == 400e9 / 8


def test_routes_inside_a_node_and_across() -> None:
    cluster = Cluster(msgspec.structs.replace(load_cluster("hgx-h100"), nodes=2))
    inside, across = cluster.route(0, 5), cluster.route(3, 12)
    assert names(cluster, inside.resources) == ["gpu[0].nvlink.out", "gpu[5].nvlink.in"]
    assert inside.bytes_per_s == 0.835 * 450e9
    assert inside.latency_s == pytest.approx(3.4e-6)
    assert names(cluster, across.resources) == [
        "gpu[3].pcie.out", "nic[3].nic.out", "nic[12].nic.in", "gpu[12].pcie.in",
    ]  # fmt: skip
    assert across.bytes_per_s == 50e9
    assert across.latency_s == pytest.approx(14e-6)


def names(cluster: Cluster, resources: tuple[int, ...]) -> list[str]:
    return [cluster.resources[index].name for index in resources]


def test_gpus_behind_one_pcie_switch_share_its_way_to_the_host() -> None:
    cluster = Cluster(load_cluster("a100-pcie"))
    assert names(cluster, cluster.route(0, 3).resources) == ["gpu[0].pcie.out", "gpu[3].pcie.in"]
    across = cluster.route(1, 6)
    assert names(cluster, across.resources) == [
        "gpu[1].pcie.out", "switch[0].uplink.out", "switch[0].uplink.both", "socket[0].to[1].out",
        "switch[1].uplink.in", "switch[1].uplink.both", "gpu[6].pcie.in", "socket[1].dram", "socket[1].dram",
    ]  # fmt: skip
    assert across.bytes_per_s == 16e9
    assert cluster.route(6, 1).resources != across.resources[::-1]
    shared = [names(cluster, cluster.host_route(gpu, to_host=True).resources) for gpu in (0, 3, 4)]
    assert shared[0][1:] == shared[1][1:] == ["switch[0].uplink.out", "switch[0].uplink.both", "socket[0].dram"]
    assert shared[2][1:] == ["switch[1].uplink.out", "switch[1].uplink.both", "socket[1].dram"]


@pytest.mark.parametrize("per_switch", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("sockets", [1, 2, 3])
def test_a_gpu_copies_to_the_socket_of_its_switch(per_switch: int, sockets: int) -> None:
    """Also where neither number divides the GPUs, and no link joins the sockets."""
    spec = load_cluster("a100-pcie")
    assert spec.pcie is not None
    assert spec.socket is not None
    pcie = msgspec.structs.replace(spec.pcie, gpus_per_switch=per_switch)
    socket = msgspec.structs.replace(spec.socket, per_node=sockets, link=None)
    cluster = Cluster(msgspec.structs.replace(spec, pcie=pcie, socket=socket))
    for gpu in range(8):
        way = names(cluster, cluster.host_route(gpu, to_host=True).resources)
        assert way[:2] == [f"gpu[{gpu}].pcie.out", f"switch[{gpu // per_switch}].uplink.out"]
        assert not any(".to[" in name for name in way)


def test_data_that_is_staged_passes_a_slow_host_memory_twice() -> None:
    spec = load_cluster("a100-pcie")
    assert spec.pcie is not None
    assert spec.socket is not None
    slow = msgspec.structs.replace(spec.socket, dram=msgspec.structs.replace(spec.socket.dram, bytes_per_s=20e9))
    assert Cluster(msgspec.structs.replace(spec, socket=slow)).route(0, 7).bytes_per_s == 10e9
    direct = msgspec.structs.replace(spec, socket=slow, pcie=msgspec.structs.replace(spec.pcie, peers="node"))
    assert Cluster(direct).route(0, 7).bytes_per_s == 16e9


def test_a_route_inside_a_node_does_not_leave_it_though_the_nics_are_fewer_hops_away() -> None:
    spec = msgspec.structs.replace(load_cluster("a100-pcie"), nodes=2, nic=NicSpec(bytes_per_s=25e9, latency_s=0.0))
    cluster = Cluster(spec)
    assert "socket[0].to[1].out" in names(cluster, cluster.route(0, 7).resources)
    assert names(cluster, cluster.route(0, 8).resources) == [
        "gpu[0].pcie.out", "nic[0].nic.out", "nic[8].nic.in", "gpu[8].pcie.in",
    ]  # fmt: skip


def test_every_preset_of_gpus_reaches_its_host_memory() -> None:
    for name in PRESETS:
        spec = load_cluster(name)
        if spec.gpu.kind == "cpu":
            with pytest.raises(InputError, match=r"has no host memory: give it a table \[socket\]"):
                Cluster(spec).host_route(0, to_host=True)
        else:
            cluster = Cluster(spec)
            ways = [cluster.host_route(gpu, to_host=False) for gpu in range(spec.gpus_per_node)]
            assert all(names(cluster, way.resources)[-1].endswith("dram") for way in ways)
            assert len({way.resources[-1] for way in ways}) == (spec.socket.per_node if spec.socket else 0)


def test_routes_are_the_same_on_every_build() -> None:
    specs = msgspec.structs.replace(load_cluster("hgx-h100"), nodes=4)
    first, second = Cluster(specs), Cluster(specs)
    pairs = [(a, b) for a in range(32) for b in range(32) if a != b]
    assert [first.route(a, b) for a, b in pairs] == [second.route(a, b) for a, b in pairs]
    assert len({first.route(a, b).resources for a, b in pairs}) == len(pairs)


def test_gpus_own_their_sms_while_ranks_of_a_host_share_cores() -> None:
    gpus = Cluster(make_cluster_spec(4))
    assert len({device.compute for device in gpus.devices}) == 4
    host = Cluster(load_cluster("host"))
    assert len({device.compute for device in host.devices}) == 1
    assert host.resources[host.devices[7].compute].name == "node[0].cores"
    assert host.resources[host.devices[7].hbm].name == "node[0].dram"


def test_a_slow_gpu_has_a_lower_peak() -> None:
    cluster = Cluster(make_cluster_spec(2, per_gpu={1: PerGpu(speed=0.5)}))
    assert cluster.peak_flops_per_s(0, "fp32") == 2 * cluster.peak_flops_per_s(1, "fp32")


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(InputError, match=r"gpu\[2\] is beyond the 2 GPUs"):
        make_cluster_spec(2, per_gpu={2: PerGpu()})
    with pytest.raises(InputError, match=r"2 nodes need a table \[nic\]"):
        make_cluster_spec(2, nodes=2)
    with pytest.raises(InputError, match="1e.09 is less than one direction gets alone, 2e.09"):
        LinkSpec(bytes_per_s=2e9, latency_s=0.0, both_ways_bytes_per_s=1e9)
    with pytest.raises(InputError, match=r"\[socket\] is reached by PCIe"):
        make_cluster_spec(2, socket=load_cluster("a100-pcie").socket)
    with pytest.raises(InputError, match=r"through host memory, and there is no table \[socket\]"):
        make_cluster_spec(2, pcie=load_cluster("a100-pcie").pcie)
    with pytest.raises(InputError, match=r"need \[nvlink\]"):
        make_cluster_spec(2, nvlink=None)
    with pytest.raises(InputError, match="leaves none of 100 SMs"):
        make_cluster_spec(2, gpu=msgspec.structs.replace(make_cluster_spec().gpu, communication_sms=100))
    with pytest.raises(InputError, match="has no peak for fp8"):
        Cluster(make_cluster_spec()).peak_flops_per_s(0, "fp8")


MINE = """
name = "mine"
gpus_per_node = 2
gpu = {name = "X", sms = 10, peak_flops_per_s = {bf16 = 1e12}, launch_s = 1e-6}
hbm = {capacity_bytes = 1000000000, bytes_per_s = 1e12}
nvlink = {bytes_per_s = 100e9, latency_s = 1e-6}
"""


def test_a_users_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    assert load_cluster(str(path)).nvlink == LinkSpec(bytes_per_s=100e9, latency_s=1e-6)
    with pytest.raises(InputError, match="cannot be read"):
        load_cluster(str(tmp_path / "none.toml"))
    with pytest.raises(InputError, match="did you mean 'hgx-h100'.*`cluster`"):
        load_cluster("hgx-h10")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("latency_s", "lat"), "nvlink: unknown key 'lat'.*allowed are bytes_per_s, latency_s"),
        (("nvlink = {", "torus = {"), "unknown key 'torus': allowed are name, nodes, .* nvlink, "),
        (("nvlink = {", "nvlnk = {"), "unknown key 'nvlnk' .did you mean 'nvlink'"),
        (("gpu = {", "gpus = {"), "unknown key 'gpus' .did you mean 'gpu'"),
        (("hbm = {", "# hbm = {"), "the key hbm is missing"),
        (("latency_s = 1e-6", "payload = 1"), "the key nvlink.latency_s is missing"),
        (("100e9", "1e-300"), "nvlink.bytes_per_s is 1e-300: expected a number > 1e-30"),
        (("100e9", "0"), "nvlink.bytes_per_s is 0: expected a number > 1e-30"),
        (("100e9", "-5"), "nvlink.bytes_per_s is -5: expected a number > 1e-30"),
        (("100e9", "nan"), "expected a number > 1e-30"),
        (("100e9", "inf"), "nvlink.bytes_per_s is inf: expected a number < 1e"),
        (("100e9", '"fast"'), "nvlink.bytes_per_s is 'fast': expected a number;"),
        (("100e9", "[1]"), "nvlink.bytes_per_s: expected a number;"),
        (("{bf16 = 1e12}", "{bf16 = 0}"), r"gpu.peak_flops_per_s\[...\]: expected a number > 1e-30"),
        (("{bf16 = 1e12}", "3"), "gpu.peak_flops_per_s is 3: expected a table"),
        (("sms = 10", "sms = 0"), "gpu.sms is 0: expected a whole number >= 1"),
        (("sms = 10", 'sms = 10, kind = "tpu"'), "gpu.kind is 'tpu': allowed are cuda, cpu"),
        (("sms = 10", f"sms = {10**400}"), "gpu.sms .* expected a whole number <= 65536"),
        (("gpus_per_node = 2", "gpus_per_node = 2147483648"), "expected a whole number <= 65536"),
        (("gpus_per_node = 2", "gpus_per_node = 65536"), "has 1 x 65536 GPUs: expected 1 to 16384"),
        (("launch_s", r'"\ud800" = 1, launch_s'), "mine.toml"),
        (('"X"', r'"\u001b[31m"'), "gpu.name is .*: expected a text without control characters"),
        (('"X"', f'"{"x" * 3000}"'), "gpu.name: expected a text whose length is <= 200"),
        (("sms = 10", "sms = " + "[" * 3000), "mine.toml"),
        (("sms = 10", "sms = " + "[\n" * 100_000), "recursion"),
        (("sms = 10", "a." * 50_000 + "a = 1"), "in lines of at most 4096"),
        (("gpus_per_node = 2", "gpus_per_node = 2 3"), "mine.toml"),
        (("nvlink = {", 'fabric = {kind = "star"}\nnvlink = {'), "fabric.kind is 'star': allowed are mesh, torus, "),
        (("nvlink = {", "per_gpu = {-1 = {speed = 0.5}}\nnvlink = {"), r"gpu\[-1\] is beyond the 2 GPUs"),
    ],
)
def test_a_cluster_file_that_is_wrong(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MINE.replace(*change))
    with pytest.raises(InputError, match=message) as error:
        load_cluster(str(path))
    assert "mine.toml" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("directions", "copying", "measured"),
    [
        ((True,), 8, 44.83e9),  # from all GPUs at once, as forward passes that offload do
        ((False,), 8, 55.16e9),
        ((True, False), 8, (24.13e9 + 32.81e9) / 2),
        ((True,), 1, 55.13e9),
        ((True, False), 1, (36.48e9 + 52.79e9) / 2),
    ],
)
def test_host_copies_of_all_gpus_share_their_sockets(
    directions: tuple[bool, ...], copying: int, measured: float
) -> None:
    """As nvbandwidth timed them on 8 H800, in GB/s for each copy: equal copies share the most crowded resource."""
    cluster = Cluster(load_cluster("h800"))
    load: Counter[int] = Counter()
    for gpu, to_host in product(range(copying), directions):
        load.update(cluster.host_route(gpu, to_host=to_host).load(1.0))
    each = min(cluster.resources[index].capacity / amount for index, amount in load.items())
    assert each == pytest.approx(measured, rel=0.01)


def test_a_cluster_with_other_peaks_shares_all_else() -> None:
    """What it computes and launches is its own; with more nodes, or fewer SMs, nothing is shared."""
    cluster = Cluster(load_cluster("hgx-h100"), placement=[1, 0])
    gpu = cluster.spec.gpu
    faster = msgspec.structs.replace(gpu, peak_flops_per_s={"bf16": 2e15}, launch_s=1e-6)
    other = cluster.like(msgspec.structs.replace(cluster.spec, gpu=faster))
    assert other.resources is cluster.resources
    assert other.route(0, 1) == cluster.route(0, 1)
    assert other.spec.gpu.launch_s == 1e-6
    assert (other.peak_flops_per_s(0, "bf16"), cluster.peak_flops_per_s(0, "bf16")) == (2e15, 989.4e12)
    for change in ({"nodes": 2}, {"gpu": msgspec.structs.replace(faster, sms=100)}):
        found = cluster.like(msgspec.structs.replace(cluster.spec, **change))
        assert found.resources is not cluster.resources
        assert found.devices[0].number == 1


@pytest.mark.sweep
@pytest.mark.parametrize("name", PRESETS)
def test_a_cluster_at_other_rates_is_as_if_built_anew(name: str) -> None:
    """With every figure of the machine doubled, and its devices in another order."""
    spec = load_cluster(name)
    spec = msgspec.structs.replace(spec, nodes=2 if spec.nic else 1)
    placement = list(reversed(range(spec.nodes * spec.gpus_per_node)))
    cluster = Cluster(spec).placed(placement)
    assert cluster.even is cluster
    for figure in figures_of(spec, None):
        changed = Change((figure,), 2.0).of(spec)
        found, anew = cluster.like(changed), Cluster(changed, placement)
        assert list(found.resources) == list(anew.resources)
        assert found.devices == anew.devices
        assert found.even is found or found.spec.gpu != spec.gpu
        pairs = [pair for pair in product((0, 1, -1 % len(placement)), repeat=2) if pair[0] != pair[1]]
        assert [found.route(*pair) for pair in pairs] == [anew.route(*pair) for pair in pairs]
        if spec.socket:
            assert found.host_route(0, to_host=True) == anew.host_route(0, to_host=True)
    assert list(cluster.resources) == list(Cluster(spec).resources)


def test_a_slow_port_is_not_made_of_another_cluster() -> None:
    spec = load_cluster("hgx-h100")
    slow = msgspec.structs.replace(spec, per_gpu={3: PerGpu(link=0.25)})
    assert list(Cluster(spec).like(slow).resources) == list(Cluster(slow).resources)
