"""Which tokens lie on which rank: one function per layout, each returning the tokens of every position of a group."""

from __future__ import annotations

from sim.errors import InputError
from sim.schedule.masks import Span, Tokens


def contiguous(seq: int, parts: int) -> tuple[Tokens, ...]:
    """Return P slices of S/P neighbouring tokens (arXiv:2310.01889 §3); raises InputError if P does not divide S."""
    if seq % parts:
        below, above = seq // parts * parts, -(-seq // parts) * parts
        nearest = f"{below} or {above}" if below else f"{above}"
        raise InputError(
            f"sequence length {seq} does not divide over {parts} ranks: the nearest are {nearest}; set --seq"
        )
    size = seq // parts
    return tuple((Span(part * size, (part + 1) * size),) for part in range(parts))


def num_tokens(tokens: Tokens) -> int:
    """Return how many tokens these are."""
    return sum(span.size for span in tokens)
