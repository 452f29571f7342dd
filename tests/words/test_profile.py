"""Profiles: whole or not at all, found by name, and refused when they are something else."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from sim.base.errors import InputError
from sim.words.profile import Machine, Profile, load_profile, profile_names, save_profile


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
    whole = msgspec.json.encode(some_profile())
    tiles = {"kernel": "attention_forward", "dtype": "bf16", "head_dim": 0, "fixed_s": 0, "tile_s": 0, "pair_s": 1}
    for data, message in (
        (b"", "truncated"),
        (whole[:-20], "truncated"),
        (whole.replace(b"mine", b"m\xffne"), "utf-8"),
        (b"[" * 100_000, "recursion"),
        (whole.replace(b'"cluster":{}', b'"cluster":' + b'{"a":' * 5000), "recursion"),
        (whole.replace(b'"mine"', b"3"), "name is 3: expected a text"),
        (whole.replace(b'"name"', b'"nome"'), "unknown key 'nome' .did you mean 'name'.*allowed are name, created"),
        (msgspec.json.encode(json.loads(whole) | {"tiles": [tiles]}), r"tiles\[0\].head_dim is 0: expected .* >= 1"),
        (msgspec.json.encode(json.loads(whole) | {"blocks_per_sm": {"gemm": 0}}), "expected a whole number >= 1"),
    ):
        broken.write_bytes(data)
        with pytest.raises(InputError, match=message) as error:
            load_profile(str(broken))
        assert "broken.json" in str(error.value)
        assert "\n" not in str(error.value)
    for name in ("\0", "\0.json", "x" * 5000, "x" * 5000 + ".json", "\ud800", "/dev/zero"):
        with pytest.raises(InputError, match="cannot be read|unknown profile"):
            load_profile(name)
