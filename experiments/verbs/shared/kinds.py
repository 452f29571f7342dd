"""Types of options, spelled so that tyro checks their defaults by itself.

For ``int | None`` and ``tuple[str, ...]`` it calls typeguard, which takes longer to import than tyro does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Optional

import tyro

OptionalInt = Annotated[Optional[int], tyro.conf.arg(metavar="INT")]  # noqa: UP045 - see above
OptionalFloat = Annotated[Optional[float], tyro.conf.arg(metavar="FLOAT")]  # noqa: UP045
OptionalText = Annotated[Optional[str], tyro.conf.arg(metavar="STR")]  # noqa: UP045
OptionalCounts = Annotated[Optional[str], tyro.conf.arg(metavar="INT")]  # noqa: UP045
"""A number, or where several are taken a list of them."""
if TYPE_CHECKING:
    Texts = tuple[str, ...]
else:
    Texts = Annotated[tuple, tyro.conf.UseAppendAction]
"""As often as wanted."""


class Untyped(str):
    """A default that yields to what a file says; what was typed is a plain text."""

    __slots__ = ()
    plain = str.__str__


class UntypedInt(int):
    """The same of a number."""

    __slots__ = ()
    plain = int.__int__
