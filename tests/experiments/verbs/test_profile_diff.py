"""``longstep recheck --against``: what it prints of two profiles."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from calibrate.held.profile_diff import shipped_of
from experiments.verbs.cli import main, open_console
from experiments.verbs.profile_diff import write_profile_diffs
from sim.words.profile import load_profile, save_profile

WIDE = 300
"""Columns in which no row is broken."""


SAME = r"attention_backward causal bf16 20 1\.000 1\.000 to 1\.000 1\.000 [0-9x]+ [0-9.]+ [mu]?s"


def rows(text: str) -> list[str]:
    """Return the rows of tables, their cells apart by one space."""
    return [" ".join(line.replace("│", " ").split()) for line in text.splitlines() if line.startswith("│")]


def test_two_that_ship(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.verbs.cli._WIDTH", WIDE)
    main(["recheck", "a100-sxm", "--against", "h100-sxm"])
    out = capsys.readouterr().out
    printed = " ".join(out.replace("│", " ").split())
    assert "different machines: the efficiencies of 'h100-sxm' are taken on 'A100-SXM-80GB'" in printed
    found = rows(out)
    assert "gemm bf16 512 0.996 0.615 to 1.449 0.450 256x1024x16384 69.11 us" in found
    assert "rms_norm_backward bf16 2 1.567 1.497 to 1.637 1.644 33554432 320.5 us" in found


@pytest.mark.sweep
def test_of_one_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both print and keep the same, but for the width of the tables."""
    monkeypatch.setattr("experiments.verbs.cli._WIDTH", WIDE)
    shipped = shipped_of("A100-SXM-80GB")
    assert [profile.name for profile in shipped] == ["a100-sxm", "a100-sxm-eager"]
    write_profile_diffs(load_profile("a100-sxm"), shipped, tmp_path / "against.txt", open_console())
    printed, kept = capsys.readouterr().out, (tmp_path / "against.txt").read_text()
    for text in (printed, kept):
        assert "different machines" not in text
        assert text.count("points of profile 'a100-sxm'") == 2
        assert any(re.fullmatch(SAME, row) for row in rows(text)), rows(text)
    assert shipped_of("a CPU") == []


def test_files(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("experiments.verbs.cli._WIDTH", WIDE)
    path = tmp_path / "measured.json"
    save_profile(load_profile("h800-ultraattn"), path)
    main(["recheck", str(path), "--against", str(path)])
    assert any(re.fullmatch(SAME, row) for row in rows(capsys.readouterr().out))


def test_kernels_and_shapes_stand_whole_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """Broken, where they are wider than their columns, but not cut."""
    main(["recheck", "h100-sxm", "--against", "h100-sxm"])
    printed = capsys.readouterr().out
    assert "…" not in printed
    firsts = "".join(line.split("│")[1].strip() for line in printed.splitlines() if line.startswith("│"))
    assert "attention_backward" in firsts
