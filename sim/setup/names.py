"""Names to objects: models, clusters, profiles, workloads, meshes and schedules, each from what a user would type."""

from __future__ import annotations

import hashlib
import importlib.util
import numbers
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import msgspec

from sim.base.errors import InputError, unknown
from sim.base.overrides import override
from sim.base.presets import preset_names
from sim.batches.batch import require_lengths
from sim.batches.files import typed_lengths
from sim.schedule.methods.catalog import NAMED, Build, Entry
from sim.setup.block_masks import block_mask_of
from sim.setup.masks import Kept, kept_of
from sim.setup.stacks import STACKS
from sim.software.software import software_names
from sim.words.mesh import AXES, Axis, Mesh
from sim.words.profile import Profile, load_profile, profile_names
from sim.words.workload import (
    FLOATS,
    BlockMask,
    ModelSpec,
    PackedSequence,
    Pass,
    Scope,
    Workload,
    load_model,
    parse_length,
)
from topology.cluster import Cluster, load_cluster
from topology.specs import ClusterSpec

T = TypeVar("T")

SCOPES: tuple[Scope, ...] = get_args(Scope)
PASSES: tuple[Pass, ...] = ("forward", "backward", "both")
PLACEMENTS: dict[str, tuple[Axis, ...]] = {"ulysses-inner": AXES, "ring-inner": ("pp", "dp", "ulysses", "ring", "tp")}
"""Whose groups are neighbouring ranks, where ranks split both heads and sequence (arXiv:2405.07719 §3)."""
DATASHEET = "datasheet"
"""The profile that is none: kernels and links at the rates of datasheets."""


class OwnSchedule(str):
    """A schedule of the user's own, ``FILE.py:FUNCTION``: the only text that names code, which is run when it is built.

    The command line makes one of what was typed, and a Python caller makes one by this name. Whatever is read from a
    file is a plain text, which names what ships and nothing else.

    >>> OwnSchedule("my_module.py:build")
    'my_module.py:build'
    """

    __slots__ = ()


class Assumed(str):
    """A name that nobody gave: what questions take it for, and say that they do (``Setup.assumed``)."""

    __slots__ = ()


class Untold(int):
    """A default that yields to what other fields imply."""

    __slots__ = ()


ONE_REPLICA = Untold(1)
"""As many replicas as there are where nobody says how many, and nothing follows from other degrees."""
ONE_STAGE = Untold(1)
"""No pipeline where nobody asks for one, but in plans, which look for the best number of stages."""
ONE_SHARE = Untold(1)
"""Whole weights of layers on each rank where nobody asks for shares, but in plans of few tokens for each GPU."""
MODEL, CLUSTER = Assumed("llama3-8b"), Assumed("hgx-h100")
"""What questions are about that name no other: what many train, and where."""
MODEL_HERE, CLUSTER_HERE = "tiny", "host"
"""What is executed where nobody names another: what any machine can, and this one. So it is in case files, too."""

SET_ROOTS = ("cluster", "model", "schedule", "software", "profile")
"""What ``set`` may change."""
Overrides = Mapping[str, object] | Sequence[str]
"""Figures to replace: ``{"nvlink.bytes_per_s": "*2"}``, or ``["nvlink.bytes_per_s=*2"]``."""


def names(kind: str) -> tuple[str, ...]:
    """Return the names that can be used: of ``models``, ``clusters``, ``schedules``, ``software``,
    ``stacks`` or ``profiles``.

    >>> names("schedules")[:3]
    ('single', 'ring', 'zigzag')
    """
    kinds: dict[str, Callable[[], Sequence[str]]] = {
        "models": lambda: preset_names("sim/models"),
        "clusters": lambda: preset_names("topology/hardware"),
        "schedules": lambda: list(NAMED),
        "software": software_names,
        "stacks": lambda: list(STACKS),
        "profiles": lambda: [*profile_names(), DATASHEET],
    }
    return tuple(kinds[one_of("kind", kind, kinds)]())


def model(name: str | Path | ModelSpec, *, set: Overrides = ()) -> ModelSpec:  # noqa: A002 - as the command line has it
    """Return a model: a preset, FILE.toml, or a ``config.json`` of Hugging Face.

    >>> model("llama3-8b", set={"num_kv_heads": 4}).num_kv_heads
    4

    ``ignore=KEY``, or ``KEY+KEY``, says of keys of a ``config.json`` that they do not matter.
    """
    return model_with(name, pairs(set))


def model_with(name: str | Path | ModelSpec, changes: Sequence[tuple[str, str]]) -> ModelSpec:
    """Return a model with some figures replaced: see ``model``."""
    ignored = [key for path, keys in changes if path == "ignore" for key in keys.split("+")]
    others = [change for change in changes if change[0] != "ignore"]
    return override(_model(name, ignored), others, "`set` model.")


def _model(name: str | Path | ModelSpec, ignored: Sequence[str] = ()) -> ModelSpec:
    found = plain(name)
    if ignored and not isinstance(found, str):
        raise InputError(f"`set` model.ignore={'+'.join(ignored)}: `model` is no config.json")
    return _expected("model", load_model(found, ignored) if isinstance(found, str) else found, ModelSpec)


def cluster_spec(name: str | Path | ClusterSpec | Cluster) -> ClusterSpec:
    """Return the spec of a cluster, by the names that ``cluster`` takes."""
    found = plain(name)
    return _expected("cluster", load_cluster(found) if isinstance(found, str) else found, ClusterSpec)


def cluster(
    name: str | Path | ClusterSpec | Cluster,
    *,
    nodes: int | None = None,
    set: Overrides = (),  # noqa: A002
) -> Cluster:
    """Return a cluster: a preset, a GPU by name, so many GPUs, FILE.toml, or ``host``, which is this machine.

    >>> len(cluster("hgx-h100", nodes=2).devices), len(cluster("16xH100").devices)
    (16, 16)
    """
    spec = override(cluster_spec(name), pairs(set), "`set` cluster.")
    return Cluster(spec if nodes is None else spec.of_nodes(at_least_one("nodes", nodes)))


def changed_cluster(spec: ClusterSpec, changes: Sequence[tuple[str, str]], where: str) -> ClusterSpec:
    """Return what a prediction's cluster is made of with some figures replaced; raises InputError as ``override`` does,
    and for its profile, which was chosen before.
    """
    for path, value in changes:
        if path == "profile":
            raise InputError(
                f"{where}{path}={value}: a profile is no figure of a cluster; choose it with `profile` {value}, or "
                f"name it in the cluster's file"
            )
    return override(spec, changes, where)


def profile(name: str | Path | Profile) -> Profile:
    """Return measured times of kernels and links by name or FILE.json; raises InputError for ``datasheet``, which has
    none: predictions take it by name.

    >>> profile("h100-sxm").machine.gpu
    'H100-SXM-80GB'
    """
    found = plain(name)
    if found == DATASHEET:
        raise InputError(f"`profile` {found}: it has no measured times to return; give predictions the name itself")
    return _expected("profile", load_profile(found) if isinstance(found, str) else found, Profile)


Documents = str | Sequence[int] | Sequence[Sequence[int]]
"""Lengths that all sequences share, or a list of them for each micro-batch."""


def workload(
    model: str | Path | ModelSpec,
    seq: int | str,
    *,
    batch: int = 1,
    mask: str = "causal",
    window: int | str | None = None,
    dtype: str | None = None,
    scope: str = "attention",
    layers: int | None = None,
    passes: str = "both",
    seed: int = 0,
    documents: Documents | None = None,
    block_mask: str | BlockMask | None = None,
) -> Workload:
    """Return what is to be computed; lengths in tokens take K = 1024 and M = 1024^2; ``dtype`` is by default the
    model's, and so are the ``layers`` of a step. ``documents`` are packed into each sequence, which is as long as they:
    their lengths, or a file with them; or those of each micro-batch, of which there are ``batch`` then. ``mask`` and
    ``block_mask``: see ``Setup``.

    >>> workload("llama3-8b", "128K").dtype
    'bf16'
    """
    spec = _model(model)
    keeps = kept(mask, window)
    fields: dict[str, Any] = {
        "model": spec,
        "seq": tokens("seq", seq),
        "batch": at_least_one("batch", batch),
        "mask": keeps.mask,
        "window": keeps.window,
        "pattern": keeps.pattern or msgspec.UNSET,
        "dtype": one_of("dtype", dtype or spec.dtype, FLOATS),
        "scope": one_of("scope", scope, SCOPES),
        "layers": (spec.num_layers if scope == "step" else 1) if layers is None else at_least_one("layers", layers),
        "passes": one_of("passes", passes, PASSES),
        "seed": _expected("seed", plain(seed), int),
    }
    turns = None if documents is None else micro_batches_of(documents)
    if turns is not None:
        sequences = tuple([PackedSequence(documents=lengths) for lengths in turns])
        longest = max(one.seq for one in sequences)
        fields |= {"sequences": sequences, "seq": longest, "batch": len(turns) if batch == 1 else batch}
    elif documents is not None:
        lengths = lengths_of(documents)
        fields["seq"] = sum(lengths)
        fields |= {"documents": lengths} if len(lengths) > 1 else {}
    if block_mask is not None:
        fields["block_mask"] = block_mask_of(plain(block_mask), fields["seq"], keeps.mask, fields["seed"])
    return Workload(**fields)


def kept(mask: str, window: int | str | None = None) -> Kept:
    """Return what each document keeps of itself: a mask, or with a window of the length beside it.

    >>> kept("causal", "4K").name
    'causal with a window of 4096'
    """
    return kept_of(mask, None if window is None else tokens("window", window))


def micro_batches_of(documents: Documents) -> tuple[tuple[int, ...], ...] | None:
    """Return the lengths of the documents of each micro-batch, where these are told apart; None where all share them.

    >>> micro_batches_of("5000,3000; 8192"), micro_batches_of("5000,3000")
    (((5000, 3000), (8192,)), None)
    """
    if isinstance(documents, str):
        parts: Sequence[str | int | Sequence[int]] = documents.split(";") if ";" in documents else ()
    else:
        parts = documents if any(isinstance(one, Sequence) for one in documents) else ()
    if not parts:
        return None
    if not all(isinstance(one, Sequence) for one in parts):
        raise InputError(f"`documents` {documents}: expected lengths alone, or a list of them for each micro-batch")
    return tuple([lengths_of(cast("str | Sequence[int]", one)) for one in parts])


def lengths_of(documents: Documents) -> tuple[int, ...]:
    """Return the lengths of documents: given as such, as a text such as 5000,3000,192, or in a file. Raises InputError
    for those of several micro-batches.

    >>> lengths_of("5000, 192")
    (5000, 192)
    """
    if micro_batches_of(documents) is not None:
        raise InputError("`documents` of each micro-batch: expected those that all sequences share")
    if isinstance(documents, str):
        return typed_lengths(documents)
    found = tuple(plain(size) for size in documents)
    require_lengths(found)
    return found


def scope_title(scope: str, layers: int) -> str:
    """Return what is played of a model: attention, 2 layers, step of 32 layers."""
    counted = f"{layers} layer" + "s" * (layers > 1)
    return {"attention": "attention", "layer": counted, "step": f"step of {counted}"}[scope]


def mesh(*, ring: int = 1, ulysses: int = 1, dp: int = 1, placement: str = "ulysses-inner") -> Mesh:
    """Return who the ranks are: degrees of parts of a sequence, of groups of heads, and of data-parallel replicas.

    >>> mesh(ring=4, ulysses=2).groups("ulysses")
    ((0, 1), (2, 3), (4, 5), (6, 7))
    """
    ring, ulysses, dp = at_least_one("ring", ring), at_least_one("ulysses", ulysses), at_least_one("dp", dp)
    return Mesh(ring=ring, ulysses=ulysses, dp=dp, order=PLACEMENTS[one_of("placement", placement, PLACEMENTS)])


def entry(schedule: str | Build | Entry) -> Entry:
    """Return a schedule of the catalog, or one of the user's: a builder, or an ``OwnSchedule``, whose file is run."""
    if isinstance(schedule, Entry):
        return schedule
    if not isinstance(schedule, str):
        return _given(schedule)
    if schedule in NAMED:
        return NAMED[schedule]
    if not isinstance(schedule, OwnSchedule):
        raise unknown(
            "schedule", schedule, NAMED,
            "`schedule`; one of your own is my_module.py:build on the command line, and in Python its builder, or "
            "longstep.OwnSchedule: no file names one",
        )  # fmt: skip
    return _given(_function(schedule))


def options(
    entry: Entry, schedule: str, given: Sequence[tuple[str, str]], where: str, beside: Sequence[str] = ()
) -> Any:
    """Return the options of a schedule, of which errors say the name, with some set; raises InputError for what it has
    not. ``beside`` are names that it takes without being its options.
    """
    default = entry.options
    takes = [*msgspec.to_builtins(default or {}), *beside]
    for name, _ in given:
        if name not in takes:
            raise InputError(
                f"schedule {schedule!r} has no option {name}: it takes {', '.join(takes) or 'none'}; "
                f"leave out {where}{name}, or choose another `schedule`"
            )
    return override(default, given, where) if given else default


def schedule_name(schedule: str | Build | Entry) -> str:
    """Return what a schedule is called: as the user named it, or as its builder is."""
    if isinstance(schedule, str):
        return str(schedule)
    build = schedule.build if isinstance(schedule, Entry) else schedule
    return str(getattr(build, "__qualname__", type(build).__name__))


def _given(build: Build) -> Entry:
    if not callable(build) or isinstance(build, type):
        raise InputError(f"`schedule` {build!r}: expected a name, or a function build(workload, mesh) -> Schedule")
    return Entry(build, "given by the user", ("ring", "ulysses"), "")


def _function(name: OwnSchedule) -> Build:
    """Return the function that ``FILE.py:FUNCTION`` names; raises InputError if there is none."""
    path, _, function = name.partition(":")
    if not path.endswith(".py"):
        raise InputError(f"`schedule` {name}: expected a file that ends in .py before the colon")
    try:
        there = Path(path).is_file()
    except OSError:  # a name that is too long for one
        there = False
    if not there:
        raise InputError(f"`schedule` {name}: there is no file {path!r}")
    registered = f"longstep_user_{hashlib.sha256(str(Path(path).resolve()).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(registered, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"`schedule` {name}: importing {path} failed: {type(error).__name__}: {error}") from error
    if not callable(getattr(module, function, None)):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise unknown("function", function, public, f"`schedule` {path}:FUNCTION")
    build: Build = getattr(module, function)
    return build


def pairs(changes: Overrides) -> tuple[tuple[str, str], ...]:
    """Return overrides as pairs of a dotted path and a value."""
    if isinstance(changes, Mapping):
        return tuple((str(key), text_of(value)) for key, value in changes.items())
    if isinstance(changes, str) or not isinstance(changes, Sequence):
        raise InputError(f"`set` {changes}: expected a mapping, or a list of texts KEY=VALUE")
    return tuple(map(_pair, changes))


def texts(changes: Overrides) -> tuple[str, ...]:
    """Return overrides as texts KEY=VALUE."""
    return tuple(f"{key}={value}" for key, value in pairs(changes))


def text_of(value: object) -> str:
    """Return a value as it is typed; a text stays what it is, an ``OwnSchedule`` too."""
    return value if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def _pair(text: object) -> tuple[str, str]:
    key, equals, value = text.partition("=") if isinstance(text, str) else ("", "", "")
    if not equals or not key.strip() or not value:
        raise InputError(f"`set` {text}: expected KEY=VALUE such as cluster.nvlink.bytes_per_s=900e9")
    return key.strip(), value.strip()


def plain(value: Any) -> Any:
    """Return an argument as names and fields have it: of a path its text, of a cluster what it is made of, of a number
    of numpy's Python's own.
    """
    if value is None or isinstance(value, str | int | float):  # most are, and the tests below take much longer
        return value
    if isinstance(value, Path):
        return os.fspath(value)
    if isinstance(value, Cluster):
        return value.spec
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def _expected(field: str, value: Any, kind: type[T]) -> T:
    """Return ``value``; raises InputError if it is of another type."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InputError(f"`{field}` {value!r}: expected {kind.__name__}{' or a name' if kind is not int else ''}")
    return value


def tokens(field: str, length: int | str) -> int:
    """Return a length in tokens: 8192, "8K" or "1M"."""
    return parse_length(str(length), f"`{field}`")


def at_least_one(field: str, count: int) -> int:
    """Return ``count``; raises InputError if it is no whole number of 1 or more."""
    count = plain(count)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(f"`{field}` {count}: expected a whole number of 1 or more")
    return count


def one_of(field: str, value: str, allowed: Any) -> Any:
    """Return ``value`` if it is allowed, else raise InputError with what is."""
    if value not in allowed:
        raise unknown(f"value of `{field}`", value, allowed, f"`{field}`")
    return value
