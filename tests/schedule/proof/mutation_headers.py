"""Ways in which ``mutations`` changes what stands above the programs of all ranks: workload, mesh, groups."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from random import Random
from typing import Any

import msgspec

from sim.base.errors import InputError
from sim.schedule.ir.program import Schedule
from sim.words.mesh import AXES
from sim.words.workload import ModelSpec, Workload
from tests.schedule.model.test_blocks import FEATURES
from tests.schedule.proof.mutation_operators import Operator, any_of, put

FEATURED = 0.4
"""How many models of those that are drawn have more than Llama's."""
Groups = tuple[tuple[int, ...], ...]


def above(schedule: Schedule, header: Any) -> Schedule:
    """Return the programs of a schedule under another header."""
    return Schedule(header, schedule.program, replicated=schedule.replicated)


def workload_changed(draw: Random, schedule: Schedule) -> Schedule | None:
    """Return the schedule under the header of another workload: what it computes is not what is asked then."""
    old = schedule.header.workload
    changes = list(_other_workloads(draw, old))
    draw.shuffle(changes)
    for change in changes:
        try:
            new = msgspec.structs.replace(old, **change)
        except InputError:
            continue
        if new != old:
            return above(schedule, put(schedule.header, ("workload",), new))
    return None


def _other_workloads(draw: Random, old: Workload) -> Iterator[dict[str, Any]]:
    for name in ("seq", "batch", "layers", "padding", "seed"):
        number = getattr(old, name)
        yield from ({name: new} for new in (number - 1, number + 1, 2 * number, number // 2))
    yield from ({"mask": mask, "window": window} for mask in ("causal", "full") for window in (None, 1, 8, old.seq))
    yield from ({"dtype": dtype} for dtype in ("fp64", "fp32", "bf16"))
    yield from ({"passes": passes} for passes in ("both", "forward", "backward"))
    yield from ({"scope": scope} for scope in ("attention", "layer", "step"))
    yield {"documents": msgspec.UNSET, "pattern": msgspec.UNSET, "block_mask": msgspec.UNSET}
    documents = list(old.documents or (old.real_seq,))
    yield {"documents": tuple(draw.sample(documents, len(documents)))}
    first, *rest = documents
    yield {"documents": (1, first - 1, *rest)}
    if old.sequences:
        yield {"sequences": tuple(draw.sample(old.sequences, len(old.sequences)))}
        yield {"sequences": (*old.sequences[:-1], old.sequences[0])}
        yield {"sequences": msgspec.UNSET}
    model = old.model
    others: list[tuple[str, Any]] = [("tied_embeddings", True), ("tied_embeddings", msgspec.UNSET)]
    others += [(name, by * getattr(model, name)) for name in ("rope_theta", "norm_epsilon") for by in (0.5, 2.0)]
    others += [(name, value) for fields in FEATURES.values() for name, value in fields.items()]
    others += [(name, msgspec.UNSET) for name in sorted({name for fields in FEATURES.values() for name in fields})]
    for name in ("num_heads", "num_kv_heads", "head_dim", "embed_dim", "ffn_dim", "vocab_size"):
        others += [(name, 2 * getattr(model, name)), (name, max(1, getattr(model, name) // 2))]
    yield from ({"model": changed} for name, value in others if (changed := _other_model(model, name, value)))


def featured(draw: Random, model: ModelSpec) -> tuple[str, ModelSpec]:
    """Return a model that may have what Llama has not, and what people call it."""
    feature = draw.choice(sorted(FEATURES)) if draw.random() < FEATURED else ""
    fields = FEATURES.get(feature, {})
    if "rotary_dims" in fields:
        fields = fields | {"rotary_dims": model.head_dim // 2}
    return feature, msgspec.structs.replace(model, **fields)


def _other_model(model: ModelSpec, name: str, value: Any) -> ModelSpec | None:
    """Return a model with another value, None where there is no such model."""
    try:
        return msgspec.structs.replace(model, **{name: value})
    except InputError:
        return None


def mesh_changed(draw: Random, schedule: Schedule) -> Schedule | None:
    """Return the schedule under another mesh: with other degrees of as many ranks, or of more or fewer, or another
    order.
    """
    old = schedule.header.mesh
    degrees = {axis: getattr(old, axis) for axis in AXES}
    found = [dict(zip(AXES, values, strict=True)) for values in set(permutations(degrees.values()))]
    found += [degrees | {axis: new} for axis in AXES for new in (1, degrees[axis] * 2, degrees[axis] + 1)]
    meshes = [msgspec.structs.replace(old, **one) for one in sorted(found, key=str)]
    meshes += [msgspec.structs.replace(old, order=tuple(draw.sample(AXES, len(AXES))))]
    new = any_of(draw, meshes, old)
    return None if new is None else above(schedule, put(schedule.header, ("mesh",), new))


def groups_of_another(draw: Random, schedule: Schedule) -> Schedule | None:
    """Return the schedule with a communicator of other groups: those of another one, of halves, of all, in another
    order, or moved by a rank.
    """
    header, size = schedule.header, schedule.num_ranks
    if not header.communicators:
        return None
    at = draw.randrange(len(header.communicators))
    old = header.communicators[at]
    found: list[Groups] = [other.groups for other in header.communicators]
    found += [header.mesh.groups(axis) for axis in ("dp", "ring", "ulysses")]
    found += [(tuple(range(size)),), tuple((rank,) for rank in range(size)), old.groups[1:], old.groups[::-1]]
    found += [tuple(group[::-1] for group in old.groups), tuple((*group[1:], group[0]) for group in old.groups)]
    found += [tuple(tuple((rank + 1) % size for rank in group) for group in old.groups)]
    found += [
        tuple(part for group in old.groups for part in (group[: len(group) // 2], group[len(group) // 2 :]) if part)
    ]
    groups = any_of(draw, found, old.groups)
    if groups is None:
        return None
    return above(schedule, put(header, ("communicators", at, "groups"), groups))


HEADER_OPERATORS: dict[str, Operator] = {
    "header: another workload": workload_changed,
    "header: another mesh": mesh_changed,
    "header: groups of another kind": groups_of_another,
}
