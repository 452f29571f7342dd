"""DCP: blocks of documents and of computation, placed where few bytes move (arXiv:2510.10620).

Two levels: nodes first, whose links are slow, then the devices of each node.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from sim.base.errors import InputError
from sim.batches.batch import Batch
from sim.batches.blocks import Blocks, cut, fitting_size, searched_sizes, written
from sim.batches.counting import Ints
from sim.batches.planned import Planned, require_ranks, timed
from sim.batches.planners.hypergraph import Limits, Vertices, partitioned, vertices_of
from sim.batches.seconds import PlanCosts, plan_seconds
from sim.batches.statistics import TokenBytes
from sim.schedule.ir.plan import Plan


class DcpOptions(NamedTuple):
    """As published where not said otherwise (arXiv:2510.10620 §7.1)."""

    block_size: int | None = None
    """Tokens; None is the one of 512, 1024, 2048 and 4096, with at most ``most_blocks`` pairs of blocks, whose plan is
    predicted to be fastest; the smallest of these where nothing is known of costs."""
    most_blocks: int = 1 << 14
    divisions: int = 4
    gpus_per_node: int = 8
    compute_imbalance: float = 0.1
    memory_imbalance: float = 0.2
    node_imbalance: float = 0.4
    """Of pairs between nodes: less traffic there for less balance."""
    seed: int = 0


def dcp(
    batch: Batch,
    num_ranks: int,
    per_token: TokenBytes,
    options: DcpOptions = DcpOptions(),  # noqa: B008
    costs: PlanCosts | None = None,
) -> Planned:
    """Return DCP's plan, by ``costs`` of the best block size; what was asked before comes from a cache of 256 plans.

    Any mask. Deterministic. Needs Mt-KaHyPar (``longstep[planners]``): raises InputError without it, and for options
    out of range.
    """
    require_ranks(num_ranks)
    for name in ("compute_imbalance", "memory_imbalance", "node_imbalance"):
        if getattr(options, name) < 0:
            raise InputError(f"`{name}` {getattr(options, name)}: expected 0 or more")
    if options.gpus_per_node < 1:
        raise InputError(f"`gpus_per_node` {options.gpus_per_node}: expected a whole number of 1 or more")
    return timed("dcp", "blocks", lambda: _plan(batch, num_ranks, per_token, options, costs))


@functools.lru_cache(maxsize=256)
def _plan(batch: Batch, num_ranks: int, per_token: TokenBytes, options: DcpOptions, costs: PlanCosts | None) -> Plan:
    if options.block_size is None:
        return _fastest(batch, num_ranks, per_token, options, costs)
    blocks = cut(batch, options.block_size)
    part = _placed(blocks, num_ranks, per_token, options)
    number = len(blocks.begin)
    return written(blocks, part[:number], part[number:], num_ranks, options.divisions)


def _fastest(batch: Batch, num_ranks: int, per_token: TokenBytes, options: DcpOptions, costs: PlanCosts | None) -> Plan:
    """Return the plan that is predicted to be fastest, of those with blocks of each size."""
    sizes = searched_sizes(batch, options.most_blocks) if costs else (fitting_size(batch, options.most_blocks),)
    plans = [_plan(batch, num_ranks, per_token, options._replace(block_size=size), None) for size in sizes]
    if costs is None or len(plans) == 1:
        return plans[0]

    def seconds(plan: Plan) -> float:
        return plan_seconds(Planned("dcp", plan, "blocks", 0.0), batch, per_token, costs, options.gpus_per_node)

    return min(plans, key=seconds)


def _placed(blocks: Blocks, num_ranks: int, per_token: TokenBytes, options: DcpOptions) -> Ints:
    """Return the rank of every token block, then of every computation block."""
    vertices = vertices_of(blocks)
    edge_bytes = blocks.tokens * (per_token.query + per_token.out), blocks.tokens * per_token.kv
    first = np.arange(0, num_ranks, options.gpus_per_node)
    sizes = np.minimum(first + options.gpus_per_node, num_ranks) - first
    room = (1 + options.memory_imbalance) * float(blocks.tokens.sum()) / num_ranks
    between = Limits(options.node_imbalance, options.memory_imbalance)
    node = partitioned(vertices, edge_bytes, sizes, between, np.array([room * size for size in sizes]), options.seed)
    rank = np.zeros_like(node)
    within = Limits(options.compute_imbalance, options.memory_imbalance)
    for index, (start, size) in enumerate(zip(first.tolist(), sizes.tolist(), strict=True)):
        here = np.flatnonzero(node == index)
        part = _of(vertices.some(here), edge_bytes, size, within, room, options.seed)
        rank[here] = start + part
    return rank


def _of(vertices: Vertices, edge_bytes: tuple[Ints, Ints], size: int, within: Limits, room: float, seed: int) -> Ints:
    ones = np.ones(size, dtype=np.int64)
    return partitioned(vertices, edge_bytes, ones, within, np.full(size, room), seed)
