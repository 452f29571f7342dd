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
    from experiments.evidence.executed.comparison import Comparison, compare
    from experiments.evidence.executed.execution import execute, verify
    from sim.balance.balance import balance
    from sim.balance.micro_batches import balance_micro_batches, packed_by
    from sim.base.errors import InputError, LongstepError
    from sim.compare.crossover import crossover
    from sim.compare.explore import explore
    from sim.compare.roofline import machine_balance, roofline
    from sim.compare.sweep import sweep
    from sim.compare.winners import winners
    from sim.diagnose.answer import Diagnosis
    from sim.diagnose.doctor import doctor
    from sim.diagnose.measured import Measured
    from sim.explain.explain import explain
    from sim.explain.screen import Explanation
    from sim.plan.answer import Answer
    from sim.plan.extended import Extended, extended
    from sim.plan.fit import fit, ladder, what_helps
    from sim.plan.memory_price import memory_prices
    from sim.plan.neighbours import neighbours
    from sim.plan.plan import plan
    from sim.plan.reverse import cheapest, fewest_gpus, longest_context
    from sim.setup.answers.table import Table, table
    from sim.setup.fabric import fabric
    from sim.setup.imports.imported import Imported, imported
    from sim.setup.names import OwnSchedule, cluster, mesh, model, names, profile, workload
    from sim.setup.predict import predict
    from sim.setup.prediction import Prediction, build, simulate
    from sim.setup.setup import Setup

__all__ = [
    "Answer", "Comparison", "Diagnosis", "Explanation", "Extended", "Imported", "InputError", "LongstepError",
    "Measured", "OwnSchedule", "Prediction", "Setup", "Table", "balance", "balance_micro_batches", "build",
    "cheapest", "cluster", "compare", "crossover", "doctor", "execute", "explain", "explore", "extended", "fabric",
    "fewest_gpus", "fit", "imported", "ladder", "longest_context", "machine_balance", "memory_prices", "mesh",
    "model", "names", "neighbours", "packed_by", "plan", "predict", "profile", "roofline", "simulate", "sweep",
    "table", "verify", "what_helps", "winners", "workload",
]  # fmt: skip
_HOMES = {
    "experiments.evidence.executed.comparison": ("Comparison", "compare"),
    "experiments.evidence.executed.execution": ("execute", "verify"),
    "sim.base.errors": ("InputError", "LongstepError"),
    "sim.balance.balance": ("balance",),
    "sim.balance.micro_batches": ("balance_micro_batches", "packed_by"),
    "sim.compare.crossover": ("crossover",),
    "sim.diagnose.answer": ("Diagnosis",),
    "sim.diagnose.doctor": ("doctor",),
    "sim.explain.explain": ("explain",),
    "sim.explain.screen": ("Explanation",),
    "sim.compare.explore": ("explore",),
    "sim.setup.fabric": ("fabric",),
    "sim.plan.extended": ("Extended", "extended"),
    "sim.plan.fit": ("fit", "ladder", "what_helps"),
    "sim.setup.imports.imported": ("Imported", "imported"),
    "sim.diagnose.measured": ("Measured",),
    "sim.plan.memory_price": ("memory_prices",),
    "sim.setup.names": ("OwnSchedule", "cluster", "mesh", "model", "names", "profile", "workload"),
    "sim.plan.neighbours": ("neighbours",),
    "sim.plan.plan": ("plan",),
    "sim.setup.prediction": ("Prediction", "build", "simulate"),
    "sim.plan.answer": ("Answer",),
    "sim.plan.reverse": ("cheapest", "fewest_gpus", "longest_context"),
    "sim.compare.roofline": ("machine_balance", "roofline"),
    "sim.setup.predict": ("predict",),
    "sim.setup.setup": ("Setup",),
    "sim.compare.sweep": ("sweep",),
    "sim.setup.answers.table": ("Table", "table"),
    "sim.compare.winners": ("winners",),
}
_PACKAGES = ("sim", "topology", "runtime", "calibrate", "experiments")


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'longstep' has no attribute {name!r}: it has {', '.join(__all__)}")
    _require_own_packages()
    importlib.import_module("sim.setup.answers.charts").draw_by(_drawing)
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
