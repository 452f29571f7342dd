"""Random setups over all that users combine, on random machines: each axis, and what there is along it.

Sizes are small, so that all ranks can be played, by either engine, in about a second. Most options are as they are by
default, and those that go together are drawn together, so that few setups are refused.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any, NamedTuple

from sim.schedule.methods.catalog import LINEAR
from sim.schedule.model.pipeline.timetables import PIPELINES
from sim.setup.names import PLACEMENTS, text_of
from sim.setup.setup import Setup
from sim.setup.stacks import STACKS
from sim.software.software import software_names
from sim.words.mesh import AXES
from sim.words.workload import ModelSpec
from tests.engine.play.drawn_machines import machine
from tests.helpers import DRAWN, OFFLOADED, VARIANTS, Variant, make_model

SHARED_OUT = ("llama3-8b", "gemma-2-2b", "qwen3-0.6b", "qwen2.5-1.5b")
"""Grouped heads, windows layer by layer, norms of heads, biases."""
WHOLE = ("olmo-2-0425-1b", "granite-3.1-2b")
"""Norms behind and of all heads as one, scaled residuals: no two ranks have parts of one layer."""

Options = dict[str, str]
WEIGHTS: tuple[Options, ...] = (
    {}, {"zero_stage": "0"}, {"zero_stage": "0", "bucket_mb": "1"}, {"zero_stage": "0", "divides": "before"},
    {"zero_stage": "1"}, {"zero_stage": "1", "reduce_to": "all"}, {"zero_stage": "1", "gather": "all"},
    {"zero_stage": "1", "reduce_by": "all-reduce", "sum_waits": "below-3"}, {"zero_stage": "1", "sync": "last"},
    {"zero_stage": "1", "accumulate": "in-place"}, {"zero_stage": "1", "accumulate": "in-products"},
    {"zero_stage": "1", "optimiser": "host"}, {"zero_stage": "2"}, {"zero_stage": "2", "shards": "replica"},
    {"zero_stage": "2", "reduce": "model"}, {"zero_stage": "2", "sync": "last", "accumulate": "in-place"},
    {"zero_stage": "2", "reduce_by": "all-reduce", "accumulate_in": "model", "reduce": "model"},
    {"prefetch": "0"}, {"prefetch": "2", "weight_communicators": "two"}, {"backward_prefetch": "never"},
    {"shards": "replica"}, {"shards": "replica", "sync": "last"}, {"sync": "last"}, {"sum_waits": "always"},
    {"reduce": "model", "accumulate_in": "model"}, {"divides": "before", "optimiser_states": "model"},
    {"optimiser": "host"}, {"optimiser": "host", "weights": "host"}, {"optimiser": "host", "weights": "host-states"},
)  # fmt: skip
"""ZeRO 0 to 3 and FSDP: what is sharded, over whom, how it is summed, and where it is updated."""
KEPT: tuple[Options, ...] = (
    *[{}] * 3, {"checkpoint": "none"}, {"checkpoint": "attention"}, {"checkpoint": "whole"},
    {"checkpoint": "x+q+k+v+out"},
)  # fmt: skip
"""What layers keep on the GPU."""
ON_HOST: tuple[Options, ...] = (
    {"activations": "host"}, {"activations": "host", "checkpoint": "attention", "offloaded": "out"},
    {"activations": "pageable"}, {"activations": "save-on-cpu", "offload_from": "1"},
)  # fmt: skip
"""What they keep in the host's memory, where there are several."""
COMPUTED: tuple[Options, ...] = (
    *[{}] * 5, {"loss": "chunked"}, {"loss": "unfused"}, {"loss": "subtracted"}, {"loss": "torch"}, {"mlp": "tiled"},
    {"mlp": "mini"}, {"modules": "eager", "rotary_table": "true"}, {"modules": "eager-mlp"}, {"products": "joined"},
    {"products": "joined-views"}, {"host_waits": "micro-batch"}, {"host_waits": "messages"},
)  # fmt: skip
"""By which kernels layers and losses are computed, and what the host waits for."""
MEMBERS: tuple[Options, ...] = (
    *[{}] * 3, {"tp_sequence": "false"}, {"tp_sequence": "false", "tp_hands": "parts"}, {"tp_overlap": "gradients"},
    {"tp_overlap": "shards", "memory_order": "sbh"}, {"tp_overlap": "chunks"}, {"tp_buffers": "inputs"},
    {"tp_overlap": "gradients", "tp_buffers": "all", "memory_order": "sbh"},
)  # fmt: skip
"""What members of a tensor-parallel group send each other, and when."""

SCHEDULES = {name: (VARIANTS | OFFLOADED)[name] for name in DRAWN} | {name: Variant(name) for name in LINEAR}
"""All of the catalog, with options of their own."""
MOST_WORK = 1500
"""Passes of layers, hops of rings among them, of all ranks."""


class Degrees(NamedTuple):
    """How many ranks share sequences, weights and layers, and how many replicas of them there are."""

    cp: int
    tp: int
    pp: int
    dp: int


class Passes(NamedTuple):
    """What of a model is played, and how often."""

    scope: str
    layers: int
    micros: int
    options: Options


def setup(draw: Random, most_ranks: int = 64) -> Setup:
    """Return a setup of at most so many ranks; it may be one that is refused."""
    while True:
        variant, degrees, passes = _drawn(draw)
        cp, tp, pp, dp = degrees
        work = math.prod(degrees) * passes.micros * passes.layers // pp * (4 + cp)
        if math.prod(degrees) <= most_ranks and work <= MOST_WORK:
            break
    spec = machine(draw, math.prod(degrees), cp * tp)
    on_host, step = spec.gpu.kind == "cpu", passes.scope == "step"
    software = draw.choice(software_names()) if step and not on_host and draw.random() < 0.3 else None
    stacks = [name for name, one in STACKS.items() if step and not software and one.schedule == variant.schedule]
    own = {name: text_of(value) for name, value in variant.options.items()}
    options = (passes.options if software else _options(draw, degrees, passes)) | own
    if variant.order != AXES:
        options["placement"] = next(name for name, order in PLACEMENTS.items() if order == variant.order)
    adapters = {"model.lora_rank": "8"} if draw.random() < 0.1 else {}
    multiple = 2 * cp * tp
    return Setup(
        variant.schedule,
        model=_model(draw, tp),
        cluster=spec,
        cp=cp,
        ulysses_degree=None if variant.ulysses is None else math.gcd(cp, variant.ulysses),
        tp_degree=tp,
        pp_degree=pp,
        dp_degree=dp,
        scope=passes.scope,
        layers=passes.layers,
        passes="both" if step else draw.choice(["both", "both", "forward"]),
        dtype="fp32" if on_host else "bf16",
        profile=draw.choice([None, None, None, "datasheet"]),
        software=software,
        stack=draw.choice([None, *stacks]),
        set={f"schedule.{name}": value for name, value in options.items()} | adapters,
        **_kept(draw, multiple * draw.choice([16, 64, 512, 4096]), multiple, passes),
        **_noise(draw),
    )


def _options(draw: Random, degrees: Degrees, passes: Passes) -> Options:
    """Return what is set of a schedule where no software has it."""
    options = dict(passes.options)
    if passes.scope == "step":
        options |= draw.choice(WEIGHTS) | draw.choice(COMPUTED) | draw.choice(KEPT)
        if passes.layers > degrees.pp and draw.random() < 0.15:
            options |= draw.choice(ON_HOST)
    return options | draw.choice(MEMBERS) if degrees.tp > 1 else options


def _drawn(draw: Random) -> tuple[Variant, Degrees, Passes]:
    """Return a schedule, on how many ranks, and what is played of it."""
    scope = draw.choice([*["step"] * 6, "layer", "attention"])
    offloaded = scope != "attention" and draw.random() < 0.1
    variant = SCHEDULES[draw.choice([name for name in SCHEDULES if (name in OFFLOADED) == offloaded])]
    cp = 1 if variant.schedule == "single" else draw.choice([1, 2, 2, 3, 4, 4, 8])
    tp = 1 if scope == "attention" else draw.choice([1, 1, 2, 4, 4, 8])
    pp = draw.choice([1, 2, 2, 3, 4]) if scope == "step" else 1
    degrees = Degrees(cp, tp, pp, draw.choice([1, 2, 2, 3, 4, 4, 8]))
    if scope != "step":
        return variant, degrees, Passes(scope, draw.choice([1, 2]) if scope == "layer" else 1, 1, {})
    if pp == 1:
        micros = draw.choice([1, 1, 2, 3])
        return variant, degrees, Passes(scope, draw.choice([1, 2]), micros, _micro_batches(micros))
    name = draw.choice([*PIPELINES])
    pipeline = PIPELINES[name]
    chunks = pipeline.chunks or draw.choice([1, 2])
    micros = pp * draw.choice([1, 2]) if name not in {"dualpipe", "dualpipe-v"} else 2 * pp
    options = {"pipeline_schedule": name, **_micro_batches(micros)}
    if pipeline.chunks is None and chunks > 1:
        options["pipeline_chunks"] = str(chunks)
    return variant, degrees, Passes(scope, pp * chunks, micros, options)


def _micro_batches(micros: int) -> Options:
    """Return what is set of so many."""
    return {"micro_batches": str(micros)} if micros > 1 else {}


def _model(draw: Random, tp: int) -> str | ModelSpec:
    """Return a small model, or one of those that ship, of which so many ranks can have shares."""
    named = draw.choice(SHARED_OUT if tp > 1 else SHARED_OUT + WHOLE)
    return draw.choice([make_model(8, draw.choice([2, 4, 8]), dtype="bf16"), named])


def _kept(draw: Random, seq: int, multiple: int, passes: Passes) -> dict[str, Any]:
    """Return the length of sequences, their documents, and what a mask keeps of each."""
    kind = draw.choice(
        [*["one"] * 6, "documents", "documents", "each", "each", "full", "window", "pattern", "blocks", "pad"]
    )
    if kind == "documents":
        return {"documents": _cut(draw, seq), "batch": passes.micros}
    if kind == "each" and passes.micros > 1:
        return {"documents": tuple([_cut(draw, multiple * draw.randint(4, 16)) for _ in range(passes.micros)])}
    pattern = draw.choice([f"lambda:{seq // 8}:{seq // 4}", f"blockwise:{seq // 8}:2", "shared-question:3:0.2"])
    masks: dict[str, dict[str, Any]] = {
        "full": {"mask": "full"},
        "window": {"window": max(1, seq // 5)},
        "pattern": {"mask": pattern},
        "blocks": {"block_mask": f"topk:{seq // 8}:3"},
        "pad": {"seq": seq - draw.randint(1, multiple - 1), "pad": True},
    }
    return {"seq": seq, "batch": passes.micros * draw.choice([1, 1, 2])} | masks.get(kind, {})


def _cut(draw: Random, seq: int) -> tuple[int, ...]:
    """Return lengths of documents that fill a sequence."""
    cuts = sorted(draw.sample(range(1, seq), draw.randint(1, 5)))
    return tuple([end - begin for begin, end in zip([0, *cuts], [*cuts, seq], strict=True)])


def _noise(draw: Random) -> dict[str, Any]:
    """Return the noise of kernel times: none, that of a profile, or a tenth of each; by role or rank by rank."""
    if draw.random() < 0.5:
        return {"jitter": 0.0}
    share = draw.choice([None, 0.1])
    seeds = {"seed": draw.randrange(100), "seeds": draw.choice([1, 1, 1, 3])}
    return {"jitter": share, **seeds, "jitter_per_rank": draw.random() < 0.15}
