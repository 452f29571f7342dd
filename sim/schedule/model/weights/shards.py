"""Over which ranks weights are sharded by ZeRO's stages (arXiv:1910.02054 §5), FSDP (arXiv:2304.11277) being the third;
and what these send of them.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from sim.schedule.ir.masks import Span
from sim.schedule.ir.program import Communicator
from sim.schedule.ir.shares import Share
from sim.schedule.model.scope import ADAPTERS, LAYER, ROOT, Unit, trained, units, updated
from sim.schedule.model.tensor.group import alike_of
from sim.schedule.model.weights.params import summed_over_group
from sim.words.mesh import Axis, Mesh
from sim.words.options import LayerOptions
from sim.words.workload import DTYPE_BYTES, ModelSpec, Workload, accumulation_dtype


class Shards(NamedTuple):
    """Over which ranks weights are sharded and their gradients summed; each None where there is one rank."""

    within: Communicator | None = None
    """Gathers weights. At stage 0 None, too."""
    gradients: Communicator | None = None
    """The same ranks: sums gradients. The same communicator, or one with a stream of its own."""
    across: Communicator | None = None
    """Those that have the same shards in all replicas, where each replica has shards of all."""
    norm: Communicator | None = None
    """Sums squares of gradients: all that own different ones, of shards, of shares or of stages of a model."""
    alike: tuple[Communicator, ...] = ()
    """Sum gradients of weights of which several ranks of a tensor-parallel group have the same."""
    ends: Communicator | None = None
    """Sums gradients of weights that are at both ends of a model, where these are on two stages."""
    copies: int = 1
    """How many stages have copies of the same weights, each for a part of the micro-batches."""

    def has_both_ends(self, unit: Unit) -> bool:
        """Return whether a unit is on two stages, which sum its gradients."""
        return self.ends is not None and unit.name == ROOT.name

    @property
    def declared(self) -> tuple[Communicator, ...]:
        """All that there are."""
        some = (self.within, self.gradients, self.across, self.norm, *self.alike, self.ends)
        return tuple(dict.fromkeys(filter(None, some)))


def shards_of(
    mesh: Mesh, options: LayerOptions, model: ModelSpec, ends: Communicator | None = None, copies: int = 1
) -> Shards:
    """Return the communicators of a mesh, of HSDP (arXiv:2304.11277 §3.2.2) where shards lie within its replicas;
    ``ends`` as of Shards. Where two stages have ``copies`` of the same weights, these are sharded over the ranks of
    both, and their gradients summed.
    """
    hybrid = options.shards == "replica"
    across = mesh.groups("dp")
    axes: tuple[Axis, ...] = ("ring", "ulysses") if hybrid else ("dp", "ring", "ulysses")
    within = mesh.groups(*axes) if copies == 1 else mesh.mirrored(*axes)
    several, gathers = len(within[0]) > 1, options.zero_stage > 0
    weights, gradients = (Communicator(name=name, groups=within) for name in ("weights", "gradients"))
    shared = gathers and options.weight_communicators == "one"
    return Shards(
        within=weights if several and gathers else None,
        gradients=(weights if shared else gradients) if several else None,
        across=Communicator(name="replicas", groups=across) if hybrid and len(across[0]) > 1 else None,
        norm=_norm(mesh, weights, axes if _squares_parts(options) else (), copies),
        alike=alike_of(mesh, model),
        ends=ends,
        copies=copies,
    )


def _norm(mesh: Mesh, weights: Communicator, axes: tuple[Axis, ...], copies: int) -> Communicator | None:
    """Return what sums the squares of all that own different gradients: of whole weights of one stage by what gathers
    these. Where stages have copies of whole weights, each half of them has all.
    """
    groups = mesh.groups("pp", "tp", *axes)
    if copies > 1 and not axes:
        groups = tuple([half for group in groups for half in mesh.halves(group)])
    if len(groups[0]) == 1:
        return None
    return weights if mesh.tp == mesh.pp == 1 else Communicator(name="norm", groups=groups)


def _squares_parts(options: LayerOptions) -> bool:
    """Return whether a rank has squares of its part of gradients only, and not of all."""
    return options.zero_stage > 0 and options.reduce_to == "owner"


def moved_bytes(workload: Workload, mesh: Mesh, options: LayerOptions, copies: int = 1) -> int:
    """Return what is sent of weights and gradients, over all ranks, each of which has its share of the weights.

    (P-1) bytes for each byte that P ranks gather or reduce-scatter, twice that if they reduce it to all. Weights of
    layers are gathered for both passes over each micro-batch at stage 3, of both ends once for each; below it all once,
    where they are sharded. Gradients are summed for each micro-batch from stage 2 on, below it and with sync=last once.
    Frozen weights are gathered at stage 3 alone, and have none. Where two stages have copies of weights, each copy is
    passed by half of the micro-batches, and those of both halves meet in one sum. Norms of a tensor-parallel group are
    summed over it as often as gradients over ranks.
    """
    own, wide = DTYPE_BYTES[workload.dtype], DTYPE_BYTES[accumulation_dtype(workload.dtype)]
    on_wire = own if options.reduce == "model" else wide
    hybrid, stage = options.shards == "replica", options.zero_stage
    alike = mesh.size // mesh.tp // mesh.pp
    groups, ranks = (mesh.dp, copies * alike // mesh.dp) if hybrid else (1, copies * alike)
    gathers = options.micro_batches // copies if stage == 3 else 1
    sums = options.micro_batches // copies if stage >= 2 and options.sync == "every" else 1
    total, gathered, share = 0, 0, Share(workload.model, 0, mesh.tp)
    for unit in units(workload):
        size = share.size(unit.flat)
        size = part_of(size, ranks) * ranks if stage else size
        size *= 2 if unit.name == ROOT.name and mesh.pp > 1 else 1  # stages that have it
        total += 0 if unit.frozen else size
        if stage == 3 or (stage and not unit.frozen):
            gathered += gathers * size * (2 if stage == 3 and unit.name in {LAYER, ADAPTERS} else 1)
    to_owners = _squares_parts(options)
    summed = sums * total * on_wire * (1 if to_owners and not options.cuts_sums else 2)
    across = 2 * (groups - 1) * sums * total * on_wire * (1 if to_owners else ranks)
    squared = mesh.pp // copies * mesh.tp * (ranks if to_owners else 1)
    squares = mesh.size // squared * 2 * (squared - 1) * len(trained(workload)) * wide
    norms, others = summed_over_group(workload, mesh.tp, sequence=options.tp_sequence)
    of_group = options.micro_batches * own * (others if options.sums_whole else norms + others)
    if options.sums_whole:
        of_group += copies * norms * _added_bytes(workload, options)
    of_weights = groups * (ranks - 1) * (gathered * own + summed) + across + _of_ends(workload, mesh, options)
    return mesh.tp * of_weights + squares + alike * of_group


def _of_ends(workload: Workload, mesh: Mesh, options: LayerOptions) -> int:
    """Return what two stages send to sum gradients of weights that both have, of one share of them: 2 bytes of each
    byte that a rank owns.
    """
    roots = [unit for unit in trained(workload) if unit.name == ROOT.name]
    if mesh.pp == 1 or not roots:
        return 0
    size = Share(workload.model, 0, mesh.tp).size(roots[0].flat)
    of_stage = mesh.size // mesh.pp // mesh.tp
    copies = of_stage if not _squares_parts(options) else mesh.dp if options.shards == "replica" else 1
    return 2 * copies * size * _added_bytes(workload, options)


def _added_bytes(workload: Workload, options: LayerOptions) -> int:
    """Return the bytes of an element of gradients of all micro-batches of a rank."""
    narrow = options.reduce == "model" and (options.micro_batches == 1 or options.adds_narrow)
    return DTYPE_BYTES[workload.dtype if narrow else accumulation_dtype(workload.dtype)]


def part_of(size: int, parts: int) -> int:
    """Return how many elements each of some equal parts has, the last of which are padded (arXiv:2304.11277 §3.2.1)."""
    return -(-size // parts)


class Ownership:
    """What the ranks own that have the same share of weights: of each flat tensor one of so many parts."""

    def __init__(self, workload: Workload, share: Share, parts: int) -> None:
        """Find it of a workload of one share."""
        self._flats: list[tuple[int, int, list[Span]]] = []
        """Of those that consist of the same, as those of layers, one: its elements, those of a part, and which of all
        this share's ranks count in norms."""
        self.rows: dict[str, int] | None = {}
        """By the tensors of ports how many rows a part has, padding included; None where units differ in one."""
        for unit in {unit.flat.parts: unit for unit in units(workload)}.values():
            (size,) = unit.flat.shape(workload.model)
            each = part_of(size, parts)
            self._flats.append((size, each, share.counted(unit.flat, Span(0, size))))
            names = [port.name for tensor in (*unit.states, unit.working) for port in (tensor, updated(tensor))]
            if self.rows is None or any(self.rows.get(name, each) != each for name in names):
                self.rows = None
            else:
                self.rows |= dict.fromkeys(names, each)

    def kind(self, at: int, *, counts: bool = True) -> Hashable:
        """Return what a program depends on of the part that its rank owns, beside which rows these are: how many there
        are, and, where that ``counts``, which of them it counts in norms.
        """
        return tuple(
            [
                _cut(at * each, min((at + 1) * each, size), counted if counts else [])
                for size, each, counted in self._flats
            ]
        )


def _cut(start: int, stop: int, counted: list[Span]) -> Hashable:
    """Return how many elements a part has, and which of them are among those that are counted."""
    some = [(max(one.start, start) - start, min(one.stop, stop) - start) for one in counted]
    return stop - start, tuple([(first, last) for first, last in some if first < last])
