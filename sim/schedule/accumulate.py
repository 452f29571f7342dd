"""Adding up partial results: the online softmax over blocks of keys, and sums of gradients.

Both write the first result in place where the data types allow it, keep the sum in promote(model dtype, fp32), and cast
once at the end; so a schedule with one block pays nothing.
"""

from __future__ import annotations

from sim.schedule.builder import ProgramBuilder
from sim.schedule.masks import Band
from sim.schedule.views import View
from sim.workload import accumulation_dtype


class SoftmaxAccumulator:
    """Attention of one set of queries to ``num_blocks`` blocks of keys, merged by their log-sum-exps."""

    def __init__(self, builder: ProgramBuilder, q: View, num_blocks: int) -> None:
        self._b = builder
        self._q = q
        self._left = num_blocks
        _, tokens, heads, _ = q.shape
        self.out = builder.tensor("out", tokens, heads, "saved")
        self.lse = builder.lse("lse", tokens, heads, "saved")
        self._sum = self.out
        sum_dtype = accumulation_dtype(builder.workload.dtype)
        if num_blocks > 1 and sum_dtype != builder.workload.dtype:
            self._sum = builder.tensor("out sum", tokens, heads, "attention", sum_dtype)
        self._first = True

    def attend(self, k: View, v: View, band: Band, label: str) -> None:
        """Attend to one more block of keys; after the last of them ``out`` and ``lse`` are complete."""
        b, (_, tokens, heads, _) = self._b, self._q.shape
        self._left -= 1
        if self._first and b.dtype(self._sum) == b.dtype(self._q):
            b.attend(self._q, k, v, self._sum, self.lse, band, f"attend {label}")
        else:
            out = b.tensor("out part", tokens, heads, "attention")
            lse = self.lse if self._first else b.lse("lse part", tokens, heads, "attention")
            b.attend(self._q, k, v, out, lse, band, f"attend {label}")
            if self._first:
                b.copy(out, self._sum, f"cast {label}")
            else:
                b.merge((out, lse), (self._sum, self.lse), f"merge {label}")
        self._first = False
        if self._left == 0 and self._sum is not self.out:
            b.copy(self._sum, self.out, "cast out")


class GradientSum:
    """A running sum of gradients in ``total``, which holds nothing yet or (``empty=False``) what other ranks added."""

    def __init__(self, builder: ProgramBuilder, name: str, total: View, *, empty: bool = True) -> None:
        self._b = builder
        self._name = name
        self.total = total
        self._empty = empty

    def target(self, like: View) -> View:
        """Return where the next kernel shall write: the sum itself while it is empty, else a buffer of its own."""
        if self._empty and self._b.dtype(self.total) == self._b.dtype(like):
            return self.total
        return self._b.like(f"{self._name} part", like, "attention")

    def add(self, part: View, label: str) -> None:
        """Add what a kernel wrote to the view that ``target`` returned."""
        if part.buffer != self.total.buffer:
            if self._empty:
                self._b.copy(part, self.total, f"cast {self._name} {label}")
            else:
                self._b.accumulate(part, self.total, f"add {self._name} {label}")
        self._empty = False
