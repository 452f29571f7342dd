"""What a training step holds by the formulas of the field, to stand beside the walk of its buffers.

States are those of ZeRO (arXiv:1910.02054 §3.1, §5): master weights, both moments and gradients in fp32 are 16 bytes a
parameter, and one P-th of that where they are sharded over P ranks. Frozen weights are in the model's data type and
have nothing else, and all of that is of adapters. Below stage 3 every rank has all weights in the
model's data type, 2 bytes more, and at stage 1 all gradients; a shard of such weights stays on the GPU where the
optimiser is on the host (arXiv:2101.06840 §4). Under full checkpointing (arXiv:1604.06174) a layer
leaves its input, B · S/P · E elements, of the sequences of one micro-batch.
"""

from __future__ import annotations

import dataclasses

import msgspec

from sim.schedule.ir.program import Header
from sim.schedule.ir.shares import Share
from sim.schedule.model.pipeline.stages import Stages
from sim.schedule.model.scope import units
from sim.words.options import LayerOptions
from sim.words.workload import DTYPE_BYTES, Workload, accumulation_dtype


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one rank, wherever they lie."""

    states_bytes: int
    """Weights, gradients and moments, when all gradients are there."""
    saved_bytes: int | None
    """Inputs of all layers between the passes; None where they are not all that layers leave."""


def footprint(header: Header) -> Footprint:
    """Return what the formulas say of a training step: of the stage of a pipeline that has most of each."""
    workload, options = header.workload, options_of(header)
    stages, mesh = Stages(header.mesh, workload, options), header.mesh
    shards = next((len(one.groups[0]) for one in header.communicators if one.name == "weights"), 1)
    held, share = [], Share(workload.model, 0, header.members)
    for stage in range(mesh.pp):
        own = [unit for unit in units(workload) if stages.owns(stage, unit)]
        weights, frozen = (sum(share.size(unit.flat) for unit in own if unit.frozen == kept) for kept in (False, True))
        held.append(_states_bytes(workload, options, shards, weights, frozen))
    sequences = workload.batch // options.micro_batches
    tokens = sequences * workload.seq // (mesh.sharing * (mesh.tp if options.tp_sequence else 1))
    layer = tokens * workload.model.embed_dim * DTYPE_BYTES[workload.dtype]
    most = max(stages.layers_in_flight(stage) for stage in range(mesh.pp))
    known = options.checkpoint in {"full", "whole"} and not workload.sequences
    return Footprint(states_bytes=max(held), saved_bytes=most * layer if known else None)


def options_of(header: Header) -> LayerOptions:
    """Return the options of layers that a schedule has."""
    names = [field.name for field in dataclasses.fields(LayerOptions)]
    return LayerOptions(**{name: header.options[name] for name in names if name in header.options})


def _states_bytes(workload: Workload, options: LayerOptions, parts: int, weights: int, frozen: int) -> int:
    """Return what a rank keeps of so many weights, trained and frozen ones, that are cut into so many parts."""
    own, wide = DTYPE_BYTES[workload.dtype], DTYPE_BYTES[accumulation_dtype(workload.dtype)]
    stage = options.zero_stage
    states = own if options.optimiser_states == "model" else wide
    sent = own if options.reduce == "model" else wide
    works = options.optimiser == "host" and options.weights != "host-states"
    working = weights if stage < 3 else weights // parts if works else 0
    total = 3 * states * weights // parts + own * working
    total += own * (frozen if stage < 3 else frozen // parts)
    several = options.micro_batches > 1 or options.accumulate != "copies"
    adds_whole = stage >= 2 and several and options.sync == "last"
    return total + (sent * weights if stage == 1 or adds_whole else states * weights // parts)
