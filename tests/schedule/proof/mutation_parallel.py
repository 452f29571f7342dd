"""Tensor parallelism and pipelines for ``mutations`` to change."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import msgspec

from sim.schedule.methods.catalog import NAMED, SCHEDULES
from sim.schedule.model.pipeline.timetables import PIPELINES
from sim.schedule.proof.check import Checked, check
from sim.words.mesh import Mesh
from sim.words.workload import Workload
from tests.helpers import make_model
from tests.schedule.proof.mutation_steps import STEP_OPERATORS

DRAWN: tuple[tuple[str, int, str], ...] = (
    ("gpipe", 2, "2,1"),
    ("1f1b", 2, "1,2"),
    ("1f1b", 2, "1,0"),
    ("1f1b", 3, "1,1,1"),
    ("zb-h1", 2, "2,1"),
    ("zb-h1", 3, "1,1,1"),
    ("interleaved", 2, "1,1,1,1"),
    ("looped-bfs", 2, "1,1,1,1"),
    ("zb-h2", 3, "1,1,1"),
    ("zb-v", 2, "1,1,1,1"),
    ("dualpipe-v", 2, "1,1,1,1"),
)
"""Pipelines, how many stages they have, and how many layers each chunk has."""
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
    beside = _beside(draw)
    if draw.random() < 0.4:
        options = dataclasses.replace(SCHEDULES[name].options, **beside)
        return f"{said}, B {micro}, {beside}", check(SCHEDULES[name].schedule(workload, mesh, options))
    chosen: dict[str, Any] = {
        "zero_stage": draw.choice((0, 1, 2, 3)),
        "sync": draw.choice(("every", "last")),
        "loss": draw.choice(("whole", "chunked")),
        "checkpoint": draw.choice(("full", "none", "attention")),
        "shards": draw.choice(("all", "replica")),
        "micro_batches": micro,
    } | beside
    options = dataclasses.replace(SCHEDULES[name].options, **chosen)
    workload = msgspec.structs.replace(workload, scope="step")
    return f"{said}, {chosen}", check(SCHEDULES[name].schedule(workload, mesh, options))


def _beside(draw: Random) -> dict[str, Any]:
    """Return how ranks that have shares of weights send."""
    return {"tp_overlap": draw.choice(("none", "gradients", "shards")), "tp_sequence": draw.random() < 0.6}


def drawn_pipeline(draw: Random) -> tuple[str, Checked]:
    """Return a training step of a pipeline, whose stages may be rings that share weights."""
    pipeline, stages, layers = draw.choice(DRAWN)
    split = layers.split(",")
    chosen: dict[str, Any] = {
        "zero_stage": draw.choice((0, 1, 2, 3)),
        "sync": draw.choice(("every", "last")),
        "loss": draw.choice(("whole", "chunked")),
        "host_waits": draw.choice(("never", "micro-batch")),
        "activations": draw.choice(("hbm", "hbm", "save-on-cpu")),
        **_beside(draw),
        "pipeline_schedule": pipeline,
        "pipeline_layers": layers,
        "pipeline_chunks": 1 if PIPELINES[pipeline].chunks else len(split) // stages,
        "micro_batches": 4 if len(split) > stages else 3,
    }
    mesh = Mesh(pp=stages, ring=draw.choice((1, 1, 2)), tp=draw.choice((1, 1, 2)))
    tied = draw.random() < 0.3 and PIPELINES[pipeline].last_stage(stages) > 0
    model = msgspec.structs.replace(make_model(4, 2, head_dim=4), ffn_dim=12, vocab_size=40, tied_embeddings=tied)
    workload = Workload(
        model=model, seq=16, batch=chosen["micro_batches"], dtype="fp64", scope="step", layers=sum(map(int, split))
    )
    entry = NAMED["ring" if mesh.ring > 1 else "single"]
    options = dataclasses.replace(entry.options, checkpoint="none", **chosen)
    return f"{mesh.named()}, tied {tied}, {chosen}", check(entry.schedule(workload, mesh, options))
