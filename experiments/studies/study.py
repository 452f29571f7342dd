"""What a study is, and which there are."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

import experiments.studies
from experiments.pages.drawn.pictures import Picture
from sim.base.errors import InputError, none_of
from sim.setup.names import at_least_one


class Finding(NamedTuple):
    """What a study found."""

    conclusion: str
    picture: Picture
    rows: Sequence[dict[str, Any]]
    """What the picture shows, a mark or a bar each, in its order."""
    figures: Mapping[str, tuple[float, float]] = MappingProxyType({})
    """Least and most of what claims are held against, by name."""


class Study(NamedTuple):
    """A question, and what answers it in so many processes (None for as many as there are cores)."""

    name: str
    question: str
    find: Callable[[int | None], Finding]
    draws: Callable[[int | None, int], Finding] | None = None
    """The same with a number of seeds, of studies that draw batches."""
    sentence: int = 0
    """Of its conclusion, the one that answers the question, counted from 0: those before it say of what."""

    def answer(self, conclusion: str) -> str:
        """Return the sentence of a conclusion that answers the question."""
        return re.split(r"(?<=\.) (?=[A-Za-z])", conclusion)[self.sentence]

    def found(self, jobs: int | None, seeds: int | None) -> Finding:
        """Return what it finds; raises InputError for ``seeds`` of a study that draws nothing."""
        if seeds is None:
            return self.find(jobs)
        if self.draws is None:
            raise InputError(f"`seeds` {seeds}: {self.name} draws nothing; leave it out")
        return self.draws(jobs, at_least_one("seeds", seeds))


def names() -> list[str]:
    """Return the names of all studies."""
    found = (module.name for module in pkgutil.iter_modules(experiments.studies.__path__))
    return sorted(name.replace("_", "-") for name in found if name not in {"study", "claims"})


def study(name: str) -> Study:
    """Return a study; raises InputError for a name that none has."""
    if name not in names():
        raise InputError(none_of("study", name, names()))
    module = import_module(f"experiments.studies.{name.replace('-', '_')}")
    draws = module.find if hasattr(module, "SEEDS") else None
    return Study(name, module.QUESTION, module.find, draws, getattr(module, "ANSWER", 0))
