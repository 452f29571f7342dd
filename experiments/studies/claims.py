"""What papers claim of interconnects, each beside what a study finds: ``claims.toml`` has the claims."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from sim.base.errors import InputError
from sim.base.presets import load_toml
from sim.base.units import length

HEADS = ("paper", "claim", "claimed", "verdict", "Longstep finds", "missing")
Range = tuple[float, float]
"""Least and most."""
Verdict = Literal["confirmed", "qualified", "contradicted", "not testable from what is published"]


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A figure that a paper claims, ``low`` to ``high``."""

    paper: str
    source: str
    claim: str
    low: float = -math.inf
    high: float = math.inf
    unit: str
    figure: str = ""
    """STUDY.NAME of the range that a study finds; empty where none has any."""
    missing: str = ""
    """What is not published, or not modelled, without which no figure of a study tests the claim; else empty."""

    def __post_init__(self) -> None:
        """Raise InputError for a range without an end or with its ends reversed, and where nothing is said to test it
        and nothing to be missing.
        """
        if not self.low <= self.high or (math.isinf(self.low) and math.isinf(self.high)):
            raise InputError(f"low {self.low} and high {self.high} of {self.claim!r}: expected one at least, low first")
        if not (self.missing or self.figure):
            raise InputError(f"{self.claim!r} has no figure: name what is missing to test it")

    @property
    def study(self) -> str:
        """Name of the study that the figure is of."""
        return self.figure.partition(".")[0]

    def verdict(self, found: Range | None) -> Verdict:
        """Return what a range found says of the claim: all of it inside confirms it, some of it qualifies it."""
        if self.missing:
            return "not testable from what is published"
        assert found is not None
        low, high = found
        if high < self.low or low > self.high:
            return "contradicted"
        return "confirmed" if self.low <= low and high <= self.high else "qualified"


class Claims(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file."""

    claim: tuple[Claim, ...]


class Judged(NamedTuple):
    """A claim with what was found."""

    claim: Claim
    found: Range | None
    verdict: Verdict

    def cells(self) -> tuple[str, ...]:
        """Return a row of the table."""
        claim = self.claim
        found = f"{said(*self.found, claim.unit)} ({claim.study})" if self.found else "none"
        claimed = said(claim.low, claim.high, claim.unit)
        return f"{claim.paper}, {claim.source}", claim.claim, claimed, self.verdict, found, claim.missing

    def figures(self) -> dict[str, Any]:
        """Return the same as figures; a bound has no other end."""
        bounds = {key: end for key in ("low", "high") if math.isfinite(end := getattr(self.claim, key))}
        texts = {key: getattr(self.claim, key) for key in ("paper", "source", "claim", "unit", "study", "missing")}
        return {**texts, **bounds, "verdict": self.verdict, "found": self.found}


def claims() -> tuple[Claim, ...]:
    """Return all claims, in the order of the file."""
    return load_toml("claims", "claims", Claims, "experiments/studies", "`claims`").claim


def needed() -> list[str]:
    """Return the names of the studies that claims take figures of."""
    return sorted({claim.study for claim in claims()} - {""})


def judged(figures: Mapping[str, Mapping[str, Range]]) -> list[Judged]:
    """Return all claims with their verdicts, by the ``figures`` that studies found."""
    told = []
    for claim in claims():
        study, _, name = claim.figure.partition(".")
        found = figures[study][name] if study else None
        told.append(Judged(claim, found, claim.verdict(found)))
    return told


def markdown(found: Sequence[Judged]) -> str:
    """Return the table of claims for a page."""
    lines = [_row(HEADS), _row("---" for _ in HEADS), *(_row(one.cells()) for one in found)]
    return "\n".join(lines) + "\n"


def said(low: float, high: float, unit: str) -> str:
    """Return a range as people write it."""
    ends = [length(int(end)) if unit == "tokens" else f"{end:.4g}" for end in (low, high) if math.isfinite(end)]
    bound = "at most " if math.isinf(low) else "at least " if math.isinf(high) else ""
    return f"{bound}{' to '.join(dict.fromkeys(ends))} {unit}"


def _row(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"
