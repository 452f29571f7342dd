"""What-ifs on the command line: elasticities beside the figures, and rooflines."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.experiments.test_cli import H100, fails, run


def test_roofline_prints_balances_and_kernels_and_writes_a_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "roofline.html"
    printed = run(capsys, "roofline", "--seq", "8K", "--page", str(page))
    assert re.search(r"hgx-h100 +│ 989.4 TFLOP/s │ 3.35 TB/s +│ 295", printed)
    assert re.search(r"8K +│ attention_forward standard .*│ memory", printed)
    found = json.loads(run(capsys, "roofline", "--seq", "8K", "--cluster", "dgx-a100", "--json"))
    assert round(next(row for row in found["balance"] if row["cluster"] == "dgx-a100")["flops_per_byte"]) == 153
    assert {row["seq"] for row in found["kernels"]} == {8192}
    html = page.read_text()
    assert html.count("<tr data-row=") == len(found["kernels"]), "one mark and one row for each kernel"
    assert html.count('class="shape"') >= len(found["kernels"])
    assert "295 FLOPs a byte by datasheet" in html
    assert "--seq 8K,,1M" in fails(capsys, "roofline", "--seq", "8K,,1M")


def test_sensitivity_is_printed_beside_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(capsys, "simulate", *H100, "--sensitivity")
    assert "doubling saves" in printed
    assert re.search(r"compute +│ -0\.\d{3}", printed)
    rows = json.loads(run(capsys, "simulate", *H100, "--sensitivity", "--json"))
    assert rows[0].keys() == {"figure", "elasticity", "bound_changes_nearby"}
    assert [row["figure"] for row in rows if row["elasticity"] < -0.5] == ["compute"]
    for several in (("--schedule", "ring,zigzag"), ("--vary", "cluster.nvlink.bytes_per_s=*1,*2")):
        assert "--sensitivity is of one step" in fails(capsys, "simulate", *H100, "--sensitivity", *several)
