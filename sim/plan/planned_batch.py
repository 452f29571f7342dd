"""The global batch that plans keep: what is asked for, or what they assume and say.

Where each replica has a sequence of its own, configurations with more replicas train more tokens a step, and their
steps cannot be compared. So a plan compares configurations by their time for the same sequences: with fewer replicas
each trains more of them, one after the other. Where nobody says how many, they are about 512K tokens, and at least one
sequence (``global_batch.USUAL_TOKENS``): for long contexts the step that all other questions are about, and for short
ones enough for replicas. Where the longest context is looked for it is one sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sim.base.errors import InputError
from sim.plan.search.families import as_ring, families
from sim.plan.search.space import Family
from sim.setup import names
from sim.setup.global_batch import ANY, USUAL_TOKENS, counts_tokens, of_each, sequences_of, usual_sequences
from sim.setup.names import Assumed
from sim.setup.setup import Setup


def with_batch(setup: Setup, counts: Sequence[int] | None = None, *, of_any_length: bool = False) -> Setup:
    """Return a setup with the ``global_batch`` that its plan keeps, on its GPUs or on any number of ``counts``. It is
    ``any`` where a ``batch`` above 1 sets the sequences of each replica. A search for lengths (``of_any_length``) takes
    no global batch in tokens: raises InputError for one, and for documents of each micro-batch, because plans choose
    the number of micro-batches.

    >>> with_batch(Setup(gpus=64, seq="64K")).assumed["global_batch"], with_batch(Setup(seq="4M")).global_batch
    ('8', '1')
    """
    if setup.documents is not None and names.micro_batches_of(setup.documents):
        raise InputError(
            "`documents` of each micro-batch are of one step, and plans choose how many micro-batches there are: give "
            "documents that all sequences share, or ask for one step"
        )
    if setup.global_batch is not None:
        if of_any_length and counts_tokens(setup.global_batch):
            raise InputError(
                f"`global_batch` {setup.global_batch} is in tokens, of which longer sequences are fewer: set it in "
                f"sequences, such as 1, where the longest is looked for"
            )
        return setup
    if setup.batch > 1:
        return setup.replace(global_batch=Assumed(ANY))
    whole = as_ring(setup.replace(ulysses_degree=None, ring_degree=None, dp_degree=1))
    gpus = (max(counts) if counts else whole.mesh.size) // whole.mesh.pp // whole.mesh.tp
    tokens = USUAL_TOKENS if of_any_length else setup.sequence_length
    return setup.replace(global_batch=Assumed(usual_sequences(tokens, gpus, _replicas(setup, gpus))))


def _replicas(setup: Setup, gpus: int) -> int:
    """Return the number of replicas if the degrees of the schedule fix it, else 1."""
    if setup.schedule is None:
        return 1
    typed = [getattr(setup, f"{name}_degree") for name in names.entry(setup.schedule).degrees]
    shared = math.prod(typed) if None not in typed else 0
    return gpus // shared if shared and gpus % shared == 0 else 1


def require_shared(setup: Setup, found: Sequence[Family]) -> None:
    """Raise InputError where the degrees leave no number of replicas that divides the global batch."""
    if found or setup.global_batch in {None, ANY}:
        return
    for family in families(setup.replace(global_batch=ANY)):
        mesh = family.setup.resolved().mesh
        sequences = sequences_of(setup.global_batch or 1, setup.sequence_length)
        of_each(setup.global_batch or 1, sequences, mesh.dp, mesh.dp * mesh.sharing, setup.batch)
