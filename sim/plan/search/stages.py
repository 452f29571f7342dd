"""Stages of a pipeline that plans try: how many, in which order they take micro-batches, and what ranks share out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from sim.base.errors import InputError
from sim.schedule.model.pipeline.stages import Stages, nearly_equal
from sim.schedule.model.pipeline.timetables import PIPELINES
from sim.setup import names
from sim.setup.global_batch import divisors
from sim.setup.setup import Setup
from sim.words.mesh import Mesh
from sim.words.options import LayerOptions
from sim.words.stage_layers import layers_text

ORDERS = ("1f1b", "interleaved", "zb-h1")
"""In which stages take micro-batches where nobody names one; the second with several chunks of layers a stage."""
CHUNKS = 2
"""Of which stages with several have two at least. Twice as many halve what they wait, and double what they send."""
WAIT = 0.02
"""How many times the kernels of all layers stages wait with so many chunks, at least, for more of them to be tried.
Assumed: more chunks win half of it at most, and each further one makes families whose bounds take time."""
STATES = "1"
"""Stage of ZeRO of pipelines that is tried beside FSDP: it gathers weights and sums gradients once a step, not for
every micro-batch, and holds both whole (Megatron-LM's distributed optimiser). At stage 2 gradients are summed as by
FSDP, at 0 each rank updates all weights: both are slower where stage 1 fits."""
_WAITS: Mapping[str, float] = {"1f1b": 1.0, "gpipe": 1.0, "interleaved": 1.0, "zb-h1": 1 / 3}
"""How many passes of a micro-batch through a chunk of each other stage a stage waits for at least, by the closed forms
of papers (``timetables``): without gradients of weights, which are a third at most, in the last."""
_SURE = 0.8
"""Which share of a stage's kernels lies between what it is handed and what it hands on: not what is computed again
before, nor gradients of weights behind it. Assumed, and held by ``tests/plan/test_pipelines.py``."""
_UNEVEN = 1.1
"""How many times the layers of equal stages the largest has at most, of those that nobody asks for: all others wait for
it. Assumed; 126 layers on 2 to 64 stages are at 1.02."""


class Pipeline(NamedTuple):
    """An order of micro-batches, and which layers stages have."""

    options: Mapping[str, str]
    """Of the schedule."""
    bubbles: float = 0.0
    """How many times the kernels of all layers stages wait at least."""


def num_stages(setup: Setup, gpus: int, sequences: int | None, asked: Sequence[int]) -> Sequence[int]:
    """Return how many stages are tried on some GPUs: as many as are ``asked`` for; else one, and all numbers that share
    them equally, the layers equally or nearly so, and that all sequences of a global batch fill.
    """
    if asked:
        return asked
    layers = setup.layers or setup.model_spec.num_layers
    if sequences is None or not _can_be_cut(setup):
        return [1]
    return [pp for pp in divisors(gpus) if pp <= sequences and _is_near(layers, pp)]


def pipelines(base: Setup, options: Mapping[str, Sequence[str]], fixed: set[str], *, asked: bool) -> Iterator[Pipeline]:
    """Yield the orders to try of a setup's stages: the one that is ``fixed``, or those of ``options``, or of
    ``ORDERS``. None where nobody ``asked`` for stages and micro-batches do not fill them.
    """
    pp = base.pp_degree
    if pp == 1:
        yield Pipeline({})
        return
    spelled = base.replace(pad=False).spelled_out().resolved()  # padding asks a builder, which may refuse it
    turns, layers = getattr(spelled.options, "micro_batches", 1), spelled.workload.layers
    if turns < pp and not asked:
        return
    if not hasattr(spelled.options, "pipeline_schedule"):
        yield Pipeline({})
        return
    if fixed & {"pipeline_chunks", "pipeline_layers"}:
        own = _unequal(layers, pp, spelled.options.pipeline_schedule, spelled.options.pipeline_chunks)
        yield Pipeline({} if "pipeline_layers" in fixed else own)
        return
    orders = options.get("pipeline_schedule", ORDERS)
    if said := "pipeline_schedule" in fixed:
        orders = [spelled.options.pipeline_schedule]
    for name in orders:
        tried = [*_chunks(name, layers, pp, turns, asked=asked)]
        for chunks in tried or [CHUNKS] * said:  # of an order that is said builders say what it lacks
            cut = _unequal(layers, pp, name, chunks)
            order = {} if said else {"pipeline_schedule": name}
            several = {"pipeline_chunks": str(chunks)} if chunks > 1 else {}
            sure = 0.0 if cut else _SURE  # what equal stages wait for a head is not sure of others
            yield Pipeline({**order, **several, **cut}, sure * waits(name, pp, turns, chunks))


def waits(name: str, pp: int, turns: int, chunks: int) -> float:
    """Return how many times its kernels a stage waits in an order, by the closed forms; 0 where there is none."""
    return _WAITS.get(name, 0.0) * (pp - 1) / turns / chunks


def _chunks(name: str, layers: int, pp: int, turns: int, *, asked: bool = False) -> Iterator[int]:
    """Yield how many chunks of layers each stage has in an order: 1 where that has no choice, or says it. Else numbers
    that go up by a factor of two and more, while stages would still wait, of chunks that are equal or nearly so; of
    stages that somebody ``asked`` for the least number whatever its chunks.

    >>> [[*_chunks("interleaved", *of)] for of in ((80, 8, 8), (126, 16, 16), (80, 8, 512))]
    [[2, 5, 10], [2, 4, 8], [2]]
    """
    if name not in PIPELINES or PIPELINES[name].chunks is not None:
        yield 1
        return
    if turns % pp:
        return
    least = CHUNKS
    for chunks in range(CHUNKS, -(-layers // pp) + 1):
        if chunks >= least and (_is_near(layers, chunks * pp) or (asked and chunks == CHUNKS)):
            yield chunks
            if waits(name, pp, turns, chunks) < WAIT:
                return
            least = 2 * chunks


def states(base: Setup, options: Mapping[str, Sequence[str]], fixed: set[str]) -> list[Mapping[str, str]]:
    """Return what of a step with stages ranks share out, as options that make families: weights, too, or ``STATES``.
    Nothing is varied of one stage, of ranks that have none to share with, of what is ``fixed`` or among the options,
    and of a step of named software, which says it.
    """
    said = "zero_stage" in fixed or "zero_stage" in options or base.software is not None
    if said or base.pp_degree == 1 or "zero_stage" not in msgspec.to_builtins(names.entry(base.played).options or {}):
        return [{}]
    alone = base.pp_degree * base.tp_degree == base.gpus
    return [{}] if alone else [{}, {"zero_stage": STATES}]


def _is_near(layers: int, chunks: int) -> bool:
    """Return whether the largest of some chunks has few more layers than equal ones would, and no chunk is without any
    but the first and the last one, which have the embedding and the head.
    """
    return chunks <= layers + 2 and max(nearly_equal(layers, chunks)) * chunks <= _UNEVEN * layers


def _unequal(layers: int, pp: int, name: str, per_stage: int) -> Mapping[str, str]:
    """Return the option that cuts layers that chunks do not divide; none where these do, or have too few, or stages
    take micro-batches in an order of a file. ``per_stage`` are chunks where the order does not say how many.
    """
    if name not in PIPELINES:
        return {}
    chunks = pp * (PIPELINES[name].chunks or per_stage)
    if layers % chunks == 0 or layers < chunks - 2:
        return {}
    return {"pipeline_layers": layers_text(nearly_equal(layers, chunks))}


def _can_be_cut(setup: Setup) -> bool:
    """Return whether there are pipelines of a model at all."""
    workload = names.workload(setup.model_spec, 64, batch=2, scope="step", layers=2)
    try:
        Stages(Mesh(pp=2), workload, LayerOptions(micro_batches=2))
    except InputError:
        return False
    return True
