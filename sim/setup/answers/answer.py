"""What predictions answer: a sentence first, and three lines of what it rests on.

The same words are in a terminal, in Python and notebooks, in JSON and on pages.
"""

from __future__ import annotations

import html
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sim.base.units import FEW, digits_within, length, number, seconds, seconds_between, size
from sim.engine.costs.series import BEYOND_RANGE
from sim.engine.intervals.extrapolated import Decisive, decisive
from sim.engine.intervals.interval import Interval
from sim.engine.intervals.learned import shipped
from sim.engine.intervals.regime import Regime, regime
from sim.engine.play.simulate import Simulation
from sim.engine.results.report import Evidence, Report
from sim.engine.results.room import Room
from sim.schedule.methods.catalog import NAMED
from sim.setup.answers.places import choice_of, place_of
from sim.setup.global_batch import told
from sim.setup.names import scope_title
from sim.setup.played import PlayedStep
from sim.setup.unnamed_software import Slowest
from sim.words.mesh import Mesh
from sim.words.profile import Profile
from sim.words.workload import DTYPE_BYTES, Workload

_BOUND_BY: dict[Regime, str] = {"kernels": "kernels", "links": "links", "host": "the host"}
_TRANSFER = re.compile(rf"(\w+) of (\d+) bytes among (\d+) ranks: {BEYOND_RANGE}")
"""A note on the cost of a transfer."""


def sentence(predictions: Sequence[PlayedStep]) -> str:
    """Return what one prediction says, or several of one step: the fastest schedule that fits, its time with interval,
    its free memory, and how far the others are behind.

    >>> from sim.setup.predict import predict
    >>> p = predict("zigzag", seq="64K", scope="attention")
    >>> print(sentence([p, p.replace(schedule="ring")]))
    Zigzag is fastest: 35.2 ms for attention (32.8 to 42.6 ms), 233000 tokens/s/GPU; ring takes 1.62 times as long
    """
    fitting = [one for one in predictions if one.fits is not False]
    if not fitting and len(predictions) > 1:
        nearest = max(predictions, key=_free_bytes)
        return f"None of {len(predictions)} fits; nearest comes {named(nearest)}: {_figures(nearest)}"
    first, *others = sorted(fitting or predictions, key=lambda one: one.step_time_s)
    name = named(first)
    if len(predictions) == 1:
        return takes(name, _figures(first))
    does = "trains fastest" if first.room else "is fastest"
    of = (
        "" if len(fitting) == len(predictions) else f" of the {len(fitting)} that fit" if others else ", and alone fits"
    )
    return f"{name[0].upper()}{name[1:]} {does}{of}: {_figures(first)}{_behind(first, others)}"


def takes(name: str, figures: str) -> str:
    """Return the sentence of one step."""
    return f"{name[0].upper()}{name[1:]} takes {figures}"


def named(prediction: PlayedStep) -> str:
    """Return a schedule by its name, and by its degrees where it has two."""
    return name_on(prediction.schedule, prediction.checked.schedule.header.mesh)


def name_on(schedule: str, mesh: Mesh) -> str:
    """Return the name of a schedule on a mesh, with its degrees where it has two."""
    entry = NAMED.get(schedule)
    two = len(entry.degrees) > 1 if entry else mesh.ulysses > 1 and mesh.ring > 1
    return f"{schedule} {_degrees(schedule, mesh)}" if two else schedule


def degrees(prediction: PlayedStep) -> str:
    """Return the degrees of what its schedule splits, and of replicas where there are several: ``U 4 R 2 DP 2``; of
    what splits nothing ``1 GPU``.
    """
    return degrees_on(prediction.schedule, prediction.checked.schedule.header.mesh)


def degrees_on(schedule: str, mesh: Mesh) -> str:
    """Return the same of a schedule on a mesh."""
    return _degrees(schedule, mesh) or "1 GPU"


def _degrees(schedule: str, mesh: Mesh) -> str:
    entry = NAMED.get(schedule)
    return mesh.named(entry.degrees if entry else ())


def _figures(prediction: PlayedStep) -> str:
    """Return a step's time with its interval, its rate, and whether it fits."""
    found, header = prediction.figures, prediction.checked.schedule.header
    fits = fits_said(found.room) if found.room else _exceeds(found)
    taken, known = step_time(prediction), interval(prediction)
    return figures_of(header.mesh, header.workload, taken, known, found.tokens_per_s_per_gpu) + fits


def figures_of(mesh: Mesh, workload: Workload, taken: str, known: str, rate: float) -> str:
    """Return a step's time, as it is said with its interval, how many sequences all replicas train in it, where they
    are several, and tokens per second and GPU.
    """
    step, sequences = workload.scope == "step", mesh.dp * workload.batch
    of = "a step" if step else f"for {scope_title(workload.scope, workload.layers)}"
    trained = f" for {told(sequences, mesh.dp * workload.num_real_tokens)}" if step and sequences > 1 else ""
    return f"{taken} {of} ({known}){trained}, {number(rate, FEW)} tokens/s/GPU"


def step_time(prediction: PlayedStep) -> str:
    """Return a step time with the digits that its interval leaves it."""
    return time_within(prediction.step_time_s, prediction.interval)


def time_within(step_s: float, within: Interval | None) -> str:
    """Return seconds with the digits that their interval leaves them."""
    return seconds(step_s, digits_within(*within) if within else FEW)


def interval(prediction: PlayedStep) -> str:
    """Return the 90 % interval with the digits that it has."""
    return interval_said(prediction.profile, prediction.interval)


def interval_said(profile: Profile | None, within: Interval | None) -> str:
    """Return an interval with the digits that it has, or why there is none."""
    if profile is None:
        return "at datasheet rates"
    return seconds_between(*within) if within else "interval not known"


def _exceeds(found: Report) -> str:
    return "; does not fit: buffers alone exceed the memory" if found.fits is False else ""


def fits_said(room: Room) -> str:
    """Return whether a training step fits, and how much memory is left or missing."""
    limit = room.tightest
    free, of = size(abs(limit.free_bytes), FEW), "" if limit.memory == "GPU" else f" of the {limit.memory}'s memory"
    left = "left" if limit.free_bytes >= 0 else "missing"
    if room.fits is None:
        return f"; at the limit: {free} {left}{of}, known to {size(limit.known_to_bytes, FEW)}"
    return f"; fits with {free} left{of}" if room.fits else f"; does not fit: {free} missing{of}"


def _free_bytes(prediction: PlayedStep) -> float:
    return prediction.room.free_bytes if prediction.room else -math.inf


def _behind(first: PlayedStep, others: Sequence[PlayedStep]) -> str:
    """Return which of the others are tied with the first, and how far the next one is behind."""
    ratios = {named(one): one.over(first) for one in others}
    tied = [name for name, ratio in ratios.items() if ratio and ratio.tied]
    said = f"; {' and '.join(tied)} {'are' if len(tied) > 1 else 'is'} tied" if tied else ""
    behind = [one for one in others if named(one) not in tied]
    if behind:
        times = number(behind[0].step_time_s / first.step_time_s, FEW)
        said += f"; {named(behind[0])} takes {times} times as long"
    return said


def what_fits(found: Iterable[Mapping[str, Any]]) -> str:
    """Return what the rows of ``fit`` say: how long a context fits by each, and which is fastest of the longest.

    >>> rows = [{"row": "a", "seq": 2048, "fits": True, "step_time_s": 1.0, "free_bytes": 1, "helps": "", "error": ""}]
    >>> rows += [{**rows[0], "row": "b", "seq": 4096, "step_time_s": 2.0}]
    >>> print(what_fits(rows))
    The longest that fits is 4K, by b in 2 s a step; a up to 2K
    """
    found = list(found)
    fitting = [row for row in found if row["fits"] is not False and row["step_time_s"] is not None]
    keys = [*found[0]][: [*found[0]].index("row")]
    names = {id(row): " ".join(filter(None, (choice_of(row, keys, row["row"]), place_of(row, keys)))) for row in found}
    if not fitting:
        played = [row for row in found if not row["error"]]
        if not played:
            return f"Nothing can be played: {found[0]['error']}"
        nearest = max(played, key=lambda row: float(row["free_bytes"]))
        missing = f"{size(-nearest['free_bytes'], FEW)} is missing for {names[id(nearest)]} at {length(nearest['seq'])}"
        helps = f"switching on {nearest['helps']} helps" if nearest["helps"] else "no technique is enough"
        return f"Nothing fits: {missing}, {helps}"
    longest: dict[str, int] = {}
    for row in fitting:
        longest[names[id(row)]] = max(row["seq"], longest.get(names[id(row)], 0))
    most = max(longest.values())
    fastest = min((row for row in fitting if row["seq"] == most), key=lambda row: float(row["step_time_s"]))
    of = f"by {names[id(fastest)]} in {seconds(fastest['step_time_s'], FEW)} a step"
    del longest[names[id(fastest)]]
    others = [
        f"{', '.join(name for name, its in longest.items() if its == seq)} up to {length(seq)}"
        for seq in sorted({*longest.values()}, reverse=True)
    ]
    longest[names[id(fastest)]] = most
    never = [name for name in dict.fromkeys(names.values()) if name not in longest]
    others += [f"{', '.join(never)} at none of these lengths"] if never else []
    return "; ".join([f"The longest that fits is {length(most)}, {of}", *others])


def who_wins(found: Sequence[Mapping[str, Any]]) -> str:
    """Return what the rows of ``winners`` say: how many places each wins.

    >>> places = [{"winner": name, "tied": name == "ring"} for name in ("ring", "ulysses", "ulysses", "")]
    >>> print(who_wins(places))
    Of 4 places ulysses wins 2, ring 1; ties among these: 1; nothing fits at 1
    """
    places = Counter(row["winner"] for row in found)
    ties = sum(bool(row["tied"]) for row in found)
    tied = f"; ties among these: {ties}" if ties else ""
    if len(places) == 1 and (name := found[0]["winner"]):
        return f"{name[0].upper()}{name[1:]} is fastest at all of {len(found)} places{tied}"
    won = ", ".join(
        f"{name} {'' if number else 'wins '}{count}"
        for number, (name, count) in enumerate((name, count) for name, count in places.most_common() if name)
    )
    nothing = f"; nothing fits at {places['']}" if places[""] else ""
    return f"Of {len(found)} places {won or 'none is won'}{tied}{nothing}"


class Grounds(NamedTuple):
    """What an answer rests on."""

    lines: list[str]
    """Three at most: the kernels, with how far the decisive one is beyond what was measured; what was not measured of
    transfers; how often such answers were right."""
    warnings: list[str]
    """What else has to be said: of memory that is exceeded, of races, and of what a model has and is not computed."""
    evidence: Evidence
    """All of it."""


def as_text(answer: str, shown: str, about: Sequence[str]) -> str:
    """Return an answer with what is shown below it, and what is said about it."""
    return "\n".join([answer, *([shown] if shown else []), *(f"  {line}" for line in about)])


def as_html(answer: str, shown: str, about: Sequence[str]) -> str:
    """Return the same for a notebook; ``shown`` is HTML."""
    return f"<p><b>{html.escape(answer)}</b></p>{shown}<p>{'<br>'.join(map(html.escape, about))}</p>"


def grounds(prediction: PlayedStep) -> Grounds:
    """Return what a prediction rests on."""
    simulation = prediction.simulation
    return grounds_of(simulation, prediction.figures.evidence, decisive(simulation), prediction.slowest)


def grounds_of(
    simulation: Simulation, found: Evidence, most: Decisive | None, slowest: Slowest | None = None
) -> Grounds:
    """Return what a simulation rests on, by all of its evidence, the kernel that decides, and the slowest software."""
    others = [note for note in found.notes[simulation.profile is None :] if note not in simulation.cost.notes]
    if simulation.profile is None:
        return Grounds(found.notes[:1], others, found)
    kernels = _kernels(found, most, simulation.profile, slowest)
    return Grounds([kernels, _not_measured(simulation), record(simulation)], others, found)


def rests_on(prediction: PlayedStep) -> list[str]:
    """Return what a prediction rests on, in three lines at most."""
    return grounds(prediction).lines


def _kernels(found: Evidence, most: Decisive | None, profile: Profile, slowest: Slowest | None) -> str:
    """Return where kernels come from, and how far the decisive one is from what was measured."""
    under = {"burst": ", short runs", "sustained": ", under load"}.get(found.rates, "")
    state = "" if found.complete else ", not complete"
    said = f"kernels: profile {found.profile!r} of {found.measured_on}, measured {found.created}{under}{state}"
    if profile.attention is not None:
        said += f"; attention: {profile.attention.said}"
    if profile.software:
        said += f"; software: {profile.software}"
    if slowest is not None:
        said += f"; software: not named, fused kernels: with those of {slowest.said} {seconds(slowest.seconds, FEW)}"
    if most is None:
        return said
    said += f"; {100 * most.share:.0f} % of their time is {most.kernel} of {length(round(most.size))} {most.unit}"
    if most.measured is None:
        return f"{said}, which was not measured"
    if most.size <= most.measured:
        return f"{said}, measured up to {length(round(most.measured))}"
    return f"{said}, {number(most.size / most.measured, 2)} times the largest measured"


def _not_measured(simulation: Simulation) -> str:
    """Return which transfers were not measured, or none about as large, and which kernels."""
    most: dict[str, tuple[int, int]] = {}
    others: dict[str, None] = {}
    for note in sorted(simulation.cost.notes):
        if found := _TRANSFER.fullmatch(note):
            most[found[1]] = max(most.get(found[1], (0, 0)), (int(found[2]), int(found[3])))
        elif not note.endswith(BEYOND_RANGE) and ("not in the profile" in note or "not measured" in note):
            kind, _, last = note.partition(":")[0].rpartition(" ")
            others[kind if last in DTYPE_BYTES else f"{kind} {last}"] = None
    of_size = [f"{kind} of {size(nbytes, FEW)} among {ranks} ranks" for kind, (nbytes, ranks) in most.items()]
    parts = [f"about as large: {', '.join(of_size)}"] if of_size else []
    parts += [f"at all, so at the rate of a memory or a link: {', '.join(others)}"] if others else []
    return f"not measured {'; not '.join(parts)}" if parts else "all kinds of kernels and transfers were measured"


def record(simulation: Simulation) -> str:
    """Return how often such answers were right."""
    by, learned = regime(simulation), shipped()
    within = learned.within(by)
    bound = f"steps bound by {_BOUND_BY[by]} like this one"
    if within is None:
        return f"{bound}: too few were measured to say how often such answers are right"
    steps = sum(map(len, learned.about(by)))
    far = math.exp(within)
    off = f"{100 * (far - 1):.0f} %" if far < 2 else f"a factor of {number(far, 2)}"
    return f"{bound}: of {steps} measured ones 90 % were within {off}"
