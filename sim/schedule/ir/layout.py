"""Which tokens lie on which rank: one function per layout, each returning the tokens of every position of a group."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

from sim.base.errors import InputError, LengthError
from sim.schedule.ir.masks import Span, Tokens
from sim.words.options import LayoutName, Sharding
from sim.words.workload import Workload


def contiguous(seq: int, parts: int) -> tuple[Tokens, ...]:
    """Return P slices of S/P neighbouring tokens (arXiv:2310.01889 §3); raises LengthError if P does not divide S."""
    size = _divided(seq, parts)
    return tuple((Span(part * size, (part + 1) * size),) for part in range(parts))


def zigzag(seq: int, parts: int) -> tuple[Tokens, ...]:
    """Return for rank r chunks r and 2P-1-r of 2P, so that a causal mask leaves all ranks the same work; raises
    LengthError if 2P does not divide S. (ring-flash-attention's zigzag, TransformerEngine's DualChunkSwap.)
    """
    if parts == 1:
        return contiguous(seq, parts)
    size = _divided(seq, 2 * parts)
    chunks = [Span(chunk * size, (chunk + 1) * size) for chunk in range(2 * parts)]
    return tuple((chunks[part], chunks[2 * parts - 1 - part]) for part in range(parts))


def striped(seq: int, parts: int) -> tuple[Tokens, ...]:
    """Return for rank r the tokens r, r + P, … (arXiv:2311.09431 §3.1); raises LengthError if P does not divide S."""
    _divided(seq, parts)
    return tuple((Span(part, seq + part, parts),) for part in range(parts))


LAYOUTS: dict[LayoutName, Callable[[int, int], tuple[Tokens, ...]]] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "striped": striped,
}


def laid_out(name: LayoutName, workload: Workload, parts: int, sharding: Sharding = "sequence") -> tuple[Tokens, ...]:
    """Return what lies on each of the ranks of a sequence, or of each of its documents in turn; raises LengthError
    where its length does not divide, and InputError where that of a document does not: a longer sequence is no remedy.
    """
    if sharding == "sequence":
        return LAYOUTS[name](workload.seq, parts)
    lengths = workload.document_lengths
    *_, last = starts = [0, *accumulate(lengths[:-1])]
    sizes = (*lengths[:-1], workload.seq - last)
    try:
        each = [
            [tuple(span.moved(start) for span in tokens) for tokens in LAYOUTS[name](size, parts)]
            for start, size in zip(starts, sizes, strict=True)
        ]
    except LengthError as error:
        raise InputError(
            f"document {sizes.index(error.seq)} has {error.seq} tokens, no multiple of {error.multiple}, which "
            f"{parts} ranks need of each: fill it up in `documents`, or set `schedule.sharding` sequence"
        ) from None
    return tuple(tuple(span for tokens in of_rank for span in tokens) for of_rank in zip(*each, strict=True))


def shared_out(
    name: LayoutName, workload: Workload, parts: int, shares: int, sharding: Sharding = "sequence"
) -> list[tuple[Tokens, ...]]:
    """Return per position of a layout its tokens, cut in the order of memory into equal shares; raises LengthError
    where they do not divide.
    """
    chunks = 2 * parts if name == "zigzag" and parts > 1 else parts
    size = _divided(workload.seq, parts * shares, math.lcm(parts * shares, chunks))
    return [
        tuple(cut(tokens, share * size, (share + 1) * size) for share in range(shares))
        for tokens in laid_out(name, workload, parts, sharding)
    ]


def cut(tokens: Tokens, begin: int, end: int) -> Tokens:
    """Return the tokens number ``begin`` to ``end`` (exclusive)."""
    found, at = [], 0
    for span in tokens:
        low, high = max(begin - at, 0), min(end - at, span.size)
        if low < high:
            found.append(span.part(low, high))
        at += span.size
    return tuple(found)


def _divided(seq: int, by: int, multiple: int | None = None) -> int:
    """Return seq / by; raises LengthError where seq is no multiple of ``multiple`` (by default of ``by``)."""
    if seq % (multiple or by):
        raise LengthError(seq, multiple or by)
    return seq // by


def num_tokens(tokens: Tokens) -> int:
    """Return how many tokens these are."""
    return sum(span.size for span in tokens)
