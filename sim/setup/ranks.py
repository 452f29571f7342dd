"""How many ranks and nodes there are, and what shares them: what GPUs, nodes and degrees say together."""

from __future__ import annotations

import math

import msgspec

from sim.base.errors import InputError
from sim.schedule.ir.shares import model_of_share
from sim.schedule.methods.catalog import Entry
from sim.words.mesh import Mesh
from sim.words.workload import ModelSpec
from topology.host import host_facts
from topology.specs import ClusterSpec

Degrees = dict[str, int | None]
"""Of each axis within a replica; None where nobody says."""


def mesh_of(
    entry: Entry,
    name: str,
    spec: ClusterSpec,
    model: ModelSpec,
    degrees: Degrees,
    *,
    gpus: int | None,
    nodes: int | None,
    dp: int,
    pp: int = 1,
    tp: int = 1,
) -> Mesh:
    """Return the mesh of a schedule, which errors call ``name``: the degrees that were given; the GPUs that they leave
    go to what the schedule splits, whose heads are those of one of ``tp`` shares.
    """
    given = dict(degrees)
    _require_axes(entry, name, given)
    outside, inside = dp * pp * tp, (given["ulysses"] or 1) * (given["ring"] or 1)
    product = outside * inside
    if gpus is None:
        gpus = product if inside > 1 or not entry.degrees else _usual_gpus(spec, nodes, dp, outside)
    if given == {"ulysses": None, "ring": None} and gpus % outside == 0 and (entry.degrees or gpus == outside):
        return msgspec.structs.replace(entry.mesh(gpus // outside, model_of_share(model, tp)), dp=dp, pp=pp, tp=tp)
    rest = next((axis for axis in entry.degrees if given[axis] is None), None)
    if rest and gpus % product == 0:
        given[rest] = gpus // product
    found = {axis: degree or 1 for axis, degree in given.items()} | {"dp": dp, "pp": pp, "tp": tp}
    if math.prod(found.values()) != gpus:
        named = given | {axis: degree for axis, degree in (("dp", dp), ("pp", pp), ("tp", tp)) if degree > 1}
        said = " x ".join(f"`{axis}_degree` {degree}" for axis, degree in named.items() if degree)
        raise InputError(
            f"`gpus` {gpus} is not {said or 'the one rank that this schedule takes'}"
            f"{'' if rest is None else f', or a multiple of {product}'}: set `gpus` {product}, or the degrees"
        )
    return Mesh(ulysses=found["ulysses"], ring=found["ring"], dp=dp, pp=pp, tp=tp)


def _require_axes(entry: Entry, name: str, given: Degrees) -> None:
    """Raise InputError for a degree of an axis that a schedule does not split."""
    for axis, degree in given.items():
        if (degree or 1) > 1 and axis not in entry.degrees:
            takes = "".join(f", only `{other}_degree`" for other in entry.degrees)
            raise InputError(
                f"`{axis}_degree` {degree}: schedule {name!r} has none{takes}; leave it out, or choose another "
                f"`schedule`"
            )


def _usual_gpus(spec: ClusterSpec, nodes: int | None, dp: int, outside: int) -> int:
    """Return the number of GPUs of a mesh if neither degrees nor anybody says it: the whole cluster, or a
    host's cores.
    """
    if spec.gpu.kind == "cpu":
        return outside * max(1, host_facts().cores // outside)
    return max(spec.gpus_meant or spec.gpus_per_node * (nodes or dp * spec.nodes), outside)


def shared_gpus(
    entry: Entry,
    spec: ClusterSpec,
    degrees: Degrees,
    *,
    gpus: int | None,
    nodes: int | None,
    dp: int,
    pp: int = 1,
    tp: int = 1,
) -> tuple[int | None, int]:
    """Return the numbers of GPUs and replicas. Replicas that are not given follow from the degrees, if these all say
    how many ranks share a sequence.
    """
    shared = pp * tp * math.prod(degrees[name] or 1 for name in entry.degrees)
    if dp > 1 or any(degrees[name] is None for name in entry.degrees):
        return gpus, dp
    if gpus is None and nodes is not None:
        gpus = spec.gpus_per_node * nodes
    gpus = gpus or spec.gpus_meant or shared
    if gpus % shared:
        near = " or ".join(str(shared * count) for count in (gpus // shared, gpus // shared + 1) if count)
        raise InputError(
            f"`gpus` {gpus} is no multiple of the {shared} ranks that share a sequence: set `gpus` to {near}, or "
            f"the degrees"
        )
    return gpus, gpus // shared


def sized(spec: ClusterSpec, ranks: int, asked: int | None) -> ClusterSpec:
    """Return the spec with enough nodes, or as many as were asked for."""
    if spec.gpu.kind == "cpu" and (asked or 1) > 1:
        raise InputError(f"`nodes` {asked}: the host is one machine; set `nodes` 1")
    if spec.gpus_meant and ranks > spec.gpus_meant:
        raise InputError(
            f"`gpus` {ranks}: {spec.gpus_meant} {spec.gpu.name} were asked for by name; set `gpus` to at most "
            f"that, or `cluster` {ranks}x{spec.gpu.name}"
        )
    per_node = spec.gpus_per_node
    nodes = asked or max(spec.nodes, -(-ranks // per_node) if spec.nic else spec.nodes)
    if nodes > 1 and spec.nic is None:
        raise InputError(f"`nodes` {nodes}: cluster {spec.name!r} has no [nic]; set `nodes` 1")
    found = spec.of_nodes(nodes)
    if ranks > nodes * per_node:
        raise InputError(
            f"`gpus` {ranks}: cluster {spec.name!r} has {nodes} x {per_node} = {nodes * per_node}; set `gpus` to "
            f"at most that" + (", or `nodes`" if spec.nic else ", or give it a table [nic] and set `nodes`")
        )
    if asked and ranks <= (nodes - 1) * per_node:
        raise InputError(
            f"`nodes` {nodes}: {ranks} ranks fill {-(-ranks // per_node)} of them; set `gpus` {nodes * per_node}, "
            f"fewer `nodes`, or `set` cluster.gpus_per_node={max(1, ranks // nodes)}"
        )
    return found
