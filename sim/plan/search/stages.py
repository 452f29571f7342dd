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

ORDERS = ("1f1b", "interleaved", "zb-h1")
"""In which stages take micro-batches where nobody names one; the second with ``CHUNKS`` of layers a stage."""
OF_PIPELINES = ("pipeline_schedule", "pipeline_chunks", "pipeline_layers")
"""Options of steps that have stages."""
CHUNKS = 2
STATES = "1"
"""Stage of ZeRO of pipelines that is tried beside FSDP: it gathers weights and sums gradients once a step, not for
every micro-batch, and holds both whole (Megatron-LM's distributed optimiser). At stage 2 gradients are summed as by
FSDP, at 0 each rank updates all weights: both are slower where stage 1 fits."""
_WAITS: Mapping[str, float] = {"1f1b": 1.0, "gpipe": 1.0, "interleaved": 1 / CHUNKS, "zb-h1": 1 / 3}
"""How many passes of a micro-batch through each other stage a stage waits for at least, by the closed forms of papers
(``timetables``): with chunks as many parts of one, and without gradients of weights, which are a third at most."""
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
    if fixed & {*OF_PIPELINES}:
        own = _unequal(layers, pp, spelled.options.pipeline_schedule, spelled.options.pipeline_chunks)
        yield Pipeline({} if "pipeline_layers" in fixed else own)
        return
    for name in options.get("pipeline_schedule", ORDERS):
        several = name in PIPELINES and PIPELINES[name].chunks is None
        cut = _unequal(layers, pp, name, CHUNKS)
        if several and (turns % pp or (layers % (CHUNKS * pp) and not cut)):
            continue
        chosen = {"pipeline_schedule": name} | ({"pipeline_chunks": str(CHUNKS)} if several else {})
        sure = 0.0 if cut else _SURE  # what equal stages wait for a head is not sure of others
        yield Pipeline({**chosen, **cut}, sure * waits(name, pp, turns))


def waits(name: str, pp: int, turns: int) -> float:
    """Return how many times its kernels a stage waits in an order, by the closed forms; 0 where there is none."""
    return _WAITS.get(name, 0.0) * (pp - 1) / turns


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
    """Return whether the largest of some chunks has few more layers than equal ones would."""
    return chunks <= layers and max(nearly_equal(layers, chunks)) * chunks <= _UNEVEN * layers


def _unequal(layers: int, pp: int, name: str, per_stage: int) -> Mapping[str, str]:
    """Return the option that cuts layers that stages do not divide; none where these do, or have too few, or take
    micro-batches in an order of a file. ``per_stage`` are chunks where the order does not say how many.
    """
    if layers % pp == 0 or name not in PIPELINES or layers < (chunks := pp * (PIPELINES[name].chunks or per_stage)):
        return {}
    return {"pipeline_layers": ",".join(map(str, nearly_equal(layers, chunks)))}


def _can_be_cut(setup: Setup) -> bool:
    """Return whether there are pipelines of a model at all."""
    workload = names.workload(setup.model_spec, 64, batch=2, scope="step", layers=2)
    try:
        Stages(Mesh(pp=2), workload, LayerOptions(micro_batches=2))
    except InputError:
        return False
    return True
