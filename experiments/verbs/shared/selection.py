"""The options that most verbs share: names of what to look at, as ``longstep.Setup`` takes them."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, get_args

import tyro

from experiments.verbs.shared.kinds import (
    OptionalCounts,
    OptionalFloat,
    OptionalInt,
    OptionalText,
    Texts,
    Untyped,
    UntypedInt,
)
from longstep import Setup
from sim.balance.documents import BY_BLOCKS, planned_by
from sim.balance.micro_batches import is_distribution, packed_by
from sim.base.errors import InputError
from sim.compare.axes import LISTS, field_of, is_list, rows_of, values_of
from sim.setup.names import (
    CLUSTER,
    CLUSTER_HERE,
    MODEL,
    MODEL_HERE,
    OwnSchedule,
    at_least_one,
    cluster_spec,
    entry,
    model,
    tokens,
)
from sim.setup.stacks import stack_of

if TYPE_CHECKING:
    from sim.setup.imports.imported import Imported


COUNTS = ("nodes", "gpus", "cp", "tp_degree", "pp_degree")
"""Options that are numbers, or lists of them."""
_MICRO_BATCHES = "schedule.micro_batches"
_PIPELINES = {"pipeline": "schedule.pipeline_schedule", "stages": "schedule.pipeline_layers"}
"""Options of the schedule that have options of the command line."""


def listed(text: str, option: str, example: str) -> list[str]:
    """Return the values of a list with commas, each once."""
    values = [value.strip() for value in text.split(",")]
    if not all(values):
        raise InputError(f"{option} {text}: expected values separated by commas, such as {example}")
    return list(dict.fromkeys(values))


def typed_schedule(text: str) -> str:
    """Return a schedule that was typed: a name, or FILE.py:FUNCTION, which only the command line may name."""
    return OwnSchedule(text) if ":" in text else text


def typed_schedules(text: str, example: str = "ring,ulysses") -> list[str]:
    """Return schedules that were typed with commas, each once."""
    return [typed_schedule(name) for name in listed(text, "`schedule`", example)]


def typed_values(key: str, values: str) -> str | list[str]:
    """Return the values of a key that is varied, as the library takes them: of schedules some may be the user's own."""
    return [typed_schedule(name.strip()) for name in values.split(",")] if field_of(key) == "schedule" else values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """What to look at. Lengths take K = 1024 and M = 1024^2."""

    model: str = MODEL_HERE
    """NAME, FILE.toml, or a config.json of Hugging Face."""
    cluster: str = CLUSTER_HERE
    """NAME, a GPU such as H100, so many GPUs such as 16xH100, or FILE.toml; host is this machine."""
    nodes: OptionalCounts = None
    """Nodes of the cluster; by default as many as --gpus needs."""
    gpus: OptionalCounts = None
    """GPUs in all; on a host, processes. By default the product of the degrees, or one node (a host: its cores)."""
    seq: str = Untyped("8K")
    """Global sequence length."""
    batch: int = UntypedInt(1)
    """Sequences per context-parallel group."""
    schedule: OptionalText = None
    """NAME, or my_module.py:build for a schedule of your own; by default that of --stack, or ring. With --documents
    also a planner of theirs: wlb-llm, dcp, fcp-style or groups."""
    software: OptionalText = None
    """NAME or FILE.toml: what trains, such as huggingface: which kernels run, and how it shards and keeps. By default
    the profile's kernels, which are fused."""
    stack: OptionalText = None
    """Techniques of a training step that are used together, such as fsdp: longstep list stacks shows them. What is
    set of the schedule comes first."""
    ulysses_degree: OptionalInt = None
    """Ranks that split the heads."""
    ring_degree: OptionalInt = None
    """Ranks that split the sequence."""
    cp: OptionalCounts = None
    """Ranks that share a sequence, however the schedule splits it among them: --gpus are so many times the replicas,
    times --tp-degree and --pp-degree."""
    tp_degree: Annotated[OptionalCounts, tyro.conf.arg(aliases=("--tp",))] = None
    """Ranks that share out the weights of layers (tensor parallelism), innermost: of scopes layer and step."""
    pp_degree: OptionalCounts = None
    """Stages of a pipeline, each with some of the layers: --accumulate says how many micro-batches follow each other in
    them."""
    pipeline: OptionalText = None
    """In which order stages take them: 1f1b, gpipe, interleaved, zb-h1, zb-v or another one, or FILE.csv as torch's
    pipelining writes it; the same as --set schedule.pipeline_schedule."""
    stages: OptionalText = None
    """How many layers each stage has, or each chunk of an interleaved one, as --set schedule.pipeline_layers:
    15,16,16,15, or 0,1*126,0. By default all as many."""
    dp_degree: int = UntypedInt(1)
    """Data-parallel replicas: copies of the ranks, each with as many sequences of its own. By default one, or with
    --cp as many as the GPUs make."""
    global_batch: OptionalText = None
    """What all replicas together train in a step: a plain number of sequences, or tokens with K or M (4M) or the word
    ('4194304 tokens'). Gives --batch, micro-batches of a sequence, and --dp-degree where all degrees are typed."""
    accumulate: OptionalInt = None
    """Micro-batches of a training step, as --set schedule.micro_batches; --batch is by default one sequence of each."""
    one_device: bool = False
    """Play all ranks on one device, in turn, with copies for transfers: any schedule on a single GPU."""
    mask: str = "causal"
    """What each document keeps of itself: causal, full, window:TOKENS, lambda:SINK:WINDOW, blockwise:SIZE:LOCAL[:SINK]
    or shared-question:ANSWERS:SHARE (DCP, arXiv:2510.10620)."""
    window: OptionalText = None
    """Sliding window: tokens that a query sees on each side that the mask leaves, itself among them."""
    documents: OptionalText = None
    """Tokens of each document packed into a sequence, which is as long as all: 5000,3000,192, or FILE.txt, .jsonl or
    .parquet with lengths. Of each micro-batch by itself: 5000,3000;8192. Or a published distribution (magi, prolong,
    wikipedia, wlb-llm) that a global batch is drawn from, which --pack puts into micro-batches."""
    pack: OptionalText = None
    """How --documents, which are then of the whole global batch, come into micro-batches of --seq tokens: concatenated
    (by default), heaviest-first (the same, in that order), fixed-length (whole documents, balanced), or wlb-llm (by
    predicted seconds, of unlike lengths)."""
    block_mask: OptionalText = None
    """Block-sparse attention: topk:SIZE:K (each block of SIZE queries keeps its own block of keys and K - 1 drawn
    ones), lambda:SIZE:FIRST:LAST (the first and the last ones), or FILE.toml with size and kept."""
    pad: bool = False
    """Fill up a length that does not divide with tokens that no other token sees."""
    dtype: OptionalText = None
    """fp64, fp32, bf16 or fp16; by default the model's."""
    seed: int = 0
    """Seed of the inputs, and of the jitter."""
    jitter: OptionalFloat = None
    """Standard deviation of simulated kernel times, as a share: 0.05 is a noisy machine. By default what the profile
    has measured, on GPUs 0.0127; 0 for none."""
    seeds: OptionalInt = None
    """Seeds of that noise to play, from --seed on: the step is their median. Odd; by default 5, with --vary 1."""
    jitter_per_rank: bool = False
    """Draw the noise of every rank by itself, not of one replica for all: then all replicas are played."""
    layers: OptionalInt = None
    """Layers of the scopes layer and step, by default 1 and all of the model's."""
    scope: str = "attention"
    """What is played: attention of one layer, whole layers (layer), or a training step with its optimiser (step)."""
    passes: Annotated[str, tyro.conf.arg(name="pass")] = "both"
    """forward, backward or both."""
    profile: OptionalText = None
    """NAME, FILE.json, or datasheet; by default the one that the cluster names."""
    engine: str = "auto"
    """What plays: native (in C), simpy (the reference), or auto: native where there is a C compiler. Both give the same
    times, to the last bit."""
    yes: bool = False
    """Go on however long it takes, and however much memory: what takes over 20 s or 4 GB is else refused, with what it
    would take."""
    set: Texts = ()
    """KEY=VALUE, as often as wanted: cluster.nvlink.bytes_per_s=900e9, cluster.hbm.bytes_per_s=*2,
    cluster.gpu[3].speed=0.95, model.num_kv_heads=4, schedule.layout=zigzag, software.attention=flash-attention-2."""

    def setup(self) -> Setup:
        """Return what was typed as the library takes it; raises InputError for a list, of which ``each`` makes rows."""
        self.require_one()
        return self.one()

    def require_one(self) -> None:
        """Raise InputError for an option that lists several values."""
        for field in self.lists():
            raise InputError(
                f"`{field}` {getattr(self, field)}: expected one value; simulate, sweep, fit and winners take a list"
            )

    def one(self) -> Setup:
        """Return what was typed as the library takes it, lists as they are."""
        given = self.fields()
        if isinstance(given["dp_degree"], UntypedInt):
            del given["dp_degree"]
        fields: dict[str, Any] = {
            name: value.plain() if isinstance(value, Untyped | UntypedInt) else value for name, value in given.items()
        }
        found = self.packed(Setup(**_accumulated(fields, batch=not isinstance(self.batch, UntypedInt))))
        return planned_by(found) if self.schedule in BY_BLOCKS else found

    def packed(self, setup: Setup) -> Setup:
        """Return a step whose documents are put into micro-batches, where that was typed."""
        if self.pack is None and not is_distribution(self.documents):
            self._require_as_long(setup)
            return setup
        return packed_by(setup, self.pack or "concatenated")

    def _require_as_long(self, setup: Setup) -> None:
        """Raise InputError for a length that was typed, and is not that of the documents."""
        if self.documents is None or isinstance(self.seq, Untyped) or is_list("seq", self.seq):
            return
        if tokens("seq", self.seq) != setup.sequence_length:
            raise InputError(
                f"`seq` {self.seq}, and `documents` of {setup.sequence_length} tokens: leave out `seq`, or say with "
                f"`pack` how documents of a global batch come into such sequences"
            )

    def fields(self) -> dict[str, Any]:
        """Return all fields, numbers as such; raises InputError for what is none."""
        given = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(Selection) if field.name != "pack"
        }
        for option, key in _PIPELINES.items():
            if (value := given.pop(option)) is not None:
                given["set"] = _with(given["set"], option, key, value)
        for degree in ("tp_degree", "pp_degree"):
            if given[degree] is None:  # the library's default says that nobody has said it
                del given[degree]
        counts = {name: _count(name, given[name]) for name in COUNTS if name in given}
        return given | counts | {"schedule": self.schedule and typed_schedule(self.schedule)}

    def lists(self) -> dict[str, list[str]]:
        """Return the values of the options that list several."""
        texts = {field: getattr(self, field) for field in LISTS}
        return {field: values_of(field, text) for field, text in texts.items() if text and is_list(field, str(text))}

    def first(self, *without: str) -> Self:
        """Return it with the first value of each list, or of some with none."""
        firsts: dict[str, Any] = {
            field: None if field in without else values[0] for field, values in self.lists().items()
        }
        return dataclasses.replace(self, **firsts)

    def each(self, *fields: str) -> list[tuple[dict[str, str], Self]]:
        """Return the product of all lists, or of those of some fields: a row each, with its value of every list, and
        the selection. Raises InputError for unknown names.
        """
        lists = {field: values for field, values in self.lists().items() if not fields or field in fields}
        require_names(lists)
        rows: list[dict[str, Any]] = [*rows_of(lists)]
        return [(row, dataclasses.replace(self, **row)) for row in rows]


def _count(field: str, typed: str | int | None) -> str | int | None:
    """Return a number that was typed as such; raises InputError for what is none, and leaves lists as they are."""
    if typed is None or isinstance(typed, int) or is_list(field, typed):
        return typed
    try:
        return int(typed)
    except ValueError:
        raise InputError(f"`{field}` {reprlib.repr(typed)}: expected a whole number") from None


def _accumulated(given: dict[str, Any], *, batch: bool) -> dict[str, Any]:
    """Return fields with the option of the schedule that micro-batches are; ``batch`` says whether that was typed."""
    fields = dict(given)
    count = fields.pop("accumulate")
    if count is None:
        return fields
    at_least_one("accumulate", count)
    told = batch or fields["global_batch"] is not None
    return (
        fields | {"set": _with(fields["set"], "accumulate", _MICRO_BATCHES, count)} | ({} if told else {"batch": count})
    )


def _with(set_: tuple[str, ...], option: str, key: str, value: object) -> tuple[str, ...]:
    """Return what is set with a key that an option of its own says; raises InputError where it is set, too."""
    for text in set_:
        if text.partition("=")[0].strip() == key:
            raise InputError(f"`{option}` {value}, and `set` {text}: they say the same; leave out one of them")
    return *set_, f"{key}={value}"


def require_names(lists: Mapping[str, Sequence[str]]) -> None:
    """Raise InputError for a name in lists of fields that there is none of, and for what is no number of them."""
    kinds: dict[str, Callable[[str], object]] = {
        "model": model, "cluster": cluster_spec, "stack": stack_of,
        "schedule": lambda name: name in BY_BLOCKS or ":" in name or entry(name),
        "seq": lambda text: tokens("seq", text), **{name: partial(_number, name) for name in COUNTS},
    }  # fmt: skip
    for field, values in lists.items():
        if known := kinds.get(field):
            for value in values:
                known(value)


def _number(field: str, text: str) -> int:
    return at_least_one(field, int(_count(field, text) or 0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSelection(Selection):
    """What to look at, by default a training step of what people have: what is predicted, not executed or drawn."""

    model: str = MODEL
    """NAME, FILE.toml, or a config.json of Hugging Face."""
    cluster: str = CLUSTER
    """NAME, a GPU such as H100, so many GPUs such as 16xH100, or FILE.toml; host is this machine."""

    scope: str = "step"
    """What is played: a training step with its optimiser (step), whole layers (layer), or attention of one layer."""

    def fields(self) -> dict[str, Any]:
        """Return all fields; documents of a causal mask are padded where their sum does not divide."""
        given = super().fields()
        pads = self.documents is not None and self.mask == "causal" and self.block_mask is None
        return given | {"pad": self.pad or pads}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileSelection(StepSelection):
    """What to look at, by default a training step, and as the configuration of a framework says."""

    PATHS: ClassVar[str] = "`from_file`"
    """Where files are named, as errors say it."""
    from_file: Annotated[Texts, tyro.conf.arg(name="from")] = ()
    """What a run was configured with, as of torchtitan, Megatron-LM, DeepSpeed, accelerate, axolotl, ms-swift, nanotron
    or Megatron-Bridge; as often as there are files. Options that are typed come before what it says: longstep import
    shows that."""
    framework: OptionalText = None
    """Which framework the file is of; by default seen by its keys."""
    anyway: bool = False
    """Leave out what a file says and is not simulated, instead of refusing it."""

    def setup(self) -> Setup:
        """Return what was typed, on top of what files say."""
        if self.from_file:
            self.require_one()
            return self.packed(self.imported().setup(**self.typed()))
        if self.framework is not None or self.anyway:
            raise InputError("`framework` and `anyway` are of a configuration: give its file with `from_file`")
        return super().setup()

    def told(self) -> Iterator[str]:
        """Yield what was made of files, if there are any."""
        if self.from_file:
            from sim.setup.imports.facts import State

            found = self.imported()
            states = [row.state for row in found.rows(**self.typed())]
            counted = ", ".join(f"{states.count(state)} {state}" for state in get_args(State))
            yield f"from {found.title}: keys {counted}; longstep import shows them"
            yield from (f"assumed: {line}" for line in found.answer(**self.typed()).assumptions)

    def imported(self) -> Imported:
        """Return what files say."""
        from sim.setup.imports.imported import imported  # which loads a parser

        return imported(*self.from_file, framework=self.framework, anyway=self.anyway, where=self.PATHS)

    def typed(self) -> dict[str, Any]:
        """Return the fields of a setup that were typed; raises InputError for a list."""
        self.require_one()
        defaults, found = {field.name: field.default for field in dataclasses.fields(self)}, self.fields()
        return {
            name: value
            for name, value in found.items()
            if type(value) is not type(defaults[name]) or value != defaults[name]
        }
