"""What people call a cluster: a preset, a GPU that one has, or so many of them, such as 16xH100."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from msgspec import structs

from sim.base.errors import InputError
from sim.base.presets import load_toml, preset_names
from topology.specs import ClusterSpec

HARDWARE = "topology/hardware"
_FORMS = {"SXM": ("sxm", "sxm4", "sxm5", "sxm6"), "PCIe": ("pcie", "pci"), "NVL": ("nvl",)}
"""What a GPU comes as, the usual one first, and how people write it."""
_IDLE = {"nvidia", "amd", "geforce", "instinct", "tensor", "core", "gpu", "gpus", "generation"}
_OPTIONAL = "rtx"
_COUNTED = re.compile(r"\s*(\d{1,6})\s*[x*\u00d7]\s*(\S.*)", re.IGNORECASE)
_NEAR = 3
"""Names that an error proposes."""


class GpuName(NamedTuple):
    """The name of a GPU as presets write it, such as RTX-6000-Ada-48GB or H100-SXM-80GB."""

    words: tuple[str, ...]
    form: str
    """One of SXM, PCIe and NVL; empty where a GPU comes as one."""
    memory: int
    """GB; 0 where it does not say."""

    def spellings(self) -> set[str]:
        """Return what people may call it, without what stands between the words."""
        chip = [word.lower() for word in self.words]
        chips = {"".join(chip), "".join(word for word in chip if word != _OPTIONAL)}
        forms = ("", *_FORMS.get(self.form, ()))
        memories = ("", f"{self.memory}gb", f"{self.memory}g", f"{self.memory}") if self.memory else ("",)
        return {
            chip + ends for chip, one, other in product(chips, forms, memories) for ends in (one + other, other + one)
        }


def gpu_name(text: str) -> GpuName:
    """Return the parts of a GPU's name.

    >>> gpu_name("H100-SXM-80GB")
    GpuName(words=('H100',), form='SXM', memory=80)
    """
    words = text.split("-")
    memory = int(words.pop()[:-2]) if len(words) > 1 and re.fullmatch(r"\d{1,4}GB", words[-1]) else 0
    form = words.pop() if len(words) > 1 and words[-1] in _FORMS else ""
    return GpuName(tuple(words), form, memory)


def load_named(name: str) -> ClusterSpec:
    """Return the spec that a preset's name means, or that of the preset with such a GPU, where a count says how many
    GPUs are meant; raises InputError with the names that are near.

    >>> spec = load_named("16xH100")
    >>> spec.name, spec.nodes, spec.gpus_meant
    ('hgx-h100', 2, 16)
    """
    if name in preset_names(HARDWARE):
        return _preset(name)
    match = _COUNTED.fullmatch(name)
    spoken = _spoken(match[2] if match else name)
    presets = {_spoken(preset): preset for preset in preset_names(HARDWARE)}
    if spoken in _gpus():
        return _counted(_usual(name, _gpus()[spoken]), int(match[1]) if match else None, name)
    if spoken not in presets:
        raise _unknown(name, spoken, match[1] if match else "")
    found = _preset(presets[spoken])
    if match:
        count = "`gpus`" if found.gpu.kind == "cpu" else f"`nodes`, or name its GPU, {match[1]}x{found.gpu.name}"
        raise InputError(
            f"cluster {name!r}: a count is of GPUs, and {found.name} is a machine; set `cluster` {found.name} and "
            f"{count}"
        )
    return found


def _preset(name: str) -> ClusterSpec:
    return load_toml("cluster", name, ClusterSpec, HARDWARE, "`cluster`")


@lru_cache(maxsize=1)
def _gpus() -> dict[str, list[ClusterSpec]]:
    """Return the presets that have a GPU of each name that people use, the usual one first."""
    found = defaultdict(list)
    order = ["", *_FORMS]
    specs = [
        (spec, gpu_name(spec.gpu.name)) for spec in map(_preset, preset_names(HARDWARE)) if spec.gpu.kind == "cuda"
    ]
    for spec, gpu in sorted(specs, key=lambda one: (order.index(one[1].form), -one[1].memory)):
        for spelling in gpu.spellings():
            found[spelling].append(spec)
    return dict(found)


def _spoken(name: str) -> str:
    """Return what is left of a name without what people write one way or another.

    >>> _spoken("NVIDIA A100-SXM4-80GB"), _spoken("GeForce RTX 4090")
    ('a100sxm480gb', 'rtx4090')
    """
    return "".join(word for word in re.split(r"[-_\s]+", name.lower()) if word not in _IDLE)


def _usual(name: str, found: list[ClusterSpec]) -> ClusterSpec:
    """Return the usual one of the presets that a name may mean, which says so."""
    first, *others = found
    if not others:
        return first
    also = " and ".join(f"{spec.gpu.name} ({spec.name})" for spec in others)
    taken = f"`cluster` {name}: taken for {first.gpu.name} ({first.name}); there is also {also}"
    return structs.replace(first, taken=taken)


def _counted(spec: ClusterSpec, gpus: int | None, name: str) -> ClusterSpec:
    """Return so many GPUs of a preset: a part of a node, or whole nodes; raises InputError for other counts."""
    each = spec.gpus_per_node
    if gpus is None:
        return spec
    nodes = -(-gpus // each)
    if gpus < 1:
        raise InputError(f"cluster {name!r}: expected a count of 1 or more")
    if nodes > 1 and spec.nic is None:
        raise InputError(
            f"cluster {name!r}: {spec.name} is one node of {each} GPUs, without a table [nic] that joins several; name "
            f"at most {each}, or copy the preset to a FILE.toml and say what its NICs are"
        )
    if gpus > each and gpus % each:
        raise InputError(
            f"cluster {name!r}: nodes of {spec.name} have {each} GPUs, and {gpus} fill none; name {gpus - gpus % each} "
            f"or {nodes * each}, or set `cluster` {spec.name} and `gpus` {gpus}"
        )
    return structs.replace(spec, nodes=nodes, gpus_meant=gpus)


def _unknown(name: str, spoken: str, count: str) -> InputError:
    """Return the error for a name that is none, with those that are near: presets, or so many of their GPUs."""
    presets = preset_names(HARDWARE)
    written = {spelling: specs[0] for spelling, specs in _gpus().items()}
    written |= {} if count else {_spoken(preset): _preset(preset) for preset in presets}
    near = [written[one] for one in difflib.get_close_matches(spoken, written, n=4 * _NEAR)]
    said = [repr(f"{count}x{spec.gpu.name}" if count else spec.name) for spec in near]
    hint = f" (did you mean {' or '.join(list(dict.fromkeys(said))[:_NEAR])}?)" if said else ""
    return InputError(
        f"unknown cluster {name!r}{hint}: allowed are {', '.join(presets)}, FILE.toml, or a GPU that one of them has, "
        f"such as H100 or 16xH100; set it with `cluster`"
    )
