"""A setup from what files say: who shares a sequence and weights, replicas, stages, shards, micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from sim.base.errors import InputError
from sim.setup import names
from sim.setup.global_batch import sequences_of
from sim.setup.imports.facts import ALL_LINEAR, PROJECTIONS, Understood, targets_of
from sim.setup.imports.model import model_of
from sim.setup.imports.stages import CUTS, Asked, even, options_of
from sim.setup.setup import Setup
from sim.setup.stacks import stack_of
from sim.software.attention import kernels_of
from sim.software.software import load_software
from sim.words.options import OF_GROUPS, OF_STEPS
from sim.words.stage_layers import written_out

CLUSTER = "hgx-h100"
"""What is asked where nobody says which GPUs there are: files of frameworks do not."""

_AS_FACTS = {"cp": "cp", "accumulate": "accumulation"}
"""What is given as a file would say it, and comes before what files say."""
_MOST_REPLICAS = 4096
"""That are tried as divisors of a batch."""


class Answer(NamedTuple):
    """A setup, and what was taken for it that no file says."""

    setup: Setup
    assumptions: tuple[str, ...]


def degree_of(fact: str, said: Understood, given: Mapping[str, Any]) -> int:
    """Return how many stages a pipeline has (pp), or ranks that share out weights (tp): what is ``given`` comes before
    what files say.
    """
    name = f"{fact}_degree"
    if given.get(name) is not None:
        return names.at_least_one(name, given[name])
    return int(said.facts[fact].value) if fact in said.facts else 1


class Writer:
    """Writes the setup of a run, part by part, and what it takes for granted."""

    def __init__(self, said: Understood, given: Mapping[str, Any], *, anyway: bool) -> None:
        self.said, self.anyway = said, anyway
        self.given = {name: value for name, value in given.items() if name not in _AS_FACTS}
        self.typed = {fact: given[name] for name, fact in _AS_FACTS.items() if name in given}
        """What is given in words of files."""
        for fact, count in self.typed.items():
            names.at_least_one(next(name for name, one in _AS_FACTS.items() if one == fact), count)
        self.facts = {name: one.value for name, one in said.facts.items()}
        self.facts |= {fact: str(count) for fact, count in self.typed.items()}
        for fact in ("global_batch", "global_tokens") if "accumulation" in self.typed else ():
            self.facts.pop(fact, None)  # which so many micro-batches say otherwise
        self.methods = said.framework.methods
        self.tp, self.pp = (degree_of(fact, said, given) for fact in ("tp", "pp"))
        self.assumptions = list[str]()
        said_of = {
            name: value for name, value in self._below("schedule.").items() if self.tp > 1 or name not in OF_GROUPS
        }
        self.options = (said.framework.shares.options if self.tp > 1 else {}) | said_of
        """Of the schedule."""
        if self.facts.get("reentrant") == "false" and self.options.get("checkpoint") == "whole":
            self.options["checkpoint"] = "full"

    def answer(self) -> Answer:
        """Return the setup; raises InputError where what is said does not go together."""
        model = {} if "model" in self.given else model_of(self.said)
        cluster = self.given.get("cluster", CLUSTER)
        if "cluster" not in self.given:
            self.assumptions.append(f"cluster {CLUSTER}: files do not say which GPUs there are; set `cluster`")
        schedule, degrees = self._split()
        gpus, replicas = self._ranks(cluster, math.prod(degrees.values()))
        self._shard(replicas, math.prod(degrees.values()))
        fields = {"cluster": cluster, "schedule": schedule, **self._degrees(schedule, degrees)}
        fields |= {"gpus": gpus, "tp_degree": self.tp, "pp_degree": self.pp, "dp_degree": replicas}
        fields |= self._sequences(replicas)
        given = {name: value for name, value in self.given.items() if name != "global_batch" or name not in fields}
        fields |= {**{name: value for name, value in model.items() if name != "set"}, **given}
        if "dtype" in self.facts and names.model(fields["model"]).dtype != self.facts["dtype"]:
            fields.setdefault("dtype", self.facts["dtype"])
        fields |= self._software(cluster)
        self._cut(Setup(**fields | {"set": model.get("set", {})}).replace(set=self.given.get("set", ())))
        kept = self._kept(Setup(**fields))
        changes = {**model.get("set", {}), **{f"schedule.{name}": value for name, value in kept.items()}}
        changes |= self._kernels(cluster, fields.get("software")) | self._adapters()
        self._assume(kept)
        setup = Setup(**fields | {"set": changes}).replace(set=self.given.get("set", ()))
        return Answer(setup, tuple(self.assumptions))

    def _cut(self, setup: Setup) -> None:
        """Say what a pipeline is like: in which order, and which layers its stages have; nothing where there is one
        stage. Raises InputError for a cut that is not played, unless ``anyway``.
        """
        named = self.options.pop("pipeline_schedule", None)
        stages = self.said.framework.stages
        if self.pp == 1 or stages is None:
            return
        self.options |= stages.options
        model = setup.model_spec
        asked = Asked(model, setup.layers or model.num_layers, self.pp, named, self.facts, self._named)
        typed = dict(names.pairs(setup.set)).get("schedule.pipeline_layers")
        try:
            given = typed and written_out(typed).split(",")
            found = (0,) * max(self.pp, len(given)) if given else CUTS[stages.cut](asked)
        except InputError as error:
            if not self.anyway:
                raise
            found = even(asked)
            self.assumptions.append(f"layers of stages {','.join(map(str, found))}: {error}")
        self.options |= options_of(asked, found)

    def _below(self, prefix: str) -> dict[str, str]:
        return {name.removeprefix(prefix): value for name, value in self.facts.items() if name.startswith(prefix)}

    def _software(self, cluster: Any) -> dict[str, str]:
        """Return what runs, as a field; nothing where it is given, or kernels are at the rates of datasheets."""
        name = self.facts.get("software", self.said.software)
        profile = self.given.get("profile") or names.cluster_spec(cluster).profile or names.DATASHEET
        if not name or "software" in self.given or profile == names.DATASHEET:
            return {}
        if "software" not in self.facts:
            self.assumptions.append(f"software {name}: kernels as that framework has them; set `software`")
        return {"software": name}

    def _kernels(self, cluster: Any, software: str | None) -> dict[str, str]:
        """Return what is to be set of kernels: attention, and an optimiser on the host, where keys name others than the
        software has, and there are figures of them.
        """
        if software is None:
            return {}
        said, kernels = self._below("software."), load_software(software).kernels
        found = {}
        if said.get("attention") in kernels_of(names.cluster_spec(cluster).gpu.chip):
            found["attention"] = said["attention"]
        if "host_optimiser" in said and self.options.get("optimiser") == "host":
            found["host_optimiser"] = said["host_optimiser"]
        return {f"software.{name}": one for name, one in found.items() if one != getattr(kernels, name)}

    def _adapters(self) -> dict[str, str]:
        """Return what is to be set of a model whose adapters alone are trained."""
        if "adapters" not in self.facts:
            return {}
        rank, alpha, usual = self.facts["adapters"].split("/")
        found = {"model.lora_rank": self.facts.get("lora_rank", rank)}
        found["model.lora_alpha"] = self.facts.get("lora_alpha", alpha)
        targets = targets_of(self.facts.get("lora_targets", usual))
        if {*targets}.isdisjoint(ALL_LINEAR) and not {*targets} >= {*PROJECTIONS}:
            found["model.lora_targets"] = "+".join(own for name, own in PROJECTIONS.items() if name in targets)
        return found

    def _count(self, fact: str, default: int = 1) -> int:
        return int(self.facts.get(fact, default))

    def _split(self) -> tuple[str | None, dict[str, int]]:
        """Return the schedule, and how many ranks share a sequence: in all, or by degrees."""
        degrees = ("ulysses", "ring")
        typed: dict[str, int] = {
            name: self.given[f"{name}_degree"] for name in degrees if f"{name}_degree" in self.given
        }
        said: dict[str, int] = {name: self._count(name) for name in degrees if name in self.facts}
        if "factors" in self.facts:
            said = dict(zip(degrees, map(int, self.facts["factors"].split()), strict=True))
        cp = self._count("cp", math.prod(said.values()))
        if "cp" in self.typed:
            said = dict.fromkeys(said, cp) if len(said) < 2 else said
            if typed and math.prod(typed.values()) != cp:
                told = " x ".join(f"`{name}_degree` {degree}" for name, degree in typed.items())
                raise InputError(f"`cp` {cp} is not {told}: leave out one of them, or give both degrees")
        if said and math.prod(said.values()) != cp:
            raise InputError(
                f"{self._named('cp')} {cp} is not {' x '.join(map(str, said.values()))}: change one of them"
            )
        method = self.methods.get(self.facts.get("method", ""))
        own = self.given.get("schedule") or ("stack" in self.given and stack_of(self.given["stack"]).schedule)
        if own:
            takes = names.entry(own).degrees
            if "cp" in self.typed and cp > 1 and not takes:
                raise InputError(f"`cp` {cp}: schedule {own!r} splits no sequence: leave out one of them")
            cp = cp if takes else 1
            by = takes[0] if len(takes) == 1 else "cp"
            return self.given.get("schedule"), typed or {by: cp}
        if max([*typed.values(), cp]) == 1:
            return "single", {}
        if method is None:
            raise InputError(f"no key says how {cp} ranks share a sequence: set `schedule`")
        self.options = method.options | self.options
        return method.schedule, typed or said or {method.degree or "cp": cp}

    def _degrees(self, schedule: str | None, degrees: Mapping[str, int]) -> dict[str, int]:
        """Return degrees as fields; those that the schedule divides by itself have none."""
        return {f"{name}_degree": count for name, count in degrees.items() if name != "cp" and schedule != "single"}

    def _ranks(self, cluster: Any, cp: int) -> tuple[int, int]:
        """Return GPUs and replicas."""
        whole = cp * self.tp * self.pp
        if "dp_degree" in self.given:
            return self.given.get("gpus", self.given["dp_degree"] * whole), self.given["dp_degree"]
        gpus = self.given.get("gpus") or self._gpus(cluster, whole)
        if gpus % whole:
            beside = {f"{self.tp} that share out weights": self.tp, f"{self.pp} stages": self.pp}
            several = (name for name, count in beside.items() if count > 1)
            ranks = " x ".join([f"{cp} ranks that share a sequence", *several])
            raise InputError(
                f"`gpus` {gpus} is no multiple of the {ranks}: set `gpus` to {max(1, gpus // whole) * whole}, or the "
                f"degrees"
            )
        return gpus, gpus // whole

    def _gpus(self, cluster: Any, whole: int) -> int:
        """Return how many GPUs there are: as is said, as degrees say, or those of the cluster; ``whole`` are of a
        replica.
        """
        spec = names.cluster_spec(cluster)
        if "nodes" in self.given:
            return spec.gpus_per_node * int(self.given["nodes"])
        if self._count("gpus", -1) > 0:
            return self._count("gpus")
        shard, replicate = self._count("shard", -1), self._count("replicate")
        if "gpus_per_node" in self.facts:
            return self._count("gpus_per_node") * self._count("nodes")
        if shard > 0:
            return shard * replicate * whole
        nodes = self._count("nodes", spec.nodes)
        gpus = spec.gpus_per_node * max(nodes, -(-whole * replicate // spec.gpus_per_node))
        self.assumptions.append(f"{gpus} GPUs: no key says how many; set `gpus`")
        return gpus

    def _shard(self, replicas: int, cp: int) -> None:
        """Say over which ranks weights are sharded; raises InputError for groups that are no replicas."""
        stays = ("false", "by-stages") if self.pp > 1 else ("false",)
        if self.facts.get("reshard") in stays and self.options.get("zero_stage") == "3":
            self.options["zero_stage"] = "2"  # weights are whole from their first use to their last one
        if self.options.get("sum_waits") == "never" and self.options.get("zero_stage") == "0":
            del self.options["sum_waits"]  # without ZeRO there are no hooks that sum (DeepSpeed's overlap_comm)
        if self.options.get("sum_waits") == "never" and self.options.get("zero_stage") == "1":
            self.options["sync"] = "last"  # hooks sum what all micro-batches have added up, in the last backward pass
        replicate = self._count("replicate")
        if replicate == 1 or self.options.get("zero_stage") == "0":
            return
        if replicas != replicate:
            if self.anyway:
                return
            raise InputError(
                f"{self._named('replicate')} {replicate} of {replicas} replicas: weights are sharded over all ranks "
                f"here, or over the {cp} that share a sequence; change it to 1 or {replicas}"
            )
        self.options |= {"shards": "replica"} if cp > 1 else {"zero_stage": "0"}

    def _sequences(self, replicas: int) -> dict[str, Any]:
        """Return the length, and how many sequences each replica has; raises InputError where they do not divide."""
        if "seq" not in self.given and "seq" not in self.facts:
            if "documents" not in self.given:
                raise InputError("no key says how long sequences are: set `seq`")
            seq = sum(names.lengths_of(self.given["documents"]))
        else:
            seq = names.tokens("seq", self.given.get("seq", self.facts.get("seq", "")))
        if "batch" in self.given:
            if "accumulation" in self.typed:
                self.options["micro_batches"] = self.facts["accumulation"]
            return {"seq": seq}
        micro = self._piece(self._of_tokens("micro", seq) or 1, replicas, seq)
        typed = self.given.get("global_batch")
        batch = self._of_tokens("global", seq) if typed is None else sequences_of(typed, seq)
        turns = (batch or 0) // (micro * replicas) or 1
        if typed is None:
            turns = self._count("accumulation", turns)
        if batch and micro * replicas * turns != batch:
            each = micro * (self._count("accumulation") if typed is None else 1)
            fits = [n for n in range(1, min(batch // each, _MOST_REPLICAS) + 1) if batch % (each * n) == 0]
            named = self._named("global_batch") if typed is None else "`global_batch`"
            near = ", ".join(map(str, sorted(sorted(fits, key=lambda n: abs(n - replicas))[:6])))
            raise InputError(
                f"{named} {batch} is not {micro} sequences at once x {replicas} replicas x whole "
                f"turns: of its divisors {near or 'none'} replicas would do; set `gpus`, or `batch`"
            )
        if turns > 1:
            self.options["micro_batches"] = str(turns)
        return {"seq": seq, "batch": micro * turns, "global_batch": None}

    def _piece(self, at_once: int, replicas: int, seq: int) -> int:
        """Return how many sequences of a replica go forward and backward at once: all that it has ``at_once``, or parts
        of these in a pipeline. Raises InputError where they do not divide. Unless ``anyway`` it also raises where a
        step has several such turns, each of which fills and empties the pipeline.
        """
        if self.pp == 1 or not {"pp_pieces", "pp_micro_batch"} & self.facts.keys():
            return at_once
        piece, turn = at_once, at_once * self._count("pp_pieces")
        if "pp_pieces" not in self.facts and "micro_tokens" in self.facts:  # which are those of one micro-batch
            if "accumulation" in self.typed:
                return at_once
            raise InputError(
                f"{self._named('micro_tokens')} is of one micro-batch, and no key says how many go through the "
                f"pipeline: set parallelism.num_pp_microbatches, or `accumulate`"
            )
        if "pp_pieces" not in self.facts:
            piece, turn = self._count("pp_micro_batch"), at_once
        if turn % piece:
            raise InputError(
                f"{self._named('pp_micro_batch')} {piece} does not divide the {turn} sequences of "
                f"{self._named('micro_batch')}: change one of them, or set `batch`"
            )
        typed = self.given.get("global_batch")
        batch = self._of_tokens("global", seq) if typed is None else sequences_of(typed, seq)
        turns = (batch or 0) // (turn * replicas)
        if turns <= 1:
            self.facts.setdefault("accumulation", str(turn // piece))
        elif "accumulation" not in self.typed:
            why = f"each of {turns} turns of {turn} sequences fills the pipeline and empties it, which is not played"
            if typed is None and not self.anyway:
                larger = "pp_pieces" if "pp_pieces" in self.facts else "micro_batch"
                raise InputError(
                    f"{self._named('global_batch')} is {batch} sequences on {replicas} replicas: {why}: set "
                    f"{self._named(larger)} to {turns} times as much, or `accumulate`"
                )
            self.assumptions.append(f"one turn of {turn * turns} sequences: {why}; set `accumulate`")
        return piece

    def _of_tokens(self, which: str, seq: int) -> int | None:
        """Return a number of sequences that is said as such, or in tokens; None where it is left to the others."""
        tokens = self._count(f"{which}_tokens", -1)
        if tokens > 0:
            if tokens % seq:
                raise InputError(
                    f"{self._named(f'{which}_tokens')} {tokens} is no multiple of the length {seq}: set `seq`"
                )
            return tokens // seq
        count = self._count(f"{which}_batch", -1)
        return count if count > 0 else None

    def _kept(self, setup: Setup) -> dict[str, str]:
        """Return the options that the schedule has at this scope; those of a stack that was asked for come from it."""
        has = msgspec.to_builtins(names.entry(setup.played).options or {})
        own = stack_of(setup.stack).options if setup.stack is not None else {}
        lacks = OF_STEPS if setup.scope != "step" else ()
        usual = load_software(setup.software).schedule if setup.software is not None else {}
        return {
            name: value
            for name, value in self.options.items()
            if name in has
            and name not in {*own, *lacks}
            and {value} != {names.text_of(one.get(name, value)) for one in (has, usual)}
        }

    def _assume(self, kept: Mapping[str, str]) -> None:
        """Note what no key says and is taken for granted."""
        if self.facts.get("packed") == "true" and "documents" not in self.given:
            self.assumptions.append(
                "one document a sequence, though they are packed: attention takes the longest it can; set `documents`"
            )
        for fact, why in self.said.assumed.items():
            option = fact.removeprefix("schedule.")
            if (option == "micro_batch" and "batch" in self.given) or option == "method":
                continue
            if option == fact or option in kept or option in self.options:
                self.assumptions.append(f"{fact.removeprefix('schedule.')} {self.facts[fact]}: {why}")

    def _named(self, fact: str) -> str:
        """Return the key that says a fact."""
        one = self.said.facts.get(fact) or self.said.facts.get(fact.replace("batch", "tokens"))
        return one.key if one and one.key else fact
