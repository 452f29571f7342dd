"""Longstep: predicts step time and memory of long-context training schedules, and runs the same schedule for real.

    import longstep

    p = longstep.predict("zigzag", model="llama3-8b", seq="1M", cluster="hgx-h100")
    print(p.step_time_s, p.interval, p.fits, p.bound_by)
    print(p.replace(set={"cluster.nvlink.bytes_per_s": "*2"}).step_time_s)

A name is imported when it is first used: predicting needs no torch, which executing does.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.evidence.comparison import Comparison, compare
    from experiments.evidence.execution import execute, verify
    from sim.errors import InputError, LongstepError
    from sim.setup.balance import balance
    from sim.setup.crossover import crossover
    from sim.setup.doctor import Diagnosis, doctor
    from sim.setup.explain import Explanation, explain
    from sim.setup.explore import explore
    from sim.setup.fabric import fabric
    from sim.setup.fit import fit, ladder, what_helps
    from sim.setup.imports.imported import Imported, imported
    from sim.setup.measured import Measured
    from sim.setup.memory_price import memory_prices
    from sim.setup.names import OwnSchedule, cluster, mesh, model, names, profile, workload
    from sim.setup.neighbours import neighbours
    from sim.setup.plan import plan
    from sim.setup.prediction import Prediction, build, simulate
    from sim.setup.reverse import Answer, cheapest, fewest_gpus, longest_context
    from sim.setup.roofline import machine_balance, roofline
    from sim.setup.setup import Setup, predict
    from sim.setup.sweep import sweep
    from sim.setup.table import Table, table
    from sim.setup.winners import winners

__all__ = [
    "Answer", "Comparison", "Diagnosis", "Explanation", "Imported", "InputError", "LongstepError", "Measured",
    "OwnSchedule", "Prediction", "Setup", "Table", "balance", "build", "cheapest", "cluster", "compare", "crossover",
    "doctor", "execute", "explain", "explore", "fabric", "fewest_gpus", "fit", "imported", "ladder",
    "longest_context", "machine_balance", "memory_prices", "mesh", "model", "names", "neighbours", "plan", "predict",
    "profile", "roofline", "simulate", "sweep", "table", "verify", "what_helps", "winners", "workload",
]  # fmt: skip
_HOMES = {
    "experiments.evidence.comparison": ("Comparison", "compare"),
    "experiments.evidence.execution": ("execute", "verify"),
    "sim.errors": ("InputError", "LongstepError"),
    "sim.setup.balance": ("balance",),
    "sim.setup.crossover": ("crossover",),
    "sim.setup.doctor": ("Diagnosis", "doctor"),
    "sim.setup.explain": ("Explanation", "explain"),
    "sim.setup.explore": ("explore",),
    "sim.setup.fabric": ("fabric",),
    "sim.setup.fit": ("fit", "ladder", "what_helps"),
    "sim.setup.imports.imported": ("Imported", "imported"),
    "sim.setup.measured": ("Measured",),
    "sim.setup.memory_price": ("memory_prices",),
    "sim.setup.names": ("OwnSchedule", "cluster", "mesh", "model", "names", "profile", "workload"),
    "sim.setup.neighbours": ("neighbours",),
    "sim.setup.plan": ("plan",),
    "sim.setup.prediction": ("Prediction", "build", "simulate"),
    "sim.setup.reverse": ("Answer", "cheapest", "fewest_gpus", "longest_context"),
    "sim.setup.roofline": ("machine_balance", "roofline"),
    "sim.setup.setup": ("Setup", "predict"),
    "sim.setup.sweep": ("sweep",),
    "sim.setup.table": ("Table", "table"),
    "sim.setup.winners": ("winners",),
}
_PACKAGES = ("sim", "topology", "runtime", "calibrate", "experiments")


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'longstep' has no attribute {name!r}: it has {', '.join(__all__)}")
    _require_own_packages()
    importlib.import_module("sim.setup.charts_shown").draw_by(_drawing)
    found = globals()[name] = getattr(importlib.import_module(home), name)
    return found


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def _drawing() -> Any:
    """Return what draws charts in notebooks; it is imported when the first is shown, as templates take a while."""
    from experiments.pages.notebook import DRAWING  # noqa: PLC0415 - see above

    return DRAWING


def _require_own_packages() -> None:
    """Raise ImportError where a module of the user's has the name of a package of Longstep, and so hides it."""
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        origin = spec.origin if spec else None
        if origin is None or Path(origin).resolve().parents[1] != Path(__file__).resolve().parent:
            raise ImportError(f"{origin or 'a folder'} hides the package {package!r} of Longstep: rename it")


if __name__ == "__main__":  # python -m longstep
    importlib.import_module("experiments.verbs.__main__").main()
