"""The map of winners: which schedule or stack trains fastest at each place of two axes, by how much, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from sim.base.errors import InputError
from sim.compare.axes import changed, field_of
from sim.compare.explore import Progress, explore
from sim.compare.portions import Row
from sim.plan.told import asked_step, grounds_of
from sim.setup.answers.answer import Grounds, who_wins
from sim.setup.answers.places import is_able, tied, token_s
from sim.setup.answers.table import Table
from sim.setup.names import text_of, tokens
from sim.setup.setup import Setup

_COMPETITORS = ("schedule", "stack")


def winners(
    setup: Setup,
    competitors: Mapping[str, Sequence[str]],
    across: Mapping[str, Sequence[object] | str],
    *,
    extend: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Table:
    """Return who is fastest for its tokens, a row for each combination of what is varied ``across`` one axis or more.

    ``competitors`` has some schedules or some stacks. A row has the winner and the one behind it, how many times as
    long that takes for a token, what bounds both, and ``why`` in a sentence. They are ``tied`` where that is no more
    than nine of ten ratios of measured steps were off; None where none were measured. What does not fit has lost; where
    nobody is left the winner is empty, and ``why`` is the reason of the first; ``refused`` says of each that cannot be
    played why. With ``extend`` steps are told by few layers and micro-batches, as ``explore`` does it. Raises
    InputError for fewer than two competitors, where none can be played anywhere, and as ``explore`` does.

    >>> layer = Setup(model="llama3-8b", cluster="hgx-h100", scope="layer", layers=1, jitter=0.0)
    >>> found = winners(layer, {"schedule": ["ring", "zigzag"]}, {"seq": "64K,128K"}, jobs=1)
    >>> found.to_dict()["winner"], found[0]["behind"], found[1]["ratio"] > 1
    (['zigzag', 'zigzag'], 'ring', True)
    """
    ((field, names),) = competitors.items() if len(competitors) == 1 else (("", ()),)
    if field not in _COMPETITORS or isinstance(names, str) or len(names) < 2:
        raise InputError(f"`competitors` {dict(competitors)}: expected two or more of {' or '.join(_COMPETITORS)}")
    if not across or field in map(field_of, across):
        raise InputError(f"`across` {dict(across)}: expected keys beside {field} such as seq, each with some values")
    played = explore(setup, {**across, field: names}, intervals=False, extend=extend, jobs=jobs, progress=progress)
    played.require_any()
    keys = [field_of(key) for key in across]
    cells = groupby(played, key=lambda row: {key: row[key] for key in keys})
    found = [(place, judged(list(rows), field)) for place, rows in cells]
    rows = [_numbered(place) | said for place, said in found]
    won = [(place, said["winner"]) for place, said in found if said["winner"]]
    basis = _grounds(setup, {field: names}, *won[-1], extend=extend) if won else None
    return Table(rows).answering(who_wins(rows), basis)


def _grounds(
    setup: Setup, competitors: Mapping[str, Sequence[Any]], place: Mapping[str, Any], winner: str, *, extend: bool
) -> Grounds | None:
    """Return what the winner of a place rests on."""
    ((field, names),) = competitors.items()
    best = next((name for name in names if text_of(name) == winner), None)
    if best is None:
        return None
    there = changed(setup.replace(**{field: best}), {key: text_of(value) for key, value in place.items()})
    return grounds_of(asked_step(there, extend=extend))


def _numbered(place: dict[str, Any]) -> dict[str, Any]:
    """Return what is varied with lengths in tokens."""
    return {key: tokens(key, value) if key == "seq" else value for key, value in place.items()}


def judged(rows: Sequence[Row], field: str) -> dict[str, Any]:
    """Return the row that ``winners`` has for one place, from the rows that compete there; ``field`` is what they
    differ in.
    """
    found: dict[str, Any] = dict.fromkeys(
        ("winner", "degrees", "step_time_s", "behind", "ratio", "tied", "bound_by", "other_bound")
    )
    found["refused"] = "; ".join(f"{row[field]}: {row['error']}" for row in rows if row["error"])
    able = sorted(filter(is_able, rows), key=token_s)
    if not able:
        return {**found, "winner": "", "why": next(_reasons(rows, field))}
    best, *others = able
    found |= {"winner": best[field], "degrees": best["degrees"]}
    found |= {"step_time_s": best["step_time_s"], "bound_by": best["bound_by"]}
    if not others:
        return {**found, "why": f"{best[field]} alone: {'; '.join(_reasons(rows, field))}"}
    second, ratio = others[0], token_s(others[0]) / token_s(best)
    why = f"{second[field]} takes {100 * (ratio - 1):.2g} % longer, bound by {second['bound_by']}"
    alike = best["bound_by"] == second["bound_by"]
    why += ", as both are" if alike else f"; {best[field]} is bound by {best['bound_by']}"
    found |= {
        "behind": second[field],
        "ratio": ratio,
        "tied": tied(ratio, second["bound_by"]),
        "other_bound": second["bound_by"],
    }
    return {**found, "why": why}


def _reasons(rows: Sequence[Row], field: str) -> Iterator[str]:
    """Yield for each of those that cannot be compared why it has lost."""
    for row in rows:
        if row["error"] or row["fits"] == "no":
            yield f"{row[field]}: {row['error'] or 'does not fit'}"
