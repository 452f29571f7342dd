"""Tensor parallelism and pipelines for ``mutations`` to change."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import msgspec

from sim.base.errors import InputError, ScheduleError
from sim.schedule.ir.ops import Accumulate, AllReduce
from sim.schedule.methods.catalog import NAMED, SCHEDULES
from sim.schedule.model.pipeline.timetables import PIPELINES
from sim.schedule.proof.check import Checked, check
from sim.words.mesh import Mesh
from sim.words.workload import Scope, Workload
from tests.helpers import make_model
from tests.schedule.proof.mutation_operators import PORTS, Items, Scene, among, any_of, narrowed
from tests.schedule.proof.mutation_steps import STEP_OPERATORS, of, unlike

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


def largest_or_sum(_: Scene, items: Items, at: int) -> Items:
    """Return the ops with one that takes the largest of what it should sum up, or sums up that."""
    largest = msgspec.UNSET if items[at].largest else True
    return (*items[:at], msgspec.structs.replace(items[at], largest=largest), *items[at + 1 :])


def of_another_member(scene: Scene, items: Items, at: int) -> Items | None:
    """Return the ports with one that says what the same port of another rank does: the share of another member, or the
    tokens.
    """
    port = items[at]
    ports = [one for program in scene.schedule.programs for one in (*program.inputs, *program.outputs)]
    alike = [one for one in ports if (one.tensor, one.layer, one.view) == (port.tensor, port.layer, port.view)]
    new = any_of(scene.draw, alike, port)
    return None if new is None else (*items[:at], new, *items[at + 1 :])


PARALLEL_OPERATORS = {
    **{name: change for name, change in STEP_OPERATORS.items() if not name.startswith("mlp in tiles")},
    "views: half of an op's columns or rows": among(narrowed("eio")),
    "sum: the largest, or of these": of((Accumulate, AllReduce), largest_or_sum),
    "port: of another member": among(of_another_member, *PORTS),
}
"""What changes weights, states and ends, of which none has tiles; and shares of weights."""


TENSOR: tuple[tuple[str, Mesh], ...] = (
    ("single", Mesh(tp=2)),
    ("single", Mesh(tp=4)),
    ("single", Mesh(tp=2, dp=2)),
    ("ring", Mesh(tp=2, ring=3)),
    ("zigzag", Mesh(tp=2, ring=2)),
    ("zigzag", Mesh(tp=4, ring=2)),
    ("ulysses", Mesh(tp=2, ulysses=2)),
    ("upipe", Mesh(tp=2, ulysses=2)),
    ("fpdt", Mesh(tp=2, ulysses=2)),
)
"""Schedules of attention with tensor parallelism around them."""


def drawn_parallel(draw: Random) -> tuple[str, Checked]:
    """Return a proved schedule of one kind or the other, with what people call it."""
    return drawn_tensor(draw) if draw.random() < 0.5 else drawn_pipeline(draw)


OF_MODELS: tuple[dict[str, Any], ...] = (
    *({}, {"mlp": "geglu"}, {"mlp": "gelu"}, {"norms": "around"}, {"parallel_residual": True}, {"biases": ("qkv",)}),
    *({"tied_embeddings": True}, {"qk_norm": "head"}, {"lora_rank": 2, "lora_alpha": 1.0}),
    *({"lora_rank": 2, "lora_targets": targets} for targets in (("q", "v", "o"), ("o", "down"), ("k", "v"))),
)
"""What tensor-parallel models may have beside Llama's."""
OF_STEPS: dict[str, tuple[Any, ...]] = {
    "zero_stage": (0, 1, 2, 3),
    "sync": ("every", "last"),
    "loss": ("whole", "chunked", "unfused", "subtracted", "torch"),
    "checkpoint": ("full", "whole", "none", "attention"),
    "shards": ("all", "replica"),
    "accumulate": ("copies", "copies", "in-place", "in-products"),
    "reduce_to": ("owner", "owner", "all"),
    "gather": ("units", "units", "all"),
    "optimiser": ("gpu", "gpu", "host"),
}
"""What their steps are drawn of."""


def drawn_tensor(draw: Random) -> tuple[str, Checked]:
    """Return tensor-parallel layers, or a training step of them; what does not go together is drawn again."""
    while True:
        name, mesh = draw.choice(TENSOR)
        fields, micro, each = draw.choice(OF_MODELS), draw.choice((1, 1, 2)), draw.choice((1, 1, 2))
        model = make_model(8, draw.choice((4, 4, 2, 1)), head_dim=4)
        model = msgspec.structs.replace(model, ffn_dim=12, vocab_size=40, **fields)
        chosen = _beside(draw) | {"modules": draw.choice(("fused", "fused", "eager-mlp", "eager"))}
        chosen |= {"products": draw.choice(("apart", "joined"))}
        scope: Scope = draw.choice(("layer", "step", "step"))
        if scope == "step":
            chosen |= {option: draw.choice(values) for option, values in OF_STEPS.items()} | {"micro_batches": micro}
        workload = Workload(model=model, seq=24, batch=micro * each, dtype="fp64", scope=scope, layers=2)
        try:
            options = dataclasses.replace(SCHEDULES[name].options, **chosen)
            checked = check(SCHEDULES[name].schedule(workload, mesh, options))
        except ScheduleError:
            raise
        except InputError:
            continue
        said = f"{name}, {mesh.named()}, {model.num_kv_heads} key/value heads, {fields}, B {workload.batch}, {chosen}"
        return said, checked


def _beside(draw: Random) -> dict[str, Any]:
    """Return how ranks that have shares of weights send."""
    return {
        "tp_overlap": draw.choice(("none", "gradients", "shards", "chunks")),
        "tp_sequence": draw.random() < 0.6,
        "memory_order": draw.choice(("bsh", "sbh")),
    }


def drawn_pipeline(draw: Random) -> tuple[str, Checked]:
    """Return a training step of a pipeline, whose stages may be rings that share weights."""
    pipeline, stages, layers = draw.choice(DRAWN)
    split = layers.split(",")
    chosen: dict[str, Any] = {
        "zero_stage": draw.choice((0, 1, 2, 3)),
        "sync": draw.choice(("every", "last")),
        "loss": draw.choice(("whole", "chunked", "torch")),
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
    if draw.random() < 0.4:
        workload = unlike(draw, workload)
    entry = NAMED["ring" if mesh.ring > 1 else "single"]
    options = dataclasses.replace(entry.options, checkpoint="none", **chosen)
    of_sequences = [one.documents for one in workload.sequences or ()]
    return f"{mesh.named()}, tied {tied}, {chosen}, {of_sequences}", check(entry.schedule(workload, mesh, options))
