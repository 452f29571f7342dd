"""What linear attention makes of abstract contents: which tokens a state is a sum over, and who may read it."""

from __future__ import annotations

from typing import NamedTuple

from sim.base.errors import ScheduleError
from sim.schedule.ir.masks import ONE, Span, count_pairs
from sim.schedule.proof.contents import HEADS, Box, Content, Piece, Seen, brief, common, replaced, seeing, spell, union
from sim.schedule.proof.rules.attention import AttentionRules

STATES = {"state": ("k", "v"), "dstate": ("q", "dout")}
"""Sums of products of two tensors over tokens. What a state has seen are keys; its gradient has seen queries, with
their heads numbered within the group of their key/value head, as for dk and dv."""

_PRODUCTS = {
    ("q", "state", False): "out",
    ("dout", "state", True): "dq",
    ("v", "dstate", True): "dk",
    ("k", "dstate", False): "dv",
}
"""What a tensor makes of a state, or of its transpose."""


class LinearRules(NamedTuple):
    """How linear attention combines contents."""

    attention: AttentionRules

    def state_sum(self, a: list[Piece], b: list[Piece], ratio: int) -> list[Piece]:
        """Return the state that is the sum over these tokens; ``ratio`` heads of theirs share one of its heads."""
        found: dict[Box, Content] = {}
        for x, y in common(a, b):
            names = x.content.tensor, y.content.tensor
            name = next((state for state, factors in STATES.items() if factors == names), None)
            if name is None or x.content[1:3] != y.content[1:3]:
                raise ScheduleError(f"{brief(x.content)} and {brief(y.content)} used as factors of one state")
            heads, inside = self._shared(x, ratio, of_queries=name == "dstate")
            (low, high), batch = x.box[HEADS], x.content.batch
            box: Box = (x.box[0], (0, 1), (low // ratio, high // ratio), (0, 1))
            own = Content(name, x.content.layer, (batch, ONE, heads, ONE), ((x.content.tokens, inside),))
            found[box] = union(found[box], own) if box in found else own
        return [Piece(box, content) for box, content in found.items()]

    def product(
        self, x: list[Piece], states: list[Piece], into: list[Piece], ratio: int, *, transposed: bool
    ) -> list[Piece]:
        """Return what was there with what a state adds; raises ScheduleError where it stands for tokens that the mask
        drops, or for tokens that count already.
        """
        found: list[Piece] = []
        for piece, before in common(x, into):
            for state in states:
                low, high = (ratio * edge for edge in state.box[HEADS])
                box = replaced(replaced(piece.box, HEADS, (low, high)), 0, state.box[0])
                mine, old = piece.clipped(box), before.clipped(box)
                if mine is None or old is None:
                    continue
                heads, _ = self._shared(mine, ratio, of_queries=mine.content.tensor in {"q", "dout"})
                own = state.clipped(
                    replaced(state.box, HEADS, (mine.box[HEADS][0] // ratio, mine.box[HEADS][1] // ratio))
                )
                assert own is not None
                wanted = _PRODUCTS.get((mine.content.tensor, own.content.tensor, transposed))
                if wanted is None or old.content[:3] != (wanted, *mine.content[1:3]):
                    raise ScheduleError(
                        f"adds {brief(mine.content)} times {own.content.tensor} to {brief(old.content)}"
                    )
                same = (own.content.layer, own.content.batch, own.content.heads)
                if same != (mine.content.layer, mine.content.batch, heads):
                    raise ScheduleError(f"{brief(mine.content)} meets {brief(own.content)} of other heads or sequences")
                found.append(Piece(old.box, self._added(old.content, own.content.tensor, own.content.seen)))
        return found

    def _added(self, content: Content, state: str, seen: Seen) -> Content:
        """Return a result with the tokens that a state has seen, all of which the mask has to keep."""
        for tokens, heads in seen:
            queries, keys = (content.tokens, tokens) if state == "state" else (tokens, content.tokens)
            if count_pairs(self.attention.mask, queries, keys) != queries.size * keys.size:
                raise ScheduleError(
                    f"{brief(content)} reads a state of tokens {spell(tokens)}, some of which the mask "
                    f"{self.attention.mask} drops"
                )
            content = seeing(content, tokens, heads)
        return content

    def _shared(self, piece: Piece, ratio: int, *, of_queries: bool) -> tuple[Span, Span]:
        """Return the key/value heads of a piece, and which heads of their groups it has: all, or of keys one."""
        heads, group = piece.content.heads, self.attention.group if of_queries else 1
        aligned = not any(edge % ratio for edge in piece.box[HEADS])
        if ratio != group or not aligned or heads.step != 1 or heads.start % group or heads.size % group:
            raise ScheduleError(f"{brief(piece.content)} does not have all heads that share a state")
        return Span(heads.start // group, heads.stop // group), Span(0, group) if of_queries else ONE
