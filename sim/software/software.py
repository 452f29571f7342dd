"""What software computes a step with: a description, as a model and a cluster are. What ships lies in ``presets``.

A kernel of which it says nothing is the profile's, which is a fused one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from sim.base.errors import InputError
from sim.base.presets import Name, load_toml, preset_names
from sim.words.options import AllocatorName, ChosenAttention, HostOptimiserName

FOLDER = "sim/software/presets"


class _Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what is described."""


class Kernels(_Data, frozen=True, kw_only=True):
    """The kernels of a step. All but attention are named by ``TABLE:PART`` of what was counted (``counted``), several
    that follow each other as ``TABLE:PART+TABLE:PART``.
    """

    attention: ChosenAttention | None = None
    """Which kernel computes attention that is fused (``flash``; ``schedule.kernel`` names the two that are not). None:
    the one that the profile's points are of."""
    torch: Annotated[
        str, msgspec.Meta(pattern=r"\A(\d{1,4}\.\d{1,4}(\.\d{1,4})?)?\Z", description="a version such as 2.5.1")
    ] = ""
    """Its version, as 2.5.1: it decides which kernel ``attention`` of sdpa is. Empty: ``attention.toml`` says which."""
    scores: str = ""
    """What passes over scores of attention that is not fused, between its products: a softmax, and dropout."""
    norm: str = ""
    """Of layers, of heads, and before the head of the model."""
    rotary: str = ""
    mlp: str = ""
    """What an MLP does between its products."""
    loss: str = ""
    """Cross-entropy of logits in fp32, where the schedule casts them (``schedule.loss`` unfused or subtracted): without
    the casts."""
    buckets: str = ""
    """What whole gradients go through before ranks sum them, where that is more than a copy that packs them."""
    wide_buckets: str = ""
    """The same where they are summed in a wider data type (``schedule.reduce`` of a narrow model)."""
    optimiser: str = ""
    """A step of AdamW on the GPU."""
    clipping: str = ""
    """The norm of all gradients, and what scales them down; by default that is in the optimiser's kernel."""
    issue: str = ""
    """Whose eager modules issue kernels, by ``issue.toml``. Empty: a kernel costs the host what it does by itself."""
    connections: Literal[1] | None = None
    """CUDA_DEVICE_MAX_CONNECTIONS of tensor-parallel runs, where that is 1: GPUs then begin with kernels of all streams
    in the order in which the host issues them, so that one that sends does not wait behind the product beside it."""
    check_s: Annotated[float, msgspec.Meta(ge=0, lt=1e9)] = 0.0
    """What hosts take before each collective for each rank that meets, in seconds, where they make sure that all call
    the same, as torch's ProcessGroupWrapper does with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    host_optimiser: HostOptimiserName | None = None
    """Whose AdamW runs on the host of GPUs, where ``schedule.optimiser`` is there. None: DeepSpeed's."""
    allocator: AllocatorName | None = None
    """Of torch, what gives tensors their memory: then what it reserves is walked (``sim.accounts.reserved``), and
    decides what fits. None: what is allocated, and a constant for the allocator (``topology.reserved``)."""

    def __post_init__(self) -> None:
        """Raise ValueError for clipping without an optimiser."""
        if self.clipping and not self.optimiser:
            raise ValueError(f"clipping={self.clipping} without optimiser: name both, or neither")


class Software(_Data, frozen=True, kw_only=True):
    """What trains."""

    said: Name
    """What answers call it."""
    kernels: Kernels = Kernels()
    schedule: dict[str, str | int | bool] = {}
    """Options of schedules that it has other values of than schedules by default: where it shards, what it keeps, in
    which data type it sums. What a user sets comes first, and what a ``stack`` switches on."""
    sources: dict[str, str] = {}
    """By field, ``kernels.norm`` or ``schedule.reduce``: the file and version that says so, or ``assumed``."""

    def __post_init__(self) -> None:
        """Raise ValueError for a source of nothing, and for a field without one."""
        stated = {f"schedule.{name}" for name in self.schedule}
        stated |= {f"kernels.{name}" for name in Kernels.__struct_fields__ if getattr(self.kernels, name)}
        if missing := sorted(stated - {*self.sources}):
            raise ValueError(f"sources: {missing[0]!r} is missing: the file and version that says so, or 'assumed'")
        if unknown := sorted({*self.sources} - stated):
            raise ValueError(f"sources: {unknown[0]!r} is stated nowhere: allowed are {', '.join(sorted(stated))}")


def software_names() -> list[str]:
    """Return the names of the descriptions that ship."""
    return preset_names(FOLDER)


def load_software(name: str | Path | Software) -> Software:
    """Return a description by name or of FILE.toml; raises InputError if there is none, or it is wrong."""
    if isinstance(name, Software):
        return name
    if not isinstance(name, str | Path):
        raise InputError(f"`software` {name!r}: expected a name, FILE.toml or a Software")
    return load_toml("software", str(name), Software, FOLDER, "`software`")
