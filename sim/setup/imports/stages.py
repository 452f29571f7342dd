"""How frameworks cut a model into stages of a pipeline: how many layers each chunk has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from sim.base.errors import InputError
from sim.schedule.model.pipeline.timetables import PIPELINES
from sim.setup.imports.layouts import layers_of_layout
from sim.words.workload import ModelSpec

INTERLEAVED = "interleaved"
_SETS = "or `set` schedule.pipeline_layers"
_USUAL_CHUNKS = 2
"""Of a stage that has several, where nobody says how many (torchtitan 0.2.0 distributed/pipeline_parallel.py)."""


class Asked(NamedTuple):
    """What is cut, and what files say of it."""

    model: ModelSpec
    layers: int
    pp: int
    schedule: str | None
    """Which pipeline schedule is named; None where its chunks say it."""
    facts: Mapping[str, str]
    named: Callable[[str], str]
    """Returns the key that says a fact."""

    def count(self, fact: str, default: int = 0) -> int:
        """Return a number that files say."""
        return int(self.facts.get(fact, default))

    def said(self, *facts: str) -> str:
        """Return some facts by their keys, with their values."""
        return ", ".join(f"{self.named(fact)} {self.facts[fact]}" for fact in facts if fact in self.facts)


def options_of(asked: Asked, found: Sequence[int]) -> dict[str, str]:
    """Return the options of a schedule whose chunks have so many layers each."""
    chunks = len(found) // asked.pp
    name = asked.schedule or (INTERLEAVED if chunks > 1 else "1f1b")
    options = {"pipeline_schedule": name}
    if PIPELINES[name].chunks is None:
        options["pipeline_chunks"] = str(chunks)
    return options | ({"pipeline_layers": ",".join(map(str, found))} if len(set(found)) > 1 else {})


def even(asked: Asked) -> tuple[int, ...]:
    """Return chunks that are as alike as they can be, where a cut of files is not played."""
    chunks = asked.count("chunks", 1)
    if asked.schedule:
        chunks = PIPELINES[asked.schedule].chunks or asked.count("chunks", _USUAL_CHUNKS)
    few, more = divmod(asked.layers, asked.pp * chunks)
    return tuple([few + (number < more) for number in range(asked.pp * chunks)])


def _megatron(asked: Asked) -> tuple[int, ...]:
    """Return the layers of each chunk as Megatron cuts them: equal chunks in each stage, where embedding and head may
    count as a layer each, or the first and the last stage have as many layers as is said (megatron-core 0.16.1
    transformer/transformer_block.py, get_num_layers_to_build; flags as Megatron-LM's arguments.py has them, from
    memory).
    """
    if "layout" in asked.facts:
        return _laid_out(asked)
    stages, each = _megatron_stages(asked)
    of_chunk = asked.count("chunk_layers")
    if of_chunk and each % of_chunk:
        raise InputError(
            f"{asked.said('chunk_layers')} does not divide the {each} layers of a stage: change it, {_SETS}"
        )
    chunks = asked.count("chunks", each // of_chunk if of_chunk else 1)
    if any(layers % chunks for layers in stages) or (of_chunk and each != chunks * of_chunk):
        raise InputError(
            f"{asked.said('chunks', 'chunk_layers')} do not cut stages of {', '.join(map(str, stages))} layers: change "
            f"one of them, {_SETS}"
        )
    found = [layers // chunks for _ in range(chunks) for layers in stages]
    found[0] -= asked.count("first_less")
    found[-1] -= asked.count("last_less")
    return _in_groups(asked, tuple(found))


def _megatron_stages(asked: Asked) -> tuple[list[int], int]:
    """Return the layers of each stage, embedding and head among them where they are counted, and those of each stage
    between the first and the last that are given.
    """
    given = ("first_layers", "last_layers", "first_less", "last_less")
    first, last, embedding, loss = map(asked.count, given)
    if (first or last) and (embedding or loss):
        raise InputError(f"{asked.said(*given)}: leave out two of them")
    middle = asked.pp - bool(first) - bool(last)
    spread = asked.layers - first - last + embedding + loss
    if spread < 0 or bool(spread) != bool(middle) or (middle and spread % middle):
        said = asked.said(*given)
        raise InputError(
            f"{asked.layers} layers{f' with {said}' if said else ''} leave {spread} for {middle} stages of "
            f"{asked.named('pp')} {asked.pp}, which do not divide: change one of them, {_SETS}"
        )
    each = spread // middle if middle else 0
    return [*[first] * bool(first), *[each] * middle, *[last] * bool(last)], each


def _in_groups(asked: Asked, found: tuple[int, ...]) -> tuple[int, ...]:
    """Return a cut; raises InputError where its chunks take other groups of micro-batches than one for each stage."""
    if len(found) > asked.pp and asked.count("chunk_group", asked.pp) != asked.pp:
        raise InputError(
            f"{asked.said('chunk_group')}: chunks take one micro-batch for each stage at a time here: set it to "
            f"{asked.pp}, or leave it out"
        )
    return found


def _torchtitan(asked: Asked) -> tuple[int, ...]:
    """Return the layers of each chunk as torchtitan cuts them: the ends count as some layers, and the first chunks have
    one more where they do not divide (torchtitan 0.2.0 distributed/pipeline_parallel.py, pipeline_llm and
    generate_llm_fqn_per_model_part; 0.1.0 alike).
    """
    if "layout" in asked.facts:
        return _laid_out(asked)
    chunks_each = PIPELINES[asked.schedule or "1f1b"].chunks
    first, last = asked.count("first_less", 1), asked.count("last_less", 1)
    counted, of_chunk = asked.layers + first + last, asked.count("chunk_layers")
    chunks = math.ceil(counted / of_chunk) if of_chunk else asked.pp * (chunks_each or _USUAL_CHUNKS)
    allowed = [asked.pp * chunks_each] if chunks_each else range(2 * asked.pp, chunks + 1, asked.pp)
    if chunks not in allowed:
        raise InputError(
            f"{asked.said('chunk_layers')} makes {chunks} chunks of {counted} layers, the ends counted: expected "
            f"{f'{chunks_each}' if chunks_each else 'some, 2 or more,'} for each of the {asked.pp} stages of "
            f"{asked.named('pp')}; change one of them, {_SETS}"
        )
    few, more = divmod(counted, chunks)
    if few < max(first, last, 1):
        raise InputError(
            f"{counted} layers, the ends counted, leave {few} for each of {chunks} chunks, fewer than "
            f"{asked.named('first_less')} {first} or {asked.named('last_less')} {last}: change these, {_SETS}"
        )
    found = [few + (number < more) for number in range(chunks)]
    found[0] -= first
    found[-1] -= last
    return tuple(found)


def _nanotron(asked: Asked) -> tuple[int, ...]:
    """Return the layers of each stage as nanotron cuts them, by what they compute: a stage ends with the layer that
    takes it over its share of all products, those of the head included (nanotron 0.4 models/base.py, build_model;
    models/llama.py, get_block_compute_costs).
    """
    model = asked.model
    of_layer = 4 * model.num_heads * (model.embed_dim // model.num_heads) * model.embed_dim
    of_layer += 3 * model.ffn_dim * model.embed_dim
    costs = [0, *[of_layer] * asked.layers, 0, model.vocab_size * model.embed_dim, 0, 0]
    total, stage, found = sum(costs), 0, [0] * asked.pp
    stages_of = list[int]()
    for cost in accumulate(costs):
        stages_of.append(stage)
        stage += cost > total * ((stage + 1) / asked.pp)
    for one in stages_of[1 : asked.layers + 1]:
        found[one] += 1
    if len({asked.pp - 1, *stages_of[asked.layers + 1 :]}) > 1:
        raise InputError(
            f"{asked.named('pp')} {asked.pp}: nanotron puts norm, head and loss on stages {_and(stages_of[-4:])} of "
            f"{asked.pp}, by what they compute, and here they are on the last one: choose fewer stages, {_SETS}"
        )
    return tuple(found)


def _and(stages: Sequence[int]) -> str:
    return " and ".join(str(stage + 1) for stage in dict.fromkeys(stages))


def _laid_out(asked: Asked) -> tuple[int, ...]:
    """Return the layers of a layout. Raises InputError where they are not those of the model, or each stage would not
    have a whole number of chunks.
    """
    found = layers_of_layout(asked.facts["layout"])
    each = PIPELINES[asked.schedule].chunks if asked.schedule else asked.count("chunks")
    if sum(found) != asked.layers or len(found) % asked.pp or (each and len(found) != each * asked.pp):
        raise InputError(
            f"{asked.named('layout')} has {sum(found)} layers in {len(found)} chunks: expected {asked.layers} layers, "
            f"and {each or 'some'} chunks for each of {asked.pp} stages; change it, {_SETS}"
        )
    return _in_groups(asked, found)


CUTS: dict[str, Callable[[Asked], tuple[int, ...]]] = {
    "megatron": _megatron,
    "nanotron": _nanotron,
    "torchtitan": _torchtitan,
}
"""By the names of frameworks whose code they follow: layers of each chunk, in the order of the model."""
