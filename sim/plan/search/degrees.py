"""Degrees that plans try: shares of weights, stages, replicas, groups of heads and parts of sequences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from sim.base.errors import InputError
from sim.plan.search.stages import num_stages
from sim.schedule.ir.shares import model_of_share
from sim.setup.global_batch import ANY, divisors
from sim.setup.names import Untold
from sim.setup.setup import Setup
from sim.words.mesh import Mesh
from sim.words.workload import ModelSpec

DEGREES = ("tp_degree", "pp_degree")
"""Degrees of which plans take several numbers, where the setup says none."""
FEW_TOKENS = 2**13
"""Of a GPU in a step, below which shares of weights are tried unasked: then products of whole weights have few rows,
and gathers of these take longer than what hides them. The better of TP 2 and 4 with Ulysses takes 0.65 of the time of
Ulysses alone where a GPU has 1K tokens, 0.86 at 2K, 0.95 at 4K, as much at 8K and 1.03 at 16K (a sequence of Llama-3-8B
on 8 H100; of 70B on 64 it is 0.65, 0.93, 0.96 and 1.02 from 1K to 8K). To try them takes more of a search: of 512K on 8
H100 888 configurations, not 336, and by Ulysses alone 12.7 s of a core to its end, not 3.2, with the same first."""


def meshes(
    setup: Setup,
    options: Mapping[str, Sequence[str]],
    axes: Sequence[str],
    gpus: int,
    per_node: int,
    sequences: int | None,
) -> Iterator[Mesh]:
    """Yield all degrees with which a schedule that splits some axes uses so many GPUs. Raises InputError for wrong
    degrees among the options, and for shares of weights into which the model does not divide.
    """
    shares = num_shares(setup, options.get("tp_degree", ()), gpus, per_node, sequences)
    stages = num_stages(setup, gpus, sequences, asked_stages(setup, options))
    for tp, pp in product(shares, stages):
        each, rest = divmod(gpus, tp * pp)
        for dp, ulysses in () if rest else product(divisors(each), divisors(each)):
            ring, rest = divmod(each, dp * ulysses)
            if rest == 0 and ("ulysses" in axes or ulysses == 1) and ("ring" in axes or ring == 1):
                yield Mesh(tp=tp, pp=pp, dp=dp, ulysses=ulysses, ring=ring)


def num_shares(setup: Setup, asked: Sequence[str], gpus: int, per_node: int, sequences: int | None) -> Sequence[int]:
    """Return over how many ranks weights are shared out: as many as are set, or those that are ``asked`` for; of
    ``any``, and where nobody asks and GPUs have few tokens, all that divide a node, the GPUs and the model.
    """
    if not isinstance(setup.tp_degree, Untold):
        return [setup.tp_degree]
    model = setup.model_spec
    few = sequences is not None and sequences * setup.sequence_length < FEW_TOKENS * gpus
    if ANY in asked or (few and not asked):
        return [degree for degree in divisors(math.gcd(gpus, per_node)) if divides(model, degree)]
    degrees = [_typed("tp_degree", one, f", or {ANY}") for one in asked] or [1]
    for degree in degrees:
        model_of_share(model, degree)
    return degrees


def asked_stages(setup: Setup, options: Mapping[str, Sequence[str]]) -> Sequence[int]:
    """Return the numbers of stages that a setup or the options of a plan ask for; none where nobody does."""
    if not isinstance(setup.pp_degree, Untold):
        return [setup.pp_degree]
    return [_typed("pp_degree", one) for one in options.get("pp_degree", ())]


def _typed(name: str, value: object, more: str = "") -> int:
    """Return a degree that was typed, or given as a number; raises InputError for what is none."""
    text = str(value)
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"`{name}` {text}: expected a whole number of 1 or more{more}")
    return int(text)


def divides(model: ModelSpec, degree: int) -> bool:
    """Return whether so many ranks can share out the weights of a model."""
    try:
        model_of_share(model, degree)
    except InputError:
        return False
    return True
