"""Masks that keep more of a document than one band can say, as DCP was measured with them (arXiv:2510.10620 §7.1).

Each keeps some of what a causal mask keeps, the token itself always. ``parts`` says which, as rectangles.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, NamedTuple, assert_never

import msgspec
from msgspec import Meta

from sim.base.errors import InputError

Number = Annotated[int, Meta(ge=1)]
_MOST_PARTS = 1 << 14
"""Of blocks or answers in a document: each is an object of the schedule."""


class AttentionSink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="lambda"):
    """The first ``sink`` tokens and the last ``window`` ones, the query itself among them (StreamingLLM,
    arXiv:2309.17453 §3; "lambda" in DCP).
    """

    sink: Number
    window: Number

    def __post_init__(self) -> None:
        """Raise InputError for less than one token."""
        _require(sink=self.sink, window=self.window)

    def __str__(self) -> str:
        return f"lambda:{self.sink}:{self.window}"


class CausalBlockwise(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="blockwise"):
    """Of long in-context learning: a block of ``size`` tokens keeps itself, the ``local`` - 1 blocks before it and the
    first ``sink`` ones; the last block, the question, keeps all.
    """

    size: Number
    local: Number
    sink: Number = 1

    def __post_init__(self) -> None:
        """Raise InputError for less than one token or block."""
        _require(size=self.size, local=self.local, sink=self.sink)

    def __str__(self) -> str:
        return f"blockwise:{self.size}:{self.local}:{self.sink}"


class SharedQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="shared-question"):
    """One question with several answers, each ``share`` of the document: an answer keeps the question and itself, as in
    preference training. A document too short for answers of a token is causal.
    """

    answers: Number
    share: float

    def __post_init__(self) -> None:
        """Raise InputError for less than one answer, and where answers leave no question."""
        _require(answers=self.answers)
        if not 0 < self.share * self.answers < 1:
            raise InputError(
                f"`mask` {self}: a share of {self.share:g} for each of {self.answers} answers leaves no question: "
                f"expected above 0 and below {1 / self.answers:.3g}"
            )

    def __str__(self) -> str:
        return f"shared-question:{self.answers}:{self.share}"


Pattern = AttentionSink | CausalBlockwise | SharedQuestion


def _require(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise InputError(f"`{name}` {value}: expected a whole number of 1 or more")


class Part(NamedTuple):
    """Queries ``begin`` to ``end`` of a document x its keys ``first`` to ``last``, all exclusive, of which no key later
    than the query is kept, and none more than ``left`` tokens before it (None is no limit).
    """

    begin: int
    end: int
    first: int
    last: int
    left: int | None = None


@lru_cache(maxsize=4096)
def parts(pattern: Pattern, size: int) -> tuple[Part, ...]:
    """Return what a document of ``size`` tokens keeps of itself, by the first query; no two parts overlap. Raises
    InputError for blocks or answers beyond number.

    >>> parts(AttentionSink(sink=2, window=3), 8)
    (Part(begin=0, end=2, first=0, last=2, left=None), Part(begin=2, end=8, first=0, last=2, left=None), \
Part(begin=2, end=8, first=2, last=8, left=2))
    """
    if isinstance(pattern, AttentionSink):
        edge = min(pattern.sink, size)
        found = [Part(0, edge, 0, edge), Part(edge, size, 0, edge), Part(edge, size, edge, size, pattern.window - 1)]
    elif isinstance(pattern, CausalBlockwise):
        found = _of_blocks(pattern, size)
    elif isinstance(pattern, SharedQuestion):
        found = _of_answers(pattern, size)
    else:
        assert_never(pattern)
    return tuple(part for part in found if part.begin < part.end and part.first < part.last)


def _of_blocks(pattern: CausalBlockwise, size: int) -> list[Part]:
    found = []
    _require_few(pattern, "blocks", -(-size // pattern.size), size)
    edge = min(pattern.sink * pattern.size, size)
    for begin in range(0, size, pattern.size):
        end = min(begin + pattern.size, size)
        near = 0 if end == size else max(0, begin - (pattern.local - 1) * pattern.size)
        far = [Part(begin, end, 0, edge)] if near > edge else []
        found += [*far, Part(begin, end, near if far else 0, end)]
    return found


def _require_few(pattern: Pattern, what: str, count: int, size: int) -> None:
    if count > _MOST_PARTS:
        raise InputError(
            f"`mask` {pattern}: {count} {what} in a document of {size} tokens: expected at most {_MOST_PARTS}; take "
            f"fewer"
        )


def _of_answers(pattern: SharedQuestion, size: int) -> list[Part]:
    answer = int(size * pattern.share)
    if not answer:
        return [Part(0, size, 0, size)]
    _require_few(pattern, "answers", pattern.answers, size)
    edge = size - pattern.answers * answer
    found = [Part(0, edge, 0, edge)]
    for begin in range(edge, size, answer):
        found += [Part(begin, begin + answer, 0, edge), Part(begin, begin + answer, begin, begin + answer)]
    return found
