"""Pictures of fabrics: every link is drawn once, and nothing stands on anything else or outside."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest

from experiments.pages.fabric_page import draw, figure
from experiments.verbs.cli import main
from sim.base.errors import InputError
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
from topology.specs import ClusterSpec

KINDS: list[tuple[Fabric | None, int, int, int]] = [
    # links of nodes to switches, those to the same one as one, and between switches
    (None, 4, 8, 4),
    (FatTreeSpec(below=(16, 4), above=(4,)), 8, 8, 8 + 16),
    (FatTreeSpec(below=(8, 2, 4), above=(2, 3)), 8, 8, 8 + 16 + 24),
    (RailOptimisedSpec(below=(4, 16), above=(2,)), 8, 8, 64 + 32),
    (RailOnlySpec(below=(4, 2), above=(2,)), 8, 8, 64 + 32),
    (DragonflyPlusSpec(below=4, leaves=2, spines=2, global_links=4), 8, 8, 16 + 32 + 28),
    (MeshSpec(dims=(4, 4)), 16, 1, 24),
    (MeshSpec(dims=(6,)), 6, 1, 5),
    (TorusSpec(dims=(4, 4)), 16, 1, 32),
    (TorusSpec(dims=(4, 4, 4)), 64, 1, 192),
    (TorusSpec(dims=(2, 2, 3, 3)), 36, 1, 18 + 18 + 36 + 36),
    (FullMeshSpec(dims=(2, 4)), 8, 1, 16),
    (FullMeshSpec(dims=(8,)), 8, 1, 28),
    (CircuitsSpec(strides=(1, 4)), 16, 1, 32),
]


def spec_of(fabric: Fabric | None, nodes: int, gpus: int) -> ClusterSpec:
    return msgspec.structs.replace(load_cluster("hgx-h100"), nodes=nodes, gpus_per_node=gpus, fabric=fabric)


@pytest.mark.parametrize(("fabric", "nodes", "gpus", "links"), KINDS)
def test_every_link_is_drawn_and_nothing_stands_on_anything_else(
    fabric: Fabric | None, nodes: int, gpus: int, links: int
) -> None:
    spec = spec_of(fabric, nodes, gpus)
    found = draw(spec)
    assert len(found.lines) == len({line.path for line in found.lines}) == links
    for box in found.boxes:
        assert box.x - box.width / 2 >= 0
        assert box.x + box.width / 2 <= found.width
        assert box.y - box.height / 2 >= 0
        assert box.y + box.height / 2 <= found.height
    for one, other in combinations(found.boxes, 2):
        apart = abs(one.x - other.x) >= (one.width + other.width) / 2 - 0.5
        assert apart or abs(one.y - other.y) >= (one.height + other.height) / 2 - 0.5, (one.name, other.name)
    drawn = ET.fromstring(figure(spec))
    assert len(drawn.findall(".//{*}path[@class]")) >= links


def test_the_inside_of_a_node_is_drawn_where_there_is_only_one() -> None:
    """8 NVLinks; 8 links of GPUs to 4 PCIe switches, 4 of these to 2 sockets, and one between these."""
    found = draw(load_cluster("dgx-a100"))
    kinds = [entry.label for _, _, entry in found.key.entries]
    assert kinds == ["nvlink: 8 of 276 GB/s", "pcie: 12 of 26.14 GB/s", "socket: 1 of 16 GB/s"]
    assert sorted(box.label for box in found.boxes if "switch" in box.name) == [
        "nvswitch 0",
        *(f"switch {n}" for n in range(4)),
    ]


def test_links_of_pairs_are_drawn_from_one_to_the_other() -> None:
    found = draw(load_cluster("h100-nvl"))
    assert next(entry.label for _, _, entry in found.key.entries) == "nvlink: 4 of 250.5 GB/s"
    assert not any("pair" in box.name for box in found.boxes)


def test_wider_links_are_thicker() -> None:
    thin = msgspec.structs.replace(spec_of(FatTreeSpec(below=(16, 4), above=(4,)), 8, 8))
    widths = {line.name.split(" - ")[0].partition("[")[0]: line.width for line in draw(thin).lines}
    assert widths["node"] > widths["tier1"], "8 NICs side by side, and a link of 200 GB/s"


def test_too_many_links_are_refused() -> None:
    with pytest.raises(InputError, match="2560 links, of which 2048 can be told apart in a picture: set fewer `nodes`"):
        draw(spec_of(RailOptimisedSpec(below=(32, 64), above=(8,)), 256, 8))


def test_the_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fabric.svg"
    main(["show", "--format", "fabric", "--cluster", "hgx-h100", "--nodes", "4", "--out", str(file)])
    assert "one switch: 4 nodes, 32 ports" in capsys.readouterr().out
    assert "one switch, 4 nodes of 8 GPUs" in file.read_text()
    main(["show", "--format", "fabric", "--cluster", "hgx-h100", "--out", str(file)])
    assert "nvswitch 0" in file.read_text()
    with pytest.raises(SystemExit):
        main(["show", "--format", "fabric", "--cluster", "hgx-h100", "--out", str(tmp_path / "fabric.png")])
    assert "expected a name that ends in .svg" in capsys.readouterr().err
