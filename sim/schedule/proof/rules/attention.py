"""What attention makes of abstract contents: which keys were attended, which gradients summed, and what is wrong."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from sim.base.errors import ScheduleError
from sim.schedule.ir.masks import ONE, Band, DocumentBlock, Documents, Mask, Span, count_pairs, keeps_mask, keeps_parts
from sim.schedule.model.scope import is_sum, kind_of, num_terms
from sim.schedule.proof.contents import (
    BATCH,
    FAR,
    HEADS,
    OF_GROUP_TOKENS,
    OF_VOCABULARY,
    TOKENS,
    Box,
    Content,
    Piece,
    Seen,
    Unclassed,
    brief,
    common,
    differs,
    is_of_vocabulary,
    last_seen,
    meet,
    replaced,
    seeing,
    spell,
)
from sim.schedule.proof.members import content_of_member, position, span_of_member
from sim.schedule.proof.rules.part import has_all_heads
from sim.words.workload import ModelSpec

_BY_MASK = {"dk", "dv", "out", "lse", "dq", "probs"}
"""Tensors of which some tokens are complete when they have met those that the mask keeps of them."""
Local = Band | tuple[DocumentBlock, ...]
"""What a block keeps by local indices."""


class AttentionRules(NamedTuple):
    """How attention combines contents, for one mask and one model."""

    mask: Mask
    seq: int
    batch: int
    model: ModelSpec
    members: int = 1
    """Of each class of ranks whose contents are of all of its members, see ``members``."""
    kinds: tuple[AttentionRules, ...] = ()
    """Those of each kind of layers, where there are several."""
    sequences: tuple[AttentionRules, ...] = ()
    """Those of each sequence of a replica, where they differ."""
    rows_later: Mapping[str, int] = {}
    """By tensor how much later the rows of a weight are that replicas own than those of the first one, which stands for
    them: a position of as many members."""
    alone: Collection[int] = ()
    """Ranks that own nothing but the rows that they name, since their replica stands for itself."""

    def of(self, layer: int) -> AttentionRules:
        """Return the rules of the kind of a layer."""
        return self.kinds[layer % len(self.kinds)] if self.kinds else self

    def of_pieces(self, pieces: list[Piece]) -> AttentionRules:
        """Return the rules of the layer and of the sequence that pieces are of; raises ScheduleError for several."""
        if self.sequences:
            batches = {piece.content.batch for piece in pieces}
            if len(batches) != 1:
                raise ScheduleError(f"{', '.join(brief(piece.content) for piece in pieces)}: several sequences meet")
            return self.of_batch(*batches).of_pieces(pieces)
        if not self.kinds:
            return self
        found = {piece.content.layer % len(self.kinds) for piece in pieces}
        if len(found) != 1:
            raise ScheduleError(f"{', '.join(brief(piece.content) for piece in pieces)}: layers of several kinds meet")
        return self.of(*found)

    def of_batch(self, batch: Span) -> AttentionRules:
        """Return the rules of one sequence; raises ScheduleError for several that differ."""
        if not self.sequences:
            return self
        if batch.size != 1:
            raise ScheduleError(f"sequences {spell(batch)} at once, which have documents of their own")
        return self.sequences[batch.start % FAR % len(self.sequences)]

    def of_members(self, members: int) -> AttentionRules:
        """Return the rules of contents that are of so many members of a class."""
        kinds, sequences = (tuple([one.of_members(members) for one in some]) for some in (self.kinds, self.sequences))
        return self._replace(members=members, kinds=kinds, sequences=sequences)

    @property
    def tokens(self) -> int:
        """All tokens of all sequences."""
        if not self.sequences:
            return self.seq * self.batch
        return sum([one.seq for one in self.sequences]) * (self.batch // len(self.sequences))

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
        its parts.
        """
        self._same_keys(k, v)
        out, probs = [], []
        for piece, keys, _ in self._blocks(self._at_parts(q, k, band), ratio):
            _, layer, at, _ = piece.content
            partial = Content("out", layer, at)
            for key in keys:
                if _pairs(self.mask, piece.content.tokens, key.content.tokens):
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
        sums: dict[Box, Content] = {}
        block = self._at_parts(q, k, band)
        for piece, keys, offset in self._blocks(block, ratio):
            queries = piece.content
            for _, kept in common([piece], operands.get("probs", [])):
                if kept.content.seen != _in_memory_order(keys):
                    raise ScheduleError(f"{brief(kept.content)} of other keys, or in another order")
            partial = Content("dq", queries.layer, queries.at)
            for key in keys:
                meets = _pairs(self.mask, queries.tokens, key.content.tokens) > 0
                if meets:
                    partial = seeing(partial, key.content.tokens, ONE)
                first, last = piece.box[HEADS]
                part = key.clipped(replaced(key.box, HEADS, (first // ratio, -(-last // ratio))))
                assert part is not None
                low, width = offset + first % ratio, min(ratio, last - first)
                summed = sums.get(part.box) or Content("dk", part.content.layer, part.content.at)
                sums[part.box] = seeing(summed, queries.tokens, Span(low, low + width)) if meets else summed
            dq.append(Piece(piece.box, partial))
        dk = [Piece(box, content) for box, content in sums.items()]
        if not isinstance(band, Band):
            seen = {replaced(piece.box, HEADS, (0, 0)) for piece in dk}
            left = [key for key in block.k if replaced(key.box, HEADS, (0, 0)) not in seen]  # that meet no queries
            dk += [Piece(key.box, Content("dk", key.content.layer, key.content.at)) for key in left]
        return dq, dk, [Piece(box, Content("dv", layer, at, seen)) for box, (_, layer, at, seen) in dk]

    def same_queries(self, name: str, queries: list[Piece], pieces: list[Piece]) -> None:
        """Raise where pieces are not ``name`` of all keys, of the queries at the same place."""
        for x, y in common(queries, pieces):
            if y.content[:3] != (name, *x.content[1:3]):
                raise ScheduleError(f"{brief(y.content)} where {name} of {brief(x.content)} is needed")
            if not self.complete(y.content):
                raise ScheduleError(f"{brief(y.content)} is not complete: backward needs the global one")

    def complete(self, content: Content) -> bool:
        """Return whether everything that the mask keeps has been summed into this content, of every member; or all of
        the vocabulary.
        """
        last = last_seen(content)
        if last >= OF_VOCABULARY:
            terms = sum(rows.size for rows, _ in content.seen)
            return is_of_vocabulary(content) and terms == self.model.vocab_size
        if last >= OF_GROUP_TOKENS:
            return has_all_heads(content, self.model, self.tokens)
        if self.sequences and kind_of(content.tensor) != "weight gradient":
            return self.of_batch(content.batch).complete(content)
        if self.kinds and not self.sequences:
            return self.of(content.layer).complete(content)
        if self.members > 1 and differs(
            content._replace(at=(content.tokens if content.tensor in _BY_MASK else ONE,) * 4)
        ):
            alone = self._replace(members=1)
            found = {alone.complete(content_of_member(content, member)) for member in range(self.members)}
            if len(found) > 1:
                raise Unclassed
            return found.pop()
        whole, tokens = Span(0, self.seq), content.tokens
        if content.tensor in {"dk", "dv"}:
            summed = sum(_pairs(self.mask, queries, tokens) * heads.size for queries, heads in content.seen)
            return summed == _pairs(self.mask, whole, tokens) * self.group
        if is_sum(content.tensor, self.model):
            return sum(terms.size for terms, _ in content.seen) == num_terms(content.tensor, self.model)
        if kind_of(content.tensor) == "weight gradient":
            return sum(tokens.size * batch.size for tokens, batch in content.seen) == self.tokens
        if content.tensor in _BY_MASK:
            return sum(_pairs(self.mask, tokens, keys) for keys, _ in content.seen) == _pairs(self.mask, tokens, whole)
        return True

    def completed(self, content: Content) -> Content:
        """Return an input as it comes from outside: out and lse of every key, sums with all of their terms."""
        if content.tensor in {"out", "lse"}:
            return content._replace(seen=((Span(0, self.seq), ONE),))
        if not is_sum(content.tensor, self.model):
            return content
        return content._replace(seen=((Span(0, num_terms(content.tensor, self.model)), ONE),))

    def require_complete(self, *operands: list[Piece]) -> None:
        """Raise where q, k or v are sums, as those of layers with adapters are, and lack terms."""
        for content in (piece.content for pieces in operands for piece in pieces):
            if is_sum(content.tensor, self.model) and not self.complete(content):
                raise ScheduleError(f"{brief(content)} is not complete yet")

    def _same_keys(self, k: list[Piece], v: list[Piece]) -> None:
        for x, y in common(k, v):
            if (x.content.tensor, y.content.tensor) != ("k", "v") or x.content[1:3] != y.content[1:3]:
                raise ScheduleError(f"{brief(x.content)} and {brief(y.content)} used as keys and values of one block")

    def _at_parts(self, q: list[Piece], k: list[Piece], band: Local) -> _Operands:
        """Return the operands of a block; cut where its parts begin and end if these leave out some of what the mask
        keeps, which is attended elsewhere then.
        """
        whole = _Operands(q, k, band, near=_near(self.mask, q, k, band))
        if isinstance(band, Band) or all(
            _keeps(self.mask, band, (x.content.tokens, y.content.tokens), (x.box[TOKENS][0], y.box[TOKENS][0]), whole)
            for x, others in zip(q, whole.near, strict=True)
            for y in others
        ):
            return whole
        rows, columns = (
            sorted({edge for span in spans for edge in (span.start, span.stop)})
            for spans in ([part.rows for part in band], [part.columns for part in band])
        )
        return _Operands(_cut(q, rows), _cut(k, columns), band, apart=True)

    def _blocks(self, block: _Operands, ratio: int) -> Iterator[tuple[Piece, list[Piece], int]]:
        """Yield pieces of q, each with the pieces of k for all of its heads and with the number, within the group of
        its key/value head, of the query head that meets each first; checks that the heads belong together and that the
        band keeps just what the mask keeps.
        """
        heads = {key.box[HEADS] for key in block.k}
        for number, whole in enumerate(block.q):
            k, locals_ = block.met_by(number)
            if whole.content.tensor != "q":
                raise ScheduleError(f"{brief(whole.content)} used as queries")
            low, high = whole.box[HEADS]
            cuts = {low, high}.union(*[(ratio * first, ratio * last) for first, last in heads])
            if ratio < self.group:  # so heads that follow each other in memory may be of two groups
                cuts |= {low + edge for edge in self._ends_of_groups(whole.content.heads)}
            edges = [low, high] if len(cuts) == 2 else sorted(cut for cut in cuts if low <= cut <= high)
            for first, last in pairwise(edges):
                piece = whole.clipped(replaced(whole.box, HEADS, (first, last)))
                assert piece is not None
                found = [
                    (key, local)
                    for key, local in zip(k, locals_, strict=True)
                    if key.box[HEADS][0] * ratio <= first
                    and last <= key.box[HEADS][1] * ratio
                    and meet(key.box[BATCH], whole.box[BATCH])
                ]
                offsets = set()
                for key, local in found:
                    mine, other = piece.content, key.content
                    if key.box[BATCH] != piece.box[BATCH] or (mine.layer, mine.batch) != (other.layer, other.batch):
                        raise ScheduleError(f"{brief(piece.content)} attends to another sequence or layer")
                    offset = _head_offset_of_all(
                        (piece.content.heads, key.content.heads),
                        (first - key.box[HEADS][0] * ratio, ratio, self.group),
                        self.members,
                    )
                    if offset is None:
                        raise ScheduleError(
                            f"{brief(piece.content)} attends with the wrong key/value heads {spell(key.content.heads)}"
                        )
                    offsets.add(offset)
                    row, column = piece.box[TOKENS][0], key.box[TOKENS][0]
                    if not _keeps(self.mask, local, (mine.tokens, other.tokens), (row, column), block):
                        raise ScheduleError(
                            f"{brief(piece.content)} attends to keys {spell(key.content.tokens)} with {local}, "
                            f"which is not what the mask {self.mask} keeps of them"
                        )
                if len(offsets) != 1 and (found or (k and not block.apart)):
                    raise ScheduleError(f"{brief(piece.content)} attends to no one set of key/value heads")
                yield piece, [key for key, _ in found], offsets.pop() if offsets else 0

    def _ends_of_groups(self, heads: Span) -> range:
        """Return behind how many of some query heads a group of those of one key/value head ends."""
        return range(-heads.start % self.group, heads.size, self.group)


class _Operands(NamedTuple):
    """Queries and keys of a block."""

    q: list[Piece]
    k: list[Piece]
    band: Local
    near: Sequence[list[Piece]] = ()
    """Per piece of the queries those of the keys that mask or band may keep some of; the others meet in neither."""
    apart: bool = False
    """Whether only pairs within one part are attended here: pieces then end where parts do."""

    @property
    def size(self) -> tuple[int, int]:
        """How many rows and columns hold something."""
        return _extent(self.q), _extent(self.k)

    def met_by(self, number: int) -> tuple[list[Piece], list[Local]]:
        """Return the keys that a piece of the queries attends to, and by which mask each."""
        if not self.apart:
            return self.near[number], [self.band] * len(self.near[number])
        assert not isinstance(self.band, Band)
        first, last = self.q[number].box[TOKENS]
        found = [
            (key, (part,))
            for part in self.band
            if part.rows.start <= first and last <= part.rows.stop
            for key in self.k
            if part.columns.start <= key.box[TOKENS][0] and key.box[TOKENS][1] <= part.columns.stop
        ]
        return [key for key, _ in found], [local for _, local in found]


def _near(mask: Mask, q: list[Piece], k: list[Piece], band: Local) -> list[list[Piece]]:
    """Return per piece of q those of k that share a document with it, or meet it in a part of the band; all of them
    where either is not known of each document by itself.
    """
    if not isinstance(mask, Documents) or isinstance(band, Band):
        return [k] * len(q)
    if any(piece.content.tokens.stop > FAR // 2 for piece in (*q, *k)):
        return [k] * len(q)
    by_document: dict[int, list[int]] = defaultdict(list)
    for number, piece in enumerate(k):
        for document in _documents(mask, piece.content.tokens):
            by_document[document].append(number)
    places = sorted((*piece.box[TOKENS], number) for number, piece in enumerate(k))
    longest = max((stop - start for start, stop, _ in places), default=0)
    in_order = sorted(band, key=lambda part: part.rows)
    firsts, most = [part.rows.start for part in in_order], max((part.rows.size for part in in_order), default=0)
    found = []
    for piece in q:
        numbers = {n for document in _documents(mask, piece.content.tokens) for n in by_document[document]}
        first, last = piece.box[TOKENS]
        for part in in_order[bisect_right(firsts, first - most) : bisect_left(firsts, last)]:
            if part.rows.stop > first:
                at = bisect_left(places, (part.columns.start - longest,))
                for start, stop, number in places[at:]:
                    if start >= part.columns.stop:
                        break
                    if stop > part.columns.start:
                        numbers.add(number)
        found.append([k[number] for number in sorted(numbers)])
    return found


def _documents(mask: Documents, tokens: Span) -> range:
    """Return the numbers of the documents from that of the first token to that of the last."""
    return range(bisect_right(mask.edges, tokens.start), bisect_right(mask.edges, tokens.stop - tokens.step) + 1)


def _cut(pieces: list[Piece], edges: list[int]) -> list[Piece]:
    """Return pieces cut along the tokens."""
    found: list[Piece] = []
    for piece in pieces:
        start, stop = piece.box[TOKENS]
        cuts = [start, *edges[bisect_right(edges, start) : bisect_left(edges, stop)], stop]
        found += [one for cut in pairwise(cuts) if (one := piece.clipped(replaced(piece.box, TOKENS, cut)))]
    return found


def _extent(pieces: list[Piece]) -> int:
    """Return how many rows or columns hold something."""
    return max((piece.box[TOKENS][1] for piece in pieces), default=0)


def _keeps(mask: Mask, local: Local, tokens: tuple[Span, Span], at: tuple[int, int], block: _Operands) -> bool:
    """Return whether a part of a block keeps what the mask keeps of tokens that lie at a row and a column; raises
    Unclassed where that depends on the member of a class.
    """
    if max(tokens[0].stop, tokens[1].stop) > FAR // 2:
        raise Unclassed
    if isinstance(mask, Band) and isinstance(local, Band):
        return keeps_mask(mask, local, *tokens, at[0] - at[1])
    if isinstance(local, Band):
        rows, columns = block.size
        local = (DocumentBlock(Span(0, rows), Span(0, columns), local),)
    return keeps_parts(mask, local, *tokens, *at)


def _in_memory_order(keys: list[Piece]) -> Seen:
    """Return the keys of a block as they lie in memory."""
    return tuple((key.content.tokens, ONE) for key in sorted(keys, key=lambda key: key.box[TOKENS]))


@lru_cache(maxsize=65536)
def _pairs(mask: Mask, queries: Span, keys: Span) -> int:
    return count_pairs(mask, queries, keys)


@lru_cache(maxsize=4096)
def _head_offset_of_all(heads: tuple[Span, Span], by: tuple[int, int, int], members: int) -> int | None:
    """Return ``_head_offset``, of all members of a class as one; None where heads of any do not belong together."""
    q_heads, kv_heads = heads
    found = [
        _head_offset(span_of_member(q_heads, member), span_of_member(kv_heads, member), *by)
        for member in range(members)
    ]
    known = [offset for offset in found if offset is not None]
    return position(known) if len(known) == members else None


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
