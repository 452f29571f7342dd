"""Planners of documents by name, and the cost of attention that they may ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sim.batches.batch import Batch
from sim.batches.counting import Ints
from sim.batches.planned import Planned
from sim.batches.planners.dcp import DcpOptions, dcp
from sim.batches.planners.fcp import fcp
from sim.batches.planners.groups import groups
from sim.batches.planners.static import all_gather, ring
from sim.batches.planners.wlb import wlb
from sim.batches.seconds import KernelSeconds, PlanCosts
from sim.batches.statistics import TokenBytes, token_bytes
from sim.engine.costs.cost import CostModel
from sim.schedule.derive.kernels import TILE, KernelUse, attention_use
from sim.schedule.ir.masks import FULL
from sim.schedule.ir.program import Schedule
from sim.schedule.methods.gathered import gathered
from sim.schedule.methods.planned import planned
from sim.setup.configuration import Configuration
from sim.setup.setup import Setup
from sim.words.workload import DTYPE_BYTES
from topology.cluster import Cluster

MOST_TASKS = 50_000
"""Of a plan that is simulated."""


class Attention:
    """Predicted seconds of fused attention that takes several blocks in one launch (varlen kernels)."""

    def __init__(self, found: Configuration) -> None:
        self._model, self._dtype = found.workload.model, found.workload.dtype
        self._costs = CostModel(Cluster(found.spec), found.profile)
        self._fills_tiles = self._costs.cuda
        self._of = found.workload.model, found.workload.dtype, found.spec, found.profile

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attention) and self._of == other._of

    def __hash__(self) -> int:
        model, dtype, spec, _ = self._of
        return hash((model.name, dtype, spec.name))

    @property
    def notes(self) -> list[str]:
        """What was extrapolated so far, or taken from the datasheet although there is a profile."""
        return sorted(self._costs.notes)

    def seconds(self, queries: Ints, keys: Ints, pairs: Ints, passes: Sequence[bool] = (False, True)) -> float:
        """Return the solo time of a launch on blocks of so many queries, keys and kept pairs, arrays (n,); by default
        of the forward launch and the backward one, which is True in ``passes``.
        """
        kept = pairs > 0
        if not kept.any():
            return 0.0
        uses = [self._launch(backward, queries[kept], keys[kept], pairs[kept]) for backward in passes]
        return math.fsum(self._seconds(use) for use in uses)

    def _seconds(self, use: KernelUse) -> float:
        seconds, note = self._costs.kernel_seconds(0, use)
        if note:
            self._costs.notes.add(note)
        return seconds

    def _launch(self, backward: bool, queries: Ints, keys: Ints, pairs: Ints) -> KernelUse:
        """Return one kernel with as many tiles, pairs and bytes as all blocks have: a batch of blocks like the largest.

        SMs take tiles from whatever block, and a tile lasts at most as long as the longest block's (``engine/tiles``).
        """
        model = self._model
        rows, columns = (keys, queries) if backward else (queries, keys)
        tiles, longest = -(-rows // TILE), int(columns.max())
        batch = max(1, round(int(tiles.sum()) / int(tiles[pairs.argmax()])))
        of_one = -(-int(tiles.sum()) // batch) * TILE if len(pairs) > 1 else int(rows[0])
        shape = (batch, longest, of_one) if backward else (batch, of_one, longest)
        operands = (1, int(queries.sum()), model.num_heads, model.head_dim)
        whole = attention_use(backward, self._dtype, operands, int(keys.sum()), model.num_kv_heads, FULL)
        variant = "full" if len(pairs) == 1 and pairs[0] == queries[0] * keys[0] else "masked"
        filled = tiles * TILE / rows if self._fills_tiles else np.ones(len(rows))  # a tile of few rows takes as long
        flops = (10 if backward else 4) * model.head_dim * model.num_heads * round(float((pairs * filled).sum()))
        return whole._replace(
            variant=variant,
            shape=(*shape, model.num_heads, model.num_kv_heads, model.head_dim),
            flops=flops,
        )


class Asked(NamedTuple):
    """What a planner may ask."""

    ranks: int
    gpus_per_node: int
    per_token: TokenBytes
    attention: Attention
    within_bytes_per_s: float
    """Between two GPUs of a node, alone; infinite where there are no two."""
    between_bytes_per_s: float
    """Between those of two nodes, likewise."""

    @property
    def seconds(self) -> KernelSeconds:
        """Of one launch of attention on several blocks."""
        return self.attention.seconds

    @property
    def costs(self) -> PlanCosts:
        """What plans of blocks are predicted by."""
        return PlanCosts(_Forward(self.attention), self.within_bytes_per_s, self.between_bytes_per_s)


@dataclass(frozen=True)
class _Forward:
    """A forward launch; equal where it rests on equal costs, so that plans can be found again."""

    attention: Attention

    def __call__(self, queries: Ints, keys: Ints, pairs: Ints) -> float:
        return self.attention.seconds(queries, keys, pairs, passes=(False,))


def asked_of(setup: Setup, packed: Batch) -> Asked:
    """Return what planners may ask about a setup that attends a batch."""
    alone = setup.replace(schedule="ring", stack=None, scope="attention", seq=packed.num_tokens, pad=False)
    found = alone.replace(documents=None).resolved()
    model, element = found.workload.model, DTYPE_BYTES[found.workload.dtype]
    per_token = token_bytes(model.num_heads, model.num_kv_heads, model.head_dim, element)
    ranks, per_node = found.mesh.size, found.spec.gpus_per_node
    others = 1 if per_node > 1 else ranks, per_node
    rates = (found.cluster.route(0, other).bytes_per_s if other < ranks else math.inf for other in others)
    return Asked(ranks, per_node, per_token, Attention(found), *rates)


def playing(found: Planned) -> Callable[..., Schedule]:
    """Return the builder of the schedule that plays a plan: over gathered keys where its planner gathers them, else by
    messages of the blocks that tasks need, as those do of which ranks have no tokens, or every other one.
    """
    play = gathered if _gathers(found) else planned
    return play(found.plan, found.planner)


def playing_each(found: Mapping[tuple[int, ...], Planned]) -> Callable[..., Schedule]:
    """Return the same of micro-batches with documents of their own, by these."""
    play = gathered if all(map(_gathers, found.values())) else planned
    return play({documents: one.plan for documents, one in found.items()}, next(iter(found.values())).planner)


def _gathers(found: Planned) -> bool:
    whole = all(tokens and all(span.step == 1 for span in tokens) for tokens in found.plan.layout)
    return found.transport == "all-gather" and whole


PLANNERS: dict[str, Callable[[Batch, Asked], Planned]] = {
    "ring": lambda documents, asked: ring(documents, asked.ranks),
    "zigzag": lambda documents, asked: ring(documents, asked.ranks, "zigzag"),
    "striped": lambda documents, asked: ring(documents, asked.ranks, "striped"),
    "all-gather": lambda documents, asked: all_gather(documents, asked.ranks),
    "wlb-llm": lambda documents, asked: wlb(documents, asked.ranks, kernel_seconds=asked.seconds),
    "dcp": lambda documents, asked: dcp(
        documents, asked.ranks, asked.per_token, DcpOptions(gpus_per_node=asked.gpus_per_node), asked.costs
    ),
    "fcp-style": lambda documents, asked: fcp(documents, asked.ranks),
    "groups": lambda documents, asked: groups(documents, asked.ranks),
}
"""By the names that ``balance`` takes: see ``sim/batches``."""
