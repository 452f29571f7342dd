"""What there is, listed."""

from __future__ import annotations

import os
import re
from importlib import resources
from pathlib import Path

import pytest

from tests.experiments.verbs.typed import run


def test_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(capsys, "list")
    for name in ("tiny", "llama3-8b", "hgx-h100", "host", "ring", "ulysses", "single", "datasheet"):
        assert name in printed
    assert "hgx-h100" not in run(capsys, "list", "models")


def test_one_profile_that_is_broken_hides_no_others(capsys: pytest.CaptureFixture[str], own_profiles: Path) -> None:
    own_profiles.mkdir(parents=True)
    whole = resources.files("sim").joinpath("profiles", "h100-sxm.json").read_bytes()
    (own_profiles / "host.json").write_bytes(whole[:1000])
    (own_profiles / "none.json").symlink_to("nowhere")
    (own_profiles / "folder.json").mkdir()
    os.mkfifo(own_profiles / "pipe.json")
    (own_profiles / "not utf-8\udcff.json").write_bytes(b"\xff")
    (own_profiles / "[red]\x1b[31m.json").write_bytes(whole)
    printed = run(capsys, "list", "profiles")
    for name in ("host", "none", "folder", "pipe", r"not utf-8\udcff"):
        assert re.search(rf"│ {re.escape(name)} +│ profile ", printed), name
    assert "truncated" in printed, "the reason, in lines that break anywhere"
    assert re.search(r"\[red\]\\u001b\[31m +│ H100-SXM-80GB", printed), "as it is named"
    assert "h200-sxm" in printed
