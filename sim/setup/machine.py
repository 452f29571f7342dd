"""What a schedule is simulated on: a cluster with its profile, and the noise of its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from sim.base.errors import InputError, unknown
from sim.base.overrides import override
from sim.engine.costs.measured import measured_cluster
from sim.engine.play.jitter import KERNELS, Jitter, require_seeds
from sim.engine.play.simulate import Engine
from sim.setup import names
from sim.setup.names import one_of
from sim.software import kernels
from sim.software.attention import kernels_of, named
from sim.software.host import updating
from sim.software.kernels import Attended
from sim.software.software import Kernels, Software
from sim.words.mesh import Mesh
from sim.words.options import IN_FP32, AttentionName
from sim.words.profile import (
    HOST_COPIES,
    Profile,
    Rates,
    SmallSeconds,
    at_rates,
    profile_names,
    with_replayed,
)
from sim.words.workload import Scope, Workload
from topology.cluster import Cluster
from topology.host import device_name, host_facts
from topology.specs import ClusterSpec

_CALIBRATED = "longstep"
"""Among the software of profiles that ``longstep calibrate`` has measured; those made from tables have the cluster's
own figures."""

SEEDS = 5
"""How many seeds of noise are played by default."""


def equipped(
    cluster: str | Path | ClusterSpec | Cluster, profile: str | Path | Profile | None
) -> tuple[ClusterSpec, Profile | None]:
    """Return what a cluster is made of, and the profile to use: by default the one that the cluster names.

    A host is as it was measured, unless figures of it were set. Raises InputError where a host's profile, if none was
    named, is of another machine.
    """
    spec = names.cluster_spec(cluster)
    named = _profile_of(spec) if profile is None else profile
    if named == names.DATASHEET:
        return spec, None
    found = names.profile(named)
    if profile is None and spec.gpu.kind == "cpu":
        require_same_host(found)
    if spec.gpu.kind == "cpu" and spec == names.cluster_spec("host"):
        return msgspec.structs.replace(measured_cluster(found), profile=spec.profile), found
    return _as_calibrated(spec, found), found


def _profile_of(spec: ClusterSpec) -> str:
    """Return the name of a cluster's profile: ``datasheet`` where it names none, or a host was not calibrated yet."""
    if spec.gpu.kind == "cpu" and spec.profile not in profile_names():
        return names.DATASHEET
    return spec.profile or names.DATASHEET


def require_same_host(profile: Profile) -> None:
    """Raise InputError if a profile of a host is of another machine than this one."""
    this = device_name(host_facts(), profile.machine.threads_per_rank)
    if profile.machine.gpu != this:
        raise InputError(
            f"profile {profile.name!r} is of another machine: {profile.machine.gpu!r}, but this one is {this!r}; run "
            f"longstep calibrate, or set `profile` datasheet"
        )


def measured_here(profile: Profile) -> bool:
    """Return whether a profile's kernels are those of ``runtime``, which a calibration has timed."""
    return _CALIBRATED in profile.machine.software


def _as_calibrated(spec: ClusterSpec, profile: Profile) -> ClusterSpec:
    """Return a cluster of GPUs that were calibrated here with what issuing took, their power limit, and what copies
    to the host and back got together.
    """
    if not measured_here(profile):
        return spec
    measured = measured_cluster(profile)
    if measured.gpu.chip != spec.gpu.chip:  # which the cost model refuses
        return spec
    pcie = spec.pcie
    if pcie and measured.pcie and any(point.kernel in HOST_COPIES for point in profile.points):
        pcie = msgspec.structs.replace(pcie, both_ways_bytes_per_s=measured.pcie.both_ways_bytes_per_s)
    gpu = msgspec.structs.replace(
        spec.gpu, launch_s=measured.gpu.launch_s, power_w=measured.gpu.power_w or spec.gpu.power_w
    )
    return msgspec.structs.replace(spec, gpu=gpu, pcie=pcie)


def kernels_on(spec: ClusterSpec, profile: Profile | None, kernels: Kernels) -> Kernels:
    """Return the kernels of some software on a cluster. Attention is the profile's where nobody has measured the
    software's on these GPUs, such as FlashAttention-2 on the latest. At the rates of datasheets all kernels are alike,
    so that none is named.
    """
    if profile is None:
        return Kernels()
    if named(kernels.attention, spec.gpu.chip, kernels.torch) in {None, *kernels_of(spec.gpu.chip, profile)}:
        return kernels
    return msgspec.structs.replace(kernels, attention=None)


def changed_kernels(kernels: Kernels, given: Sequence[tuple[str, str]]) -> Kernels:
    """Return kernels with what was given of them; raises InputError for what there is none of, and for a version of
    torch that decides nothing.
    """
    run = override(kernels, given, "`set` software.")
    if "torch" in dict(given) and run.attention != "sdpa":
        raise InputError(
            f"`set` software.torch={run.torch}: it says what software.attention=sdpa picks, and attention is "
            f"{run.attention or 'of the profile'}; set both, or leave it out"
        )
    return run


def running(
    profile: Profile | None,
    run: Kernels,
    software: Software | None,
    spec: ClusterSpec,
    workload: Workload,
    options: Any,
    mesh: Mesh,
) -> Profile | None:
    """Return a profile with some kernels in place of its own, and what the software is called that runs them; raises
    InputError where there are no figures of them, and where a schedule of these options does not run them.
    """
    if run.host_optimiser is not None:
        profile = updating(profile, run.host_optimiser, spec.gpu.kind)
    scores: AttentionName = getattr(options, "kernel", "flash")
    if run.attention and scores != "flash":
        raise InputError(
            f"`set` software.attention={run.attention} with schedule.kernel={scores}: it names the kernel of flash "
            f"attention; leave one of the two out"
        )
    if run.loss and getattr(options, "loss", "") not in IN_FP32:
        run = msgspec.structs.replace(run, loss="")
    if spec.gpu.kind == "cpu" and run != Kernels():
        raise InputError("`software` names kernels of GPUs, but ranks are threads of a host: leave it out")
    said, parallel = software.said if software else "", mesh.tp > 1
    margin = parallel and getattr(options, "tp_overlap", "") == "chunks"
    of_attention = attended(workload, getattr(options, "micro_batches", 1))
    return kernels.running(profile, run, said, spec.gpu.chip, of_attention, parallel=parallel, margin=margin)


def attended(workload: Workload, micro_batches: int) -> Attended:
    """Return what decides which kernels software runs around attention."""
    model = workload.model
    return Attended(model.num_kv_heads / model.num_heads, workload.batch <= micro_batches)


def rated(profile: Profile | None, scope: Scope, given: Sequence[tuple[str, str]] = ()) -> Profile | None:
    """Return a profile at the rates that were given (``rates``), or those that it names, or those of the scope: whole
    layers load a GPU for seconds, attention alone is timed in short runs; and with what was given of small kernels
    (``replayed_s``). Raises InputError for what it has not.
    """
    wanted = None
    for key, value in given:
        if key == "rates":
            wanted = one_of("set profile.rates", value, get_args(Rates))
        elif key == "replayed_s":
            profile = _replaying(profile, value)
        else:
            raise unknown("key", f"profile.{key}", ["profile.rates", "profile.replayed_s"], "`set`")
    if profile is None or not profile.sustained:
        if wanted == "sustained":
            whose = f"profile {profile.name!r}" if profile else "`profile` datasheet"
            raise InputError(f"`set` profile.rates=sustained: {whose} has rates of short runs only; leave it out")
        return profile
    return at_rates(profile, wanted or profile.rates or ("burst" if scope == "attention" else "sustained"))


class _Small(msgspec.Struct, frozen=True):
    replayed_s: SmallSeconds


def _replaying(profile: Profile | None, value: str) -> Profile:
    """Return a profile whose small kernels take other seconds, as given: a number, or one that scales its own."""
    if profile is None or profile.replayed_s is None:
        whose = f"profile {profile.name!r}" if profile else "`profile` datasheet"
        raise InputError(f"`set` profile.replayed_s={value}: {whose} has no such figure; leave it out")
    changed = override(_Small(profile.replayed_s), [("replayed_s", value)], "`set` profile.")
    return with_replayed(profile, changed.replayed_s)


def jitter_of(
    share: float | None,
    seed: int,
    seeds: int | None,
    spec: ClusterSpec,
    profile: Profile | None,
    *,
    per_rank: bool = False,
) -> Jitter:
    """Return the noise of kernel times, by default what the profile has measured, and of GPUs what others have.

    By default five seeds are played: one is one draw, and on GPUs noise decides who wins a race between kernels.
    """
    cuda = spec.gpu.kind == "cuda"
    if share is None:
        share = profile.jitter.share if profile and profile.jitter else KERNELS if cuda else 0.0
    elif not isinstance(share, int | float) or not 0 <= share <= 1:
        raise InputError(f"`jitter` {share}: expected a share between 0 and 1")
    return Jitter(share, seed, per_rank, SEEDS if seeds is None else require_seeds(seeds))


def engine_of(name: str) -> Engine:
    """Return an engine by its name; raises InputError with those that there are."""
    found: Engine = one_of("engine", name, get_args(Engine))
    return found
