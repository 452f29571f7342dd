"""Complete configurations of a training step on some GPUs: schedules x degrees x placements x options."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product, takewhile
from typing import NamedTuple

import msgspec

from sim.balance.documents import planned_schedules
from sim.base.errors import InputError
from sim.plan.search.degrees import DEGREES, asked_stages, meshes
from sim.plan.search.stages import OF_PIPELINES, pipelines
from sim.plan.search.tensors import DECIDED, as_options, grid_of
from sim.schedule.methods.catalog import SCHEDULES, Build, Entry
from sim.schedule.model.adapters import adapts_mlp
from sim.setup import names
from sim.setup.configuration import Configuration
from sim.setup.global_batch import ANY, divisors, sequences_of
from sim.setup.setup import Setup
from sim.words.options import LayerOptions

OPTIONS: dict[str, tuple[str, ...]] = {
    "checkpoint": ("none", "attention", "full"),
    "activations": ("hbm", "host"),
    "optimiser": ("gpu", "host"),
    "mlp": ("whole", "tiled"),
    "loss": ("chunked",),
}
"""What is varied of a schedule where nothing else is asked for. The first value of each recomputes and copies least,
the last holds least in GPUs' memory: ``Branch`` rests on it, and ``tests/plan/test_plan.py`` tries it."""
_RESHAPED = ("mlp",)
"""Options whose values run kernels of other shapes, of which either may be faster."""
_MIXED = ("usp",)
"""Schedules that are another one of the catalog where one of their two degrees is 1."""


class Target(NamedTuple):
    """What a step has to reach; nothing where both are None."""

    step_time_s: float | None = None
    tokens_per_s: float | None = None
    """Of all GPUs together."""

    def within_s(self, tokens: int) -> float:
        """Return the longest time that a step of so many tokens may take.

        >>> Target(tokens_per_s=2048.0).within_s(8192)
        4.0
        """
        by_rate = math.inf if self.tokens_per_s is None else tokens / self.tokens_per_s
        return min(by_rate, math.inf if self.step_time_s is None else self.step_time_s)

    def require(self) -> None:
        """Raise InputError for a target that nothing or everything reaches."""
        for name, value in (("step_time", self.step_time_s), ("tokens_per_s", self.tokens_per_s)):
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"`{name}` {value}: expected a number above 0, or none")


ANYTHING = Target()


class Family(NamedTuple):
    """A schedule with its degrees and placement."""

    setup: Setup
    named: str
    """As a row of results says it."""
    grid: Mapping[str, Sequence[str]]
    """The values of each option that is varied, of those that the schedule has."""
    worth: float = 1
    """What a step of it is worth: best is the least time for so much. Its sequences, of all replicas; where cost
    counts, over what its GPUs cost an hour."""
    within_s: float = math.inf
    """What its step may take."""
    like: str = ""
    """The family with one stage whose ranks do the same work: of a pipeline no step is below its kernels."""
    bubbles: float = 0.0
    """How many times its layers' kernels a pipeline waits at least besides, for stages at both ends of a step."""
    tensors: Sequence[str] = ()
    """Of ``grid`` the groups of tensors of which it is varied what becomes of them (``sim/plan/search/tensors.py``)."""

    @property
    def num_leaves(self) -> int:
        """How many configurations it has."""
        return math.prod(map(len, self.grid.values()))


class Branch(NamedTuple):
    """All configurations of a family whose first options are chosen; where all are, it is one."""

    family: Family
    chosen: tuple[str, ...] = ()

    @property
    def is_leaf(self) -> bool:
        """Whether all options are chosen, so that it is one configuration."""
        return len(self.chosen) == len(self.family.grid)

    @property
    def num_leaves(self) -> int:
        """How many configurations it has."""
        return math.prod(map(len, self._open))

    @property
    def parts(self) -> list[Branch]:
        """One for each value of the next option, with the options behind it that have one value only."""
        first, *others = self._open
        alone = [values[0] for values in takewhile(lambda values: len(values) == 1, others)]
        return [self._replace(chosen=(*self.chosen, value, *alone)) for value in first]

    @property
    def leaves(self) -> Iterator[Branch]:
        """Its configurations."""
        for values in product(*self._open):
            yield self._replace(chosen=(*self.chosen, *values))

    @property
    def fastest(self) -> Branch:
        """The configuration with the first value of every option that is not chosen: it recomputes and copies least."""
        return self._replace(chosen=(*self.chosen, *(values[0] for values in self._open)))

    @property
    def fast(self) -> list[Branch]:
        """Configurations one of which is fastest: the ``fastest`` one, with every value of the options that reshape
        kernels.
        """
        keys = [*self.family.grid][len(self.chosen) :]
        some = [values if key in _RESHAPED else values[:1] for key, values in zip(keys, self._open, strict=True)]
        return [self._replace(chosen=(*self.chosen, *values)) for values in product(*some)]

    @property
    def leanest(self) -> Branch:
        """The configuration with the last value of every option that is not chosen: it holds least in GPUs' memory."""
        return self._replace(chosen=(*self.chosen, *(values[-1] for values in self._open)))

    @property
    def setup(self) -> Setup:
        """The setup of a leaf."""
        options = dict(zip(self.family.grid, self.chosen, strict=True))
        if self.family.tensors:
            options |= as_options({group: options.pop(group) for group in self.family.tensors})
        return self.family.setup.replace(set={f"schedule.{key}": value for key, value in options.items()})

    @property
    def named(self) -> str:
        """Options as a row of results says them."""
        return ", ".join(f"{key} {value}" for key, value in zip(self.family.grid, self.chosen, strict=False))

    @property
    def _open(self) -> list[Sequence[str]]:
        return [*self.family.grid.values()][len(self.chosen) :]


def families(
    setup: Setup,
    options: Mapping[str, Sequence[str]] = OPTIONS,
    target: Target = ANYTHING,
    price: float | None = None,
    beside: Sequence[str] = (),
    tensors: Sequence[str] = (),
) -> list[Family]:
    """Return all schedules with all degrees that take the GPUs of a setup. What the setup itself says of schedule,
    degrees and options is not varied; replicas are: as many as share its ``global_batch``, or where that is ``any`` or
    none, all numbers, each with as many sequences as ``batch`` says. So are stages of a pipeline, where micro-batches
    fill them and nobody says how many (``sim.plan.search.stages``), and shares of weights, where options list degrees
    (``sim.plan.search.degrees``). Values of an option that ``OPTIONS`` does not order make families of their own. With
    the ``price`` of a GPU-hour best is what costs least; ``beside`` is said with the degrees. Of groups of ``tensors``
    it is varied what becomes of each, instead of what becomes of all; then values of ``mlp``, with which blocks have
    other tensors, make families of their own, too.

    Whether a combination is valid is for builders to say: what they refuse is in it. Raises InputError for an option
    that no schedule has, or for one without values.
    """
    _require_options(options)
    sequences = _sequences(setup)
    whole = setup.replace(ulysses_degree=None, ring_degree=None, cp=None)
    every = as_ring(whole)
    gpus, per_node = every.mesh.size, every.spec.gpus_per_node
    tokens = whole.sequence_length if target.tokens_per_s else 0
    fixed = {key.partition(".")[2] for key, _ in names.pairs(setup.set) if key.startswith("schedule.")}
    if tensors and (both := fixed & {*DECIDED}):
        raise InputError(f"`tensors` are decided one by one: leave out `set` schedule.{min(both)}")
    found, asked = list[Family](), bool(asked_stages(setup, options))
    for name, ranks in _schedules(setup, gpus // setup.pp_degree // setup.tp_degree):
        entry = names.entry(name)
        has = {*msgspec.to_builtins(entry.options or {})} - fixed - {*OF_PIPELINES}
        varied = {key: values for key, values in options.items() if key in has - {*(DECIDED if tensors else ())}}
        if "whole" in varied.get("mlp", ()) and adapts_mlp(setup.model_spec):
            varied["mlp"] = ("whole",)  # tiles are refused, and what the leanest configuration holds would not be known
        apart = {"mlp"} if tensors else set()
        grid = {key: _ordered(key, some) for key, some in varied.items() if key not in apart and _is_ordered(key, some)}
        others = {key: values for key, values in varied.items() if key not in grid}
        title = names.schedule_name(name)
        axes = ("ring",) if ranks else entry.degrees
        for mesh in meshes(setup, options, axes, gpus, per_node, sequences):
            dp, ulysses, ring = mesh.dp, mesh.ulysses, mesh.ring
            if sequences is not None and not _is_shared(sequences, dp, setup.batch):
                continue
            if setup.schedule is None and _is_another(title, axes, ulysses, ring):
                continue
            if setup.ulysses_degree not in {None, ulysses} or setup.ring_degree not in {None, ring}:
                continue
            if ranks not in {None, ring} or setup.cp not in {None, mesh.sharing}:
                continue
            spans = ulysses > 1 and ring > 1 and mesh.tp * mesh.sharing > per_node and "placement" not in fixed
            orders = tuple(options.get("placement", names.PLACEMENTS)) if spans else ()
            base = setup.replace(
                schedule=name, stack=None, scope="step", pad=True, gpus=gpus, dp_degree=dp, pp_degree=mesh.pp,
                tp_degree=mesh.tp, jitter=0.0,
            )  # fmt: skip
            each = setup.batch * dp if sequences is None else sequences
            inside = {"TP": mesh.tp, "U": ulysses, "R": ring}
            base = base.replace(
                cp=None, ulysses_degree=ulysses if ulysses > 1 else None, ring_degree=ring if ring > 1 else None,
                global_batch=None if sequences is None else sequences,
            )  # fmt: skip
            for values in product(*([*others.values()] + [orders] * bool(orders))):
                chosen = dict(zip([*others, "placement"], values, strict=False))
                like = _named(title, inside, dp * mesh.pp, chosen, beside) if mesh.pp > 1 else ""
                for pipeline in pipelines(base, options, fixed, asked=asked):
                    own = {**chosen, **pipeline.options}
                    placed = base.replace(set={f"schedule.{key}": value for key, value in own.items()}).spelled_out()
                    named = _named(title, {**inside, "PP": mesh.pp}, dp, own, beside)
                    worth = each if price is None else each / (price * gpus)
                    groups = grid_of(placed, tensors)
                    within_s = target.within_s(each * tokens)
                    one = Family(placed, named, groups | grid, worth, within_s, like, pipeline.bubbles, [*groups])
                    found.append(one)
    return sorted(found, key=lambda one: (one.setup.pp_degree, one.setup.tp_degree))


def _schedules(setup: Setup, gpus: int) -> Iterator[tuple[str | Build | Entry, int | None]]:
    """Yield the schedules that are tried; those of plans of documents with how many ranks each is for."""
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
    """Return whether a schedule with such degrees does what another one of the catalog is there for."""
    alone = bool(axes) and ulysses * ring == 1
    return alone or (len(axes) > 1 and ulysses == 1) or (name in _MIXED and ring == 1)


def _sequences(setup: Setup) -> int | None:
    """Return how many sequences all replicas together have in a step; None where that is left open."""
    if setup.global_batch in {None, ANY}:
        return None
    return sequences_of(setup.global_batch, setup.sequence_length)


def _is_shared(sequences: int, replicas: int, batch: int) -> bool:
    """Return whether each of some replicas has as many of some sequences: as a ``batch`` above 1 says."""
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
