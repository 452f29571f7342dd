"""Tensor parallelism and pipelines for ``mutations`` to change."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import msgspec

from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.model.pipeline.timetables import gpipe, interleaved, one_f_one_b, zero_bubble
from sim.schedule.model.step import Timetable
from sim.schedule.proof.check import Checked, check
from sim.words.mesh import Mesh
from sim.words.options import LayerOptions
from sim.words.workload import Workload
from tests.helpers import make_model
from tests.schedule.model.pipelines import pipelined
from tests.schedule.proof.mutation_steps import STEP_OPERATORS

PIPELINES: tuple[tuple[Timetable, int, tuple[int, ...]], ...] = (
    (gpipe, 2, (2, 1)),
    (one_f_one_b, 2, (1, 2)),
    (one_f_one_b, 2, (1, 0)),
    (one_f_one_b, 3, (1, 1, 1)),
    (zero_bubble, 2, (2, 1)),
    (zero_bubble, 3, (1, 1, 1)),
    (interleaved, 2, (1, 1, 1, 1)),
)
"""Timetables, how many stages they are for, and how many layers each chunk has."""
PARALLEL_OPERATORS = {name: change for name, change in STEP_OPERATORS.items() if not name.startswith("mlp in tiles")}
"""What changes weights, states and ends; none of these has tiles."""


TENSOR: tuple[tuple[str, Mesh], ...] = (
    ("single", Mesh(tp=2)),
    ("single", Mesh(tp=4)),
    ("single", Mesh(tp=2, dp=2)),
    ("ring", Mesh(tp=2, ring=3)),
    ("zigzag", Mesh(tp=2, ring=2)),
    ("ulysses", Mesh(tp=2, ulysses=2)),
    ("upipe", Mesh(tp=2, ulysses=2)),
    ("fpdt", Mesh(tp=2, ulysses=2)),
)
"""Schedules of attention with tensor parallelism around them."""


def drawn_parallel(draw: Random) -> tuple[str, Checked]:
    """Return a proved schedule of one kind or the other, with what people call it."""
    return drawn_tensor(draw) if draw.random() < 0.5 else drawn_pipeline(draw)


def drawn_tensor(draw: Random) -> tuple[str, Checked]:
    """Return tensor-parallel layers, or a training step of them."""
    fields: dict[str, Any] = draw.choice(
        [{}, {"mlp": "geglu"}, {"mlp": "gelu"}, {"norms": "around"}, {"biases": ("qkv",)}, {"tied_embeddings": True}]
    )
    name, mesh = draw.choice(TENSOR)
    model = make_model(8, draw.choice((4, 4, 2)), head_dim=4)
    if name != "upipe" and mesh.tp <= model.num_kv_heads and draw.random() < 0.2:
        fields |= {"qk_norm": "head"}
    model = msgspec.structs.replace(model, ffn_dim=12, vocab_size=40, **fields)
    micro = draw.choice((1, 1, 2))
    workload = Workload(model=model, seq=24, batch=micro, dtype="fp64", scope="layer", layers=2)
    said = f"{name}, {mesh.named()}, {model.num_kv_heads} key/value heads, {fields}"
    if draw.random() < 0.4:
        return f"{said}, B {micro}", check(SCHEDULES[name].schedule(workload, mesh))
    chosen: dict[str, Any] = {
        "zero_stage": draw.choice((0, 1, 2, 3)),
        "sync": draw.choice(("every", "last")),
        "loss": draw.choice(("whole", "chunked")),
        "checkpoint": draw.choice(("full", "none", "attention")),
        "shards": draw.choice(("all", "replica")),
        "micro_batches": micro,
    }
    options = dataclasses.replace(SCHEDULES[name].options, **chosen)
    workload = msgspec.structs.replace(workload, scope="step")
    return f"{said}, {chosen}", check(SCHEDULES[name].schedule(workload, mesh, options))


def drawn_pipeline(draw: Random) -> tuple[str, Checked]:
    """Return a training step of a pipeline, whose stages may be rings that share weights."""
    timetable, stages, split = draw.choice(PIPELINES)
    chosen: dict[str, Any] = {
        "zero_stage": draw.choice((0, 1, 2)),
        "sync": draw.choice(("every", "last")),
        "loss": draw.choice(("whole", "chunked")),
        "host_waits": draw.choice(("never", "micro-batch")),
        "activations": draw.choice(("hbm", "hbm", "save-on-cpu")),
    }
    mesh = Mesh(pp=stages, ring=draw.choice((1, 1, 2)))
    options = LayerOptions(micro_batches=4 if timetable is interleaved else 3, checkpoint="none", **chosen)
    model = msgspec.structs.replace(make_model(4, 2, head_dim=4), ffn_dim=12, vocab_size=40)
    workload = Workload(model=model, seq=16, batch=options.micro_batches, dtype="fp64", scope="step", layers=sum(split))
    name = f"{timetable.__name__}, pp {stages} of {split}, ring {mesh.ring}, {chosen}"
    return name, check(pipelined(workload, mesh, timetable, split, options))
