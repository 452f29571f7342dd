"""Activation checkpointing: what is kept of a layer for its backward pass, and what that computes again before it.

One mechanism for all kinds (arXiv:1604.06174 §3): of the tensors that are kept follows which equations of a block run
again. With a tensor goes what the same kernel makes beside it: the log-sum-exp with attention's output, a norm's rstd
with its result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sim.base.errors import InputError
from sim.schedule.ir.tensors import Tensor
from sim.schedule.model.equations import Around, Block, Equation


class Checkpoint(NamedTuple):
    """What is kept of a layer between its passes, and what makes the rest of what its backward pass needs."""

    held: tuple[Tensor, ...]
    """What is kept beside attention's own, in the order in which it is made."""
    again: Around
    """The equations that run again."""
    attends: bool
    """Whether attention runs again, and keeps nothing."""
    lays_out: bool
    """Whether attention keeps its results alone, and is given q, k and v again."""

    @property
    def is_needed(self) -> bool:
        """Whether anything runs again."""
        return self.attends or self.lays_out or any(self.again)


def checkpoint(block: Block, name: str) -> Checkpoint:
    """Return what a name means for a block: none keeps all that backward needs; full the layer's input; whole the same,
    and all equations run again, also those behind the last that backward needs; attention the input and its own output
    (DistFlashAttn, arXiv:2310.03294 §3.3); others list tensors, as ``x+out+h2``. A block whose projections are apart
    has no q, k and v to keep.

    Raises InputError for what is no tensor that backward needs, and for lists from which some cannot be made.
    """
    inputs, needed = _needed(block)
    kept = _listed(
        block,
        "checkpoint",
        {
            "none": "+".join(_names(block, needed)),
            "full": block.x.name,
            "whole": block.x.name,
            "attention": f"{block.x.name}+{block.out.name}",
        },
        name,
    )
    missing = set(needed) - kept
    after = block.forward.after if name == "whole" else _makers(block.forward.after, missing, kept)
    attends = block.out in missing
    missing |= inputs - kept if attends else set()
    before = _makers(block.forward.before, missing, kept)
    if block.x in missing:
        raise InputError(
            f"`set` schedule.checkpoint={name} lacks {block.x.name}: backward needs a layer's input, and no equation "
            f"of the layer makes it; add it to the list"
        )
    lays_out = not attends and not inputs <= kept
    apart = kept if attends or lays_out else kept - inputs
    held = tuple([tensor for tensor in _with_input(block, needed) if tensor in apart])
    return Checkpoint(held, Around(before, after), attends, lays_out)


def offloaded(block: Block, name: str, point: Checkpoint) -> frozenset[Tensor] | None:
    """Return which tensors of a layer go to host memory, of a list of those that are kept; None for all.

    Raises InputError for a tensor that is not kept.
    """
    if name == "all":
        return None
    found = _listed(block, "offloaded", {"all": None}, name)
    _, needed = _needed(block)
    stays = {block.q, block.k, block.v} if point.lays_out else set()
    stays |= {block.out} if point.attends else set()
    held = set(point.held) | ({block.q, block.k, block.v, block.out} - stays)
    for tensor in _with_input(block, needed):
        if tensor in found and tensor not in held and tensor.name in name.split("+"):
            raise InputError(
                f"`set` schedule.offloaded={name}: {tensor.name} is not kept, but computed again; leave it out, or add "
                f"it to `set` schedule.checkpoint"
            )
    return frozenset(found)


def _needed(block: Block) -> tuple[set[Tensor], tuple[Tensor, ...]]:
    """Return attention's inputs that can be kept, and all that backward needs, in the order in which it is made."""
    at = block.saved.index(block.out)
    inputs = set() if block.projections else {block.q, block.k, block.v}
    return inputs, (
        *block.saved[:at],
        *(one for one in (block.q, block.k, block.v) if one in inputs),
        *block.saved[at:],
    )


def nameable(block: Block) -> dict[str, Tensor]:
    """Return the tensors that lists may have, by name."""
    _, needed = _needed(block)
    return _names(block, _with_input(block, needed))


def _names(block: Block, tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Return by name those of some tensors that lists may have."""
    made = _made(block)
    return {tensor.name: tensor for tensor in tensors if tensor in made or tensor in {block.x, block.out}}


def _with_input(block: Block, needed: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return what a layer may keep: its input, too, where backward needs none of it but by computing again."""
    return needed if block.x in needed else (block.x, *needed)


def _made(block: Block) -> dict[Tensor, tuple[Tensor, ...]]:
    """Return what backward needs of what each kernel makes, by the first of it."""
    inputs, needed = _needed(block)
    wanted = {*needed, *inputs}
    each = [one for part in block.forward for whole in part for one in whole.joins or (whole,)]
    every = [one.results for one in each if not one.adds]
    kept = [tuple([tensor for tensor in results if tensor in wanted]) for results in every]
    return {results[0]: results for results in kept if results}


def _listed(block: Block, option: str, spelled: Mapping[str, str | None], name: str) -> set[Tensor]:
    """Return the tensors of a list, each with what the same kernel makes beside it. Some lists have names; None stands
    for everything.
    """
    names, made = nameable(block), _made(block)
    chosen = (spelled.get(name, name) or "+".join(names)).split("+")
    for one in chosen:
        if one not in names:
            raise InputError(
                f"`set` schedule.{option}={name}: {one!r} is none of the tensors that a layer can keep for its "
                f"backward pass; allowed are {', '.join(spelled)}, or a list such as x+out of {', '.join(names)}"
            )
    return {tensor for one in chosen for tensor in made.get(names[one], (names[one],))}


def _makers(equations: tuple[Equation, ...], missing: set[Tensor], kept: set[Tensor]) -> tuple[Equation, ...]:
    """Return the equations that make what is missing, or that save it themselves, in their order; what these read is
    missing then, too.
    """
    found: list[Equation] = []
    for equation in reversed(equations):
        if not missing.isdisjoint((*equation.results, *(equation.operands if equation.saves else ()))):
            found.insert(0, equation)
            missing |= {tensor for tensor in equation.operands if tensor.kind == "activation"} - kept
    return tuple(found)
