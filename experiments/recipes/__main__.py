"""``python -m experiments.recipes NAME``."""

from __future__ import annotations

import sys
from collections.abc import Callable

from experiments.recipes.bench import bench
from experiments.recipes.demo import demo
from experiments.recipes.gpu import gpu
from experiments.verbs.cli import guarded, open_console
from sim.errors import InputError, unknown

RECIPES: dict[str, Callable[..., None]] = {"demo": demo, "gpu": gpu, "bench": bench}


def main() -> None:
    """Run the recipe that the command line names."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES, "python -m experiments.recipes NAME")
    if sys.argv[2:] and name != "gpu":
        raise InputError(f"recipe {name!r} has no parts: leave out {' '.join(sys.argv[2:])}")
    RECIPES[name](open_console(), *sys.argv[2:])


if __name__ == "__main__":
    guarded(main)
