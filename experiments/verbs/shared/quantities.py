"""Figures that a user has measured, as they are typed: 41s, 350ms, 61GiB, 41%."""

from __future__ import annotations

import re

from sim.base.errors import InputError

_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}
_BYTES = {"": 1.0, "B": 1.0} | {
    f"{prefix}{unit}": float(base**power)
    for power, prefix in enumerate("KMGT", 1)
    for unit, base in (("iB", 1024), ("B", 1000))
}


def read_seconds(field: str, text: str) -> float:
    """Return seconds: 41, 41s, 350ms; raises InputError for anything else.

    >>> read_seconds("step_time", "2min")
    120.0
    """
    return _read(field, text, _SECONDS, "a time above 0 such as 41s or 350ms")


def read_bytes(field: str, text: str) -> float:
    """Return bytes: 61GiB (2^30), 65GB (10^9)."""
    return _read(field, text, _BYTES, "a size above 0 such as 61GiB or 65GB")


def read_share(field: str, text: str) -> float:
    """Return a share: 41% or 0.41."""
    return _read(field, text, {"": 1.0, "%": 0.01}, "a share above 0 such as 0.41 or 41%")


def read_count(field: str, text: str) -> int:
    """Return a whole number: 8."""
    if not re.fullmatch(r"\s*[1-9][0-9]{0,8}\s*", text):
        raise InputError(f"`{field}` {text}: expected whole numbers of 1 or more, such as 8,16,32")
    return int(text)


def read_prices(text: str, cluster: str) -> dict[str, float]:
    """Return what a GPU-hour costs by cluster: 2.5 of one, or hgx-h100=2.5,dgx-a100=1.3 of several.

    >>> read_prices("2.5", "hgx-h100"), read_prices("a=2,b=1.5/GPU-h", "a")
    ({'hgx-h100': 2.5}, {'a': 2.0, 'b': 1.5})
    """
    found = dict[str, float]()
    for part in text.split(","):
        name, equals, value = part.rpartition("=")
        expected = "prices of a GPU-hour above 0: 2.5, or CLUSTER=2.5,CLUSTER=1.3"
        found[name.strip() if equals else cluster] = _read("price", value, {"": 1.0, "/GPU-h": 1.0}, expected)
    return found


def _read(field: str, text: str, units: dict[str, float], expected: str) -> float:
    match = re.fullmatch(r"([0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]{1,2})?)\s*([A-Za-z%/-]*)", text.strip())
    value = float(match[1]) * units[match[2]] if match and match[2] in units else 0.0
    if not 0 < value < float("inf"):
        raise InputError(f"`{field}` {text}: expected {expected}")
    return value
