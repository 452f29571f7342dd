"""How figures are written for people: times, sizes, lengths and shares with their units."""

from __future__ import annotations


def seconds(value: float) -> str:
    """Return a time with a fitting unit: 12345 s, 1.234 s, 12.34 ms, 56.7 us."""
    if abs(value) >= 1e4:
        return f"{value:.0f} s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value / 1e-6:.4g} us"


def size(nbytes: float) -> str:
    """Return a size in TiB = 2^40 B, GiB, MiB or KiB."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 2**power:
            return f"{nbytes / 2**power:.4g} {unit}"
    return f"{nbytes:g} B"


def length(tokens: int) -> str:
    """Return a length as the field writes it: 8K = 8 x 1024, 1M = 1024^2; other lengths in digits."""
    for factor, unit in ((1024**2, "M"), (1024, "K")):
        if tokens % factor == 0:
            return f"{tokens // factor}{unit}"
    return str(tokens)


def percent(value: float) -> str:
    """Return a signed percentage."""
    return f"{100 * value:+.1f} %"


def rate(value: float, unit: str) -> str:
    """Return a rate with a fitting prefix of its unit, by thousands: 989.4 TFLOP/s, 3.35 TB/s."""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if value >= 10**power:
            return f"{value / 10**power:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"
