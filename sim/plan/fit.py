"""What fits into memory, how long a context may be, and what fitting costs: the screens ``ladder`` and ``fit``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sim.accounts.memory import TERMS
from sim.base.errors import InputError
from sim.engine.results.report import report
from sim.plan.longest import longest, padded_room
from sim.plan.search.families import as_ring
from sim.plan.search.few import stages_of
from sim.plan.search.room import room
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.model.adapters import adapts_mlp
from sim.schedule.model.saving import leaves
from sim.setup import names
from sim.setup.answers.answer import grounds, what_fits
from sim.setup.answers.rows import of_ladder
from sim.setup.answers.table import Table
from sim.setup.configuration import Configuration
from sim.setup.global_batch import sequences_of
from sim.setup.prediction import Prediction
from sim.setup.setup import Setup
from sim.setup.stacks import STACKS, TECHNIQUES

Progress = Callable[[int, int], object]
"""Told how many rows are done, and of how many."""


def using(setup: Setup, options: Mapping[str, str]) -> Setup:
    """Return a setup with some options of its schedule, or with another schedule. Where that one does not split
    sequences, each GPU is a replica, or with tensor parallelism and stages each group of them.
    """
    given = dict(options)
    changes: dict[str, Any] = {}
    if schedule := given.pop("schedule", None):
        alone = not names.entry(schedule).degrees
        gpus = setup.gpus or num_gpus(setup)
        changes = {
            "schedule": schedule,
            "gpus": gpus,
            "dp_degree": gpus // setup.tp_degree // setup.pp_degree if alone else setup.dp_degree,
        }
        changes |= {"ulysses_degree": None, "ring_degree": None} | ({"cp": None} if alone else {})
    return setup.replace(**changes, set={f"schedule.{name}": value for name, value in given.items()})


def num_gpus(setup: Setup) -> int:
    """Return the number of GPUs of a setup that does not state it: that of schedules that split sequences."""
    return as_ring(setup).mesh.size


def rungs(techniques: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield names and options of states of the techniques: all off, then one more of them on each, then all but one."""
    state: dict[str, str] = {}
    for technique in reversed(TECHNIQUES.values()):
        state |= technique.off
    yield "none", state
    for name in techniques:
        state = {**state, **TECHNIQUES[name].on}
        yield f"+ {name}", state
    for name in techniques if len(techniques) > 1 else ():
        yield f"all - {name}", {**state, **TECHNIQUES[name].off}


def ladder(
    setup: Setup,
    *,
    most: int | str = "16M",
    techniques: Sequence[str] = tuple(TECHNIQUES),
    progress: Progress | None = None,
) -> Table:
    """Return what some techniques of ``TECHNIQUES`` save and cost in a training step. The first row has none of them.
    Each of the next rows switches one more on, in their order. Each of the last rows switches one of all off again.

    A row has the longest context that fits in tokens, at most ``most``. At the setup's own length it has the peak
    allocated in bytes, also by term, what is left beside it and what no buffer can have, whether that fits, and the
    seconds that the step takes, or would. What the setup says of schedule and stack does not matter, and of its options
    what no technique sets. Techniques that its model does not take are left out.

    >>> small = Setup(model="tiny", cluster="hgx-h100", gpus=2, layers=2, seq="8K")
    >>> ladder(small, most="8K", techniques=["FSDP"]).to_dict()["longest"]
    [8192, 8192]
    """
    limit, base, rows = names.tokens("most", most), setup.replace(scope="step", stack=None, pad=True), []
    if base.global_batch is not None:  # the same sequences at all lengths that are tried
        base = base.replace(global_batch=sequences_of(base.global_batch, base.sequence_length))
    for name in techniques:
        names.one_of("techniques", name, TECHNIQUES)
    techniques = [name for name in techniques if _takes(setup, name)]
    states = list(rungs(techniques))
    found: dict[frozenset[tuple[str, str]], dict[str, Any]] = {}
    of_all, near = None, 0
    for done, (name, options) in enumerate(states, 1):
        state = frozenset(options.items())
        if state not in found:  # without the last technique it is as before that
            predicted = _predicted(rung := using(base, options))
            found[state] = _rung(rung, predicted, limit, near)
            near = found[state]["longest"] or near
            if done == 1 + len(techniques):  # all are switched on
                of_all = grounds(predicted)
        rows.append({"techniques": name, **found[state]})
        if progress:
            progress(done, len(states))
    return Table(rows).answering(of_ladder(rows), of_all)


def _rung(setup: Setup, predicted: Prediction, most: int, near: int) -> dict[str, Any]:
    """Return what a row says but its name; ``near`` is where its longest context may be."""
    found = report(predicted.simulation, with_bound=False, with_hash=False)
    seq = predicted.checked.schedule.header.workload.seq
    assert found.room is not None
    return {
        "longest": longest(setup, most, {seq: found.room}, near),
        "seq": seq,
        "step_time_s": found.step_time_s,
        "tokens_per_s_per_gpu": found.tokens_per_s_per_gpu,
        "fits": found.fits,
        "free_bytes": found.room.free_bytes,
        "peak_hbm_bytes": found.peak_hbm_bytes,
        "peak_host_bytes": found.peak_host_bytes,
        **{term: found.room.terms.get(term, 0) for term in TERMS},
    }


def fit(setup: Setup, rows: Sequence[str], lengths: Sequence[int | str], *, progress: Progress | None = None) -> Table:
    """Return for each of some schedules or stacks, at each of some lengths, the seconds of a training step where it
    fits, and else what is missing and which technique to switch on; ``fits`` is None at the limit.

    Of techniques that make it fit alone that one is named which wins most GiB for each second that the step takes
    longer. If none does alone, all are named that it takes, or, where all together are not enough, none. Where a
    schedule cannot be built ``error`` says why.

    >>> small = Setup(model="tiny", cluster="hgx-h100", gpus=2, layers=2)
    >>> fit(small, ["ulysses"], ["8K"])[0]["fits"]
    True
    """
    base = setup.replace(scope="step", stack=None, pad=True)
    cells = [(row, names.tokens("seq", length)) for row in rows for length in lengths]
    for row in rows:
        names.one_of("schedule or stack", row, [*SCHEDULES, *STACKS])  # no name is both
    found: list[dict[str, Any]] = []
    best: tuple[tuple[int, float], Prediction] | None = None
    for done, (row, tokens) in enumerate(cells, 1):
        cell, predicted = _cell(_row(base, row).replace(seq=tokens))
        found.append({"row": row, "seq": tokens, **cell})
        if predicted and (best is None or best[0] < (tokens, -predicted.step_time_s)):
            best = (tokens, -predicted.step_time_s), predicted
        if progress:
            progress(done, len(cells))
    return Table(found).answering(what_fits(found) if found else "", grounds(best[1]) if best else None)


def what_helps(setup: Setup) -> list[str]:
    """Return what to switch on so that a training step fits: of the techniques that suffice alone, the one that saves
    most GiB for each second that it adds; if none suffices, all that are needed together. None where the step fits
    already, or all together are not enough.

    >>> what_helps(Setup("ulysses", model="llama3-8b", cluster="hgx-h100", gpus=2, layers=2, seq="1M"))
    ['chunked loss', 'tiled MLP']
    """
    free_bytes = padded_room(setup).free_bytes
    return _helping(setup, free_bytes) if free_bytes < 0 else []


def _row(base: Setup, row: str) -> Setup:
    """Return the setup of a stack, or of a schedule; what is set of the schedule comes first."""
    stack = STACKS.get(row)
    return using(base, {"schedule": stack.schedule if stack else row}).replace(stack=row if stack else None)


def _cell(setup: Setup) -> tuple[dict[str, Any], Prediction | None]:
    """Return what is said of a row at a length, and the prediction of what fits."""
    cell: dict[str, Any] = {"degrees": "", "step_time_s": None, "fits": None, "free_bytes": None}
    cell |= {"helps": "", "error": ""}
    try:
        configuration = setup.replace(pad=True).resolved()
        found = room(configuration)
        cell |= {"degrees": configuration.mesh.named(configuration.entry.degrees) or "1 GPU"}
        cell |= {"free_bytes": found.free_bytes, "fits": found.fits}
        if found.free_bytes >= 0:
            predicted = _predicted(setup)
            return cell | {"step_time_s": predicted.step_time_s}, predicted
        return cell | {"helps": " + ".join(_helping(setup, found.free_bytes))}, None
    except InputError as refused:
        return cell | {"error": str(refused)}, None


def _predicted(setup: Setup) -> Prediction:
    return setup.replace(seeds=setup.seeds or 1).predicted()


def _helping(setup: Setup, free_bytes: int) -> list[str]:
    """Return the technique to switch on, or those that it takes; none where all together are not enough."""
    off = switched_off(setup)
    alone = {name: padded_room(using(setup, on)).free_bytes for name, on in off.items()}
    enough = {name: free - free_bytes for name, free in alone.items() if free >= 0}
    if enough:
        before_s = _predicted(setup).step_time_s
        lost_s = {name: _predicted(using(setup, off[name])).step_time_s - before_s for name in enough}
        return [max(enough, key=lambda name: enough[name] / lost_s[name] if lost_s[name] > 0 else math.inf)]
    taken = list(off)
    for name in (None, *reversed(off)):
        fewer = [other for other in taken if other != name]
        options = {key: value for other in fewer for key, value in off[other].items()}
        if padded_room(using(setup, options)).free_bytes >= 0:
            taken = fewer
        elif name is None:
            return []
    return taken


def switched_off(setup: Setup) -> dict[str, Mapping[str, str]]:
    """Return the techniques of the schedule's options that are off, with what switches them on."""
    options = setup.resolved().options
    return {
        name: technique.on
        for name, technique in TECHNIQUES.items()
        if _takes(setup, name)
        and all(str(getattr(options, key, None)) == value for key, value in technique.off.items())
    }


def _takes(setup: Setup, technique: str) -> bool:
    """Return whether a model takes a technique: no MLP with adapters is tiled, and no stage offloads a single layer."""
    on = TECHNIQUES[technique].on
    if "activations" in on and not all(map(leaves, _chunks(setup.resolved()))):
        return False
    return "mlp" not in on or not adapts_mlp(setup.model_spec)


def _chunks(found: Configuration) -> list[list[range]]:
    """Return the layers of each chunk of each stage."""
    if found.mesh.pp == 1:
        return [[range(found.workload.layers)]]
    stages = stages_of(found)
    return [list(map(stages.layers, stages.chunks_of(stage))) for stage in range(found.mesh.pp)]
