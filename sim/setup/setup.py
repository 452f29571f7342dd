"""``Setup``: what to predict, every field by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from sim.base.errors import InputError, unknown
from sim.base.garbage import garbage_collection_off
from sim.engine.play.simulate import simulate
from sim.schedule.methods.catalog import Build, Entry
from sim.schedule.proof.check import Checked
from sim.setup import names
from sim.setup.configuration import Configuration
from sim.setup.global_batch import of_each, sequences_of
from sim.setup.machine import changed_kernels, engine_of, equipped, jitter_of, kernels_on, rated, running
from sim.setup.names import (
    CLUSTER,
    MODEL,
    ONE_REPLICA,
    ONE_SHARE,
    ONE_STAGE,
    PLACEMENTS,
    SET_ROOTS,
    Assumed,
    Overrides,
    Untold,
    at_least_one,
    one_of,
)
from sim.setup.prediction import Prediction, require_known
from sim.setup.ranks import Degrees, mesh_of, shared_gpus, sized
from sim.setup.stacks import stack_of
from sim.software.software import Kernels, Software, load_software
from sim.words.mesh import Mesh
from sim.words.options import OF_GROUPS, OF_LAYERS, OF_STAGES, OF_STEPS
from sim.words.profile import Profile
from sim.words.workload import BlockMask, ModelSpec
from topology.cluster import Cluster
from topology.specs import ClusterSpec


@dataclass(frozen=True)
class Setup:
    """What to look at, by name. Lengths in tokens take K = 1024 and M = 1024^2.

    >>> setup = Setup("usp", model="llama3-8b", cluster="hgx-h100", gpus=8, ulysses_degree=2)
    >>> setup.resolved().mesh.ring
    4
    """

    schedule: str | Build | Entry | None = None
    """Name, a builder ``build(workload, mesh) -> Schedule``, or ``OwnSchedule("my_module.py:build")``; by default that
    of the ``stack``, or ring."""
    _: KW_ONLY
    model: str | Path | ModelSpec = MODEL
    """Name, FILE.toml, or a ``config.json`` of Hugging Face."""
    cluster: str | Path | ClusterSpec | Cluster = CLUSTER
    """Preset, GPU such as H100, so many GPUs such as ``16xH100``, or FILE.toml; ``host`` is this machine."""
    nodes: int | None = None
    """Nodes of the cluster; by default as many as ``gpus`` needs."""
    gpus: int | None = None
    """GPUs in all; on a host, processes. By default the product of the degrees, or one node (a host: its cores)."""
    seq: int | str = "8K"
    """Global sequence length S."""
    batch: int = 1
    """Sequences per context-parallel group."""
    ulysses_degree: int | None = None
    """Ranks that split the heads."""
    ring_degree: int | None = None
    """Ranks that split the sequence."""
    cp: int | None = None
    """Ranks that share a sequence, however the schedule splits it among them: GPUs are so many times the replicas, and
    times ``tp_degree`` and ``pp_degree``."""
    tp_degree: int = ONE_SHARE
    """Ranks that share out the weights of layers (tensor parallelism): neighbours, which are on one node where that has
    so many GPUs. Each has some heads and some features of MLPs, and some tokens between."""
    pp_degree: int = ONE_STAGE
    """Stages of a pipeline, each with some of the layers, in which ``schedule.micro_batches`` follow each other:
    ``schedule.pipeline_schedule`` says in which order, ``schedule.pipeline_layers`` which layers."""
    dp_degree: int = ONE_REPLICA
    """Data-parallel replicas: copies of the ranks, each with as many sequences of its own. By default one, or with
    ``cp`` as many as the GPUs make."""
    global_batch: int | str | None = None
    """What all replicas together train in a step: a plain number of sequences, or tokens: ``4M``, ``4194304 tokens``.
    It gives ``batch``; micro-batches of one sequence each, where none are set; and ``dp_degree``, where that is 1 and
    the degrees say how many ranks share a sequence."""
    one_device: bool = False
    """Play all ranks on one device, in turn, with copies for transfers."""
    mask: str = "causal"
    """What each document keeps of itself: causal or full; ``window:TOKENS``, as with ``window``; or of what is causal a
    pattern: ``lambda:SINK:WINDOW``, ``blockwise:SIZE:LOCAL[:SINK]``, ``shared-question:ANSWERS:SHARE``
    (``sim.words.patterns``)."""
    window: int | str | None = None
    """Sliding window: tokens that a query sees on each side that the mask leaves, itself among them."""
    documents: str | tuple[int, ...] | tuple[tuple[int, ...], ...] | None = None
    """Tokens of each document packed into a sequence, which is as long as all: (5000, 3000, 192), a text with these, or
    FILE.txt, .jsonl or .parquet with lengths. Or such lengths for each micro-batch of a replica: ((5000, 3000),
    (8192,)), or the text 5000,3000;8192. Then ``batch`` and micro-batches are as many."""
    block_mask: str | BlockMask | None = None
    """Block-sparse attention of what mask and window keep: ``topk:SIZE:K``, ``lambda:SIZE:FIRST:LAST``, FILE.toml, or
    the blocks themselves."""
    pad: bool = False
    """Fill up a length that does not divide with tokens that no other token sees."""
    dtype: str | None = None
    """fp64, fp32, bf16 or fp16; by default the model's."""
    seed: int = 0
    """Seed of the inputs, and of the jitter."""
    jitter: float | None = None
    """Standard deviation of kernel times, as a share of each. By default what the profile has measured, on GPUs what
    kernels of A100 have; 0 for none."""
    seeds: int | None = None
    """How many seeds of that noise are played, from ``seed`` on; the step is their median. Odd, by default 5."""
    jitter_per_rank: bool = False
    """Draw the noise of every rank by itself, not of one replica for all. It takes longer: all replicas are played."""
    layers: int | None = None
    """Layers of the scopes layer and step, by default 1 and all of the model's."""
    scope: str = "step"
    """A training step with its optimiser (step), whole layers (layer), or attention of one layer."""
    passes: str = "both"
    """forward, backward or both."""
    profile: str | Path | Profile | None = None
    """Name, FILE.json, or ``datasheet``; by default the one that the cluster names."""
    engine: str = "auto"
    """Which engine plays: native (in C), simpy (the reference), or auto: native where there is a C compiler. Both give
    the same times, to the last bit."""
    software: str | Path | Software | None = None
    """What trains, by name or FILE.toml: which kernels run, and what options of the schedule it has. By default the
    profile's kernels, which are fused."""
    stack: str | None = None
    """Techniques of a training step that are used together, by the name of who published them; what is ``set`` of the
    schedule comes first."""
    yes: bool = False
    """Go on however long it takes, and however much memory: else what takes over 20 s or 4 GB is refused, with what it
    would take (``sim.setup.effort``)."""
    set: Overrides = ()
    """Figures to replace: ``{"cluster.nvlink.bytes_per_s": "*2", "model.num_kv_heads": 4, "schedule.layout":
    "zigzag", "software.attention": "flash-attention-2", "profile.rates": "sustained",
    "profile.replayed_s": "*2"}``, or a list of texts KEY=VALUE."""

    def __post_init__(self) -> None:
        """Take paths, clusters and numbers of numpy for what they stand for, and keep ``set`` as it is now: what a
        caller does to its dict or list later is of no what-if of this one.
        """
        for name, value in vars(self).items():
            object.__setattr__(self, name, names.plain(value))
        if isinstance(self.documents, Sequence) and not isinstance(self.documents, str):
            own = [tuple(one) if isinstance(one, Sequence) else one for one in self.documents]
            object.__setattr__(self, "documents", tuple(own))
        if isinstance(self.set, Mapping):
            object.__setattr__(self, "set", dict(self.set))
        elif isinstance(self.set, Sequence) and not isinstance(self.set, str):
            object.__setattr__(self, "set", tuple(self.set))

    @garbage_collection_off()
    def predicted(self) -> Prediction:
        """Return the prediction of one step; raises InputError as ``resolved`` does."""
        return _predicted(self)

    def replace(self, **changes: Any) -> Setup:
        """Return it with some fields changed; ``set`` adds to what was set, a key that is set again is set anew.

        Raises InputError for a field that there is none of.
        """
        require_known(changes, [field.name for field in dataclasses.fields(Setup)])
        if "set" in changes:
            again = names.pairs(changes["set"])
            stays = (pair for pair in names.pairs(self.set) if pair[0] not in dict(again))
            changes["set"] = [f"{key}={value}" for key, value in (*stays, *again)]
        return dataclasses.replace(self, **changes)

    def resolved(self) -> Configuration:
        """Return the objects that the names stand for; raises InputError that names the bad value and the allowed
        ones.
        """
        if self.cp is not None or self.global_batch is not None:
            return self.spelled_out().resolved()
        if (turns := self._in_turns()) is not self:
            return turns.resolved()
        self._require_types()
        overrides = _overrides(self.set)
        model = self.model_spec
        spec, profile = equipped(self.cluster, self.profile)
        spec = names.changed_cluster(spec, overrides["cluster"], "`set` cluster.")
        software = load_software(self.software) if self.software is not None else None
        run = changed_kernels(
            kernels_on(spec, profile, software.kernels) if software else Kernels(), overrides["software"]
        )
        entry = names.entry(self.played)
        mesh, options = self._overridden(
            entry,
            self._mesh(entry, spec, model, self.gpus, int(self.dp_degree)),
            self._stacked(entry, overrides["schedule"], software.schedule if software else {}),
        )
        self._require_degrees(overrides["schedule"])
        workload = names.workload(
            model, self.seq, batch=self.batch, mask=self.mask, window=self.window, dtype=self.dtype, scope=self.scope,
            layers=self.layers, passes=self.passes, seed=self.seed, documents=self.documents,
            block_mask=self.block_mask,
        )  # fmt: skip
        found = Configuration(
            schedule=names.schedule_name(self.played),
            workload=workload,
            mesh=mesh,
            options=options,
            entry=entry,
            spec=sized(spec, 1 if self.one_device else mesh.size, self.nodes),
            profile=rated(
                running(profile, run, software, spec, workload, options, mesh), workload.scope, overrides["profile"]
            ),
            jitter=jitter_of(self.jitter, self.seed, self.seeds, spec, profile, per_rank=self.jitter_per_rank),
            engine=engine_of(self.engine),
            one_device=self.one_device,
            yes=self.yes,
        )
        return found.padded() if self.pad else found

    def without_cp(self) -> Setup:
        """Return it with GPUs and replicas in the place of ``cp``; itself where it has none. Raises InputError where
        degrees, GPUs or replicas say otherwise.

        >>> spelled = Setup("ulysses", cp=8, gpus=16).without_cp()
        >>> spelled.gpus, spelled.dp_degree, spelled.cp
        (16, 2, None)
        """
        if self.cp is None:
            return self
        self._require_types()
        cp, entry, name = self.cp, names.entry(self.played), names.schedule_name(self.played)
        if cp > 1 and not entry.degrees:
            raise InputError(
                f"`cp` {cp}: schedule {name!r} splits no sequence: leave it out, or choose another `schedule`"
            )
        said = {axis: getattr(self, f"{axis}_degree") for axis in entry.degrees}
        told = {f"`{axis}_degree` {degree}": degree for axis, degree in said.items() if degree is not None}
        inside, all_told = math.prod(told.values()), len(told) == len(said) > 0
        if cp % inside or (all_told and inside != cp):
            raise InputError(f"`cp` {cp} is not {' x '.join(told)} of schedule {name!r}: leave out one of them")
        dp, beside = self.dp_degree, {"tp": self.tp_degree, "pp": self.pp_degree}
        whole = cp * math.prod(beside.values())
        named = f"`cp` {cp}" + "".join(f" x `{axis}_degree` {degree}" for axis, degree in beside.items() if degree > 1)
        if isinstance(dp, Untold):
            spec = names.changed_cluster(
                names.cluster_spec(self.cluster), _overrides(self.set)["cluster"], "`set` cluster."
            )
            gpus = self.gpus or spec.gpus_meant or (spec.gpus_per_node * self.nodes if self.nodes else whole)
            if gpus % whole:
                above = -(-gpus // whole) * whole
                raise InputError(
                    f"{named} does not divide {gpus} GPUs: set `gpus` {f'{above - whole} or ' if above > whole else ''}"
                    f"{above}, or another `cp`"
                )
            dp = gpus // whole
        elif self.gpus not in {None, whole * dp}:
            raise InputError(
                f"`gpus` {self.gpus} is not {named} x `dp_degree` {dp}: set `gpus` {whole * dp}, or leave out one of "
                f"them"
            )
        return self.replace(cp=None, gpus=whole * dp, dp_degree=dp)

    def spelled_out(self) -> Setup:
        """Return it with its ``global_batch`` as replicas, sequences of each, and micro-batches; itself where it has
        none. Raises InputError for what does not divide, with the nearest that does.

        >>> spelled = Setup("ulysses", gpus=16, ulysses_degree=8, seq="64K", global_batch="1M").spelled_out()
        >>> spelled.dp_degree, spelled.batch, spelled.set
        (2, 8, ('schedule.micro_batches=8',))
        """
        if self.cp is not None:
            return self.without_cp().spelled_out()
        if self.global_batch is None:
            return self._in_turns()
        self._require_types()
        if self.scope != "step":
            raise InputError(f"`global_batch` {self.global_batch} is of training steps: set `scope` step")
        if self.documents is not None and names.micro_batches_of(self.documents):
            raise InputError(
                f"`global_batch` {self.global_batch}, and `documents` of each micro-batch of a replica: leave it out"
            )
        sequences = sequences_of(self.global_batch, self.sequence_length)
        entry, overrides = names.entry(self.played), _overrides(self.set)
        spec = names.changed_cluster(names.cluster_spec(self.cluster), overrides["cluster"], "`set` cluster.")
        dp = int(self.dp_degree)
        pp, tp = int(self.pp_degree), int(self.tp_degree)
        gpus, replicas = shared_gpus(entry, spec, self._degrees, gpus=self.gpus, nodes=self.nodes, dp=dp, pp=pp, tp=tp)
        mesh = self._mesh(entry, spec, self.model_spec, gpus, replicas)
        each = of_each(self.global_batch, sequences, mesh.dp, mesh.dp * mesh.sharing, self.batch)
        turns = {"schedule.micro_batches": each} if each > 1 and self._has_turns(entry, overrides["schedule"]) else {}
        found = self.replace(global_batch=None, gpus=gpus, dp_degree=mesh.dp, batch=each)
        return found.replace(set=turns) if turns else found

    def _in_turns(self) -> Setup:
        """Return it with one sequence and one micro-batch for each list of documents; itself where these are set, or
        there is one list for all. Raises InputError where it has another number of sequences.
        """
        turns = None if self.documents is None else names.micro_batches_of(self.documents)
        if turns is None:
            return self
        count = len(turns)
        if self.batch not in {1, count}:
            raise InputError(f"`batch` {self.batch}, and `documents` of {count} micro-batches: leave out `batch`")
        given = _overrides(self.set)["schedule"]
        told = count == 1 or not self._has_turns(names.entry(self.played), given)
        if self.batch == count and told:
            return self
        return self.replace(batch=count, set={} if told else {"schedule.micro_batches": count})

    @property
    def sequence_length(self) -> int:
        """Tokens of a sequence: of its documents, where it has some; of several micro-batches of the longest."""
        if self.documents is None:
            return names.tokens("seq", self.seq)
        turns = names.micro_batches_of(self.documents)
        return max(map(sum, turns)) if turns else sum(names.lengths_of(self.documents))

    def _has_turns(self, entry: Entry, given: list[tuple[str, str]]) -> bool:
        """Return whether its schedule has micro-batches of which nothing is set."""
        own = {*dict(given), *(stack_of(self.stack).options if self.stack is not None else ())}
        return "micro_batches" in {*msgspec.to_builtins(entry.options or {})} - own

    @property
    def assumed(self) -> dict[str, str]:
        """What nobody named: a model and a cluster are then those of ``sim.setup.names``.

        >>> Setup("ring", cluster="host").assumed
        {'model': 'llama3-8b'}
        """
        return {name: str(value) for name, value in vars(self).items() if isinstance(value, Assumed)}

    @property
    def model_spec(self) -> ModelSpec:
        """The model, with what is set of it."""
        return names.model_with(self.model, _overrides(self.set)["model"])

    @property
    def played(self) -> str | Build | Entry:
        """The schedule that is meant."""
        if self.schedule is not None:
            return self.schedule
        return stack_of(self.stack).schedule if self.stack is not None else "ring"

    def _stacked(
        self, entry: Entry, given: list[tuple[str, str]], usual: Mapping[str, str | int | bool]
    ) -> list[tuple[str, str]]:
        """Return the options of the schedule, each once: what is set comes before what the stack switches on, and that
        before what the software has. Only options that this schedule has at this scope are among them.
        """
        has = {*msgspec.to_builtins(entry.options or {})} - {*dict(given)}
        stacked: Mapping[str, str] = {}
        if self.stack is not None:
            if self.scope != "step":
                raise InputError(f"`stack` {self.stack} is of training steps: set `scope` step, or leave it out")
            stacked = stack_of(self.stack).options
        taken = {*has} - {*stacked} - ({*OF_STEPS} if self.scope != "step" else set())
        taken -= {*OF_LAYERS} if self.scope == "attention" else {*OF_GROUPS} if self.tp_degree == 1 else set()
        return [
            *((name, names.text_of(value)) for name, value in usual.items() if name in taken),
            *((name, value) for name, value in stacked.items() if name in has),
            *given,
        ]

    def _require_degrees(self, given: list[tuple[str, str]]) -> None:
        """Raise InputError for what is set of tensor parallelism, or of a pipeline, where nobody says over how many
        ranks, or of how many stages. What software has of it is for where somebody does.
        """
        for degree, what, usual in (
            ("tp_degree", "tensor parallelism, and nobody says over how many ranks", OF_GROUPS),
            ("pp_degree", "a pipeline, and nobody says of how many stages", OF_STAGES),
        ):
            for name, value in given if isinstance(getattr(self, degree), Untold) else ():
                if name in usual and value.lower() != (own := names.text_of(usual[name])):
                    raise InputError(
                        f"`set` schedule.{name}={value} is of {what}: set `{degree}`, or leave it out"
                        + (f", which is {own}" if own else "")
                    )

    def _require_types(self) -> None:
        """Raise InputError for a value of a type that its field does not take, and for a count below 1."""
        for name, takes in _types_taken().items():
            value = getattr(self, name)
            if isinstance(value, takes) and (bool in takes or not isinstance(value, bool)):
                continue
            if type(value) is int and float in takes:
                continue
            expected = " or ".join("None" if one is type(None) else one.__name__ for one in takes)
            raise InputError(f"`{name}` {value!r}: expected {expected}")
        degrees = ("ulysses_degree", "ring_degree", "tp_degree", "pp_degree", "dp_degree")
        for name in ("layers", "batch", "nodes", "gpus", "cp", *degrees):
            if (count := getattr(self, name)) is not None:
                at_least_one(name, count)

    @property
    def _degrees(self) -> Degrees:
        return {"ulysses": self.ulysses_degree, "ring": self.ring_degree}

    def _mesh(self, entry: Entry, spec: ClusterSpec, model: ModelSpec, gpus: int | None, dp: int) -> Mesh:
        """Return what its degrees stand for, on so many GPUs and in so many replicas."""
        name = names.schedule_name(self.played)
        pp, tp = int(self.pp_degree), int(self.tp_degree)
        return mesh_of(entry, name, spec, model, self._degrees, gpus=gpus, nodes=self.nodes, dp=dp, pp=pp, tp=tp)

    def _overridden(self, entry: Entry, mesh: Mesh, given: list[tuple[str, str]]) -> tuple[Mesh, Any]:
        """Return the mesh and the options of a schedule with what was set of them. Where a schedule splits heads and
        sequence, which of the two is inside belongs to the mesh.
        """
        placed = {"ring", "ulysses"} <= set(entry.degrees)
        for name, value in given:
            if placed and name == "placement":
                order = PLACEMENTS[one_of("set schedule.placement", value, PLACEMENTS)]
                mesh = msgspec.structs.replace(mesh, order=order)
        beside = ["placement"] if placed else []
        own = [(name, value) for name, value in given if not placed or name != "placement"]
        return mesh, names.options(entry, names.schedule_name(self.played), own, "`set` schedule.", beside)


@cache
def _types_taken() -> dict[str, tuple[type, ...]]:
    """Return the types that each field of a setup takes."""
    hints = {name: hint for name, hint in get_type_hints(Setup).items() if name != "_"}
    return {name: tuple(get_origin(one) or one for one in get_args(hint) or (hint,)) for name, hint in hints.items()}


class _Proved(NamedTuple):
    """A schedule that was proved, and what it was asked for by."""

    configuration: Configuration
    checked: Checked


def _predicted(setup: Setup, before: _Proved | None = None) -> Prediction:
    """Return the prediction of one step; a schedule that was proved before is not proved again."""
    found = setup.resolved()
    checked = before.checked if before and found.has_schedule_of(before.configuration) else found.checked()
    simulation = simulate(checked, found.cluster, found.profile, found.jitter, engine=found.engine)
    proved = _Proved(found, checked)
    return Prediction(simulation, found.schedule, found.title, lambda **new: _predicted(setup.replace(**new), proved))


def _overrides(changes: Overrides) -> dict[str, list[tuple[str, str]]]:
    """Return the overrides of each root: their paths and values."""
    found: dict[str, list[tuple[str, str]]] = {root: [] for root in SET_ROOTS}
    for key, value in names.pairs(changes):
        root, dot, path = key.partition(".")
        if root in found and not path:
            raise InputError(f"`set` {key}: expected a key below it, such as cluster.nvlink.bytes_per_s")
        if root not in found or not dot:
            raise unknown("prefix", root, found, "`set` PREFIX.KEY=VALUE")
        found[root].append((path, value))
    return found
