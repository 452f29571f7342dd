"""Block-sparse masks by name: which blocks of keys each block of queries keeps, of a pattern or of a file.

Which blocks a trained model would choose is in its data. ``topk`` draws them, since a step's time depends on how many
there are and on which ranks they lie, and not on what is in them.
"""

from __future__ import annotations

import random

from sim.base.errors import InputError
from sim.base.presets import load_toml
from sim.words.workload import BlockMask, parse_length

_WHERE = "`block_mask`"
_FORMS = "topk:SIZE:K, lambda:SIZE:FIRST:LAST or FILE.toml"
_NUMBERS = {"topk": 2, "lambda": 3}
"""How many numbers a pattern takes."""
_MOST_BLOCKS = 8192
"""Rows of a mask: each run of kept blocks is an object of the schedule."""


def block_mask_of(given: str | BlockMask, seq: int, mask: str, seed: int) -> BlockMask:
    """Return the block mask of a sequence; raises InputError for a text that is none.

    ``topk:SIZE:K``: each block keeps itself and K - 1 others, drawn without bias among all that the mask leaves, as
    MoBA has a top k of blocks, its own always among them (arXiv:2502.13189 §2.2). ``lambda:SIZE:FIRST:LAST``: the
    first blocks, and the last ones up to its own (arXiv:2309.17453 §3.2; under mask full as many after it).

    >>> block_mask_of("lambda:4:1:2", 20, "causal", 0).kept
    ((0,), (0, 1), (0, 1, 2), (0, 2, 3), (0, 3, 4))
    """
    if isinstance(given, BlockMask):
        return given
    if not isinstance(given, str):
        raise InputError(f"{_WHERE} {given!r}: expected {_FORMS}, or a BlockMask")
    name, *rest = given.split(":")
    if given.endswith(".toml"):
        return load_toml("block mask", given, BlockMask, "", _WHERE)
    if len(rest) != _NUMBERS.get(name):
        raise InputError(f"{_WHERE} {given}: expected {_FORMS}")
    size, *numbers = (parse_length(text, _WHERE) for text in rest)
    count = -(-seq // size)
    if count > _MOST_BLOCKS:
        raise InputError(
            f"{_WHERE} {given}: {count} blocks in {seq} tokens: expected at most {_MOST_BLOCKS}; take larger blocks"
        )
    if name == "topk":
        draw = random.Random(f"{seed} {given} {seq}")
        return BlockMask(size=size, kept=tuple(_drawn(row, count, mask, numbers[0], draw) for row in range(count)))
    first, last = numbers
    kept = []
    for row in range(count):
        until = row + 1 if mask == "causal" else min(count, row + last)
        kept.append(tuple(sorted({*range(min(first, until)), *range(max(0, row - last + 1), until)})))
    return BlockMask(size=size, kept=tuple(kept))


def _drawn(row: int, count: int, mask: str, k: int, draw: random.Random) -> tuple[int, ...]:
    """Return a block's own number and k - 1 others', as far as there are so many."""
    others = [*range(row), *(range(row + 1, count) if mask == "full" else ())]
    return tuple(sorted([row, *draw.sample(others, min(k - 1, len(others)))]))
