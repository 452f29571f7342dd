"""What becomes of each tensor of a block between its passes: kept on the GPU, in host memory, or computed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sim.base.errors import InputError, unknown
from sim.schedule.model.block import block_of, out, x
from sim.schedule.model.checkpoint import nameable
from sim.setup.setup import Setup
from sim.words.workload import ModelSpec

TENSORS = ("x", "gate+up+act", "q+k+v", "out", "h1+middle+h2")
"""What is decided together, where nothing else is asked for: 2 x 3^4 ways."""
CHOICES = ("keep", "offload", "recompute")
"""In the order of what a GPU holds; keeping computes and copies least."""
INPUT = x.name
DECIDED = ("checkpoint", "activations", "offloaded")
"""Options of schedules that say the same of all tensors."""


def require_tensors(groups: Sequence[str], model: ModelSpec) -> None:
    """Raise InputError for what is no list of tensors of a model's layers, each once."""
    if not groups or isinstance(groups, str):
        raise InputError(f"`tensors` {groups!r}: expected a list of tensors, such as {list(TENSORS)}")
    listed = [name for group in groups for name in group.split("+")]
    known = list(nameable(block_of(model)))
    for name in listed:
        if name not in known:
            raise unknown("tensor", name, known, "`tensors`")
        if listed.count(name) > 1:
            raise InputError(f"`tensors` {','.join(groups)}: {name} is there twice; list each once")


def grid_of(setup: Setup, groups: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return the choices for each group of tensors in a schedule. Tensors that its layers do not keep are left out: q
    where heads are projected in stages, gate where the MLP is tiled. A layer's input cannot be computed again.
    """
    found: dict[str, Sequence[str]] = {}
    for group in groups:
        there = [name for name in group.split("+") if name in {INPUT, out.name} or _is_kept(setup, name)]
        if there:
            found["+".join(there)] = CHOICES[:2] if INPUT in there else CHOICES
    return found


def _is_kept(setup: Setup, name: str) -> bool:
    try:
        setup.replace(set={"schedule.checkpoint": f"{INPUT}+{name}"}).resolved().built()
    except InputError:
        return False
    return True


def as_options(chosen: Mapping[str, str]) -> dict[str, str]:
    """Return the options of a schedule that say what was chosen of each group.

    >>> as_options({"x": "offload", "q+k+v": "keep", "out": "recompute"})
    {'checkpoint': 'x+q+k+v', 'activations': 'host', 'offloaded': 'x'}
    """
    kept = [group for group, choice in chosen.items() if choice != "recompute"]
    away = [group for group, choice in chosen.items() if choice == "offload"]
    kept = kept if INPUT in "+".join(kept).split("+") else [INPUT, *kept]
    found = {"checkpoint": "+".join(kept), "activations": "host" if away else "hbm"}
    return {**found, "offloaded": "+".join(away)} if away else found
