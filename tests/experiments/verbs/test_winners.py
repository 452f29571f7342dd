"""Maps of winners on the command line."""

from __future__ import annotations

import json
import re

import pytest

from tests.experiments.verbs.typed import fails, run


@pytest.mark.sweep
def test_a_map_of_winners_is_printed_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    layer = ("--model", "tiny", "--cluster", "hgx-h100", "--scope", "layer", "--seeds", "1", "--gpus", "2")
    both = ("--schedule", "ring,zigzag", "--across", "seq=8K,16K", "--down", "cluster.nvlink.bytes_per_s=*1,/2")
    printed = run(capsys, "winners", *layer, *both, "--jobs", "1")
    assert re.search(r"bytes_per_s +┃ 8K +┃ 16K", printed)
    assert "seq 16K: " in printed
    found = json.loads(run(capsys, "winners", *layer, *both, "--jobs", "1", "--json"))
    assert found["answer"] in printed
    assert len(found["rests_on"]) == 3
    assert "\nkernels: profile 'h100-sxm'" in printed
    rows = found["rows"]
    assert [row["seq"] for row in rows] == [8192, 16384] * 2
    assert all(row["ratio"] >= 1 for row in rows)
    assert "name two or more with --schedule" in fails(capsys, "winners", *layer, "--across", "seq=8K")
    assert "--across : expected KEY=VALUES" in fails(capsys, "winners", *layer, *both[:2])
    assert "name another key" in fails(capsys, "winners", *layer, *both[:4], "--down", "seq=8K")
