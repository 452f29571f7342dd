"""A second tier of host memory behind CXL, by hand: pages are interleaved, so a copy flows to both tiers at once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from longstep import InputError, predict
from tests.helpers import make_cluster_spec
from topology.cluster import Cluster, Route, load_cluster
from topology.specs import ClusterSpec, CxlSpec, DramSpec, LinkSpec, PcieSpec, SocketSpec


def toy(cxl: CxlSpec | None, gpus: int = 1) -> Cluster:
    """PCIe of 50 GB/s, 100 GB of DRAM at 100 GB/s, of which writes get 60."""
    dram = DramSpec(capacity_bytes=100 * 10**9, bytes_per_s=100e9, write_bytes_per_s=60e9)
    pcie = PcieSpec(bytes_per_s=50e9, latency_s=0.0, uplink=LinkSpec(bytes_per_s=50e9, latency_s=0.0))
    return Cluster(make_cluster_spec(gpus, pcie=pcie, socket=SocketSpec(dram=dram, cxl=cxl)))


def tier(share: float | None, bytes_per_s: float = 10e9) -> CxlSpec:
    return CxlSpec(capacity_bytes=300 * 10**9, bytes_per_s=bytes_per_s, latency_s=1e-6, share=share)


def named(cluster: Cluster, route: Route) -> dict[str, float]:
    return {cluster.resources[one].name: nbytes for one, nbytes in route.load(1000).items()}


@pytest.mark.parametrize(("share", "rate"), [(0.2, 50e9), (0.5, 20e9), (None, 10e9 / 0.75)])
def test_a_copy_takes_as_long_as_its_slower_part(share: float | None, rate: float) -> None:
    """A fifth at 10 GB/s is as fast as PCIe for all; by capacity 300 of 400 GB are behind CXL."""
    cluster = toy(tier(share))
    route = cluster.host_route(0, to_host=True)
    assert route.bytes_per_s == pytest.approx(rate)
    assert route.latency_s == 1e-6
    far = 1000 * (share or 0.75)
    assert named(cluster, route) == pytest.approx({
        "gpu[0].pcie.out": 1000, "switch[0].uplink.out": 1000, "socket[0].dram": 1000 - far,
        "socket[0].dram.writes": 1000 - far, "socket[0].cxl": far,
    })  # fmt: skip
    assert "socket[0].dram.writes" not in named(cluster, cluster.host_route(0, to_host=False))


def test_a_kernel_of_the_host_reads_and_writes_both() -> None:
    cluster = toy(tier(0.25))
    load = {cluster.resources[one].name: nbytes for one, nbytes in cluster.dram_load(0, 400.0, 800.0).items()}
    assert load == {"socket[0].dram": 900, "socket[0].dram.writes": 600, "socket[0].cxl": 300}


def test_gpus_of_a_socket_share_it() -> None:
    """Four copies of a byte: 4/5 of one at 10 GB/s, where PCIe takes 1/50 and DRAM writes 4 x 4/5 of 60."""
    cluster = toy(tier(0.2), gpus=4)
    load: dict[int, float] = {}
    for gpu in range(4):
        for one, nbytes in cluster.host_route(gpu, to_host=True).load(1).items():
            load[one] = load.get(one, 0.0) + nbytes
    took_s = {cluster.resources[one].name: nbytes / cluster.resources[one].capacity for one, nbytes in load.items()}
    assert max(took_s, key=lambda name: took_s[name]) == "socket[0].cxl"
    assert took_s["socket[0].cxl"] == pytest.approx(0.8 / 10e9)
    assert took_s["socket[0].dram.writes"] == pytest.approx(3.2 / 60e9)


STEP: dict[str, Any] = {"model": "llama3-8b", "seq": "256K", "layers": 2, "stack": "alst", "gpus": 8, "scope": "step"}


def with_cxl(dram_bytes: int, **figures: float) -> ClusterSpec:
    """Return 8 H100 whose sockets have less DRAM, and some CXL."""
    spec = load_cluster("hgx-h100")
    assert spec.socket is not None
    dram = msgspec.structs.replace(spec.socket.dram, capacity_bytes=dram_bytes)
    cxl = msgspec.convert({"capacity_bytes": 512 * 10**9, "bytes_per_s": 1e12, **figures}, CxlSpec) if figures else None
    return msgspec.structs.replace(spec, socket=msgspec.structs.replace(spec.socket, dram=dram, cxl=cxl))


@pytest.mark.sweep
@pytest.mark.parametrize("profile", [None, pytest.param("datasheet", marks=pytest.mark.slow)])
def test_a_step_fits_by_both_tiers_and_pays_for_the_slower_one(profile: str | None) -> None:
    """What is kept does not fit half of its size in DRAM; with half of the pages behind CXL it does. A fast tier
    adds its rate to that of DRAM; the slower it is the longer the step takes, by both players to the bit.
    """
    alone = predict(**STEP, cluster="hgx-h100", profile=profile)
    assert alone.room is not None
    kept = alone.room.limits[1].held_bytes
    least = kept * 6 // 10
    assert predict(**STEP, cluster=with_cxl(least), profile=profile).fits is False
    found = [
        predict(**STEP, cluster=with_cxl(least, share=0.5, bytes_per_s=rate), profile=profile)
        for rate in (1e12, 20e9, 5e9)
    ]
    for one in found:
        assert one.fits
        assert one.room is not None
        assert [limit.memory for limit in one.room.limits] == ["GPU", "host", "CXL"]
        assert sum(limit.held_bytes for limit in one.room.limits[1:]) == pytest.approx(kept, abs=1)
    assert found[0].step_time_s < alone.step_time_s
    assert found[0].step_time_s < found[1].step_time_s < found[2].step_time_s
    # half of what four GPUs of a socket keep goes there and comes back, both at 5 GB/s
    assert found[2].step_time_s >= kept * 0.5 * 2 / 5e9
    simpy = predict(**STEP, cluster=with_cxl(least, share=0.5, bytes_per_s=5e9), profile=profile, engine="simpy")
    assert simpy.step_time_s == found[2].step_time_s


@pytest.mark.sweep
def test_what_is_too_much_for_a_tier_is_said() -> None:
    found = predict(**STEP, cluster=with_cxl(2**40, share=0.9, capacity_bytes=10**9, bytes_per_s=2e10))
    assert found.fits is False
    assert any("and has 1 GB behind CXL" in note for note in found.figures.evidence.notes)


@pytest.mark.sweep
def test_its_rate_has_an_elasticity() -> None:
    found = predict(**STEP, cluster=with_cxl(2**40, share=0.5, bytes_per_s=5e9))
    assert found.bound_by == "cxl"


def test_all_pages_cannot_be_behind_it() -> None:
    with pytest.raises(msgspec.ValidationError, match="< 1"):
        msgspec.convert({"capacity_bytes": 1, "bytes_per_s": 1.0, "share": 1.0}, CxlSpec)
    with pytest.raises(InputError, match="has no host memory"):
        Cluster(make_cluster_spec(1)).host_route(0, to_host=True)
