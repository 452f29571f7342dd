"""A model as a ``config.json`` of Hugging Face describes it: dense layers that can be simulated, anything else is
refused by the key that says so.

Every key of a file is in one of the tables below, or is refused: it may change what a layer is. Who knows that it does
not says so, and predictions name it in their evidence.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from sim.errors import InputError, unknown


class _Type(NamedTuple):
    """A ``model_type`` whose layers are simulated."""

    stem: str
    """``architectures`` is this with ForCausalLM behind it."""
    fields: Mapping[str, Any] = {}
    """What its layers have without a key that says so."""
    biases: Mapping[str, tuple[str, ...]] = {}
    """Which linear layers have a bias by the keys that say so."""
    window_if_asked: bool = False
    """Whether its ``sliding_window`` counts only if ``use_sliding_window`` says so."""


_OF_ATTENTION = {"attention_bias": ("qkv", "out")}
MODEL_TYPES = {
    "llama": _Type("Llama", biases={**_OF_ATTENTION, "mlp_bias": ("mlp",)}),
    "mistral": _Type("Mistral"),
    "qwen2": _Type("Qwen2", {"biases": ("qkv",)}, window_if_asked=True),
    "qwen3": _Type("Qwen3", {"qk_norm": "head"}, _OF_ATTENTION, window_if_asked=True),
    "phi3": _Type("Phi3"),
    "glm": _Type("Glm", biases={"attention_bias": ("qkv",)}),
    "glm4": _Type("Glm4", {"norms": "around"}, {"attention_bias": ("qkv",)}),
    "olmo2": _Type("Olmo2", {"norms": "after", "qk_norm": "all"}, _OF_ATTENTION),
}
"""By transformers' modeling_*.py of each."""
ACTIVATIONS = {"silu": None, "swish": None, "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
"""What an MLP of two products side by side computes, by its activation."""
SIZES = {
    "hidden_size": "embed_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ffn_dim",
    "vocab_size": "vocab_size",
}
"""Keys whose values are fields of the model."""
READ: dict[str, str] = {
    **dict.fromkeys(SIZES, "a whole number"),
    "_name_or_path": "a text",
    "model_type": "a text",
    "torch_dtype": "a text",
    "dtype": "a text",
    "rope_theta": "a number",
    "rms_norm_eps": "a number",
    "rope_parameters": "an object",
    "rope_scaling": "an object",
    "hidden_act": "a text",
    "hidden_activation": "a text",
    "attention_bias": "true or false",
    "mlp_bias": "true or false",
    "partial_rotary_factor": "a number",
    "tie_word_embeddings": "true or false",
    "use_sliding_window": "true or false",
    "layer_types": "a list",
    "max_position_embeddings": "a whole number",
}
"""What is read, and of which kind it is."""
_KINDS: dict[str, tuple[type, ...]] = {
    "a whole number": (int,),
    "a number": (int, float),
    "a text": (str,),
    "true or false": (bool,),
    "an object": (dict,),
    "a list": (list,),
}
CHANGES_NOTHING = frozenset({
    # of code, files and tokens
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "add_bos_token", "add_eos_token",
    "attn_implementation", "auto_map", "bos_token", "bos_token_id", "cache_implementation", "eos_token",
    "eos_token_id", "keys_to_ignore_at_inference", "model_max_length", "pad_token", "pad_token_id", "prefix",
    "sep_token_id", "tokenizer_class", "transformers_version", "unk_token_id", "use_cache", "use_flash_attn",
    # of generating and of tasks
    "do_sample", "finetuning_task", "id2label", "label2id", "max_length", "min_length", "num_beams", "num_labels",
    "output_attentions", "output_hidden_states", "problem_type", "repetition_penalty", "return_dict",
    "task_specific_params", "temperature", "top_k", "top_p", "torchscript", "use_bfloat16",
    # of how weights begin, how products are cut, and how long sequences may be
    "embedding_initializer_range", "initializer_factor", "initializer_range", "max_window_layers",
    "original_max_position_embeddings", "pretraining_tp",
})  # fmt: skip
"""Neither work nor memory."""
SCALES_ROTATIONS = frozenset({
    "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "long_factor", "low_freq_factor",
    "mscale", "mscale_all_dim", "original_max_position_embeddings", "rope_type", "short_factor", "type",
})  # fmt: skip
"""Keys of ``rope_parameters`` that change by how much tokens are rotated."""
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
    "attention_chunk_size": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "clip_qkv": (),
    "alibi": (False,),
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
FULL = "full_attention"
"""The kind of layers whose queries see all that the mask keeps."""
_IGNORE = "where it does not matter, `set` model.ignore"


def model_fields(path: str, data: bytes, ignored: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields of the model (``sim.workload.ModelSpec``) that the content of ``path`` describes, without keys
    that are ``ignored``.

    Raises InputError for a file that is no such configuration, and for a model whose layers are not simulated.
    """
    try:
        config: Any = msgspec.json.decode(data)
        if not isinstance(config, dict):
            raise TypeError("it is not an object")
        for key in ignored:
            if key not in config or key in READ:
                may = [one for one in config if one not in READ]
                raise unknown("key to ignore", key, may, f"`set` model.ignore=KEY of {path}")
        left = {key: value for key, value in config.items() if key not in ignored and value is not None}
        fields = _fields(path, left)
    except KeyError as error:
        raise InputError(f"model {path!r} lacks the key {error}; `model` takes a Hugging Face config.json") from error
    except InputError:
        raise
    except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
        raise InputError(f"model {path!r}: {error}; `model` takes a Hugging Face config.json") from error
    if ignored:
        asked = f"model: ignored, as asked, of its config.json: {', '.join(map(reprlib.repr, ignored))}"
        fields["notes"] = [*fields.get("notes", ()), asked]
    return fields


def _fields(path: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a model of dense layers; raises InputError for another one, KeyError for a missing key."""
    _require_kinds(path, config)
    rope = config.get("rope_parameters", {})
    _require_kinds(path, {key: value for key, value in rope.items() if value is not None})
    given = {**rope, **config}
    _require_dense(path, given)
    _require_known(path, rope, config)
    heads, hidden, layers = (given[key] for key in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    if "head_dim" not in given and (heads < 1 or hidden % heads):
        raise InputError(
            f"model {path!r}: hidden_size {hidden} is no multiple of num_attention_heads {heads}: allowed is a "
            f"multiple, or a key head_dim"
        )
    kinds = given.get("layer_types", [FULL] * layers)
    if len(kinds) != layers:
        raise InputError(f"model {path!r}: layer_types lists {len(kinds)} layers of {layers}")
    if others := [kind for kind in kinds if kind != FULL]:
        raise InputError(f"model {path!r}: layer_types has {reprlib.repr(others[0])}, allowed is {FULL}")
    dtype = given.get("torch_dtype", given.get("dtype", "bfloat16"))
    if dtype not in DTYPES:
        raise unknown("torch_dtype", dtype, DTYPES, path)
    fields = {
        "name": given.get("_name_or_path") or given["model_type"],
        **{field: given[key] for key, field in SIZES.items() if key not in {"head_dim", "num_key_value_heads"}},
        "num_kv_heads": given.get("num_key_value_heads", heads),
        "head_dim": given["head_dim"] if "head_dim" in given else hidden // heads,
        "dtype": DTYPES[dtype],
        "rope_theta": given.get("rope_theta", 10000.0),
        "norm_epsilon": given.get("rms_norm_eps", 1e-5),
        "source": f"Hugging Face configuration {path}",
        **MODEL_TYPES[given["model_type"]].fields,
    }
    fields |= _lines(path, given, fields["head_dim"])
    notes = _notes(given, rope)
    tied = {"tied_embeddings": True} if given.get("tie_word_embeddings", False) else {}  # false where a type leaves it
    return fields | tied | ({"notes": notes} if notes else {})


def _lines(path: str, given: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Return the fields that say what a layer computes, where that is not what Llama's do."""
    kind, found = MODEL_TYPES[given["model_type"]], dict[str, Any]()
    for key in ("hidden_act", "hidden_activation"):
        name = given.get(key, "silu")
        if name not in ACTIVATIONS:
            raise unknown(key, name, ACTIVATIONS, path)
        found |= {"mlp": ACTIVATIONS[name]} if ACTIVATIONS[name] else {}
    asked = [key for key in ("attention_bias", "mlp_bias") if given.get(key)]
    if lacks := [key for key in asked if key not in kind.biases]:
        raise InputError(f"model {path!r}: {lacks[0]} is true, which layers of {given['model_type']} do not read")
    biases = (*kind.fields.get("biases", ()), *(one for key in asked for one in kind.biases[key]))
    found |= {"biases": biases} if biases else {}
    share = given.get("partial_rotary_factor", 1)
    rotated = int(head_dim * share)
    if share != 1 and not (0 < share < 1 and rotated >= 1 and rotated % 2 == 0):
        raise InputError(
            f"model {path!r}: partial_rotary_factor is {share}, of heads of {head_dim} features: expected more than 0 "
            f"and at most 1, and an even number of features"
        )
    return found | ({"rotary_dims": rotated} if rotated < head_dim else {})


def _require_kinds(path: str, config: Mapping[str, Any]) -> None:
    """Raise InputError for a value of another kind than what is read of its key: a text is no number, nor true."""
    for key, kind in READ.items():
        value = config.get(key)
        right = isinstance(value, _KINDS[kind]) and (bool in _KINDS[kind] or not isinstance(value, bool))
        if value is not None and not right:
            raise InputError(f"model {path!r}: {key} is {reprlib.repr(value)}: expected {kind}; change it in that file")


def _require_dense(path: str, config: Mapping[str, Any]) -> None:
    """Raise InputError for the first key that says that layers are no dense ones as Llama's, or for another type."""
    simulated = f"Longstep simulates dense layers as {', '.join(MODEL_TYPES)} have them"
    for key, neutral in CHANGES_THE_COMPUTATION.items():
        value = config.get(key)
        values = value if isinstance(value, list) and value else [value]
        if all(one is None or _is_among(one, neutral) for one in values):
            continue
        if key == "sliding_window" and (not _windowed(config) or _long_window(config)):
            continue
        allowed = " and ".join(["null", *(str(one).lower() for one in neutral)])
        instead = "; for a window in all layers set it to null, and give `window`" if key == "sliding_window" else ""
        raise InputError(f"model {path!r}: {key} is {reprlib.repr(value)}, allowed are {allowed}: {simulated}{instead}")
    kind = config["model_type"]
    if kind not in MODEL_TYPES:
        raise InputError(f"model {path!r}: model_type is {reprlib.repr(kind)}: {simulated}")
    wanted = [f"{MODEL_TYPES[kind].stem}ForCausalLM"]
    if (classes := config.get("architectures", wanted)) != wanted:
        raise InputError(
            f"model {path!r}: architectures is {reprlib.repr(classes)}, of a {kind} allowed is {wanted}: {simulated}; "
            f"{_IGNORE}=architectures"
        )


def _require_known(path: str, rope: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise InputError for keys of which nothing is known."""
    known = {"architectures", *READ, *CHANGES_NOTHING, *CHANGES_THE_COMPUTATION}
    if inside := [key for key in rope if key not in {*known, *SCALES_ROTATIONS}]:
        raise InputError(f"model {path!r}: rope_parameters has a key {reprlib.repr(inside[0])} that is not known")
    if others := [key for key in config if key not in known]:
        named = ", ".join(map(reprlib.repr, others))
        raise InputError(
            f"model {path!r} has a key that is not known, and that may change what a layer is: {named}; "
            f"{_IGNORE}={'+'.join(others)}"
        )


def _is_among(value: object, allowed: Sequence[object]) -> bool:
    """Return whether a value is one of those allowed; 0 is not false."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)


def _windowed(config: Mapping[str, Any]) -> bool:
    """Return whether layers use the ``sliding_window`` that there is."""
    kind = MODEL_TYPES.get(config.get("model_type", ""))
    return bool(config.get("use_sliding_window", not (kind and kind.window_if_asked)))


def _long_window(config: Mapping[str, Any]) -> bool:
    """Return whether the window is no shorter than the sequences that the model is for."""
    window, longest = config["sliding_window"], config.get("max_position_embeddings")
    return isinstance(window, int) and isinstance(longest, int) and window >= longest


def _notes(config: Mapping[str, Any], rope: Mapping[str, Any]) -> list[str]:
    """Return what predictions leave out."""
    notes = []
    if config.get("rope_scaling") or rope.get("rope_type", "default") != "default":
        notes.append("model: its scaling of rotary embeddings is left out, which changes values and no time")
    window = config.get("sliding_window")
    if window is not None and _windowed(config):
        notes.append(f"model: its window of {window} tokens is left out: longer sequences need a window of their own")
    return notes
