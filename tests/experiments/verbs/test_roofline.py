"""Rooflines on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.experiments.verbs.typed import fails, run


@pytest.mark.sweep
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
    assert printed.splitlines()[1].startswith("H100-SXM-80GB does 295 FLOPs in the time of one byte of its memory; ")
    assert found["answer"].startswith("A100-SXM-80GB does 153 FLOPs in the time of one byte")
    assert "beyond the measured range" not in printed
    assert "beyond the measured range: " in run(capsys, "roofline", "--seq", "128K", "--evidence")
    assert "--seq 8K,,1M" in fails(capsys, "roofline", "--seq", "8K,,1M")
