"""Gradients of keys and values of some query heads: where ranks share a key/value head, each has the terms of its own
query heads of that head's group. What is linear in such a gradient is made of its terms, and lacks those of others.
"""

from __future__ import annotations

from sim.base.errors import ScheduleError
from sim.schedule.ir.masks import ONE, Span
from sim.schedule.ir.ops import Accumulate, Gemm, Rope, Scale, TokenKernel, TokenSum
from sim.schedule.ir.tensors import Tensor
from sim.schedule.model.scope import is_sum, tensor_of
from sim.schedule.proof.contents import (
    APART,
    OF_GROUP,
    OF_GROUP_TOKENS,
    Content,
    Piece,
    Seen,
    brief,
    differs,
    last_seen,
)
from sim.schedule.proof.rules.attention import AttentionRules

LINEAR = (Gemm, Rope, Scale, TokenSum)
"""Kernels that are linear in each operand."""


def heads_of(
    op: TokenKernel | Accumulate, operands: list[list[Piece]], rules: AttentionRules
) -> tuple[int, Span] | None:
    """Return which operand of a kernel is a gradient of keys or values of some query heads of their group alone, and
    which these are; None where there is none. Raises ScheduleError where there are several.
    """
    found = [(at, heads) for at, pieces in enumerate(operands) if (heads := _heads(pieces, rules))]
    if len(found) > 1:
        raise ScheduleError(f"{op.label}: two gradients of keys and values that lack query heads meet")
    return found[0] if found and type(op) in LINEAR else None


def as_of_all(pieces: list[Piece], rules: AttentionRules) -> list[Piece]:
    """Return a gradient of keys or values of some query heads as if it were of all of their group."""
    first = pieces[0].content
    everything: Seen = ((Span(0, rules.of_batch(first.batch).seq), Span(0, rules.group)),)
    if first.tensor not in {"dk", "dv"}:
        everything = ((Span(OF_GROUP, OF_GROUP + rules.group), ONE),)
    return [piece._replace(content=piece.content._replace(seen=everything)) for piece in pieces]


def as_of_some(pieces: list[Piece], heads: Span, rules: AttentionRules) -> list[Piece]:
    """Return what was made of a gradient of all query heads of a group as if it were of some."""
    tensor = tensor_of(pieces[0].content.tensor, rules.model)
    return [
        piece._replace(content=piece.content._replace(seen=_of_some(piece, tensor, heads, rules))) for piece in pieces
    ]


def _of_some(piece: Piece, tensor: Tensor, heads: Span, rules: AttentionRules) -> Seen:
    seen = piece.content.seen
    if tensor.kind == "weight gradient":
        return tuple(
            [(tokens.moved(OF_GROUP_TOKENS + head * APART), batch) for head in range(*heads) for tokens, batch in seen]
        )
    if tensor.axes == ("kv_heads",):
        return ((heads.moved(OF_GROUP), ONE),)
    if is_sum(tensor.name, rules.model) and len(seen) == 1 and seen[0][0].size == rules.group:
        return ((Span(seen[0][0].start + heads.start, seen[0][0].start + heads.stop), ONE),)
    raise ScheduleError(f"{brief(piece.content)} of some query heads of a group, where all of them are needed")


def _heads(pieces: list[Piece], rules: AttentionRules) -> Span | None:
    """Return of which query heads of its group a gradient of keys or values is, where it is not of all. Keys that meet
    no queries are of any.
    """
    tensor = tensor_of(pieces[0].content.tensor, rules.model)
    if tensor.kind != "gradient" or tensor.axes != ("kv_heads",):
        return None
    summed = [piece.content for piece in pieces if piece.content.seen or not rules.complete(piece.content)]
    found = {_query_heads(content, rules) for content in summed}
    if len(found) > 1:
        raise ScheduleError(f"{brief(pieces[0].content)}: some of it is not complete yet, or of other query heads")
    heads = found.pop() if found else None
    return None if heads is None or heads.size == rules.group else heads


def _query_heads(content: Content, rules: AttentionRules) -> Span | None:
    """Return of which query heads of its group a gradient of keys or values has all terms; None where it has none, or
    not all of the same heads.
    """
    if last_seen(content) >= OF_GROUP:
        return content.seen[0][0].moved(-OF_GROUP) if len(content.seen) == 1 else None
    heads = {heads for _, heads in content.seen}
    if content.tensor not in {"dk", "dv"} or len(heads) != 1 or differs(content):
        return None
    of_all = tuple([(queries, Span(0, rules.group)) for queries, _ in content.seen])
    return heads.pop() if rules.complete(content._replace(seen=of_all)) else None


def of_all_heads(content: Content, count: int) -> Seen:
    """Return the tokens and sequences that the gradient of a weight is a sum over, of each of so many heads whose terms
    are told apart the same; raises ScheduleError where they are not.
    """
    by_head: dict[int, list[tuple[Span, Span]]] = {}
    for tokens, batch in content.seen:
        head, _ = divmod(tokens.start - OF_GROUP_TOKENS, APART)
        by_head.setdefault(head, []).append((tokens.moved(-OF_GROUP_TOKENS - head * APART), batch))
    first = by_head.get(0)
    if sorted(by_head) != list(range(count)) or any(boxes != first for boxes in by_head.values()):
        raise ScheduleError(f"packs {brief(content)}, a sum over some of {count} heads")
    return tuple(first or ())
