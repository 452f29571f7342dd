"""What a page asks: the fields of the command line as data, without paths, with bounds; and the setup that they make.

A question comes from an address or a form, so nothing of it opens a file or names code. What was dropped on the page
comes with its content. Names are looked up among those that ship.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from sim.base.errors import InputError, unknown
from sim.base.presets import PLAIN, converted, from_toml
from sim.schedule.methods.catalog import NAMED
from sim.setup import names
from sim.setup.names import DATASHEET
from sim.setup.setup import Setup
from sim.software.software import software_names
from sim.words.profile import profile_names
from sim.words.workload import ModelSpec, model_of_config, spoken
from topology.named import load_named
from topology.specs import ClusterSpec

MOST_DOCUMENTS = 4096
"""Of a question: an address holds them."""
_PATH = re.compile(r"[/\\\x00]|\.(toml|json|csv|py|txt|jsonl|parquet)\b", re.IGNORECASE)
"""What a path has, and no name that ships."""

Word = Annotated[str, Meta(min_length=1, max_length=100, pattern=r"\A[^\x00-\x1f\x7f]*\Z", description=PLAIN)]
Length = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=24,
        pattern=r"\A[0-9]{1,12} ?[KMkm]?( tokens)?\Z",
        description="tokens such as 8192 or 128K",
    ),
]
Count = Annotated[int, Meta(ge=1, le=2**14)]
Tokens = Annotated[int, Meta(ge=1, le=2**31)]
FileName = Annotated[
    str,
    Meta(min_length=1, max_length=100, pattern=r"\A\w[\w.+-]*\Z", description="the name of a file, without a folder"),
]
Content = Annotated[str, Meta(max_length=2**18)]
Key = Annotated[
    str,
    Meta(
        max_length=100,
        pattern=r"\A(cluster|model|schedule|software|profile)\.[\w.\[\]-]+\Z",
        description="a key such as cluster.nvlink.bytes_per_s",
    ),
]
Value = Word


class Dropped(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file as its reader dropped it on the page."""

    name: FileName
    """Without its folder; it is shown, never opened."""
    text: Content


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The fields of ``Setup`` that a page may set. Those that are missing are as ``Setup`` has them."""

    model: Word | Dropped = str(names.MODEL)
    cluster: Word | Dropped = str(names.CLUSTER)
    schedule: Word | None = None
    stack: Word | None = None
    software: Word | None = None
    profile: Word | None = None
    seq: Length | Tokens = "64K"
    gpus: Count | None = None
    nodes: Count | None = None
    cp: Count | None = None
    ulysses_degree: Count | None = None
    ring_degree: Count | None = None
    tp_degree: Count | UnsetType = UNSET
    pp_degree: Count | UnsetType = UNSET
    dp_degree: Count | UnsetType = UNSET
    batch: Count = 1
    global_batch: Length | Tokens | None = None
    documents: Annotated[tuple[Tokens, ...], Meta(min_length=1, max_length=MOST_DOCUMENTS)] | None = None
    mask: Word = "causal"
    window: Length | Tokens | None = None
    pad: bool = False
    dtype: Word | None = None
    layers: Annotated[int, Meta(ge=1, le=1024)] | None = None
    scope: Word = "step"
    passes: Word = "both"
    seed: Annotated[int, Meta(ge=0, le=2**31)] = 0
    seeds: Annotated[int, Meta(ge=1, le=31)] | None = None
    jitter: Annotated[float, Meta(ge=0, le=1)] | None = None
    set: Annotated[dict[Key, Value], Meta(max_length=64)] = {}


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question by a name."""

    name: Word
    question: Question


def setup_of(question: Question, *, yes: bool = False) -> Setup:
    """Return the setup that a question is; ``yes`` goes on however long it takes. Raises InputError for a name that
    does not ship, and for a file that is wrong.
    """
    _require_shipped(question)
    fields: dict[str, Any] = _fields(question)
    fields["model"] = question.model if isinstance(question.model, str) else model_in(question.model)
    fields["cluster"] = question.cluster if isinstance(question.cluster, str) else cluster_in(question.cluster)
    return Setup(**fields, yes=yes)


def said_of(question: Question) -> Setup:
    """Return the same with dropped files by their names: what a user types who has them."""
    fields: dict[str, Any] = _fields(question)
    for name in ("model", "cluster"):
        value = getattr(question, name)
        fields[name] = value if isinstance(value, str) else value.name
    return Setup(**fields)


def question_of(setup: Setup, model: Dropped | None = None, cluster: Dropped | None = None) -> Question:
    """Return the question that a setup is, of which some fields are dropped files."""
    fields = {field.name: getattr(setup, field.name) for field in dataclasses.fields(Setup)}
    default = {field.name: field.default for field in dataclasses.fields(Setup)}
    known = {name: value for name, value in fields.items() if name in Question.__struct_fields__}
    found = {name: value for name, value in known.items() if value != default[name] or name in {"seq", "model"}}
    found["set"] = dict(names.pairs(setup.set))
    found |= {"model": model} if model else {}
    found |= {"cluster": cluster} if cluster else {}
    return converted(msgspec.to_builtins(found), Question, "the question", "change it on the page", strict=True)


def model_in(file: Dropped) -> ModelSpec:
    """Return the model of a dropped config.json, or of a TOML file; raises InputError for what is none."""
    if file.name.endswith(".toml"):
        return from_toml(file.text.encode(), ModelSpec, "model", file.name, "`model`")
    return model_of_config(file.name, file.text.encode())


def cluster_in(file: Dropped) -> ClusterSpec:
    """Return the cluster of a dropped TOML file; raises InputError for what is none, and for a profile by its path."""
    spec = from_toml(file.text.encode(), ClusterSpec, "cluster", file.name, "`cluster`")
    if spec.profile and spec.profile not in (allowed := [*profile_names(), DATASHEET]):
        raise unknown("profile", spec.profile, allowed, f"the key profile of {file.name}")
    return spec


def require_model(name: str) -> None:
    """Raise InputError for a model that does not ship; looks at no file."""
    if spoken(name) not in {spoken(preset) for preset in names.names("models")}:
        raise unknown("model", name, names.names("models"), "`model`, or drop a config.json")


def _fields(question: Question) -> dict[str, Any]:
    given = {name: getattr(question, name) for name in Question.__struct_fields__}
    return {name: value for name, value in given.items() if value is not UNSET and (value or name != "set")}


def _require_shipped(question: Question) -> None:
    """Raise InputError for a name that is none of those that ship, before anything could take it for a path."""
    if isinstance(question.model, str):
        require_model(question.model)
    if isinstance(question.cluster, str):
        _require_cluster(question.cluster)
    allowed = {
        "schedule": NAMED, "stack": names.names("stacks"), "software": software_names(),
        "profile": [*profile_names(), DATASHEET],
    }  # fmt: skip
    for field, known in allowed.items():
        value = getattr(question, field)
        if value is not None and value not in known:
            raise unknown(field, value, known, f"`{field}`")
    named = {"`mask`": question.mask}
    of_files = ("software.", "schedule.pipeline_schedule")
    named |= {f"`set` {key}": value for key, value in question.set.items() if key.startswith(of_files)}
    for where, value in named.items():
        if _PATH.search(value):
            raise InputError(f"{where} {value}: it looks like a path, and a page opens no file; name what ships")


def _require_cluster(name: str) -> None:
    if _PATH.search(name):
        raise unknown("cluster", name, names.names("clusters"), "`cluster`, or drop a TOML file")
    load_named(name)
