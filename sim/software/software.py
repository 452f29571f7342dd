"""What software computes a step with: which kernels. A field that says nothing leaves what the profile has."""

from __future__ import annotations

import msgspec

from sim.options import FusedName, HostOptimiserName


class Software(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The kernels of a step."""

    attention: FusedName | None = None
    """Which kernel computes attention that is fused (``flash``; ``schedule.kernel`` names the two that are not). None:
    the one that the profile's points are of."""
    host_optimiser: HostOptimiserName | None = None
    """Whose AdamW runs on the host of GPUs, where ``schedule.optimiser`` is there. None: DeepSpeed's."""


BY_PROFILE = Software()
"""Software that nobody named."""
