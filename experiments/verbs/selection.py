"""The selection that every verb shares: which model, cluster, schedule and profile, from what the user typed."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tyro

from sim.engine.cost import CostModel, measured_cluster
from sim.engine.simulate import STEADY, Jitter, Simulation, simulate
from sim.errors import InputError, LengthError, LongstepError, unknown
from sim.mesh import AXES, Axis, Mesh
from sim.presets import override
from sim.profile import HOST_COPIES, Profile, load_profile, profile_names
from sim.schedule.ir.program import Schedule
from sim.schedule.methods.catalog import SCHEDULES, Entry
from sim.schedule.methods.hints import Hints
from sim.schedule.methods.one_device import on_one_device
from sim.schedule.proof.check import Checked, check
from sim.workload import FLOATS, ModelSpec, Workload, load_model, parse_length
from topology.cluster import Cluster, load_cluster
from topology.host import device_name, host_facts
from topology.specs import ClusterSpec

SCOPES = ("attention", "layer")
PASSES = ("forward", "backward", "both")
MASK_NAMES = ("causal", "full")
PLACEMENTS: dict[str, tuple[Axis, ...]] = {"ulysses-inner": AXES, "ring-inner": ("pp", "dp", "ulysses", "ring", "tp")}
"""Whose groups are neighbouring ranks, where ranks split both heads and sequence (arXiv:2405.07719 §3)."""
DATASHEET = "datasheet"
_CALIBRATED = "longstep"
"""Among the software of profiles that ``longstep calibrate`` has measured; those made from tables have the cluster's
own figures."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """What to look at. Lengths take K = 1024 and M = 1024^2."""

    model: str = "tiny"
    """NAME, FILE.toml, or a config.json of Hugging Face."""
    cluster: str = "host"
    """NAME or FILE.toml; host is this machine."""
    nodes: int | None = None
    """Nodes of the cluster; by default as many as --gpus needs."""
    gpus: int | None = None
    """GPUs in all; on a host, processes. By default the product of the degrees, or one node (a host: its cores)."""
    seq: str = "8K"
    """Global sequence length."""
    batch: int = 1
    """Sequences per context-parallel group."""
    schedule: str = "ring"
    """NAME, or my_module.py:build for a schedule of your own."""
    ulysses_degree: int | None = None
    """Ranks that split the heads."""
    ring_degree: int | None = None
    """Ranks that split the sequence."""
    one_device: bool = False
    """Play all ranks on one device, in turn, with copies for transfers: any schedule on a single GPU."""
    mask: str = "causal"
    """causal or full."""
    window: str | None = None
    """Sliding window: tokens that a query sees on each side that the mask leaves, itself among them."""
    pad: bool = False
    """Fill up a length that does not divide with tokens that no other sees."""
    dtype: str | None = None
    """fp64, fp32, bf16 or fp16; by default the model's."""
    seed: int = 0
    """Seed of the inputs, and of the jitter."""
    jitter: float | None = None
    """Simulated kernels take 1 + JITTER * |z| times as long, z standard normal: 0.05 is a noisy machine. By default
    what the profile has measured; 0 for none."""
    layers: int = 1
    """Layers of the scope layer."""
    scope: str = "attention"
    """What is played: attention of one layer, or whole layers."""
    passes: Annotated[str, tyro.conf.arg(name="pass")] = "both"
    """forward, backward or both."""
    profile: str | None = None
    """NAME, FILE.json, or datasheet; by default the user's profile of the host, else datasheet."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """KEY=VALUE, as often as wanted: cluster.nvlink.bytes_per_s=900e9, cluster.hbm.bytes_per_s=*2,
    cluster.gpu[3].speed=0.95, model.num_kv_heads=4, schedule.layout=zigzag."""


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What a selection stands for."""

    schedule: str
    """As the user named it."""
    workload: Workload
    mesh: Mesh
    options: Any
    """Of the schedule; None if it takes none."""
    entry: Entry
    spec: ClusterSpec
    profile: Profile | None
    jitter: Jitter = STEADY
    one_device: bool = False

    def built(self) -> Schedule:
        """Return the schedule; raises InputError also where a builder of the user's fails."""
        with _blaming_the_builder():
            schedule = self.entry.schedule(self.workload, self.mesh, self.options, self.hints())
            if not isinstance(schedule, Schedule):
                raise TypeError(f"it returned {type(schedule).__name__}, expected sim.schedule.ir.program.Schedule")
            return schedule

    def checked(self) -> Checked:
        """Return the schedule, built and proved; raises InputError also where a builder of the user's fails."""
        schedule = self.built()
        with _blaming_the_builder():
            checked = check(schedule)
        return check(on_one_device(checked)) if self.one_device else checked

    def cluster(self) -> Cluster:
        """Return the cluster, built."""
        return Cluster(self.spec)

    def hints(self) -> Hints:
        """Return what a builder may ask: the cost model is made when it first does."""
        cost = cache(lambda: CostModel(self.cluster(), self.profile))
        return Hints(self.spec.gpus_per_node, lambda use: cost().kernel_seconds(0, use)[0])

    def simulated(self, checked: Checked) -> Simulation:
        """Return the simulation of the schedule, ``checked`` as above."""
        return simulate(checked, self.cluster(), self.profile, self.jitter)


def command_line() -> str:
    """Return what was typed, as profiles and records keep it: they are for others, whose folders differ."""
    program = "python -m experiments.recipes" if Path(sys.argv[0]).parent.name == "recipes" else "longstep"
    return " ".join([program, *(re.sub(r"(^|=)/\S*/", r"\1", argument) for argument in sys.argv[1:])])


def choose(selection: Selection, *, here: bool = True, entry: Entry | None = None) -> Chosen:
    """Return what a selection stands for; raises InputError that names the bad value and the allowed ones.

    The host is this machine, or, where what was measured elsewhere is only simulated, that of the profile (not
    ``here``). An ``entry`` is what the schedule's name stands for, if it is in no catalog.
    """
    for name in ("layers", "batch", "nodes", "gpus", "ulysses_degree", "ring_degree"):
        if (count := getattr(selection, name)) is not None and count < 1:
            raise InputError(f"--{name.replace('_', '-')} {count}: expected 1 or more")
    overrides = _overrides(selection)
    model = override(load_model(selection.model), overrides["model"], "--set model.")
    profile = _profile(selection, here=here)
    spec = override(_spec(selection, profile), overrides["cluster"], "--set cluster.")
    entry = entry or _entry(selection.schedule)
    mesh, options = _overridden(selection, entry, _mesh(selection, entry, spec, model), overrides["schedule"])
    spec = _sized(selection, spec, 1 if selection.one_device else mesh.size)
    workload, jitter = _workload(selection, model), _jitter(selection, profile)
    chosen = Chosen(selection.schedule, workload, mesh, options, entry, spec, profile, jitter, selection.one_device)
    return _padded(chosen) if selection.pad else chosen


def _spec(selection: Selection, profile: Profile | None) -> ClusterSpec:
    """Return the cluster: of a host as it was measured, of GPUs that were calibrated here with what issuing took, and
    what copies to the host and back got together.
    """
    if profile and selection.cluster == "host":
        return measured_cluster(profile)
    spec = load_cluster(selection.cluster)
    if profile is None or _CALIBRATED not in profile.machine.software:
        return spec
    measured = measured_cluster(profile)
    if measured.gpu.name != spec.gpu.name:  # which the cost model refuses
        return spec
    pcie = spec.pcie
    if pcie and measured.pcie and any(point.kernel in HOST_COPIES for point in profile.points):
        pcie = msgspec.structs.replace(pcie, both_ways_bytes_per_s=measured.pcie.both_ways_bytes_per_s)
    gpu = msgspec.structs.replace(spec.gpu, launch_s=measured.gpu.launch_s)
    return msgspec.structs.replace(spec, gpu=gpu, pcie=pcie)


def _overrides(selection: Selection) -> dict[str, list[tuple[str, str]]]:
    """Return the overrides of each root: their paths and values."""
    found: dict[str, list[tuple[str, str]]] = {"cluster": [], "model": [], "schedule": []}
    for key, value in map(_split_override, selection.set):
        root, _, path = key.partition(".")
        if root not in found:
            raise unknown("prefix", root, found, "--set PREFIX.KEY=VALUE")
        found[root].append((path, value))
    return found


@contextlib.contextmanager
def _blaming_the_builder() -> Iterator[None]:
    """Raise InputError with the place where a builder, or the programs that it builds lazily, fails."""
    try:
        yield
    except LongstepError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        raise InputError(f"building the schedule failed at {where}: {type(error).__name__}: {error}") from error


def _padded(chosen: Chosen) -> Chosen:
    """Return what was chosen with as many tokens of padding as the schedule needs."""
    try:
        chosen.built()
    except LengthError as error:
        padding = error.above - chosen.workload.seq
        workload = msgspec.structs.replace(chosen.workload, seq=error.above, padding=padding)
        return dataclasses.replace(chosen, workload=workload)
    return chosen


def _jitter(selection: Selection, profile: Profile | None) -> Jitter:
    share = selection.jitter
    if share is None:
        share = profile.jitter.share if profile and profile.jitter else 0.0
    elif not 0 <= share <= 1:
        raise InputError(f"--jitter {share:g}: expected a share between 0 and 1")
    return Jitter(share, selection.seed)


def _split_override(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or "." not in key or not value:
        raise InputError(f"--set {text}: expected KEY=VALUE such as cluster.nvlink.bytes_per_s=900e9")
    return key.strip(), value.strip()


def _workload(selection: Selection, model: ModelSpec) -> Workload:
    fields: dict[str, Any] = {
        "model": model,
        "seq": parse_length(selection.seq, "--seq"),
        "batch": selection.batch,
        "mask": one_of("--mask", selection.mask, MASK_NAMES),
        "window": None if selection.window is None else parse_length(selection.window, "--window"),
        "dtype": one_of("--dtype", selection.dtype or model.dtype, FLOATS),
        "scope": one_of("--scope", selection.scope, SCOPES),
        "layers": selection.layers,
        "passes": one_of("--pass", selection.passes, PASSES),
        "seed": selection.seed,
    }
    return Workload(**fields)


def one_of(option: str, value: str, allowed: Any) -> str:
    """Return ``value`` if it is allowed, else raise InputError with what is."""
    if value not in allowed:
        raise unknown(f"value of {option}", value, allowed, option)
    return value


def _mesh(selection: Selection, entry: Entry, spec: ClusterSpec, model: ModelSpec) -> Mesh:
    """Return the degrees: those that were given; the GPUs that they leave go to what the schedule splits."""
    given = {"ulysses": selection.ulysses_degree, "ring": selection.ring_degree}
    product = (given["ulysses"] or 1) * (given["ring"] or 1)
    gpus = selection.gpus
    if gpus is None and (not entry.degrees or product > 1):
        gpus = product
    elif gpus is None:
        gpus = host_facts().cores if spec.gpu.kind == "cpu" else spec.gpus_per_node * (selection.nodes or spec.nodes)
    if given == {"ulysses": None, "ring": None} and (entry.degrees or gpus == 1):
        return entry.mesh(gpus, model)
    rest = next((name for name in entry.degrees if given[name] is None), None)
    if rest and gpus % product == 0:
        given[rest] = gpus // product
    degrees = {name: degree or 1 for name, degree in given.items()}
    if degrees["ulysses"] * degrees["ring"] != gpus:
        raise InputError(
            f"--gpus {gpus} is not ulysses degree {degrees['ulysses']} x ring degree {degrees['ring']}; "
            f"set --gpus {degrees['ulysses'] * degrees['ring']}, or the degrees"
        )
    return Mesh(ulysses=degrees["ulysses"], ring=degrees["ring"])


def _overridden(selection: Selection, entry: Entry, mesh: Mesh, given: list[tuple[str, str]]) -> tuple[Mesh, Any]:
    """Return the mesh and the options of a schedule with what was set of them; raises InputError for what it has not.

    Where a schedule splits heads and sequence, which of the two is inside belongs to the mesh.
    """
    options = entry.options
    takes = [*msgspec.to_builtins(options or {}), *(["placement"] if {"ring", "ulysses"} <= set(entry.degrees) else [])]
    for name, value in given:
        if name not in takes:
            raise InputError(
                f"schedule {selection.schedule!r} has no option {name}: it takes {', '.join(takes) or 'none'}; leave "
                f"out --set schedule.{name}, or choose another schedule with --schedule"
            )
        if name == "placement":
            order = PLACEMENTS[one_of("--set schedule.placement", value, PLACEMENTS)]
            mesh = msgspec.structs.replace(mesh, order=order)
    own = [(name, value) for name, value in given if name != "placement"]
    return mesh, override(options, own, "--set schedule.") if own else options


def _sized(selection: Selection, spec: ClusterSpec, ranks: int) -> ClusterSpec:
    """Return the spec with enough nodes, or as many as were asked for."""
    if spec.gpu.kind == "cpu" and (selection.nodes or 1) > 1:
        raise InputError(f"--nodes {selection.nodes}: the host is one machine; set --nodes 1")
    nodes = selection.nodes or max(spec.nodes, -(-ranks // spec.gpus_per_node) if spec.nic else spec.nodes)
    if nodes > 1 and spec.nic is None:
        raise InputError(f"--nodes {nodes}: cluster {spec.name!r} has no [nic]; set --nodes 1")
    spec = msgspec.structs.replace(spec, nodes=nodes)
    if ranks > nodes * spec.gpus_per_node:
        raise InputError(
            f"--gpus {ranks}: cluster {spec.name!r} has {nodes} x {spec.gpus_per_node} = {nodes * spec.gpus_per_node}; "
            f"set --gpus to at most that"
            + (", or --nodes" if spec.nic else ", or give it a table [nic] and set --nodes")
        )
    return spec


def _profile(selection: Selection, *, here: bool) -> Profile | None:
    """Return the profile to use; raises InputError if it is of another machine than it has to be."""
    name = selection.profile
    if name == DATASHEET or (name is None and (selection.cluster != "host" or "host" not in profile_names())):
        return None
    profile = load_profile(name or "host")
    if selection.cluster == "host" and here:
        this = device_name(host_facts(), profile.machine.threads_per_rank)
        if profile.machine.gpu != this:
            raise InputError(
                f"profile {profile.name!r} is of another machine: {profile.machine.gpu!r}, but this one is {this!r}; "
                f"run longstep calibrate, or set --profile datasheet"
            )
    return profile


def _entry(name: str) -> Entry:
    """Return a schedule of the catalog, or one of the user's."""
    if name in SCHEDULES:
        return SCHEDULES[name]
    path, colon, function = name.partition(":")
    if not colon:
        raise unknown("schedule", name, [*SCHEDULES, "my_module.py:build"], "--schedule")
    if not path.endswith(".py"):
        raise InputError(f"--schedule {name}: expected a file that ends in .py before the colon")
    if not Path(path).is_file():
        raise InputError(f"--schedule {name}: there is no file {path!r}")
    registered = f"longstep_user_{hashlib.sha256(str(Path(path).resolve()).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(registered, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"--schedule {name}: importing {path} failed: {type(error).__name__}: {error}") from error
    if not callable(getattr(module, function, None)):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise unknown("function", function, public, f"--schedule {path}:FUNCTION")
    return Entry(getattr(module, function), "given by the user", ("ring", "ulysses"), "")
