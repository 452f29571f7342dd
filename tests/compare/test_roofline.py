"""Machine balance, and kernels against it: by hand from datasheets, and below every roof."""

from __future__ import annotations

import pytest

import longstep
from longstep import InputError, Setup
from sim.compare.roofline import calibrated, datasheet
from sim.words.profile import load_profile

LLAMA = Setup(model="llama3-8b", cluster="hgx-h100")


def test_machine_balance_is_peak_over_bandwidth() -> None:
    """A100 311.9e12 / 2.039e12 = 153, H100 989.4e12 / 3.35e12 = 295 FLOPs a byte; kernels reach 176 and 329: they fall
    short of the memory's rate by more than of the peak.
    """
    rows = {row["cluster"]: row for row in longstep.machine_balance()}
    assert "host" not in rows
    assert rows["dgx-a100"]["flops_per_byte"] == pytest.approx(153, abs=0.5)
    assert rows["hgx-h100"]["flops_per_byte"] == pytest.approx(295, abs=0.5)
    assert rows["l20-pcie"]["calibrated_flops_per_byte"] is None, "which names no profile"
    for row in rows.values():
        if row["calibrated_flops_per_s"]:
            assert 0.6 < row["calibrated_flops_per_s"] / row["peak_flops_per_s"] < 1
            assert 0.6 < row["calibrated_bytes_per_s"] / row["hbm_bytes_per_s"] < 1


def test_what_is_calibrated_follows_the_figures_of_the_cluster() -> None:
    spec = longstep.cluster("hgx-h100", set={"gpu.peak_flops_per_s.bf16": "*2", "hbm.bytes_per_s": "*4"}).spec
    profile, plain = load_profile("h100-sxm"), longstep.cluster("hgx-h100").spec
    one, other = calibrated(profile, plain, "bf16"), calibrated(profile, spec, "bf16")
    assert one
    assert other
    assert other.flops_per_byte == pytest.approx(one.flops_per_byte / 2)
    assert datasheet(spec, "bf16").flops_per_byte == pytest.approx(datasheet(plain, "bf16").flops_per_byte / 2)
    assert calibrated(profile, plain, "fp64") is None, "of which no product was measured"


def test_attention_is_bound_by_memory_unless_its_scores_stay_on_chip() -> None:
    """Unfused, each pair of D = 128 takes 4 D FLOPs and 4 passes of 2 bytes through HBM: 64 FLOPs a byte at any length.
    Flash reads q, k, v and writes out: causal, S / 2 keys for each query, 4 D S / 2 FLOPs over (2 + 2 / 4) D 2 bytes.
    """
    rows = longstep.roofline(LLAMA, ["8K", "128K"])
    of = {(row["seq"], row["attention"]): row for row in rows if row["kernel"] == "attention_forward"}
    for seq in (2**13, 2**17):
        for scores in ("memory-efficient", "standard"):
            assert of[seq, scores]["flops_per_byte"] == pytest.approx(64, rel=0.02)
            assert of[seq, scores]["bound"] == "memory"
            assert of[seq, scores]["seconds"] > 5 * of[seq, "flash"]["seconds"]
        assert of[seq, "flash"]["flops_per_byte"] == pytest.approx(0.4 * seq, rel=0.02)
        assert of[seq, "flash"]["bound"] == "compute"
    again = [row for row in rows if row["kernel"] == "attention_backward" and row["seq"] == 2**13]
    assert [row["attention"] for row in again] == ["flash", "memory-efficient", "standard"]
    assert again[1]["hbm_bytes"] > again[2]["hbm_bytes"] > 50 * again[0]["hbm_bytes"]


@pytest.mark.parametrize("profile", [None, "datasheet"])
def test_no_kernel_is_above_the_roof(profile: str | None) -> None:
    """At the rates of the datasheet all are on it; their times are those of a simulation."""
    rows = longstep.roofline(LLAMA.replace(profile=profile), ["16K"])
    assert {row["kernel"] for row in rows} >= {"gemm", "swiglu", "rms_norm", "rope", "attention_backward"}
    for row in rows:
        if profile:
            assert row["share_of_roof"] == pytest.approx(1)
        assert row["share_of_roof"] <= 1 + 1e-9
        assert (row["bound"] == "compute") == (row["flops_per_byte"] > 989.4 / 3.35)
    with pytest.raises(InputError, match="`lengths` is empty"):
        longstep.roofline(LLAMA, [])
