"""The recipe for a GPU with this host in its place: the same steps, fewer and smaller.

Tests import it; ``python -m tests.experiments.recipes.rehearsal PART --out FOLDER`` is what they start where nothing
but torch is installed, so it imports no package before the recipes have looked for theirs.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.recipes.gpu import GpuPlan
    from experiments.verbs.calibrate import Calibrate


def small_plan() -> GpuPlan:
    """Return what a rehearsal covers."""
    from experiments.recipes.gpu import GpuPlan

    return GpuPlan(
        schedules=("single", "ring"), verified="16", model="tiny", alone="256", together="256", ranks="2",
        offloaded="128", steps="128", layers=(2, 3), stacks="fsdp,5m", shared="ulysses", set=("model.vocab_size=512",),
    )  # fmt: skip


def few_points(command: Calibrate, _: object) -> None:
    """Calibrate as of a GPU, one rank at a time, but a few kernels only."""
    from calibrate.gpu import GpuCalibration
    from calibrate.plan import Plan
    from sim.words.profile import save_profile
    from sim.words.workload import load_model
    from topology.cluster import load_cluster

    assert command.out
    plan = Plan("toy", load_model("tiny"), ("fp32",), quick=True, command="test")
    with GpuCalibration(plan, load_cluster("host")) as calibration:
        for step in calibration.steps():
            if step.label == "launch" or "1x256x256x8x" in step.label:
                step.run()
        save_profile(calibration.profile(complete=False), Path(command.out))


def in_place_of_a_gpu(gpus: int) -> dict[str, Any]:
    """Return what of the recipe's is replaced, by name, for a host with so many devices."""
    from sim.words.profile import load_profile

    return {
        "gpu_here": lambda: ("host", "toy"),
        "gpus_here": lambda _: gpus,
        "calibrate": few_points,
        "shipped_of": lambda _: [load_profile("a100-sxm")],
    }


def main() -> None:
    """Run parts of the recipe on this host."""
    from experiments.recipes.carry import use_carried

    use_carried()
    from experiments.recipes import __main__ as recipes
    from experiments.recipes import gpu as recipe

    for name, value in in_place_of_a_gpu(1).items():
        setattr(recipe, name, value)
    recipe.gpu = partial(recipe.gpu, plan=small_plan())
    recipes.main(["gpu", *sys.argv[1:]])


if __name__ == "__main__":
    main()
