"""What may differ between runs of one schedule: options that change its time or memory, never what it computes."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sim.errors import InputError

LayoutName = Literal["contiguous", "zigzag", "striped"]
Place = Literal["hbm", "host", "pageable"]
"""A GPU's memory; its host's where that is pinned, so that copy engines reach it; and where it is not."""
AttentionName = Literal["flash", "memory-efficient", "standard"]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a schedule splits, sends and overlaps. Every builder names those that it takes, and refuses others."""

    layout: LayoutName = "contiguous"
    """Which tokens lie on which member of a ring: see ``layout``."""
    placement: Literal["ulysses-inner", "ring-inner"] = "ulysses-inner"
    """Whose groups are neighbouring ranks, where ranks split both heads and sequence (arXiv:2405.07719 §3)."""
    inner_ring_degree: Annotated[int, Meta(ge=1)] | None = None
    """Ranks of a double ring's inner rings, normally those of a node; by default the largest divisor of the ring degree
    that is at most 8 and leaves two rings."""
    ring_backward: Literal["own-kv", "kv-at-hand", "queries"] = "own-kv"
    """What travels in a ring's backward pass: keys from their owner on, dKV in P hops (ring-flash-attention); keys from
    where the forward pass left them, dKV in P - 1 hops (Transformer Engine); or queries (arXiv:2509.19836 §3.1)."""
    gradients: Literal["fp32", "model"] = "fp32"
    """Data type in which partial gradients of q, k and v are summed and sent: promote(model dtype, fp32), or the
    model's."""
    communicators: Literal["two", "one"] = "two"
    """Whether what hops back has a communicator of its own, or queues behind what hops on."""
    overlap: bool = True
    """Whether kernels run beside communication that they do not need; else the host waits for each."""
    packed: bool = False
    """Whether q, k and v go in one all-to-all instead of three; of UPipe k and v, which its stages share."""
    layout_copies: Literal["needed", "always"] = "needed"
    """Whether all-to-alls copy only where parts have gaps, or before and after each, as published code does."""
    recompute: bool = True
    """Whether UPipe's backward pass sends q, k and v again, or keeps them."""
    activations: Place = "hbm"
    """Where layers but the last keep what their backward pass needs: in the GPU's memory, or copied to its host's
    (pinned, or pageable) and fetched again one layer ahead."""
    kernel: AttentionName = "flash"
    """How one device attends: fused; in chunks of keys, unfused (arXiv:2112.05682); or with all scores written out."""


DEFAULTS = Options()


OF_LAYERS = ("activations",)
"""What schedules take that can have layers around them."""


def only(options: Options, schedule: str, *taken: str) -> None:
    """Raise InputError where an option was set that the schedule has no use for."""
    for name in options.__struct_fields__:
        if name not in taken and getattr(options, name) != getattr(DEFAULTS, name):
            takes = f"it takes {', '.join(taken)}" if taken else "it takes none"
            raise InputError(
                f"schedule {schedule!r} has no option {name}: {takes}; leave out --set schedule.{name}, "
                f"or choose another schedule with --schedule"
            )
