"""All families of configurations of a training step on some GPUs: schedules x degrees x placements x options."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import msgspec

from sim.balance.documents import planned_schedules
from sim.base.errors import InputError
from sim.plan.search.degrees import DEGREES, asked_stages, meshes
from sim.plan.search.space import ANYTHING, OPTIONS, Family, Target
from sim.plan.search.stages import OF_PIPELINES, pipelines, states
from sim.plan.search.tensors import DECIDED, grid_of
from sim.schedule.methods.catalog import SCHEDULES, Build, Entry
from sim.schedule.model.adapters import adapts_mlp
from sim.setup import names
from sim.setup.configuration import Configuration
from sim.setup.global_batch import ANY, divisors, sequences_of
from sim.setup.setup import Setup
from sim.words.mesh import Mesh
from sim.words.options import LayerOptions

_MIXED = ("usp",)
"""Schedules that are another one of the catalog where one of their two degrees is 1."""


class _Method(NamedTuple):
    """A schedule, and what is varied of it."""

    schedule: str | Build | Entry
    ranks: int | None
    """Those that a plan of documents is for; None for other schedules."""
    axes: Sequence[str]
    """Those of the mesh that it splits."""
    grid: Mapping[str, Sequence[str]]
    """Options that are varied inside a family."""
    apart: Mapping[str, Sequence[str]]
    """Options whose values make families of their own."""

    @property
    def title(self) -> str:
        """What it is called."""
        return names.schedule_name(self.schedule)


def families(
    setup: Setup,
    options: Mapping[str, Sequence[str]] = OPTIONS,
    target: Target = ANYTHING,
    price: float | None = None,
    beside: Sequence[str] = (),
    tensors: Sequence[str] = (),
) -> list[Family]:
    """Return all schedules with all degrees that take the GPUs of a setup, those of fewest stages first.

    What the setup says of schedule, degrees and options is not varied. All else is:

    - replicas: as many as share its ``global_batch``; all numbers where that is ``any`` or none, each with as many
      sequences as ``batch`` says;
    - stages of a pipeline, where micro-batches fill them and nobody says how many (``sim.plan.search.stages``);
    - of a pipeline, whether ranks share out weights or the optimiser's state alone (``sim.plan.search.stages``);
    - shares of weights, where options list degrees (``sim.plan.search.degrees``);
    - ``options``, inside a family; values that ``OPTIONS`` does not order make families of their own;
    - what becomes of each group of ``tensors``, instead of what becomes of all. Values of ``mlp`` make families then,
      because their blocks have other tensors.

    With the ``price`` of a GPU-hour best is what costs least; ``beside`` is said with the degrees. Builders say whether
    a combination is valid: those that they refuse are among them. Raises InputError for an option that no schedule has,
    or for one without values.
    """
    _require_options(options)
    sequences = _sequences(setup)
    every = as_ring(setup.replace(ulysses_degree=None, ring_degree=None, cp=None))
    gpus, per_node = every.mesh.size, every.spec.gpus_per_node
    tokens = setup.sequence_length if target.tokens_per_s else 0
    fixed = {key.partition(".")[2] for key, _ in names.pairs(setup.set) if key.startswith("schedule.")}
    if tensors and (both := fixed & {*DECIDED}):
        raise InputError(f"`tensors` are decided one by one: leave out `set` schedule.{min(both)}")
    found, asked = list[Family](), bool(asked_stages(setup, options))
    for method in _methods(setup, gpus, options, fixed, decided=bool(tensors)):
        for mesh in meshes(setup, options, method.axes, gpus, per_node, sequences):
            if not _is_tried(method, mesh, setup, sequences):
                continue
            base = _placed(setup, method, mesh, gpus, sequences)
            orders = [*pipelines(base, options, fixed, asked=asked)]
            if not orders:
                continue
            spelled = base.spelled_out()
            each = setup.batch * mesh.dp if sequences is None else sequences
            worth, within_s = each if price is None else each / (price * gpus), target.within_s(each * tokens)
            inside = {"TP": mesh.tp, "U": mesh.ulysses, "R": mesh.ring}
            sharing = states(base, options, fixed)
            for chosen in _chosen(method, mesh, options, per_node, fixed):
                like = _named(method.title, inside, mesh.dp * mesh.pp, chosen, beside) if mesh.pp > 1 else ""
                for pipeline in orders:
                    own = {**chosen, **pipeline.options}
                    one = spelled.replace(set={f"schedule.{key}": value for key, value in own.items()})
                    groups = grid_of(one, tensors)
                    grid = {**groups, **method.grid}
                    for shared in sharing:
                        more = {f"schedule.{key}": value for key, value in shared.items()}
                        there = one.replace(set=more) if more else one
                        told = {**own, **shared}
                        named = _named(method.title, {**inside, "PP": mesh.pp}, mesh.dp, told, beside)
                        bubbles = pipeline.bubbles
                        found.append(Family(there, named, grid, worth, within_s, like, bubbles, [*groups]))
    return sorted(found, key=lambda one: (one.setup.pp_degree, one.setup.tp_degree))


def _methods(
    setup: Setup, gpus: int, options: Mapping[str, Sequence[str]], fixed: set[str], *, decided: bool
) -> Iterator[_Method]:
    """Yield the schedules that are tried; ``decided``: what becomes of tensors is decided one by one."""
    for schedule, ranks in _schedules(setup, gpus // setup.pp_degree // setup.tp_degree):
        entry = names.entry(schedule)
        has = {*msgspec.to_builtins(entry.options or {})} - fixed - {*OF_PIPELINES} - {*(DECIDED if decided else ())}
        varied = {key: values for key, values in options.items() if key in has}
        if "whole" in varied.get("mlp", ()) and adapts_mlp(setup.model_spec):
            varied["mlp"] = ("whole",)  # tiles are refused, and what the leanest configuration holds would not be known
        ordered = {key for key, values in varied.items() if _is_ordered(key, values)} - ({"mlp"} if decided else set())
        grid = {key: _ordered(key, values) for key, values in varied.items() if key in ordered}
        apart = {key: values for key, values in varied.items() if key not in ordered}
        yield _Method(schedule, ranks, ("ring",) if ranks else entry.degrees, grid, apart)


def _is_tried(method: _Method, mesh: Mesh, setup: Setup, sequences: int | None) -> bool:
    """Return whether a schedule is tried with some degrees: those that the setup allows, unless another schedule is the
    same.
    """
    if sequences is not None and not _is_shared(sequences, mesh.dp, setup.batch):
        return False
    if setup.schedule is None and _is_another(method.title, method.axes, mesh.ulysses, mesh.ring):
        return False
    return (
        setup.ulysses_degree in {None, mesh.ulysses}
        and setup.ring_degree in {None, mesh.ring}
        and method.ranks in {None, mesh.ring}
        and setup.cp in {None, mesh.sharing}
    )


def _placed(setup: Setup, method: _Method, mesh: Mesh, gpus: int, sequences: int | None) -> Setup:
    """Return a training step by a schedule with some degrees."""
    return setup.replace(
        schedule=method.schedule, stack=None, scope="step", pad=True, jitter=0.0, gpus=gpus, cp=None,
        dp_degree=mesh.dp, pp_degree=mesh.pp, tp_degree=mesh.tp,
        ulysses_degree=mesh.ulysses if mesh.ulysses > 1 else None, ring_degree=mesh.ring if mesh.ring > 1 else None,
        global_batch=None if sequences is None else sequences,
    )  # fmt: skip


def _chosen(
    method: _Method, mesh: Mesh, options: Mapping[str, Sequence[str]], per_node: int, fixed: set[str]
) -> Iterator[dict[str, str]]:
    """Yield the options that make families of their own: also placements, where heads and parts span nodes."""
    spans = mesh.ulysses > 1 and mesh.ring > 1 and mesh.tp * mesh.sharing > per_node and "placement" not in fixed
    placements = {"placement": options.get("placement", names.PLACEMENTS)} if spans else {}
    apart = {**method.apart, **placements}
    yield from (dict(zip(apart, values, strict=True)) for values in product(*apart.values()))


def _schedules(setup: Setup, gpus: int) -> Iterator[tuple[str | Build | Entry, int | None]]:
    """Yield the schedules that are tried. For plans of documents, beside each stands how many ranks it is for."""
    if setup.schedule is not None:
        yield setup.schedule, None
        return
    yield from ((name, None) for name in SCHEDULES)
    for inside in divisors(gpus)[1:]:
        yield from ((build, inside) for build in planned_schedules(setup, inside))


def _is_ordered(key: str, values: Sequence[str]) -> bool:
    return len(values) == 1 or {*values} <= {*OPTIONS.get(key, ())}


def _ordered(key: str, values: Sequence[str]) -> Sequence[str]:
    return tuple(sorted({*values}, key=OPTIONS[key].index)) if len(values) > 1 else tuple(values)


def _is_another(name: str, axes: Sequence[str], ulysses: int, ring: int) -> bool:
    """Return whether a schedule with such degrees does the same as another one of the catalog."""
    alone = bool(axes) and ulysses * ring == 1
    return alone or (len(axes) > 1 and ulysses == 1) or (name in _MIXED and ring == 1)


def _sequences(setup: Setup) -> int | None:
    """Return the sequences of all replicas together in a step; None where their number is open."""
    if setup.global_batch in {None, ANY}:
        return None
    return sequences_of(setup.global_batch, setup.sequence_length)


def _is_shared(sequences: int, replicas: int, batch: int) -> bool:
    """Return whether replicas share sequences equally, each with ``batch`` of them where that is above 1."""
    return sequences % replicas == 0 and batch in {1, sequences // replicas}


def _named(schedule: str, inside: Mapping[str, int], dp: int, chosen: Mapping[str, str], beside: Sequence[str]) -> str:
    degrees = [f"{letters} {degree}" for letters, degree in inside.items() if degree > 1]
    degrees += [f"{dp} replicas"] * (dp > 1)
    said = [*degrees, *(value if key == "placement" else f"{key} {value}" for key, value in chosen.items())]
    said += beside
    return " ".join([schedule, *([f"({', '.join(said)})"] if said else [])])


def _require_options(options: Mapping[str, Sequence[str]]) -> None:
    known = {"placement", *DEGREES}
    for entry in SCHEDULES.values():
        known |= {*msgspec.to_builtins(entry.options or LayerOptions())}
    for key, values in options.items():
        if key not in known:
            raise InputError(f"`options` {key}: no schedule has it; longstep show schedule NAME lists what there is")
        if not values or isinstance(values, str):
            raise InputError(f"`options` {key}={values!r}: expected a list of values, such as ['full']")


def as_ring(setup: Setup) -> Configuration:
    """Return a setup with the schedule ``ring``, that keeps of ``set`` only what changes the cluster."""
    of_cluster = [f"{key}={value}" for key, value in names.pairs(setup.set) if key.startswith("cluster.")]
    return dataclasses.replace(setup, schedule="ring", stack=None, set=of_cluster, global_batch=None).resolved()
