"""Profiles: whole or not at all, found by name, and refused when they are something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.errors import InputError
from sim.profile import Machine, Profile, load_profile, profile_names, save_profile


def some_profile() -> Profile:
    machine = Machine(gpu="X", cores=2, threads_per_rank=1, software={"torch": "2"})
    return Profile(
        name="mine", created="2026-01-01", command="test", complete=True, machine=machine, cluster={}, points=()
    )


def test_a_profile_is_found_by_name_and_by_file(own_profiles: Path, tmp_path: Path) -> None:
    save_profile(some_profile(), own_profiles / "mine.json")
    save_profile(some_profile(), tmp_path / "other.json")
    assert "mine" in profile_names()
    assert load_profile("mine") == load_profile(str(tmp_path / "other.json")) == some_profile()


def test_unknown_and_broken_profiles(own_profiles: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown profile 'mine'.*longstep calibrate"):
        load_profile("mine")
    with pytest.raises(InputError, match="cannot be read"):
        load_profile("none.json")
    broken = tmp_path / "broken.json"
    for data in (b"", b'{"name": 3}', b'{"nome": "x"}', b'{"name": "\xff"}'):
        broken.write_bytes(data)
        with pytest.raises(InputError, match="broken.json"):
            load_profile(str(broken))
