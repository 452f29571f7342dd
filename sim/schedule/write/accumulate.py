"""Adding up partial results: the online softmax over blocks of keys, and sums of gradients.

Both write the first result of any rows in place where the data types allow it, and cast once at the end; so a schedule
with one block pays nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from sim.schedule.ir.ops import Accumulate, Attend, AttendBackward, Merge, Zero
from sim.schedule.ir.views import Category, View
from sim.schedule.write.attention import Saved
from sim.schedule.write.blocks import Block
from sim.schedule.write.builder import ProgramBuilder
from sim.words.options import SumOptions
from sim.words.workload import accumulation_dtype

_Rows = list[tuple[slice, bool]]
"""Rows (tokens) of a sum in pieces, each with whether it holds something yet."""


class _Filled:
    """Which rows of a sum hold something yet."""

    def __init__(self, *rows: slice) -> None:
        self._rows = list(rows)

    def take(self, rows: slice) -> _Rows:
        """Return these rows in pieces, each with whether it holds something yet; from now on all of them do."""
        if any(old.start <= rows.start and rows.stop <= old.stop for old in self._rows):
            return [(rows, True)]
        edges = {rows.start, rows.stop} | {edge for old in self._rows for edge in (old.start, old.stop)}
        cuts = sorted(edge for edge in edges if rows.start <= edge <= rows.stop)
        pieces: _Rows = []
        for start, stop in pairwise(cuts):
            held = any(old.start <= start and stop <= old.stop for old in self._rows)
            if pieces and pieces[-1][1] == held:
                pieces[-1] = (slice(pieces[-1][0].start, stop), held)
            else:
                pieces.append((slice(start, stop), held))
        self._rows += [piece for piece, held in pieces if not held]
        return pieces

    @property
    def state(self) -> Hashable:
        """What decides how rows are taken."""
        return tuple([(rows.start, rows.stop) for rows in self._rows])


def _key(pieces: _Rows) -> Hashable:
    """Return what tells pieces apart; slices have no hash."""
    return tuple([(piece.start, piece.stop, held) for piece, held in pieces])


def _all_rows(view: View) -> slice:
    start, stop = view.slices[1]
    return slice(0, stop - start)


class SoftmaxAccumulator:
    """Attention of one set of queries to keys that come in ``num_parts`` partial results, merged by their lse; with
    ``always`` one alone is summed in the data type of sums, too.
    """

    def __init__(
        self, builder: ProgramBuilder, q: View, num_parts: int, category: Category = "saved", *, always: bool = False
    ) -> None:
        self._b = builder
        self._q = q
        self.left = num_parts
        """How many of these are yet to come."""
        self._filled = _Filled()
        _, tokens, heads, _ = q.shape
        self.out = builder.tensor("out", tokens, heads, category)
        self.lse = builder.lse("lse", tokens, heads, category)
        self._sum = self.out
        sum_dtype = accumulation_dtype(builder.workload.dtype)
        if (num_parts > 1 or always) and sum_dtype != builder.workload.dtype:
            self._sum = builder.tensor("out sum", tokens, heads, "attention", sum_dtype)

    @property
    def views(self) -> tuple[View, ...]:
        """The queries, and where results lie."""
        return self._q, self.out, self.lse, self._sum

    @property
    def filled(self) -> Hashable:
        """Which rows hold something yet."""
        return self._filled.state

    def state(self, num_parts: int) -> Hashable:
        """Return what decides how so many parts are added, beside their rows and the views of this one."""
        return self.filled, self.left == num_parts

    def skip(self, blocks: Sequence[Block]) -> None:
        """Take it that blocks have been attended to."""
        self.left -= len(blocks)
        for block in blocks:
            self._filled.take(block.rows)

    def attend(self, block: Block, k: View, v: View, label: str) -> None:
        """Attend to one more block of keys k, v; after the last part ``out`` and ``lse`` are complete."""
        pieces, last = self._filled.take(block.rows), self.left == 1
        views = (k, v, *self.views)
        self.left -= 1
        self._b.again(
            ("attend", block.key, _key(pieces), last), views, label, lambda: self._attend(block, k, v, label, pieces)
        )

    def _attend(self, block: Block, k: View, v: View, label: str, pieces: _Rows) -> None:
        b, rows, columns = self._b, block.rows, block.columns
        q, k, v = self._q[:, rows], k[:, columns], v[:, columns]
        _, tokens, heads, _ = q.shape
        fresh = pieces == [(rows, False)]
        direct = fresh and b.dtype(self._sum) == b.dtype(q)
        out = self._sum[:, rows] if direct else b.tensor("out part", tokens, heads, "attention")
        lse = self.lse[:, :, rows] if fresh else b.lse("lse part", tokens, heads, "attention")
        b.add(
            Attend(
                label=f"attend {label}",
                q=q,
                k=k,
                v=v,
                out=out,
                lse=lse,
                **block.kept,
            )
        )
        if not direct:
            self._add(pieces, rows, (out, lse), label)
        self._finish()

    def merge(self, part: tuple[View, View], label: str, rows: slice | None = None) -> None:
        """Merge a partial (out, lse) of some rows of the queries, by default all, that another rank has computed."""
        rows = rows or _all_rows(self._q)
        self.left -= 1
        self._add(self._filled.take(rows), rows, part, label)
        self._finish()

    def copy_sum(self, label: str) -> None:
        """Copy the sum of outputs to a new buffer, to which further parts are added."""
        into = self._b.like("out sum", self._sum, "attention")
        self._b.copy(self._sum, into, f"copy for {label}")
        self._sum = into

    def _add(self, pieces: _Rows, rows: slice, part: tuple[View, View], label: str) -> None:
        """Add a partial (out, lse) of these rows: merged where they hold something, else copied."""
        b = self._b
        for piece, held in pieces:
            some = slice(piece.start - rows.start, piece.stop - rows.start)
            out, lse = part[0][:, some], part[1][:, :, some]
            into, into_lse = self._sum[:, piece], self.lse[:, :, piece]
            if held:
                b.add(Merge(label=f"merge {label}", out=out, lse=lse, into_out=into, into_lse=into_lse))
            else:
                b.copy(out, into, f"cast {label}")
                if lse != into_lse:
                    b.copy(lse, into_lse, f"keep lse {label}")

    def _finish(self) -> None:
        if self.left == 0 and self._sum is not self.out:
            self._b.copy(self._sum, self.out, "cast out")


class GradientSum:
    """A running sum of gradients in ``total``, which holds nothing yet or (``empty=False``) what other ranks added.

    Parts are written to new buffers, or one after the other to ``part`` where it is given.
    """

    def __init__(
        self, builder: ProgramBuilder, name: str, total: View, *, empty: bool = True, part: View | None = None
    ) -> None:
        self._b = builder
        self._name = name
        self._part = part
        self.total = total
        self._filled = _Filled() if empty else _Filled(_all_rows(total))
        self._pieces: _Rows = []

    @property
    def views(self) -> tuple[View, ...]:
        """Where it lies, and its parts where they do in one place."""
        return (self.total,) if self._part is None else (self.total, self._part)

    @property
    def state(self) -> Hashable:
        """What decides how parts are added, beside their rows and the views of this sum."""
        return self._filled.state

    def skip(self, parts: Iterable[slice]) -> None:
        """Take it that parts of these rows have been added."""
        for rows in parts:
            self._filled.take(rows)

    def begin(self, rows: slice) -> Hashable:
        """Take a part of some rows; return what decides how it is added, beside the views of this sum."""
        self._pieces = self._filled.take(rows)
        return self._name, _key(self._pieces)

    def target(self, rows: slice, like: View) -> View:
        """Return where the next kernel shall write the part that is taken: the sum itself where it is empty, else a new
        buffer. ``like`` is the tensor whose gradient it is, in these rows.
        """
        if self._pieces == [(rows, False)] and self._b.dtype(self.total) == self._b.dtype(like):
            return self.total[:, rows]
        if self._part is not None:
            return self._part[:, : like.shape[1]]
        return self._b.like(f"{self._name} part", like, "attention")

    def add(self, part: View, rows: slice, label: str) -> None:
        """Add the part that is taken, which a kernel wrote to the view that ``target`` returned."""
        if part.buffer == self.total.buffer:
            return
        for piece, held in self._pieces:
            some, into = part[:, piece.start - rows.start : piece.stop - rows.start], self.total[:, piece]
            if held:
                self._b.add(Accumulate(label=f"add {self._name} {label}", source=some, into=into))
            else:
                self._b.copy(some, into, f"cast {self._name} {label}")

    def take(self, part: View, label: str, rows: slice | None = None) -> None:
        """Add what another rank has sent, of some rows, by default all."""
        rows = rows or _all_rows(part)
        self.begin(rows)
        self.add(part, rows, label)

    def fill(self) -> None:
        """Write zeros where the sum holds nothing yet."""
        for piece, held in self._filled.take(_all_rows(self.total)):
            if not held:
                self._b.add(Zero(label=f"zero {self._name}", into=self.total[:, piece]))

    def finished(self, name: str, category: Category = "attention") -> View:
        """Return the sum in the model's data type."""
        b = self._b
        if b.dtype(self.total) == b.workload.dtype:
            return self.total
        grad = b.like(name, self.total, category, b.workload.dtype)
        b.copy(self.total, grad, f"cast {name}")
        return grad


def new_sums(
    builder: ProgramBuilder, options: SumOptions, likes: Mapping[str, View], where: str = "sum"
) -> list[GradientSum]:
    """Return empty sums of gradients, by name the tensors whose they are."""
    return [
        GradientSum(builder, name, builder.gradient(f"{name} {where}", like, options)) for name, like in likes.items()
    ]


class Gradients(NamedTuple):
    """The running sums that the backward pass of a block adds to."""

    dq: GradientSum
    dk: GradientSum
    dv: GradientSum


def attend_backward(
    builder: ProgramBuilder,
    block: Block,
    saved: Saved,
    dout: View,
    sums: Gradients,
    label: str,
    delta: View | None = None,
) -> None:
    """Append the backward pass of one block of q, k, v, and add what it gives to the sums; ``delta`` serves instead of
    the output where it is given.
    """
    sides = (block.rows, block.columns, block.columns)
    begun = [total.begin(side) for total, side in zip(sums, sides, strict=True)]
    views = [*saved[:5], dout, *([delta] if delta else []), *(view for total in sums for view in total.views)]
    key = ("attend backward", block.key, delta is None, *begun)
    builder.again(key, views, label, lambda: _attend_backward(builder, block, saved, dout, sums, label, delta))


def _attend_backward(
    builder: ProgramBuilder, block: Block, saved: Saved, dout: View, sums: Gradients, label: str, delta: View | None
) -> None:
    rows, columns = block.rows, block.columns
    q, k, v = saved.q[:, rows], saved.k[:, columns], saved.v[:, columns]
    targets = (sums.dq.target(rows, q), sums.dk.target(columns, k), sums.dv.target(columns, v))
    builder.add(
        AttendBackward(
            label=f"backward {label}",
            q=q,
            k=k,
            v=v,
            out=None if delta else saved.out[:, rows],
            delta=delta[:, :, rows] if delta else None,
            lse=saved.lse[:, :, rows],
            dout=dout[:, rows],
            dq=targets[0],
            dk=targets[1],
            dv=targets[2],
            **block.kept,
        )
    )
    for total, part, where in zip(sums, targets, (rows, columns, columns), strict=True):
        total.add(part, where, label)
