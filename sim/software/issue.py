"""What the Python of eager modules costs the host, by whose modules they are (``calibrate.software.host``)."""

from __future__ import annotations

from functools import cache
from typing import Annotated

import msgspec

from sim.base.errors import unknown
from sim.base.presets import Name, load_toml
from sim.words.profile import Eager, Profile

MARK = "# What eager modules cost the host, as python -m calibrate.software.host measures it."
"""The first line of the table."""
PARALLEL = "-parallel"
"""Behind the name of a layer that has its products among tensor-parallel ranks."""


class Issued(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One pass of a layer, without attention, collectives and sums of the residual stream."""

    takes: Annotated[float, msgspec.Meta(gt=0)]
    """In small kernels of torch, as one call of each takes without its launch."""
    kernels: Annotated[float, msgspec.Meta(gt=0)]
    """Of products, norms, rotary embedding and the MLP, which the simulator issues for it."""

    @property
    def each(self) -> float:
        """Small kernels that the host takes for one of them."""
        return self.takes / self.kernels


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decoder layer of some software."""

    said: Name
    software: Name
    """The description whose kernels the simulator issues for it."""
    forward: Issued
    backward: Issued


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured in one run."""

    created: str
    """The day."""
    cpu: Name
    versions: dict[str, str]
    small_kernel_us: Annotated[float, msgspec.Meta(gt=0)]
    """Which ``takes`` counts in."""
    layers: dict[str, Layer]


@cache
def table() -> Table:
    """Return the table that ships."""
    return load_toml("table", "issue", Table, "sim/software", "`software`")


def eager_of(profile: Profile, name: str, *, parallel: bool) -> Eager | None:
    """Return what modules cost on the host of a profile, by their name in the table: those among tensor-parallel ranks
    where there are any. None for no name, and where the profile does not say what a kernel costs. Raises InputError if
    there are none of the name.
    """
    layers = table().layers
    names = [one for one in layers if not one.endswith(PARALLEL)]
    if name and name not in names:
        raise unknown("modules", name, names, "`set` software.issue")
    kernel = profile.issue.get("kernel")
    if not name or kernel is None:
        return None
    layer = layers.get(name + PARALLEL, layers[name]) if parallel else layers[name]
    forward_s, backward_s = ((one.each - 1) * kernel.host_s for one in (layer.forward, layer.backward))
    return Eager(forward_s=forward_s, backward_s=backward_s)
