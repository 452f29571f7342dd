"""Diameter, shortest ways and bisection bandwidth of fabrics, by hand; NICs have 50 GB/s."""

from __future__ import annotations

import msgspec
import pytest

from experiments.verbs.cli import main
from longstep import InputError, fabric
from topology.cluster import load_cluster
from topology.kinds import (
    CircuitsSpec,
    DragonflyPlusSpec,
    Fabric,
    FatTreeSpec,
    FullMeshSpec,
    MeshSpec,
    RailOnlySpec,
    RailOptimisedSpec,
    TorusSpec,
)


@pytest.mark.parametrize(
    ("kind", "nodes", "gpus", "diameter", "ways", "links"),
    [
        (None, 4, 8, 2, (1, 1), 16),
        (FatTreeSpec(below=(16, 4), above=(4,)), 8, 8, 4, (4, 4), 32),
        # what crosses is half of 32 NICs: 4 nodes fill leaves, so all of it goes over spines
        (FatTreeSpec(below=(16, 4), above=(4,), oversubscription=(4.0,)), 8, 8, 4, (4, 4), 8),
        # pods of 2 leaves; 2 spines each, 3 cores above each of them: 2 ways in a pod, 6 between two
        (FatTreeSpec(below=(8, 2, 4), above=(2, 3)), 8, 8, 6, (2, 6), 32),
        (RailOptimisedSpec(below=(4, 16), above=(2,), oversubscription=(2.0,)), 8, 8, 4, (2, 2), 16),
        # a rail of 8 nodes is two leaves: half of the 4 nodes' 32 NICs
        (RailOnlySpec(below=(4, 2), above=(2,), oversubscription=(2.0,)), 8, 8, 4, (2, 2), 16),
        # 8 groups with a link to each other: 4 x 4 cross, but by turns all 4 of a group are those of one spine, which
        # has 2 links from its leaves
        (DragonflyPlusSpec(below=4, leaves=2, spines=2, global_links=4), 8, 8, 5, (1, 2), 8),
        (MeshSpec(dims=(4, 4)), 16, 1, 6, (1, 20), 4),
        (TorusSpec(dims=(4, 4)), 16, 1, 4, (1, 24), 8),
        # along the last dimension of 4: two nodes with two links across each, in 2 rows
        (FullMeshSpec(dims=(2, 4)), 8, 1, 2, (1, 2), 4),
        (FullMeshSpec(dims=(8,)), 8, 1, 1, (1, 1), 16),
        (CircuitsSpec(), 8, 1, 4, (1, 2), 2),
        # halves by number: 2 links of stride 1 cross, and 4 of stride 2
        (CircuitsSpec(strides=(1, 2)), 8, 1, 2, (1, 2), 6),
    ],
)
def test_shapes(kind: Fabric | None, nodes: int, gpus: int, diameter: int, ways: tuple[int, int], links: float) -> None:
    spec = msgspec.structs.replace(load_cluster("hgx-h100"), nodes=nodes, gpus_per_node=gpus, fabric=kind)
    found = fabric(spec)
    assert found.diameter == diameter
    assert (found.paths_least, found.paths_most) == ways
    assert found.bisection_bytes_per_s == pytest.approx(links * 50e9)


def test_a_single_node_has_none() -> None:
    with pytest.raises(InputError, match="has one node, which no fabric joins to others; set `nodes`"):
        fabric("hgx-h100")


def test_show_tells_it(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        ["show", "--format", "fabric", "--cluster", "hgx-h100", "--nodes", "4", "--set", "cluster.nic.bytes_per_s=1e9"]
    )
    printed = capsys.readouterr().out
    assert "one switch: 4 nodes, 32 ports, 1 switches" in printed
    assert "bisection: 16 GB/s per direction; the ports of a half send 1 times as much" in printed
    with pytest.raises(SystemExit):
        main(["show", "--format", "fabric", "--cluster", "hgx-h100", "--nodes", "4", "--ranks", "0"])
    assert "are of a schedule" in capsys.readouterr().err
