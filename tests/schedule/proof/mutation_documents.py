"""Packed documents for ``mutations`` to change, under all planners and masks, and ways to change their rectangles."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import msgspec

from sim.balance.planners import playing
from sim.base.errors import InputError, ScheduleError
from sim.schedule.ir.masks import Band, DocumentBlock, Span, count_pairs, moved_band
from sim.schedule.ir.ops import Attend, AttendBackward
from sim.schedule.proof.check import Checked, check
from sim.words.mesh import Mesh
from sim.words.patterns import Pattern
from sim.words.workload import BlockMask, Workload
from tests.batches.batches import ANY_LENGTH, DIVIDED, OF_BLOCKS, PARTITIONED, PATTERNS, for_planner
from tests.helpers import VARIANTS, make_model
from tests.schedule.proof.mutation_operators import Items, Operator, Scene, among, put

PLANNERS = {**ANY_LENGTH, **DIVIDED, **OF_BLOCKS, **PARTITIONED}
SEQ = 48
Parts = tuple[DocumentBlock, ...]


def drawn_documents(draw: Random) -> tuple[str, Checked]:
    """Return a proved schedule of several documents, or of a block-sparse mask, with what people call it."""
    while True:
        planned = draw.random() < 0.6
        name, ranks = draw.choice(list(PLANNERS if planned else VARIANTS)), draw.choice((1, 2, 3, 4))
        cuts = sorted({0, SEQ, *draw.choices(range(1, SEQ), k=draw.choice((0, 1, 3, 6)))})
        documents = [stop - start for start, stop in pairwise(cuts)]
        mask = draw.choice(list(PATTERNS) if planned or draw.random() < 0.8 else ["blocks"])
        scope = draw.choice(("attention",) * 5 + ("layer", "step"))
        heads, kv_heads = draw.choice([(4, 4), (4, 2), (8, 2)])
        dp = draw.choice((1, 1, 1, 2))
        model = msgspec.structs.replace(make_model(heads, kv_heads, head_dim=2), ffn_dim=12, vocab_size=40)
        fields: dict[str, Any] = {"model": model, "seq": SEQ, "dtype": "fp64", "scope": scope}
        fields |= {"batch": draw.choice((1, 2)), "layers": 1 if scope == "attention" else draw.choice((1, 2))}
        try:
            if planned:
                found = for_planner(name, documents, ranks, mask)
                documents, fields["seq"] = list(found.documents), found.num_tokens
                made = PLANNERS[name](found, ranks)
            fields |= _mask(draw, mask, fields["seq"]) | ({} if mask == "blocks" else {"documents": tuple(documents)})
            workload = Workload(**fields)
            if planned:
                checked = check(playing(made)(workload, Mesh(ring=ranks, dp=dp)))
            else:
                mesh = msgspec.structs.replace(VARIANTS[name].mesh(ranks, model), dp=dp)
                checked = check(VARIANTS[name].build(workload, mesh))
        except ScheduleError:
            raise
        except InputError:
            continue
        what = {key: value for key, value in fields.items() if key != "model"}
        return f"{name}{' of a plan' * planned}, P = {ranks}, dp = {dp}, {heads}:{kv_heads}, {mask}, {what}", checked


def _mask(draw: Random, mask: str, seq: int) -> dict[str, Any]:
    """Return the fields of a workload that say what it keeps."""
    if mask == "blocks":
        size = draw.choice((4, 8, 12, 16))
        rows = range(-(-seq // size))
        kept = [tuple(block for block in range(row + 1) if block == row or draw.random() < 0.5) for row in rows]
        return {"block_mask": BlockMask(size=size, kept=tuple(kept))}
    keeps = PATTERNS[mask]
    if isinstance(keeps, Pattern):
        return {"pattern": keeps}
    reach = {} if keeps.left is None else {"window": keeps.left + 1}
    return {"mask": "causal" if keeps.right == 0 else "full", **reach}


# Rectangles of one kernel


def rectangles(change: Callable[[Random, Parts, int], Parts | None]) -> Operator:
    """Return the operator that changes one of the rectangles that a kernel attends to."""

    def of_op(scene: Scene, items: Items, at: int) -> Items | None:
        op = items[at]
        parts = isinstance(op, Attend | AttendBackward) and op.documents
        if not parts:
            return None
        new = change(scene.draw, parts, scene.draw.randrange(len(parts)))
        return None if new is None else (*items[:at], put(op, ("documents",), new), *items[at + 1 :])

    return among(of_op)


def shifted(draw: Random, parts: Parts, at: int) -> Parts:
    """Return the rectangles with one that lies elsewhere, with its own band or that of the same pairs of positions."""
    old = parts[at]
    down, across = draw.choice([(0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, -1), (0, old.columns.size)])
    band = draw.choice((old.band, moved_band(old.band, down, across)))
    return (*parts[:at], DocumentBlock(old.rows.moved(down), old.columns.moved(across), band), *parts[at + 1 :])


def stretched(draw: Random, parts: Parts, at: int) -> Parts:
    """Return the rectangles with one that begins or ends elsewhere, with a band of the same pairs of positions."""
    old = parts[at]
    a, b, c, d = draw.choice([(0, 1, 0, 0), (0, 0, 0, 1), (-1, 0, 0, 0), (0, 0, -1, 0), (1, 0, 0, 0), (0, -1, 0, 0)])
    rows = Span(old.rows.start + a, old.rows.stop + b)
    columns = Span(old.columns.start + c, old.columns.stop + d)
    return (*parts[:at], DocumentBlock(rows, columns, moved_band(old.band, a, c)), *parts[at + 1 :])


def cut(draw: Random, parts: Parts, at: int) -> Parts | None:
    """Return the rectangles with one in two: apart, which is the same, or with rows or columns that both have, or
    neither.
    """
    old = parts[at]
    by_rows = draw.random() < 0.5
    size = (old.rows if by_rows else old.columns).size
    if size < 3:
        return None
    middle, shared = draw.randrange(1, size - 1), draw.choice((-1, 0, 0, 1))
    halves = (0, max(middle + shared, 1)), (middle, size)
    return (*parts[:at], *(_within(old, half, by_rows=by_rows) for half in halves), *parts[at + 1 :])


def _within(old: DocumentBlock, half: tuple[int, int], *, by_rows: bool) -> DocumentBlock:
    if by_rows:
        return DocumentBlock(old.rows.part(*half), old.columns, moved_band(old.band, half[0], 0))
    return DocumentBlock(old.rows, old.columns.part(*half), moved_band(old.band, 0, half[0]))


def as_many_pairs(draw: Random, parts: Parts, at: int) -> Parts | None:
    """Return the rectangles with two in the place of one that keep as many pairs as it, all of them its own, some of
    them twice and others never.
    """
    old = parts[at]
    wanted, found = count_pairs(old.band, _from_0(old.rows), _from_0(old.columns)), list[Parts]()
    for stop in range(1, old.columns.size):
        first = _within(old, (0, stop), by_rows=False)
        for start in range(stop):
            whole = _within(old, (start, old.columns.size), by_rows=False)
            for by in range(old.columns.size):
                limit = old.columns.size - 1 if whole.band.right is None else whole.band.right
                second = whole._replace(band=Band(whole.band.left, limit - by))
                pairs = [count_pairs(one.band, _from_0(one.rows), _from_0(one.columns)) for one in (first, second)]
                if sum(pairs) == wanted and all(pairs):
                    found.append((first, second))
    return (*parts[:at], *draw.choice(found), *parts[at + 1 :]) if found else None


def _from_0(span: Span) -> Span:
    return Span(0, span.size)


def one_for_another(draw: Random, parts: Parts, at: int) -> Parts | None:
    """Return the rectangles with one twice and another, if there is one of as many pairs such a one, left out."""
    pairs = [count_pairs(part.band, _from_0(part.rows), _from_0(part.columns)) for part in parts]
    others = [other for other in range(len(parts)) if other != at]
    alike = [other for other in others if pairs[other] == pairs[at]] or others
    if not alike:
        return None
    other = draw.choice(alike)
    return tuple(parts[at] if number == other else part for number, part in enumerate(parts))


def order_drawn(draw: Random, parts: Parts, _: int) -> Parts:
    """Return the rectangles in another order, which is the same."""
    return tuple(draw.sample(parts, len(parts)))


DOCUMENT_OPERATORS: dict[str, Operator] = {
    "rectangles: one shifted": rectangles(shifted),
    "rectangles: one stretched": rectangles(stretched),
    "rectangles: one cut, apart or not": rectangles(cut),
    "rectangles: as many pairs, some twice": rectangles(as_many_pairs),
    "rectangles: one for another": rectangles(one_for_another),
    "rectangles: in another order": rectangles(order_drawn),
}
