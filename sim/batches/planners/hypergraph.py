"""Partitions of blocks that move few bytes: a hypergraph for Mt-KaHyPar, and the balance of two weights.

Vertices are token blocks, which weigh tokens, and computation blocks, which weigh pairs. For each token block there are
two hyperedges: its queries, with the block itself and what attends them, and its keys. A part that has a hyperedge but
not the block receives it, so the connectivity - 1 of a partition is its bytes.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.base.errors import InputError
from sim.batches.blocks import Blocks
from sim.batches.counting import Ints

_SCALE = 1 << 24
"""Whole weights that each sort of vertex sums to: Mt-KaHyPar counts in integers of 32 bits."""
_MOST = 1 << 30
"""What weights of hyperedges sum to at most, likewise."""


class Vertices(NamedTuple):
    """v vertices, each in two hyperedges: of queries and of keys."""

    query_edge: Ints
    """(v,): token block of the queries."""
    key_edge: Ints
    """(v,): token block of the keys."""
    tokens: Ints
    """(v,): 0 for computation."""
    pairs: Ints
    """(v,): 0 for tokens."""

    def some(self, which: Ints) -> Vertices:
        """Return the vertices of these numbers."""
        return Vertices(*(column[which] for column in self))


class Limits(NamedTuple):
    """How far parts may exceed their share, as a fraction of it."""

    pairs: float
    tokens: float


def vertices_of(blocks: Blocks) -> Vertices:
    """Return token blocks, then computation blocks."""
    number = np.arange(len(blocks.begin))
    none, nothing = np.zeros_like(blocks.pairs), np.zeros_like(blocks.tokens)
    return Vertices(
        np.concatenate([number, blocks.queries]),
        np.concatenate([number, blocks.keys]),
        np.concatenate([blocks.tokens, none]),
        np.concatenate([nothing, blocks.pairs]),
    )


def partitioned(
    vertices: Vertices,
    edge_bytes: tuple[Ints, Ints],
    shares: Ints,
    limits: Limits,
    most: NDArray[np.float64],
    seed: int,
) -> Ints:
    """Return (v,): the part of each vertex.

    ``edge_bytes``: of queries and of keys, (n,). ``shares``: (k,) what each part should have of both weights, as a
    ratio. ``most``: (k,) tokens that a part may have at most. Mt-KaHyPar balances one weight, tokens and pairs added;
    moves that cost the fewest bytes then meet the limits of each, as far as blocks are small enough.
    """
    if len(shares) == 1:
        return np.zeros(len(vertices.pairs), dtype=np.int64)
    part = _mt_kahypar(vertices, edge_bytes, shares, limits.pairs, seed)
    work = float(vertices.pairs.sum()) * shares / shares.sum() * (1 + limits.pairs)
    _balance(part, vertices, edge_bytes, vertices.tokens, most)
    _balance(part, vertices, edge_bytes, vertices.pairs, work)
    return part


def _mt_kahypar(vertices: Vertices, edge_bytes: tuple[Ints, Ints], shares: Ints, imbalance: float, seed: int) -> Ints:
    library, started = _started()
    weights = sum(
        np.rint(column * (_SCALE / max(int(column.sum()), 1))).astype(np.int64)
        for column in (vertices.tokens, vertices.pairs)
    )
    pins: list[list[int]] = []
    bytes_: list[int] = []
    for column, sizes in zip((vertices.query_edge, vertices.key_edge), edge_bytes, strict=True):
        order = np.argsort(column, kind="stable")
        edges, first = np.unique(column[order], return_index=True)
        for edge, group in zip(edges.tolist(), np.split(order, first[1:]), strict=True):
            if len(group) > 1:
                pins.append(group.tolist())
                bytes_.append(int(sizes[edge]))
    library.set_seed(seed)
    context = started.context_from_preset(library.PresetType.DETERMINISTIC)
    context.logging = False
    context.set_partitioning_parameters(len(shares), imbalance, library.Objective.KM1)
    if len(set(shares.tolist())) > 1:
        total = int(np.sum(weights)) * (1 + imbalance) / shares.sum()
        context.set_individual_target_block_weights([int(total * share) + 1 for share in shares.tolist()])
    graph = started.create_hypergraph(
        context, len(vertices.pairs), len(pins), pins, np.asarray(weights).tolist(), _in_proportion(bytes_)
    )
    return np.array(graph.partition(context).get_partition(), dtype=np.int64)


def _in_proportion(bytes_: list[int]) -> list[int]:
    """Return small numbers that stand for bytes: in the same proportion, as far as whole ones can be."""
    common = math.gcd(*bytes_) or 1
    found = [size // common for size in bytes_]
    if (total := sum(found)) <= _MOST:
        return found
    return [max(1, size * _MOST // total) for size in found]


@functools.lru_cache(maxsize=1)
def _started() -> tuple[Any, Any]:
    """Return the library and its initialiser, of which a process may have one; raises InputError without it."""
    try:
        import mtkahypar  # noqa: PLC0415 - an optional extra
    except ImportError:
        raise InputError(
            "planner dcp needs Mt-KaHyPar: pip install 'longstep[planners]', or choose another `planner`"
        ) from None
    return mtkahypar, mtkahypar.initialize(2)


def _balance(
    part: Ints, vertices: Vertices, edge_bytes: tuple[Ints, Ints], weight: Ints, most: NDArray[np.float64]
) -> None:
    """Move vertices out of parts that exceed ``most`` (k,), those first that add the fewest bytes per weight.

    A move goes where there is room, else to where it leaves less than it came from; without either, blocks are too
    large, and the rest stays.
    """
    parts = len(most)
    load = np.bincount(part, weights=weight, minlength=parts)
    edges = [
        (column, sizes) for column, sizes in zip((vertices.query_edge, vertices.key_edge), edge_bytes, strict=True)
    ]
    pins = [np.zeros((len(sizes), parts), dtype=np.int64) for _, sizes in edges]
    for (column, _), count in zip(edges, pins, strict=True):
        np.add.at(count, (column, part), 1)
    stuck = np.zeros(parts, dtype=bool)
    while True:
        excess = np.where(stuck, -np.inf, load - most)
        source = int(excess.argmax())
        if excess[source] <= 0:
            return
        mine = np.flatnonzero((part == source) & (weight > 0))
        after = load[None, :] + weight[mine, None]
        allowed = after <= most[None, :]
        if not allowed.any():
            allowed = after < load[source]
        allowed[:, source] = False
        if not allowed.any():
            stuck[source] = True
            continue
        added = np.zeros((len(mine), parts))
        for (column, sizes), count in zip(edges, pins, strict=True):
            edge = column[mine]
            added += sizes[edge, None] * (count[edge] == 0)
            added -= (sizes[edge] * (count[edge, source] == 1))[:, None]
        cost = np.where(allowed, np.where(added > 0, added / weight[mine, None], added * weight[mine, None]), np.inf)
        row, target = np.unravel_index(int(cost.argmin()), cost.shape)
        vertex = mine[row]
        part[vertex] = target
        load[source] -= weight[vertex]
        load[target] += weight[vertex]
        for (column, _), count in zip(edges, pins, strict=True):
            count[column[vertex], source] -= 1
            count[column[vertex], target] += 1
