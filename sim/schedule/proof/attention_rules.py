"""What attention makes of abstract contents: which keys were attended, which gradients summed, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from sim.errors import ScheduleError
from sim.schedule.ir.masks import ONE, Band, DocumentBlock, Mask, Parts, Span, count_pairs, keeps_mask, keeps_parts
from sim.schedule.model.scope import is_sum, num_terms, tensor_of
from sim.schedule.proof.contents import (
    BATCH,
    HEADS,
    TOKENS,
    Content,
    Piece,
    Seen,
    brief,
    common,
    meet,
    replaced,
    seeing,
    spell,
)
from sim.workload import ModelSpec

Local = Band | Parts
"""What a block keeps by local indices."""


class AttentionRules(NamedTuple):
    """How attention combines contents, for one mask and one model."""

    mask: Mask
    seq: int
    batch: int
    model: ModelSpec

    @property
    def group(self) -> int:
        """Query heads of a key/value head."""
        return self.model.num_heads // self.model.num_kv_heads

    def attend(
        self, q: list[Piece], k: list[Piece], v: list[Piece], band: Local, ratio: int
    ) -> tuple[list[Piece], list[Piece]]:
        """Return the pieces of out and of the probabilities, which know the order of their keys; raises ScheduleError
        where the block is not what the mask asks for.

        ``ratio`` is the number of query heads per key/value head in this block, ``band`` its mask by local indices, or
        its parts of several documents or blocks.
        """
        self._same_keys(k, v)
        out, probs = [], []
        for piece, keys, _ in self._blocks(q, k, band, ratio):
            _, layer, at, _ = piece.content
            partial = Content("out", layer, at)
            for key in keys:
                partial = seeing(partial, key.content.tokens, ONE)
            out.append(Piece(piece.box, partial))
            probs.append(Piece(piece.box, Content("probs", layer, at, _in_memory_order(keys))))
        return out, probs

    def attend_backward(
        self, operands: dict[str, list[Piece]], band: Local, ratio: int
    ) -> tuple[list[Piece], list[Piece], list[Piece]]:
        """Return the pieces of dq, dk and dv; ``operands`` are those of q, k, v and, of the same queries, out or delta,
        lse, dout (and probs) by name.
        """
        q, k = operands["q"], operands["k"]
        self._same_keys(k, operands["v"])
        for name, pieces in operands.items():
            if name not in {"q", "k", "v"}:
                self.same_queries(name, q, pieces)
        dq: list[Piece] = []
        sums: dict[Piece, Content] = {}
        for piece, keys, offset in self._blocks(q, k, band, ratio):
            queries = piece.content
            for _, kept in common([piece], operands.get("probs", [])):
                if kept.content.seen != _in_memory_order(keys):
                    raise ScheduleError(f"{brief(kept.content)} of other keys, or in another order")
            partial = Content("dq", queries.layer, queries.at)
            for key in keys:
                partial = seeing(partial, key.content.tokens, ONE)
                first, last = piece.box[HEADS]
                part = key.clipped(replaced(key.box, HEADS, (first // ratio, -(-last // ratio))))
                assert part is not None
                low, width = offset + first % ratio, min(ratio, last - first)
                summed = sums.get(part) or Content("dk", part.content.layer, part.content.at)
                sums[part] = seeing(summed, queries.tokens, Span(low, low + width))
            dq.append(Piece(piece.box, partial))
        dk = [Piece(part.box, content) for part, content in sums.items()]
        return dq, dk, [Piece(box, Content("dv", layer, at, seen)) for box, (_, layer, at, seen) in dk]

    def same_queries(self, name: str, queries: list[Piece], pieces: list[Piece]) -> None:
        """Raise where pieces are not ``name`` of all keys, of the queries at the same place."""
        for x, y in common(queries, pieces):
            if y.content[:3] != (name, *x.content[1:3]):
                raise ScheduleError(f"{brief(y.content)} where {name} of {brief(x.content)} is needed")
            if not self.complete(y.content):
                raise ScheduleError(f"{brief(y.content)} is not complete: backward needs the global one")

    def complete(self, content: Content) -> bool:
        """Return whether everything that the mask keeps has been summed into this content."""
        whole, tokens = Span(0, self.seq), content.tokens
        if content.tensor in {"dk", "dv"}:
            summed = sum(_pairs(self.mask, queries, tokens) * heads.size for queries, heads in content.seen)
            return summed == _pairs(self.mask, whole, tokens) * self.group
        if is_sum(content.tensor):
            return sum(terms.size for terms, _ in content.seen) == num_terms(content.tensor, self.model)
        if tensor_of(content.tensor).kind == "weight gradient":
            return sum(tokens.size * batch.size for tokens, batch in content.seen) == self.seq * self.batch
        if content.tensor in {"out", "lse", "dq", "probs"}:
            return sum(_pairs(self.mask, tokens, keys) for keys, _ in content.seen) == _pairs(self.mask, tokens, whole)
        return True

    def completed(self, content: Content) -> Content:
        """Return an input as it comes from outside: out and lse of every key, sums with all of their terms."""
        if content.tensor in {"out", "lse"}:
            return content._replace(seen=((Span(0, self.seq), ONE),))
        if not is_sum(content.tensor):
            return content
        return content._replace(seen=((Span(0, num_terms(content.tensor, self.model)), ONE),))

    def _same_keys(self, k: list[Piece], v: list[Piece]) -> None:
        for x, y in common(k, v):
            if (x.content.tensor, y.content.tensor) != ("k", "v") or x.content[1:3] != y.content[1:3]:
                raise ScheduleError(f"{brief(x.content)} and {brief(y.content)} used as keys and values of one block")

    def _blocks(
        self, q: list[Piece], k: list[Piece], band: Local, ratio: int
    ) -> Iterator[tuple[Piece, list[Piece], int]]:
        """Yield pieces of q, each with the pieces of k for all of its heads and with the number, within the group of
        its key/value head, of the query head that meets each first; checks that the heads belong together and that the
        band keeps just what the mask keeps.
        """
        whole_block = _extent(q), _extent(k)
        for whole in q:
            if whole.content.tensor != "q":
                raise ScheduleError(f"{brief(whole.content)} used as queries")
            low, high = whole.box[HEADS]
            cuts = {low, high} | {ratio * edge for key in k for edge in key.box[HEADS]}
            edges = sorted(cut for cut in cuts if low <= cut <= high)
            for first, last in pairwise(edges):
                piece = whole.clipped(replaced(whole.box, HEADS, (first, last)))
                assert piece is not None
                keys = [
                    key
                    for key in k
                    if key.box[HEADS][0] * ratio <= first
                    and last <= key.box[HEADS][1] * ratio
                    and meet(key.box[BATCH], whole.box[BATCH])
                ]
                offsets = set()
                for key in keys:
                    mine, other = piece.content, key.content
                    if key.box[BATCH] != piece.box[BATCH] or (mine.layer, mine.batch) != (other.layer, other.batch):
                        raise ScheduleError(f"{brief(piece.content)} attends to another sequence or layer")
                    offset = _head_offset(
                        piece.content.heads, key.content.heads, first - key.box[HEADS][0] * ratio, ratio, self.group
                    )
                    if offset is None:
                        raise ScheduleError(
                            f"{brief(piece.content)} attends with the wrong key/value heads {spell(key.content.heads)}"
                        )
                    offsets.add(offset)
                    row, column = piece.box[TOKENS][0], key.box[TOKENS][0]
                    if not _keeps(self.mask, band, (mine.tokens, other.tokens), (row, column), whole_block):
                        raise ScheduleError(
                            f"{brief(piece.content)} attends to keys {spell(key.content.tokens)} with {band}, "
                            f"which is not what the mask {self.mask} keeps of them"
                        )
                if len(offsets) != 1:
                    raise ScheduleError(f"{brief(piece.content)} attends to no one set of key/value heads")
                yield piece, keys, offsets.pop()


def _extent(pieces: list[Piece]) -> int:
    """Return how many rows or columns hold something."""
    return max((piece.box[TOKENS][1] for piece in pieces), default=0)


def _keeps(mask: Mask, local: Local, tokens: tuple[Span, Span], at: tuple[int, int], size: tuple[int, int]) -> bool:
    """Return whether a block of some size keeps what the mask keeps of tokens that lie at a row and a column."""
    if isinstance(mask, Band) and isinstance(local, Band):
        return keeps_mask(mask, local, *tokens, at[0] - at[1])
    return keeps_parts(mask, (DocumentBlock(*size, local),) if isinstance(local, Band) else local, *tokens, *at)


def _in_memory_order(keys: list[Piece]) -> Seen:
    """Return the keys of a block as they lie in memory."""
    return tuple((key.content.tokens, ONE) for key in sorted(keys, key=lambda key: key.box[TOKENS]))


@lru_cache(maxsize=65536)
def _pairs(mask: Mask, queries: Span, keys: Span) -> int:
    return count_pairs(mask, queries, keys)


@lru_cache(maxsize=4096)
def _head_offset(q_heads: Span, kv_heads: Span, first: int, ratio: int, group: int) -> int | None:
    """Return which query head of its group each key/value head meets first; None if heads do not belong together.

    ``first`` is the place of the first query head counted from the first key/value head's first one.
    """
    offsets = set()
    for i in range(q_heads.size):
        head = q_heads.start + i * q_heads.step
        kv_head = kv_heads.start + (first + i) // ratio * kv_heads.step
        if head // group != kv_head:
            return None
        offsets.add(head - kv_head * group - (first + i) % ratio)
    return offsets.pop() if len(offsets) == 1 else None
