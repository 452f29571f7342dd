"""What of a GPU's memory no buffer can have: stated once, with its parts, and settable."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from sim.setup.setup import Setup
from topology.cluster import load_cluster
from topology.reserved import OF_CPU, OF_CUDA, PARTS, Reserved, held_by_allocator

MIB = 2**20


def test_it_is_the_same_for_every_gpu_and_known_to_less_than_2_5_gib() -> None:
    assert load_cluster("hgx-h100").reserved == load_cluster("dgx-a100").reserved == OF_CUDA
    assert load_cluster("host").reserved == OF_CPU == Reserved(0, 0)
    assert 0 < OF_CUDA.within_bytes < min(OF_CUDA.nbytes, 2.5 * 2**30)


def test_the_readme_shows_its_parts() -> None:
    text = Path("topology/README.md").read_text()
    shown = re.findall(r"^\| (\w+)(?:: [^|]*)? \| (\d+) \| (\d+) \| (\w*)", text, re.MULTILINE)
    parts = [(part.name, part.nbytes // MIB, part.within_bytes // MIB, part.basis) for part in PARTS]
    whole = ("together", OF_CUDA.nbytes // MIB, OF_CUDA.within_bytes // MIB, "")
    assert [(name, int(mib), int(within), basis) for name, mib, within, basis in shown] == [*parts, whole]
    assert f"| {OF_CUDA.nbytes / 2**30:.2f} GiB; 0" in text
    assert f"| {OF_CUDA.within_bytes / 2**30:.2f} GiB; 0" in text


def test_it_can_be_set() -> None:
    overrides = ("cluster.hbm.reserved_bytes=1000", "cluster.hbm.reserved_within_bytes=10")
    spec = Setup(cluster="hgx-h100", gpus=8, set=overrides, scope="attention").resolved().cluster.spec
    assert spec.reserved == Reserved(1000, 10)
    assert spec.figures() == load_cluster("hgx-h100").figures(), "no time depends on it"
    only = msgspec.structs.replace(spec, hbm=msgspec.structs.replace(spec.hbm, reserved_within_bytes=None))
    assert only.reserved == Reserved(1000, OF_CUDA.within_bytes)


def test_what_the_allocator_holds_is_no_less_than_what_is_allocated() -> None:
    """Without expandable segments up to 10 GB at 58.8 GB."""
    assert held_by_allocator(58_800_000_000, expandable=False) == (58_800_000_000, 68_800_000_000)
    least, most = held_by_allocator(2**30, expandable=True)
    assert (least, most) == (2**30, 2**30 + 800 * 2**20)
    assert held_by_allocator(2**30, expandable=False) == (least, most)
