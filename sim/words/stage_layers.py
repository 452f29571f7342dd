"""How many layers each chunk of a pipeline has, as a text: 15,16,16,15, or 0,1*126,0 for 126 chunks of one between two
that have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

_MOST_CHUNKS = 10_000
"""No text makes more: models have hundreds of layers."""
_SHORT = 4
"""As many chunks that are equal are written as a product; fewer are easier to read one by one."""


def written_out(text: str) -> str:
    """Return a text without products; as it is where these are no numbers, which who cuts layers refuses.

    >>> written_out("0,1*3,0"), written_out("15,17"), written_out("1*a")
    ('0,1,1,1,0', '15,17', '1*a')
    """
    if "*" not in text:
        return text
    found = list[str]()
    for part in text.split(","):
        layers, times, count = part.partition("*")
        if times and not (count.strip().isdecimal() and 0 < int(count) <= _MOST_CHUNKS):
            return text
        found += [layers.strip()] * (int(count) if times else 1)
    return ",".join(found)


def layers_text(split: Sequence[int]) -> str:
    """Return the text of some chunks, with many equal ones as a product.

    >>> layers_text([0, *[1] * 126, 0]), layers_text([7, 8, 8, 7])
    ('0,1*126,0', '7,8,8,7')
    """
    found = list[str]()
    for layers, alike in groupby(split):
        count = len([*alike])
        found += [f"{layers}*{count}"] if count >= _SHORT else [f"{layers}"] * count
    return ",".join(found)
