"""Models from a ``config.json``: dense layers are read, others refused by the key that says so, the rest is noted.

The files in ``hugging_face/`` have the keys and values of the published ones, written down from memory.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import longstep
from sim.base.errors import InputError
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.model.scope import units
from sim.setup import names
from sim.words import hugging_face
from sim.words.workload import LayerKind, ModelSpec, Workload, load_model

FOLDER = Path(__file__).parent / "hugging_face"
SIZES = ("embed_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_dim", "vocab_size", "dtype")


def keys_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


LLAMA = keys_of("llama-3-8b")


def load(tmp_path: Path, config: object) -> ModelSpec:
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return load_model(str(path))


def refused(tmp_path: Path, config: object) -> str:
    with pytest.raises(InputError) as error:
        load(tmp_path, config)
    assert "config.json" in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "sizes", "notes"),
    [
        ("llama-2-7b", (4096, 32, 32, 32, 128, 11008, 32000, "fp16"), []),
        ("llama-3-8b", (4096, 32, 32, 8, 128, 14336, 128256, "bf16"), []),
        ("llama-3.1-8b", (4096, 32, 32, 8, 128, 14336, 128256, "bf16"), ["scaling of rotary embeddings is left out"]),
        ("mistral-7b-v0.3", (4096, 32, 32, 8, 128, 14336, 32768, "bf16"), []),
        ("qwen2-7b", (3584, 28, 28, 4, 128, 18944, 152064, "bf16"), []),
        ("qwen3-8b", (4096, 36, 32, 8, 128, 12288, 151936, "bf16"), []),
    ],
)
def test_dense_models_are_read(name: str, sizes: tuple[object, ...], notes: list[str]) -> None:
    model = load_model(str(FOLDER / f"{name}.json"))
    assert tuple(getattr(model, field) for field in SIZES) == sizes
    found = model.notes or ()
    assert len(found) == len(notes)
    assert all(words in note for words, note in zip(notes, found, strict=True))
    config = keys_of(name)
    assert model.rope_theta == config.get("rope_theta", 10000.0)
    assert model.norm_epsilon == config["rms_norm_eps"]


def test_an_embedding_that_is_the_head_is_one_weight(tmp_path: Path) -> None:
    """3,212,749,824 weights of Llama 3.2 3B, by its model card 3.21 billion; types that do not say so have two."""
    keys = {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "intermediate_size": 8192}
    tied = load(tmp_path, LLAMA | keys | {"head_dim": 128, "tie_word_embeddings": True})
    for model in (tied, load_model("llama3.2-3b")):
        workload = Workload(model=model, seq=8, scope="step", layers=model.num_layers)
        assert sum(math.prod(unit.flat.shape(model)) for unit in units(workload)) == 3_212_749_824
    for said in ({"tie_word_embeddings": False}, {"tie_word_embeddings": None}, {}):
        left = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
        assert not load(tmp_path, left | said).tied_embeddings


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mixtral-8x7b-v0.1", "num_local_experts is 8, allowed are null and 0"),
        ("deepseek-v3", "n_routed_experts is 256, allowed are null and 0"),
    ],
)
def test_other_models_are_refused_by_name(name: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        load_model(str(FOLDER / f"{name}.json"))
    assert words in str(error.value)
    assert "dense layers as llama, mistral, qwen2, qwen3" in str(error.value)


OF_TYPES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"attention_bias": True, "mlp_bias": True}, {"biases": ("qkv", "out", "mlp")}),
    ({"hidden_act": "gelu_pytorch_tanh"}, {"mlp": "geglu"}),
    ({"partial_rotary_factor": 0.5}, {"rotary_dims": 64}),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}}, {"rotary_dims": 96}),
    ({"model_type": "qwen2"}, {"biases": ("qkv",)}),
    ({"model_type": "qwen3"}, {"qk_norm": "head"}),
    ({"model_type": "qwen3", "attention_bias": True}, {"qk_norm": "head", "biases": ("qkv", "out")}),
    ({"model_type": "glm", "attention_bias": True}, {"biases": ("qkv",)}),
    ({"model_type": "glm4", "attention_bias": True}, {"biases": ("qkv",), "norms": "around"}),
    ({"model_type": "olmo2"}, {"norms": "after", "qk_norm": "all"}),
    ({"model_type": "phi3"}, {}),
    ({"sliding_window": 4096}, {"kinds": (LayerKind(window=4096),)}),
    ({"sliding_window": 262144}, {"kinds": (LayerKind(window=262144),)}),
    (
        {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 16},
        {"kinds": (LayerKind(window=64), LayerKind())},
    ),
    (
        {"sliding_window": 64, "max_window_layers": 31, "use_sliding_window": True, "model_type": "qwen2"},
        {"biases": ("qkv",), "kinds": (*[LayerKind()] * 31, LayerKind(window=64))},
    ),
    ({"no_rope_layers": [1, 0] * 16}, {"kinds": (LayerKind(), LayerKind(rotary_dims=0))}),
    ({"attn_logit_softcapping": 50.0}, {"attention_softcap": 50.0}),
    ({"query_pre_attn_scalar": 64}, {"attention_scale": 0.125}),
    (
        {"model_type": "granite", "logits_scaling": 8, "residual_multiplier": 0.22, "embedding_multiplier": 12},
        {"logit_scale": 0.125, "residual_scale": 0.22, "embedding_scale": 12.0},
    ),
]


@pytest.mark.parametrize(("keys", "fields"), OF_TYPES, ids=str)
def test_lines_of_the_block_by_type_and_key(tmp_path: Path, keys: dict[str, Any], fields: dict[str, Any]) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "architectures"}
    given = load(tmp_path, config | keys)
    plain = msgspec.structs.asdict(load(tmp_path, config)) | {"notes": msgspec.UNSET}
    found = msgspec.structs.asdict(msgspec.structs.replace(given, notes=msgspec.UNSET, name=plain["name"]))
    assert {name: value for name, value in found.items() if value != plain[name]} == fields


OF_FILES = (
    "gemma-2-9b", "gemma-3-1b", "glm-4-9b-0414", "granite-3.1-8b", "llama-2-7b", "llama-3-8b", "llama-3.1-8b",
    "mistral-7b-v0.3", "olmo-2-1124-7b", "phi-4-mini", "qwen2.5-7b", "qwen3-8b", "smollm3-3b",
)  # fmt: skip


@pytest.mark.parametrize("name", OF_FILES)
def test_a_published_file_and_a_preset_are_one_model(name: str) -> None:
    file, preset = load_model(str(FOLDER / f"{name}.json")), load_model(name)
    said = {"name": "", "source": "", "notes": msgspec.UNSET, "dtype": "bf16"}
    assert msgspec.structs.replace(file, **said) == msgspec.structs.replace(preset, **said)
    assert file.notes == preset.notes or name == "llama-3.1-8b"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_experts", 128),
        ("kv_lora_rank", 512),
        ("qkv_bias", True),
        ("hidden_activation", ["silu"]),
        ("sliding_window", "all"),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("layer_types", ["full_attention"] * 31 + ["linear_attention"]),
        ("layer_types", ["full_attention"] * 31 + ["sliding_attention"]),
        ("no_rope_layers", [1] * 31),
        ("no_rope_layers", [True] * 32),
        ("lm_head_bias", True),
        ("attn_logit_softcapping", "50"),
        ("partial_rotary_factor", 1.5),
        ("partial_rotary_factor", -1),
        ("partial_rotary_factor", 0.001),
        ("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": "half"}),
        ("attention_dropout", 0.1),
        ("quantization_config", {"quant_method": "fp8"}),
        ("model_type", "gemma2"),
        ("architectures", ["MixtralForCausalLM"]),
        ("architectures", ["DeepseekV3ForCausalLM"]),
        ("architectures", ["LlamaForSequenceClassification"]),
        ("architectures", []),
        ("architectures", "LlamaForCausalLM"),
        ("model_type", ["llama"]),
        ("model_type", "mistral"),
        ("tie_word_embeddings", "false"),
        ("tie_word_embeddings", 1),
        ("use_sliding_window", "no"),
        ("layer_types", []),
        ("layer_types", ["full_attention"] * 31),
        ("layer_types", "full_attention"),
        ("num_hidden_layers", 32.0),
        ("num_hidden_layers", True),
        ("hidden_size", "1024"),
        ("partial_rotary_factor", True),
        ("attention_bias", 0),
        ("rope_scaling", "yarn"),
        ("max_position_embeddings", "8192"),
    ],
)
def test_what_changes_the_computation_is_refused(tmp_path: Path, key: str, value: object) -> None:
    config = LLAMA | {key: value}
    named = {"rope_parameters": "partial_rotary_factor", "model_type": "(model_type|architectures)"}.get(key, key)
    assert re.search(f"{named} (is|lists|has) ", refused(tmp_path, config))


NEUTRAL: list[dict[str, object]] = [
    {key: value}
    for key, values in hugging_face.CHANGES_THE_COMPUTATION.items()
    for value in (None, *values)
] + [
    {"layer_types": ["full_attention"] * 32},
    {"no_rope_layers": [1] * 32},
    {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 32, "model_type": "qwen2",
     "architectures": None},
    {"query_pre_attn_scalar": 128, "embedding_multiplier": 1.0, "logits_scaling": 1},
    {"sliding_window": 4096, "use_sliding_window": False},
    {"sliding_window": 4096, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default", "partial_rotary_factor": 1.0}},
]  # fmt: skip


@pytest.mark.parametrize("more", NEUTRAL, ids=str)
def test_neutral_values_change_nothing(tmp_path: Path, more: dict[str, object]) -> None:
    model, plain = load(tmp_path, LLAMA | more), load(tmp_path, LLAMA)
    assert [getattr(model, field) for field in SIZES] == [getattr(plain, field) for field in SIZES]
    assert model.rope_theta == 500000.0


def test_every_key_is_in_one_table() -> None:
    keys = [*hugging_face.READ, *hugging_face.CHANGES_NOTHING, *hugging_face.CHANGES_THE_COMPUTATION, "architectures"]
    assert len(set(keys)) == len(keys)


UNKNOWN = (
    "n_experts", "moe_num_experts", "num_moe_experts", "moe", "ffn_config", "rotary_dim", "activation_function",
    "gated_mlp", "n_layer", "multi_query", "num_kv_shared_layers", "attention_window_size", "attention_types",
    "lora_rank", "text_config", "vision_config", "mamba_d_state", "norm_type", "qk_norm",
    "post_attention_norm", "\x1b[31mred",
)  # fmt: skip


@pytest.mark.parametrize("key", UNKNOWN)
def test_a_key_of_which_nothing_is_known_is_refused_by_name(tmp_path: Path, key: str) -> None:
    message = refused(tmp_path, LLAMA | {key: {"inside": 1}})
    assert f"may change what a layer is: {key!r}" in message
    assert f"`set` model.ignore={key}" in message
    assert load(tmp_path, LLAMA | {key: None}).notes is msgspec.UNSET


def test_a_key_that_is_ignored_is_named_in_the_evidence(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"text_config": {}, "qk_norm": True, "architectures": ["SomeForCausalLM"]}))
    apart = ["model.ignore=text_config", "model.ignore=qk_norm", "model.ignore=architectures"]
    for given in (apart, {"model.ignore": "text_config+qk_norm+architectures"}):
        found = longstep.Setup(model=path, seq=1024, schedule="single", cluster="hgx-h100", set=given).resolved()
        (note,) = found.workload.model.notes or ()
        assert "'text_config', 'qk_norm', 'architectures'" in note
    below = [text.removeprefix("model.") for text in apart]
    assert names.model(path, set=[*below, "num_layers=2"]).num_layers == 2
    for key, words in (("hidden_size", "unknown key to ignore 'hidden_size'"), ("qk_normm", "did you mean 'qk_norm'")):
        with pytest.raises(InputError, match=words):
            names.model(path, set={"ignore": key})
    for model in ("llama3-8b", load_model("llama3-8b")):
        with pytest.raises(InputError, match="is no config.json"):
            names.model(model, set={"ignore": "moe"})


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn"}}, "scaling of rotary embeddings is left out"),
    ],
)
def test_what_is_left_out_is_noted(tmp_path: Path, more: dict[str, object], words: str) -> None:
    (note,) = load(tmp_path, LLAMA | more).notes or ()
    assert words in note


def test_a_model_without_notes_has_the_json_that_it_always_had() -> None:
    """And schedules of it the hash that they always had."""
    model = load_model("llama3-8b")
    assert [*msgspec.to_builtins(model)] == [
        field for field in ModelSpec.__struct_fields__ if getattr(model, field) is not msgspec.UNSET
    ]
    assert len(msgspec.to_builtins(model)) == 12
    entry = SCHEDULES["ring"]
    noted = msgspec.structs.replace(model, notes=("something",))
    plain, other = (entry.schedule(Workload(model=one, seq=64), entry.mesh(2, one)) for one in (model, noted))
    assert plain.hash != other.hash


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in LLAMA.items() if name != key}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("", "takes a Hugging Face config.json"),
        ("{", "takes a Hugging Face config.json"),
        ("[]", "not an object"),
        ('{"a":' * 5000, "recursion"),
        ('{"a":' + "1" * 5000 + "}", "out of range"),
        (json.dumps(LLAMA | {"_name_or_path": "\ud800"}), "config.json"),
        (LLAMA | {"_name_or_path": "\x1b[31mred"}, "name is .*expected a text without control characters"),
        (LLAMA | {"_name_or_path": "x" * 3000}, "name: expected a text whose length is <= 200"),
        (LLAMA | {"_name_or_path": 3}, "_name_or_path is 3: expected a text"),
        (without("hidden_size"), "lacks the key 'hidden_size'"),
        (without("model_type"), "lacks the key 'model_type'"),
        (LLAMA | {"num_key_value_heads": 5}, "does not divide num_heads 32"),
        (LLAMA | {"torch_dtype": "int8"}, "unknown torch_dtype 'int8'"),
        (LLAMA | {"torch_dtype": ["bfloat16"]}, r"torch_dtype is \['bfloat16'\]: expected a text"),
        (LLAMA | {"num_hidden_layers": "many"}, "num_hidden_layers is 'many': expected a whole number"),
        (LLAMA | {"hidden_size": 1000, "num_attention_heads": 16}, "hidden_size 1000 is no multiple of .*_heads 16"),
        (LLAMA | {"hidden_act": "gelu"}, "unknown hidden_act 'gelu'.*allowed are silu, swish"),
        (LLAMA | {"model_type": "mistral", "architectures": None, "attention_bias": True}, "mistral do not read"),
        (LLAMA | {"rope_parameters": {"rotary_dim": 64}}, "rope_parameters has a key 'rotary_dim' that is not known"),
        (LLAMA | {"num_attention_heads": 0}, "config.json"),
        (LLAMA | {"num_attention_heads": "x"}, "num_attention_heads is 'x': expected a whole number"),
        (LLAMA | {"rope_theta": "x"}, "rope_theta is 'x': expected a number"),
        (LLAMA | {"rope_theta": 0}, "rope_theta is 0: expected a number > 0"),
        (LLAMA | {"rope_parameters": [1]}, r"rope_parameters is \[1\]: expected an object"),
        (LLAMA | {"head_dim": 1e308}, "head_dim is 1e.308: expected a whole number"),
        (LLAMA | {"head_dim": 2**40}, "head_dim is 1099511627776: expected a whole number <= 16777216"),
        (LLAMA | {"num_attention_heads": 2**20, "hidden_size": 2**20}, "num_heads is 1048576: expected .* <= 1024"),
        (LLAMA | {"hidden_size": 1e308}, "hidden_size is 1e.308: expected a whole number"),
    ],
)  # fmt: skip
def test_wrong_configurations(tmp_path: Path, config: object, message: str) -> None:
    assert re.search(message, refused(tmp_path, config))
