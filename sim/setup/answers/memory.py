"""What fills the memory of a training step: a sentence, and its terms with what lies beside them."""

from __future__ import annotations

from typing import Any

from sim.base.errors import InputError
from sim.base.units import FEW, size
from sim.engine.results.room import Limit
from sim.setup.answers.table import Table
from sim.setup.played import PlayedStep

MOST = 3
"""Terms that the sentence names, the largest first."""
_ALLOCATED, _BESIDE = "allocated", "beside it"


def what_fills(prediction: PlayedStep) -> str:
    """Return in one sentence what most of the peak is for, and what is left. Raises InputError below the scope of a
    step.

    >>> from sim.setup.predict import predict
    >>> print(what_fills(predict("zigzag", seq="64K", layers=2)).partition(", most")[0])
    7.92 GiB is allocated
    """
    held = _held(prediction)
    terms = [row for row in memory_terms(prediction) if row["is"] == _ALLOCATED]
    *others, last = [f"{row['what']} ({size(row['bytes'], FEW)})" for row in terms[:MOST]]
    named = f"{', '.join(others)} and {last}" if others else last
    rest = f"{size(abs(held.free_bytes), FEW)} of {size(held.capacity_bytes, FEW)}"
    left = f"{rest} is left" if held.free_bytes >= 0 else f"{rest} is missing"
    allocated = sum(row["bytes"] for row in memory_terms(prediction) if row["is"] == _ALLOCATED)
    return f"{size(allocated, FEW)} is allocated, most of it for {named}; {left}"


def memory_terms(prediction: PlayedStep) -> Table:
    """Return what a GPU's memory goes to, in bytes: the terms of the peak, the largest first, what no buffer can have,
    and what is left, or missing. Where ranks share a host's memory the terms are of the one that holds most. Raises
    InputError below the scope of a step.
    """
    held = _held(prediction)
    assert prediction.room is not None
    terms = sorted(prediction.room.terms.items(), key=lambda term: -term[1])
    found: list[tuple[str, int, str]] = [(name, nbytes, _ALLOCATED) for name, nbytes in terms if nbytes]
    if held.allocator:
        found.append(("blocks of the allocator", held.held_bytes - sum(prediction.room.terms.values()), _BESIDE))
    if held.reserved_bytes:
        found.append((", ".join(part.name for part in held.beside), held.reserved_bytes, _BESIDE))
    found.append(("", abs(held.free_bytes), "left" if held.free_bytes >= 0 else "missing"))
    rows: list[dict[str, Any]] = [
        {"what": what, "bytes": nbytes, "is": state, "share": nbytes / held.capacity_bytes}
        for what, nbytes, state in found
    ]
    return Table(rows)


def _held(prediction: PlayedStep) -> Limit:
    if prediction.room is None:
        raise InputError("`memory` is told of training steps: set `scope` step")
    return prediction.room.limits[0]
