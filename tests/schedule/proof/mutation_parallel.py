"""Tensor parallelism and pipelines for ``mutations`` to change."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, pairwise, product
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from sim.base.errors import InputError, ScheduleError
from sim.schedule.ir.ops import Accumulate, AllReduce
from sim.schedule.ir.program import Program
from sim.schedule.methods.catalog import NAMED, SCHEDULES
from sim.schedule.model.pipeline.files import pipeline_in, to_csv
from sim.schedule.model.pipeline.timetables import PIPELINES, Pipeline
from sim.schedule.model.step import Item
from sim.schedule.proof.check import Checked, check
from sim.words.mesh import Mesh
from sim.words.workload import Scope, Workload
from tests.helpers import make_model
from tests.schedule.proof.mutation_operators import PORTS, Items, Operator, Scene, among, any_of, narrowed, on_ranks
from tests.schedule.proof.mutation_steps import STEP_OPERATORS, of, unlike

OWN = "own.csv"
"""A pipeline from a file, in an order that is drawn, too."""
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
    ("dualpipe", 2, "1,1"),
    ("dualpipe", 2, "2,1"),
    (OWN, 2, "1,1"),
    (OWN, 3, "1,1,1"),
    (OWN, 2, "1,1,1,1"),
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


def pass_dropped(passes: list[Items], at: int, _: int) -> None:
    del passes[at]


def pass_moved(passes: list[Items], at: int, to: int) -> None:
    passes.insert(to, passes.pop(at))


def passes_swapped(passes: list[Items], at: int, other: int) -> None:
    passes[at], passes[other] = passes[other], passes[at]


def pass_of_another(passes: list[Items], at: int, other: int) -> None:
    """What is done with another micro-batch, or in another chunk, in the place of this one."""
    passes[at] = passes[other]


def of_passes(change: Callable[[list[Items], int, int], None]) -> Operator:
    """Return the operator that changes in which order a stage has its passes, or which ones: it is given the ops of
    each, and two places among them.
    """

    def of_program(scene: Scene) -> Program | None:
        ops, begins = scene.program.ops, scene.program.begins
        passes = [ops[start:stop] for start, stop in pairwise(begins)]
        if len(passes) < 2:
            return None
        change(passes, *scene.draw.sample(range(len(passes)), 2))
        new = (*ops[: begins[0]], *chain.from_iterable(passes), *ops[begins[-1] :])
        return None if new == ops else scene.program.replace(ops=new)

    return on_ranks(of_program)


PARALLEL_OPERATORS = {
    **{name: change for name, change in STEP_OPERATORS.items() if not name.startswith("mlp in tiles")},
    "views: half of an op's columns or rows": among(narrowed("eio")),
    "sum: the largest, or of these": of((Accumulate, AllReduce), largest_or_sum),
    "port: of another member": among(of_another_member, *PORTS),
    "pass: dropped": of_passes(pass_dropped),
    "pass: before others or behind them": of_passes(pass_moved),
    "passes: two swapped": of_passes(passes_swapped),
    "pass: of another micro-batch or chunk": of_passes(pass_of_another),
}
"""What changes weights, states and ends, of which none has tiles; shares of weights; and passes of stages."""


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
    "accumulate_in": ("fp32", "model"),
    "reduce": ("fp32", "fp32", "model"),
    "reduce_to": ("owner", "owner", "all"),
    "reduce_by": ("reduce-scatter", "all-reduce"),
    "sum_waits": ("never", "below-3", "always"),
    "backward_prefetch": ("ahead", "never"),
    "gather": ("units", "units", "all"),
    "optimiser": ("gpu", "gpu", "host"),
    "divides": ("in-sums", "before"),
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
        chosen |= {"products": draw.choice(("apart", "joined", "joined-views"))}
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
    sequence = draw.random() < 0.6
    return {
        "tp_overlap": draw.choice(("none", "gradients", "shards", "chunks")),
        "tp_sequence": sequence,
        "tp_hands": "all" if sequence else draw.choice(("all", "parts")),
        "memory_order": draw.choice(("bsh", "sbh")),
        "tp_buffers": draw.choice(("new", "inputs", "all")),
    }


def drawn_pipeline(draw: Random) -> tuple[str, Checked]:
    """Return a training step of a pipeline, whose stages may be rings that share weights."""
    pipeline, stages, layers = draw.choice(DRAWN)
    split = layers.split(",")
    chosen: dict[str, Any] = {
        "zero_stage": draw.choice((0, 1, 2, 3)),
        "sync": draw.choice(("every", "last")),
        "loss": draw.choice(("whole", "chunked", "torch")),
        "host_waits": draw.choice(("never", "micro-batch", "messages")),
        "activations": draw.choice(("hbm", "hbm", "save-on-cpu")),
        "products": draw.choice(("apart", "joined")),
        **_beside(draw),
        "pipeline_schedule": pipeline,
        "pipeline_layers": layers,
        "micro_batches": 4 if len(split) > stages or pipeline == "dualpipe" else 3,
    }
    mesh = Mesh(pp=stages, ring=draw.choice((1, 1, 2)), tp=draw.choice((1, 1, 2)))
    shape = stages, chosen["micro_batches"], len(split) // stages
    table = drawn_timetable(draw, *shape) if pipeline == OWN else PIPELINES[pipeline]
    chosen["pipeline_chunks"] = 1 if table.chunks else shape[2]
    tied = draw.random() < 0.3 and table.last_stage(stages) > 0 and table.copies == 1
    model = msgspec.structs.replace(make_model(4, 2, head_dim=4), ffn_dim=12, vocab_size=40, tied_embeddings=tied)
    workload = Workload(
        model=model, seq=16, batch=chosen["micro_batches"], dtype="fp64", scope="step", layers=sum(map(int, split))
    )
    if draw.random() < 0.4:
        workload = unlike(draw, workload)
    entry = NAMED["ring" if mesh.ring > 1 else "single"]
    options = dataclasses.replace(entry.options, checkpoint="none", **chosen)
    with tempfile.TemporaryDirectory() as folder:
        if pipeline == OWN:
            file = Path(folder) / OWN
            file.write_bytes(to_csv(table, *shape))
            options = dataclasses.replace(options, pipeline_schedule=str(file))
        checked = check(entry.schedule(workload, mesh, options))
    of_sequences = [one.documents for one in workload.sequences or ()]
    return f"{mesh.named()}, tied {tied}, {chosen}, {of_sequences}", checked


def drawn_timetable(draw: Random, stages: int, micros: int, chunks: int) -> Pipeline:
    """Return a pipeline whose stages do in any order what they can, each kind of pass by micro-batches in turn; what a
    stage does not need in the order in which another one hands it on is drawn again.
    """
    while True:
        rows = _rows(draw, stages, micros, chunks)
        with suppress(InputError):
            return pipeline_in(to_csv(Pipeline(lambda stage, *_: rows[stage], OWN), stages, micros, chunks), OWN)  # noqa: B023


def _rows(draw: Random, stages: int, micros: int, chunks: int) -> list[list[Item]]:
    """Return what each stage does."""
    rows: list[list[Item]] = [[] for _ in range(stages)]
    last, done, turns = stages * chunks - 1, set[Item](), dict.fromkeys(product("FBW", range(stages * chunks)), 0)

    def can(kind: str, micro: int, chunk: int) -> bool:
        own = Item("B" if kind == "W" else "F", micro, chunk)
        if kind == "F":
            return chunk == 0 or own._replace(chunk=chunk - 1) in done
        return own in done and (kind == "W" or chunk == last or Item("B", micro, chunk + 1) in done)

    while turns:
        kind, chunk = draw.choice([key for key, micro in turns.items() if can(key[0], micro, key[1])])
        item = Item(kind, turns[kind, chunk], chunk)  # type: ignore[arg-type]
        rows[chunk % stages].append(item)
        done.add(item)
        turns[kind, chunk] += 1
        if turns[kind, chunk] == micros:
            del turns[kind, chunk]
    return rows
