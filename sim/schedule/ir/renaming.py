"""How what one rank does becomes what another one does, in a place that is like its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sim.schedule.ir.masks import Span, Tokens


class Renaming(NamedTuple):
    """What of the other rank is numbered otherwise."""

    ranks: int = 0
    """By how much later its peers are."""
    sequences: int = 0
    """By how much later its sequences are."""
    rows: Mapping[str, int] = {}
    """By tensor by how much later its rows of a weight are; 0 where none are named."""
    tokens: tuple[tuple[Span, int], ...] = ()
    """The tokens of the rank that is renamed, with how much later those of the other one are; of none all stay."""

    def of_tokens(self, tokens: Tokens) -> Tokens:
        """Return the tokens that the other rank has where this one has these; raises LookupError where this one has
        others.
        """
        return tuple([span.moved(self._later(span)) for span in tokens]) if self.tokens else tokens

    def _later(self, span: Span) -> int:
        for own, later in self.tokens:
            if own.start <= span.start and span.stop <= own.stop and span.step == own.step:
                return later
        raise LookupError(span)


def tokens_later(here: Tokens, there: Tokens) -> tuple[tuple[Span, int], ...] | None:
    """Return the tokens of a rank, with how much later those of another one are; none where these are the same, and
    None where they lie in other spans.
    """
    if here == there:
        return ()
    later = tuple([(one, other.start - one.start) for one, other in zip(here, there, strict=False)])
    return later if tuple([one.moved(by) for one, by in later]) == there and len(here) == len(there) else None
