"""How figures are written for people: times, sizes, lengths and shares with their units."""

from __future__ import annotations

import math

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
DIGITS, FEW = 4, 3
"""Of figures in tables, and of those in sentences that are not known to a hundredth."""


def seconds(value: float, digits: int = DIGITS) -> str:
    """Return a time with a fitting unit: 12345 s, 1.234 s, 12.34 ms, 56.7 us."""
    if digits == DIGITS and abs(value) >= 1e4:
        return f"{value:.0f} s"
    scale, unit = _time_unit(value)
    return f"{number(value / scale, digits)} {unit}"


def seconds_between(low: float, high: float) -> str:
    """Return an interval of time to a tenth of its width or so, as no further digit says anything.

    >>> seconds_between(60.73, 86.41), seconds_between(5.739, 7.727), seconds_between(908.1, 1307.0)
    ('61 to 86 s', '5.7 to 7.7 s', '910 to 1310 s')
    """
    scale, unit = _time_unit(high)
    if not high > low:
        return f"{number(low / scale)} to {number(high / scale)} {unit}"
    places = 1 - math.floor(math.log10((high - low) / scale))
    ends = (f"{round(end / scale, places):.{max(places, 0)}f}" for end in (low, high))
    return f"{' to '.join(ends)} {unit}"


def digits_within(low: float, high: float) -> int:
    """Return how many digits a figure deserves that lies between these: three, and four where they are near."""
    return DIGITS if high < 1.02 * low else FEW


def number(value: float, digits: int = DIGITS) -> str:
    """Return so many digits of a number, and no exponent where it is of a common size.

    >>> number(1066.9, 3), number(0.01234, 3), number(70.0, 3)
    ('1070', '0.0123', '70')
    """
    return f"{float(f'{value:.{digits}g}'):.12g}"


def _time_unit(value: float) -> tuple[float, str]:
    return next((one for one in _TIMES if abs(value) >= one[0]), _TIMES[-1])


def size(nbytes: float, digits: int = DIGITS) -> str:
    """Return a size in TiB = 2^40 B, GiB, MiB or KiB."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 2**power:
            return f"{number(nbytes / 2**power, digits)} {unit}"
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
