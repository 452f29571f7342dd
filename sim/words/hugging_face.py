"""A model as a ``config.json`` of Hugging Face describes it: dense layers that can be simulated, anything else is
refused by the key that says so.

Every key of a file is in one of the tables below, or is refused, since it may change what a layer is. Who knows that it
does not sets ``model.ignore=KEY``, and predictions name it in their evidence.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from sim.base.errors import InputError, unknown


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
    "gemma2": _Type("Gemma2", {"norms": "around"}, _OF_ATTENTION),
    "gemma3_text": _Type("Gemma3", {"norms": "around", "qk_norm": "head"}, _OF_ATTENTION),
    "granite": _Type("Granite", biases={**_OF_ATTENTION, "mlp_bias": ("mlp",)}),
    "smollm3": _Type("SmolLM3", biases={**_OF_ATTENTION, "mlp_bias": ("mlp",)}, window_if_asked=True),
}
"""By transformers' modeling_*.py of each."""
ACTIVATIONS = {"silu": None, "swish": None, "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
"""What an MLP of two products side by side computes, by its activation."""
_GEMMA = ("gemma2", "gemma3_text")
"""Types whose embeddings are scaled by the root of the width, and are the head where no key says otherwise."""
_SCALES = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention_scale",
    "residual_multiplier": "residual_scale",
    "attn_logit_softcapping": "attention_softcap",
    "final_logit_softcapping": "logit_softcap",
}
"""Keys whose values are fields of the model, where they are no 1."""
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
    "no_rope_layers": "a list",
    "sliding_window": "a whole number",
    "sliding_window_pattern": "a whole number",
    "max_window_layers": "a whole number",
    "rope_local_base_freq": "a number",
    "query_pre_attn_scalar": "a number",
    "logits_scaling": "a number",
    **dict.fromkeys(_SCALES, "a number"),
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
    "embedding_initializer_range", "initializer_factor", "initializer_range",
    "no_rope_layer_interval", "original_max_position_embeddings", "pretraining_tp", "sliding_window_size",
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
    "lm_head_bias": (False,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "use_bias": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "parallel_attn": (False,),
    "use_parallel_residual": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    # other attention
    "attention_chunk_size": (),
    "clip_qkv": (),
    "alibi": (False,),
    "rotary_pct": (1,),
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
SOFTCAP = "model: what its soft-cap costs in attention kernels is not known, and left out"
FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers: those whose queries see all that the mask keeps, and those with a window."""
_MOST_LAYERS = 2**16
"""That are looked at one by one: more than any model may have."""
_IGNORE = "where it does not matter, `set` model.ignore"


def model_fields(path: str, data: bytes, ignored: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields of the model (``sim.words.workload.ModelSpec``) that the content of ``path`` describes, without
    keys that are ``ignored``.

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
    fields |= _lines(path, given, fields["head_dim"]) | _scales(given, fields["head_dim"])
    fields |= _kinds(path, given, layers)
    notes = _notes(given, rope)
    ties = given.get("tie_word_embeddings", given["model_type"] in _GEMMA)  # false where a type leaves it, but these
    tied = {"tied_embeddings": True} if ties else {}
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


def _scales(given: Mapping[str, Any], head_dim: int) -> dict[str, float]:
    """Return the fields that say by what values are multiplied, or towards which they are bent."""
    found = {field: float(given[key]) for key, field in _SCALES.items() if given.get(key, 1) != 1}
    if (divisor := given.get("logits_scaling", 1)) != 1:
        found["logit_scale"] = 1 / divisor
    if given["model_type"] in _GEMMA:
        found["embedding_scale"] = given["hidden_size"] ** 0.5
    if (scalar := given.get("query_pre_attn_scalar", head_dim)) != head_dim:
        found["attention_scale"] = scalar**-0.5
    return {name: value for name, value in found.items() if name != "attention_scale" or value != head_dim**-0.5}


def _kinds(path: str, given: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the kinds of layers, where they differ: windows of some, and rotary embedding."""
    if layers > _MOST_LAYERS:
        return {}  # and is refused for that
    window, default = given.get("sliding_window"), [FULL] * layers
    if window is not None and _windowed(given):
        every = given.get("sliding_window_pattern", {"gemma2": 2, "gemma3_text": 6}.get(given["model_type"]))
        first = given.get("max_window_layers", 0) if MODEL_TYPES[given["model_type"]].window_if_asked else 0
        default = [FULL if one < first or (every and (one + 1) % every == 0) else SLIDING for one in range(layers)]
    types, turns = given.get("layer_types", default), given.get("no_rope_layers", [1] * layers)
    for key, listed, allowed in (("layer_types", types, (FULL, SLIDING)), ("no_rope_layers", turns, (0, 1))):
        if len(listed) != layers:
            raise InputError(f"model {path!r}: {key} lists {len(listed)} layers of {layers}")
        if others := [one for one in listed if not _is_among(one, allowed)]:
            known = ", ".join(map(str, allowed))
            raise InputError(f"model {path!r}: {key} has {reprlib.repr(others[0])}, allowed are {known}")
    if SLIDING in types and window is None:
        raise InputError(f"model {path!r}: layer_types has {SLIDING}, and there is no sliding_window")
    local = given.get("rope_local_base_freq")
    of_window = {"window": window} | ({} if local is None else {"rope_theta": local})
    kinds = [
        (of_window if kind == SLIDING else {}) | ({} if turned else {"rotary_dims": 0})
        for kind, turned in zip(types, turns, strict=True)
    ]
    period = next(n for n in range(1, layers + 1) if all(kinds[at] == kinds[at % n] for at in range(layers)))
    return {"kinds": kinds[:period]} if any(kinds) else {}


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
        allowed = " and ".join(["null", *(str(one).lower() for one in neutral)])
        raise InputError(f"model {path!r}: {key} is {reprlib.repr(value)}, allowed are {allowed}: {simulated}")
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


def _notes(config: Mapping[str, Any], rope: Mapping[str, Any]) -> list[str]:
    """Return what predictions leave out."""
    notes = []
    if config.get("rope_scaling") or rope.get("rope_type", "default") != "default":
        notes.append("model: its scaling of rotary embeddings is left out, which changes values and no time")
    if config.get("attn_logit_softcapping"):
        notes.append(SOFTCAP)
    return notes
