"""Peaks in tables: with what lies beside them and what is left they are the memory that there is."""

from __future__ import annotations

import re

import pytest

from experiments.evidence.peaks import BESIDE, beside, spec_of
from longstep import Setup
from tests.experiments.verbs.typed import run
from topology.cluster import load_cluster
from topology.reserved import OF_CUDA, PARTS

GIB = 2**30
STEP = ("--model", "tiny", "--cluster", "hgx-h100", "--gpus", "2", "--layers", "1", "--seq", "64K")


def sizes(text: str) -> list[float]:
    """Return the sizes of a text, in GiB."""
    units = {"MiB": 2**-10, "GiB": 1.0}
    return [float(number) * units[unit] for number, unit in re.findall(r"([\d.]+) (MiB|GiB)", text)]


@pytest.mark.sweep
@pytest.mark.parametrize(
    "command",
    [
        ("simulate", "--schedule", "ring,zigzag"),
        pytest.param(("ladder", "--most", "64K", "--techniques", "FSDP"), marks=pytest.mark.sweep),
        pytest.param(("plan", "--schedule", "ring", "--set", "schedule.mlp=whole"), marks=pytest.mark.slow),
    ],
)
def test_peak_what_is_beside_it_and_what_is_left_are_all_of_a_gpu(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run(capsys, command[0], *STEP, *command[1:])
    assert "peak allocated" in printed
    (footer,) = (line for line in printed.splitlines() if line.startswith("peak allocated +"))
    taken, whole = sizes(footer)
    alone = re.sub(r", a socket [\d.]+ \w+", "", printed)
    rows = [found for line in alone.splitlines() if line.startswith("│") and len(found := sizes(line)) >= 2]
    assert rows
    for peak, left, *_ in rows:
        assert peak + taken + left == pytest.approx(whole, abs=0.02)


def test_a_report_adds_them_up(capsys: pytest.CaptureFixture[str]) -> None:
    printed = " ".join(run(capsys, "simulate", *STEP, "--schedule", "zigzag").split())
    found = re.search(r"of 80 GiB of GPU │ peak allocated (.*?), beside it (.*?) \(.*?left (.*?) │", printed)
    assert found
    assert sum(sizes(" ".join(found.groups()))) == pytest.approx(80, abs=0.02)


def test_what_is_beside_follows_the_cluster() -> None:
    assert f"{OF_CUDA.nbytes / GIB:.2f} GiB beside it" in beside(load_cluster("hgx-h100"))
    own = spec_of(Setup(cluster="hgx-h100", set={"cluster.hbm.reserved_bytes": GIB, "model.num_heads": 4}))
    assert "+ 1 GiB beside it" in beside(own)
    assert "all ranks share" in beside(load_cluster("host"))
    assert all(part.name in beside(own) and part.name in BESIDE for part in PARTS)
