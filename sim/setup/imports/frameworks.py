"""What keys of frameworks mean here, a TOML file for each framework, and which framework a file is of."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources

import msgspec

from sim.base.errors import InputError, unknown
from sim.base.presets import preset_names
from sim.setup.imports.reading import File

_FOLDER = "sim/setup/imports/frameworks"


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one key means. A value that says nothing of these is not sayable."""

    about: str = ""
    """What it is, and what it is mistaken for."""
    fact: str = ""
    """What its value is, as it stands (``facts.FACTS``)."""
    also: str = ""
    """What is said with that, as ``method=ulysses``."""
    values: dict[str, str] = {}
    """What some values say, as ``schedule.checkpoint=full cp=2``; nothing where they change nothing."""
    why: str = ""
    """Why other values are not sayable."""
    instead: str = ""
    """What is taken for them where one goes on ``anyway``."""
    default: str | None = None
    """What the framework takes where the key is missing."""
    unless: str = ""
    """Another key that says the same: where it is there, that default is none."""
    of_model: bool = False
    """Whether it does not matter where the model is given otherwise."""
    of_stages: bool = False
    """Whether it matters only where a pipeline has several stages."""
    of_shares: bool = False
    """Whether it matters only where ranks share out weights."""
    needs: dict[str, str] = {}
    """Other keys that the framework wants beside some values, as ``recompute_method=uniform``; ``*`` is any other."""
    file: str = ""
    """The framework whose file it names, which then has to be given, too."""


class Method(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A way in which a framework splits the tokens of a sequence over ranks."""

    schedule: str
    degree: str = ""
    """Which degree its ranks are: ring or ulysses; by default the schedule divides them."""
    options: dict[str, str] = {}
    """Of that schedule, as this framework's code has them where no key says otherwise."""


class Assumption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is taken where no key says it."""

    value: str
    why: str
    """With the option that says otherwise."""


class Stages(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a framework does where a pipeline has several stages."""

    cut: str
    """How it cuts a model into them: a name of ``stages.CUTS``."""
    options: dict[str, str] = {}
    """Of the schedule, as this framework's code has them then."""


class Shares(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a framework does where ranks share out weights."""

    options: dict[str, str] = {}
    """Of the schedule, as this framework's code has them then."""


class Framework(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to read the files of one framework."""

    title: str
    source: str
    """The commit, or the version, whose keys these are."""
    marks: tuple[str, ...]
    """Patterns of keys that none of the others has, or few: who has most of them is it."""
    keys: dict[str, Key]
    software: str = ""
    """What its runs are in ``sim/software``, where no key says another; empty where that is of the trainer."""
    assumed: dict[str, Assumption] = {}
    methods: dict[str, Method] = {}
    stages: Stages | None = None
    shares: Shares = Shares()
    harmless: dict[str, str] = {}
    """Patterns of keys that change neither time nor memory here, and why."""
    assigns: bool = False
    """Whether its text files assign keys, as KEY=VALUE; others have flags."""
    includes: dict[str, str] = {}
    """Other frameworks whose keys are meant behind a prefix, dot included."""

    def key(self, name: str) -> Key | None:
        """Return what a key means; None if it is unknown, or harmless."""
        found = self.keys.get(name)
        return found or next((key for one, rest in self._included(name) if (key := one.key(rest))), None)

    def ignored(self, name: str) -> str | None:
        """Return why a key does not matter; None if it does, or nobody knows."""
        own = (why for pattern, why in self.harmless.items() if fnmatch.fnmatchcase(name, pattern))
        others = (why for one, rest in self._included(name) if (why := one.ignored(rest)))
        return next(itertools.chain(own, others), None)

    def _included(self, name: str) -> Iterator[tuple[Framework, str]]:
        """Yield other tables that may know a key, with its name there."""
        for prefix, other in self.includes.items():
            if name.startswith(prefix):
                yield frameworks()[other], name.removeprefix(prefix)


@cache
def frameworks() -> Mapping[str, Framework]:
    """Return all by their names."""
    package, _, sub = _FOLDER.partition("/")
    folder = resources.files(package).joinpath(sub)
    return {
        name: msgspec.toml.decode(folder.joinpath(f"{name}.toml").read_bytes(), type=Framework)
        for name in preset_names(_FOLDER)
    }


def framework_of(file: File, name: str | None = None) -> str:
    """Return which framework a file is of: the one that is named, or the one whose keys it has; raises InputError where
    there is none, or several.
    """
    known = frameworks()
    if name is not None:
        if name not in known:
            raise unknown("framework", name, known, "`framework`")
        return name
    scores = {name: _score(one, list(file.given)) for name, one in known.items()}
    best = max(scores.values())
    found = [name for name, score in scores.items() if score == best]
    if best[0] == 0 or len(found) > 1:
        said = f"its keys are those of {' and of '.join(found)}" if best[0] else "it has no key of one that is known"
        raise InputError(f"configuration {file.path!r}: {said}; say with `framework` which it is: {', '.join(known)}")
    return found[0]


def _score(framework: Framework, given: Sequence[str]) -> tuple[int, int]:
    """Return how many keys are marks of a framework, and how many are known to it."""
    marked = sum(any(fnmatch.fnmatchcase(name, mark) for mark in framework.marks) for name in given)
    return marked, sum(framework.key(name) is not None for name in given)
