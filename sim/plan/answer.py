"""What plans answer, in one sentence: which configuration is best of those that fit, or what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sim.base.units import FEW, digits_within, length, number, seconds, seconds_between, size
from sim.setup.answers.answer import Grounds, as_html, as_text
from sim.setup.answers.table import Table


class Plan(NamedTuple):
    """The best configurations of a training step that fit, and why others lose."""

    best: Table
    """A row for each, the fastest first: its options, the ``sequences`` of all its replicas in a step, seconds of that,
    memory in bytes, and by figure of the machine the share of the step that doubling it ``saves``. ``tie`` says that it
    is no slower than the first at one end of the 90 % interval, both with all costs at that end; ``unusual`` is why no
    one would run it, or empty. None where nothing fits."""
    lost: Table
    """A row for each schedule with its degrees: how many configurations it has, by which share the fastest is slower
    than the first, or is at least, and why they lose; of the cheapest how much dearer, of those in time."""
    slack: float
    """By which share what was not simulated might be faster than the first: 0 where the search came to its end."""
    simulated: int
    configurations: int
    shortage: str
    """Where nothing fits, what is missing least; else empty."""
    remedies: Sequence[str] = ()
    """Where nothing fits, changes each of which would make something fit, by the memory of one rank: of options, of
    shares of weights, of the number of GPUs, of the length."""
    interrupted: bool = False
    """Whether Ctrl-C has cut the search."""
    by_cost: bool = False
    """Whether best is what is cheapest."""
    grounds: Grounds | None = None
    """What the first rests on; None where nothing fits."""

    @property
    def answer(self) -> str:
        """What it says in one sentence: the best configuration with the time of its step and what is left, or what is
        missing.
        """
        return of_plan(self)

    @property
    def rests_on(self) -> list[str]:
        """What that rests on, in three lines at most."""
        return self.grounds.lines if self.grounds else []

    def __repr__(self) -> str:
        return as_text(self.answer, str(self.best), self.rests_on)

    def _repr_html_(self) -> str:
        return as_html(self.answer, self.best._repr_html_(), self.rests_on)


class Answer(NamedTuple):
    """What a question found, and what it tried.

    >>> from sim.plan.reverse import fewest_gpus
    >>> from sim.setup.setup import Setup
    >>> tiny = Setup(model="tiny", cluster="hgx-h100", gpus=2, layers=2, seq="4K")
    >>> answer = fewest_gpus(tiny, options={"checkpoint": ["full"]})
    >>> answer.value, answer.sure, answer.tried.to_dict()["reaches"]
    (1, True, [True])
    """

    value: int | None
    """Tokens or GPUs, at least so many and at most so many where it is not ``sure``; None where nothing that was tried
    is enough."""
    plan: Plan | None
    """The fastest configurations there; None where there is none."""
    tried: Table
    """A row for each length or number of GPUs, in rising order: whether something ``reaches`` what it has to, None
    where time was over before it was known; and ``why``."""

    @property
    def sure(self) -> bool:
        """Whether all that was tried came to its end."""
        return all(row["reaches"] is not None for row in self.tried)

    @property
    def answer(self) -> str:
        """What it says in one sentence: the value with the fastest configuration there, or why there is none."""
        return of_question(self)

    @property
    def rests_on(self) -> list[str]:
        """What that rests on, in three lines at most."""
        return self.plan.rests_on if self.plan else []

    def __repr__(self) -> str:
        return as_text(self.answer, str(self.tried), self.rests_on)

    def _repr_html_(self) -> str:
        return as_html(self.answer, self.tried._repr_html_(), self.rests_on)


def of_plan(found: Plan) -> str:
    """Return in a sentence the best configuration that fits, with its time, interval and free memory; which others are
    tied with it; and how much better those may be that were not simulated.
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
    """Return in a sentence the longest context or the fewest GPUs, with the fastest configuration there; or that
    nothing is enough. It says so if the search was cut short, or ended where it was told to.
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
