"""Lengths as the field writes them, and models from presets, files and Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim.errors import InputError
from sim.presets import preset_names
from sim.workload import load_model, parse_length

LLAMA = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
    "model_type": "llama",
}


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
    assert model.embed_dim == model.num_heads * model.head_dim
    assert len(model.source) > 5


def test_a_hugging_face_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    model, preset = load_model(str(path)), load_model("llama3-8b")
    for field in ("embed_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_dim", "vocab_size", "dtype"):
        assert getattr(model, field) == getattr(preset, field)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json"),
        ("[]", "not an object"),
        (
            json.dumps({key: value for key, value in LLAMA.items() if key != "hidden_size"}),
            "lacks the key 'hidden_size'",
        ),
        (json.dumps(LLAMA | {"num_key_value_heads": 5}), "does not divide num_heads 32"),
        (json.dumps(LLAMA | {"torch_dtype": "int8"}), "unknown torch_dtype 'int8'"),
        (json.dumps(LLAMA | {"num_hidden_layers": "many"}), "Expected `int`"),
        (json.dumps(LLAMA | {"num_attention_heads": 0}), "config.json"),
    ],
)
def test_wrong_configurations(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as error:
        load_model(str(path))
    assert "\n" not in str(error.value)


def test_unknown_models_and_missing_files() -> None:
    with pytest.raises(InputError, match="unknown model 'lama3-8b' .did you mean 'llama3-8b'.*FILE.toml.*`model`"):
        load_model("lama3-8b")
    for name in ("./none.toml", "none.json"):
        with pytest.raises(InputError, match="cannot be read"):
            load_model(name)
