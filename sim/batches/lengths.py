"""Lengths of documents: drawn from published histograms, or from a lognormal or uniform distribution.

Every draw takes a numpy Generator: the same seed yields the same batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.base.errors import InputError
from sim.base.presets import load_toml
from sim.words.workload import require_seed

Sample = Callable[[np.random.Generator, int], NDArray[np.int64]]
"""Draws so many lengths, each 1 or more."""

FOLDER = "sim/batches/distributions"
"""Of the histograms that ship."""


class Bin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Documents of ``at_least`` to ``at_most`` tokens."""

    at_least: int
    at_most: int
    documents: float
    """Their number, or share of all documents; only ratios between bins count."""
    tokens: float | None = None
    """Share of all tokens, in the unit of ``documents``; None where the source has none."""


class Histogram(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published distribution of document lengths."""

    source: str
    bins: tuple[Bin, ...]
    mean_tokens: float | None = None
    """Of a document, where ``tokens`` of the bins are given."""

    def __post_init__(self) -> None:
        for one in self.bins:
            if not 1 <= one.at_least <= one.at_most or one.documents <= 0:
                raise ValueError(f"bin {one.at_least} to {one.at_most} with {one.documents} documents: expected rising")


def histogram(name: str) -> Sample:
    """Return what draws from a histogram that ships (magi, prolong, wikipedia, wlb-llm) or from a TOML file.

    Within a bin the density is a power of the length: the one whose mean is that of the bin's documents where the
    source has shares of tokens, else equal shares of every octave. Raises InputError for an unknown name or a bad file.
    """
    found = load_toml("length distribution", name, Histogram, FOLDER, "`lengths`")
    share = np.array([one.documents for one in found.bins])
    edges = [(one.at_least - 0.5, one.at_most + 0.5) for one in found.bins]  # rounding fills both halves
    powers = [_power(found, one) for one in found.bins]

    def sample(rng: np.random.Generator, number: int) -> NDArray[np.int64]:
        drawn = rng.choice(len(edges), size=number, p=share / share.sum())
        at, lengths = rng.random(number), np.empty(number)
        for index, ((low, high), power) in enumerate(zip(edges, powers, strict=True)):
            lengths[drawn == index] = _quantile(low, high, power, at[drawn == index])
        return _whole(lengths)

    return sample


def lognormal(median: float, sigma: float) -> Sample:
    """Return what draws exp(N(ln median, sigma)), rounded, at least 1 token; raises InputError for what is not
    positive.
    """
    if not (median >= 1 and sigma > 0):
        raise InputError(f"`median` {median} and `sigma` {sigma}: expected 1 token or more and above 0")
    return lambda rng, number: _whole(rng.lognormal(np.log(median), sigma, number))


def uniform(at_least: int, at_most: int) -> Sample:
    """Return what draws every length of a range alike; raises InputError for an empty range or one below 1."""
    if not 1 <= at_least <= at_most:
        raise InputError(f"`at_least` {at_least} and `at_most` {at_most}: expected 1 token or more, in this order")
    return lambda rng, number: rng.integers(at_least, at_most, number, dtype=np.int64, endpoint=True)


def scaled(sample: Sample, factor: float) -> Sample:
    """Return what draws lengths times ``factor``, rounded, at least 1 token: as DCP varies its data (§7.1)."""
    if not factor > 0:
        raise InputError(f"`factor` {factor}: expected a number above 0")
    return lambda rng, number: _whole(sample(rng, number) * factor)


def draw(sample: Sample, num_tokens: int, seed: int, longest: int | None = None) -> tuple[int, ...]:
    """Return lengths that sum to ``num_tokens``; the last document is cut to fit.

    ``longest`` cuts every document to so many tokens, as a context limit does. Raises InputError for a size below 1.
    """
    for name, value in (("num_tokens", num_tokens), ("longest", num_tokens if longest is None else longest)):
        if value < 1:
            raise InputError(f"`{name}` {value}: expected a whole number of 1 or more")
    require_seed(seed)
    rng = np.random.default_rng(seed)
    parts: list[NDArray[np.int64]] = []
    left = num_tokens
    while left > 0:
        found = np.minimum(sample(rng, 256), longest or num_tokens)
        parts.append(found)
        left -= int(found.sum())
    lengths = np.concatenate(parts)
    stops = np.cumsum(lengths)
    last = int(np.searchsorted(stops, num_tokens))
    lengths = lengths[: last + 1]
    lengths[last] -= stops[last] - num_tokens
    return tuple(int(size) for size in lengths)


def _whole(lengths: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
    found: NDArray[np.int64] = np.maximum(np.rint(lengths), 1).astype(np.int64)
    return found


def _power(found: Histogram, one: Bin) -> float:
    """Return the exponent p of a density ~ length^p within a bin that gives it the published mean."""
    if one.tokens is None or found.mean_tokens is None:
        return -1.0
    documents = sum(other.documents for other in found.bins)
    tokens = sum(other.tokens or 0.0 for other in found.bins)
    wanted = found.mean_tokens * (one.tokens / tokens) / (one.documents / documents)
    low, high = -_STEEPEST, _STEEPEST
    for _ in range(50):  # the mean rises with the exponent
        middle = (low + high) / 2
        low, high = (middle, high) if _mean(one.at_least, one.at_most, middle) < wanted else (low, middle)
    return (low + high) / 2


_STEEPEST = 60.0
"""A mean near a bin's edge needs a steep density; shares rounded to four digits may ask for more than any."""


def _quantile(low: float, high: float, power: float, at: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return where the density ~ x^power between low and high has ``at`` of its weight below."""
    k, ratio = power + 1, high / low
    found: NDArray[np.float64] = low * (ratio**at if abs(k) < 1e-9 else (1 + at * (ratio**k - 1)) ** (1 / k))
    return found


@functools.lru_cache(maxsize=4096)
def _mean(at_least: int, at_most: int, power: float) -> float:
    middles = (np.arange(512) + 0.5) / 512
    return float(_quantile(at_least - 0.5, at_most + 0.5, power, middles).mean())
