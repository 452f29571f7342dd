"""Case files: what was measured elsewhere, each case a selection as on the command line, and a time.

A case file names a profile and what its cases have in common, then per case the rest of a selection and the measured
time: of a step, or of what ``measure`` names. Those that ship lie in ``experiments/published``; a team adds its own
runs as files.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec

from sim.accounts.trace import Trace
from sim.base.errors import InputError, unknown
from sim.base.presets import converted, load_toml
from sim.base.units import size
from sim.plan.search.few import Few, of_turns
from sim.schedule.ir.ops import KINDS, HostSync
from sim.schedule.ir.program import Schedule
from sim.schedule.methods.catalog import Entry
from sim.schedule.methods.single_op import ALONE, Attended, Sent, Size, build
from sim.setup import names
from sim.setup.names import DATASHEET, SCOPES
from sim.setup.setup import Setup
from sim.words.profile import Issue, Profile, load_profile

FOLDER = "experiments/published"
_SCHEDULE = ("schedule", "ulysses_degree", "ring_degree", "cp", "tp_degree", "pp_degree", "dp_degree")
_OF_METHOD = ("schedule.", "software.")
"""What cases may differ in to be compared with each other; the latter are overrides."""
_KEYS = {"pass": "passes"} | {
    field.name: field.name for field in dataclasses.fields(Setup) if field.name not in {"passes", "profile", "yes"}
}
_HERE = {"model": names.MODEL_HERE, "cluster": names.CLUSTER_HERE}
"""What a case is of that does not say it: what is executed where nobody names another."""
_ALWAYS = (*_HERE, "scope")
"""What is written into a case file whatever it is."""
_LEFT_OUT = sorted({kind.meta.kernel for kind in KINDS.values() if kind.meta.activity == "compute"} - {""})
"""Kernels that code may leave out: those that memory bounds."""
_SIZES = tuple(dict.fromkeys(field for kind in ALONE.values() for field in kind.__struct_fields__))
_KEYS_ALONE = (
    "model", "cluster", "nodes", "gpus", "scope", "batch", "mask", "window", "dtype", "seed", "jitter", "seeds", "set",
)  # fmt: skip
"""What says anything of an op alone, beside how large it is."""


Target: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cases that are judged together."""

    name: str
    cases: list[dict[str, Any]]
    """Each a selection, and ``measured_s``; where ops were timed, not a step, also ``measure``: of which kind. With a
    size they were alone."""
    target: Target | None = None
    """Largest mean error that counts as met."""
    blind: float | None = None
    """Mean error of the first prediction, before anyone had seen how far off it was."""
    set: tuple[str, ...] = ()
    few_micro_batches: bool = False
    """Whether steps of many micro-batches are told by two of few, without jitter: each further one takes what the last
    of these adds (``sim.plan.search.few``)."""
    extend: bool = False
    """Whether steps are told by few layers, too, without proof: as ``longstep simulate --extend`` tells them."""


class Together(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Groups that are judged once more, as one."""

    name: str
    of: list[str]
    """Names of the groups."""
    target: Target | None = None
    blind: float | None = None


class Alike(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the timed code does all cases that share some fields."""

    of: dict[str, Any]
    """Fields of a case."""
    set: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """Kernels that the code leaves out although its result needs them: they take no time."""


class HostFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cases that give the two host figures of their cluster: of each call, and of each eager kernel. They are in no
    group; what they give is shown beside the prediction without.
    """

    cases: list[dict[str, Any]]
    """Two, as those of a group."""
    set: tuple[str, ...] = ()


class MemoryGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps whose memory is known: ``memory_cases`` reads and judges them."""

    name: str
    cases: list[dict[str, Any]]
    """Each a selection, with ``ran`` (false: out of memory), ``measured_gib`` by term, or ``longest`` in place of
    ``seq``: the longest context that ran. ``about`` names it.
    """
    target: Target | None = None
    """Largest error of a measured size that counts as met."""
    set: tuple[str, ...] = ()


class CaseFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measurements of others, or of one's own cluster."""

    title: str
    source: str
    quality: str
    """How the times were measured, and how far they can be trusted."""
    profile: str
    """Of the machine, as ``--profile`` takes it, FILE.json from the folder of the case file; at datasheet rates there
    are no intervals."""
    group: list[Group] = []
    profile_sha256: str = ""
    """Of the profile's file when the cases were written, or the beginning of it; where the file is another one since,
    the evidence says so."""
    target: Target | None = None
    """Largest mean error over all cases that counts as met."""
    together: list[Together] = []
    """Where there are some, the first table of the evidence has a row for each, and for each group in none."""
    select: dict[str, Any] = {}
    """What all cases have in common."""
    alike: list[Alike] = []
    host_fit: HostFit | None = None
    memory: list[MemoryGroup] = []
    notes: str = ""
    """What explains the errors and no command computes, as Markdown."""


class HostFigures(NamedTuple):
    """What the host takes, in seconds, its launch included."""

    call_s: float
    """For a send or receive by itself, and its wait."""
    kernel_s: float
    """For an eager kernel."""


_LONGEST_S = 1e9
"""No step takes as long."""


class Case(NamedTuple):
    """One configuration, and how long it took."""

    group: str
    setup: Setup
    measured_s: float
    measure: str = ""
    """Kind of op that was timed, as traces name it; empty for whole steps."""
    alone: Size | None = None
    """How large the op was, if it was timed alone."""
    left_out: tuple[str, ...] = ()
    """Kernels that take no time, as the code that was timed leaves them out."""
    host: HostFigures | None = None
    """Other figures of the host than the profile's."""
    few_micro_batches: bool = False
    extend: bool = False
    """Both as its group has them."""

    @property
    def played(self) -> Setup:
        """Return what is simulated: the step, or the op alone; however long it takes, since a file asks for it."""
        told = self.few_micro_batches or self.extend
        setup = self.setup.replace(yes=True, **({"jitter": 0.0} if told else {}))
        if self.left_out or self.host:
            return setup.replace(profile=_changed(str(setup.profile), self.left_out, self.host))
        if self.alone is None:
            return setup
        return setup.replace(schedule=Entry(partial(build, self.measure, self.alone), "", ("ring",), ""))

    @property
    def told_by(self) -> Few:
        """Return the steps that are simulated to predict the timed one: mostly that one itself."""
        return of_turns(self.played) if self.few_micro_batches else Few([self.played])

    def seconds(self, trace: Trace) -> float:
        """Return what was timed, as a trace has it: the step, or an op's mean time at work over all ranks."""
        if not self.measure:
            return trace.step_time_s
        return statistics.mean(row.busy_s for row in trace.rows if row.kind == self.measure)

    @property
    def name(self) -> str:
        """Return what was timed."""
        schedule = names.schedule_name(self.setup.played)
        return f"{self.measure} in {schedule}" if self.measure and not self.alone else self.measure or schedule

    @property
    def extent(self) -> str:
        """Return how long or large it is."""
        if isinstance(self.alone, Attended):
            return f"{self.alone.queries} x {self.alone.keys}"
        return size(self.alone.nbytes) if self.alone else str(self.setup.seq)

    @property
    def amount(self) -> int:
        """Return how long or large it is as a number, to sort by."""
        if isinstance(self.alone, Attended):
            return self.alone.queries * self.alone.keys
        return self.alone.nbytes if self.alone else names.tokens("seq", self.setup.seq)

    @property
    def mask(self) -> str:
        """Return the mask, if what was timed has one."""
        return "" if isinstance(self.alone, Sent) else self.setup.mask

    @property
    def passes(self) -> str:
        """Return the pass, if it is not the op that says it."""
        return "" if self.alone else self.setup.passes

    @property
    def options(self) -> str:
        """Return degrees and options of the schedule, as far as they are named."""
        setup = self.setup
        split = {"U": setup.ulysses_degree, "R": setup.ring_degree, "cp": setup.cp}
        beside = {"TP": setup.tp_degree, "PP": setup.pp_degree, "DP": setup.dp_degree}
        named = [f"{name} {degree}" for name, degree in split.items() if degree]
        named += [f"{name} {degree}" for name, degree in beside.items() if degree > 1]
        overrides = (key for key in names.texts(setup.set) if key.startswith("schedule."))
        return ", ".join([*named, *(key.removeprefix("schedule.") for key in overrides)])

    @property
    def rivals(self) -> tuple[object, ...]:
        """Return what is the same in cases of different schedules that can be compared."""
        fields = vars(self.setup)
        overrides = tuple(key for key in names.texts(self.setup.set) if not key.startswith(_OF_METHOD))
        same = (fields[key] for key in fields if key not in {*_SCHEDULE, "set", "profile"})
        profile = self.setup.profile
        made = (profile.name, profile.created) if isinstance(profile, Profile) else profile
        return (self.measure, self.alone, made, *same, overrides)


def case_fields(setup: Setup) -> dict[str, Any]:
    """Return what a case file says of a setup: model, cluster, and what is not at its default."""
    default, found = Setup(scope="attention"), {}
    for key, name in _KEYS.items():
        value = getattr(setup, name)
        if name in _ALWAYS or (value is not None and value != getattr(default, name)):
            found[key] = list(names.texts(value)) if name == "set" else value
    return found


def setup_of(fields: dict[str, Any], profile: str | Profile) -> Setup:
    """Return the setup of which ``case_fields`` says these."""
    named: dict[str, Any] = {_KEYS[key]: tuple(value) if key == "set" else value for key, value in fields.items()}
    return Setup(**_HERE | named, profile=profile)


def read_cases(name: str) -> tuple[CaseFile, list[Case]]:
    """Return a case file by name or path, and its cases; raises InputError that names what is wrong, or cannot be
    played.
    """
    file, cases = written_cases(name)
    for case in cases:
        _require_playable(case, f"case file {name!r}")
    return file, cases


def written_cases(name: str) -> tuple[CaseFile, list[Case]]:
    """Return a case file by name or path, and its cases as they are written. Raises InputError that names what is
    wrong, except for what only a builder refuses.
    """
    file = load_toml("case file", name, CaseFile, FOLDER, "`cases`")
    _require_groups(file, f"case file {name!r}")
    for key, allowed, what, where in _named(file):
        if key not in allowed:
            raise unknown(what, key, allowed, f"case file {name!r}, alike.{where}")
    file = _with_profile(file, name)
    return file, [_case(file, group, case) for group in file.group for case in group.cases]


def _require_groups(file: CaseFile, where: str) -> None:
    """Raise InputError for a group without a case, two of one name, and names of groups that there are not."""
    groups: list[Group | MemoryGroup] = [*file.group, *file.memory]
    if not groups or not all(group.cases for group in groups):
        raise InputError(f"{where}: a group holds no case; give each [[group]] and [[memory]] its cases = [{{ … }}]")
    own = [group.name for group in file.group]
    named = [*own, *(together.name for together in file.together)]
    if len(set(named)) < len(named):
        raise InputError(f"{where}: two groups have one name: {', '.join(named)}; give each its own")
    for together in file.together:
        if not together.of:
            raise InputError(f"{where}, {together.name!r}: of names no group; name some of {named}")
        for group in together.of:
            if group not in own:
                raise unknown("group", group, own, f"{where}, {together.name!r}")


def _require_playable(case: Case, where: str) -> None:
    """Raise InputError that names a case whose schedule cannot be built, or has not what was timed."""
    try:
        found = case.played.resolved()
        if case.extend:
            return
        schedule = found.built()
        if case.measure:
            _check_measure(case.measure, found.checked().schedule if found.one_device else schedule)
    except InputError as error:
        raise InputError(f"{where}, group {case.group!r}, measured_s {case.measured_s:g}: {error}") from error


def fit_cases(file: CaseFile) -> list[Case]:
    """Return the cases that give a file's two host figures; none where it fits none. Raises InputError that names what
    is wrong.
    """
    if file.host_fit is None:
        return []
    group = Group(name="host_fit", cases=file.host_fit.cases, set=file.host_fit.set)
    found = [_case(file, group, case) for case in group.cases]
    if len(found) != 2 or file.profile == DATASHEET:
        raise InputError(
            f"case file {file.title!r}, host_fit: {len(found)} cases give two figures of a profile: give 2"
        )
    for case in found:
        _require_playable(case, f"case file {file.title!r}")
    return found


def _named(file: CaseFile) -> Iterator[tuple[str, Sequence[str], str, str]]:
    """Yield what is named by what cases have in common, and what could be: key, allowed ones, what it is, where."""
    for alike in file.alike:
        yield from ((key, list(_KEYS), "key", "of") for key in alike.of)
        yield from ((kernel, _LEFT_OUT, "kernel", "left_out") for kernel in alike.left_out)


def _with_profile(file: CaseFile, name: str) -> CaseFile:
    """Return a case file with the path of its profile; raises InputError where that cannot be loaded."""
    if file.profile == DATASHEET:
        return file
    beside = file.profile.endswith(".json")
    profile = str(Path(name).parent / file.profile) if beside else file.profile
    try:
        load_profile(profile)
    except InputError as error:
        raise InputError(f"case file {name!r}, profile = {file.profile!r}: {error}") from error
    return msgspec.structs.replace(file, profile=profile)


def _check_measure(measure: str, schedule: Schedule) -> None:
    """Raise InputError where a schedule has no op of a kind. All that a host sync does is wait."""
    ops = (op for program in schedule.programs for op in program.ops)
    kinds = sorted({type(op).__name__ for op in ops if not isinstance(op, HostSync)})
    if measure not in kinds:
        sizes = ", ".join(_SIZES)
        raise unknown("kind of op", measure, kinds, f"measure, or give the size of an op alone ({sizes})")


def _case(file: CaseFile, group: Group, case: dict[str, Any]) -> Case:
    where = f"case file {file.title!r}, group {group.name!r}"
    fields = file.select | case
    measured_s = fields.pop("measured_s", None)
    if type(measured_s) not in {int, float} or not 0 < measured_s <= _LONGEST_S:
        raise InputError(f"{where}: {case} has no measured_s above 0, and of at most {_LONGEST_S:g} seconds")
    sizes = {key: fields.pop(key) for key in _SIZES if key in fields}
    alike = _alike(file, fields)
    overrides = _set_by(file, case, group.set, where)
    measure = fields.pop("measure", "")
    if not isinstance(measure, str):
        raise InputError(f"{where}: measure is {measure}: expected a text")
    what, allowed = ("key of an op alone", _KEYS_ALONE) if sizes else ("key", tuple(_KEYS))
    for key in fields:
        if key not in allowed:
            raise unknown(what, key, [*allowed, "measured_s", "measure", *_SIZES], where)
    if sizes and fields.setdefault("scope", "attention") != "attention":
        raise InputError(f"{where}: scope is {fields['scope']!r}: an op alone is no part of it; set scope to attention")
    setup = setup_of(_with_scope(fields, where) | {"set": overrides}, file.profile)
    alone = _alone(measure, sizes, where) if sizes else None
    left_out = tuple([kernel for one in alike for kernel in one.left_out])
    if left_out and (alone or file.profile == DATASHEET):
        raise InputError(f"{where}: left_out {', '.join(left_out)} takes whole steps, and a profile")
    for name in ("few_micro_batches", "extend"):
        if getattr(group, name) and (setup.scope != "step" or measure or file.host_fit):
            raise InputError(f"{where}: {name} takes whole steps, without host_fit: leave one of them out")
    told = (group.few_micro_batches, group.extend)
    return Case(group.name, setup, float(measured_s), measure, alone, left_out, None, *told)


def selected(file: CaseFile, case: dict[str, Any], of_group: tuple[str, ...], where: str) -> Setup:
    """Return the setup of a case, which says nothing but a selection; raises InputError that names what is wrong."""
    fields = file.select | case | {"set": _set_by(file, case, of_group, where)}
    for key in fields:
        if key not in _KEYS:
            raise unknown("key", key, _KEYS, where)
    return setup_of(_with_scope(fields, where), file.profile)


def _with_scope(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of a case; raises InputError where they leave open what was timed."""
    if "scope" not in fields:
        raise InputError(f"{where}: {fields} has no scope: set scope to {', '.join(SCOPES[:-1])} or {SCOPES[-1]}")
    return fields


def _alike(file: CaseFile, fields: dict[str, Any]) -> list[Alike]:
    """Return what cases with such fields have in common."""
    return [one for one in file.alike if all(key in fields and fields[key] == one.of[key] for key in one.of)]


def _set_by(file: CaseFile, case: dict[str, Any], of_group: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Return all overrides of a case, the most general first."""
    given = (file.select.get("set", []), case.get("set", []))
    if not all(isinstance(some, list) and all(isinstance(one, str) for one in some) for some in given):
        raise InputError(f'{where}: set is a list such as ["model.num_heads=8"]')
    common = (key for one in _alike(file, file.select | case) for key in one.set)
    return (*given[0], *common, *of_group, *given[1])


@cache
def _changed(name: str, kernels: tuple[str, ...], host: HostFigures | None) -> Profile:
    """Return a profile by which some kernels take no time, neither on the GPU nor on the host, and the host takes what
    is said.
    """
    profile = load_profile(name)
    nothing = Issue(host_s=0, launches=0)
    own = {} if host is None else {"call": host.call_s, "kernel": host.kernel_s}
    return msgspec.structs.replace(
        profile,
        points=tuple([point for point in profile.points if point.kernel not in kernels]),
        traffic=profile.traffic | dict.fromkeys(kernels, 0.0),
        issue=profile.issue
        | {kind: Issue(host_s=seconds, launches=0) for kind, seconds in own.items()}
        | dict.fromkeys(kernels, nothing),
    )


def _alone(measure: str, sizes: dict[str, Any], where: str) -> Size:
    """Return how large an op alone is; raises InputError where that kind of op has no such size."""
    if measure not in ALONE:
        raise unknown("measure of an op alone", measure, ALONE, where)
    takes = ALONE[measure]
    if set(sizes) != set(takes.__struct_fields__):
        raise InputError(f"{where}: {measure} alone takes {' and '.join(takes.__struct_fields__)}, not {sizes}")
    return converted(sizes, takes, f"{where}: {measure}", "change it in that file", strict=True)
