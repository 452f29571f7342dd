"""``longstep calibrate --against``: what it prints of two profiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.against import shipped_of, write_against
from experiments.cli import main, open_console
from sim.profile import load_profile, save_profile


def test_two_that_ship(capsys: pytest.CaptureFixture[str]) -> None:
    main(["calibrate", "--name", "a100-sxm", "--against", "h100-sxm"])
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "different machines: the efficiencies of 'h100-sxm' are taken on 'A100-SXM-80GB'" in printed
    assert "gemm bf16 512 0." in printed
    assert "512 measured" in printed
    assert "2 roofline" in printed
    assert "launch 2.7 us 2.5 us" in printed
    assert "host, to issue attention_forward 15.2 us 15 us" in printed
    assert "of the peak: gemm 81.7 % (bf16 16384x16384x16384) 71.0 %" in printed


def test_of_one_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Both print and keep the same, but for the width of the tables."""
    shipped = shipped_of("A100-SXM-80GB")
    assert [profile.name for profile in shipped] == ["a100-sxm", "a100-sxm-eager"]
    write_against(load_profile("a100-sxm"), shipped, tmp_path / "against.txt", open_console())
    printed, kept = capsys.readouterr().out, (tmp_path / "against.txt").read_text()
    for text in (printed, kept):
        assert "different machines" not in text
        assert text.count("what they state") == 2
        assert "nothing" in text
    assert shipped_of("a CPU") == []


def test_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    save_profile(load_profile("h800-ultraattn"), path)
    main(["calibrate", "--out", str(path), "--against", str(path)])
    assert "nothing" in capsys.readouterr().out
