"""``python -m experiments.recipes NAME``."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence

from experiments.recipes.carry import use_carried


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the recipe that the command line names, with what was carried to a machine without a network."""
    use_carried()
    from experiments.verbs.cli import guarded

    given = list(sys.argv[1:] if arguments is None else arguments)
    guarded(lambda: _run(given))


def _run(arguments: Sequence[str]) -> None:
    from experiments.recipes.gpu import GPU_PARTS, gpu
    from experiments.verbs.cli import open_console

    parser = argparse.ArgumentParser(prog="python -m experiments.recipes", description="Complete runs with a name.")
    recipes = parser.add_subparsers(dest="recipe", required=True)
    recipes.add_parser("demo", help="calibrate this machine, execute and simulate two schedules, predict 8 x H100")
    costs = recipes.add_parser("bench", help="what building, checking and simulating schedules costs")
    costs.add_argument("--large", action="store_true", help="what whole answers of many GPUs cost, instead")
    recipes.add_parser("sizes", help="what predictions of many sizes take, held against what is told before")
    recipes.add_parser("evidence", help="predict all that was measured anew, and write how far off it is")
    faults = recipes.add_parser("doctor", help="execute clean runs and faults here, and see what the doctor says")
    faults.add_argument("--out", metavar="FOLDER", help="where results go, by default experiments/results/DATE-doctor")
    faults.add_argument("--profile", metavar="NAME", help="of an earlier calibration; by default this machine is now")
    for name, meaning in (("clean", "runs without a fault"), ("faults", "runs with one"), ("steps", "steps of each")):
        faults.add_argument(f"--{name}", type=int, metavar="N", default=argparse.SUPPRESS, help=meaning)
    on_gpu = recipes.add_parser(
        "gpu",
        help="verify, calibrate and compare on a GPU of this machine",
        description="Verify, calibrate and compare on a GPU of this machine. A part whose result is there is left out.",
        epilog="\n".join(["parts, in this order:", *(f"  {part.listed}" for part in GPU_PARTS.values())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    on_gpu.add_argument("parts", nargs="*", metavar="PART", help="see below; by default all")
    on_gpu.add_argument("--out", metavar="FOLDER", help="where results go, by default experiments/results/DATE-GPU")
    on_gpu.add_argument("--profile", metavar="FILE", help="of an earlier calibration, by default FOLDER/profile.json")
    on_gpu.add_argument(
        "--attention", metavar="NAME", default="", help="kernel to verify and calibrate with, by default the fastest"
    )
    on_gpu.add_argument("--seconds", type=float, metavar="N", default=math.inf, help="begin nothing after so long")
    given = parser.parse_args(arguments)
    console = open_console()
    if given.recipe in {"bench", "sizes"}:
        os.environ["LONGSTEP_PROOFS"] = "off"  # they say what a first time takes
    if given.recipe == "gpu":
        named = {name: getattr(given, name) for name in ("out", "profile", "attention", "seconds")}
        gpu(console, *given.parts, **named)
    elif given.recipe == "doctor":
        from experiments.recipes.doctor import doctor

        doctor(console, **{key: value for key, value in vars(given).items() if key != "recipe"})
    elif given.recipe == "evidence":
        from experiments.recipes.evidence import evidence

        evidence(console)
    elif given.recipe == "sizes":
        from experiments.recipes.sizes import sizes

        sizes(console)
    elif given.recipe == "demo":
        from experiments.recipes.demo import demo

        demo(console)
    elif given.large:
        from experiments.recipes.bench_large import bench_large

        bench_large(console)
    else:
        from experiments.recipes.bench import bench

        bench(console)


if __name__ == "__main__":
    main()
