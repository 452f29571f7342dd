"""A model as a ``config.json`` of Hugging Face describes it: dense layers as Llama has them, anything else is refused.

What is not in the tables below changes nothing that is known here, and is named in the evidence of predictions.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import msgspec

from sim.errors import InputError, unknown

MODEL_TYPES = {
    "llama": "",
    "mistral": "",
    "qwen2": "the biases of q, k and v",
    "qwen3": "the norms of the heads of q and k",
}
"""What is simulated, and what its layers have, without a key that says so, and the simulated ones have not."""
READ = (
    "_name_or_path", "dtype", "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "model_type",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_parameters",
    "rope_scaling", "rope_theta", "tie_word_embeddings", "torch_dtype", "use_sliding_window", "vocab_size",
)  # fmt: skip
CHANGES_NOTHING = (
    "_attn_implementation", "_attn_implementation_autoset", "architectures", "bos_token_id", "cache_implementation",
    "eos_token_id", "initializer_range", "max_window_layers", "original_max_position_embeddings", "pad_token_id",
    "pretraining_tp", "transformers_version", "unk_token_id", "use_cache",
)  # fmt: skip
"""Neither work nor memory."""
CHANGES_THE_COMPUTATION: dict[str, tuple[object, ...]] = {
    # experts
    "num_local_experts": (0,),
    "num_experts": (0,),
    "n_routed_experts": (0,),
    "n_shared_experts": (0,),
    "num_experts_per_tok": (0,),
    "moe_intermediate_size": (0,),
    "num_nextn_predict_layers": (0,),
    # multi-head latent attention
    "kv_lora_rank": (),
    "q_lora_rank": (),
    "qk_nope_head_dim": (),
    "qk_rope_head_dim": (),
    "v_head_dim": (),
    # other layers
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "qkv_bias": (False,),
    "use_bias": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "parallel_attn": (False,),
    "use_parallel_residual": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    # other attention
    "sliding_window": (),
    "layer_types": ("full_attention",),
    "attention_chunk_size": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "clip_qkv": (),
    "alibi": (False,),
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "no_rope_layers": (),
    "use_mrope": (False,),
    # what training or weights of fewer bits add
    "attention_dropout": (0,),
    "hidden_dropout": (0,),
    "resid_pdrop": (0,),
    "embd_pdrop": (0,),
    "quantization_config": (),
}
"""Keys, and the values beside null at which layers are as Llama's; a list stands for all of its values."""
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_WINDOW_WHERE_ASKED = ("qwen2", "qwen3")
"""Models that use their ``sliding_window`` only if ``use_sliding_window`` says so."""
_MOST_KEYS = 8
"""That one note names."""


def model_fields(path: str, data: bytes) -> dict[str, Any]:
    """Return the fields of the model (``sim.workload.ModelSpec``) that the content of ``path`` describes.

    Raises InputError for a file that is no such configuration, and for a model whose layers are not simulated.
    """
    try:
        config: Any = msgspec.json.decode(data)
        if not isinstance(config, dict):
            raise TypeError("it is not an object")
        return _fields(path, config)
    except KeyError as error:
        raise InputError(f"model {path!r} lacks the key {error}; `model` takes a Hugging Face config.json") from error
    except InputError:
        raise
    except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
        raise InputError(f"model {path!r}: {error}; `model` takes a Hugging Face config.json") from error


def _fields(path: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a model of dense layers; raises InputError for another one, KeyError for a missing key."""
    rope = _object(config, "rope_parameters")
    _require_dense(path, {**rope, **config})
    given = {key: value for key, value in {**rope, **config}.items() if value is not None}
    heads, hidden = given["num_attention_heads"], given["hidden_size"]
    dtype = given.get("torch_dtype", given.get("dtype", "bfloat16"))
    if dtype not in DTYPES:
        raise unknown("torch_dtype", dtype, DTYPES, path)
    fields = {
        "name": given.get("_name_or_path") or given["model_type"],
        "embed_dim": hidden,
        "num_layers": given["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": given.get("num_key_value_heads", heads),
        "head_dim": given["head_dim"] if "head_dim" in given else hidden // heads,
        "ffn_dim": given["intermediate_size"],
        "vocab_size": given["vocab_size"],
        "dtype": DTYPES[dtype],
        "rope_theta": given.get("rope_theta", 10000.0),
        "norm_epsilon": given.get("rms_norm_eps", 1e-5),
        "source": f"Hugging Face configuration {path}",
    }
    notes = _notes(config, rope)
    tied = {"tied_embeddings": True} if given.get("tie_word_embeddings", False) else {}  # false where a type leaves it
    return fields | tied | ({"notes": notes} if notes else {})


def _object(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return an object that may be there; raises TypeError for what is none."""
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise TypeError(f"{key} is not an object")
    return value


def _require_dense(path: str, config: Mapping[str, Any]) -> None:
    """Raise InputError for the first key that says that layers are no dense ones as Llama's, or for another type."""
    simulated = f"Longstep simulates dense layers as {', '.join(MODEL_TYPES)} have them"
    for key, neutral in CHANGES_THE_COMPUTATION.items():
        value = config.get(key)
        values = value if isinstance(value, list) else [value]
        if all(one is None or one in neutral for one in values):
            continue
        if key == "sliding_window" and (not _windowed(config) or _long_window(config)):
            continue
        allowed = " and ".join(["null", *(str(one).lower() for one in neutral)])
        instead = "; for a window in all layers set it to null, and give `window`" if key == "sliding_window" else ""
        raise InputError(f"model {path!r}: {key} is {reprlib.repr(value)}, allowed are {allowed}: {simulated}{instead}")
    if str(config["model_type"]) not in MODEL_TYPES:
        raise InputError(f"model {path!r}: model_type is {reprlib.repr(config['model_type'])}: {simulated}")


def _windowed(config: Mapping[str, Any]) -> bool:
    """Return whether layers use the ``sliding_window`` that there is."""
    return bool(config.get("use_sliding_window", config.get("model_type") not in _WINDOW_WHERE_ASKED))


def _long_window(config: Mapping[str, Any]) -> bool:
    """Return whether the window is no shorter than the sequences that the model is for."""
    window, longest = config["sliding_window"], config.get("max_position_embeddings")
    return isinstance(window, int) and isinstance(longest, int) and window >= longest


def _notes(config: Mapping[str, Any], rope: Mapping[str, Any]) -> list[str]:
    """Return what predictions leave out."""
    notes, kind = [], config["model_type"]
    if MODEL_TYPES[kind]:
        notes.append(f"model: {MODEL_TYPES[kind]} that {kind} has are not simulated")
    if config.get("rope_scaling") or rope.get("rope_type", "default") != "default":
        notes.append("model: its scaling of rotary embeddings is left out, which changes values and no time")
    window = config.get("sliding_window")
    if window is not None and _windowed(config):
        notes.append(f"model: its window of {window} tokens is left out: longer sequences need a window of their own")
    others = [key for key in config if key not in {*READ, *CHANGES_NOTHING, *CHANGES_THE_COMPUTATION}]
    if others:
        more = f" and {len(others) - _MOST_KEYS} more" if len(others) > _MOST_KEYS else ""
        named = ", ".join(map(reprlib.repr, others[:_MOST_KEYS]))
        notes.append(f"model: these keys of its config.json are not known, and change nothing here: {named}{more}")
    return notes
