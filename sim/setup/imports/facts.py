"""What files say, in words that frameworks share, and what of it no setup can say."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from sim.setup.imports.frameworks import Framework, Key, frameworks
from sim.setup.imports.layouts import wrong_layout
from sim.setup.imports.reading import File

State = Literal["taken", "ignored", "not sayable"]
FACTS: dict[str, str] = {
    "model": "its name",
    "family": "the first part of a model's name",
    "flavor": "the second part",
    "layers": "layers L",
    "hidden": "model dim E",
    "ffn": "feed-forward dim F",
    "heads": "query heads H",
    "kv_heads": "key/value heads H_kv",
    "head_dim": "head dim D",
    "vocab": "vocabulary V",
    "seq": "tokens of a sequence",
    "micro_batch": "sequences of a replica that go forward and backward at once",
    "micro_tokens": "the same, in tokens",
    "accumulation": "micro-batches of a step",
    "global_batch": "sequences of a step, of all replicas",
    "global_tokens": "the same, in tokens",
    "gpus": "GPUs in all",
    "nodes": "nodes",
    "gpus_per_node": "GPUs of a node",
    "cp": "ranks that share a sequence",
    "ulysses": "ranks that split its heads",
    "ring": "ranks that split its tokens",
    "factors": "the same two numbers, one behind the other",
    "method": "how they do it: a name of the framework's methods",
    "tp": "ranks that share out weights",
    "pp": "stages of a pipeline",
    "chunks": "chunks of layers that each stage has",
    "chunk_layers": "layers of each chunk",
    "layout": "what each chunk has: parts of the model by chunk, in its order",
    "first_layers": "layers of the first stage",
    "last_layers": "layers of the last stage",
    "first_less": "as how many layers the embedding counts on the first stage",
    "last_less": "as how many layers the head counts on the last stage",
    "chunk_group": "micro-batches that each chunk takes before the next one",
    "pp_micro_batch": "sequences of a replica that go through a pipeline at once",
    "pp_pieces": "micro-batches of a replica that go through a pipeline one after the other",
    "shard": "groups of such ranks over which weights are sharded; -1 for all that are left",
    "replicate": "copies of the sharded weights",
    "reshard": "whether gathered weights are dropped behind the forward pass: false; by-stages for not in a pipeline",
    "reentrant": "false where checkpoints are not reentrant, so that computing again stops early",
    "packed": "whether sequences hold several documents",
    "gqa": "whether there are fewer key/value heads than query heads",
    "dtype": "data type of the model",
    "tied_embeddings": "whether the embedding is the LM head",
    "biases": "which linear layers have a bias",
    "qk_norm": "how q and k are normed",
    "mlp": "what an MLP computes",
    "adapters": "that adapters alone are trained; rank/alpha/targets that the framework takes",
    "lora_rank": "rank of adapters",
    "lora_alpha": "alpha of adapters",
    "lora_targets": "which linear layers have adapters",
    "software": "which software runs, by its name in sim/software",
}
"""What a key may say, beside ``schedule.KEY``, an option of the schedule, and ``software.KEY``, a kernel."""
MODEL = ("model", "family", "flavor", "layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab")
"""Of these, those that describe the model."""
BLOCK = ("biases", "qk_norm", "mlp")
"""And of the model its layers, where they are not as Llama's."""
PROJECTIONS = {f"{name}_proj": name for name in ("q", "k", "v", "o", "gate", "up", "down")}
"""What Hugging Face calls the linear layers that may have adapters."""
ALL_LINEAR = ("all-linear", "all")
"""What stands for all of them."""
TEXTS = (
    *("model", "family", "flavor", "factors", "method", "dtype", "tied_embeddings", "software", "reshard", "reentrant"),
    *BLOCK,
)
_SHARDS_FOR_OTHERS = "deepspeed"
_LARGEST = ("schedule.zero_stage",)
"""What several keys say a part of, each: the most is meant."""
_MOST = 10**12
"""No count of anything here is larger."""
_OPEN = ("none", "auto", "")
"""Values that leave a key to others."""


class Row(NamedTuple):
    """What became of a key."""

    key: str
    value: str
    """As the file has it; in brackets where it has none, and this is the framework's."""
    state: State
    means: str
    """What it says here, or why it does not matter, or why it is not sayable."""
    of_model: bool = False
    """Whether it does not matter where the model is given otherwise."""
    of_stages: bool = False
    """Whether it does not matter where there is one stage."""
    of_shares: bool = False
    """Whether it does not matter where ranks have whole weights."""
    is_default: bool = False
    """Whether the file has it not, and the framework takes it."""


class Said(NamedTuple):
    """What a key says of one fact."""

    value: str
    key: str
    """None where it is assumed."""


class Understood(NamedTuple):
    """What one or several files say."""

    rows: tuple[Row, ...]
    facts: Mapping[str, Said]
    assumed: Mapping[str, str]
    """Why a fact was taken that no key says."""
    framework: Framework
    """Whose methods are meant: of the first file that has any."""
    software: str = ""
    """What runs where no key says another; where DeepSpeed shards for a trainer, DeepSpeed with that."""


def understood(files: Sequence[tuple[File, str]], *, anyway: bool) -> Understood:
    """Return what files say, each with its framework; ``anyway`` also what stands in for what is not sayable."""
    names = {name for _, name in files}
    rows, facts = list[Row](), dict[str, Said]()
    for file, name in files:
        for row, said in _written(file, frameworks()[name], names, anyway=anyway):
            rows.append(_joined(row, said, facts))
    keys = set().union(*(file.given for file, _ in files))
    for name in dict.fromkeys(name for _, name in files):
        for row, said in _defaults(frameworks()[name], keys, anyway=anyway):
            left = {fact: value for fact, value in said.items() if fact not in facts}
            if left or row.state == "not sayable":
                rows.append(_joined(row, left, facts))
    assumed = {fact: one for name in names for fact, one in frameworks()[name].assumed.items() if fact not in facts}
    facts |= {fact: Said(one.value, "") for fact, one in assumed.items()}
    methods = (frameworks()[name] for _, name in files if frameworks()[name].methods)
    return Understood(
        tuple(rows),
        facts,
        {fact: one.why for fact, one in assumed.items()},
        next(methods, frameworks()[files[0][1]]),
        _software([name for _, name in files]),
    )


def _software(names: Sequence[str]) -> str:
    found = [frameworks()[name].software for name in names if frameworks()[name].software]
    return _SHARDS_FOR_OTHERS if _SHARDS_FOR_OTHERS in found else next(iter(found), "")


def _joined(row: Row, said: Mapping[str, str], facts: dict[str, Said]) -> Row:
    """Return a row, and add what it says to the facts. It is not sayable if another key says otherwise."""
    for fact, value in said.items():
        before = facts.get(fact)
        if before is None or (fact in _LARGEST and value > before.value):
            facts[fact] = Said(value, row.key)
        elif before.value != value and fact not in _LARGEST:
            return row._replace(
                state="not sayable", means=f"{before.key} says {before.value} of the same: leave one out"
            )
    return row


def _written(
    file: File, framework: Framework, names: set[str], *, anyway: bool
) -> Iterator[tuple[Row, Mapping[str, str]]]:
    """Yield what becomes of each key of a file, and the facts that it says."""
    for name, text in file.given.items():
        if key := framework.key(name):
            row, said = _row(name, text, key, names, anyway=anyway)
            yield _matters(row, key), said
        elif why := framework.ignored(name):
            yield Row(name, text, "ignored", why), {}
        elif text in _OPEN:
            yield Row(name, text, "ignored", "not known, and left open"), {}
        else:
            yield Row(name, text, "not sayable", "not known: what it changes is not known either"), {}


def _defaults(framework: Framework, keys: set[str], *, anyway: bool) -> Iterator[tuple[Row, Mapping[str, str]]]:
    """Yield what the framework takes for keys that are missing."""
    for name, key in framework.keys.items():
        if key.default is not None and not {name, key.unless} & keys:
            row, said = _row(name, key.default, key, set(), anyway=anyway)
            row = row._replace(value=f"({key.default})", is_default=True)
            yield _matters(row, key), said


def _matters(row: Row, key: Key) -> Row:
    """Return a row with what its key is of."""
    of_model = key.of_model or key.fact in MODEL
    return row._replace(of_model=of_model, of_stages=key.of_stages, of_shares=key.of_shares)


def _row(name: str, text: str, key: Key, names: set[str], *, anyway: bool) -> tuple[Row, Mapping[str, str]]:
    """Return what becomes of one key with a value, and the facts that it says."""
    about = f"{key.about}: " if key.about else ""
    said = key.values.get(text, key.values.get(text.lower()))
    if said is not None:
        state: State = "taken" if said else "ignored"
        return Row(name, text, state, f"{about}{said or 'changes nothing here'}"), facts_of(said)
    if text in _OPEN:
        return Row(name, text, "ignored", f"{about}left open"), {}
    if key.file:
        if key.file in names:
            return Row(name, text, "taken", f"{about}that file is given, too"), {}
        return Row(name, text, "not sayable", f"{about}give that file, too, which is not opened by itself"), {}
    if key.fact:
        wrong = _wrong(key.fact, text)
        if not wrong:
            means = ", ".join(filter(None, (key.about or FACTS.get(key.fact, key.fact), key.also)))
            return Row(name, text, "taken", means), {key.fact: text, **facts_of(key.also)}
        return Row(name, reprlib.repr(text), "not sayable", f"{about}{wrong}"), {}
    if "$" in text:
        return Row(name, text, "not sayable", f"{about}a shell variable that the file does not set"), {}
    instead = facts_of(key.instead) if anyway else {}
    left = f"; anyway: {key.instead}" if key.instead else ""
    allowed = f"expected {', '.join(filter(None, key.values))}" if key.values else "not simulated"
    return Row(name, reprlib.repr(text)[1:-1], "not sayable", f"{about}{key.why or allowed}{left}"), instead


def facts_of(text: str) -> dict[str, str]:
    """Return facts as tables write them.

    >>> facts_of("schedule.checkpoint=full cp=2")
    {'schedule.checkpoint': 'full', 'cp': '2'}
    """
    return dict(pair.split("=", 1) for pair in text.split())


def targets_of(text: str) -> list[str]:
    """Return the names in a list of linear layers.

    >>> targets_of("q_proj, v_proj"), targets_of("q_proj+v_proj")
    (['q_proj', 'v_proj'], ['q_proj', 'v_proj'])
    """
    return re.split(r"[\s,+]+", text.strip())


def _wrong(fact: str, text: str) -> str:
    """Return what is wrong with a value of a fact."""
    if fact == "factors":
        return "" if re.fullmatch(r"[1-9]\d{0,3} [1-9]\d{0,3}", text) else "expected two whole numbers"
    if fact == "layout":
        return wrong_layout(text)
    if fact == "lora_targets":
        unknown = [one for one in targets_of(text) if one not in {*PROJECTIONS, *ALL_LINEAR}]
        return f"{unknown[0]!r} is none of {', '.join([*PROJECTIONS, *ALL_LINEAR])}" if unknown else ""
    if fact == "lora_alpha":
        return "" if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", text) and float(text) else "expected a number above 0"
    if fact in TEXTS or fact.startswith(("schedule.", "software.")):
        return "" if 0 < len(text) <= 200 and text.isprintable() else "expected a name"
    number = int(text) if re.fullmatch(r"-?\d{1,13}", text) else 0
    if text == "0" and fact in {"first_less", "last_less"}:
        return ""
    if 0 < number <= _MOST or (number == -1 and fact in {"shard", "global_batch", "global_tokens", "gpus"}):
        return ""
    return "a shell variable that the file does not set" if "$" in text else "expected a whole number of 1 or more"
