"""Case files of one's own, for the tests that read and judge them."""

from __future__ import annotations

from pathlib import Path

from experiments.evidence.papers.cases import Case, read_cases

OWN = """
title = "Our cluster"
source = "run 17"
quality = "one run"
profile = "a800-ultraattn"

[select]
cluster = "a800"
scope = "attention"
dtype = "bf16"
set = ["model.head_dim=128"]

[[group]]
name = "two schedules"
target = 0.5
cases = [
  {{ schedule = "ring", gpus = 8, seq = "64K", pass = "forward", measured_s = 0.01 }},
  {{ schedule = "zigzag", gpus = 8, seq = "64K", pass = "forward", measured_s = 0.005{more} }},
]
"""


OPS = """
title = "Our kernels"
source = "run 18"
quality = "one run"
profile = "h100-sxm"

[select]
cluster = "hgx-h100"
dtype = "bf16"
mask = "full"
scope = "attention"
set = ["model.num_heads=16", "model.num_kv_heads=16", "model.head_dim=128"]

[[group]]
name = "ops"
cases = [
  {{ {} }},
]
"""
"""Of one case, and its profile's points: full attention of 16K tokens 3.393554 ms, 16 MiB over NICs 478 us."""


def one_case(tmp_path: Path, fields: str) -> Case:
    path = tmp_path / "ops.toml"
    path.write_text(OPS.format(fields))
    (case,) = read_cases(str(path))[1]
    return case
