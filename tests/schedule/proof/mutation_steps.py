"""Training steps for ``mutations`` to change, and ways to change what only they have.

Operators of ``mutation_operators`` draw any op; of a step most are those of layers. Those here draw what handles
weights, gradients and moments, what stands at both ends of the layers, and what goes to the host and back.
"""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import msgspec

from sim.base.errors import InputError, ScheduleError
from sim.schedule.ir.fragments import Port
from sim.schedule.ir.masks import Span
from sim.schedule.ir.ops import (
    AdamW,
    AllGather,
    AllReduce,
    Copy,
    CrossEntropy,
    Embed,
    EmbedBackward,
    HostAdamW,
    HostCopy,
    Op,
    Pack,
    ReduceScatter,
    SquareSum,
    TiledMlp,
    TiledMlpBackward,
    Unpack,
    Zero,
)
from sim.schedule.ir.views import View
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.proof.check import Checked, check
from sim.words.workload import PackedSequence, Workload
from tests.helpers import make_model
from tests.schedule.proof.mutation_headers import featured
from tests.schedule.proof.mutation_operators import (
    Item,
    Items,
    OfItems,
    OfValue,
    Operator,
    Scene,
    among,
    another_of_its_kind,
    any_of,
    before_its_sum,
    detour,
    doubled,
    dropped,
    found_in,
    halved,
    inside,
    is_list,
    list_changed,
    made,
    moved,
    moved_view,
    named,
    of_another_layer,
    on_ranks,
    put,
    repeated_later,
    stale_view,
    swapped_views,
    view_of_its_shape,
    whole,
)

OPTIONS: dict[str, tuple[Any, ...]] = {
    "zero_stage": (0, 1, 2, 3, 3),
    "shards": ("all", "replica"),
    "prefetch": (0, 1, 2, 3),
    "reduce": ("fp32", "model"),
    "micro_batches": (1, 1, 2),
    "sync": ("every", "last"),
    "optimiser": ("gpu", "gpu", "host"),
    "optimiser_states": ("fp32", "model"),
    "weights": ("gpu", "gpu", "host", "host-states"),
    "loss": ("whole", "chunked"),
    "mlp": ("whole", "whole", "tiled", "mini"),
    "checkpoint": ("full", "whole", "none", "attention", "x+out+h2", "x+q+k+v"),
    "activations": ("hbm", "hbm", "host", "save-on-cpu", "pageable"),
}
"""What a step is drawn of; what does not go together is refused, and others are drawn."""


def drawn_step(draw: Random) -> tuple[str, Checked]:
    """Return a proved training step of a tiny model, with what people call it."""
    while True:
        schedule, ranks, dp = draw.choice(list(SCHEDULES)), draw.choice((1, 2, 2, 4)), draw.choice((1, 1, 2))
        ranks = 1 if schedule == "single" else ranks
        chosen: dict[str, Any] = {name: draw.choice(values) for name, values in OPTIONS.items()}
        heads, kv_heads = draw.choice([(4, 4), (4, 2), (8, 2)])
        tied = draw.choice((msgspec.UNSET, msgspec.UNSET, True))
        feature, model = featured(draw, make_model(heads, kv_heads, head_dim=4))
        model = msgspec.structs.replace(model, ffn_dim=12, vocab_size=40, tied_embeddings=model.tied_embeddings or tied)
        batch = chosen["micro_batches"] * draw.choice((1, 1, 2))
        padding = draw.choice((0, 0, 3))
        documents = draw.choice([(5, 11), (1, 8, 7), (2, 2, 9, 3)])
        documents = (*documents[:-1], documents[-1] - padding) if documents[-1] > padding else (16 - padding,)
        workload = Workload(
            model=model, seq=16, batch=batch, scope="step", layers=draw.choice((1, 2)), dtype="fp64",
            padding=padding, documents=documents if draw.random() < 0.3 else msgspec.UNSET,
        )  # fmt: skip
        if draw.random() < 0.2:
            workload = unlike(draw, workload)
            chosen["micro_batches"] = batch
        entry = SCHEDULES[schedule]
        try:
            mesh = msgspec.structs.replace(entry.mesh(ranks, model), dp=dp)
            checked = check(entry.schedule(workload, mesh, dataclasses.replace(entry.options, **chosen)))
        except ScheduleError:
            raise
        except InputError:
            continue
        told: dict[str, Any] = {"documents": workload.documents} if workload.documents else {}
        told |= {"sequences": [one.documents for one in workload.sequences]} if workload.sequences else {}
        told |= {name: value for name, value in chosen.items() if value != getattr(entry.options, name)}
        of = f"{heads}:{kv_heads}, {feature}, batch {batch}, tied {tied}"
        return f"step of {schedule}, P = {ranks}, dp = {dp}, {of}, {told}", checked


def unlike(draw: Random, workload: Workload) -> Workload:
    """Return a workload whose sequences have documents of their own."""
    some = [draw.choice([(5, 11), (16,), (2, 2, 9, 3), (8,), (3, 5), (9, 3)]) for _ in range(workload.batch)]
    sequences = [PackedSequence(documents=one, padding=-sum(one) % 8) for one in some]
    return msgspec.structs.replace(
        workload, sequences=tuple(sequences), seq=max(one.seq for one in sequences), padding=0, documents=msgspec.UNSET
    )


STATES = (Unpack, Pack, SquareSum, AdamW, HostAdamW)
ENDS = (Embed, EmbedBackward, CrossEntropy)
SUMS = (AllGather, ReduceScatter, AllReduce)
MOVED = (HostCopy, Copy, Zero)
TILED = (TiledMlp, TiledMlpBackward)
OF_STEPS = (*STATES, *ENDS, *SUMS, *MOVED, *TILED)


def of(kinds: tuple[type[Op], ...], change: OfItems) -> Operator:
    """Return the operator that changes an op of some kinds."""
    return among(lambda scene, items, at: change(scene, items, at) if type(items[at]) in kinds else None)


def value_of(kinds: tuple[type[Op], ...], other: OfValue, wanted: Any = View) -> Operator:
    """Return the operator that changes a value inside an op of some kinds."""

    def change(scene: Scene, items: Items, at: int) -> Items | None:
        found = found_in(items[at], wanted)
        if not found:
            return None
        path, value = scene.draw.choice(found)
        new = other(scene, items[at], value)
        return None if new is None else (*items[:at], put(items[at], path, new), *items[at + 1 :])

    return of(kinds, change)


def traded(_: Scene, items: Items, at: int) -> Items | None:
    """Return the ops with one that trades its place with the next one of its kind: two updates, sums, gathers."""
    later = next((other for other in range(at + 1, len(items)) if type(items[other]) is type(items[at])), None)
    if later is None:
        return None
    new = list(items)
    new[at], new[later] = new[later], new[at]
    return tuple(new)


def own_part_only(scene: Scene, items: Items, at: int) -> Items | None:
    """Return the ops with a collective that takes what this rank has for what all have."""
    op = items[at]
    if isinstance(op, AllReduce):
        return (*items[:at], *items[at + 1 :])
    if isinstance(op, ReduceScatter):
        source, target = op.sends.part(scene.draw.randrange(op.sends.parts)), op.recv
    else:
        source, target = op.send, op.recvs.part(scene.draw.randrange(op.recvs.parts))
    return (*items[:at], made(Copy, op, source=whole(source), target=whole(target)), *items[at + 1 :])


def other_collective(scene: Scene, items: Items, at: int) -> Items | None:
    """Return the ops with a collective of a training step that another communicator carries out, or that is done on one
    of the two levels of HSDP twice.
    """
    op = items[at]
    names = [other.communicator for other in items if type(other) in SUMS]
    name = any_of(scene.draw, dict.fromkeys(names), op.communicator)
    return None if name is None else (*items[:at], put(op, ("communicator",), name), *items[at + 1 :])


def of_another_unit(scene: Scene, item: Item, view: View) -> View | None:
    """Return the buffer of the same kind and size that holds the same of another layer, or of another micro-batch."""
    buffers = scene.program.buffers
    of_item = buffers[view.buffer]
    alike = [
        View(number, view.slices)
        for number, buffer in enumerate(buffers)
        if (buffer.shape, buffer.category, buffer.dtype) == (of_item.shape, of_item.category, of_item.dtype)
    ]
    return any_of(scene.draw, alike, view)


def another_sequence(scene: Scene, port: Port, _: Any) -> Span:
    """Return the sequences of another micro-batch or replica."""
    return port.batch.moved(scene.draw.choice((-1, 1)) * port.batch.size)


STEP_OPERATORS: dict[str, Operator] = {
    "state op: dropped": of(STATES, dropped),
    "state op: doubled": of(STATES, doubled),
    "state op: moved": of(STATES, moved),
    "state op: trades places with the next of its kind": of(STATES, traded),
    "state op: operands swapped": of(STATES, swapped_views),
    "state op: operand of another unit": value_of(STATES, of_another_unit),
    "state op: operand of its shape": value_of(STATES, view_of_its_shape),
    "state op: part beside its own": value_of(STATES, moved_view),
    "weights packed or unpacked in another order": value_of((Pack, Unpack), list_changed("swapped"), is_list),
    "weights packed or unpacked but for one": value_of((Pack, Unpack), list_changed("dropped"), is_list),
    "state op: before the sum that it reads": of(STATES, before_its_sum),
    "state op: an addend twice": on_ranks(detour(halved, *STATES)),
    "square of another gradient": of((SquareSum,), another_of_its_kind),
    "end: dropped": of(ENDS, dropped),
    "end: operand stale": of(ENDS, stale_view),
    "end: operand of its shape": value_of(ENDS, view_of_its_shape),
    "end: operand of another unit": value_of(ENDS, of_another_unit),
    "end: mean over other tokens": value_of(
        (CrossEntropy,), lambda scene, _item, count: count + scene.draw.choice((-1, 1)), int
    ),
    "end: operand of another micro-batch": of(ENDS, of_another_layer),
    "end: port of another micro-batch": inside(named("batch"), another_sequence, "inputs", "outputs"),
    "end: repeated later": of(ENDS, repeated_later),
    "sum: dropped": of(SUMS, dropped),
    "sum: repeated later": of(SUMS, repeated_later),
    "sum: trades places with the next of its kind": of(SUMS, traded),
    "sum: before the sum that it reads": of(SUMS, before_its_sum),
    "sum: of its own part only": of(SUMS, own_part_only),
    "sum: over another communicator": of(SUMS, other_collective),
    "sum: of another unit": value_of(SUMS, of_another_unit),
    "copy: dropped": of(MOVED, dropped),
    "copy: moved": of(MOVED, moved),
    "copy: of another unit": value_of(MOVED, of_another_unit),
    "copy: stale": of(MOVED, stale_view),
    "mlp in tiles: operand of its shape": value_of(TILED, view_of_its_shape),
    "mlp in tiles: operands swapped": of(TILED, swapped_views),
}
