"""Kernels of some software in the place of a profile's: attention of another generation, and what was counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from sim.base.errors import InputError
from sim.base.kept import kept
from sim.schedule.derive.kernels import PACKS
from sim.software.attention import attending, named
from sim.software.counted import Counted, Kernel, Part, load_counted
from sim.software.issue import eager_of
from sim.software.software import Kernels, Software
from sim.words.profile import FusedAttention, Profile, Ran
from sim.words.workload import Dtype


class _Place(NamedTuple):
    """Which passes of a part run where a schedule has one kernel."""

    kernel: str
    passes: tuple[str, ...]
    """Where a kernel stands for any of several, it takes their mean."""
    elements: str
    """What the size of the kernel is, among the dimensions of tables. What grows with less than that is left out, such
    as a sum of each row."""
    whole: bool = False
    """Whether it stands for all passes, not for any of them; casts before and behind it are kernels of their own."""
    of_keys: str = ""
    """Where each pass has another such kernel, for keys: what the size of that one is. What a pass runs is spread over
    both by their sizes."""


class Attended(NamedTuple):
    """What of a model and its micro-batches decides which kernels there are around attention."""

    kv_share: float = 1.0
    """Heads of keys to a head of queries."""
    alone: bool = True
    """Whether one sequence is computed at once."""

    def part(self, counted: Counted, name: str) -> Part:
        """Return a part as it is of such a model, where it was counted apart: with as many heads of keys (``-mha``), of
        one sequence (``-alone``).
        """
        for mark, holds in (("-mha", self.kv_share == 1), ("-alone", self.alone)):
            if holds and f"{name}{mark}" in counted.parts:
                name += mark
        return counted.part(name)


_ONE_OF_ALL_HEADS = Attended()
_PLACES: Mapping[str, tuple[_Place, ...]] = {
    "scores": (
        _Place("softmax", ("forward",), "tokens*sequence*heads"),
        _Place("softmax_backward", ("backward",), "tokens*sequence*heads"),
    ),
    "norm": (
        _Place("rms_norm", ("forward",), "tokens*hidden"),
        _Place("rms_norm_backward", ("backward",), "tokens*hidden"),
    ),
    "rotary": (_Place("rope", ("forward", "backward"), "tokens*heads*head_dim", of_keys="tokens*kv_heads*head_dim"),),
    "mlp": (
        _Place("swiglu", ("forward",), "tokens*ffn"),
        _Place("swiglu_backward", ("backward",), "tokens*ffn"),
    ),
    "loss": (_Place("cross_entropy", ("forward", "backward"), "tokens*vocab", whole=True),),
    "buckets": (_Place(PACKS[0], ("step",), "parameters"),),
    "wide_buckets": (_Place(PACKS[1], ("step",), "parameters"),),
    "optimiser": (_Place("adamw", ("step",), "parameters"),),
}
_CLIPPING = _Place("square_sum", ("step",), "parameters")
"""What is normed is scaled, whoever owns it: nanotron's ranks do both to all gradients (optim/clip_grads.py)."""


_EAGER = {"norm": "transformers-llama:norm", "mlp": "transformers-llama:mlp"}


def beside_fused(software: Software) -> Kernels:
    """Return the kernels of software in the place of those of a schedule that was written with fused modules: its own,
    and what its eager modules run (``schedule.modules``), whose ops are else in the schedule.
    """
    eager = software.schedule.get("modules") == "eager"
    return msgspec.structs.replace(software.kernels, **_EAGER) if eager else software.kernels


def running(
    profile: Profile | None,
    kernels: Kernels,
    said: str,
    chip: str,
    attended: Attended = _ONE_OF_ALL_HEADS,
    *,
    parallel: bool = False,
    margin: bool = False,
) -> Profile | None:
    """Return a profile with the kernels of some software in the place of its own, and what that software is called: for
    the same ones always the same object, beside which its tables are kept. ``parallel``: whether products are split
    among tensor-parallel ranks; ``margin``: whether they leave SMs to what these send. Raises InputError where there
    are no figures of them.
    """
    runs = runs_of(kernels, attended)
    one_queue = parallel and kernels.connections == 1
    if profile is None:
        if runs or kernels.attention or kernels.issue or kernels.allocator or kernels.check_s or one_queue:
            raise InputError(
                "`software` names kernels, but at datasheet rates all kernels are alike; set `profile`, or leave it out"
            )
        return None
    attention = named(kernels.attention, chip, kernels.torch)
    found = attending(profile, attention, chip) if attention else profile
    eager = eager_of(found, kernels.issue, parallel=parallel)
    picks = kernels.torch if attention and kernels.attention == "sdpa" else ""
    persistent = {} if margin else found.persistent
    apart = picks, eager, kernels.allocator, kernels.check_s, one_queue, persistent != found.persistent
    if not (runs or said or any(apart)):
        return found
    described, key = _described(found), (said, *apart, *runs.items())
    if key not in described:
        described[key] = msgspec.structs.replace(
            found, runs=found.runs | runs, software=said, attention=_as_picked(found.attention, picks), eager=eager,
            allocator=kernels.allocator, check_s=kernels.check_s, one_queue=one_queue, persistent=persistent,
        )  # fmt: skip
    return described[key]


def _as_picked(attention: FusedAttention | None, torch: str) -> FusedAttention | None:
    """Return a kernel of attention that says which version of torch picks it, if one does."""
    if attention is None or not torch:
        return attention
    return msgspec.structs.replace(attention, said=f"{attention.said}, what SDPA of torch {torch} picks")


@kept
def _described(profile: Profile) -> dict[object, Profile]:  # noqa: ARG001 - beside which they are kept
    return {}


def runs_of(kernels: Kernels, attended: Attended = _ONE_OF_ALL_HEADS) -> dict[str, tuple[Ran, ...]]:
    """Return what was counted of some kernels, by the kernel of a schedule in whose place it runs. Raises InputError
    for a table or part that there is none of.
    """
    found = {}
    for field, places in _PLACES.items():
        if stated := getattr(kernels, field):
            for place in places:
                found[place.kernel] = tuple(ran for _, ran in _ran(field, stated, place, attended))
    if kernels.clipping:
        found[_CLIPPING.kernel] = tuple(ran for _, ran in _ran("clipping", kernels.clipping, _CLIPPING, attended))
    return found


def _ran(field: str, stated: str, place: _Place, attended: Attended) -> list[tuple[Kernel, Ran]]:
    """Return the kernels of parts that pass over all elements of the kernel in whose place they run."""
    found = []
    for one in stated.split("+"):
        table, colon, part = one.partition(":")
        if not colon:
            raise InputError(f"`software` kernels.{field}={stated}: expected TABLE:PART, as transformers-llama:norm")
        counted = attended.part(load_counted(table), part)
        kernels = [kernel for name in place.passes for kernel in getattr(counted, name).kernels]
        kernels = [kernel for kernel in kernels if not place.whole or kernel.kernel != "_to_copy"]
        turns = 1 if place.whole else len(place.passes) * (2 if place.of_keys else 1)
        passing = [(kernel, each) for kernel in kernels if (each := _bytes_per_element(kernel, place, attended))]
        if not passing:
            raise InputError(
                f"`software` kernels.{field}={stated}: {one} runs nothing that passes over {place.elements}; name "
                f"another part"
            )
        found += [(kernel, _as_ran(kernel, each, turns)) for kernel, each in passing]
    return found


def _bytes_per_element(kernel: Kernel, place: _Place, attended: Attended) -> float:
    """Return what a kernel moves for each element in whose place it runs; where two share it by their elements, and
    its launches half and half, for each of the mean of both.
    """
    of_own, of_keys = (
        kernel.reads.get(elements, 0.0) + kernel.writes.get(elements, 0.0)
        for elements in (place.elements, place.of_keys)
    )
    share = attended.kv_share
    return 2 * (of_own + share * of_keys) / (1 + share) if place.of_keys else of_own


def _as_ran(kernel: Kernel, bytes_per_element: float, turns: int) -> Ran:
    dtype: Dtype = "fp32" if kernel.dtype == "bool" or kernel.dtype == "int32" else kernel.dtype  # noqa: PLR1714 - mypy narrows these
    return Ran(
        kernel=kernel.variant, dtype=dtype, bytes_per_element=bytes_per_element, launches=kernel.launches / turns
    )
