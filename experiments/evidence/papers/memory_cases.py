"""Memory that others measured, beside the memory walk: whether a step ran, what it held, and the longest context.

A case file has such cases in groups of their own. Steps are not simulated for them: the walk needs no times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from experiments.evidence.papers.cases import CaseFile, MemoryGroup, selected
from experiments.evidence.workers import called
from sim.accounts.memory import TERMS
from sim.base.errors import InputError, unknown
from sim.base.units import length, percent, size
from sim.engine.results.room import Room
from sim.plan.longest import longest
from sim.plan.search.room import held_behind_passes, room
from sim.setup import names
from sim.setup.setup import Setup

Judgement = Literal["right", "at the limit", "wrong"]
_GIB = 2**30
_WITHIN = 2.0
"""A longest context is right within one power of two."""
BEHIND = "behind the passes"
"""In place of terms: the peak while a step sums, clips, updates and gathers, which some software logs."""
_MOST = 16
"""Up to how many times the longest context that was measured a longer one is looked for."""


class MemoryCase(NamedTuple):
    """One step, and what is known of its memory."""

    group: MemoryGroup
    setup: Setup
    about: str
    """What it is called where it was measured."""
    ran: bool | None
    """Whether it did, or was out of memory; None where it is not asked."""
    measured_bytes: dict[str, int]
    """By terms: of one, of several joined by " + ", or of all, the peak; or ``BEHIND``."""
    longest: int | None = None
    """Tokens of the longest context that ran, which the setup has then; None where it is not asked."""


class MemoryFound(NamedTuple):
    """A case, and the memory that is predicted."""

    case: MemoryCase
    room: Room
    longest: int | None = None
    """Tokens of the longest context that fits, where it is asked."""
    behind_bytes: int = 0
    """The peak behind the passes, where it is asked."""

    @property
    def judgement(self) -> Judgement:
        """Whether it was predicted to run, where it is asked."""
        fits = self.room.fits
        return "at the limit" if fits is None else "right" if fits is self.case.ran else "wrong"

    @property
    def predicted_bytes(self) -> dict[str, int]:
        """What is predicted of all that was measured."""
        terms = {str(term): nbytes for term, nbytes in self.room.terms.items()} | {BEHIND: self.behind_bytes}
        return {what: sum([terms[term] for term in _terms(what)]) for what in self.case.measured_bytes}

    @property
    def errors(self) -> dict[str, float]:
        """Predicted over measured, minus 1."""
        return {what: found / self.case.measured_bytes[what] - 1 for what, found in self.predicted_bytes.items()}

    @property
    def ratio(self) -> float | None:
        """Longest context, predicted over measured."""
        return None if self.longest is None or not self.case.longest else self.longest / self.case.longest


def memory_cases(file: CaseFile) -> list[MemoryCase]:
    """Return the cases of a file that are of memory; raises InputError that names what is wrong."""
    return [_case(file, group, case) for group in file.memory for case in group.cases]


def _case(file: CaseFile, group: MemoryGroup, case: dict[str, object]) -> MemoryCase:
    where = f"case file {file.title!r}, memory {group.name!r}"
    fields = dict(case)
    about, ran, measured, tokens = (fields.pop(key, None) for key in ("about", "ran", "measured_gib", "longest"))
    if not isinstance(ran, bool | None) or (ran is None and not measured and tokens is None):
        raise InputError(
            f"{where}: {case} says neither ran = true or false nor measured_gib = {{ TERM = GIB }} nor longest = LENGTH"
        )
    if tokens is not None and "seq" in fields:
        raise InputError(f"{where}: {case} says both longest and seq: longest is the length; leave out seq")
    if not isinstance(measured, dict | None) or not all(
        isinstance(gib, int | float) and gib > 0 for gib in (measured or {}).values()
    ):
        raise InputError(f"{where}: measured_gib is {measured}: expected sizes above 0 by term")
    for term in (term for what in measured or {} for term in _terms(what)):
        if term not in {*TERMS, BEHIND}:
            raise unknown("term", term, [*TERMS, "peak", BEHIND], where)
    setup = selected(file, fields if tokens is None else fields | {"seq": tokens}, group.set, where)
    if setup.scope != "step":
        raise InputError(f"{where}: scope is {setup.scope!r}: memory is that of a training step; set scope to step")
    try:
        setup.resolved().built()
    except InputError as error:
        raise InputError(f"{where}: {case}: {error}") from error
    measured_longest = None if tokens is None else names.tokens("longest", setup.seq)
    sizes = {what: round(gib * _GIB) for what, gib in (measured or {}).items()}
    return MemoryCase(group, setup, str(about or names.schedule_name(setup.played)), ran, sizes, measured_longest)


def _terms(what: str) -> list[str]:
    return list(TERMS) if what == "peak" else [term.strip() for term in what.split("+")]


def predicted_memory(cases: Sequence[MemoryCase]) -> list[MemoryFound]:
    """Return what is predicted of each case, on all cores where there are several."""
    if len(cases) < 2:
        return list(map(_predicted, cases))
    return list(called(_predicted, cases, lambda case: f"memory of {case.about}, S {case.setup.seq}"))


def _predicted(case: MemoryCase) -> MemoryFound:
    most = longest(case.setup, _MOST * case.longest) if case.longest else None
    found = case.setup.resolved()
    behind = held_behind_passes(found) if BEHIND in case.measured_bytes else 0
    return MemoryFound(case, room(found), most, behind)


MARK_HEADS = ("memory", "case", "S", "measured", "predicted", "left", "verdict")
"""Of the table of steps that ran, or were out of memory."""
SIZE_HEADS = ("memory", "case", "S", "terms", "measured", "predicted", "error", "target")
"""Of the table of what was measured of a step's memory."""
LONGEST_HEADS = ("memory", "case", "measured longest", "predicted", "ratio", "within one power of two")
"""Of the table of longest contexts."""


def memory_tables(found: Sequence[MemoryFound]) -> list[tuple[Sequence[str], list[list[str]]]]:
    """Return what steps with known memory say, as heads and rows of tables; none without such steps."""
    tables = [(MARK_HEADS, mark_rows(found)), (SIZE_HEADS, size_rows(found)), (LONGEST_HEADS, longest_rows(found))]
    return [(heads, rows) for heads, rows in tables if rows]


def mark_rows(found: Sequence[MemoryFound]) -> list[list[str]]:
    """Return a row for each step that ran or did not, and one for all."""
    marks = [one for one in found if one.case.ran is not None]
    rows = [
        [
            *_named(one.case),
            "ran" if one.case.ran else "out of memory",
            {True: "fits", False: "does not", None: "at the limit"}[one.room.fits],
            f"{'-' if one.room.free_bytes < 0 else ''}{size(abs(one.room.free_bytes))} of {one.room.tightest.memory}",
            one.judgement,
        ]
        for one in marks
    ]
    count = Counter(one.judgement for one in marks)
    total = f"{count['right']} of {len(marks)} right, {count['at the limit']} at the limit, {count['wrong']} wrong"
    return [*rows, ["all", "", "", "", "", "", total]] if marks else []


def size_rows(found: Sequence[MemoryFound]) -> list[list[str]]:
    """Return a row for each part of a step's memory that was measured."""
    return [
        [
            *_named(one.case),
            what,
            size(measured),
            size(one.predicted_bytes[what]),
            percent(one.errors[what]),
            _target(one.case.group.target, one.errors[what]),
        ]
        for one in found
        for what, measured in one.case.measured_bytes.items()
    ]


def longest_rows(found: Sequence[MemoryFound]) -> list[list[str]]:
    """Return a row for each longest context that was measured, and one for all."""
    asked = [(one, ratio) for one in found if (ratio := one.ratio) is not None]
    right = [1 / _WITHIN <= ratio <= _WITHIN for _, ratio in asked]
    rows = [
        [*_named(one.case), length(one.longest or 0), f"{ratio:.2f}", "right" if within else "wrong"]
        for (one, ratio), within in zip(asked, right, strict=True)
    ]
    return [*rows, ["all", "", "", "", "", f"{sum(right)} of {len(right)} right"]] if asked else []


def _target(target: float | None, error: float) -> str:
    return "" if target is None else f"{100 * target:g} %" + (": missed" if abs(error) > target else "")


def _named(case: MemoryCase) -> list[str]:
    return [case.group.name, case.about, length(names.tokens("seq", case.setup.seq))]
