"""What all described parts of a machine have in common: strict structs, and the ranges of their figures."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Positive = Annotated[float, Meta(gt=1e-30, lt=1e30)]
"""Neither so small nor so large that a step's time overflows."""
NotNegative = Annotated[float, Meta(ge=0, lt=1e30)]
Count = Annotated[int, Meta(ge=1, le=2**16)]
"""Of devices, or of parts of one."""
Bytes = Annotated[int, Meta(ge=1, le=2**60)]


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A described thing: immutable, keyword-only, and strict about its keys."""
