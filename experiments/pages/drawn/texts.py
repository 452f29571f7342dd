"""Texts of drawings: how much room they take, and how they are shortened to fit into less."""

from __future__ import annotations

import textwrap

TEXT_ROW = 16
"""Pixels from one line of a text to the next."""
_CHARACTER = 6.8
"""Width of a character of the plots' 12 pixels, a generous mean: fonts differ."""


def text_width(text: str) -> float:
    """Return about how many pixels a text takes."""
    return _CHARACTER * len(text)


def wrapped(text: str, width: float) -> list[str]:
    """Return a text in lines that are at most so many pixels long; none for no text."""
    return textwrap.wrap(text, int(width / _CHARACTER))


def shortened(text: str, width: float) -> str:
    """Return a text, or as much of it as so many pixels hold."""
    most = int(width / _CHARACTER)
    return text if len(text) <= most else f"{text[: most - 1]}…"
