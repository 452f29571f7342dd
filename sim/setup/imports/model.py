"""Which model a file means: a preset, by name or by sizes, or a model of its own with these sizes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from sim.base.errors import InputError
from sim.setup import names
from sim.setup.imports.facts import BLOCK, Understood
from sim.words.workload import ModelSpec

_DIMS = {
    "layers": "num_layers", "hidden": "embed_dim", "ffn": "ffn_dim", "heads": "num_heads", "kv_heads": "num_kv_heads",
    "head_dim": "head_dim", "vocab": "vocab_size",
}  # fmt: skip
_LIKE = "llama3-8b"
"""The model whose other figures are taken for one that is given by its sizes."""
_NOT_SIZES = {"name", "source", "notes", "dtype", "rope_theta", "norm_epsilon"}
"""What models of the same sizes may differ in without taking another time."""


def model_of(said: Understood) -> dict[str, Any]:
    """Return the model that files say, as fields of a setup; raises InputError where it is none that is known."""
    facts = {name: one.value for name, one in said.facts.items()}
    if "flavor" in facts:
        facts["model"] = f"{facts.get('family', '')}-{facts['flavor']}".lower()
    if {"layers", "hidden", "heads"} <= facts.keys():
        return _by_sizes(facts)
    if "model" not in facts:
        raise InputError("no key says which model it is: set `model`")
    name = facts["model"]
    if name.startswith((".", "/", "~")) or name.endswith((".toml", ".json")):
        raise InputError(f"{name!r} is a path, which is not opened: set `model`")
    model = names.model(name)
    block = {field: facts[field] for field in BLOCK if field in facts}
    differs = names.model(name, set=block) != model
    return {"model": name} | ({"set": {f"model.{field}": value for field, value in block.items()}} if differs else {})


def _by_sizes(facts: Mapping[str, str]) -> dict[str, Any]:
    """Return a model by its sizes: the preset that has them all, or another one with these set."""
    heads, hidden = int(facts["heads"]), int(facts["hidden"])
    gated = facts.get("mlp") != "gelu"
    ffn = int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden  # Megatron-LM arguments.py
    sizes = {"kv_heads": heads, "head_dim": hidden // heads, "ffn": ffn}
    if facts.get("gqa") == "false":
        facts = {name: value for name, value in facts.items() if name != "kv_heads"}
    sizes |= {name: int(facts[name]) for name in _DIMS if facts.get(name, "").isdecimal()}
    changes: dict[str, Any] = {"name": "imported"} | {_DIMS[name]: value for name, value in sizes.items()}
    changes |= {name: facts[name] for name in BLOCK if name in facts}
    changes |= {"tied_embeddings": True} if facts.get("tied_embeddings") == "true" else {}
    own = names.model(_LIKE, set=changes)
    preset = _preset(own, not_said=frozenset({"vocab_size"} if "vocab" not in facts else ()))
    if preset is not None:
        return {"model": preset}
    return {"model": _LIKE, "set": {f"model.{field}": value for field, value in changes.items()}}


@cache
def _preset(own: ModelSpec, not_said: frozenset[str]) -> str | None:
    """Return the preset that has the sizes of a model, but for those that nobody has said; None if there is none."""
    compared = {*own.__struct_fields__} - _NOT_SIZES - not_said
    for preset in names.names("models"):
        if all(getattr(names.model(preset), field) == getattr(own, field) for field in compared):
            return preset
    return None
