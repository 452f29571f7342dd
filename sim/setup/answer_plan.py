"""What plans answer, in one sentence: which configuration is best of those that fit, or what is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sim.units import FEW, digits_within, length, number, seconds, seconds_between, size

if TYPE_CHECKING:
    from sim.setup.plan import Plan
    from sim.setup.reverse import Answer


def of_plan(found: Plan) -> str:
    """Return which configuration is best of those that fit, in which time with which interval, how much memory is left,
    which others are tied with it, and what may be better that was not simulated.
    """
    rest = _not_simulated(found)
    if not found.best.rows:
        said = "Nothing was found so far that fits" if rest else "Nothing fits"
        enough = f"; enough would be {found.remedies[0]}" if found.remedies else ""
        return f"{said}: {found.shortage}{enough}{rest}"
    first = found.best[0]
    name = first["schedule"][0].upper() + first["schedule"][1:]
    how = "trains cheapest" if found.by_cost else "trains fastest"
    strange = f"; no one would run this, {first['unusual']}" if first["unusual"] else ""
    return f"{name} {how}, with {first['options']}: {_figures(found, first)}{strange}{_tied(found.best.rows)}{rest}"


def of_question(found: Answer) -> str:
    """Return the longest context or the fewest GPUs, with the configuration that is fastest there; or that nothing is
    enough. It says so where the search was cut short, or ended where it was told to.
    """
    cut = "" if found.sure else "; the search was cut short"
    last = found.tried.rows[-1]
    of_length = "seq" in last
    if found.value is None:
        at = f"at {length(last['seq'])}" if of_length else f"on up to {last['gpus']} GPUs"
        return f"Nothing is enough {at}: {last['why']}" if found.sure else f"Nothing was found so far {at}{cut}"
    with_it = _with(found.plan) + (cut or _not_simulated(found.plan))
    if not of_length:
        return f"The fewest GPUs are {found.value}{'' if found.sure else ' or fewer'}{with_it}"
    tokens, short = f"{found.value} tokens", length(found.value)
    tokens = tokens if tokens.startswith(short) else f"{short}, {tokens}"
    if found.sure and not last["reaches"]:
        return f"The longest context is {tokens} to 1 %{with_it}"
    return f"The longest context is at least {tokens}{with_it}{'' if cut else '; no longer one was tried'}"


def _with(plan: Plan | None) -> str:
    """Return the fastest of a plan."""
    if plan is None or not plan.best.rows:
        return ""
    first = plan.best[0]
    return f", with {first['schedule']}, {first['options']}: {_figures(plan, first)}"


def _figures(found: Plan, row: Mapping[str, Any]) -> str:
    """Return a step's time with its interval, its rate, its cost where it has one, and what is left."""
    at_datasheet = found.grounds is not None and found.grounds.evidence.profile == "datasheet"
    known = "at datasheet rates" if at_datasheet else interval_of(row)
    rate = f"{number(row['tokens_per_s_per_gpu'], FEW)} tokens/s/GPU"
    cost = row.get("cost_per_billion_tokens")
    priced = [] if cost is None else [f"{number(cost, FEW)} for a billion tokens"]
    left = f"{size(row['free_bytes'], FEW)} left"
    fits = f"at the limit: {left}" if row["fits"] is None else f"fits with {left}"
    return f"{', '.join([f'{step_of(row)} a step ({known})', rate, *priced])}; {fits}"


def step_of(row: Mapping[str, Any]) -> str:
    """Return the step time of a row with the digits that its interval leaves it."""
    return seconds(row["step_time_s"], FEW if row["low_s"] is None else digits_within(row["low_s"], row["high_s"]))


def interval_of(row: Mapping[str, Any]) -> str:
    """Return the 90 % interval of a row with the digits that it has."""
    return "interval not known" if row["low_s"] is None else seconds_between(row["low_s"], row["high_s"])


def _tied(rows: list[dict[str, Any]]) -> str:
    """Return which of the others are tied with the first: schedules, or what of the options differs."""
    first = rows[0]
    own = {*first["options"].split(", ")}
    tied = []
    for row in rows[1:]:
        if row["tie"]:
            others = [option for option in row["options"].split(", ") if option not in own]
            tied.append(
                row["schedule"] if row["schedule"] != first["schedule"] else f"the same with {', '.join(others)}"
            )
    tied = [*dict.fromkeys(tied)]
    return f"; {' and '.join(tied)} {'are' if len(tied) > 1 else 'is'} tied" if tied else ""


def _not_simulated(found: Plan | None) -> str:
    """Return how much better may be what was not simulated; empty where the search came to its end."""
    if found is None or not found.slack:
        return ""
    better = "cheaper" if found.by_cost else "faster"
    known = (
        f"others may be up to {100 * found.slack:.2g} % {better}"
        if found.slack < 1
        else "how good others are is not known"
    )
    return f"; the search was {'interrupted' if found.interrupted else 'cut short'}: {known}"
