"""What plans search: families of configurations, branches of a family, and what a step has to reach."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product, takewhile
from typing import NamedTuple

from sim.base.errors import InputError
from sim.plan.search.tensors import as_options
from sim.setup.setup import Setup

OPTIONS: dict[str, tuple[str, ...]] = {
    "checkpoint": ("none", "attention", "full"),
    "activations": ("hbm", "host"),
    "optimiser": ("gpu", "host"),
    "mlp": ("whole", "tiled"),
    "loss": ("chunked",),
}
"""What is varied of a schedule where nothing else is asked for. The first value of each recomputes and copies least,
the last holds least in GPUs' memory: ``Branch`` rests on it, and ``tests/plan/test_plan.py`` tries it."""
_RESHAPED = ("mlp",)
"""Options whose values run kernels of other shapes, of which either may be faster."""


class Target(NamedTuple):
    """What a step has to reach; nothing where both are None."""

    step_time_s: float | None = None
    tokens_per_s: float | None = None
    """Of all GPUs together."""

    def within_s(self, tokens: int) -> float:
        """Return the longest time that a step of so many tokens may take.

        >>> Target(tokens_per_s=2048.0).within_s(8192)
        4.0
        """
        by_rate = math.inf if self.tokens_per_s is None else tokens / self.tokens_per_s
        return min(by_rate, math.inf if self.step_time_s is None else self.step_time_s)

    def require(self) -> None:
        """Raise InputError for a target that nothing or everything reaches."""
        for name, value in (("step_time", self.step_time_s), ("tokens_per_s", self.tokens_per_s)):
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"`{name}` {value}: expected a number above 0, or none")


ANYTHING = Target()


class Family(NamedTuple):
    """A schedule with its degrees and placement."""

    setup: Setup
    named: str
    """As a row of results says it."""
    grid: Mapping[str, Sequence[str]]
    """The values of each option that is varied, of those that the schedule has."""
    worth: float = 1
    """What a step of it is worth: best is the least time for so much. Its sequences, of all replicas; where cost
    counts, over what its GPUs cost an hour."""
    within_s: float = math.inf
    """What its step may take."""
    like: str = ""
    """The family with one stage whose ranks do the same work: of a pipeline no step is below its kernels."""
    bubbles: float = 0.0
    """How many times its layers' kernels a pipeline waits at least besides, for stages at both ends of a step."""
    tensors: Sequence[str] = ()
    """Of ``grid`` the groups of tensors of which it is varied what becomes of them (``sim/plan/search/tensors.py``)."""

    @property
    def num_leaves(self) -> int:
        """How many configurations it has."""
        return math.prod(map(len, self.grid.values()))


class Branch(NamedTuple):
    """All configurations of a family whose first options are chosen; where all are, it is one."""

    family: Family
    chosen: tuple[str, ...] = ()

    @property
    def is_leaf(self) -> bool:
        """Whether all options are chosen, so that it is one configuration."""
        return len(self.chosen) == len(self.family.grid)

    @property
    def num_leaves(self) -> int:
        """How many configurations it has."""
        return math.prod(map(len, self._open))

    @property
    def parts(self) -> list[Branch]:
        """One for each value of the next option, with the options behind it that have one value only."""
        first, *others = self._open
        alone = [values[0] for values in takewhile(lambda values: len(values) == 1, others)]
        return [self._replace(chosen=(*self.chosen, value, *alone)) for value in first]

    @property
    def leaves(self) -> Iterator[Branch]:
        """Its configurations."""
        for values in product(*self._open):
            yield self._replace(chosen=(*self.chosen, *values))

    @property
    def fastest(self) -> Branch:
        """The configuration with the first value of every option that is not chosen: it recomputes and copies least."""
        return self._replace(chosen=(*self.chosen, *(values[0] for values in self._open)))

    @property
    def fast(self) -> list[Branch]:
        """Configurations one of which is fastest: the ``fastest`` one, with every value of the options that reshape
        kernels.
        """
        keys = [*self.family.grid][len(self.chosen) :]
        some = [values if key in _RESHAPED else values[:1] for key, values in zip(keys, self._open, strict=True)]
        return [self._replace(chosen=(*self.chosen, *values)) for values in product(*some)]

    @property
    def leanest(self) -> Branch:
        """The configuration with the last value of every option that is not chosen: it holds least in GPUs' memory."""
        return self._replace(chosen=(*self.chosen, *(values[-1] for values in self._open)))

    @property
    def setup(self) -> Setup:
        """The setup of a leaf."""
        options = dict(zip(self.family.grid, self.chosen, strict=True))
        if self.family.tensors:
            options |= as_options({group: options.pop(group) for group in self.family.tensors})
        return self.family.setup.replace(set={f"schedule.{key}": value for key, value in options.items()})

    @property
    def named(self) -> str:
        """Options as a row of results says them."""
        return ", ".join(f"{key} {value}" for key, value in zip(self.family.grid, self.chosen, strict=False))

    @property
    def _open(self) -> list[Sequence[str]]:
        return [*self.family.grid.values()][len(self.chosen) :]
