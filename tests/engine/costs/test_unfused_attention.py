"""Attention whose scores pass through HBM: what it runs, and what that takes on an A100."""

from __future__ import annotations

from typing import Any

import pytest

from sim.base.errors import InputError
from sim.schedule.derive.kernels import unfused_use
from sim.schedule.ir.masks import Band
from sim.setup.setup import Setup
from sim.words.options import AttentionName

HEADS, SEQ, HEAD_DIM, HBM = 12, 2048, 128, 2.039e12
SCORES = HEADS * SEQ**2


@pytest.mark.parametrize(
    ("kernel", "backward", "products", "passes"),
    [
        ("standard", False, 2, 2), ("standard", True, 4, 3),
        ("memory-efficient", False, 2, 2), ("memory-efficient", True, 5, 5),
    ],
)  # fmt: skip
def test_it_is_products_and_what_passes_over_scores(
    kernel: AttentionName, backward: bool, products: int, passes: int
) -> None:
    use = unfused_use(kernel, backward, "bf16", (1, SEQ, HEADS, HEAD_DIM), SEQ, HEADS, Band(right=0))
    gemms = [one for one, _ in use.loop if one.kernel == "gemm"]
    others = [one for one, _ in use.loop if one.kernel != "gemm"]
    assert len(gemms) == products
    assert use.flops == sum(one.flops for one in gemms) == products * 2 * HEAD_DIM * SCORES
    operand, numbers = SEQ * HEADS * HEAD_DIM * 2, SEQ * HEADS * 4
    assert {one.hbm_bytes for one in gemms} == {2 * operand + 2 * SCORES}
    assert sum(one.hbm_bytes for one in others) == 2 * passes * SCORES + len(others) * numbers
    assert use.hbm_bytes == sum(one.hbm_bytes for one, _ in use.loop)


def seconds(software: str | None = None) -> list[float]:
    """Return what both passes of attention take with scores written out."""
    setup = Setup(
        model="llama3-8b", cluster="dgx-a100", gpus=1, seq=SEQ, schedule="single", scope="attention", jitter=0,
        software=software,
        set={"model.num_heads": HEADS, "model.num_kv_heads": HEADS, "schedule.kernel": "standard"},
    )  # fmt: skip
    return [row.busy_s for row in setup.predicted().trace.rows]


def test_memory_bounds_it_on_an_a100_whatever_fused_attention_takes() -> None:
    """Its kernels follow each other, each at the rate that kernels of its kind get: not at the share of the peak that
    fused attention of few heads gets.
    """
    for taken_s, products, passes in zip(seconds(), (2, 4), (2, 3), strict=True):
        moved_s, flops_s = 2 * (products + passes) * SCORES / HBM, products * 2 * HEAD_DIM * SCORES / 311.9e12
        assert moved_s < taken_s < 1.6 * (moved_s + flops_s)


def test_megatron_drops_probabilities_at_random() -> None:
    """By a kernel that reads and writes them, and a byte of a mask for each, forward and backward."""
    for plain_s, dropped_s in zip(seconds(), seconds("megatron"), strict=True):
        assert dropped_s - plain_s == pytest.approx(5 * SCORES / (0.77 * HBM), rel=0.01)


@pytest.mark.parametrize("kernel", ["standard", "memory-efficient"])
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model": "gemma-2-2b"}, "the soft-cap of scores of gemma-2-2b"), ({"documents": (100, 300)}, "documents"),
        ({"mask": "lambda:8:16"}, "`mask` lambda:8:16"), ({"block_mask": "topk:64:3"}, "`block_mask`"),
    ],
)  # fmt: skip
def test_what_fused_kernels_alone_compute_is_refused(fields: dict[str, Any], named: str, kernel: str) -> None:
    setup = Setup("single", seq=1024, scope="attention", set={"schedule.kernel": kernel}, **fields)
    with pytest.raises(InputError, match=f"schedule.kernel={kernel}: .*{named}.* by flash attention alone"):
        setup.resolved().built()
