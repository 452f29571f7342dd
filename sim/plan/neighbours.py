"""One step away from a configuration, in every degree and option: is it the best there, and by how much?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from sim.base.errors import LongstepError
from sim.engine.intervals.extrapolated import extrapolated
from sim.plan.search.degrees import divides
from sim.plan.search.space import OPTIONS
from sim.schedule.model.pipeline.timetables import PIPELINES
from sim.setup import names
from sim.setup.answers.table import Table
from sim.setup.configuration import Configuration
from sim.setup.prediction import Prediction
from sim.setup.setup import Setup
from sim.words.options import OF_GROUPS, OF_STAGES, OF_STEPS


class Step(NamedTuple):
    """One change of a setup."""

    change: str
    """As a row of results says it."""
    setup: Setup


def neighbours(setup: Setup) -> Table:
    """Return what becomes of a step one change away, a row each, the fastest for its tokens first; ``change`` is empty
    for the setup itself.

    Degrees are halved and doubled in pairs, so that all GPUs stay in use; of layers with weights that can be shared out
    those of tensor parallelism are one of them, of a step of several micro-batches stages of a pipeline. Options that
    are numbers are halved or doubled, others take every other value. ``ratio`` is seconds for a token over those of the
    setup; ``extrapolated`` the share of kernel seconds whose costs lie beyond the measured range. What cannot be built
    has its reason in ``error``, and is last. Raises InputError where the setup itself cannot be played.

    >>> found = neighbours(Setup("zigzag", model="tiny", seq="64K", cluster="hgx-h100", scope="attention", gpus=2))
    >>> ratios = {row["change"]: row["ratio"] for row in found}
    >>> ratios["layout contiguous"] > 1, ratios[""]
    (True, 1.0)
    """
    base = setup.predicted()
    rows = [_row("", base, base)]
    for change, other in steps(setup):
        try:
            rows.append(_row(change, other.predicted(), base))
        except LongstepError as refused:
            rows.append({**dict.fromkeys(rows[0]), "change": change, "error": str(refused)})
    return Table(sorted(rows, key=lambda row: (bool(row["error"]), row["ratio"] or 0.0, row["change"] != "")))


def _row(change: str, found: Prediction, base: Prediction) -> dict[str, Any]:
    # Other degrees of data parallelism train on other numbers of tokens.
    tokens = _tokens(base) / _tokens(found)
    return {
        "change": change,
        "step_time_s": found.step_time_s,
        "ratio": found.step_time_s / base.step_time_s * tokens,
        "fits": found.fits,
        "peak_hbm_bytes": found.peak_hbm_bytes,
        "extrapolated": extrapolated(found.simulation),
        "error": "",
    }


def _tokens(found: Prediction) -> int:
    header = found.checked.schedule.header
    return header.mesh.dp * header.workload.num_real_tokens


def steps(setup: Setup) -> Iterator[Step]:
    """Yield all setups that are one change away; builders may refuse them. Raises InputError for what is no setup."""
    found = setup.resolved()
    yield from _degrees(setup, found)
    given = {*()} if found.options is None else {*get_type_hints(type(found.options))}
    skipped = {*(OF_STEPS if setup.scope != "step" else ()), *(OF_STAGES if found.mesh.pp == 1 else ())}
    skipped |= {*OF_GROUPS} if found.mesh.tp == 1 else set()
    for name in sorted(given - skipped):
        if name == "pipeline_schedule":
            yield from _pipelines(setup, found)
        if name == "pipeline_schedule" or (name == "pipeline_chunks" and getattr(found.options, name) == 1):
            continue
        hint, value = get_type_hints(type(found.options))[name], getattr(found.options, name)
        for other in _others(name, hint, value):
            text = names.text_of(other)
            yield Step(f"{name} {text}", setup.replace(set={f"schedule.{name}": text}))


def _degrees(setup: Setup, found: Configuration) -> Iterator[Step]:
    now: Mapping[str, int] = {axis: getattr(found.mesh, axis) for axis in ("ulysses", "ring", "dp", "pp", "tp")}
    in_stages = found.mesh.pp > 1 or (setup.scope == "step" and getattr(found.options, "micro_batches", 1) > 1)
    in_shares = setup.scope != "attention" and divides(found.workload.model, 2)
    axes = [*found.entry.degrees, "dp", *(["pp"] if in_stages else []), *(["tp"] if in_shares else [])]
    base = setup.replace(gpus=found.mesh.size, cp=None)
    for more, fewer in permutations(axes, 2):
        if now[fewer] % 2:
            continue
        then: Mapping[str, int] = {**now, more: 2 * now[more], fewer: now[fewer] // 2}
        given = {f"{axis}_degree": then[axis] for axis in axes}
        shown = (axis for axis in axes if axis != "tp" or now["tp"] > 1 or more == "tp")
        yield Step(" x ".join(f"{axis} {then[axis]}" for axis in shown), base.replace(**given))
    if {"ulysses", "ring"} <= set(axes) and now["ulysses"] > 1 < now["ring"]:
        for name, order in names.PLACEMENTS.items():
            if order != found.mesh.order:
                yield Step(f"placement {name}", setup.replace(set={"schedule.placement": name}))


def _pipelines(setup: Setup, found: Configuration) -> Iterator[Step]:
    """Yield the other orders in which stages take micro-batches: one of several chunks with two, if it had one."""
    for name, pipeline in PIPELINES.items():
        if name != found.options.pipeline_schedule:
            several = pipeline.chunks is None
            chunks = max(2, found.options.pipeline_chunks) if several else 1
            options = {"schedule.pipeline_schedule": name, "schedule.pipeline_chunks": chunks}
            said = f"pipeline_schedule {name}" + (f", pipeline_chunks {chunks}" if several else "")
            yield Step(said, setup.replace(set=options))


def _others(name: str, hint: Any, value: Any) -> Iterator[object]:
    """Yield the values of an option that are one step from the one it has."""
    if isinstance(value, bool):
        yield not value
    elif get_origin(hint) is Literal:
        allowed = list(get_args(hint))
        near = {allowed.index(value) - 1, allowed.index(value) + 1} if isinstance(value, int) else range(len(allowed))
        yield from (other for at, other in enumerate(allowed) if other != value and at in near)
    elif isinstance(value, int):
        yield from (other for other in (value // 2, 2 * value) if other)
    elif isinstance(value, str):
        yield from (other for other in OPTIONS.get(name, ()) if other != value)
