"""Lengths as the field writes them, models from presets and files, and what is too large or no file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sim.base.errors import InputError
from sim.base.presets import MOST_BYTES, preset_names
from sim.words.workload import Workload, load_model, parse_length


@pytest.mark.parametrize(
    ("text", "tokens"), [("8192", 8192), ("8K", 8192), ("1M", 2**20), ("0.5m", 2**19), ("1.5k", 1536)]
)
def test_lengths(text: str, tokens: int) -> None:
    assert parse_length(text, "--seq") == tokens


@pytest.mark.parametrize("text", ["", "0", "-1", "K", "1G", "1.3", "8 K", "1e6", "eight"])
def test_wrong_lengths(text: str) -> None:
    with pytest.raises(InputError, match="--seq .*8K or 1M"):
        parse_length(text, "--seq")


@pytest.mark.parametrize("name", preset_names("sim/models"))
def test_presets_are_consistent(name: str) -> None:
    model = load_model(name)
    assert model.name == name
    assert len(model.source) > 5


def test_unknown_models_and_missing_files() -> None:
    with pytest.raises(InputError, match="unknown model 'lama3-8b' .did you mean 'llama3-8b'.*FILE.toml.*`model`"):
        load_model("lama3-8b")
    for name in ("./none.toml", "none.json"):
        with pytest.raises(InputError, match="cannot be read"):
            load_model(name)


@pytest.mark.parametrize(
    ("field", "value"),
    [("layers", 0), ("layers", 1_000_000), ("batch", 0), ("batch", int("1" * 400)), ("seed", 10**30)],
)
def test_absurd_workloads(field: str, value: int) -> None:
    fields: dict[str, Any] = {"model": load_model("tiny"), "seq": 1024, "scope": "layer", field: value}
    with pytest.raises(InputError, match=f"`{field}` .*: expected "):
        Workload(**fields)


@pytest.mark.parametrize("padding", [-1, 1024])
def test_no_more_and_no_less_padding_than_tokens(padding: int) -> None:
    """With -1 the sequence would have a token more than it is long."""
    with pytest.raises(InputError, match=f"{padding} tokens of padding in 1024"):
        Workload(model=load_model("tiny"), seq=1024, padding=padding)


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/null", "/", "\0", "x" * 5000, "\ud800"])
@pytest.mark.parametrize("suffix", ["", ".toml", ".json"])
def test_files_that_are_none(name: str, suffix: str) -> None:
    with pytest.raises(InputError, match="cannot be read|unknown model"):
        load_model(name + suffix)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(InputError, match="cannot be read .it is no regular file"):
        load_model(str(tmp_path / "config.json"))


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.touch()
    os.truncate(path, MOST_BYTES + 1)
    with pytest.raises(InputError, match=f"more than {MOST_BYTES}"):
        load_model(str(path))
