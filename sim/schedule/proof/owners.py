"""Who owns what when a schedule begins and ends: every token once, every shard of a weight equally often."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, product
from typing import NamedTuple

from sim.errors import ScheduleError
from sim.schedule.ir.masks import ONE, Span, Tokens
from sim.schedule.ir.program import Port, Program
from sim.schedule.model.equations import heads_of, is_weight, is_weight_gradient, weight_shapes
from sim.schedule.proof.contents import Content, spell, union
from sim.workload import Workload


def check_tokens(ports: Iterable[Port], workload: Workload, sequences: int) -> None:
    """Raise where a token or head of a tensor, in one of so many sequences, belongs to no rank or to two."""
    owned: dict[tuple[str, int], dict[Span, Content]] = defaultdict(dict)
    for port in ports:
        if is_weight(port.tensor) or is_weight_gradient(port.tensor):
            continue
        blank = Content(port.tensor, port.layer, (port.batch, Span(0, 0), Span(0, 0), ONE))
        of_batch = owned[port.tensor, port.layer]
        for span in port.tokens:  # one by one, so that a port that owns a token twice is found too
            box = blank._replace(seen=((span, port.heads),))
            of_batch[port.batch] = union(of_batch.get(port.batch, blank), box)
    for (tensor, _), by_batch in owned.items():
        for one, next_one in pairwise(sorted(by_batch)):
            if next_one.start < one.stop:
                raise ScheduleError(f"{tensor} of sequences {spell(one)} and {spell(next_one)}: some belong to two")
        cells = sum(
            batch.size * tokens.size * heads.size
            for batch, content in by_batch.items()
            for tokens, heads in content.seen
        )
        total = sequences * workload.seq * (heads_of(tensor, workload.model) or 1)
        if cells != total:
            raise ScheduleError(f"{cells} of {total} (sequence, token, head) cells of {tensor} have an owner")


def without_replicas(ports: Iterable[Port]) -> list[Port]:
    """Return inputs without the copies of keys and values that a forward pass may have left on several ranks."""
    seen: set[tuple[str, Span, Tokens, Span]] = set()
    found = []
    for port in ports:
        key = (port.tensor, port.batch, port.tokens, port.heads)
        if port.tensor not in {"k", "v"} or key not in seen:
            found.append(port)
        seen.add(key)
    return found


class _Shard(NamedTuple):
    """Part of a weight."""

    weight: str
    layer: int
    rows: Span
    columns: Span


def check_shards(programs: Sequence[Program], workload: Workload) -> None:
    """Raise where some rows or columns of a weight are on fewer ranks than others, or a rank does not leave the
    gradient of just the shards that it holds.
    """
    held: dict[tuple[str, int], Counter[_Shard]] = defaultdict(Counter)
    for program in programs:
        own, left = _shards(program.inputs, workload, is_weight), _shards(program.outputs, workload, is_weight_gradient)
        for shard in own:
            held[shard.weight, shard.layer][shard] += own[shard]
        for shard in (own - left) | (left - own) if workload.backward else ():
            state = "leaves no gradient of" if own[shard] > left[shard] else "has no use for the gradient of"
            raise ScheduleError(
                f"rank {program.rank} {state} rows {spell(shard.rows)}, columns {spell(shard.columns)} of "
                f"{shard.weight} of layer {shard.layer}: it leaves those of the shards that it holds"
            )
    for (weight, layer), shards in held.items():
        problem = _uneven(shards, _shape(weight, workload))
        if problem:
            raise ScheduleError(f"{weight} of layer {layer}: {problem}; a shard is lost or doubled")


def _shards(ports: Iterable[Port], workload: Workload, kind: Callable[[str], bool]) -> Counter[_Shard]:
    """Return the shards of weights, or those whose gradients, are in ports of a kind."""
    found: Counter[_Shard] = Counter()
    for port in ports:
        if kind(port.tensor):
            weight = port.tensor.removeprefix("d")
            columns = port.features or Span(0, _shape(weight, workload)[1])
            found.update(_Shard(weight, port.layer, rows, columns) for rows in port.tokens)
    return found


def _shape(tensor: str, workload: Workload) -> tuple[int, int]:
    """Return rows and columns of a weight."""
    rows, *columns = weight_shapes(workload.model)[tensor]
    return rows, columns[0] if columns else 1


def _uneven(shards: Counter[_Shard], shape: tuple[int, int]) -> str:
    """Return which cells of a matrix are in more shards than others, or in none; empty if there are no such cells."""
    rows, columns = (
        sorted({0, extent, *(edge for shard in shards for edge in (shard.rows, shard.columns)[axis][:2])})
        for axis, extent in enumerate(shape)
    )
    counts = dict.fromkeys(product(range(len(rows) - 1), range(len(columns) - 1)), 0)
    for shard, count in shards.items():
        down = range(bisect_left(rows, shard.rows.start), bisect_left(rows, shard.rows.stop))
        across = range(bisect_left(columns, shard.columns.start), bisect_left(columns, shard.columns.stop))
        for cell in product(down, across):
            counts[cell] += count
    least, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
    if 0 < counts[least] == counts[most]:
        return ""
    return " and ".join(
        f"rows {rows[row]}..{rows[row + 1]}, columns {columns[column]}..{columns[column + 1]} are held "
        f"{counts[row, column]} times"
        for row, column in dict.fromkeys((least, most))
    )
