"""Who owns what when a schedule begins and ends: every token once, every shard of a weight equally often."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby, pairwise, product
from typing import NamedTuple

import msgspec

from sim.base.errors import ScheduleError
from sim.schedule.derive.replicas import stand_for
from sim.schedule.ir.fragments import Port
from sim.schedule.ir.masks import ONE, Span
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.ir.shares import Share
from sim.schedule.ir.tensors import Tensor, d
from sim.schedule.model.block import x
from sim.schedule.model.ends import ids, labels
from sim.schedule.model.scope import tensor_of, trained, units, updated
from sim.schedule.proof.contents import Content, spell, union
from sim.words.workload import Workload


def check_owners(schedule: Schedule) -> None:
    """Raise where a token of the schedule's sequences, or a shard of a weight, belongs to no rank or to two."""
    workload, programs, mesh = schedule.header.workload, schedule.programs, schedule.header.mesh
    replicas = stand_for(schedule)
    if mesh.dp == schedule.whole.header.mesh.dp:
        _check_own_tokens(schedule, programs, workload.batch * mesh.dp)
    else:  # each replica that stands for others, or beside others, has just its own sequences
        for replica, some in enumerate(replicas):
            of_replica = [program for program in programs if mesh.replica(program.rank) == replica]
            _check_own_tokens(schedule, of_replica, workload.batch, some[0] * workload.batch)
    if schedule.header.claims:
        of_programs = [replicas[mesh.replica(program.rank)] for program in programs]
        check_shards(programs, workload, schedule.header.members, schedule.whole.rows_later, of_programs)


def _check_own_tokens(schedule: Schedule, programs: Sequence[Program], sequences: int, first: int = 0) -> None:
    """Raise where a token of so many sequences, from the first one on, belongs to none of some ranks or to two."""
    workload = schedule.header.workload
    check_tokens(_from(first, [port for program in programs for port in program.outputs]), workload, sequences)
    if schedule.header.claims:
        inputs = _from(first, [port for program in programs for port in program.inputs])
        inputs = inputs if schedule.header.members == 1 else without_copies(inputs, _OF_GROUP)
        check_tokens(inputs if workload.forward else without_replicas(inputs), workload, sequences)


def _from(first: int, ports: list[Port]) -> list[Port]:
    """Return ports with sequences counted from the first one."""
    return [msgspec.structs.replace(port, batch=port.batch.moved(-first)) for port in ports] if first else ports


def check_tokens(ports: Iterable[Port], workload: Workload, sequences: int) -> None:
    """Raise where a token or head of a tensor, in one of so many sequences, belongs to no rank or to two."""
    owned: dict[tuple[str, int], dict[Span, Content]] = defaultdict(dict)
    for port in ports:
        tensor = tensor_of(port.tensor, workload.model)
        if tensor.of_weight:
            continue
        heads, width = tensor.heads(workload.model) or 1, tensor.features(workload.model)
        seq = workload.of_sequence(port.batch.start).seq
        for span, extent in ((port.batch, sequences), (port.heads, heads), *((t, seq) for t in port.tokens)):
            if span.start < 0 or span.stop - span.step >= extent:
                raise ScheduleError(f"{port.name} says that it holds {spell(span)} of {extent}")
        if port.features not in {None, Span(0, width)}:
            raise ScheduleError(f"{port.name} has some of {width} features: whole tokens are needed")
        blank = Content(port.tensor, port.layer, (port.batch, Span(0, 0), Span(0, 0), ONE))
        of_batch = owned[port.tensor, port.layer]
        for span in port.tokens:  # one by one, so that a port that owns a token twice is found too
            box = blank._replace(seen=((span, port.heads),))
            of_batch[port.batch] = union(of_batch.get(port.batch, blank), box)
    for (name, _), by_batch in owned.items():
        for one, next_one in pairwise(sorted(by_batch)):
            if next_one.start < one.stop:
                raise ScheduleError(f"{name} of sequences {spell(one)} and {spell(next_one)}: some belong to two")
        cells = sum(
            batch.size * tokens.size * heads.size
            for batch, content in by_batch.items()
            for tokens, heads in content.seen
        )
        of_replica, width = workload.num_tokens, tensor_of(name, workload.model).heads(workload.model) or 1
        total = sequences // workload.batch * of_replica * width
        if cells != total:
            raise ScheduleError(f"{cells} of {total} (sequence, token, head) cells of {name} have an owner")


def without_replicas(ports: Sequence[Port]) -> list[Port]:
    """Return inputs without the copies of keys and values that a forward pass may have left on several ranks."""
    return without_copies(ports, {"k", "v"})


def without_copies(ports: Sequence[Port], tensors: Collection[str]) -> list[Port]:
    """Return inputs without copies of some tensors that several ranks are given."""
    copies = {(port.tensor, port.batch, port.tokens, port.heads): port for port in ports if port.tensor in tensors}
    return [*copies.values(), *(port for port in ports if port.tensor not in tensors)]


_OF_GROUP = {ids.name, labels.name, x.name, d(x).name}
"""What all ranks of a tensor-parallel group may be given."""


class _Shard(NamedTuple):
    """Part of a weight; of a flat tensor of shares of weights rows of one member's, which stand as its columns."""

    weight: Tensor
    rows: Span
    columns: Span


def check_shards(
    programs: Sequence[Program],
    workload: Workload,
    members: int = 1,
    rows_later: Mapping[str, int] = {},
    replicas: Sequence[tuple[int, ...]] = (),
) -> None:
    """Raise where some rows or columns of a weight are on fewer ranks than others, or a rank does not leave what is due
    of just the shards that it holds: their gradient, or at the end of a step what they are then. Of ``members`` of each
    tensor-parallel group flat tensors of their shares are as one matrix, with a column each. Each program stands
    for those of some ``replicas``, the first of which is its own, each of which owns rows so much later than the one
    before it does.
    """
    held: dict[Tensor, dict[tuple[int, ...], Counter[_Shard]]] = defaultdict(lambda: defaultdict(Counter))
    due, result = (updated, "update") if workload.scope == "step" else (d, "gradient")
    kept, learned = (
        {tensor.name: tensor for unit in some for tensor in (*unit.weights, *unit.states)}
        for some in (units(workload), trained(workload))
    )
    frozen = {unit.working.name: unit.working for unit in units(workload) if unit.frozen}
    results = {due(tensor).name: tensor for tensor in learned.values()}
    for program, alike in zip(programs, replicas or [(0,)] * len(programs), strict=True):
        for shard, count in _shards(program.inputs, workload, kept | frozen).items():
            held[shard.weight][alike][shard] += count
        own = _shards(program.inputs, workload, learned)
        left = _shards(program.outputs, workload, results)
        for shard in (own - left) | (left - own) if workload.backward else ():
            state = f"leaves no {result} of" if own[shard] > left[shard] else f"has no use for the {result} of"
            raise ScheduleError(
                f"rank {program.rank} {state} rows {spell(shard.rows)}, columns {spell(shard.columns)} of "
                f"{shard.weight.name} of layer {shard.weight.layer}: it leaves those of the shards that it holds"
            )
    for weight, by_alike in held.items():
        shards = Counter[_Shard]()
        for alike, some in by_alike.items():
            shards.update(_of_replicas(some, rows_later.get(weight.name, 0), alike))
        share = Share(workload.model, 0, members)
        shared = weight.parts and share.divides(weight)
        problem = _uneven(shards, (share.size(weight), members) if shared else _shape(weight, workload))
        if problem:
            raise ScheduleError(f"{weight.name} of layer {weight.layer}: {problem}; a shard is lost or doubled")


def _of_replicas(shards: Counter[_Shard], later: int, replicas: tuple[int, ...]) -> Counter[_Shard]:
    """Return the shards of some replicas, by those of the first. Neighbours that are held as often are joined, and so
    are those of replicas that follow each other where they are as large as these lie apart.
    """
    if not later:
        return Counter({shard: len(replicas) * count for shard, count in shards.items()})
    joined: list[tuple[_Shard, int]] = []
    for shard, count in sorted(shards.items(), key=lambda one: (one[0].columns, one[0].rows)):
        before, often = joined[-1] if joined else (shard, 0)
        if often == count and before.columns == shard.columns and before.rows.stop == shard.rows.start:
            joined[-1] = before._replace(rows=Span(before.rows.start, shard.rows.stop)), count
        else:
            joined.append((shard, count))
    found, runs = Counter[_Shard](), _runs([replica - replicas[0] for replica in replicas])
    for shard, count in joined:
        start, stop, _ = shard.rows
        spans = [Span(start + later * one, start + later * last) for one, last in runs]
        if stop - start != later:
            spans = [shard.rows.moved(later * replica) for run in runs for replica in range(*run)]
        found.update({shard._replace(rows=span): count for span in spans})
    return found


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return rising numbers as runs of those that follow each other, each from one up to another."""
    runs = ([number for _, number in run] for _, run in groupby(enumerate(numbers), lambda one: one[1] - one[0]))
    return [(first, last + 1) for first, *_, last in (run * 2 for run in runs)]


def _shape(weight: Tensor, workload: Workload) -> tuple[int, int]:
    """Return how many rows and columns a weight has."""
    (rows,) = weight.rows(workload.model)
    return rows.size, weight.features(workload.model)


def _shards(ports: Iterable[Port], workload: Workload, weights: dict[str, Tensor]) -> Counter[_Shard]:
    """Return the shards of weights in ports of these names, each the weight's own or its gradient's."""
    found: Counter[_Shard] = Counter()
    for port in ports:
        if port.tensor in weights:
            weight = weights[port.tensor]
            columns = port.heads if weight.parts else port.features or Span(0, weight.features(workload.model))
            found.update(_Shard(weight.later(port.layer), rows, columns) for rows in port.tokens)
    return found


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
    if rows[-1] > shape[0] or columns[-1] > shape[1]:
        return f"rows {shape[0]}..{rows[-1]}, columns {shape[1]}..{columns[-1]} are none of it"
    least, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
    if 0 < counts[least] == counts[most]:
        return ""
    return " and ".join(
        f"rows {rows[row]}..{rows[row + 1]}, columns {columns[column]}..{columns[column + 1]} are held "
        f"{counts[row, column]} times"
        for row, column in dict.fromkeys((least, most))
    )
