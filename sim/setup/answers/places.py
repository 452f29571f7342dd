"""What rows of several places answer: which choice is fastest at each of them, in a sentence.

A choice is what a user may take freely to train the same: a schedule, a stack, degrees, options of a schedule. A place
is all else that is varied: the length, the model, the GPUs, figures of the machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from sim.base.units import FEW, digits_within, length, number, seconds, seconds_between, size
from sim.engine.intervals.learned import shipped
from sim.engine.intervals.regime import Regime
from sim.setup.names import scope_title, tokens

Row = Mapping[str, Any]
"""What is varied, and figures as ``explore`` has them."""

_CHOICES = ("schedule", "stack", "ulysses_degree", "ring_degree", "cp", "tp_degree", "pp_degree", "dp_degree")
_AT = {"seq": "at", "model": "for", "gpus": "on", "nodes": "on", "cluster": "on"}
_COUNTED = {"gpus": "GPU", "nodes": "node"}
_MOST = 6
"""Places that a sentence names of one winner."""


class Won(NamedTuple):
    """Who is fastest at a place."""

    place: str
    choice: str
    row: int
    """Its number."""
    tied: tuple[str, ...]
    """Others that may be as fast."""


def is_choice(key: str) -> bool:
    """Return whether a key that is varied is a choice."""
    return key in _CHOICES or key.startswith("schedule.")


def place_of(row: Row, keys: Sequence[str]) -> str:
    """Return the place of a row: its values of the varied keys that are no choices.

    >>> place_of({"seq": "65536", "gpus": 8, "schedule": "ring"}, ["gpus", "seq", "schedule"])
    'at 64K on 8 GPUs'
    """
    places = [key for key in keys if not is_choice(key)]
    known = [key for key in _AT if key in places]
    told = [f"{_AT[key]} {shown(key, row[key])}" for key in known]
    told += [f"at {key} {row[key]}" for key in places if key not in known]
    return " ".join(told)


def choice_of(row: Row, keys: Sequence[str], name: str) -> str:
    """Return the choice of a row: its values of the keys that are choices; ``name`` is the schedule or stack where none
    varies.

    >>> choice_of({"stack": "alst", "cp": 4}, ["stack", "cp"], "ring")
    'alst (cp 4)'
    """
    first = next((key for key in ("schedule", "stack") if key in keys), "")
    others = ", ".join(f"{key} {row[key]}" for key in keys if is_choice(key) and key != first)
    return f"{row[first] if first else name}{f' ({others})' if others else ''}"


def shown(key: str, value: Any) -> str:
    """Return a value that is varied as people say it."""
    if key == "seq":
        return length(tokens(key, value))
    return f"{value} {_COUNTED[key]}{'s' if str(value) != '1' else ''}" if key in _COUNTED else str(value)


def won(rows: Sequence[Row], keys: Sequence[str], name: str) -> list[Won]:
    """Return who is fastest for its tokens at each place, of what fits. Places where nothing fits are left out."""
    found = []
    for place, numbers in _places(rows, keys).items():
        able = sorted((number for number in numbers if is_able(rows[number])), key=lambda one: token_s(rows[one]))
        if able:
            first, *others = able
            ties = (one for one in others if tied(token_s(rows[one]) / token_s(rows[first]), rows[one]["bound_by"]))
            names = tuple(choice_of(rows[one], keys, name) for one in ties)
            found.append(Won(place, choice_of(rows[first], keys, name), first, names))
    return found


def best(rows: Sequence[Row], keys: Sequence[str], name: str, *, scope: str = "step", layers: int = 1) -> str:
    """Return what rows say in a sentence: the step where they have one place, else who is fastest at which place.

    >>> found = {"tokens_per_s_per_gpu": 9.0, "fits": "yes", "bound_by": "compute", "error": ""}
    >>> rows = [{"seq": seq, "step_time_s": s, **found} for seq, s in (("64K", 2.0), ("128K", 6.5))]
    >>> best(rows, ["seq"], "zigzag")
    'Zigzag takes 2 s a step at 64K, 6.5 s at 128K'
    """
    winners, places = won(rows, keys, name), _places(rows, keys)
    of = "a step" if scope == "step" else f"for {scope_title(scope, layers)}"
    does = "trains fastest" if scope == "step" else "is fastest"
    if not all(_alike([rows[number_] for number_ in numbers if is_able(rows[number_])]) for numbers in places.values()):
        does = "needs least GPU time for a token"
    if not winners:
        return _nothing(rows, keys, name)
    if len(places) == 1:
        return _at_one(rows, keys, winners[0], does, of, name)
    said = ", ".join(_clauses(rows, keys, name, winners, does, of)) + _nowhere(rows, places, winners)
    return said[0].upper() + said[1:]


def _clauses(
    rows: Sequence[Row], keys: Sequence[str], name: str, winners: Sequence[Won], does: str, of: str
) -> list[str]:
    """Return for each winner the places where it wins; only the first clause says what it does, and of what."""
    alone = len({choice_of(row, keys, name) for row in rows}) == 1
    clauses: list[str] = []
    for choice in dict.fromkeys(one.choice for one in winners):
        theirs = [one for one in winners if one.choice == choice]
        verb = "" if clauses else " takes" if alone else f" {does}"
        clauses.append(f"{choice}{verb} {_at(rows, theirs, of if not clauses else '', alone=alone)}")
    return clauses


def _nowhere(rows: Sequence[Row], places: Mapping[str, Sequence[int]], winners: Sequence[Won]) -> str:
    """Return the places where nothing fits, and those where nothing can be played."""
    never = [place for place in places if place not in {one.place for one in winners}]
    cannot = [place for place in never if all(rows[number_]["error"] for number_ in places[place])]
    said = ""
    for what, where in (("fits", [one for one in never if one not in cannot]), ("can be played", cannot)):
        if where:
            said += f"; nothing {what} {', '.join(where) if len(where) <= _MOST else f'at {len(where)} places'}"
    return said


def token_s(row: Row) -> float:
    """Return the seconds of a GPU for a token."""
    return 1 / float(row["tokens_per_s_per_gpu"])


def tied(ratio: float, bound_by: str | None) -> bool | None:
    """Return whether two steps are tied: their ratio is no larger than what nine of ten predicted ratios of measured
    steps were off by, with the same bound as the slower step (``bound_by``). None where no such steps were measured.
    """
    apart = _apart(_regime(bound_by or ""))
    return None if apart is None else math.log(ratio) <= apart


@cache
def _apart(regime: Regime) -> float | None:
    return shipped().apart(regime)


def _regime(bound_by: str) -> Regime:
    """Return the regime of a step by the figure that bounds it."""
    return "host" if bound_by == "host" else "kernels" if bound_by in {"compute", "hbm", "imbalance"} else "links"


def _places(rows: Sequence[Row], keys: Sequence[str]) -> dict[str, list[int]]:
    """Return the numbers of the rows of each place, in their order."""
    found: dict[str, list[int]] = {}
    for number_, row in enumerate(rows):
        found.setdefault(place_of(row, keys), []).append(number_)
    return found


def is_able(row: Row) -> bool:
    """Return whether a row could be played, and is not known not to fit."""
    return not row["error"] and row["fits"] not in ("no", False)


def _alike(rows: Sequence[Row]) -> bool:
    """Return whether all steps have the same tokens per GPU: then the fastest step is also the fastest for its
    tokens.
    """
    tokens_ = [row["tokens_per_s_per_gpu"] * row["step_time_s"] for row in rows]
    return all(math.isclose(one, tokens_[0]) for one in tokens_)


def _time(row: Row) -> str:
    """Return a step time with the digits that its interval leaves it."""
    low, high = row.get("low_s"), row.get("high_s")
    return seconds(row["step_time_s"], FEW if low is None or high is None else digits_within(low, high))


def _at(rows: Sequence[Row], theirs: Sequence[Won], of: str, *, alone: bool) -> str:
    """Return the times of one choice at its places; ``of`` is said of the first."""
    of = f" {of}" if of else ""
    if len(theirs) > _MOST:
        least, most = (by(theirs, key=lambda one: rows[one.row]["step_time_s"]) for by in (min, max))
        ends = f"{_time(rows[least.row])}{of} ({least.place}) to {_time(rows[most.row])} ({most.place})"
        return f"{ends} over {len(theirs)} places" if alone else f"at {len(theirs)} places, in {ends}"
    told: list[str] = []
    for one in theirs:
        time = f"{_time(rows[one.row])}{'' if told else of}"
        ties = f"; {_listed(one.tied)} {'are' if len(one.tied) > 1 else 'is'} tied" if one.tied else ""
        limit = "; at the limit of memory" if _at_limit(rows[one.row]) else ""
        told.append(f"{time} {one.place}{limit}" if alone else f"{one.place} ({time}{limit}{ties})")
    return ", ".join(told)


def _at_one(rows: Sequence[Row], keys: Sequence[str], first: Won, does: str, of: str, name: str) -> str:
    """Return who is fastest where there is one place, and how far the others are behind."""
    row = rows[first.row]
    able = sorted((number_ for number_, one in enumerate(rows) if is_able(one)), key=lambda one: token_s(rows[one]))
    low, high = row.get("low_s"), row.get("high_s")
    within = "" if low is None or high is None else f" ({seconds_between(low, high)})"
    figures = f"{_time(row)} {of}{within}, {number(row['tokens_per_s_per_gpu'], FEW)} tokens/s/GPU{_left(row)}"
    begins = first.choice[0].upper() + first.choice[1:]
    if len(rows) == 1:
        return f"{begins} takes {figures}"
    only = "" if len(able) == len(rows) else f" of the {len(able)} that fit" if len(able) > 1 else ", and alone fits"
    said = f"{begins} {does}{only}: {figures}"
    if first.tied:
        said += f"; {_listed(first.tied)} {'are' if len(first.tied) > 1 else 'is'} tied"
    behind = [one for one in able[1:] if choice_of(rows[one], keys, name) not in first.tied]
    if behind:
        ratio = token_s(rows[behind[0]]) / token_s(row)
        more = "long" if _alike([row, rows[behind[0]]]) else "much"
        said += f"; {choice_of(rows[behind[0]], keys, name)} takes {number(ratio, FEW)} times as {more}"
    return said


def _left(row: Row) -> str:
    free = row.get("free_bytes")
    if free is None:
        return ""
    left = f"{size(abs(free), FEW)} {'left' if free >= 0 else 'missing'}"
    return f"; at the limit: {left}" if _at_limit(row) else f"; fits with {left}"


def _at_limit(row: Row) -> bool:
    """Return whether memory is not known well enough to say that a row fits. Rows below the scope of a step have no
    such figure.
    """
    return row.get("free_bytes") is not None and row["fits"] in ("at the limit", None)


def _nothing(rows: Sequence[Row], keys: Sequence[str], name: str) -> str:
    """Return that nothing fits, and what comes nearest."""
    played = [row for row in rows if not row["error"]]
    known = [row for row in played if row.get("free_bytes") is not None]
    if not played:
        return f"None of {len(rows)} can be played"
    told = f"{f'none of {len(rows)}' if len(rows) > 1 else 'it does not'} fit{'s' if len(rows) > 1 else ''}"
    if known:
        near = max(known, key=lambda row: float(row["free_bytes"]))
        at = f" {place}" if (place := place_of(near, keys)) else ""
        told += f"; nearest comes {choice_of(near, keys, name)}{at}: {size(-near['free_bytes'], FEW)} missing"
    return told[0].upper() + told[1:]


def _listed(names: Sequence[str]) -> str:
    return " and ".join(", ".join(names).rsplit(", ", 1)) if len(names) > 1 else "".join(names)
