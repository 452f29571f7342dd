"""Buffers of a rank, and the views into them that ops read and write."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Literal

import msgspec

from sim.words.options import Place
from sim.words.workload import DTYPE_BYTES, Dtype

Category = Literal[
    "parameter", "gradient", "optimiser", "saved", "attention", "communication", "repartition", "other"
]  # fmt: skip


TOKENS, HEADS = 1, 2
"""Dimensions of (B, S, H, D)."""
Slices = tuple[tuple[int, int], ...]
"""Start and stop per dimension."""


class Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Base of what is described: immutable, keyword-only, strict about its keys when decoded."""


class Buffer(Data, frozen=True, kw_only=True, cache_hash=True):
    """A tensor of one rank."""

    name: str
    dims: str
    """One letter a dimension: b batch (or peer x batch), s sequence, h heads, d head dim, e model or feed-forward dim;
    of weights i inputs, o outputs; of scores t keys."""
    shape: tuple[int, ...]
    dtype: Dtype
    category: Category
    place: Place = "hbm"
    token_major: Literal[True] | msgspec.UnsetType = msgspec.UNSET
    """Whether in memory tokens are outside of sequences: of a token that of all sequences lies together, then the next
    ([s, b, ...]). Its dims are in the order of all others."""

    @property
    def in_memory(self) -> tuple[int, ...]:
        """The numbers of its dimensions, from the one whose steps in memory are the largest to that of the smallest."""
        first = (TOKENS, 0) if self.token_major else (0, TOKENS)
        return (*first, *range(2, len(self.shape)))[: len(self.shape)]

    @property
    def lies(self) -> str:
        """The letters of its dimensions in that order."""
        return "".join([self.dims[dim] for dim in self.in_memory])

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class View(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box of a buffer: one (start, stop) per dimension. Slicing a view gives a smaller one, as in numpy."""

    buffer: int
    slices: Slices

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent per dimension."""
        return tuple([stop - start for start, stop in self.slices])

    def __getitem__(self, key: slice | tuple[slice, ...]) -> View:
        slices = self.slices
        for at, part in enumerate(key if isinstance(key, tuple) else (key,)):
            if part.start is not None or part.stop is not None:
                start, stop = slices[at]
                begin, end, _ = part.indices(stop - start)
                if end - begin != stop - start:
                    slices = (*slices[:at], (start + begin, start + end), *slices[at + 1 :])
        return self if slices is self.slices else View(self.buffer, slices)


class Split(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A view cut along one dimension into parts: what goes to, or comes from, each member of a group."""

    view: View
    dim: int
    parts: int
    sizes: tuple[int, ...] = ()
    """Extent of each part; empty where all are equal."""

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Extent of one part per dimension, where all are equal."""
        assert not self.sizes, "parts differ"
        shape = self.view.shape
        return (*shape[: self.dim], shape[self.dim] // self.parts, *shape[self.dim + 1 :])

    @property
    def part_shapes(self) -> list[tuple[int, ...]]:
        """Extent of each part per dimension, where they fill the view."""
        shape = self.view.shape
        return [(*shape[: self.dim], end - start, *shape[self.dim + 1 :]) for start, end in pairwise(self.starts)]

    @property
    def starts(self) -> list[int]:
        """Where each part begins along the dimension, and where the last one ends."""
        return [0, *accumulate(self.sizes or [self.view.shape[self.dim] // self.parts] * self.parts)]

    @property
    def extent(self) -> int:
        """How much of the dimension the parts have, together."""
        return sum(self.sizes) if self.sizes else self.view.shape[self.dim] // self.parts * self.parts

    def part(self, number: int) -> View:
        """Return one part."""
        if self.sizes:
            start, stop = self.starts[number : number + 2]
        else:
            each = self.view.shape[self.dim] // self.parts
            start, stop = number * each, (number + 1) * each
        return self.view[(*(slice(None),) * self.dim, slice(start, stop))]


def part_of(side: View | Split, member: int) -> View:
    """Return what one side of a collective has for, or from, a member of the group: a part, or all of a view."""
    return side.part(member) if isinstance(side, Split) else side


def is_contiguous(view: View, buffer: Buffer) -> bool:
    """Return whether a view lies in memory in one piece, as whatever is sent or received must."""
    shape = view.shape
    if shape == buffer.shape:
        return True
    order = buffer.in_memory
    inner = max((at for at, dim in enumerate(order) if shape[dim] != buffer.shape[dim]), default=0)
    return all(shape[dim] == 1 for dim in order[:inner])


def parts_are_contiguous(split: Split, buffer: Buffer) -> bool:
    """Return whether the parts follow each other in memory, each in one piece."""
    order, shape = buffer.in_memory, split.view.shape
    return is_contiguous(split.view, buffer) and all(shape[dim] == 1 for dim in order[: order.index(split.dim)])
