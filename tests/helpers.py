"""Small models, workloads and toy machines that tests share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from sim.accounts.trace import Ops, Player, Recorded, Row, Trace
from sim.base.errors import InputError, ScheduleError
from sim.schedule.ir.program import Schedule
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.methods.hints import Hints
from sim.schedule.proof.check import Checked
from sim.schedule.proof.remembered import check_once
from sim.words.mesh import AXES, Axis, Mesh
from sim.words.workload import ModelSpec, Workload
from topology.specs import ClusterSpec, GpuSpec, HbmSpec, LinkSpec


def slow_but(kept: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Return the values of one parameter, of which ``make test`` plays those that are kept, ``make test-all`` all."""
    return _marked_but(kept, values, pytest.mark.slow)


def sweep_but(kept: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Return the values of one parameter, of which ``make quick`` plays those that are kept, ``make test`` all."""
    return _marked_but(kept, values, pytest.mark.sweep)


def by_tier(quick: Collection[Any], tested: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Return the values of one parameter: ``make quick`` plays some, ``make test`` more, ``make test-all`` all."""
    found, marks = list(values), dict.fromkeys(tested, pytest.mark.sweep) | dict.fromkeys(quick)
    assert marks.keys() <= set(found)
    of_all = [(value, marks.get(value, pytest.mark.slow)) for value in found]
    return [value if mark is None else pytest.param(value, marks=mark) for value, mark in of_all]


def _marked_but(kept: Collection[Any], values: Iterable[Any], mark: pytest.MarkDecorator) -> list[Any]:
    found = list(values)
    assert set(kept) <= set(found)
    return [value if value in kept else pytest.param(value, marks=mark) for value in found]


def make_model(heads: int = 8, kv_heads: int = 4, head_dim: int = 16, dtype: str = "fp32") -> ModelSpec:
    fields: dict[str, Any] = {
        "name": f"test{heads}:{kv_heads}",
        "embed_dim": heads * head_dim,
        "num_layers": 2,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn_dim": 64,
        "vocab_size": 128,
        "dtype": dtype,
    }
    return ModelSpec(**fields)


RING_INNER: tuple[Axis, ...] = ("pp", "dp", "ulysses", "ring", "tp")


class Variant(NamedTuple):
    """A schedule of the catalog with options of its own, and how many of its ranks split heads."""

    schedule: str
    options: dict[str, Any] = {}  # noqa: RUF012 - never written to
    ulysses: int | None = None
    order: tuple[Axis, ...] = AXES
    per_node: int = 8
    """How many of its ranks share a node, of which builders are told."""

    def mesh(self, ranks: int, model: ModelSpec) -> Mesh:
        """Return the degrees of so many ranks; Ulysses gets its share where that divides them."""
        mesh = SCHEDULES[self.schedule].mesh(ranks, model)
        if self.ulysses is not None:
            heads = math.gcd(ranks, self.ulysses)
            mesh = msgspec.structs.replace(mesh, ulysses=heads, ring=ranks // heads)
        return msgspec.structs.replace(mesh, order=self.order)

    def build(self, workload: Workload, mesh: Mesh) -> Schedule:
        """Return its schedule."""
        return SCHEDULES[self.schedule].schedule(workload, mesh, self.chosen, Hints(gpus_per_node=self.per_node))

    @property
    def chosen(self) -> Any:
        """All of its options."""
        return dataclasses.replace(SCHEDULES[self.schedule].options, **self.options)


VARIANTS: dict[str, Variant] = {name: Variant(name) for name in SCHEDULES} | {
    "double-ring": Variant("double-ring", per_node=2),
    "zigzag of each document": Variant("zigzag", {"sharding": "document", "halves": "host-mask"}),
    "double-ring of each document": Variant("double-ring", {"sharding": "document", "halves": "host-mask"}, per_node=2),
    "usp of each document": Variant("usp", {"sharding": "document", "ring_backward": "kv-at-hand"}, ulysses=2),
    "ring from the KV at hand": Variant("ring", {"ring_backward": "kv-at-hand"}),
    "ring, queries travel": Variant("ring", {"ring_backward": "queries", "gradients": "model"}),
    "ring, no overlap": Variant("ring", {"overlap": False, "communicators": "two"}),
    "zigzag from the KV at hand": Variant("zigzag", {"ring_backward": "kv-at-hand", "gradients": "model"}),
    "striped from the KV at hand": Variant("striped", {"ring_backward": "kv-at-hand", "communicators": "two"}),
    "striped, queries travel": Variant("striped", {"ring_backward": "queries", "communicators": "two"}),
    "double ring of stripes": Variant("double-ring", {"layout": "striped", "communicators": "one"}, per_node=2),
    "ring, packed": Variant("ring", {"messages": "packed", "communicators": "two"}),
    "ring, messages apart": Variant("ring", {"messages": "separate"}),
    "zigzag as TransformerEngine": Variant(
        "zigzag", {"messages": "packed-separate", "ring_backward": "kv-at-hand", "gradients": "model"}
    ),
    "zigzag as torch": Variant("zigzag", {"rotation": "torch"}),
    "burst, packed and apart": Variant(
        "burst", {"messages": "packed-separate", "overlap": False, "communicators": "two"}
    ),
    "double ring, packed and apart": Variant(
        "double-ring", {"messages": "packed-separate", "communicators": "two"}, per_node=2
    ),
    "usp, messages apart": Variant("usp", {"messages": "separate"}, ulysses=2),
    "double ring of single ranks": Variant("double-ring", {"layout": "contiguous", "inner_ring_degree": 1}),
    "double ring, no overlap": Variant("double-ring", {"overlap": False, "gradients": "model"}),
    "balanced ring, no overlap": Variant("balanced-ring", {"overlap": False, "gradients": "model"}),
    "allgather of slices": Variant("allgather", {"layout": "contiguous", "gradients": "fp32"}),
    "ulysses, packed": Variant("ulysses", {"packed": True}),
    "ulysses, async": Variant("ulysses", {"all_to_alls": "async"}),
    "ulysses, the host waits": Variant("ulysses", {"all_to_alls": "host-sync", "layout_copies": "always"}),
    "usp of 2": Variant("usp", ulysses=2),
    "usp of 4": Variant("usp", {"layout": "striped", "ring_backward": "kv-at-hand"}, ulysses=4),
    "usp of 1": Variant("usp", ulysses=1),
    "usp, sums as published": Variant("usp", {"sums": "published"}, ulysses=2),
    "usp, rings inside": Variant("usp", {"packed": True, "layout": "contiguous"}, ulysses=2, order=RING_INNER),
    "usp, queries travel": Variant("usp", {"ring_backward": "queries", "overlap": False}, ulysses=2),
    "upipe over rings": Variant("upipe", {"layout": "zigzag"}, ulysses=2),
    "upipe, kept": Variant("upipe", {"recompute": False, "packed": True}, ulysses=4),
    "upipe of 1": Variant("upipe", {"layout": "striped"}, ulysses=1, order=RING_INNER),
    "fpdt in chunks": Variant("fpdt", {"chunk": 8}),
    "fpdt on the GPU": Variant("fpdt", {"chunk": 8, "offload": False, "gradients": "model"}),
    "fpdt as published": Variant("fpdt", {"chunk": 16, "pipeline": "published"}),
    "standard attention": Variant("single", {"kernel": "standard"}),
    "memory-efficient attention": Variant("single", {"kernel": "memory-efficient"}),
}
"""All that is tested: every schedule of the catalog, and what its options make of it."""

OFFLOADED: dict[str, Variant] = {f"{name}, offloaded": Variant(name, {"activations": "host"}) for name in SCHEDULES} | {
    "ring from the KV at hand, offloaded": Variant("ring", {"ring_backward": "kv-at-hand", "activations": "host"}),
    "upipe, kept and offloaded": Variant("upipe", {"recompute": False, "activations": "host"}, ulysses=4),
    "standard attention, offloaded": Variant("single", {"kernel": "standard", "activations": "host"}),
    "zigzag, offloaded to pageable memory": Variant("zigzag", {"activations": "pageable"}),
    "ring, saved on the CPU": Variant("ring", {"activations": "save-on-cpu"}),
}
"""What only layers have: activations in the host's memory."""

DRAWN = [name for name, variant in (VARIANTS | OFFLOADED).items() if "chunk" not in variant.options]
"""What random cells are made of; chunks of a few tokens are too many where sequences are long."""


def uses_host_memory(name: str) -> bool:
    """Return whether a schedule keeps anything in the host's memory."""
    return name in OFFLOADED or getattr(VARIANTS[name].chosen, "offload", False)


REFUSED = ("allowed are", "the nearest are", "set `passes` both")
"""What a refusal says: the values that are allowed."""


def is_refused(name: str, workload: Workload, ranks: int) -> bool:
    """Return whether a schedule cannot do a cell: all that any of them refuses but lengths, by rule."""
    variant = (VARIANTS | OFFLOADED)[name]
    if variant.schedule == "single" and ranks > 1:
        return True
    if variant.schedule == "balanced-ring" and (workload.mask == "full" or workload.window):
        return True
    if variant.schedule in {"ulysses", "fpdt"} and workload.model.num_heads % ranks:
        return True
    chunk = variant.options.get("chunk", workload.seq)
    if chunk < workload.seq and (chunk % ranks or workload.seq % chunk):
        return True
    chosen = variant.options.values()
    keeps_more = variant.schedule in {"upipe", "fpdt"} or {"kv-at-hand", "standard", "torch"} & {*chosen}
    return bool(keeps_more) and not workload.forward


def make_checked(name: str, workload: Workload, ranks: int) -> Checked:
    """Return a proved schedule of the catalog, or a variant."""
    variant = (VARIANTS | OFFLOADED)[name]
    return check_once(variant.build(workload, variant.mesh(ranks, workload.model)))


def checked_or_refused(name: str, workload: Workload, ranks: int) -> Checked | None:
    """Return a proved schedule, or None where it is refused, as it has to be, with the values that are allowed."""
    try:
        checked = make_checked(name, workload, ranks)
    except ScheduleError:
        raise
    except InputError as error:
        assert any(words in str(error) for words in REFUSED), error
        assert is_refused(name, workload, ranks), error
        return None
    assert not is_refused(name, workload, ranks)
    return checked


def make_cluster_spec(gpus: int = 2, **changes: Any) -> ClusterSpec:
    """One node of toy GPUs: 1 TFLOP/s, memory that never limits, links of 1 GB/s, and nothing that delays."""
    fields: dict[str, Any] = {
        "name": "toy",
        "gpus_per_node": gpus,
        "gpu": GpuSpec(
            name="toy GPU",
            sms=100,
            peak_flops_per_s=dict.fromkeys(("fp64", "fp32", "bf16", "fp16"), 1e12),
            launch_s=0.0,
        ),
        "hbm": HbmSpec(capacity_bytes=2**40, bytes_per_s=1e25),
        "nvlink": LinkSpec(bytes_per_s=1e9, latency_s=0.0),
    }
    return msgspec.structs.replace(ClusterSpec(**fields), **changes)


def trace_of(rows: Iterable[Row], player: Player = "simulated", schedule_hash: str = "0" * 16, ranks: int = 0) -> Trace:
    """Return the trace that has such rows, as one that comes out of a pickle: it has no schedule beside it."""
    found = sorted(rows)
    counts = [sum(row.rank == rank for row in found) for rank in range(ranks or 1 + max(row.rank for row in found))]
    assert [row.op for row in found] == [op for count in counts for op in range(count)]
    _, _, streams, kinds, parts, labels, *times, ran, sent_bytes = map(list, zip(*found, strict=True))
    ops = Ops(())
    vars(ops).update(
        starts=[0, *accumulate(counts)], streams=streams, kinds=kinds, parts=parts, labels=labels, sent_bytes=sent_bytes
    )
    return Trace(player, Recorded(schedule_hash, ops), *map(np.array, times), ran)


def traces_in(data: bytes) -> list[Trace]:
    """Return the traces that ``to_chrome`` wrote."""
    document = msgspec.json.decode(data)
    heads = {head["player"]: head for head in document["otherData"]["traces"]}
    rows: dict[str, list[Row]] = {player: [] for player in heads}
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            fields = dict(event["args"])
            rows[fields.pop("player")].append(Row(**fields))
    return [
        trace_of(rows[player], head["player"], head["schedule_hash"], head["num_ranks"])
        for player, head in heads.items()
    ]
